//! From a Hugging Face folder to a model ready for its first step. Reports its progress in bytes, so that a start that
//! makes none can be told from a slow one (S4, H5).

use std::path::Path;

use thiserror::Error;

use crate::backend::Backend;
use crate::backend::cpu::{CpuBackend, Precision};
use crate::weights::{Gguf, WeightType, WeightsError, WeightsFolder, gguf};

use super::config::{ConfigError, DecoderConfig};
use super::decoder::{Decoder, DecoderWeights, FeedForward, Layer, Linear, Mixture, Mlp};
use super::{LoadProgress, Model, ModelInfo};

/// Why a folder cannot be loaded; each message names the file at fault.
#[derive(Debug, Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
}

/// How a model is to be computed.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Rounding of inputs.
    pub precision: Precision,
    /// Threads of one operation; `None`: as many as the process may use, 16 at most.
    pub threads: Option<usize>,
}

/// Loads the model in `dir` onto the CPU, with the default [`LoadOptions`].
///
/// `progress` is called with bytes done and bytes in all: first with zero done, then after each piece, last with all done.
///
/// # Errors
/// [`LoadError`] naming the file, and the field or tensor in it, that is missing or not as it should be.
pub fn load_model(dir: &Path, progress: LoadProgress<'_>) -> Result<Box<dyn Model>, LoadError> {
    load_model_with(dir, &LoadOptions::default(), progress)
}

/// As [`load_model`], computed as `options` say.
///
/// # Errors
/// As [`load_model`].
pub fn load_model_with(
    dir: &Path,
    options: &LoadOptions,
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let (config, folder) = open(dir)?;
    // a model in f32 is computed in f32, cache and all
    let embed = folder.weight_type(&format!("{EMBED}.weight"));
    let precision = if embed == Some(WeightType::F32) { Precision::Exact } else { options.precision };
    let backend = options.threads.map_or_else(CpuBackend::default, CpuBackend::new).with_precision(precision);
    let tied = config.tied_embeddings.unwrap_or_else(|| !folder.contains(LM_HEAD));
    let used = |name: &str| name.starts_with("model.") || (!tied && name == LM_HEAD);
    let total = folder.len_bytes_where(used);
    progress(0, total);
    let mut loader = Loader { folder: &folder, backend: &backend, config: &config, progress, done: 0, total };
    let weights = loader.weights(tied)?;
    let info = model_info(dir, &config);
    Ok(Box::new(Decoder::new(backend, config, info, weights)))
}

/// Configuration and weights of a Hugging Face folder, or of the GGUF file that `path` means.
fn open(path: &Path) -> Result<(DecoderConfig, WeightsFolder), LoadError> {
    let Some(path) = gguf::find(path) else {
        return Ok((DecoderConfig::from_dir(path)?, WeightsFolder::open(path)?));
    };
    let (file, bytes) = Gguf::open(&path)?;
    let mut config = DecoderConfig::from_gguf(&file, &path)?;
    let factors = file.shape(ROPE_FACTORS).is_some();
    let folder = WeightsFolder::of_gguf(&path, file, bytes);
    if factors {
        config.rope_factors = folder.vector(ROPE_FACTORS, config.head_dim / 2)?;
    }
    Ok((config, folder))
}

/// What each frequency is divided by (GGUF's way to write down Llama 3's scaling).
const ROPE_FACTORS: &str = "rope_freqs.weight";
const EMBED: &str = "model.embed_tokens";
const LM_HEAD: &str = "lm_head.weight";

fn model_info(dir: &Path, config: &DecoderConfig) -> ModelInfo {
    // the folder's own name even when it was given as `.`
    let full = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    ModelInfo {
        name: full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned()),
        arch: config.arch.name().to_owned(),
        vocab_size: config.vocab,
        seq_len_max: config.seq_len_max,
        eos_token_ids: config.eos_token_ids.clone(),
        bos_token_id: config.bos_token_id,
    }
}

struct Loader<'a, 'p, B> {
    folder: &'a WeightsFolder,
    backend: &'a B,
    config: &'a DecoderConfig,
    progress: LoadProgress<'p>,
    done: u64,
    total: u64,
}

impl<B: Backend> Loader<'_, '_, B> {
    fn weights(&mut self, tied: bool) -> Result<DecoderWeights<B>, WeightsError> {
        let (vocab, hidden) = (self.config.vocab, self.config.hidden);
        let embed = self.matrix(&format!("{EMBED}.weight"), vocab, hidden)?;
        let layers = (0..self.config.layers).map(|index| self.layer(index)).collect::<Result<_, _>>()?;
        let norm = self.vector("model.norm.weight", hidden)?;
        let lm_head = if tied { None } else { Some(self.matrix(LM_HEAD, vocab, hidden)?) };
        Ok(DecoderWeights { embed, layers, norm, lm_head })
    }

    fn layer(&mut self, index: usize) -> Result<Layer<B>, WeightsError> {
        let DecoderConfig { hidden, head_dim, qkv_bias, o_bias, .. } = *self.config;
        let (q_width, kv_width) = (self.config.heads * head_dim, self.config.kv_heads * head_dim);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let qk_norm = if self.config.arch.has_qk_norm() {
            let q = self.vector(&name("self_attn.q_norm.weight"), head_dim)?;
            Some((q, self.vector(&name("self_attn.k_norm.weight"), head_dim)?))
        } else {
            None
        };
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            q: self.linear(&name("self_attn.q_proj"), (q_width, hidden), qkv_bias)?,
            k: self.linear(&name("self_attn.k_proj"), (kv_width, hidden), qkv_bias)?,
            v: self.linear(&name("self_attn.v_proj"), (kv_width, hidden), qkv_bias)?,
            o: self.linear(&name("self_attn.o_proj"), (hidden, q_width), o_bias)?,
            qk_norm,
            post_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            feed: self.feed_forward(index)?,
        })
    }

    fn feed_forward(&mut self, layer: usize) -> Result<FeedForward<B>, WeightsError> {
        let DecoderConfig { intermediate, mlp_bias, hidden, .. } = *self.config;
        let name = format!("model.layers.{layer}.mlp");
        let Some(experts) = self.config.experts.as_ref().filter(|experts| experts.layers[layer]) else {
            return Ok(FeedForward::Dense(self.mlp(&name, intermediate, mlp_bias)?));
        };
        let router = self.linear(&format!("{name}.gate"), (experts.count, hidden), false)?;
        let of_number = |number| self.mlp(&format!("{name}.experts.{number}"), experts.intermediate, false);
        let all = (0..experts.count).map(of_number).collect::<Result<_, _>>()?;
        let (per_token, normalised) = (experts.per_token, experts.normalised);
        Ok(FeedForward::Experts(Mixture { router, experts: all, per_token, normalised }))
    }

    fn mlp(&mut self, name: &str, intermediate: usize, bias: bool) -> Result<Mlp<B>, WeightsError> {
        let hidden = self.config.hidden;
        Ok(Mlp {
            gate: self.linear(&format!("{name}.gate_proj"), (intermediate, hidden), bias)?,
            up: self.linear(&format!("{name}.up_proj"), (intermediate, hidden), bias)?,
            down: self.linear(&format!("{name}.down_proj"), (hidden, intermediate), bias)?,
        })
    }

    fn linear(&mut self, name: &str, (outputs, inputs): (usize, usize), bias: bool) -> Result<Linear<B>, WeightsError> {
        let weight = self.matrix(&format!("{name}.weight"), outputs, inputs)?;
        let bias = if bias { Some(self.vector(&format!("{name}.bias"), outputs)?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<B::Weight, WeightsError> {
        let weight = self.backend.weight(self.folder.matrix(name, rows, cols)?);
        self.advance(name);
        Ok(weight)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<B::Matrix, WeightsError> {
        let values = self.folder.vector(name, len)?;
        self.advance(name);
        Ok(self.backend.upload(1, len, values))
    }

    fn advance(&mut self, name: &str) {
        self.done += self.folder.len_bytes(name);
        (self.progress)(self.done, self.total);
    }
}
