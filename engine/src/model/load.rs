//! From a Hugging Face folder to a model ready for its first step. Reports its progress in bytes, so that a start that
//! makes none can be told from a slow one (S4, H5).

mod leftover;
mod mtp;
mod prepared;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

use crate::backend::cpu::{CpuBackend, Precision};
use crate::backend::cuda::open::{self, DeviceChoice, OpenError};
use crate::backend::{Backend, DeviceFault, Part, WeightShape};
use crate::fault::Faults;
use crate::ranks::{RankBackend, Team};
use crate::sampling::SamplingDefaults;
use crate::start::CacheOptions;
use crate::stuck::Stuck;
use crate::weights::{Gguf, RawWeight, WeightType, WeightsError, WeightsFolder, gguf};

use super::config::{ConfigError, DecoderConfig, Experts, sampling_defaults};
use super::decoder::{Decoder, DecoderWeights, FeedForward, Layer, Linear, Mixture, Mlp};
use super::share::{Share, ShareError, cut};
use super::{LoadProgress, Model, ModelInfo};
use prepared::{Store, prepared};

/// Why a folder cannot be loaded; each message names the file at fault.
#[derive(Debug, Error)]
pub enum LoadError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error("the model cannot be split: {0}")]
    Share(#[from] ShareError),
    #[error("the ranks could not prepare their weights")]
    Prepare(#[from] Stuck),
    #[error(transparent)]
    Device(#[from] OpenError),
    #[error("the weights could not be brought to the device: {0}")]
    ToDevice(DeviceFault),
    #[error("an MTP head is not computed on a CUDA device yet: leave out --speculative mtp or --device")]
    HeadOnDevice,
}

/// How a model is to be computed.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Rounding of inputs.
    pub precision: Precision,
    /// Threads of one operation; `None`: as many as the process may use, 16 at most.
    pub threads: Option<usize>,
    /// The ranks that share the model; `None`: this process has all of it.
    pub team: Option<Arc<Team>>,
    /// Where prepared weights are kept; `None`: nowhere, each rank prepares its own.
    pub cache: Option<CacheOptions>,
    /// Run every step call by call, without programs.
    pub eager: bool,
    /// `None`: the processor computes.
    pub device: Option<DeviceChoice>,
    /// Load the model's MTP head too.
    pub head: bool,
    /// What strikes where a step's program is looked for.
    pub faults: Faults,
}

/// Loads the model in `dir` onto the processor, with the default [`LoadOptions`].
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
    if let Some(choice) = &options.device {
        if options.head {
            return Err(LoadError::HeadOnDevice);
        }
        let backend = open::open(choice, progress)?;
        return match &options.team {
            None => load_model_on(backend, dir, options, progress),
            Some(team) => load_share_on(backend, team, dir, options, progress),
        };
    }
    let (config, folder) = open_files(dir)?;
    // a model in f32 is computed in f32, cache and all
    let embed = folder.weight_type(&format!("{EMBED}.weight"));
    let precision = if embed == Some(WeightType::F32) { Precision::Exact } else { options.precision };
    let backend = options.threads.map_or_else(CpuBackend::default, CpuBackend::new).with_precision(precision);
    match &options.team {
        None => decoder(dir, config, &folder, (backend, Share::WHOLE, options), progress),
        Some(team) => shared(dir, config, &folder, (backend, team, options), progress),
    }
}

/// What holds of `options` on a backend that its caller has made: how steps run, and what strikes there.
fn of_steps(options: &LoadOptions) -> LoadOptions {
    LoadOptions { eager: options.eager, faults: options.faults.clone(), ..LoadOptions::default() }
}

/// As [`load_model`], onto any backend; of `options` whether steps run call by call, and their faults.
///
/// # Errors
/// As [`load_model`].
pub fn load_model_on<B: Backend + 'static>(
    backend: B,
    dir: &Path,
    options: &LoadOptions,
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let (config, folder) = open_files(dir)?;
    let options = of_steps(options);
    decoder(dir, config, &folder, (backend, Share::WHOLE, &options), progress)
}

/// As [`load_model_on`], one rank's share.
///
/// # Errors
/// As [`load_model`]; also where the model cannot be split among so many ranks.
pub fn load_share_on<B: Backend + 'static>(
    backend: B,
    team: &Arc<Team>,
    dir: &Path,
    options: &LoadOptions,
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let (config, folder) = open_files(dir)?;
    let options = of_steps(options);
    shared(dir, config, &folder, (backend, team, &options), progress)
}

/// The longest sequence that the model in `dir` takes; its weights are not read.
///
/// # Errors
/// As [`load_model`].
pub fn longest_sequence(dir: &Path) -> Result<usize, LoadError> {
    let config = match gguf::find(dir) {
        None => DecoderConfig::from_dir(dir)?,
        Some(path) => DecoderConfig::from_gguf(&Gguf::open(&path)?.0, &path)?,
    };
    Ok(config.seq_len_max)
}

/// The share of one rank of the team.
fn shared<B: Backend + 'static>(
    dir: &Path,
    config: DecoderConfig,
    folder: &WeightsFolder,
    (backend, team, options): (B, &Arc<Team>, &LoadOptions),
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let share = Share { rank: team.rank(), world: team.world() };
    share.check(&config)?;
    decoder(dir, config, folder, (RankBackend::new(backend, team.clone()), share, options), progress)
}

fn decoder<B: Backend + 'static>(
    dir: &Path,
    config: DecoderConfig,
    folder: &WeightsFolder,
    (backend, share, options): (B, Share, &LoadOptions),
    progress: LoadProgress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let config = mtp::wanted(config, options.head, dir)?;
    let tied = config.tied_embeddings.unwrap_or_else(|| !folder.contains(LM_HEAD));
    let file = match &options.cache {
        Some(cache) => prepared(cache, &config, folder, (&backend, share, tied), progress)?,
        None => None,
    };
    let of_head = |name: &str| name.starts_with(mtp::TENSORS);
    let used =
        |name: &str| (name.starts_with("model.") && (options.head || !of_head(name))) || (!tied && name == LM_HEAD);
    let total = folder.len_bytes_where(used);
    progress(0, total);
    let store = file.as_ref().map_or(Store::None, Store::Reads);
    let used = BTreeSet::new();
    let mut loader =
        Loader { folder, backend: &backend, config: &config, share, store, progress, done: 0, total, used };
    let (weights, head) = (loader.weights(tied)?, loader.head()?);
    leftover::refuse(folder, &loader.used, &config, tied)?;
    backend.end_step().map_err(LoadError::ToDevice)?;
    let info = model_info(dir, &config);
    let decoder = Decoder::new(backend, share.of_config(&config), info, weights).with_head(head);
    Ok(Box::new(if options.eager { decoder } else { decoder.with_programs().struck_by(&options.faults) }))
}

/// Configuration and weights of a Hugging Face folder, or of the GGUF file that `path` means.
fn open_files(path: &Path) -> Result<(DecoderConfig, WeightsFolder), LoadError> {
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
        // what lies beside a GGUF file is of no folder of its own
        sampling: if gguf::find(dir).is_none() { sampling_defaults(dir) } else { SamplingDefaults::default() },
    }
}

struct Loader<'a, 'p, B> {
    folder: &'a WeightsFolder,
    backend: &'a B,
    config: &'a DecoderConfig,
    share: Share,
    store: Store<'a>,
    progress: LoadProgress<'p>,
    done: u64,
    total: u64,
    /// Names of what was asked for.
    used: BTreeSet<String>,
}

impl<B: Backend> Loader<'_, '_, B> {
    fn weights(&mut self, tied: bool) -> Result<DecoderWeights<B>, WeightsError> {
        let (vocab, hidden) = (self.config.vocab, self.config.hidden);
        let embed_name = format!("{EMBED}.weight");
        let embed = self.matrix(&embed_name, (vocab, hidden), &Part::Whole)?;
        let layers = (0..self.config.layers).map(|index| self.layer(&format!("model.layers.{index}"), Some(index)));
        let layers = layers.collect::<Result<_, _>>()?;
        let norm = self.vector("model.norm.weight", hidden)?;
        // ranks that share a tied head hold its rows once more: as the table they need all, as the head a part
        let head = if tied { &embed_name } else { LM_HEAD };
        let whole = tied && self.share == Share::WHOLE;
        let lm_head =
            if whole { None } else { Some(self.matrix(head, (vocab, hidden), &self.share.gathered(vocab))?) };
        Ok(DecoderWeights { embed, layers, norm, lm_head })
    }

    /// A block, one of the model's own (`index`) or a head's.
    fn layer(&mut self, block: &str, index: Option<usize>) -> Result<Layer<B>, WeightsError> {
        let DecoderConfig { hidden, head_dim, qkv_bias, o_bias, .. } = *self.config;
        let DecoderConfig { heads, kv_heads, .. } = *self.config;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let q_rows = self.share.heads(heads, head_dim);
        let (q_part, kv_part) = (Part::Outputs(q_rows.clone()), Part::Outputs(self.share.kv_heads(kv_heads, head_dim)));
        let name = |part: &str| format!("{block}.{part}");
        let qk_norm = if self.config.arch.has_qk_norm() {
            let q = self.vector(&name("self_attn.q_norm.weight"), head_dim)?;
            Some((q, self.vector(&name("self_attn.k_norm.weight"), head_dim)?))
        } else {
            None
        };
        Ok(Layer {
            input_norm: self.vector(&name("input_layernorm.weight"), hidden)?,
            q: self.linear(&name("self_attn.q_proj"), (q_width, hidden), qkv_bias, &q_part)?,
            k: self.linear(&name("self_attn.k_proj"), (kv_width, hidden), qkv_bias, &kv_part)?,
            v: self.linear(&name("self_attn.v_proj"), (kv_width, hidden), qkv_bias, &kv_part)?,
            o: self.linear(&name("self_attn.o_proj"), (hidden, q_width), o_bias, &Part::Inputs(q_rows))?,
            qk_norm,
            post_norm: self.vector(&name("post_attention_layernorm.weight"), hidden)?,
            feed: self.feed_forward(block, index)?,
        })
    }

    fn feed_forward(&mut self, block: &str, index: Option<usize>) -> Result<FeedForward<B>, WeightsError> {
        let DecoderConfig { intermediate, mlp_bias, hidden, .. } = *self.config;
        let name = format!("{block}.mlp");
        let mixed = |experts: &&Experts| index.is_some_and(|index| experts.layers[index]);
        let Some(experts) = self.config.experts.as_ref().filter(mixed) else {
            return Ok(FeedForward::Dense(self.mlp(&name, intermediate, mlp_bias)?));
        };
        let router = self.linear(&format!("{name}.gate"), (experts.count, hidden), false, &Part::Whole)?;
        let of_number = |number| self.mlp(&format!("{name}.experts.{number}"), experts.intermediate, false);
        let all = (0..experts.count).map(of_number).collect::<Result<_, _>>()?;
        let (per_token, normalised) = (experts.per_token, experts.normalised);
        Ok(FeedForward::Experts(Mixture { router, experts: all, per_token, normalised }))
    }

    fn mlp(&mut self, name: &str, intermediate: usize, bias: bool) -> Result<Mlp<B>, WeightsError> {
        let hidden = self.config.hidden;
        let width = self.share.width(intermediate);
        let outer = Part::Outputs(width.clone());
        Ok(Mlp {
            gate: self.linear(&format!("{name}.gate_proj"), (intermediate, hidden), bias, &outer)?,
            up: self.linear(&format!("{name}.up_proj"), (intermediate, hidden), bias, &outer)?,
            down: self.linear(&format!("{name}.down_proj"), (hidden, intermediate), bias, &Part::Inputs(width))?,
        })
    }

    fn linear(
        &mut self,
        name: &str,
        (outputs, inputs): (usize, usize),
        bias: bool,
        part: &Part,
    ) -> Result<Linear<B>, WeightsError> {
        let weight = self.matrix(&format!("{name}.weight"), (outputs, inputs), part)?;
        let bias = if bias { Some(self.bias(&format!("{name}.bias"), outputs, part)?) } else { None };
        Ok(Linear { weight, bias })
    }

    fn matrix(&mut self, name: &str, (rows, cols): (usize, usize), part: &Part) -> Result<B::Weight, WeightsError> {
        let kind = self.folder.weight_type(name);
        let kind = kind.filter(|kind| self.backend.preparer().is_some_and(|preparer| preparer.prepares(*kind)));
        let ready = kind.and_then(|kind| {
            let shape = part.of_shape(WeightShape { rows, cols, kind });
            let Store::Reads(file) = &self.store else { return None };
            self.backend.prepared(shape, file.get(name, part, shape)?, part)
        });
        let weight = match (ready, &self.store) {
            (Some(weight), _) => weight,
            (None, Store::Writes(..)) => self.prepare(name, (rows, cols), kind.is_some(), part)?,
            (None, _) => self.backend.weight_part(self.cut(name, (rows, cols), part)?, part),
        };
        self.advance(name);
        Ok(weight)
    }

    /// A weight of the files, cut to its part.
    fn cut(&self, name: &str, (rows, cols): (usize, usize), part: &Part) -> Result<RawWeight, WeightsError> {
        cut(self.folder.matrix(name, rows, cols)?, part).ok_or_else(|| {
            let world = self.share.world;
            self.folder.unusable(name, format!("its quantised blocks cannot be split over {world} ranks"))
        })
    }

    /// A bias belongs to outputs: a rank has those of its own.
    fn bias(&mut self, name: &str, len: usize, part: &Part) -> Result<B::Matrix, WeightsError> {
        let mut values = self.folder.vector(name, len)?;
        if let Part::Outputs(mine) = part {
            values = values.get(mine.clone()).map(<[f32]>::to_vec).unwrap_or_default();
        }
        self.advance(name);
        Ok(self.backend.upload(1, values.len(), values))
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<B::Matrix, WeightsError> {
        let values = self.folder.vector(name, len)?;
        self.advance(name);
        Ok(self.backend.upload(1, len, values))
    }

    fn advance(&mut self, name: &str) {
        self.done += self.folder.len_bytes(name);
        self.used.insert(name.to_owned());
        (self.progress)(self.done, self.total);
    }
}
