//! What is read, defaulted and refused.

use std::path::Path;

use serde_json::{Value, json};

use super::raw::RawConfig;
use super::*;

fn base() -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512})
}

fn parse(change: Value) -> Result<DecoderConfig, ConfigError> {
    let mut all = base();
    for (key, value) in change.as_object().unwrap() {
        all[key] = value.clone();
    }
    let raw: RawConfig = serde_json::from_value(all).unwrap();
    raw.check(Path::new("config.json"))
}

#[test]
fn defaults_follow_transformers() {
    let llama = parse(json!({})).unwrap();
    assert_eq!((llama.kv_heads, llama.head_dim, llama.rope_theta), (4, 16, 10_000.0));
    let qwen = parse(json!({"architectures": ["Qwen3ForCausalLM"], "eos_token_id": [3, 4]})).unwrap();
    assert_eq!((qwen.head_dim, qwen.eos_token_ids), (128, vec![3, 4]));
}

#[test]
fn both_spellings_of_rope_are_read() {
    let old = json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
    let new = json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}});
    let (old, new) = (parse(old).unwrap(), parse(new).unwrap());
    assert_eq!(old, new);
    assert!(matches!(old.rope_scaling, RopeScaling::Llama3 { .. }) && old.rope_theta == 5e5);
}

#[test]
fn what_would_be_computed_wrongly_is_refused_by_name() {
    let cases = [
        (json!({"architectures": ["GPT2LMHeadModel"]}), "architectures"),
        (json!({"hidden_act": "gelu"}), "hidden_act"),
        (json!({"architectures": ["MistralForCausalLM"], "sliding_window": 0}), "sliding_window"),
        (json!({"layer_types": ["full_attention"]}), "layer_types"),
        (json!({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}), "num_experts_per_tok"),
        (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types"),
        (json!({"rope_scaling": {"type": "longrope", "factor": 4.0}}), "rope_type"),
        (json!({"rope_scaling": {"type": "yarn"}}), "factor"),
        (json!({"rope_scaling": {"type": "linear"}}), "factor"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"head_dim": 7}), "head_dim"),
        (json!({"num_hidden_layers": 0}), "num_hidden_layers"),
        (json!({"quantization_config": {"quant_method": "fp8"}}), "quantization_config"),
    ];
    for (change, field) in cases {
        let error = parse(change.clone()).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("config.json"), "{change}: {error}");
    }
}

#[test]
fn windows_follow_the_family() {
    let windows = |change| parse(change).unwrap().windows;
    assert_eq!(windows(json!({"sliding_window": 8})), [None, None]);
    assert_eq!(windows(json!({"architectures": ["MistralForCausalLM"], "sliding_window": 8})), [Some(8), Some(8)]);
    assert_eq!(windows(json!({"architectures": ["MistralForCausalLM"], "sliding_window": null})), [None, None]);
    let qwen = json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(qwen.clone()), [None, Some(8)]);
    let mut off = qwen;
    off["use_sliding_window"] = json!(false);
    assert_eq!(windows(off), [None, None]);
}
