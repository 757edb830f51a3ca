//! A model shared by ranks against the same model alone: threads in place of processes, each with its own mapping of the ranks' memory.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use engine::model::{
    KvShape, LoadOptions, LogitsWanted, Model, ModelError, Pass, Precision, SeqInput, StepBatch, load_model_with,
};
use engine::ranks::Team;
use engine::stuck::StuckKind;

const PATIENCE: Duration = Duration::from_secs(60);
/// Sums over ranks are taken in another order than one rank's.
const TOLERANCE: f32 = 2e-4;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn load(path: &Path, team: Option<Arc<Team>>) -> Box<dyn Model> {
    let head = path.ends_with("mimo");
    let options = LoadOptions { precision: Precision::Exact, threads: Some(1), team, head, ..LoadOptions::default() };
    let mut model = load_model_with(path, &options, &mut |_, _| {}).unwrap();
    model.allocate_kv(KvShape { num_blocks: 8, block_size: 16 }).unwrap();
    model
}

/// A prompt and its neighbour, then a token of each.
fn steps() -> [StepBatch; 2] {
    let seq = |tokens: &[u32], start_pos, block| SeqInput {
        tokens: tokens.to_vec(),
        start_pos,
        block_table: vec![block],
        logits: LogitsWanted::All,
    };
    let prompts = vec![seq(&[5, 9, 2, 7, 7], 0, 3), seq(&[1, 3], 0, 6)];
    [StepBatch::of(prompts), StepBatch::of(vec![seq(&[4], 5, 3), seq(&[8], 2, 6)])]
}

fn run(model: &mut dyn Model) -> Vec<f32> {
    let mut rows = steps().iter().flat_map(|step| model.forward(step).unwrap().rows).collect::<Vec<_>>();
    if model.has_head() {
        let guesses = steps().map(|step| StepBatch { pass: Pass::Head, ..step });
        rows.extend(guesses.iter().flat_map(|step| model.forward(step).unwrap().rows));
    }
    rows.into_iter().flatten().flatten().collect()
}

fn shared(path: &Path, world: usize) -> Vec<Vec<f32>> {
    let (first, file) = Team::create(world).unwrap();
    std::thread::scope(|scope| {
        let mut teams = vec![first];
        teams.extend((1..world).map(|rank| Team::join(&file, rank, world).unwrap()));
        let ranks: Vec<_> = teams
            .into_iter()
            .map(|team| {
                team.allow(Some(PATIENCE));
                scope.spawn(move || {
                    let team = Arc::new(team);
                    let logits = run(load(path, Some(team.clone())).as_mut());
                    assert_eq!(team.fault(), None);
                    logits
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn logits_of_two_ranks_are_those_of_one_and_the_same_on_both() {
    for name in ["llama", "llama-rope3-bias", "qwen3", "qwen2-linear", "qwen3-moe", "qwen3-tied-bf16", "mimo"] {
        let alone = run(load(&folder(name), None).as_mut());
        let ranks = shared(&folder(name), 2);
        assert!(ranks[0] == ranks[1], "{name}: ranks differ from one another");
        assert_eq!(alone.len(), ranks[0].len());
        let worst = alone.iter().zip(&ranks[0]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= TOLERANCE, "{name}: off by {worst}");
        println!("{name}: off by {worst}");
    }
}

#[test]
fn more_ranks_than_kv_heads_share_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    engine::demo_model::write_demo_model(&path, engine::demo_model::DemoArch::Llama, 3).unwrap();
    let alone = run(load(&path, None).as_mut());
    let worst = |ranks: &[Vec<f32>]| alone.iter().zip(&ranks[3]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let ranks = shared(&path, 4);
    assert!(worst(&ranks) <= TOLERANCE, "off by {}", worst(&ranks));
}

/// The demo model in `dir`, in which `token` is no number.
fn poisoned(dir: &Path, token: usize) -> PathBuf {
    let path = dir.join("model");
    engine::demo_model::write_demo_model(&path, engine::demo_model::DemoArch::Llama, 3).unwrap();
    let file = path.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..head]).unwrap();
    let embed = &header["model.embed_tokens.weight"];
    let [start, width] = [&embed["data_offsets"][0], &embed["shape"][1]].map(|n| n.as_u64().unwrap() as usize);
    let row = head + start + token * width * 4;
    bytes[row..row + width * 4].chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&f32::NAN.to_le_bytes()));
    std::fs::write(file, bytes).unwrap();
    path
}

#[test]
fn ep5_a_sequence_that_is_no_number_leaves_its_neighbour_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    // the last token of the first prompt, which the second has not
    let ranks = shared(&poisoned(dir.path(), 7), 2);
    let rows: Vec<&[f32]> = ranks[0].chunks_exact(ranks[0].len() / 9).collect();
    let well: Vec<bool> = rows.iter().map(|row| row.iter().all(|value| value.is_finite())).collect();
    // prompts of five and of two, then a token of each
    let (poisoned, neighbour) = ([3, 4, 7], [5, 6, 8]);
    assert!(neighbour.iter().all(|row| well[*row]) && !poisoned.iter().any(|row| well[*row]), "{well:?}");
}

#[test]
fn a_model_that_cannot_be_split_says_which_of_its_sizes_is_at_fault() {
    let (team, _file) = Team::create(3).unwrap();
    let options = LoadOptions { team: Some(Arc::new(team)), ..LoadOptions::default() };
    let error = load_model_with(&folder("llama"), &options, &mut |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("3 ranks cannot share KV heads of 2"), "{error}");
}

#[test]
fn a_rank_that_never_comes_ends_the_step_in_time_by_name() {
    let (team, _file) = Team::create(2).unwrap();
    team.allow(Some(Duration::from_millis(50)));
    let team = Arc::new(team);
    let mut model = engine::ranks::LeaderModel::new(load(&folder("llama"), Some(team.clone())), team);
    let terms = engine::model::StepTerms { allowed: Some(Duration::from_millis(100)), ..Default::default() };
    model.terms(&terms);
    let Err(ModelError::Stuck(stuck)) = model.forward(&steps()[0]) else { panic!("a step without rank 1") };
    assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] }, "{stuck}");
    assert!(stuck.text.contains("rank 1 has not come to the agreement on step 1"), "{stuck}");
}
