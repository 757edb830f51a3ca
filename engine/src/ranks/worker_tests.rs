//! A worker's part of what the first rank orders, beside a first rank that is a thread of this test.

use heartbeat::page::Phase;

use super::*;
use crate::beat::{BeatBoard, StepShape};
use crate::model::{KvShape, LogitsWanted, ModelInfo, SeqInput, StepLogits};

const PATIENCE: Duration = Duration::from_secs(60);

/// A model without a number in it.
struct Blank(ModelInfo);

impl Model for Blank {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    fn allocate_kv(&mut self, _: KvShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(&mut self, _: &StepBatch) -> Result<StepLogits, ModelError> {
        Ok(StepLogits::default())
    }
}

fn blank() -> Blank {
    let (name, arch, eos_token_ids) = (String::new(), String::new(), Vec::new());
    Blank(ModelInfo { name, arch, vocab_size: 9, seq_len_max: 9, eos_token_ids, bos_token_id: None })
}

/// Rank 1 of two obeys `order` as step 1 while rank 0 runs `first`; gives the worker back, and what its page says.
fn obeys(order: Order, first: impl FnOnce(&Team) + Send) -> (Worker, Arc<BeatBoard>) {
    let (leader, file) = Team::create(2).unwrap();
    let board = Arc::new(BeatBoard::default());
    let (team, heart) = (Arc::new(Team::join(&file, 1, 2).unwrap()), Heart::new(None, board.clone()));
    let mut worker = Worker { team, heart, faults: Faults::default(), tally: Tally::default(), parent: 0 };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            leader.allow(Some(PATIENCE));
            first(&leader);
        });
        worker.obey(&mut blank(), 1, order).unwrap();
    });
    (worker, board)
}

#[test]
fn the_page_of_a_worker_says_what_the_first_rank_calls_the_step() {
    // a token and two guesses of one sequence: in a batch they look like a chunk of a prompt
    let tokens = vec![3, 4, 5];
    let seqs = vec![SeqInput { tokens, start_pos: 4, block_table: vec![0], logits: LogitsWanted::All }];
    let batch = StepBatch { seqs };
    let shape = StepShape { requests: 1, decode_tokens: 3, ..StepShape::default() };
    let terms = StepTerms { allowed: Some(PATIENCE), shape, ..StepTerms::default() };
    let plan = hash(&batch, 0);
    let (_, board) = obeys(Order::Step { terms, batch }, move |leader| leader.agree(1, plan).unwrap());
    let beat = board.load().unwrap().beat;
    assert_eq!((beat.phase, beat.phase_tokens, beat.steps_completed), (Phase::Decode, 0, 1));
}

#[test]
fn an_allocation_is_told_with_a_lease_and_its_agreement_has_a_deadline() {
    let shape = KvShape { num_blocks: 1, block_size: 1 };
    let (worker, board) = obeys(Order::Allocate(shape), |leader| leader.agree(1, 0).unwrap());
    assert_eq!(worker.team.allowed(), Some(ALLOCATE_MAX));
    let beat = board.load().unwrap().beat;
    assert_eq!((beat.phase, beat.work_done), (Phase::WarmUp, 1));
    assert!(u128::from(beat.lease_ms) >= ALLOCATE_MAX.as_millis(), "{beat:?}");
}

#[test]
fn first_steps_are_a_part_of_the_start_and_teach_the_lease() {
    let shape = StepShape { requests: 1, decode_tokens: 1, ..StepShape::default() };
    let terms = StepTerms { allowed: Some(PATIENCE), shape, warms: true, ..StepTerms::default() };
    let (batch, plan) = (StepBatch::default(), hash(&StepBatch::default(), 0));
    let (_, board) = obeys(Order::Step { terms, batch }, move |leader| leader.agree(1, plan).unwrap());
    let beat = board.load().unwrap().beat;
    assert_eq!((beat.phase, beat.steps_completed), (Phase::WarmUp, 0));
    assert!(beat.lease_ms >= 300_000, "{beat:?}");
}
