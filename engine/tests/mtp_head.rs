//! The MTP head against a reference in torch (`mimo_values` of scripts/golden.py), whichever way the model and its head come to their tokens;
//! and folders whose head is not what it should be. The reference is the project's own class: `transformers` has no such head.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::{Path, PathBuf};

use engine::backend::cuda::open::DeviceChoice;
use engine::model::{KvShape, LoadOptions, LogitsWanted, Model, Pass, Precision, SeqInput, StepBatch, load_model_with};
use safetensors::SafeTensors;
use serde_json::{Value, json};

const TOLERANCE: f32 = 1e-3;

struct Golden {
    tokens: Vec<u32>,
    guesses: Vec<u32>,
    /// Of the model; of its head, from the second token on; of the guesses.
    logits: Vec<Vec<f32>>,
    head_logits: Vec<Vec<f32>>,
    guess_logits: Vec<Vec<f32>>,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/mimo")
}

fn golden() -> Golden {
    let bytes = std::fs::read(folder().join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let integers = |name: &str| -> Vec<u32> {
        let data = tensors.tensor(name).unwrap().data();
        data.chunks_exact(8).map(|b| u32::try_from(i64::from_le_bytes(b.try_into().unwrap())).unwrap()).collect()
    };
    let rows = |name: &str| -> Vec<Vec<f32>> {
        let tensor = tensors.tensor(name).unwrap();
        let values: Vec<f32> =
            tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        values.chunks_exact(tensor.shape()[1]).map(<[f32]>::to_vec).collect()
    };
    let [logits, head_logits, guess_logits] = ["logits", "head_logits", "guess_logits"].map(rows);
    Golden { tokens: integers("tokens"), guesses: integers("guesses"), logits, head_logits, guess_logits }
}

fn load(options: LoadOptions, block_size: usize) -> Box<dyn Model> {
    let options = LoadOptions { precision: Precision::Exact, ..options };
    let mut model = load_model_with(&folder(), &options, &mut |_, _| {}).unwrap();
    model.allocate_kv(KvShape { num_blocks: 2 * 128 / block_size, block_size }).unwrap();
    model
}

fn with_head() -> LoadOptions {
    LoadOptions { head: true, ..LoadOptions::default() }
}

/// A block table for 128 tokens, scattered: odd or even blocks, from the back.
fn table(block_size: usize, lane: usize) -> Vec<u32> {
    (0..128 / block_size).rev().map(|block| u32::try_from(2 * block + lane).unwrap()).collect()
}

fn seq(tokens: &[u32], start_pos: usize, block_table: Vec<u32>, logits: LogitsWanted) -> SeqInput {
    SeqInput { tokens: tokens.to_vec(), start_pos, block_table, logits }
}

/// Has `tokens` from `from` on read in chunks of `chunk`, by the model or its head; gives a row a token.
fn read(
    model: &mut dyn Model,
    pass: Pass,
    (tokens, from): (&[u32], usize),
    (chunk, block_size): (usize, usize),
) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    for (index, part) in tokens[from..].chunks(chunk).enumerate() {
        let mine = seq(part, from + index * chunk, table(block_size, 0), LogitsWanted::All);
        rows.extend(model.forward(&StepBatch { seqs: vec![mine], pass }).unwrap().rows.remove(0));
    }
    rows
}

fn assert_close(rows: &[Vec<f32>], golden: &[Vec<f32>], what: &str) {
    assert_eq!(rows.len(), golden.len(), "{what}");
    for (place, (row, want)) in rows.iter().zip(golden).enumerate() {
        let worst = row.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(row.len() == want.len() && worst <= TOLERANCE, "{what}: off by {worst} at {place}");
    }
}

#[test]
fn the_heads_logits_match_the_reference_whichever_way_the_tokens_come() {
    let golden = golden();
    let tokens = &golden.tokens;
    let mut first = None;
    for (of_model, of_head, block_size) in [(64, 64, 16), (1, 64, 16), (5, 3, 4), (7, 1, 1), (3, 16, 32)] {
        let mut model = load(with_head(), block_size);
        let logits = read(model.as_mut(), Pass::Model, (tokens, 0), (of_model, block_size));
        assert_close(&logits, &golden.logits, "the model");
        // the first row is made of a state that is not there: nobody asks for it
        let rows = read(model.as_mut(), Pass::Head, (tokens, 0), (of_head, block_size)).split_off(1);
        assert_close(&rows, &golden.head_logits, "the head");
        assert!(*first.get_or_insert_with(|| rows.clone()) == rows, "chunks of {of_model} and {of_head} change bits");
    }
}

#[test]
fn a_guess_stands_on_the_one_before_and_leaves_nothing_behind() {
    let golden = golden();
    let (tokens, count) = (&golden.tokens, golden.tokens.len());
    let mut model = load(with_head(), 4);
    // the newest token is the head's alone, as in a decode
    let rows = read(model.as_mut(), Pass::Model, (&tokens[..count - 1], 0), (9, 4));
    assert_close(&rows, &golden.logits[..count - 1], "the model");
    let (mut input, mut start, mut rows) = (tokens.clone(), 0, Vec::new());
    for guess in &golden.guesses {
        // a neighbour that guesses too, of other tokens
        let other = seq(&tokens[..3], 0, table(4, 1), LogitsWanted::Last);
        let mine = seq(&input, start, table(4, 0), LogitsWanted::Last);
        let batch = StepBatch { seqs: vec![other, mine], pass: Pass::Head };
        rows.extend(model.forward(&batch).unwrap().rows.remove(1));
        let last = rows.last().unwrap();
        let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b])).unwrap();
        assert_eq!(u32::try_from(best).unwrap(), *guess);
        (start, input) = (start + input.len(), vec![*guess]);
    }
    assert_close(&rows, &golden.guess_logits, "guesses");
    // the model goes on as if nobody had guessed, and the head after it
    let newest = read(model.as_mut(), Pass::Model, (tokens, count - 1), (1, 4));
    assert_close(&newest, &golden.logits[count - 1..], "the model after the guesses");
    let again = read(model.as_mut(), Pass::Head, (tokens, count - 2), (2, 4));
    assert_close(&again, &golden.head_logits[count - 3..], "the head after the guesses");
}

#[test]
fn a_head_changes_no_bit_of_the_model_with_programs_or_without() {
    let tokens = golden().tokens;
    let run = |head: bool, eager: bool| {
        let mut model = load(LoadOptions { head, eager, ..LoadOptions::default() }, 16);
        assert_eq!(model.has_head(), head);
        read(model.as_mut(), Pass::Model, (&tokens, 0), (1, 16))
    };
    let plain = run(false, true);
    assert!([(true, true), (true, false), (false, false)].iter().all(|(head, eager)| run(*head, *eager) == plain));
}

#[test]
fn what_programs_make_is_kept_for_the_head_as_well() {
    let golden = golden();
    let mut model = load(with_head(), 16);
    let counts = model.programs().unwrap();
    let replayed = || counts.replayed.load(std::sync::atomic::Ordering::Relaxed);
    let since = std::time::Instant::now();
    // a decode's shape is captured elsewhere; again and again until it is there
    while replayed() < golden.tokens.len() as u64 {
        read(model.as_mut(), Pass::Model, (&golden.tokens, 0), (1, 16));
        assert!(since.elapsed().as_secs() < 60, "no program within a minute");
    }
    let other = seq(&[1, 2, 3], 0, table(16, 1), LogitsWanted::None);
    model.forward(&StepBatch::of(vec![other])).unwrap();
    let rows = read(model.as_mut(), Pass::Head, (&golden.tokens, 0), (64, 16)).split_off(1);
    assert_close(&rows, &golden.head_logits, "the head behind programs");
}

#[test]
fn a_model_without_a_head_refuses_its_passes() {
    let mut model = load(LoadOptions::default(), 16);
    let batch = StepBatch { seqs: vec![seq(&[1], 0, vec![0], LogitsWanted::Last)], pass: Pass::Head };
    assert!(model.forward(&batch).unwrap_err().to_string().contains("no head"));
}

/// The folder with `config` changed, and the header of its weights.
fn changed(dir: &Path, config: impl FnOnce(&mut Value), header: impl FnOnce(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&std::fs::read(folder().join("config.json")).unwrap()).unwrap();
    config(&mut json);
    std::fs::write(dir.join("config.json"), json.to_string()).unwrap();
    let bytes = std::fs::read(folder().join("model.safetensors")).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut json: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    header(&mut json);
    let json = json.to_string().into_bytes();
    let all = [&(json.len() as u64).to_le_bytes()[..], &json, &bytes[8 + len..]].concat();
    std::fs::write(dir.join("model.safetensors"), all).unwrap();
}

#[test]
fn a_head_that_cannot_be_used_is_named_and_the_model_still_runs_without_it() {
    const INPUT: &str = "model.mtp_layers.0.input_proj.weight";
    let same = |_: &mut Value| ();
    type Change = Box<dyn FnOnce(&mut Value)>;
    let heads = |count: Value| -> Change { Box::new(move |config| config["num_nextn_predict_layers"] = count) };
    let cases: [(Change, Change, &[&str]); 5] = [
        (heads(json!(0)), Box::new(same), &["config.json", "num_nextn_predict_layers", "is 0", "needs 1"]),
        (heads(json!(2)), Box::new(same), &["config.json", "num_nextn_predict_layers", "is 2", "needs 1"]),
        (heads(Value::Null), Box::new(same), &["num_nextn_predict_layers", "is 0"]),
        (Box::new(same), Box::new(|header| drop(header.as_object_mut().unwrap().remove(INPUT))), &[INPUT, "lacks"]),
        (Box::new(same), Box::new(|header| header[INPUT]["shape"] = json!([96, 48])), &[INPUT, "[96, 48]", "[48, 96]"]),
    ];
    for (config, header, needles) in cases {
        let dir = tempfile::tempdir().unwrap();
        changed(dir.path(), config, header);
        let error = load_model_with(dir.path(), &with_head(), &mut |_, _| {}).err().unwrap().to_string();
        assert!(needles.iter().all(|needle| error.contains(needle)), "`{error}` should name {needles:?}");
        let (mut done, mut total) = (0, 0);
        let progress = &mut |now, all| (done, total) = (now, all);
        assert!(load_model_with(dir.path(), &LoadOptions::default(), progress).is_ok());
        assert!(done == total && total > 0, "{done} of {total} bytes");
    }
    let device = Some(DeviceChoice { ordinal: 0, kernels: None, budget_bytes: None, stays_alone: true });
    let error = load_model_with(&folder(), &LoadOptions { device, ..with_head() }, &mut |_, _| {}).err().unwrap();
    assert!(error.to_string().contains("CUDA"), "{error}");
}
