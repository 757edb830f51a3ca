//! What is read, defaulted and refused.

use std::path::Path;

use serde_json::{Value, json};

use super::raw::RawConfig;
use super::*;
use crate::weights::Gguf;
use crate::weights::gguf::Builder;

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

/// `transformers` takes the base times `(factor * len / max - (factor - 1)) ^ (dim / (dim - 2))`, `len` being at least `max`: times one, as far as
/// a sequence may go here.
#[test]
fn dynamic_scaling_is_none_up_to_the_longest_sequence() {
    let dynamic = parse(json!({"rope_scaling": {"type": "dynamic", "factor": 4.0}})).unwrap();
    assert_eq!(dynamic, parse(json!({})).unwrap());
    assert_eq!(dynamic.seq_len_max, 512);
}

/// Where a file names the positions of training; else what it counts may be what came of it.
#[test]
fn linear_scaling_makes_the_longest_sequence_longer_where_its_base_is_told() {
    let len = |scaling: Value| parse(json!({"rope_scaling": scaling})).map(|config| config.seq_len_max);
    let told =
        |kind: &str, factor: f64| json!({"rope_type": kind, "factor": factor, "original_max_position_embeddings": 128});
    assert_eq!(len(told("linear", 8.0)).unwrap(), 1024);
    assert_eq!(len(json!({"type": "linear", "factor": 2.5})).unwrap(), 512);
    assert_eq!(len(told("yarn", 4.0)).unwrap(), 512);
    for factor in [1e-9, 1e9] {
        let error = len(told("linear", factor)).unwrap_err().to_string();
        assert!(error.contains("`factor`") && error.contains("268435456"), "{error}");
    }
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
        (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "partial_rotary_factor"),
        (json!({"partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}}), "partial_rotary_factor"),
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
    assert_eq!(windows(json!({"architectures": ["MistralForCausalLM"]})), [Some(4096), Some(4096)]);
    let mut qwen = json!({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(qwen.clone()), [None, Some(4096)]);
    qwen["sliding_window"] = json!(null);
    assert_eq!(windows(qwen), [None, None]);
    let qwen = json!({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1});
    assert_eq!(windows(qwen.clone()), [None, Some(8)]);
    let mut off = qwen;
    off["use_sliding_window"] = json!(false);
    assert_eq!(windows(off), [None, None]);
}

/// GGUF's number of a float.
const FLOAT: u32 = 6;

/// A file of one block, two heads of four, with more keys of its architecture.
fn parse_gguf(
    numbers: &[(&str, u32)],
    floats: &[(&str, f32)],
    scaling: Option<&str>,
) -> Result<DecoderConfig, ConfigError> {
    let mut file =
        Builder::default().string("general.architecture", "llama").tensor("token_embd.weight", &[8, 4], 0, &[0; 128]);
    let sizes = [
        ("embedding_length", 8),
        ("feed_forward_length", 16),
        ("block_count", 1),
        ("attention.head_count", 2),
        ("context_length", 64),
    ];
    for (key, value) in sizes.iter().chain(numbers) {
        file = file.u32(&format!("llama.{key}"), *value);
    }
    for (key, value) in floats {
        file = file.pair(&format!("llama.{key}"), FLOAT, &value.to_le_bytes());
    }
    if let Some(scaling) = scaling {
        file = file.string("llama.rope.scaling.type", scaling);
    }
    DecoderConfig::from_gguf(&Gguf::parse(&file.build()).unwrap(), Path::new("m.gguf"))
}

#[test]
fn keys_of_a_gguf_file_that_change_the_maths_are_read_or_refused_by_name() {
    let neutral =
        [("rope.scaling.attn_factor", 1.0), ("rope.scale_linear", 1.0), ("rope.scaling.yarn_log_multiplier", 0.0)];
    let plain = parse_gguf(&[], &[], None).unwrap();
    assert_eq!(parse_gguf(&[("rope.dimension_count", 4)], &neutral, Some("none")).unwrap(), plain);
    let refused = |numbers: &[(&str, u32)], floats: &[(&str, f32)], field: &str| {
        let error = parse_gguf(numbers, floats, None).unwrap_err().to_string();
        assert!(error.contains("m.gguf") && error.contains(&format!("`{field}`")), "{error}");
    };
    refused(&[("rope.dimension_count", 2)], &[], "rope.dimension_count");
    let other = [
        ("rope.scaling.attn_factor", 1.2),
        ("rope.scaling.yarn_attn_factor", 0.5),
        ("rope.scaling.yarn_ext_factor", 0.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.scale_linear", 4.0),
    ];
    for (key, value) in other {
        refused(&[], &[(key, value)], key);
    }
    let betas =
        [("rope.scaling.factor", 4.0), ("rope.scaling.yarn_beta_fast", 400.0), ("rope.scaling.yarn_beta_slow", 200.0)];
    let same = json!({"hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 400.0, "beta_slow": 200.0,
            "original_max_position_embeddings": 100_000}});
    let trained = [("rope.scaling.original_context_length", 100_000)];
    let yarn = parse_gguf(&trained, &betas, Some("yarn")).unwrap().rope_scaling;
    assert_eq!(yarn, parse(same).unwrap().rope_scaling);
    assert_ne!(yarn, parse_gguf(&trained, &betas[..1], Some("yarn")).unwrap().rope_scaling);
}
