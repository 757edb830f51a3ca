//! The target `model_folder` under libFuzzer; what it holds is in `src/models.rs`. A panic that the engine itself makes an error of is none here:
//! libFuzzer's hook would end the process before.
#![no_main]

#[path = "../src/models.rs"]
#[allow(dead_code, reason = "the other target is there too")]
mod models;

libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| models::model_folder(data));
