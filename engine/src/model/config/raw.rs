//! `config.json` as it is written, and what is made of it.

use std::path::Path;

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::{Arch, ConfigError, DecoderConfig, Experts, unsupported};

#[derive(Deserialize)]
pub(super) struct RawConfig {
    #[serde(default)]
    architectures: Option<Vec<String>>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    pub(super) max_position_embeddings: usize,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    pub(super) rope_theta: Option<f64>,
    pub(super) rope_scaling: Option<Value>,
    pub(super) rope_parameters: Option<Value>,
    pub(super) partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    /// A null is an answer here: no window. Where the key is missing the family's own holds.
    #[serde(default, deserialize_with = "said")]
    sliding_window: Option<Option<usize>>,
    max_window_layers: Option<usize>,
    #[serde(alias = "num_local_experts")]
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
    layer_types: Option<Vec<String>>,
    num_nextn_predict_layers: Option<usize>,
    bos_token_id: Option<OneOrMany>,
    eos_token_id: Option<OneOrMany>,
    quantization_config: Option<Value>,
}

/// The value of a key that is there, null or not.
fn said<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// What `transformers` gives the families with a window where the file is silent.
const WINDOW_DEFAULT: usize = 4096;
/// No sequence is longer.
pub(super) const SEQ_LEN_MAX: usize = 1 << 28;

#[derive(Deserialize)]
pub(super) struct RawGeneration {
    pub(super) eos_token_id: Option<OneOrMany>,
}

/// Token ids are written as a number or as a list.
#[derive(Deserialize, Clone)]
#[serde(untagged)]
pub(super) enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    pub(super) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl RawConfig {
    pub(super) fn check(self, path: &Path) -> Result<DecoderConfig, ConfigError> {
        let arch = self.arch(path)?;
        self.refuse_other_maths(path)?;
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        let head_dim = self.head_dim_or_default(arch);
        self.check_sizes(path, kv_heads, head_dim)?;
        let (rope_theta, rope_scaling) = self.rope(path, head_dim)?;
        let seq_len_max = self.seq_len_max(path, rope_scaling)?;
        let windows = self.windows(path, arch)?;
        let experts = if arch == Arch::Qwen3Moe { Some(self.experts(path)?) } else { None };
        let attention_bias = self.attention_bias.unwrap_or(false);
        let (qkv_bias, o_bias) = match arch {
            Arch::Llama | Arch::Qwen3 | Arch::Qwen3Moe => (attention_bias, attention_bias),
            Arch::Qwen2 | Arch::MiMo => (true, false),
            Arch::Mistral => (false, false),
        };
        Ok(DecoderConfig {
            arch,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            layers: self.num_hidden_layers,
            heads: self.num_attention_heads,
            kv_heads,
            head_dim,
            vocab: self.vocab_size,
            seq_len_max,
            norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta,
            rope_scaling,
            rope_factors: Vec::new(),
            tied_embeddings: self.tie_word_embeddings,
            qkv_bias,
            o_bias,
            // only Llama has the switch
            mlp_bias: arch == Arch::Llama && self.mlp_bias.unwrap_or(false),
            windows,
            experts,
            // other families have none, or of another kind
            mtp_heads: self.num_nextn_predict_layers.filter(|_| arch == Arch::MiMo).unwrap_or(0),
            bos_token_id: self.bos_token_id.and_then(|ids| ids.into_vec().first().copied()),
            eos_token_ids: self.eos_token_id.map(OneOrMany::into_vec).unwrap_or_default(),
        })
    }

    fn arch(&self, path: &Path) -> Result<Arch, ConfigError> {
        let names = self.architectures.clone().unwrap_or_default();
        let first = names.first().map(String::as_str).unwrap_or_default();
        let known = Arch::ALL.into_iter().find(|arch| arch.class() == first);
        let all = Arch::ALL.map(Arch::class).join(", ");
        known.ok_or_else(|| unsupported(path, "architectures", format!("{names:?}"), &format!("one of {all}")))
    }

    /// `transformers` gives Qwen3 128 where the file is silent, Llama `hidden / heads`.
    fn head_dim_or_default(&self, arch: Arch) -> usize {
        match (self.head_dim, arch) {
            (Some(head_dim), _) => head_dim,
            (None, Arch::Qwen3) => 128,
            (None, _) => self.hidden_size / self.num_attention_heads.max(1),
        }
    }

    /// Fields that would change the maths in a way the decoder does not know: better no answer than a wrong one.
    fn refuse_other_maths(&self, path: &Path) -> Result<(), ConfigError> {
        if let Some(act) = self.hidden_act.as_deref().filter(|act| !matches!(*act, "silu" | "swish")) {
            return Err(unsupported(path, "hidden_act", act.to_owned(), "`silu`"));
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
            ("max_position_embeddings", self.max_position_embeddings, SEQ_LEN_MAX),
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

    /// Who sees how far back. `layer_types` has the last word where the family knows it.
    fn windows(&self, path: &Path, arch: Arch) -> Result<Vec<Option<usize>>, ConfigError> {
        let layers = self.num_hidden_layers;
        let has_window = match arch {
            Arch::Llama => false,
            Arch::Mistral => true,
            Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen3Moe | Arch::MiMo => self.use_sliding_window.unwrap_or(false),
        };
        let window = self.sliding_window.unwrap_or(Some(WINDOW_DEFAULT)).filter(|_| has_window);
        if window == Some(0) {
            return Err(unsupported(path, "sliding_window", "0".to_owned(), "at least 1, or null"));
        }
        let Some(types) = self.layer_types.as_ref() else {
            let first = if matches!(arch, Arch::Qwen2 | Arch::Qwen3 | Arch::MiMo) {
                self.max_window_layers.unwrap_or(28)
            } else {
                0
            };
            return Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect());
        };
        if types.len() != layers {
            return Err(unsupported(
                path,
                "layer_types",
                format!("{} entries", types.len()),
                &format!("{layers}, one a layer"),
            ));
        }
        let of_type = |kind: &String| match (kind.as_str(), window) {
            ("full_attention", _) => Ok(None),
            ("sliding_attention", Some(window)) => Ok(Some(window)),
            _ => Err(unsupported(
                path,
                "layer_types",
                kind.clone(),
                "`full_attention`, or `sliding_attention` with a window",
            )),
        };
        types.iter().map(of_type).collect()
    }

    fn experts(&self, path: &Path) -> Result<Experts, ConfigError> {
        let sizes = [
            ("num_experts", self.num_experts.unwrap_or(128), 1 << 14),
            ("num_experts_per_tok", self.num_experts_per_tok.unwrap_or(8), self.num_experts.unwrap_or(128)),
            ("moe_intermediate_size", self.moe_intermediate_size.unwrap_or(768), 1 << 22),
            ("decoder_sparse_step", self.decoder_sparse_step.unwrap_or(1), 1 << 12),
        ];
        for (field, found, max) in sizes {
            if found == 0 || found > max {
                return Err(unsupported(path, field, found.to_string(), &format!("a size from 1 to {max}")));
            }
        }
        let [count, per_token, intermediate, step] = sizes.map(|(_, found, _)| found);
        let dense = self.mlp_only_layers.clone().unwrap_or_default();
        let layers =
            (0..self.num_hidden_layers).map(|layer| !dense.contains(&layer) && (layer + 1).is_multiple_of(step));
        let normalised = self.norm_topk_prob.unwrap_or(false);
        Ok(Experts { count, per_token, intermediate, normalised, layers: layers.collect() })
    }
}
