//! Data-parallel ranks of an engine's `/metrics`, from scrape to scrape: each is a scheduler of its own, and the sums of the page hide one that
//! stands while others move.
//!
//! Its gauges say what it held when it last stepped. That work is still owed only the gate can tell, and it knows of no ranks: a stream that
//! has been silent for as long as the rank says so, or a request that is older, where those that move do not hold all that the gate owes. An
//! engine that leaves its gauges standing after its last request (older SGLang) is thus none that hangs.

use crate::excuse::Tick;
use crate::observation::{GateObs, MetricsObs, Ms, RankMetrics};
use crate::signs::Sight;

/// More than any engine has are read in part.
const SCHEDULERS_MAX: usize = 64;
/// A stream's last bytes reach the gate so much later than the scrape that counts them, where the front end is busy.
const STREAM_LATE_MS: Ms = 5_000;
/// The same of a request that was taken in with the last step: scrapes are a second apart.
const REQUEST_LATE_MS: Ms = 1_000;

/// One of them over time. Marks are counted times.
#[derive(Debug, Clone)]
pub struct Scheduler {
    pub rank: u32,
    pub running: u32,
    pub waiting: u32,
    digest: u64,
    /// When anything of it last moved: counted, and by the caller's clock.
    moved_at: Ms,
    moved_ms: Ms,
    /// When the scrape before that one was true.
    moved_since_ms: Ms,
    /// When it last owed nothing, and when those that move last held all that is known to be owed.
    owed_nothing_at: Ms,
    held_elsewhere_at: Ms,
    /// The scrape that was taken in with this tick shows a movement.
    moves: bool,
    seen: bool,
}

/// All that were ever there.
#[derive(Debug, Clone, Default)]
pub struct Schedulers {
    all: Vec<Scheduler>,
    /// The last scrape, counted and by the caller's clock.
    scraped_at: Ms,
    scraped_ms: Ms,
}

impl Schedulers {
    /// Takes one tick in; `at_ms` is when its scrape was true.
    pub fn look(&mut self, tick: &Tick, sight: &Sight<'_>, at_ms: Ms) {
        self.all.iter_mut().for_each(|scheduler| scheduler.moves = false);
        let Some(metrics) = sight.metrics.filter(|_| at_ms != self.scraped_ms) else { return };
        let before_ms = std::mem::replace(&mut self.scraped_ms, at_ms);
        self.scraped_at = tick.mark(at_ms);
        self.all.iter_mut().for_each(|scheduler| scheduler.seen = false);
        let times = (self.scraped_at, at_ms, before_ms);
        for rank in &metrics.ranks {
            let room = self.all.len() < SCHEDULERS_MAX;
            match self.all.iter_mut().find(|scheduler| scheduler.rank == rank.rank) {
                Some(scheduler) => scheduler.look(times, rank),
                None if room => self.all.push(Scheduler::new(times, rank)),
                None => {}
            }
        }
        let in_flight = known_in_flight(sight.gate, metrics);
        let held = self.present().fold(0, |sum: u32, scheduler| sum.saturating_add(scheduler.owed()));
        for scheduler in &mut self.all {
            // no word of what is owed: nothing is
            if in_flight.is_none_or(|in_flight| in_flight <= held.saturating_sub(scheduler.owed())) {
                scheduler.held_elsewhere_at = self.scraped_at;
            }
        }
    }

    /// The one that has stood for longest with work that is known to be owed to it, and for how long.
    pub fn standing(&self, gate: Option<&GateObs>) -> Option<(&Scheduler, Ms)> {
        let several = self.present().nth(1).is_some();
        let stands = self.present().filter(|scheduler| several && scheduler.owed() > 0);
        let silence = |scheduler: &Scheduler| self.scraped_at.saturating_sub(scheduler.silent_since(gate));
        stands.map(|scheduler| (scheduler, silence(scheduler))).max_by_key(|(_, silence_ms)| *silence_ms)
    }

    /// Does another rank work on while this one stands: has it moved within so long before the last scrape, and within the latter half of
    /// this one's silence?
    pub fn others_go_on(&self, rank: u32, within_ms: Ms) -> bool {
        let silence_ms = |scheduler: &Scheduler| self.scraped_at.saturating_sub(scheduler.moved_at);
        let own = self.present().find(|scheduler| scheduler.rank == rank);
        let within_ms = own.map_or(0, |own| within_ms.min(silence_ms(own) / 2));
        let others = self.present().filter(|scheduler| scheduler.rank != rank);
        own.is_some() && others.map(silence_ms).any(|ms| ms <= within_ms)
    }

    /// Does the scrape of this tick show that this rank moved, after a scrape that was true at `since_ms` or later?
    pub fn moves(&self, rank: u32, since_ms: Ms) -> bool {
        let mut all = self.all.iter();
        all.any(|scheduler| scheduler.rank == rank && scheduler.moves && scheduler.moved_since_ms >= since_ms)
    }

    fn present(&self) -> impl Iterator<Item = &Scheduler> {
        self.all.iter().filter(|scheduler| scheduler.seen)
    }
}

impl Scheduler {
    fn new((at, at_ms, before_ms): (Ms, Ms, Ms), rank: &RankMetrics) -> Self {
        Self {
            rank: rank.rank,
            running: count(rank.running),
            waiting: count(rank.waiting),
            digest: rank.progress_digest,
            moved_at: at,
            moved_ms: at_ms,
            moved_since_ms: before_ms,
            owed_nothing_at: at,
            held_elsewhere_at: at,
            moves: false,
            seen: true,
        }
    }

    fn look(&mut self, (at, at_ms, before_ms): (Ms, Ms, Ms), rank: &RankMetrics) {
        self.seen = true;
        self.moves = std::mem::replace(&mut self.digest, rank.progress_digest) != rank.progress_digest;
        if self.moves {
            (self.moved_at, self.moved_ms, self.moved_since_ms) = (at, at_ms, before_ms);
        }
        (self.running, self.waiting) = (count(rank.running), count(rank.waiting));
        if self.owed() == 0 {
            self.owed_nothing_at = at;
        }
    }

    pub fn owed(&self) -> u32 {
        self.running.saturating_add(self.waiting)
    }

    /// Since when it has stood with work that is owed.
    fn silent_since(&self, gate: Option<&GateObs>) -> Ms {
        let since = self.moved_at.max(self.owed_nothing_at);
        let older = |at: Option<Ms>, late_ms: Ms| at.is_some_and(|at| at <= self.moved_ms.saturating_add(late_ms));
        match gate {
            Some(gate) if older(gate.quietest_begun_ms, STREAM_LATE_MS) => since,
            Some(gate) if older(gate.oldest_in_flight_ms, REQUEST_LATE_MS) => since.max(self.held_elsewhere_at),
            Some(_) => Ms::MAX,
            None => since.max(self.held_elsewhere_at),
        }
    }
}

/// Requests in flight that wait for the engine, by whoever counts them: the gate, or the front end's own count.
fn known_in_flight(gate: Option<&GateObs>, metrics: &MetricsObs) -> Option<u32> {
    match gate {
        Some(gate) => Some(gate.in_flight.saturating_sub(gate.client_blocked)),
        None => metrics.server_load.map(|load| count(Some(load))),
    }
}

fn count(gauge: Option<f64>) -> u32 {
    gauge.filter(|value| value.is_finite() && *value > 0.0).map_or(0, |value| value.min(1e9) as u32)
}
