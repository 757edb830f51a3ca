//! The engine's heartbeat: what the step loop says about itself, to the page (contract H1–H6) and, in the same breath, to
//! its own front end, so that `/health` can only tell what the agent reads too (E6).
//!
//! A lease in the beat is a promise: "I will say something new before then". A phase without steps (load, warm-up, idle,
//! drain) renews its lease at every publish; a step gets one lease, from what steps of its size took before, and it anew with each row that
//! the host goes through while that takes long; time in which the machine held it up is added. Page, `/health`, admission and the guard go by this one promise.

use heartbeat::{Writer, monotonic_ns, page::Beat, page::Phase, page::StepOutcome, page::StepRecord};
use std::sync::Arc;
use std::time::Duration;

pub use board::{BeatBoard, View};
pub use health::{Health, judge};
pub(crate) use health::{barren, late};
use lease::LeaseModel;

mod board;
mod health;
mod lease;

/// A phase without steps promises its next publish within this.
pub const QUIET_LEASE: Duration = Duration::from_secs(2);
/// Loading reports progress more seldom than an idle loop turns.
pub const LOAD_LEASE: Duration = Duration::from_secs(10);

/// A phase that has lasted so long, 24 days, is entered anew: the page has 32 bits for a lease in milliseconds since then.
const PHASE_NS_MAX: u64 = 1_000_000 * (u32::MAX as u64 / 2);

/// The engine thread's side: the only writer of the page and of the board.
pub struct Heart {
    page: Option<Writer>,
    board: Arc<BeatBoard>,
    beat: Beat,
    leases: LeaseModel,
    /// The lease of the step under way, from its beginning or the last row.
    step_lease_ms: u32,
    /// When a step last brought anybody further, or nothing was owed.
    progress_ns: u64,
    /// Key of the program that ran the step under way; 0: it runs eagerly.
    graph_key: u64,
    clock_ns: Clock,
}

/// Nanoseconds of the clock that the page is in.
pub type Clock = Box<dyn Fn() -> u64 + Send>;

/// What one step is made of, for its lease and its record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepShape {
    pub requests: usize,
    pub prefill_tokens: usize,
    pub decode_tokens: usize,
    /// Work of the prefill, in tokens × (context + a constant): long contexts cost more a token.
    pub prefill_units: u64,
}

/// Counters and work owed, as the loop knows them now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    pub tokens_delivered: u64,
    pub requests_finished: u64,
    pub running: usize,
    pub waiting: usize,
    pub prompt_tokens_owed: usize,
}

impl Heart {
    /// A heart that beats into `page`, if there is one, and into `board`.
    pub fn new(page: Option<Writer>, board: Arc<BeatBoard>) -> Self {
        Self::by(Box::new(monotonic_ns), page, board)
    }

    /// The same by another clock, which a simulation turns.
    pub fn by(clock_ns: Clock, page: Option<Writer>, board: Arc<BeatBoard>) -> Self {
        let now = clock_ns();
        let mut heart = Self {
            page,
            board,
            beat: Beat::of_phase(Phase::Load, now),
            leases: LeaseModel::default(),
            step_lease_ms: 0,
            progress_ns: now,
            graph_key: 0,
            clock_ns,
        };
        heart.publish(now, LOAD_LEASE);
        heart
    }

    /// Start-up work went on (H5); more is said `within` that time.
    pub fn loading(&mut self, done: u64, total: u64, within: Duration) {
        (self.beat.work_done, self.beat.work_total) = (done, total);
        self.quiet(Phase::Load, within);
    }

    /// The cache, or the first steps, outside any request: `done` counts signs of life in work whose amount nobody knows beforehand.
    /// More is said `within` that time, which is when the wait for it is given up.
    pub fn warming_up(&mut self, done: u64, within: Duration) {
        (self.beat.work_done, self.beat.work_total) = (done, done);
        self.quiet(Phase::WarmUp, within);
    }

    /// What is made once for all ranks went on, here or with its owner (H5); more is said `within` that time.
    pub fn compiling(&mut self, done: u64, total: u64, within: Duration) {
        (self.beat.work_done, self.beat.work_total) = (done, total);
        self.quiet(Phase::Compile, within);
    }

    /// What a warm-up step took: the first lease is learned, not guessed.
    pub fn warmed_up(&mut self, shape: &StepShape, took: Duration) {
        self.leases.learn(shape, u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Nothing to run; said again at every turn of the idle loop, so that a frozen idle thread shows as an old page.
    pub fn resting(&mut self, tally: &Tally, draining: bool) {
        self.count(tally);
        self.quiet(if draining { Phase::Drain } else { Phase::Idle }, QUIET_LEASE);
    }

    /// A step begins.
    pub fn step_begins(&mut self, shape: &StepShape, tally: &Tally) {
        let now = (self.clock_ns)();
        self.count(tally);
        self.enter(if shape.prefill_tokens > 0 { Phase::Prefill } else { Phase::Decode }, now);
        self.beat.phase_tokens = clamp_u32(shape.prefill_tokens);
        self.beat.step_started_ns = now;
        self.step_lease_ms = self.leases.lease_ms(shape);
        self.beat.lease_ms = self.step_lease_ms;
        self.store(now);
    }

    /// The step under way is one row of logits further on the host. Many wide rows, and rows that follow grammars, may take longer than all
    /// that was learned of such steps: each begins the lease anew. That is said once half of it is gone, so that most steps never say it.
    pub fn row_is_done(&mut self) {
        let now = (self.clock_ns)();
        let lasted_ms = u32::try_from(now.saturating_sub(self.beat.step_started_ns) / 1_000_000).unwrap_or(u32::MAX);
        if self.beat.lease_ms.saturating_sub(lasted_ms) < self.step_lease_ms / 2 {
            self.beat.lease_ms = lasted_ms.saturating_add(self.step_lease_ms);
            self.store(now);
        }
    }

    /// The step under way waited for a thread that was ready to run and was not run: so much of its time does not count, for anybody who goes
    /// by its lease.
    pub fn held_up(&mut self, time: Duration) {
        let time_ms = u32::try_from(time.as_millis()).unwrap_or(u32::MAX);
        self.beat.lease_ms = self.beat.lease_ms.saturating_add(time_ms);
        self.store((self.clock_ns)());
    }

    /// The step under way was run by the program of this key; 0: eagerly (H6).
    pub fn ran_by(&mut self, graph_key: u64) {
        self.graph_key = graph_key;
    }

    /// How long the step under way, or the phase, may last from its beginning.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(u64::from(self.beat.lease_ms))
    }

    /// The step under way brought a request further: a token, a part of its prompt, or its own failure. What clients do is no progress: in a
    /// livelock they leave, and deadlines pass.
    pub fn moved(&mut self) {
        self.progress_ns = (self.clock_ns)();
    }

    /// The first rank has ended so many steps: what runs in parts there is one step of its own, and here one for each part.
    pub fn follow(&mut self, steps_completed: u64) {
        self.beat.steps_completed = steps_completed;
    }

    /// The step that began last has ended; returns its duration in ns.
    pub fn step_ends(&mut self, shape: &StepShape, tally: &Tally, outcome: StepOutcome) -> u64 {
        let now = (self.clock_ns)();
        let started_ns = std::mem::take(&mut self.beat.step_started_ns);
        self.count(tally);
        self.beat.steps_completed += 1;
        let took_ns = now.saturating_sub(started_ns);
        self.leases.learn(shape, took_ns);
        self.store(now);
        if let Some(page) = &mut self.page {
            page.record(&StepRecord {
                step: self.beat.steps_completed,
                started_ns,
                ended_ns: now,
                requests: clamp_u32(shape.requests),
                prefill_tokens: clamp_u32(shape.prefill_tokens),
                decode_tokens: clamp_u32(shape.decode_tokens),
                graph_key: std::mem::take(&mut self.graph_key),
                outcome,
            });
        }
        took_ns
    }

    /// Between two steps, alive: the next one waits for something that is no step's work.
    pub fn between_steps(&mut self, tally: &Tally) {
        self.count(tally);
        self.store((self.clock_ns)());
    }

    pub fn steps_completed(&self) -> u64 {
        self.beat.steps_completed
    }

    fn count(&mut self, tally: &Tally) {
        if tally.running + tally.waiting == 0 || self.beat.running + self.beat.waiting == 0 {
            self.moved();
        }
        self.beat.tokens_delivered = tally.tokens_delivered;
        self.beat.requests_finished = tally.requests_finished;
        self.beat.running = clamp_u32(tally.running);
        self.beat.waiting = clamp_u32(tally.waiting);
        self.beat.prompt_tokens_owed = tally.prompt_tokens_owed as u64;
    }

    fn quiet(&mut self, phase: Phase, lease: Duration) {
        let now = (self.clock_ns)();
        self.enter(phase, now);
        self.beat.step_started_ns = 0;
        self.beat.phase_tokens = 0;
        self.publish(now, lease);
    }

    /// Publishes with the lease renewed: `lease` from now, counted from the phase's entry as H5 wants it.
    fn publish(&mut self, now: u64, lease: Duration) {
        if now.saturating_sub(self.beat.phase_entered_ns) > PHASE_NS_MAX {
            self.beat.phase_entered_ns = now;
        }
        let lasted = Duration::from_nanos(now.saturating_sub(self.beat.phase_entered_ns));
        self.beat.lease_ms = u32::try_from((lasted + lease).as_millis()).unwrap_or(u32::MAX);
        self.store(now);
    }

    fn enter(&mut self, phase: Phase, now: u64) {
        if self.beat.phase != phase {
            self.beat.phase = phase;
            self.beat.phase_entered_ns = now;
        }
    }

    fn store(&mut self, now: u64) {
        self.beat.published_ns = now;
        if let Some(page) = &mut self.page {
            page.publish(&self.beat);
        }
        self.board.store(&View { beat: self.beat, progress_ns: self.progress_ns });
    }
}

fn clamp_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use heartbeat::{Reader, page::Identity};
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    const MS: u64 = 1_000_000;
    const BEGUN_MS: u64 = 1_000;

    /// Whoever looks, at the page, by `/health` or as the guard, sees the same promise, and that it is kept.
    #[test]
    fn a_step_that_goes_from_row_to_row_is_within_its_lease_and_no_longer() {
        let (dir, board, clock_ns) =
            (tempfile::tempdir().unwrap(), Arc::<BeatBoard>::default(), Arc::new(AtomicU64::new(BEGUN_MS * MS)));
        let page = Writer::create(dir.path(), &Identity::of_this_process(0, 1, 0).unwrap()).unwrap();
        let clock = clock_ns.clone();
        let mut heart = Heart::by(Box::new(move || clock.load(Relaxed)), Some(page), board.clone());
        let mut reader = Reader::open(dir.path(), 0);
        let mut look = |ms: u64| {
            let (view, beat) = (board.load().unwrap(), reader.read().unwrap().beat);
            assert_eq!(view.beat, beat, "the page says what the front end goes by");
            let now_ns = (BEGUN_MS + ms) * MS;
            (judge(Some(&view), now_ns), late(&beat, now_ns).is_none(), beat.published_ns / MS - BEGUN_MS)
        };
        let shape = StepShape { requests: 1, decode_tokens: 1, ..StepShape::default() };
        heart.step_begins(&shape, &Tally { running: 1, ..Tally::default() });
        for (row, row_ms) in [(1, 100), (2, 200), (3, 300), (4, 600), (5, 2_000)] {
            clock_ns.store((BEGUN_MS + row_ms) * MS, Relaxed);
            heart.row_is_done();
            let said_ms = if row < 3 { 0 } else { row_ms };
            assert_eq!(look(row_ms), (Health::Serving, true, said_ms), "row {row}");
        }
        assert_eq!(look(2_400), (Health::Serving, true, 2_000));
        let (health, within, _) = look(2_401);
        assert!(matches!(health, Health::Stalled(_)) && !within, "no row in a whole lease");
        heart.step_begins(&shape, &Tally { running: 1, ..Tally::default() });
        assert_eq!(heart.lease(), Duration::from_millis(400), "the next step has its own");
    }

    #[test]
    fn a_step_that_was_held_up_has_so_much_longer_and_the_next_one_has_not() {
        let (board, clock_ns) = (Arc::<BeatBoard>::default(), Arc::new(AtomicU64::new(BEGUN_MS * MS)));
        let clock = clock_ns.clone();
        let mut heart = Heart::by(Box::new(move || clock.load(Relaxed)), None, board.clone());
        let shape = StepShape { requests: 1, decode_tokens: 1, ..StepShape::default() };
        let healthy = |ms: u64| judge(board.load().as_ref(), (BEGUN_MS + ms) * MS) == Health::Serving;
        heart.step_begins(&shape, &Tally { running: 1, ..Tally::default() });
        assert!(healthy(400) && !healthy(401));
        for _ in 0..4 {
            heart.held_up(Duration::from_millis(25));
        }
        assert!(healthy(500) && !healthy(501));
        heart.step_begins(&shape, &Tally { running: 1, ..Tally::default() });
        assert!(!healthy(401), "it has its own lease");
    }

    #[test]
    fn an_engine_that_rests_for_months_is_within_its_lease() {
        let mut heart = Heart::new(None, Arc::default());
        let day_ns = 86_400 * 1_000_000_000;
        let began = heart.beat.published_ns;
        for day in 0..200 {
            let now = began + day * day_ns;
            heart.publish(now, QUIET_LEASE);
            assert_eq!(late(&heart.beat, now + 1_000_000_000), None, "day {day}");
            assert!(late(&heart.beat, now + 3_000_000_000).is_some(), "day {day}: nor is it given more");
        }
    }
}
