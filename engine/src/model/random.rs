//! A model of any size with random weights, made in memory: what benchmarks run, where only the shape and the types matter.

use crate::backend::cpu::{CpuBackend, Precision};
use crate::splitmix::SplitMix64;
use crate::weights::{RawWeight, WeightType};

use super::config::{Arch, DecoderConfig};
use super::decoder::{Decoder, DecoderWeights, FeedForward, Layer, Linear, Mlp};
use super::rope::RopeScaling;
use super::{Model, ModelInfo};
use crate::backend::Backend;

/// Sizes of a dense decoder with tied embeddings and norms on the heads of Q and K.
#[derive(Debug, Clone, Copy)]
pub struct RandomShape {
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub seq_len_max: usize,
}

impl RandomShape {
    /// The sizes of Qwen3-0.6B.
    pub const QWEN3_0_6B: Self = Self {
        hidden: 1024,
        intermediate: 3072,
        layers: 28,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        vocab: 151_936,
        seq_len_max: 40_960,
    };

    /// Weights that every token is multiplied with in the layers.
    pub fn layer_weights(&self) -> usize {
        let attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim;
        self.layers * (attention + 3 * self.hidden * self.intermediate)
    }
}

/// A model whose matrices are of `kind` and whose embedding (and head) is of `embed`; `None` where the sizes are no whole number
/// of their blocks.
pub fn random_model(shape: RandomShape, kind: WeightType, embed: WeightType, threads: usize) -> Option<Box<dyn Model>> {
    random_model_on(on_processor(kind, threads), shape, (kind, embed), false)
}

/// The same model, whose every step runs eagerly.
pub fn eager_random_model(shape: RandomShape, kind: WeightType, threads: usize) -> Option<Box<dyn Model>> {
    random_model_on(on_processor(kind, threads), shape, (kind, kind), true)
}

/// As [`random_model`], on any backend, of matrices and an embedding of these types; `eager`: every step runs call by call.
pub fn random_model_on<B: Backend + 'static>(
    backend: B,
    shape: RandomShape,
    kinds: (WeightType, WeightType),
    eager: bool,
) -> Option<Box<dyn Model>> {
    let decoder = decoder(shape, kinds, backend)?;
    Some(Box::new(if eager { decoder } else { decoder.with_programs() }))
}

fn on_processor(kind: WeightType, threads: usize) -> CpuBackend {
    let precision = if kind == WeightType::F32 { Precision::Exact } else { Precision::Native };
    CpuBackend::new(threads).with_precision(precision)
}

pub(super) fn decoder<B: Backend + 'static>(
    shape: RandomShape,
    (kind, embed): (WeightType, WeightType),
    backend: B,
) -> Option<Decoder<B>> {
    let mut random = SplitMix64(1);
    let config = config(shape);
    let norm = |len: usize| backend.upload(1, len, vec![1.0; len]);
    let mut linear = |rows: usize, cols: usize| {
        let weight = backend.weight(weight(rows, cols, kind, &mut random)?);
        Some(Linear::<B> { weight, bias: None })
    };
    let (hidden, q, kv) = (shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let mut layer = || {
        Some(Layer {
            input_norm: norm(hidden),
            q: linear(q, hidden)?,
            k: linear(kv, hidden)?,
            v: linear(kv, hidden)?,
            o: linear(hidden, q)?,
            qk_norm: Some((norm(shape.head_dim), norm(shape.head_dim))),
            post_norm: norm(hidden),
            feed: FeedForward::Dense(Mlp {
                gate: linear(shape.intermediate, hidden)?,
                up: linear(shape.intermediate, hidden)?,
                down: linear(hidden, shape.intermediate)?,
            }),
        })
    };
    let layers = (0..shape.layers).map(|_| layer()).collect::<Option<_>>()?;
    let embed = backend.weight(weight(shape.vocab, hidden, embed, &mut random)?);
    let weights = DecoderWeights { embed, layers, norm: norm(hidden), lm_head: None };
    let (name, arch) = ("random".to_owned(), config.arch.name().to_owned());
    let (vocab_size, seq_len_max) = (shape.vocab, shape.seq_len_max);
    let info = ModelInfo { name, arch, vocab_size, seq_len_max, ..ModelInfo::default() };
    Some(Decoder::new(backend, config, info, weights))
}

fn config(shape: RandomShape) -> DecoderConfig {
    DecoderConfig {
        arch: Arch::Qwen3,
        hidden: shape.hidden,
        intermediate: shape.intermediate,
        layers: shape.layers,
        heads: shape.heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        vocab: shape.vocab,
        seq_len_max: shape.seq_len_max,
        norm_eps: 1e-6,
        rope_theta: 1e6,
        rope_scaling: RopeScaling::None,
        rope_factors: Vec::new(),
        tied_embeddings: Some(true),
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        windows: vec![None; shape.layers],
        experts: None,
        mtp_heads: 0,
        bos_token_id: None,
        eos_token_ids: Vec::new(),
    }
}

/// Random bits with exponents and scales that keep every value small.
fn weight(rows: usize, cols: usize, kind: WeightType, random: &mut SplitMix64) -> Option<RawWeight> {
    let (_, block_bytes) = kind.block();
    let len = kind.len_bytes(cols)? * rows;
    let mut bytes = vec![0; len];
    // signs and mantissas are random, exponents are given
    let (keep, set) = match kind {
        WeightType::F32 => (0x80ff_ffff_80ff_ffff, 0x3c00_0000_3c00_0000),
        WeightType::F16 => (0x83ff_83ff_83ff_83ff, 0x2000_2000_2000_2000),
        WeightType::Bf16 => (0x80ff_80ff_80ff_80ff, 0x3c00_3c00_3c00_3c00),
        WeightType::Q8_0 | WeightType::Q4K | WeightType::Q6K => (u64::MAX, 0),
    };
    for word in bytes.chunks_mut(8) {
        word.copy_from_slice(&(random.next() & keep | set).to_le_bytes()[..word.len()]);
    }
    let scale = half::f16::from_f32(1e-4).to_le_bytes();
    let blocks = bytes.chunks_exact_mut(block_bytes);
    match kind {
        WeightType::F32 | WeightType::F16 | WeightType::Bf16 => (),
        WeightType::Q8_0 => blocks.for_each(|block| block[..2].copy_from_slice(&scale)),
        WeightType::Q4K => blocks.for_each(|block| block[..4].copy_from_slice(&[scale, scale].concat())),
        WeightType::Q6K => blocks.for_each(|block| block[208..].copy_from_slice(&scale)),
    }
    RawWeight::new(rows, cols, kind, bytes.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{KvShape, LogitsWanted, SeqInput, StepBatch};

    #[test]
    fn every_type_gives_numbers() {
        let kinds =
            [WeightType::F32, WeightType::F16, WeightType::Bf16, WeightType::Q8_0, WeightType::Q4K, WeightType::Q6K];
        let shape = RandomShape {
            hidden: 256,
            intermediate: 512,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            vocab: 300,
            seq_len_max: 64,
        };
        for kind in kinds {
            let mut model = random_model(shape, kind, kind, 1).unwrap();
            model.allocate_kv(KvShape { num_blocks: 1, block_size: 16 }).unwrap();
            let seq =
                SeqInput { tokens: vec![1, 2, 299], start_pos: 0, block_table: vec![0], logits: LogitsWanted::Last };
            let row = model.forward(&StepBatch::of(vec![seq])).unwrap().rows.remove(0).remove(0);
            assert!(row.iter().all(|value| value.is_finite()) && row.iter().any(|value| *value != row[0]), "{kind:?}");
        }
        assert!(random_model(RandomShape { hidden: 100, ..shape }, WeightType::Q8_0, WeightType::Q8_0, 1).is_none());
    }
}
