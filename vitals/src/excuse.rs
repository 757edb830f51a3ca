//! V5: what excuses silence. An excuse stops the detector's own clock, so that excused time never counts as silence.
//!
//! All ages of the detector are differences of *counted* time: wall time less the intervals in which the engine could not have
//! been expected to deliver. An excuse therefore needs no rule anywhere else.

use crate::gap::GapWitness;
use crate::leaders::leads;
use crate::log_signs::{self, Meaning};
use crate::observation::{Ms, Observation, PageObs, PagePhase};
use crate::policy::Policy;

/// Why silence is not held against the engine. Each says which signal it rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excuse {
    /// A person or the platform said so (annotation).
    Maintenance,
    /// The engine's sleep gauge or its page says that it sleeps.
    Asleep,
    /// The engine's log says that generation was paused through its API.
    Paused,
    /// The engine answers that generation is paused.
    SaysPaused,
    /// A debugger holds the process (`ptrace`); a stopped process without one is no excuse.
    Traced,
    /// The cgroup freezer holds it.
    Frozen,
    /// The cgroup's CPU quota held it since the last look.
    Throttled,
    /// Compiler children burn CPU: a JIT of 30–70 s in mid-traffic is normal.
    Compiling,
    /// Every request in flight waits for its own client to read or to send, and no loop that keeps leases holds work: that waits for no client.
    ClientBlocked,
    /// The engine has come up at a port that is not the one that is asked: nothing of its work is seen, and its start is no start that hangs.
    Elsewhere,
}

impl Excuse {
    /// Does it say that no delivery is meant to happen at all (so that a suspicion ends at once)?
    pub fn is_declared(self) -> bool {
        matches!(self, Self::Maintenance | Self::Asleep | Self::Paused | Self::SaysPaused)
    }

    /// Source and sentence for the reasons.
    pub fn sentence(self) -> (&'static str, &'static str) {
        match self {
            Self::Maintenance => ("policy", "maintenance is declared: silence is intended"),
            Self::Asleep => ("metrics", "the engine says that it sleeps: silence is intended"),
            Self::Paused => ("log", "generation was paused through the engine's API: silence is intended"),
            Self::SaysPaused => ("metrics", "the engine says that generation is paused: silence is intended"),
            Self::Traced => ("proc", "a debugger holds the process: its silence does not count"),
            Self::Frozen => ("proc", "the cgroup freezer holds the process: its silence does not count"),
            Self::Throttled => ("proc", "the cgroup's CPU quota held the process: that time does not count"),
            Self::Compiling => ("proc", "compiler children burn CPU: their time does not count"),
            Self::ClientBlocked => ("gate", "every request in flight waits for its own client to read or to send"),
            Self::Elsewhere => (
                "frontend",
                "nobody is at the port that is asked, and the engine answers at another, which the agent's log names: it is looked for in \
                 the wrong place (--engine-url)",
            ),
        }
    }
}

/// Of a long time between two looks so many ticks count.
const FADES_MAX: u64 = 10;

/// Deliveries this soon after an announced pause are its tail.
const PAUSE_TAIL_MS: Ms = 5_000;

/// The clock that stops while silence is excused, and what it learned on the way.
#[derive(Debug, Clone, Default)]
pub struct SilenceClock {
    now_ms: Option<Ms>,
    counted_ms: Ms,
    /// (at, cpu) of the last process reading.
    cpu: Option<(Ms, u64)>,
    /// CPU share of the tree in the last interval between two readings, in permille of one core.
    cpu_permille: Option<u32>,
    /// What a reading that came with this tick says of time in line for a core; 0 where none came.
    queued_ms: Ms,
    compilers: Option<u64>,
    compiled_ms: Option<Ms>,
    paused_ms: Option<Ms>,
    gaps: GapWitness,
    /// Decaying maximum of the gaps in which nothing ran, neither the agent nor, by its own word, the engine.
    jitter_ms: Ms,
    /// For how long quota or compilers have excused the silence under way.
    held_ms: Ms,
    /// Such gaps since the engine last moved. They are discarded from that silence already, so that they may not stretch its
    /// deadline as well: they count as jitter from the next movement on.
    jitter_pending_ms: Ms,
}

/// One tick of the clock.
#[derive(Debug, Clone, Copy)]
pub struct Tick {
    /// The caller's time, never backwards.
    pub now_ms: Ms,
    /// Wall time since the last tick.
    pub elapsed_ms: Ms,
    /// Of these, less the agent's gap as far as the engine is not proven to have run in it.
    pub lived_ms: Ms,
    pub counted_ms: Ms,
    /// Counted time at the last tick.
    pub counted_before_ms: Ms,
    pub excuse: Option<Excuse>,
    pub cpu_permille: Option<u32>,
    pub jitter_ms: Ms,
}

impl Tick {
    /// When, in counted time, something happened that was seen first at this tick and is dated `at_ms` by the caller's clock.
    pub fn mark(&self, at_ms: Ms) -> Ms {
        let age = self.now_ms.saturating_sub(at_ms);
        self.counted_ms.saturating_sub(age).clamp(self.counted_before_ms.min(self.counted_ms), self.counted_ms)
    }

    /// Counted time since a mark.
    pub fn since(&self, mark_ms: Ms) -> Ms {
        self.counted_ms.saturating_sub(mark_ms)
    }
}

impl SilenceClock {
    /// Advances to `now_ms`; a time that goes backwards counts as no time at all. `starts`: the engine has not shown yet that it can serve.
    pub fn tick(&mut self, now_ms: Ms, obs: &Observation, starts: bool, policy: &Policy) -> Tick {
        let first = self.now_ms.is_none();
        let before = self.now_ms.unwrap_or(now_ms);
        let now_ms = now_ms.max(before);
        let elapsed = now_ms.saturating_sub(before);
        self.read_process(now_ms, obs, policy);
        self.read_pause(now_ms, obs);
        let excuse = self.excuse(now_ms, obs, starts, policy);
        // an agent that did not run saw nothing: its gap is discarded (VM pause), unless the engine shows that it ran
        let gap = obs.agent_gap_ms.min(elapsed);
        let unseen = gap - self.gaps.ran_ms(now_ms, elapsed, gap, obs, policy);
        let lived = elapsed - unseen;
        let counted_before = if first { 0 } else { self.counted_ms };
        if first {
            self.counted_ms = now_ms;
        } else if excuse.is_none() {
            self.counted_ms = self.counted_ms.saturating_add(self.fair(lived, obs, now_ms, policy));
        }
        if matches!(excuse, Some(Excuse::Throttled | Excuse::Compiling)) {
            self.held_ms = self.held_ms.saturating_add(lived);
        }
        self.jitter_pending_ms = self.jitter_pending_ms.max(unseen.min(policy.jitter_ms_max));
        // it fades with time and not with looks, which are rare at an engine that owes nothing
        for _ in 0..(lived / policy.tick_ms.max(1)).clamp(1, FADES_MAX) {
            self.jitter_ms = self.jitter_ms.saturating_sub(self.jitter_ms / 32 + 1);
        }
        self.now_ms = Some(now_ms);
        Tick {
            now_ms,
            elapsed_ms: elapsed,
            lived_ms: lived,
            counted_ms: self.counted_ms,
            counted_before_ms: counted_before,
            excuse,
            cpu_permille: self.cpu_permille,
            jitter_ms: self.jitter_ms,
        }
    }

    /// Since when generation is paused, by the engine's log alone.
    pub fn paused_at(&self) -> Option<Ms> {
        self.paused_ms
    }

    /// An observer that was restarted has not read that line; one before it has.
    pub fn pause(&mut self, at_ms: Option<Ms>) {
        self.paused_ms = at_ms;
    }

    /// A new process: its CPU time begins anew, and no pause of the old one holds.
    pub fn restarted(&mut self) {
        self.cpu = None;
        self.cpu_permille = None;
        self.compilers = None;
        self.compiled_ms = None;
        self.paused_ms = None;
        self.held_ms = 0;
        self.gaps.restarted();
    }

    /// It works, or has nothing to do: what held it until now is no part of the next silence.
    pub fn works(&mut self) {
        self.held_ms = 0;
    }

    /// The engine moved, or owes nothing: what this machine did to everybody until now may happen to the next step.
    pub fn moved(&mut self) {
        self.jitter_ms = self.jitter_ms.max(std::mem::take(&mut self.jitter_pending_ms));
    }

    /// The latest tick's time, 0 before the first.
    pub fn now_ms(&self) -> Ms {
        self.now_ms.unwrap_or(0)
    }

    /// Counted time of a moment of the caller's clock, as far as it is known.
    pub fn counted(&self, at_ms: Ms) -> Ms {
        self.now_ms.map_or(at_ms, |now| self.counted_ms.saturating_sub(now.saturating_sub(at_ms)))
    }

    /// A delivery at this moment proves that a pause is over, unless it is the tail of what was under way when the pause began, or was before
    /// it and is seen only now.
    pub fn delivered(&mut self, at_ms: Ms) {
        self.paused_ms = self.paused_ms.filter(|paused| at_ms.saturating_sub(*paused) < PAUSE_TAIL_MS);
    }

    /// A process that wants to run (state R) and gets less than a quarter of a core is starved by the machine: its time counts
    /// only as fast as it is given CPU. A spinning hang gets its quarter even at a load of eight on two cores. Nor does time count in
    /// which a thread of the step stood in line for a core, three quarters of it at most: a hang that burns stands in line as well.
    fn fair(&self, lived: Ms, obs: &Observation, now_ms: Ms, policy: &Policy) -> Ms {
        let wants_cpu = obs.proc.fresh(now_ms, policy.fresh_ms).is_some_and(|p| p.state == Some('R'));
        let given = match self.cpu_permille {
            Some(share) if wants_cpu && share < 250 => lived.saturating_mul(u64::from(share).saturating_mul(4)) / 1000,
            _ => lived,
        };
        given.min(lived.saturating_sub(self.queued_ms).max(lived / 4))
    }

    fn read_process(&mut self, now_ms: Ms, obs: &Observation, policy: &Policy) {
        self.queued_ms = 0;
        let Some(proc) = obs.proc.fresh(now_ms, policy.fresh_ms) else {
            self.cpu_permille = None;
            return;
        };
        let at_ms = obs.proc.at_ms;
        match self.cpu {
            Some((last_ms, last_cpu)) if at_ms > last_ms => {
                let used = proc.cpu_ms.saturating_sub(last_cpu);
                let share = used.saturating_mul(1000) / at_ms.saturating_sub(last_ms).max(1);
                self.cpu_permille = Some(u32::try_from(share).unwrap_or(u32::MAX));
                self.cpu = Some((at_ms, proc.cpu_ms));
                self.queued_ms = proc.queued_ms.unwrap_or(0);
            }
            Some(_) => {}
            None => self.cpu = Some((at_ms, proc.cpu_ms)),
        }
        let burned = self.compilers.is_none_or(|last| proc.compilers_cpu_ms > last);
        if proc.compilers > 0 && burned {
            self.compiled_ms = Some(now_ms);
        }
        self.compilers = (proc.compilers > 0).then_some(proc.compilers_cpu_ms);
    }

    fn read_pause(&mut self, now_ms: Ms, obs: &Observation) {
        for hit in &obs.log {
            match log_signs::by_name(&hit.signature).map(|s| s.meaning) {
                Some(Meaning::Paused) => self.paused_ms = Some(now_ms),
                Some(Meaning::Resumed) => self.paused_ms = None,
                _ => {}
            }
        }
        // what the engine answers outweighs a line that somebody may have missed
        let denied = obs.metrics.value.as_ref().is_some_and(|metrics| metrics.paused == Some(false));
        self.paused_ms = self.paused_ms.filter(|at| !denied || obs.metrics.at_ms <= *at);
    }

    /// A hang that burns more cores than its quota allows is held back for as long as it lasts, as is whoever waits for a compiler that never
    /// ends: neither excuses one silence for ever.
    fn excuse(&self, now_ms: Ms, obs: &Observation, starts: bool, policy: &Policy) -> Option<Excuse> {
        let throttled_ms_max = if starts { policy.startup_lease_cap_ms } else { policy.patience_cap_ms };
        let within = |mark: Option<Ms>, span: Ms| mark.is_some_and(|at| now_ms.saturating_sub(at) < span);
        let proc = obs.proc.fresh(now_ms, policy.fresh_ms);
        let metrics = obs.metrics.fresh(now_ms, policy.metrics_fresh_ms);
        let gauge_sleeps = metrics.and_then(|m| m.sleeping) == Some(true);
        let pages = obs.pages.fresh(now_ms, policy.fresh_ms).map_or(&[][..], Vec::as_slice);
        let page_sleeps = all_sleep(pages);
        let blocked =
            obs.gate.fresh(now_ms, policy.fresh_ms).is_some_and(|g| g.in_flight > 0 && g.client_blocked >= g.in_flight)
                && !pages.iter().any(leased_work);
        let elsewhere = obs.frontend.fresh(now_ms, policy.metrics_fresh_ms).is_some_and(|front| front.elsewhere);
        let found = [
            (obs.maintenance, Excuse::Maintenance),
            (gauge_sleeps || page_sleeps, Excuse::Asleep),
            (within(self.paused_ms, policy.pause_ms_max), Excuse::Paused),
            (metrics.and_then(|m| m.paused) == Some(true), Excuse::SaysPaused),
            (proc.is_some_and(|p| p.traced), Excuse::Traced),
            (proc.is_some_and(|p| p.frozen), Excuse::Frozen),
            (proc.is_some_and(|p| p.throttled) && self.held_ms < throttled_ms_max, Excuse::Throttled),
            (within(self.compiled_ms, 2_000) && self.held_ms < policy.startup_lease_cap_ms, Excuse::Compiling),
            (blocked, Excuse::ClientBlocked),
            (starts && elsewhere, Excuse::Elsewhere),
        ];
        found.into_iter().find(|(holds, _)| *holds).map(|(_, excuse)| excuse)
    }
}

/// Does this page's loop hold work under a lease? Then it is the loop that is waited for: it hands tokens out whether or not a client reads them.
fn leased_work(page: &PageObs) -> bool {
    leads(page) && page.lease_ms > 0 && (page.step_started_ms.is_some() || page.owed() > 0)
}

/// Do the pages say that the engine sleeps, all of its data-parallel engines? The leader's word counts: workers of some engines do not
/// know of a pause. One engine's sleep is no excuse for another.
fn all_sleep(pages: &[PageObs]) -> bool {
    let sleeps = |page: &PageObs| page.phase == PagePhase::Sleep;
    pages.iter().any(sleeps) && pages.iter().filter(|page| leads(page)).all(sleeps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_fades_with_time_however_many_looks_there_are() {
        let policy = Policy::default();
        let after_two_seconds = |every_ms: usize| {
            let mut clock = SilenceClock::default();
            clock.tick(0, &Observation::default(), false, &policy);
            clock.tick(1_000, &Observation { agent_gap_ms: 400, ..Observation::default() }, false, &policy);
            clock.moved();
            let looks = (1_000..=3_000).step_by(every_ms);
            looks.map(|now_ms| clock.tick(now_ms, &Observation::default(), false, &policy).jitter_ms).last()
        };
        assert_eq!(after_two_seconds(500), after_two_seconds(100));
        assert!(after_two_seconds(100).is_some_and(|ms| (100..400).contains(&ms)));
    }
}
