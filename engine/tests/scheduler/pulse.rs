//! The heart of the engine by the simulation's clock: what it publishes of each step is held against what happened. EP1: no step, and no loop of
//! steps, lasts past a moment from which on whoever looks sees that it does. EP6: what counts as delivered was delivered, and nothing else
//! counts as progress.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use engine::beat::{BeatBoard, Health, Heart, StepShape, Tally, View, judge};
use engine::core::shape_of;
use engine::scheduler::{Owed, StepPlan};
use heartbeat::page::StepOutcome;

const MS: u64 = 1_000_000;
/// Steps that turn for nothing are seen after two of their leases, or this.
const BARREN_MS_MIN: u64 = 2_000;

/// What came to requests so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    pub tokens: u64,
    pub ends: u64,
}

pub struct Pulse {
    heart: Heart,
    board: Arc<BeatBoard>,
    clock_ns: Arc<AtomicU64>,
    shape: StepShape,
    told: Told,
    owed: Owed,
    /// When a step brought anybody further last, or nothing was owed.
    moved_ns: u64,
    /// A step with prompts has run, and one without: before that there is no pace, and the engine has its warm-up.
    paces: [bool; 2],
    /// Steps that lasted longer than their lease.
    pub overdue: u64,
    /// Steps after which it was seen that they turn for nothing.
    pub barren: u64,
}

impl Pulse {
    pub fn new() -> Self {
        let (board, clock_ns) = (Arc::new(BeatBoard::default()), Arc::new(AtomicU64::new(0)));
        let clock = Arc::clone(&clock_ns);
        let mut heart = Heart::by(Box::new(move || clock.load(Relaxed)), None, board.clone());
        heart.resting(&Tally::default(), false);
        let (shape, told, owed) = (StepShape::default(), Told::default(), Owed::default());
        Self { heart, board, clock_ns, shape, told, owed, moved_ns: 0, paces: [false; 2], overdue: 0, barren: 0 }
    }

    pub fn view(&self) -> View {
        self.board.load().unwrap()
    }

    /// Notes what came and what is owed at this moment; gives it as the heart wants it.
    fn at(&mut self, now_ns: u64, told: Told, owed: Owed) -> Tally {
        self.clock_ns.store(now_ns, Relaxed);
        let nobody = |owed: Owed| owed.running + owed.waiting == 0;
        if nobody(owed) || nobody(self.owed) {
            self.moved_ns = now_ns;
        }
        (self.told, self.owed) = (told, owed);
        let Owed { running, waiting, prompt_tokens } = owed;
        let (tokens_delivered, requests_finished) = (told.tokens, told.ends);
        Tally { tokens_delivered, requests_finished, running, waiting, prompt_tokens_owed: prompt_tokens }
    }

    /// There is nothing to run.
    pub fn rests(&mut self, now_ns: u64, told: Told, owed: Owed) {
        let tally = self.at(now_ns, told, owed);
        self.heart.resting(&tally, false);
    }

    /// A step begins.
    pub fn begins(&mut self, now_ns: u64, plan: &StepPlan, (told, owed): (Told, Owed)) {
        let tally = self.at(now_ns, told, owed);
        self.shape = shape_of(plan.rows.iter().map(|row| row.decode).zip(&plan.batch.seqs));
        self.heart.step_begins(&self.shape, &tally);
    }

    /// The step that runs brings somebody further.
    pub fn moves(&mut self, now_ns: u64) {
        self.clock_ns.store(now_ns, Relaxed);
        self.moved_ns = now_ns;
        self.heart.moved();
    }

    /// The step has ended; `held_up`: the machine stood still in it.
    ///
    /// # Errors
    /// What the heart said, or let pass in silence, that is not so.
    pub fn ends(&mut self, now_ns: u64, held_up: bool, (told, owed): (Told, Owed)) -> Result<(), String> {
        let began = self.view();
        let pace = &mut self.paces[usize::from(self.shape.prefill_units > 0)];
        let excused = held_up || !std::mem::replace(pace, true);
        self.overdue += u64::from(overdue(&began, now_ns, excused)?);
        let before = self.told;
        let tally = self.at(now_ns, told, owed);
        self.heart.step_ends(&self.shape, &tally, StepOutcome::Ok);
        let view = self.view();
        let came = Told { tokens: told.tokens - before.tokens, ends: told.ends - before.ends };
        counts(&began, &view, came)?;
        self.barren += u64::from(fruitless(&view, self.moved_ns, now_ns)?);
        Ok(())
    }

    /// Is it seen that something stands, or turns for nothing?
    pub fn is_stalled(&self, now_ns: u64) -> bool {
        matches!(judge(Some(&self.view()), now_ns), Health::Stalled(_))
    }
}

/// EP1: was a step that ended now past its lease? Then that was to be seen as soon as the lease was over.
fn overdue(began: &View, now_ns: u64, excused: bool) -> Result<bool, String> {
    let over_ns = began.beat.step_started_ns + (u64::from(began.beat.lease_ms) + 1) * MS;
    if now_ns < over_ns {
        return Ok(false);
    }
    if !excused {
        return Err(format!("EP1: nothing held this step up, and it is past its lease at {now_ns}: {began:?}"));
    }
    match judge(Some(began), over_ns) {
        Health::Stalled(_) => Ok(true),
        health => Err(format!("EP1: a step is past its lease, and the engine says {health:?}: {began:?}")),
    }
}

/// EP6: a step counts once, and what it brought as often as it came.
fn counts(began: &View, ended: &View, came: Told) -> Result<(), String> {
    let (before, after) = (&began.beat, &ended.beat);
    let told = Told {
        tokens: after.tokens_delivered - before.tokens_delivered,
        ends: after.requests_finished - before.requests_finished,
    };
    let steps = after.steps_completed - before.steps_completed;
    if told == came && steps == 1 {
        Ok(())
    } else {
        Err(format!("EP6: {came:?} came, {told:?} in {steps} steps is told"))
    }
}

/// EP1 and EP6: progress is told of the moment at which something moved last, no later one; and who turns for nothing is seen in time.
fn fruitless(view: &View, moved_ns: u64, now_ns: u64) -> Result<bool, String> {
    let lasted_ms = (now_ns - moved_ns) / MS;
    let owes = view.beat.running + view.beat.waiting > 0;
    let barren = owes && lasted_ms > (2 * u64::from(view.beat.lease_ms)).max(BARREN_MS_MIN);
    let stalled = matches!(judge(Some(view), now_ns), Health::Stalled(_));
    let told_ns = view.progress_ns;
    if told_ns == moved_ns && barren == stalled {
        return Ok(barren);
    }
    Err(format!("EP6: something moved last at {moved_ns} of {now_ns}, {told_ns} is told, stalled: {stalled}"))
}

#[test]
fn a_heart_that_lies_is_found_out() {
    let (mut began, mut ended) = (Pulse::new().view(), Pulse::new().view());
    (began.beat.step_started_ns, began.beat.lease_ms) = (1_000 * MS, 400);
    began.beat.phase = heartbeat::page::Phase::Decode;
    assert_eq!(overdue(&began, 1_400 * MS, false), Ok(false));
    assert_eq!(overdue(&began, 5_000 * MS, true), Ok(true));
    assert!(overdue(&began, 5_000 * MS, false).is_err(), "a hang");
    (began.beat.phase, began.beat.phase_entered_ns) = (heartbeat::page::Phase::Idle, 1_800 * MS);
    began.beat.step_started_ns = 0;
    assert!(overdue(&began, 1_900 * MS, true).is_err(), "nobody sees that it is over");

    let came = Told { tokens: 3, ends: 1 };
    (ended.beat.steps_completed, ended.beat.tokens_delivered, ended.beat.requests_finished) = (1, 3, 1);
    assert_eq!(counts(&began, &ended, came), Ok(()));
    assert!(counts(&began, &ended, Told::default()).is_err(), "a livelock that counts");
    assert!(counts(&began, &ended, Told { tokens: 4, ends: 1 }).is_err(), "a token that nobody is told of");

    (ended.beat.phase, ended.beat.running, ended.beat.lease_ms) = (heartbeat::page::Phase::Decode, 1, 400);
    (ended.progress_ns, ended.beat.published_ns) = (1_000 * MS, 4_000 * MS);
    assert_eq!(fruitless(&ended, 1_000 * MS, 2_000 * MS), Ok(false));
    assert_eq!(fruitless(&ended, 1_000 * MS, 4_000 * MS), Ok(true));
    ended.progress_ns = 4_000 * MS;
    assert!(fruitless(&ended, 1_000 * MS, 4_000 * MS).is_err(), "turning is told as progress");
}
