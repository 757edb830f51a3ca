//! The few numbers a decoder needs, from `config.json` and `generation_config.json` of a Hugging Face folder.
//! Pure but for reading those two files, and telling what is left out of the second; anything the decoder would compute wrongly is
//! refused here by name.

mod ends;
mod generation;
mod gguf;
mod raw;
mod rope;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::rope::RopeScaling;
pub use generation::sampling_defaults;

/// The decoder families one implementation covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    /// As Llama, with a sliding window.
    Mistral,
    /// As Llama, with biases on Q, K and V.
    Qwen2,
    /// As Llama, with an RMSNorm over each head of Q and K.
    Qwen3,
    /// As Qwen3, with experts in place of one MLP.
    Qwen3Moe,
    /// As Qwen2, with an MTP head.
    MiMo,
}

impl Arch {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Qwen3Moe, Self::MiMo];

    /// Short name, as `/v1/models` and the logs show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::MiMo => "mimo",
        }
    }

    /// Name in `architectures`.
    pub fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::MiMo => "MiMoForCausalLM",
        }
    }

    /// Whether each head of Q and K has a norm.
    pub fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe)
    }
}

/// The experts of a mixture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Experts {
    pub count: usize,
    pub per_token: usize,
    pub intermediate: usize,
    /// The chosen experts' shares are made to sum to one.
    pub normalised: bool,
    /// For each layer: experts, or one MLP.
    pub layers: Vec<bool>,
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
    /// Longest sequence in tokens (`max_position_embeddings`, stretched where linear scaling names its base).
    pub seq_len_max: usize,
    pub norm_eps: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// What each frequency is divided by besides; empty: nothing.
    pub rope_factors: Vec<f32>,
    /// `None` when the file does not say: then the presence of `lm_head.weight` decides.
    pub tied_embeddings: Option<bool>,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// For each layer: how many positions a row sees, its own among them; `None`: all.
    pub windows: Vec<Option<usize>>,
    pub experts: Option<Experts>,
    /// MTP heads behind the last block.
    pub mtp_heads: usize,
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
        let raw: raw::RawConfig = read_json(&path)?;
        let mut config = raw.check(&path)?;
        let generation_path = dir.join("generation_config.json");
        if generation_path.is_file() {
            let generation: raw::RawGeneration = read_json(&generation_path)?;
            // generation_config.json is the later word on where a text ends, as in `transformers`
            if let Some(eos) = generation.eos_token_id {
                config.eos_token_ids = eos.into_vec();
            }
        }
        Ok(config)
    }
}

fn unsupported(path: &Path, field: &'static str, found: String, needed: &str) -> ConfigError {
    ConfigError::Unsupported { path: path.to_owned(), field, found, needed: needed.to_owned() }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, ConfigError> {
    let bytes = std::fs::read(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| ConfigError::Json { path: path.to_owned(), source })
}
