//! Steps by their programs against the same steps run eagerly: the same bits, in any order of shapes, for every architecture and type of
//! weights, alone and shared by ranks (E2).
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests: a surprise must fail the test")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use engine::model::{
    KvShape, LoadOptions, LogitsWanted, Model, Precision, SeqInput, StepBatch, StepLogits, load_model_with,
};
use engine::ranks::Team;
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(60);
const MODELS: [&str; 10] = [
    "llama",
    "llama-tied-bf16",
    "llama-rope3-bias",
    "mistral-window",
    "qwen2-yarn-window",
    "qwen3-tied-bf16",
    "gguf/llama-q8_0.gguf",
    "gguf/qwen3-k.gguf",
    "gguf/mistral-q8_0.gguf",
    "gguf/qwen2-q8_0.gguf",
];
/// Sequences that may run, each in blocks of its own.
const SEQS: usize = 4;
const LEN_MAX: usize = 96;
const BLOCK: usize = 16;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn load(path: &Path, eager: bool, precision: Precision, team: Option<Arc<Team>>) -> Box<dyn Model> {
    let options = LoadOptions { precision, threads: Some(2), team, eager, ..LoadOptions::default() };
    let mut model = load_model_with(path, &options, &mut |_, _| {}).unwrap();
    model.allocate_kv(KvShape { num_blocks: SEQS * LEN_MAX / BLOCK, block_size: BLOCK }).unwrap();
    model
}

/// What one sequence does in a step: nothing, or so many tokens with such logits.
type Part = Option<(usize, u8)>;

/// Turns parts into batches whose sequences go on where they were, and begin anew at their end.
struct Story {
    at: [usize; SEQS],
    token: u32,
}

impl Story {
    fn new() -> Self {
        Self { at: [0; SEQS], token: 1 }
    }

    fn batch(&mut self, parts: &[Part]) -> StepBatch {
        let mut seqs = Vec::new();
        for (lane, part) in parts.iter().enumerate() {
            let Some((len, logits)) = *part else { continue };
            let start_pos = if self.at[lane] + len > LEN_MAX { 0 } else { self.at[lane] };
            self.at[lane] = start_pos + len;
            let tokens = (0..len).map(|_| self.next()).collect();
            let blocks = LEN_MAX / BLOCK;
            let block_table = (0..blocks).map(|block| u32::try_from(lane * blocks + block).unwrap()).collect();
            let logits = [LogitsWanted::None, LogitsWanted::Last, LogitsWanted::All][usize::from(logits)];
            seqs.push(SeqInput { tokens, start_pos, block_table, logits });
        }
        StepBatch::of(seqs)
    }

    fn next(&mut self) -> u32 {
        self.token = (self.token * 31 + 7) % 91;
        self.token
    }
}

fn bits(logits: &StepLogits) -> Vec<Vec<Vec<u32>>> {
    let row = |row: &Vec<f32>| row.iter().map(|value| value.to_bits()).collect();
    logits.rows.iter().map(|rows| rows.iter().map(row).collect()).collect()
}

fn replayed(model: &dyn Model) -> u64 {
    model.programs().unwrap().replayed.load(Relaxed)
}

/// Runs `parts` again and again until steps of their shape are replayed, comparing each with the eager one.
fn until_replayed(models: (&mut dyn Model, &mut dyn Model), story: &mut Story, parts: &[Part]) {
    let (before, since) = (replayed(models.0), Instant::now());
    while replayed(models.0) < before + 3 {
        assert!(since.elapsed() < PATIENCE, "never replayed: {parts:?}");
        same(models.0, models.1, &story.batch(parts));
    }
}

fn same(by_program: &mut dyn Model, eager: &mut dyn Model, batch: &StepBatch) {
    let (a, b) = (by_program.forward(batch).unwrap(), eager.forward(batch).unwrap());
    assert!(bits(&a) == bits(&b), "another answer to {batch:?}");
}

#[test]
fn every_architecture_and_type_of_weights_gives_the_same_bits_by_program() {
    for (name, precision) in MODELS.iter().flat_map(|name| [(name, Precision::Exact), (name, Precision::Native)]) {
        let (mut by_program, mut eager) =
            (load(&folder(name), false, precision, None), load(&folder(name), true, precision, None));
        assert!(eager.programs().is_none());
        let mut story = Story::new();
        // a prompt, decodes of different widths, guesses that are verified, and nothing wanted
        same(by_program.as_mut(), eager.as_mut(), &story.batch(&[Some((30, 1)), Some((3, 1)), None, Some((1, 1))]));
        let shapes: [&[Part]; 4] = [
            &[Some((1, 1)), Some((1, 1)), None, Some((1, 1))],
            &[Some((1, 1))],
            &[Some((5, 2)), Some((1, 1))],
            &[None, Some((2, 0))],
        ];
        for parts in shapes {
            until_replayed((by_program.as_mut(), eager.as_mut()), &mut story, parts);
        }
        println!("{name} {precision:?}: {} steps replayed", replayed(by_program.as_ref()));
    }
}

#[test]
fn a_mixture_of_experts_has_no_programs() {
    assert!(load(&folder("qwen3-moe"), false, Precision::Native, None).programs().is_none());
}

#[test]
fn ranks_by_program_say_what_ranks_say_eagerly() {
    let run = |eager: bool| -> Vec<Vec<u32>> {
        let (first, file) = Team::create(2).unwrap();
        std::thread::scope(|scope| {
            let teams = [first, Team::join(&file, 1, 2).unwrap()];
            let ranks = teams.map(|team| {
                scope.spawn(move || {
                    team.allow(Some(PATIENCE));
                    let team = Arc::new(team);
                    let mut model = load(&folder("qwen3-tied-bf16"), eager, Precision::Native, Some(team.clone()));
                    let mut story = Story::new();
                    // one rank may replay a step that the other runs eagerly: their collectives are the same
                    let parts = |step: usize| {
                        if step.is_multiple_of(3) { vec![Some((1, 1)); 3] } else { vec![Some((1, 1)); 2] }
                    };
                    let steps = (0..300usize).map(|step| model.forward(&story.batch(&parts(step))).unwrap());
                    let all = steps.flat_map(|logits| bits(&logits).into_iter().flatten().flatten()).collect();
                    assert_eq!(team.fault(), None);
                    (all, (!eager).then(|| replayed(model.as_ref())))
                })
            });
            ranks
                .into_iter()
                .map(|rank| rank.join().unwrap())
                .map(|(all, replayed)| {
                    println!("{replayed:?} of 300 replayed");
                    all
                })
                .collect()
        })
    };
    let (eager, by_program) = (run(true), run(false));
    assert!(eager[0] == eager[1] && eager == by_program);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Random sequences of few shapes, so that they come again: whatever is replayed and whatever is not, the bits are those of eager steps.
    #[test]
    fn any_sequence_of_shapes_gives_the_eager_bits(
        shapes in prop::collection::vec(prop::collection::vec(prop::option::of((1usize..5, 0u8..3)), SEQS), 1..5),
        order in prop::collection::vec(any::<prop::sample::Index>(), 40),
        model in any::<prop::sample::Index>(),
    ) {
        let path = folder(model.get::<&str>(&MODELS));
        let mut models = [false, true].map(|eager| load(&path, eager, Precision::Native, None));
        let mut story = Story::new();
        for parts in order.iter().map(|index| index.get(&shapes)) {
            let batch = story.batch(parts);
            let [a, b] = models.each_mut().map(|model| bits(&model.forward(&batch).unwrap()));
            prop_assert!(a == b, "{batch:?}");
        }
    }
}
