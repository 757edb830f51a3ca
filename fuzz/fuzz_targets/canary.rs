//! The target `canary` under libFuzzer; what it holds is in `src/lib.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| truebeat_fuzz::canary(data));
