//! A worker's part of what the first rank orders, beside a first rank that is a thread of this test.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use heartbeat::page::Phase;

use super::*;
use crate::beat::{BeatBoard, StepShape};
use crate::model::{KvShape, LogitsWanted, ModelInfo, SeqInput, StepLogits};
use crate::waits::Turns;

const PATIENCE: Duration = Duration::from_secs(60);

/// A token whose step panics on one rank.
const POISON: u32 = 6;

/// A model that is a few sums over the ranks.
struct Sums {
    info: ModelInfo,
    team: Arc<Team>,
    collectives: usize,
    /// Before which of them this rank panics, if the batch has [`POISON`].
    panics_at: Option<usize>,
}

impl Sums {
    fn new(team: Arc<Team>, collectives: usize, panics_at: Option<usize>) -> Self {
        let info = ModelInfo { vocab_size: 9, seq_len_max: 9, ..ModelInfo::default() };
        Self { info, team, collectives, panics_at }
    }
}

impl Model for Sums {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn allocate_kv(&mut self, _: KvShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(&mut self, batch: &StepBatch) -> Result<StepLogits, ModelError> {
        let poisoned = batch.seqs.iter().any(|seq| seq.tokens.contains(&POISON));
        let mut sum = vec![1.0];
        for number in 0..=self.collectives {
            assert!(!poisoned || self.panics_at != Some(number), "a poisoned token");
            if number < self.collectives {
                self.team.all_reduce(&mut sum);
            }
        }
        Ok(StepLogits::of(vec![vec![sum]]))
    }
}

fn batch(token: u32) -> StepBatch {
    let seq = SeqInput { tokens: vec![token], start_pos: 0, block_table: vec![0], logits: LogitsWanted::Last };
    StepBatch::of(vec![seq])
}

/// Rank 1 of two obeys `order` as step 1 while rank 0 runs `first`; gives the worker back, and what its page says.
fn obeys(order: Order, first: impl FnOnce(&Team) + Send) -> (Worker, Arc<BeatBoard>) {
    let (leader, file) = Team::create(2).unwrap();
    let board = Arc::new(BeatBoard::default());
    let team = Arc::new(Team::join(&file, 1, 2).unwrap());
    let mut model = Sums::new(team.clone(), 0, None);
    let mut worker = worker(team, board.clone());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            leader.allow(Some(PATIENCE));
            first(&leader);
        });
        worker.obey(&mut model, 1, order).unwrap();
    });
    (worker, board)
}

fn worker(team: Arc<Team>, board: Arc<BeatBoard>) -> Worker {
    let heart = RankHeart::new(Heart::new(None, board));
    Worker { team, heart, faults: Faults::default(), tally: Tally::default(), parent: 0 }
}

#[test]
fn the_page_of_a_worker_says_what_the_first_rank_calls_the_step() {
    // a token and two guesses of one sequence: in a batch they look like a chunk of a prompt
    let tokens = vec![3, 4, 5];
    let seqs = vec![SeqInput { tokens, start_pos: 4, block_table: vec![0], logits: LogitsWanted::All }];
    let batch = StepBatch::of(seqs);
    let shape = StepShape { requests: 1, decode_tokens: 3, ..StepShape::default() };
    let terms = StepTerms { allowed: Some(PATIENCE), shape, ..StepTerms::default() };
    let plan = hash(&batch);
    let (_, board) = obeys(Order::Step { terms, batch }, move |leader| leader.agree(1, plan).unwrap());
    let beat = board.load().unwrap().beat;
    assert_eq!((beat.phase, beat.phase_tokens, beat.steps_completed), (Phase::Decode, 0, 1));
}

#[test]
fn a_guess_is_no_step_of_its_own_on_the_page_of_a_worker() {
    let guess = StepBatch { pass: Pass::Head, ..batch(3) };
    let shape = StepShape { requests: 1, decode_tokens: 1, ..StepShape::default() };
    let terms = StepTerms { allowed: Some(PATIENCE), shape, ..StepTerms::default() };
    let plan = hash(&guess);
    let (_, board) = obeys(Order::Step { terms, batch: guess }, move |leader| leader.agree(1, plan).unwrap());
    let beat = board.load().unwrap().beat;
    assert_eq!((beat.phase, beat.steps_completed), (Phase::Decode, 0));
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

/// A model whose step lasts until the page gives it a longer lease, or for too long.
struct Lasting {
    info: ModelInfo,
    board: Arc<BeatBoard>,
    lease_ms: u32,
}

impl Model for Lasting {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn allocate_kv(&mut self, _: KvShape) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(&mut self, _: &StepBatch) -> Result<StepLogits, ModelError> {
        let (began, lease_ms) = (Instant::now(), || self.board.load().unwrap().beat.lease_ms);
        let first_ms = lease_ms();
        while lease_ms() == first_ms && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.lease_ms = lease_ms().saturating_sub(first_ms);
        Ok(StepLogits::default())
    }
}

/// One of the first rank's helpers is in line all the time, and every rank waits for it.
#[test]
fn a_step_that_waits_for_a_thread_in_line_has_longer_on_the_page_of_a_worker_too() {
    const HELPER: u64 = 77;
    let (leader, file) = Team::create(2).unwrap();
    let (team, board) = (Arc::new(Team::join(&file, 1, 2).unwrap()), Arc::<BeatBoard>::default());
    leader.layout().helpers(0)[0].store(HELPER, Ordering::Relaxed);
    let mut worker = worker(team.clone(), board.clone());
    let turns = |tid| (tid == HELPER).then_some(Turns { ran: Duration::ZERO, held_up: Duration::ZERO, wants: true });
    worker.heart.look_by(team.clone(), Arc::new(turns)).unwrap();
    let mut model = Lasting { info: Sums::new(team, 0, None).info, board: board.clone(), lease_ms: 0 };
    let shape = StepShape { requests: 1, decode_tokens: 1, ..StepShape::default() };
    let terms = StepTerms { allowed: Some(PATIENCE), shape, ..StepTerms::default() };
    let (batch, plan) = (batch(1), hash(&batch(1)));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            leader.allow(Some(PATIENCE));
            leader.agree(1, plan).unwrap();
        });
        worker.obey(&mut model, 1, Order::Step { terms, batch }).unwrap();
    });
    assert!(model.lease_ms > 0, "it never was");
}

#[test]
fn first_steps_are_a_part_of_the_start_and_teach_the_lease() {
    let shape = StepShape { requests: 1, decode_tokens: 1, ..StepShape::default() };
    let terms = StepTerms { allowed: Some(PATIENCE), shape, warms: true, ..StepTerms::default() };
    let (batch, plan) = (StepBatch::default(), hash(&StepBatch::default()));
    let (_, board) = obeys(Order::Step { terms, batch }, move |leader| leader.agree(1, plan).unwrap());
    let beat = board.load().unwrap().beat;
    assert_eq!((beat.phase, beat.steps_completed), (Phase::WarmUp, 0));
    assert!(beat.lease_ms >= 300_000, "{beat:?}");
}

/// What two ranks make of a step, a poisoned one and another, where `rank` panics before its collective `at`.
fn launched(rank: usize, at: usize) -> [Vec<Result<f32, ModelError>>; 2] {
    let (first, file) = Team::create(2).unwrap();
    let teams = [first, Team::join(&file, 1, 2).unwrap()];
    let run = |team: Team| {
        team.allow(Some(PATIENCE));
        let team = Arc::new(team);
        let mut model = Sums::new(team.clone(), 3, (team.rank() == rank).then_some(at));
        let mut step = |step: u64, token| {
            let logits = launch(&team, (step, 7), || model.forward(&batch(token)))?;
            Ok(logits.rows[0][0][0])
        };
        vec![step(1, 1), step(2, POISON), step(3, 1)]
    };
    std::thread::scope(|scope| teams.map(|team| scope.spawn(|| run(team))).map(|rank| rank.join().unwrap()))
}

#[test]
fn ep5_a_part_that_panics_spoils_its_step_for_all_ranks_at_once_and_no_other_step() {
    let since = Instant::now();
    for (rank, at) in [(0, 0), (1, 0), (0, 2), (1, 2), (0, 3), (1, 3)] {
        let ranks = launched(rank, at);
        for (me, said) in ranks.iter().enumerate() {
            assert!(matches!(said[..], [Ok(8.0), _, Ok(8.0)]), "rank {rank} at {at}: {said:?}");
            // who panics after the last sum may have been the last to look
            let spoiled = matches!(&said[1], Err(ModelError::Device(text)) if text.contains("a poisoned token"));
            assert!(spoiled || (at == 3 && me != rank), "rank {rank} at {at}: {said:?}");
        }
    }
    assert!(since.elapsed() < PATIENCE, "nobody waits for a deadline");
}
