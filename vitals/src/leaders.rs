//! The leaders' pages from tick to tick, one a data-parallel engine: what each delivered, stepped and prefilled, and when.
//!
//! An engine's leader is its rank 0: the loop that takes requests in and hands tokens out. Where it has no page the others' are no more than
//! witnesses: workers hand out nothing, and to one who looks at them alone that is a loop that turns in vain. Data-parallel engines share a front end and nothing else: each is judged by
//! its own page, and what one of them delivers says nothing about another.

use crate::excuse::Tick;
use crate::observation::{Ms, PageObs, PagePhase};
use crate::policy::Policy;
use crate::prefill::{Came, PrefillSign};
use crate::signs::{Sight, handed_on_at};
use crate::startup::is_startup;
use crate::verdict::StallClass;

/// More data-parallel engines than one machine has GPUs for are read in part.
pub const ENGINES_MAX: usize = 32;

/// What one decode step may teach of its engine in any case.
const OWN_STEP_MS_MIN: Ms = 1_000;

/// One engine's leader over time. Marks are counted times.
#[derive(Debug, Clone)]
pub struct Leader {
    /// Its page at the last look that found one.
    pub page: PageObs,
    pub tokens_at: Ms,
    /// Its steps when its tokens last moved.
    pub steps_at_tokens: u64,
    pub steps_at: Ms,
    pub prefill_at: Ms,
    /// Its steps when its prefill last made progress.
    pub steps_at_prefill: u64,
    /// When it last began to owe anything.
    pub owes_at: Ms,
    prefill: PrefillSign,
    /// Its prefill has made progress since the last tick.
    prefills: bool,
    /// Slowly fading maximum of its own decode steps.
    pub decode_recent_ms: Ms,
    /// Steps completed and tokens delivered since the last tick.
    pub steps_done: u64,
    pub tokens_done: u64,
    /// Steps seen of this process.
    steps_seen: u64,
    seen: bool,
}

/// The leaders that were ever there, as they came.
#[derive(Debug, Clone, Default)]
pub struct Leaders(Vec<Leader>);

impl Leaders {
    /// Takes the pages of one tick in. When the start-up of a page that is new had last moved, as the page dates it.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>) -> Option<Ms> {
        for leader in &mut self.0 {
            (leader.seen, leader.prefills, leader.steps_done, leader.tokens_done) = (false, false, 0, 0);
        }
        // which engine they went to no gate knows: whatever the others are seen to take in is none of this one's
        let taken = self.0.iter().fold(0, |sum: u64, leader| sum.saturating_add(leader.prefill.took()));
        let mut entered_at = None;
        for page in sight.pages.iter().filter(|page| leads(page)) {
            let room = self.0.len() < ENGINES_MAX;
            let known = self.0.iter_mut().find(|leader| leader.page.engine() == page.engine());
            match known {
                Some(leader) if leader.seen => continue,
                Some(leader) if leader.goes_on(page) => {
                    let elsewhere = taken.saturating_sub(leader.prefill.took());
                    leader.look(tick, sight, page, Came { to_gate: sight.prompt_tokens_came, elsewhere });
                    continue;
                }
                Some(leader) => leader.begin(tick, page),
                None if room => self.0.push(Leader::new(tick, page)),
                None => continue,
            }
            // who comes late to a start-up has not seen its phase move: it did no later than when the page was last written
            let moved_ms = if is_startup(page.phase) { page.published_ms } else { 0 };
            entered_at = entered_at.max(Some(tick.mark(page.phase_entered_ms.max(moved_ms))));
        }
        entered_at
    }

    /// Those that have a page now, with their place, which is theirs for as long as the process lives.
    pub fn present(&self) -> impl Iterator<Item = (usize, &Leader)> {
        self.0.iter().enumerate().filter(|(_, leader)| leader.seen)
    }

    /// The one of the lowest rank.
    pub fn first(&self) -> Option<&Leader> {
        self.present().map(|(_, leader)| leader).min_by_key(|leader| leader.page.rank)
    }

    /// The leader of this engine, where it has a page now.
    pub fn of(&self, engine: u32) -> Option<&Leader> {
        self.present().map(|(_, leader)| leader).find(|leader| leader.page.engine() == engine)
    }

    /// Does another engine work on while this one stands: has it taken a step or handed out tokens within so long, and within the latter
    /// half of this one's silence?
    pub fn others_go_on(&self, engine: u32, tick: &Tick, within_ms: Ms) -> bool {
        let silence_ms = |leader: &Leader| tick.since(leader.steps_at.max(leader.tokens_at));
        let within_ms = self.of(engine).map_or(0, |leader| within_ms.min(silence_ms(leader) / 2));
        let others = self.present().filter(|(_, leader)| leader.page.engine() != engine);
        others.map(|(_, leader)| silence_ms(leader)).any(|ms| ms <= within_ms)
    }

    /// Is there more than one data-parallel engine?
    pub fn several(&self) -> bool {
        self.0.len() > 1
    }

    /// Does no engine's loop have anything to do, as far as it knows?
    pub fn all_idle(&self) -> bool {
        self.present().all(|(_, leader)| leader.is_idle())
    }

    /// Requests that the other engines hold: one that was preempted waits, and has begun to answer all the same.
    pub fn held_elsewhere(&self, engine: u32) -> u32 {
        let others = self.present().filter(|(_, leader)| leader.page.engine() != engine);
        others.fold(0, |sum, (_, leader)| sum.saturating_add(leader.page.owed()))
    }

    /// Requests that the pages say are owed.
    pub fn owed(&self) -> u32 {
        self.present().fold(0, |sum, (_, leader)| sum.saturating_add(leader.page.owed()))
    }

    /// Prompt tokens of the largest prefill step under way.
    pub fn prefill_tokens(&self) -> u32 {
        let prefills = self.present().filter(|(_, leader)| leader.page.phase == PagePhase::Prefill);
        prefills.map(|(_, leader)| leader.page.phase_tokens).max().unwrap_or(0)
    }

    /// Has this one of several engines taken steps enough for the rhythm of all to be its own? One alone is as warm as the rhythm is.
    pub fn is_warm(&self, page: &PageObs, policy: &Policy) -> bool {
        !self.several() || self.of(page.engine()).is_some_and(|leader| leader.steps_seen >= policy.native_warm_steps)
    }

    /// For how long the one that has stood for longest with work has, where there are several; 0 where none does.
    pub fn standing_ms(&self, tick: &Tick) -> Ms {
        let works = self.present().filter(|(_, leader)| self.several() && leader.page.owed() > 0);
        let since = works.map(|(_, leader)| leader.steps_at.max(leader.tokens_at).max(leader.owes_at));
        since.min().map_or(0, |at| tick.since(at))
    }

    /// When any of them last handed out tokens, ended a step, or made progress in prefill; 0 without pages.
    pub fn tokens_at(&self) -> Ms {
        self.latest(|leader| leader.tokens_at)
    }

    pub fn steps_at(&self) -> Ms {
        self.latest(|leader| leader.steps_at)
    }

    pub fn prefill_at(&self) -> Ms {
        self.latest(|leader| leader.prefill_at)
    }

    /// Has the prefill of any made progress since the last tick? (A mark does not say: it stays where it is while the clock stands.)
    pub fn prefills(&self) -> bool {
        self.present().any(|(_, leader)| leader.prefills)
    }

    fn latest(&self, mark: impl Fn(&Leader) -> Ms) -> Ms {
        self.0.iter().map(mark).max().unwrap_or(0)
    }
}

impl Leader {
    fn new(tick: &Tick, page: &PageObs) -> Self {
        Self {
            page: page.clone(),
            tokens_at: tick.counted_ms,
            steps_at_tokens: page.steps_completed,
            steps_at: tick.counted_ms,
            prefill_at: tick.counted_ms,
            steps_at_prefill: page.steps_completed,
            owes_at: tick.counted_ms,
            prefill: PrefillSign::default(),
            prefills: false,
            decode_recent_ms: 0,
            steps_done: 0,
            tokens_done: 0,
            steps_seen: 0,
            seen: true,
        }
    }

    /// Another rank, or counters that went back: a new baseline.
    fn begin(&mut self, tick: &Tick, page: &PageObs) {
        *self =
            Self { prefill: std::mem::take(&mut self.prefill), steps_seen: self.steps_seen, ..Self::new(tick, page) };
    }

    fn goes_on(&self, page: &PageObs) -> bool {
        self.page.rank == page.rank
            && self.page.steps_completed <= page.steps_completed
            && self.page.tokens_delivered <= page.tokens_delivered
    }

    fn look(&mut self, tick: &Tick, sight: &Sight<'_>, page: &PageObs, came: Came) {
        self.seen = true;
        self.steps_done = page.steps_completed - self.page.steps_completed;
        self.tokens_done = page.tokens_delivered - self.page.tokens_delivered;
        self.steps_seen = self.steps_seen.saturating_add(self.steps_done);
        if self.tokens_done > 0 {
            self.tokens_at = handed_on_at(tick, sight);
            self.steps_at_tokens = page.steps_completed;
        }
        if self.steps_done > 0 {
            self.steps_at = tick.counted_ms;
            self.decoded(tick, page);
        }
        let (delivered, steps) = (self.tokens_done > 0, self.steps_done);
        self.prefills = self.prefill.advances(page, &self.page, delivered, steps, came);
        if self.prefills {
            self.prefill_at = tick.counted_ms;
            self.steps_at_prefill = page.steps_completed;
        }
        if (page.running == 0) != (self.page.running == 0) {
            // an empty loop owes no token: count the steps of a livelock from the moment there is something to deliver
            self.tokens_at = tick.counted_ms;
            self.steps_at_tokens = page.steps_completed;
        }
        if self.page.owed() == 0 {
            self.owes_at = tick.counted_ms;
        }
        self.page = page.clone();
    }

    /// Steps ended: what a decode step of its own took. One that hung and ended teaches no more than three times what was known.
    fn decoded(&mut self, tick: &Tick, page: &PageObs) {
        let began_ms =
            self.page.step_started_ms.filter(|_| self.page.phase == PagePhase::Decode && self.page.running > 0);
        let Some(began_ms) = began_ms else { return };
        let ended_ms = page.step_started_ms.filter(|at| *at > began_ms).unwrap_or(tick.now_ms);
        let took_ms = ended_ms.saturating_sub(began_ms) / self.steps_done.max(1);
        let known_ms = self.decode_recent_ms;
        let faded_ms = known_ms.saturating_sub(known_ms / 64 + 1);
        self.decode_recent_ms = faded_ms.max(took_ms.min(known_ms.saturating_mul(3).max(OWN_STEP_MS_MIN)));
    }

    /// Has it done, since the last tick, what an accusation of its own page says it cannot? `clear`: nothing is held against it now.
    pub fn lives(&self, class: &StallClass, clear: bool) -> bool {
        let turns = matches!(class, StallClass::Livelock | StallClass::DecodeStalled);
        self.tokens_done > 0 || (!turns && clear && self.steps_done > 0)
    }

    fn is_idle(&self) -> bool {
        // (one that drains rests as well where nothing is left to do)
        matches!(self.page.phase, PagePhase::Idle | PagePhase::Drain) && self.page.owed() == 0
    }
}

/// Is it rank 0 of its engine?
pub(crate) fn leads(page: &PageObs) -> bool {
    page.rank.is_multiple_of(page.engine_ranks().max(1))
}
