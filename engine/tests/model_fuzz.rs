//! The fuzz targets of a model's files without a fuzzer, on their committed corpus and near it.
#![allow(clippy::unwrap_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::Path;

#[path = "../../fuzz/src/near.rs"]
mod near;
#[path = "../../fuzz/src/models.rs"]
mod targets;

#[test]
fn no_target_breaks_its_promise_on_its_corpus_or_near_it() {
    near::hold(&targets::TARGETS);
}

/// Damage to what was never whole would prove nothing.
#[test]
fn the_whole_models_of_the_corpus_load() {
    let whole =
        |path: &str| std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(path)).unwrap();
    for name in ["sentencepiece", "bytes"] {
        assert!(targets::file_loads(&whole(&format!("gguf_model/{name}"))), "{name}");
    }
    for name in ["llama", "qwen3", "sharded"] {
        assert!(targets::folder_loads(&whole(&format!("model_folder/{name}"))), "{name}");
    }
}
