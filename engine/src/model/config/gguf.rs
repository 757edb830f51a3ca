//! The metadata of a GGUF file, put as the `config.json` it was made from, so that one set of checks serves both.

use std::path::Path;

use serde_json::{Value, json};

use super::raw::RawConfig;
use super::{Arch, ConfigError, DecoderConfig, ends, unsupported};
use crate::weights::{Gguf, GgufValue};

/// Keys that would change the maths in a way the decoder does not know, and the value that changes nothing.
const OTHER_MATHS: [(&str, f64); 5] = [
    ("rope.scale_linear", 1.0),
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("rope.scaling.yarn_log_multiplier", 0.0),
];

impl DecoderConfig {
    /// What the file at `path` says about its model.
    ///
    /// # Errors
    /// [`ConfigError`] naming the file and the field of `config.json` that the key stands for.
    pub fn from_gguf(gguf: &Gguf, path: &Path) -> Result<Self, ConfigError> {
        let arch = arch(gguf, path)?;
        let key = |key: &str| gguf.metadata.get(&format!("{}.{key}", gguf.text("general.architecture")?));
        for (field, neutral) in OTHER_MATHS {
            if let Some(value) = key(field).filter(|value| value.as_f64() != Some(neutral)) {
                return Err(unsupported(path, field, format!("{value:?}"), &neutral.to_string()));
            }
        }
        let raw: RawConfig = serde_json::from_value(config_json(gguf, arch))
            .map_err(|source| ConfigError::Json { path: path.to_owned(), source })?;
        let mut config = raw.check(path)?;
        let whole = format!("{} (the whole head rotated)", config.head_dim);
        if let Some(part) = key("rope.dimension_count").filter(|part| part.as_u64() != Some(config.head_dim as u64)) {
            return Err(unsupported(path, "rope.dimension_count", format!("{part:?}"), &whole));
        }
        config.tied_embeddings = None; // the file has a head, or it has none
        config.eos_token_ids = ends::of_gguf(gguf);
        Ok(config)
    }
}

fn arch(gguf: &Gguf, path: &Path) -> Result<Arch, ConfigError> {
    match gguf.text("general.architecture") {
        // Mistral's files say llama: the same but for a window, which is a key of its own
        Some("llama") if gguf.number("llama.attention.sliding_window").is_some() => Ok(Arch::Mistral),
        Some("llama") => Ok(Arch::Llama),
        Some("qwen2") => Ok(Arch::Qwen2),
        Some("qwen3") => Ok(Arch::Qwen3),
        Some("qwen3moe") => Ok(Arch::Qwen3Moe),
        other => {
            let needed = "`llama`, `qwen2`, `qwen3` or `qwen3moe`";
            Err(unsupported(path, "general.architecture", format!("{other:?}"), needed))
        }
    }
}

fn config_json(gguf: &Gguf, arch: Arch) -> Value {
    let prefix = gguf.text("general.architecture").unwrap_or_default();
    let value = |key: &str| gguf.metadata.get(&format!("{prefix}.{key}"));
    let whole = |key: &str| value(key).and_then(GgufValue::as_u64);
    let float = |key: &str| value(key).and_then(GgufValue::as_f64);
    let biased = |part: &str| gguf.shape(&format!("model.layers.0.self_attn.{part}.bias")).is_some();
    let mut config = json!({
        "architectures": [arch.class()],
        "hidden_size": whole("embedding_length"),
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": whole("attention.head_count"),
        "num_key_value_heads": whole("attention.head_count_kv"),
        "head_dim": whole("attention.key_length"),
        "vocab_size": gguf.shape("model.embed_tokens.weight").and_then(|shape| shape.first().copied()),
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": float("attention.layer_norm_rms_epsilon"),
        "rope_theta": float("rope.freq_base"),
        "attention_bias": biased("q_proj") && biased("o_proj"),
        "sliding_window": whole("attention.sliding_window"),
        "bos_token_id": gguf.number("tokenizer.ggml.bos_token_id"),
    });
    let kind = value("rope.scaling.type").and_then(GgufValue::as_str).filter(|kind| *kind != "none");
    if let Some(kind) = kind {
        config["rope_scaling"] = json!({
            "rope_type": kind,
            "factor": float("rope.scaling.factor"),
            "beta_fast": float("rope.scaling.yarn_beta_fast"),
            "beta_slow": float("rope.scaling.yarn_beta_slow"),
            "original_max_position_embeddings": whole("rope.scaling.original_context_length"),
        });
    }
    if arch == Arch::Qwen3Moe {
        config["num_experts"] = json!(whole("expert_count"));
        config["num_experts_per_tok"] = json!(whole("expert_used_count"));
        config["moe_intermediate_size"] = json!(whole("expert_feed_forward_length"));
        // the converters of this family keep no key for it: the published models all normalise
        config["norm_topk_prob"] = json!(true);
    }
    config
}
