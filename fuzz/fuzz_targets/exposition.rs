//! The target `exposition` under libFuzzer; what it holds is in `src/lib.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| truebeat_fuzz::exposition(data));
