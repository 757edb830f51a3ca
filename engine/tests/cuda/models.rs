//! Whole models on the backend: the reference's logits for every architecture, and steps by graphs with the bits of eager ones (E2).

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::backend::cuda::CudaBackend;
use engine::backend::cuda::driver::Driver;
use engine::model::{KvShape, LogitsWanted, Model, SeqInput, StepBatch, load_model_on};
use safetensors::SafeTensors;

pub use crate::ops::OnHost;
use crate::ops::{EXACT, Make};
use engine::backend::cuda::CudaOptions;

const MODELS: [&str; 8] = [
    "llama",
    "llama-rope3-bias",
    "mistral-window",
    "qwen2-yarn-window",
    "qwen3-tied-bf16",
    "qwen3-moe",
    "gguf/llama-q8_0.gguf",
    "gguf/qwen3-k.gguf",
];
const TOLERANCE: f32 = 2e-3;
const BLOCK: usize = 16;
/// Replayed steps that are compared: a program's first ones run its launches, later ones the graph of them.
const REPLAYED: u64 = 24;
/// For the threads that make programs and graphs; a shim's step takes half a second where much else runs beside it.
const PATIENCE: Duration = Duration::from_secs(600);

/// A golden model; on another machine than the one that built this they lie where TRUEBEAT_GOLDEN says.
pub fn folder(name: &str) -> PathBuf {
    let here = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    std::env::var_os("TRUEBEAT_GOLDEN").map_or_else(here, PathBuf::from).join(name)
}

/// A golden model's tokens and logits.
fn golden(name: &str) -> (Vec<u32>, Vec<Vec<f32>>) {
    let model = folder(name);
    let path = if model.is_dir() { model.join("golden.safetensors") } else { model.with_extension("safetensors") };
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = tensors.tensor("tokens").unwrap();
    let token = |bytes: &[u8; 8]| u32::try_from(i64::from_le_bytes(*bytes)).unwrap();
    let tokens = tokens.data().as_chunks().0.iter().map(token).collect();
    let logits = tensors.tensor("logits").unwrap();
    let values: Vec<f32> = logits.data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    (tokens, values.chunks_exact(logits.shape()[1]).map(<[f32]>::to_vec).collect())
}

pub fn load<D: Driver>(backend: CudaBackend<D>, name: &str, eager: bool) -> Box<dyn Model> {
    let mut model = load_model_on(backend, &folder(name), eager, &mut |_, _| {}).unwrap();
    model.allocate_kv(KvShape { num_blocks: 16, block_size: BLOCK }).unwrap();
    model
}

/// A part of one sequence, that has the first blocks.
pub fn part(tokens: &[u32], start_pos: usize, logits: LogitsWanted) -> SeqInput {
    SeqInput { tokens: tokens.to_vec(), start_pos, block_table: (0..8).collect(), logits }
}

fn reference<D: Driver>(make: Make<'_, D>) {
    for name in MODELS {
        let (tokens, want) = golden(name);
        let mut model = load(make(EXACT), name, true);
        // a chunk, then the rest but one, then a decode: every way through attention
        let (first, last) = (tokens.len() / 3, tokens.len() - 1);
        let mut rows = Vec::new();
        for range in [0..first, first..last, last..tokens.len()] {
            let seqs = vec![part(&tokens[range.clone()], range.start, LogitsWanted::All)];
            rows.extend(model.forward(&StepBatch::of(seqs)).unwrap().rows.concat());
        }
        assert_eq!(rows.len(), want.len(), "{name}");
        for (at, (row, want)) in rows.iter().zip(&want).enumerate() {
            let off = row.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(off <= TOLERANCE, "{name}: row {at} is off by {off}");
        }
        assert!(model.pulse().unwrap().load(Relaxed) > 0, "{name}: layers are counted when they are done");
    }
}
test_backend!(models_match_the_reference, super::reference);

/// The same decode again and again, in two sequences: eager, then recorded, then replayed; every step's logits are those of a model that has no
/// programs and no graphs.
fn replayed<D: Driver>(make: Make<'_, D>) {
    for name in ["qwen3-tied-bf16", "gguf/llama-q8_0.gguf"] {
        let (mut graphs, mut eager) = (load(make(EXACT), name, false), load(make(EXACT), name, true));
        let two = |pos: usize, token: u32| {
            StepBatch::of(vec![
                SeqInput {
                    tokens: vec![token],
                    start_pos: pos,
                    block_table: (0..6).collect(),
                    logits: LogitsWanted::Last,
                },
                SeqInput {
                    tokens: vec![token + 1],
                    start_pos: pos,
                    block_table: (6..12).collect(),
                    logits: LogitsWanted::Last,
                },
            ])
        };
        let since = Instant::now();
        let (mut pos, mut token) = (0, 1);
        // programs and graphs are made by threads of their own: until both are there, and then some
        while graphs.programs().unwrap().replayed.load(Relaxed) < REPLAYED && since.elapsed() < PATIENCE {
            let batch = two(pos % 90, token);
            let (got, want) = (graphs.forward(&batch).unwrap(), eager.forward(&batch).unwrap());
            let bits = |logits: &engine::model::StepLogits| {
                logits.rows.concat().concat().iter().map(|v| v.to_bits()).collect::<Vec<_>>()
            };
            assert!(bits(&got) == bits(&want), "{name}: step {pos}");
            (pos, token) = (pos + 1, (token * 7 + 3) % 50);
        }
        let counts = graphs.programs().unwrap();
        assert!(counts.replayed.load(Relaxed) >= REPLAYED, "{name}: programs were never made");
        assert!(counts.graphs.load(Relaxed) > 0, "{name}: the device ran none as a graph");
    }
}
test_backend!(steps_by_graphs_have_the_bits_of_eager_ones, super::replayed);
