//! One history: the world, the agent beside it, the real detector, and the checker that knows the truth.

use super::agent::Agent;
use super::chance::{Chance, mix};
use super::check::{Checker, Verdicts};
use super::kinds::{self, Kind};
use super::pod::Pod;
use super::profile::{MS, SECOND, Us};
use super::script::{self, START};
use super::shows;
use super::world::{Act, World};
use crate::detector::{Detector, Policy};
use crate::learned::{Learned, WRITTEN_EVERY_MS};
use crate::observation::{Ms, Observation};
use crate::verdict::{Action, Outcome, Verdict};

/// How often the detector is stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ticks {
    /// Every 100 ms, as an agent does.
    Fine,
    /// Every 100 ms where a case is open, or the environment disturbs an engine that holds work; else each second, or every ten where
    /// nothing is owed and nothing disturbs, and where a long step or a silence begins or ends, and where a deadline of the detector's passes.
    Coarse,
}

const FINE: Us = 100 * MS;
const STEADY: Us = SECOND;
const IDLE: Us = 10 * SECOND;
/// An agent calls this much lateness a gap (`agent/src/watch`).
const GAP: Us = 150 * MS;

/// Somebody who looks at the same observations: other rules, a recorder.
pub trait Watcher {
    /// One tick; `outcome` is the detector's.
    fn tick(&mut self, now_ms: Ms, obs: &Observation, outcome: &Outcome, checker: &Checker);
}

/// Nobody.
impl Watcher for () {
    fn tick(&mut self, _: Ms, _: &Observation, _: &Outcome, _: &Checker) {}
}

/// Which history.
#[derive(Debug, Clone, Copy)]
pub struct Spec {
    pub kind: &'static Kind,
    pub seed: u64,
    pub ticks: Ticks,
    /// Goes on after the detector's confirmation, so that slower rules have their turn.
    pub linger: bool,
    /// No life is longer.
    pub most: Us,
}

impl Spec {
    /// This kind and seed, whole.
    pub fn new(kind: &'static Kind, seed: u64, ticks: Ticks) -> Self {
        Self { kind, seed, ticks, linger: false, most: Us::MAX }
    }

    /// The history number `index` of a run with this seed.
    pub fn dealt(seed: u64, index: u64, ticks: Ticks) -> Self {
        let own = mix(seed ^ mix(index));
        Self::new(kinds::deal(mix(own) >> 8), own, ticks)
    }
}

/// Runs one history to its end.
pub fn run(spec: &Spec, policy: &Policy, watcher: &mut dyn Watcher) -> Verdicts {
    let plot = script::write(spec.kind, spec.seed);
    let mut run = Run {
        detector: Detector::new(policy.clone(), START / MS),
        outcome: Outcome::default(),
        agent: Agent::new(START, Chance::new(mix(spec.seed))),
        checker: Checker::new(spec, &plot.world),
        world: plot.world,
        pod: Pod::new(plot.peers, &mut Chance::new(mix(spec.seed ^ 0x6470))),
        policy: policy.clone(),
        ticks: spec.ticks,
        last: START,
        due: FINE,
        learned: Learned::default(),
        learned_at: START,
    };
    let ends = plot.ends.min(START.saturating_add(spec.most));
    while run.world.now < ends && !run.checker.is_over() {
        run.advance_to_tick();
        run.tick(watcher);
    }
    run.checker.finish(&run.world)
}

struct Run {
    world: World,
    pod: Pod,
    agent: Agent,
    detector: Detector,
    /// What it said last.
    outcome: Outcome,
    checker: Checker,
    policy: Policy,
    ticks: Ticks,
    /// When the last tick was, and when the next is due after it.
    last: Us,
    due: Us,
    /// What the detector had learned when its memory was last written, and when that was.
    learned: Learned,
    learned_at: Us,
}

impl Run {
    /// Lets the world run until the agent looks again.
    fn advance_to_tick(&mut self) {
        let mut next = self.last + self.due + self.agent.chance.exponential(MS);
        while self.world.now < next {
            let act = self.world.advance(next);
            if act.is_some_and(|act| matches!(act, Act::Fault(_))) {
                self.checker.struck(&self.world);
            }
            if self.world.now < next && self.due > FINE {
                // something begins: look closely from here on
                next = self.world.now.max(self.last + FINE).next_multiple_of(FINE).min(next).max(self.world.now);
                // an agent ticked all along: what is late now is late since here
                self.due = next - self.last;
            }
            next = next.max(self.world.env.agent_held);
        }
    }

    fn tick(&mut self, watcher: &mut dyn Watcher) {
        let now = self.world.now;
        self.world.engine.book.pass_lumps(now);
        let late = now.saturating_sub(self.last + self.due);
        // a stretch that was cut short was not late
        self.agent.obs.agent_gap_ms = if late < GAP { 0 } else { late / MS };
        self.last = now;
        if std::mem::take(&mut self.world.agent_restarted) {
            // what is in its memory
            let paused_at = self.detector.paused_at();
            let same = self.world.env.born <= self.learned_at;
            let learned = if same { self.learned.clone() } else { Learned::default() };
            self.detector = Detector::new(self.policy.clone(), self.world.env.born.min(now) / MS)
                .with_pause(paused_at)
                .with_learned(learned);
            self.outcome = Outcome::default();
        }
        shows::observe(&self.world, &mut self.agent);
        if !self.pod.is_alone() {
            self.pod.look(&mut self.world, &self.agent);
        }
        let obs = if self.pod.is_alone() { &self.agent.obs } else { &self.pod.obs };
        self.detector.step_into(now / MS, obs, &mut self.outcome);
        if now.saturating_sub(self.learned_at) >= WRITTEN_EVERY_MS * MS {
            (self.learned, self.learned_at) = (self.detector.learned(), now);
        }
        self.checker.tick(&self.world, &self.outcome);
        watcher.tick(now / MS, obs, &self.outcome, &self.checker);
        if self.outcome.fenced {
            self.world.fenced = true;
        } else if self.outcome.actions.contains(&Action::Unfence) {
            self.world.fenced = false;
        }
        if self.checker.wants_kill() && self.world.kill_sent.is_none() {
            self.world.kill_sent = Some(now);
        }
        self.pod.follow(&self.world);
        self.due = self.interval();
        self.detector.looks_again_in(self.due / MS);
    }

    fn interval(&self) -> Us {
        let outcome = &self.outcome;
        let fine = (outcome.check_again_in_ms * MS).clamp(20 * MS, FINE);
        // what a native prefill step took is learned from one that was seen to end
        let engine = &self.world.engine;
        let prefills = engine.native() && engine.step.is_some_and(|step| step.prefill > 0);
        // an engine that holds nobody's work cannot be late, whatever is done to it; who comes to it is looked at at once
        let disturbed = !self.world.steady();
        if self.ticks == Ticks::Fine
            || outcome.verdict.class().is_some()
            || prefills
            || (disturbed && !engine.live.is_empty())
            || self.world.settling()
            // their steps are not followed one by one
            || self.pod.works()
        {
            return fine;
        }
        // not before every source says so: a scrape from before the end still tells of work
        let idle = outcome.verdict == Verdict::Idle && self.world.engine.book.in_flight == 0;
        let wish = if idle && !disturbed { IDLE } else { STEADY };
        let wish = wish.min(self.world.next_act().saturating_sub(self.world.now)).max(FINE);
        // a deadline of the detector's own is never slept through
        match self.detector.due_in_ms().filter(|_| disturbed || self.world.pending()) {
            Some(due_ms) => wish.min((due_ms + 1) * MS).max(20 * MS),
            None => wish,
        }
    }
}
