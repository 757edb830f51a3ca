//! Whole models on the backend: the reference's logits for every architecture, and steps by graphs with the bits of eager ones (E2).

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::backend::cuda::driver::Driver;
use engine::backend::cuda::image::names;
use engine::backend::cuda::{CudaBackend, KvFormat, Variant};
use engine::model::{
    KvShape, LoadOptions, LogitsWanted, Model, RandomShape, SeqInput, StepBatch, load_model_on, random_model_on,
};
use safetensors::SafeTensors;

use crate::host;
pub use crate::ops::OnHost;
use crate::ops::{EXACT, Make};
use engine::backend::cuda::CudaOptions;
use engine::sampling::{Draw, Sampler, SamplingParams};
use engine::weights::WeightType;

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
/// Of those, the ones whose weights are in bf16.
const IN_BF16: [&str; 4] = ["mistral-window", "qwen3-tied-bf16", "qwen3-moe", "gguf/qwen3-k.gguf"];
const TOLERANCE: f32 = 2e-3;
/// Where inputs are rounded to bf16, as those of tensor cores are; of the spread of the logits.
const TOLERANCE_BF16: f32 = 0.03;
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
    let options = LoadOptions { eager, ..LoadOptions::default() };
    let mut model = load_model_on(backend, &folder(name), &options, &mut |_, _| {}).unwrap();
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
            let spread = want.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
            let tolerance = if IN_BF16.contains(&name) { TOLERANCE_BF16 * spread } else { TOLERANCE };
            assert!(off <= tolerance, "{name}: row {at} is off by {off}, of {spread}");
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

/// Steps whose rows are wide enough for the kernels that a graph fuses: those for up to 8, 16 and 32 rows and for more, and norms of wide rows.
const WIDE: RandomShape = RandomShape {
    hidden: 512,
    intermediate: 192,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    head_dim: 32,
    vocab: 64,
    seq_len_max: 64,
};

fn fused<D: Driver>(make: Make<'_, D>) {
    let (f32, bf16) = (KvFormat::F32, KvFormat::Bf16);
    for (seqs, kernel, kv) in [
        (2, "", f32),
        (12, "", bf16),
        (24, "", f32),
        (40, "", bf16),
        (40, "wgmma_128", f32),
        (40, "wgmma_64_halves", f32),
        (70, "wgmma_128_halves", bf16),
    ] {
        let load = |eager| {
            let types = (WeightType::Bf16, WeightType::Bf16);
            let options = CudaOptions { kv, many_rows: Variant::named(kernel), ..EXACT };
            let mut model = random_model_on(make(options), WIDE, types, eager).unwrap();
            model.allocate_kv(KvShape { num_blocks: 4 * seqs, block_size: BLOCK }).unwrap();
            model
        };
        let (mut graphs, mut eager) = (load(false), load(true));
        let step = |pos: usize| {
            let seq = |index: usize| SeqInput {
                tokens: vec![((index * 7 + pos) % 64) as u32],
                start_pos: pos,
                block_table: (index as u32 * 4..(index as u32 + 1) * 4).collect(),
                logits: LogitsWanted::Last,
            };
            StepBatch::of((0..seqs).map(seq).collect())
        };
        let (since, mut pos) = (Instant::now(), 0);
        // two steps by a graph, wherever the threads that make it are
        while graphs.programs().unwrap().graphs.load(Relaxed) < 2 && since.elapsed() < PATIENCE {
            let (got, want) = (graphs.forward(&step(pos)).unwrap(), eager.forward(&step(pos)).unwrap());
            assert!(got.rows.concat() == want.rows.concat(), "{seqs} sequences at {pos} {kernel}");
            pos = (pos + 1) % 60;
        }
        assert!(graphs.programs().unwrap().graphs.load(Relaxed) >= 2, "{seqs}: no step ran as a graph");
    }
}
test_backend!(fused_graphs_have_the_bits_of_eager_steps, super::fused_by_all);

/// And all forms of products of many rows were launched, where that can be seen: on the shim.
fn fused_by_all<D: Driver>(make: Make<'_, D>) {
    fused(make);
    let launched = host::launched();
    let many = names().filter(|name| name.starts_with("wgmma_"));
    let missing: Vec<_> = many.filter(|name| !launched.contains(name)).collect();
    assert!(missing.is_empty() || launched.is_empty(), "not launched: {missing:?}");
}

/// Tokens that the device draws are those that its rows would have given, by graphs as well, and beside a sequence that wants its row.
fn drawn<D: Driver>(make: Make<'_, D>) {
    let name = "qwen3-tied-bf16";
    let (mut model, mut rows) = (load(make(EXACT), name, false), load(make(EXACT), name, true));
    assert!(model.draws());
    let seq = |token: u32, pos: usize, first: u32, logits| SeqInput {
        tokens: vec![token],
        start_pos: pos,
        block_table: (first..first + 6).collect(),
        logits,
    };
    let greedy = LogitsWanted::Drawn(Draw { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, unit: 0.0 });
    let mut sampler = Sampler::new(SamplingParams { temperature: 0.0, ..SamplingParams::default() }, 0);
    let (mut token, mut replays) = (1, 0);
    for pos in 0..90 {
        let batch = |logits| StepBatch::of(vec![seq(token, pos, 0, logits), seq(token + 1, pos, 6, logits)]);
        let (got, want) = (model.forward(&batch(greedy)).unwrap(), rows.forward(&batch(LogitsWanted::Last)).unwrap());
        let want: Vec<_> = want.rows.iter().map(|rows| Some(sampler.sample(&rows[0]).unwrap().token)).collect();
        assert_eq!((got.drawn, got.rows), (want.clone(), vec![Vec::<Vec<f32>>::new(); 2]), "step {pos}");
        token = want[0].unwrap() % 50;
        replays = model.programs().unwrap().graphs.load(Relaxed);
    }
    assert!(replays > 0, "the device ran none as a graph");
    let mixed = vec![seq(token, 90, 0, greedy), seq(token, 90, 6, LogitsWanted::Last)];
    let got = model.forward(&StepBatch::of(mixed)).unwrap();
    assert_eq!((got.rows.iter().map(Vec::len).collect::<Vec<_>>(), got.drawn.len()), (vec![1, 1], 0));
}
test_backend!(the_device_draws_what_its_rows_would_give, super::drawn);
