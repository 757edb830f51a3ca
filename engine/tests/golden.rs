//! The decoder against `transformers` in f32, on tiny random models of every architecture (made by scripts/golden.py and golden_gguf.py),
//! for every way the same tokens can go through it; and the promise that the way leaves no trace in any bit (EP4).
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::PathBuf;

use engine::model::{
    KvShape, LoadOptions, LogitsWanted, Model, Precision, SeqInput, StepBatch, load_model, load_model_with,
};
use proptest::prelude::*;
use safetensors::SafeTensors;

const MODELS: [&str; 16] = [
    "llama",
    "llama-tied-bf16",
    "llama-rope3-bias",
    "mistral-window",
    "qwen2-yarn-window",
    "qwen2-linear",
    "qwen3",
    "qwen3-tied-bf16",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "mimo",
    "gguf/llama-q8_0.gguf",
    "gguf/qwen3-k.gguf",
    "gguf/mistral-q8_0.gguf",
    "gguf/qwen2-q8_0.gguf",
    "gguf/qwen3moe-q8_0.gguf",
];
const TOLERANCE: f32 = 1e-3;

struct Golden {
    name: &'static str,
    tokens: Vec<u32>,
    prompt_len: usize,
    logits: Vec<Vec<f32>>,
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn golden(name: &'static str) -> Golden {
    let model = folder(name);
    let path = if model.is_dir() { model.join("golden.safetensors") } else { model.with_extension("safetensors") };
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let integers = |tensor: &str| -> Vec<u32> {
        let data = tensors.tensor(tensor).unwrap().data();
        data.chunks_exact(8).map(|b| u32::try_from(i64::from_le_bytes(b.try_into().unwrap())).unwrap()).collect()
    };
    let logits = tensors.tensor("logits").unwrap();
    let values: Vec<f32> = logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    let logits = values.chunks_exact(logits.shape()[1]).map(<[f32]>::to_vec).collect();
    Golden { name, tokens: integers("tokens"), prompt_len: integers("prompt_len")[0] as usize, logits }
}

fn load(name: &str, block_size: usize) -> Box<dyn Model> {
    load_as(name, block_size, Precision::Exact)
}

fn load_as(name: &str, block_size: usize, precision: Precision) -> Box<dyn Model> {
    let options = LoadOptions { precision, ..LoadOptions::default() };
    let mut model = load_model_with(&folder(name), &options, &mut |_, _| {}).unwrap();
    model.allocate_kv(KvShape { num_blocks: 2 * 128 / block_size + 3, block_size }).unwrap();
    model
}

/// A block table for 128 tokens, scattered: odd or even blocks, from the back.
fn table(block_size: usize, lane: usize) -> Vec<u32> {
    (0..128 / block_size).rev().map(|block| u32::try_from(2 * block + lane).unwrap()).collect()
}

fn seq(tokens: &[u32], start_pos: usize, block_table: Vec<u32>) -> SeqInput {
    SeqInput { tokens: tokens.to_vec(), start_pos, block_table, logits: LogitsWanted::All }
}

/// Runs `tokens` in chunks of the given lengths (the last repeats), alone; gives a row a token.
fn run_alone(model: &mut dyn Model, tokens: &[u32], chunks: &[usize], block_size: usize) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    let mut lens = chunks.iter().chain(std::iter::repeat(chunks.last().unwrap()));
    while rows.len() < tokens.len() {
        let end = tokens.len().min(rows.len() + lens.next().unwrap());
        let seqs = vec![seq(&tokens[rows.len()..end], rows.len(), table(block_size, 0))];
        rows.extend(model.forward(&StepBatch::of(seqs)).unwrap().rows.remove(0));
    }
    rows
}

fn assert_close(golden: &Golden, rows: &[Vec<f32>], how: &str) {
    assert_eq!(rows.len(), golden.logits.len());
    for (pos, (row, want)) in rows.iter().zip(&golden.logits).enumerate() {
        let worst = row.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(row.len() == want.len() && worst <= TOLERANCE, "{} {how}: off by {worst} at {pos}", golden.name);
    }
}

#[test]
fn logits_match_transformers_whichever_way_the_tokens_come() {
    for golden in MODELS.map(golden) {
        let tokens = golden.tokens.clone();
        let mut model = load(golden.name, 16);
        let whole = run_alone(model.as_mut(), &tokens, &[tokens.len()], 16);
        assert_close(&golden, &whole, "in one chunk");
        // prompt in chunks that cross blocks, then token by token, over several block sizes
        let ways: [(&str, &[usize], usize); 4] = [
            ("prompt, then decode", &[golden.prompt_len, 1], 16),
            ("chunks of 5", &[5], 4),
            ("token by token", &[1], 1),
            ("uneven chunks", &[7, 1, 3], 32),
        ];
        for (how, chunks, block_size) in ways {
            let rows = run_alone(load(golden.name, block_size).as_mut(), &tokens, chunks, block_size);
            assert_close(&golden, &rows, how);
            assert!(rows == whole, "{} {how}: not the same bits as in one chunk", golden.name);
        }
    }
}

#[test]
fn a_neighbour_in_the_batch_changes_no_bit() {
    for golden in MODELS.map(golden) {
        let tokens = &golden.tokens;
        let whole = run_alone(load(golden.name, 4).as_mut(), tokens, &[tokens.len()], 4);
        let mut model = load(golden.name, 4);
        // the neighbour runs the same tokens backwards, three tokens behind, in other chunk sizes
        let other: Vec<u32> = tokens.iter().rev().copied().collect();
        let (mut mine, mut theirs) = (0, 0);
        let mut rows = Vec::new();
        while mine < tokens.len() {
            let (my_end, their_end) = (tokens.len().min(mine + 6), other.len().min(theirs + 5));
            let seqs = vec![
                seq(&other[theirs..their_end], theirs, table(4, 1)),
                seq(&tokens[mine..my_end], mine, table(4, 0)),
            ];
            rows.extend(model.forward(&StepBatch::of(seqs)).unwrap().rows.remove(1));
            (mine, theirs) = (my_end, their_end);
        }
        assert_close(&golden, &rows, "beside a neighbour");
        assert!(rows == whole, "{}: a neighbour changed the result", golden.name);
    }
}

/// Inputs rounded to what the weights are made for: the picture stays, and every way of going through gives the same bits.
#[test]
fn native_precision_stays_close_and_deterministic() {
    for golden in MODELS.map(golden) {
        let whole = run_alone(load_as(golden.name, 16, Precision::Native).as_mut(), &golden.tokens, &[64], 16);
        let spread = golden.logits.iter().flatten().fold(0.0f32, |max, value| max.max(value.abs()));
        let off =
            |(row, want): (&Vec<f32>, &Vec<f32>)| row.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let mut worst: Vec<f32> = whole.iter().zip(&golden.logits).map(off).collect();
        worst.sort_by(f32::total_cmp);
        // a token whose experts are nearly tied may go to others; all but a few must not
        let counted = if golden.name.contains("moe") { worst.len() / 2 } else { worst.len() - 1 };
        let tolerance = if golden.name.ends_with("gguf") { 0.06 } else { 0.03 };
        assert!(worst[counted] <= tolerance * spread, "{}: off by {} of {spread}", golden.name, worst[counted]);
        let again = run_alone(load_as(golden.name, 4, Precision::Native).as_mut(), &golden.tokens, &[5, 1, 3], 4);
        assert!(again == whole, "{}: not the same bits in chunks", golden.name);
    }
}

#[test]
fn only_the_rows_asked_for_come_back() {
    let golden = golden("qwen3");
    let mut model = load(golden.name, 8);
    let all = run_alone(model.as_mut(), &golden.tokens[..6], &[6], 8).remove(5);
    let with = |lane, logits| SeqInput { logits, ..seq(&golden.tokens[..6], 0, table(8, lane)) };
    let seqs = vec![with(0, LogitsWanted::None), with(1, LogitsWanted::Last)];
    let rows = model.forward(&StepBatch::of(seqs)).unwrap().rows;
    assert_eq!(rows, [vec![], vec![all]]);
    assert_eq!(model.forward(&StepBatch::default()).unwrap().rows.len(), 0);
}

/// Dynamic scaling begins where no sequence comes: up to there `transformers` computes as without.
#[test]
fn dynamic_rope_changes_no_bit_and_ends_where_it_would() {
    let golden = golden("llama");
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| std::fs::copy(folder(golden.name).join(name), dir.path().join(name)).unwrap();
    copy("model.safetensors");
    let config = std::fs::read(folder(golden.name).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    config["rope_parameters"] = serde_json::json!({"rope_type": "dynamic", "factor": 4.0,
        "rope_theta": config["rope_parameters"]["rope_theta"]});
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let options = LoadOptions { precision: Precision::Exact, ..LoadOptions::default() };
    let mut model = load_model_with(dir.path(), &options, &mut |_, _| {}).unwrap();
    let longest = model.info().seq_len_max;
    assert_eq!(Some(longest as u64), config["max_position_embeddings"].as_u64());
    model.allocate_kv(KvShape { num_blocks: 2 * longest / 16 + 3, block_size: 16 }).unwrap();
    let rows = run_alone(model.as_mut(), &golden.tokens, &[golden.tokens.len()], 16);
    assert_close(&golden, &rows, "with dynamic scaling");
    let plain = run_alone(load(golden.name, 16).as_mut(), &golden.tokens, &[golden.tokens.len()], 16);
    assert!(rows == plain);
    let beyond = StepBatch::of(vec![seq(&[5], longest, (0..=8).collect())]);
    assert!(model.forward(&beyond).unwrap_err().to_string().contains(&format!("the model takes {longest}")));
}

#[test]
fn a_bad_batch_leaves_the_cache_as_it_was() {
    let golden = golden("llama");
    let mut model = load_model(&folder(golden.name), &mut |_, _| {}).unwrap();
    let good = StepBatch::of(vec![seq(&golden.tokens[..4], 0, vec![1])]);
    assert!(model.forward(&good).unwrap_err().to_string().contains("not allocated"));
    model.allocate_kv(KvShape { num_blocks: 2, block_size: 8 }).unwrap();
    model.forward(&good).unwrap();
    let bad = StepBatch::of(vec![seq(&[5], 0, vec![1]), seq(&[9999], 0, vec![0])]);
    assert!(model.forward(&bad).unwrap_err().to_string().contains("token 9999"));
    let next = StepBatch::of(vec![seq(&golden.tokens[4..5], 4, vec![1])]);
    let row = model.forward(&next).unwrap().rows[0][0].clone();
    assert!(row.iter().zip(&golden.logits[4]).all(|(a, b)| (a - b).abs() <= TOLERANCE));
}

fn any_seq() -> impl Strategy<Value = SeqInput> {
    let tokens = proptest::collection::vec(prop_oneof![9 => 0u32..160, 1 => any::<u32>()], 0..6);
    let start = prop_oneof![9 => 0usize..12, 1 => any::<usize>()];
    let table = proptest::collection::vec(prop_oneof![9 => 0u32..12, 1 => any::<u32>()], 0..6);
    let logits = prop_oneof![Just(LogitsWanted::None), Just(LogitsWanted::Last), Just(LogitsWanted::All)];
    (tokens, start, table, logits).prop_map(|(tokens, start_pos, block_table, logits)| SeqInput {
        tokens,
        start_pos,
        block_table,
        logits,
    })
}

proptest! {
    /// Whatever the scheduler asks for: an error, or exactly the rows it wanted.
    #[test]
    fn any_batch_is_refused_or_answered(seqs in proptest::collection::vec(any_seq(), 0..4)) {
        let mut model = load_model(&folder("qwen3"), &mut |_, _| {}).unwrap();
        model.allocate_kv(KvShape { num_blocks: 12, block_size: 4 }).unwrap();
        let wanted: Vec<usize> = seqs.iter().map(|seq| match seq.logits {
            LogitsWanted::None => 0,
            LogitsWanted::Last | LogitsWanted::Drawn(_) => 1,
            LogitsWanted::All => seq.tokens.len(),
        }).collect();
        if let Ok(logits) = model.forward(&StepBatch::of(seqs)) {
            prop_assert_eq!(logits.rows.iter().map(Vec::len).collect::<Vec<_>>(), wanted);
            prop_assert!(logits.rows.iter().flatten().flatten().all(|value| value.is_finite()));
        }
    }
}
