//! `config.json` and `generation_config.json` of a Hugging Face folder, read into the few numbers the decoder needs.
//! Pure but for reading those two files; anything the decoder would compute wrongly is refused here by name.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::rope::RopeScaling;

/// The decoder families one implementation covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    /// As Llama, with an RMSNorm over each head of Q and K.
    Qwen3,
}

impl Arch {
    /// Short name, as `/v1/models` and the logs show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Everything about the shape of a decoder; sizes are checked, so products of two of them do not overflow.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    pub arch: Arch,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    /// Longest sequence in tokens (`max_position_embeddings`).
    pub seq_len_max: usize,
    pub norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// `None` when the file does not say: then the presence of `lm_head.weight` decides.
    pub tied_embeddings: Option<bool>,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub bos_token_id: Option<u32>,
    pub eos_token_ids: Vec<u32>,
}

/// Why a configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is not a model configuration: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: `{field}` is {found}, which this engine cannot run; it needs {needed}")]
    Unsupported { path: PathBuf, field: &'static str, found: String, needed: String },
}

impl DecoderConfig {
    /// Reads `config.json` (and `generation_config.json` where there is one) from `dir`.
    ///
    /// # Errors
    /// [`ConfigError`] naming the file and, where it is one field's fault, the field.
    pub fn from_dir(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let raw: RawConfig = read_json(&path)?;
        let mut config = raw.check(&path)?;
        let generation_path = dir.join("generation_config.json");
        if generation_path.is_file() {
            let generation: RawGeneration = read_json(&generation_path)?;
            // generation_config.json is the later word on where a text ends, as in `transformers`
            if let Some(eos) = generation.eos_token_id {
                config.eos_token_ids = eos.into_vec();
            }
        }
        Ok(config)
    }
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    max_position_embeddings: usize,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    layer_types: Option<Vec<String>>,
    bos_token_id: Option<OneOrMany>,
    eos_token_id: Option<OneOrMany>,
    quantization_config: Option<Value>,
}

#[derive(Deserialize)]
struct RawGeneration {
    eos_token_id: Option<OneOrMany>,
}

/// Token ids are written as a number or as a list.
#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl RawConfig {
    fn check(self, path: &Path) -> Result<DecoderConfig, ConfigError> {
        let arch = self.arch(path)?;
        self.refuse_other_maths(path)?;
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        let head_dim = self.head_dim_or_default(arch);
        self.check_sizes(path, kv_heads, head_dim)?;
        let (rope_theta, rope_scaling) = self.rope(path)?;
        Ok(DecoderConfig {
            arch,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads,
            head_dim,
            vocab: self.vocab_size,
            seq_len_max: self.max_position_embeddings,
            norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            tied_embeddings: self.tie_word_embeddings,
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: self.mlp_bias.unwrap_or(false),
            bos_token_id: self.bos_token_id.and_then(|ids| ids.into_vec().first().copied()),
            eos_token_ids: self.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
        })
    }

    fn arch(&self, path: &Path) -> Result<Arch, ConfigError> {
        let names = self.architectures.clone().unwrap_or_default();
        match names.first().map(String::as_str) {
            Some("LlamaForCausalLM") => Ok(Arch::Llama),
            Some("Qwen3ForCausalLM") => Ok(Arch::Qwen3),
            _ => Err(unsupported(path, "architectures", format!("{names:?}"), "LlamaForCausalLM or Qwen3ForCausalLM")),
        }
    }

    /// `transformers` gives Qwen3 128 where the file is silent, Llama `hidden / heads`.
    fn head_dim_or_default(&self, arch: Arch) -> usize {
        match (self.head_dim, arch) {
            (Some(head_dim), _) => head_dim,
            (None, Arch::Qwen3) => 128,
            (None, Arch::Llama) => self.hidden_size / self.num_attention_heads.max(1),
        }
    }

    /// Fields that would change the maths in a way the decoder does not know: better no answer than a wrong one.
    fn refuse_other_maths(&self, path: &Path) -> Result<(), ConfigError> {
        if let Some(act) = self.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
            return Err(unsupported(path, "hidden_act", act.to_owned(), "`silu`"));
        }
        if self.use_sliding_window == Some(true) {
            return Err(unsupported(path, "use_sliding_window", "true".to_owned(), "full attention in every layer"));
        }
        let sliding = self.layer_types.iter().flatten().find(|kind| *kind != "full_attention");
        if let Some(kind) = sliding {
            return Err(unsupported(path, "layer_types", kind.clone(), "`full_attention` in every layer"));
        }
        if let Some(quantization) = self.quantization_config.as_ref().filter(|value| !value.is_null()) {
            let method = quantization.get("quant_method").cloned().unwrap_or(Value::Null);
            return Err(unsupported(path, "quantization_config", method.to_string(), "weights in f32, bf16 or f16"));
        }
        Ok(())
    }

    fn check_sizes(&self, path: &Path, kv_heads: usize, head_dim: usize) -> Result<(), ConfigError> {
        // generous caps: they only keep every later product of sizes far from overflow
        let sizes = [
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 22),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 12),
            ("num_attention_heads", self.num_attention_heads, 1 << 12),
            ("num_key_value_heads", kv_heads, 1 << 12),
            ("head_dim", head_dim, 1 << 14),
            ("vocab_size", self.vocab_size, 1 << 26),
            ("max_position_embeddings", self.max_position_embeddings, 1 << 28),
        ];
        for (field, found, max) in sizes {
            if found == 0 || found > max {
                return Err(unsupported(path, field, found.to_string(), &format!("a size from 1 to {max}")));
            }
        }
        if !self.num_attention_heads.is_multiple_of(kv_heads) {
            let needed = format!("a divisor of num_attention_heads ({})", self.num_attention_heads);
            return Err(unsupported(path, "num_key_value_heads", kv_heads.to_string(), &needed));
        }
        if !head_dim.is_multiple_of(2) {
            return Err(unsupported(path, "head_dim", head_dim.to_string(), "an even number"));
        }
        Ok(())
    }

    /// Base and scaling of RoPE, from either spelling: `rope_theta` + `rope_scaling`, or the nested `rope_parameters`.
    fn rope(&self, path: &Path) -> Result<(f64, RopeScaling), ConfigError> {
        let nested = self.rope_parameters.as_ref().filter(|value| !value.is_null());
        // some files keep one set of parameters per kind of layer; only full attention exists here
        let nested = nested.map(|value| value.get("full_attention").unwrap_or(value));
        let parameters = nested.or(self.rope_scaling.as_ref()).unwrap_or(&Value::Null);
        let number = |key: &str| parameters.get(key).and_then(Value::as_f64);
        let theta = number("rope_theta").or(self.rope_theta).unwrap_or(10_000.0);
        let kind = parameters.get("rope_type").or_else(|| parameters.get("type")).and_then(Value::as_str);
        if let Some(part) = number("partial_rotary_factor").filter(|part| (*part - 1.0).abs() > f64::EPSILON) {
            return Err(unsupported(path, "partial_rotary_factor", part.to_string(), "1.0 (the whole head rotated)"));
        }
        let need = |key: &'static str| {
            number(key)
                .filter(|value| value.is_finite() && *value > 0.0)
                .ok_or_else(|| unsupported(path, key, "missing or not positive".to_owned(), "a positive number"))
        };
        let scaling = match kind {
            None | Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: need("factor")? },
            Some("llama3") => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_len: need("original_max_position_embeddings")?,
            },
            Some(other) => {
                return Err(unsupported(path, "rope_type", other.to_owned(), "`default`, `linear` or `llama3`"));
            }
        };
        if !theta.is_finite() || theta <= 1.0 {
            return Err(unsupported(path, "rope_theta", theta.to_string(), "a number above 1"));
        }
        Ok((theta, scaling))
    }
}

fn unsupported(path: &Path, field: &'static str, found: String, needed: &str) -> ConfigError {
    ConfigError::Unsupported { path: path.to_owned(), field, found, needed: needed.to_owned() }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    let bytes = std::fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| ConfigError::Json { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

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
            (json!({"use_sliding_window": true}), "use_sliding_window"),
            (json!({"layer_types": ["full_attention", "sliding_attention"]}), "layer_types"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}), "rope_type"),
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
}
