//! The fuzz targets of a model's files without a fuzzer, on their committed corpus and near it; and the corpus itself, which reaches every
//! refusal of the parsers (`model_seeds`).
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests: a surprise must fail the test")]

mod model_seeds;
#[path = "../../fuzz/src/near.rs"]
mod near;
#[path = "../../fuzz/src/models.rs"]
mod targets;

use model_seeds::corpus_file;

#[test]
fn no_target_breaks_its_promise_on_its_corpus_or_near_it() {
    near::hold(&targets::TARGETS);
}

/// Damage to what was never whole would prove nothing.
#[test]
fn the_whole_models_of_the_corpus_load() {
    let whole = |path: &str| std::fs::read(corpus_file(path)).unwrap();
    for name in ["sentencepiece", "bytes"] {
        assert_eq!(targets::file_refusals(&whole(&format!("gguf_model/{name}"))), [""; 0], "{name}");
    }
    for name in ["llama", "qwen3", "sharded"] {
        assert_eq!(targets::folder_refusals(&whole(&format!("model_folder/{name}"))), [""; 0], "{name}");
    }
}
