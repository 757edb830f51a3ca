//! The checker: it knows the truth of a history and holds every outcome against it.

use super::bounds::{CONFIRM_DRAINED_MAX, Deadline, confirm_by, deadline, fence_max, is_blind, scene, warm_fence_max};
use super::fault::{Fault, Way};
use super::fences::{ENV_GRACE, Fences};
use super::history::Spec;
use super::kinds::{Kind, Truth};
use super::profile::{MS, SECOND, Us};
use super::world::World;
use crate::rivals::watch;
use crate::verdict::{Action, Outcome, StallClass, Verdict};

/// The slowest rival acts 450 s after the last step.
const LINGER: Us = 500 * SECOND;

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    FalseFence,
    FalseEviction,
    MissedFence,
    MissedStall,
    WrongClass,
}

impl Failure {
    pub fn name(self) -> &'static str {
        match self {
            Self::FalseFence => "false fence",
            Self::FalseEviction => "false eviction",
            Self::MissedFence => "hang not fenced in time",
            Self::MissedStall => "hang not confirmed in time",
            Self::WrongClass => "wrong class",
        }
    }
}

/// The result of a history.
#[derive(Debug, Clone)]
pub struct Verdicts {
    pub kind: &'static Kind,
    pub seed: u64,
    pub engine: String,
    pub failures: Vec<(Us, Failure)>,
    /// The scene of the first failure: what was said, and what was true.
    pub scene: String,
    /// Engine time in which the truth was benign, and in which work was owed then.
    pub benign_us: Us,
    pub busy_us: Us,
    pub ticks: u64,
    pub false_evictions: u64,
    /// Fences of a healthy engine, by whose doing they were.
    pub fences: Fences,
    pub fence_ms: Option<u64>,
    /// The deadline that the fence of a hang named, where that was the engine's own rhythm or a number of the policy.
    pub deadline: Option<Deadline>,
    pub confirm_ms: Option<u64>,
    pub class: Option<StallClass>,
    pub class_right: bool,
    /// No signal that this engine gives could show the hang.
    pub blind: bool,
    /// It never owed anything after the fault.
    pub unowed: bool,
}

/// Follows one history.
#[derive(Debug, Clone)]
pub struct Checker {
    verdicts: Verdicts,
    fault: Option<(Us, Fault)>,
    /// When work was first owed with the fault in place.
    owed_at: Option<Us>,
    /// How long the environment had stood in the engine's way by then.
    stood_before: Us,
    drained: bool,
    fence_at: Option<Us>,
    last: Us,
    over: bool,
    wants_kill: bool,
    lease_ms: u64,
    chunks: u64,
    /// The hang is one of warm decode, and nobody has owed a prompt since.
    in_decode: bool,
    env_until: Us,
    linger: bool,
}

impl Checker {
    pub fn new(spec: &Spec, world: &World) -> Self {
        let profile = &world.engine.profile;
        let signals = profile.signals;
        let has = |on: bool, name: &'static str| if on { name } else { "" };
        let engine = format!(
            "{} {}tp{} {} step {} ms chunk {:?} seqs {} signals{}{}{}{}{}{}",
            profile.kind.name(),
            if profile.engines > 1 { format!("dp{} ", profile.engines) } else { String::new() },
            profile.ranks,
            if profile.on_gpu { "gpu" } else { "cpu" },
            profile.step_us / MS,
            profile.chunk,
            profile.seqs_max,
            has(signals.gate, " gate"),
            has(signals.metrics, " metrics"),
            has(signals.page, " page"),
            has(signals.load, " load"),
            has(signals.proc, " proc"),
            has(signals.frontend, " front"),
        );
        Self {
            verdicts: Verdicts {
                kind: spec.kind,
                seed: spec.seed,
                engine,
                failures: Vec::new(),
                scene: String::new(),
                benign_us: 0,
                busy_us: 0,
                ticks: 0,
                false_evictions: 0,
                fences: Fences::default(),
                fence_ms: None,
                deadline: None,
                confirm_ms: None,
                class: None,
                class_right: false,
                blind: false,
                unowed: true,
            },
            fault: None,
            owed_at: None,
            stood_before: 0,
            drained: false,
            fence_at: None,
            last: world.now,
            over: false,
            wants_kill: false,
            lease_ms: 0,
            chunks: 0,
            in_decode: spec.kind.name == "warm",
            env_until: 0,
            linger: spec.linger,
        }
    }

    /// Nothing more can be learned from this history.
    pub fn is_over(&self) -> bool {
        // others, who may know of a hang by work alone, are watched until some has been owed for long
        let lingers = self.linger && self.fault.is_some() && self.owed_at.is_none_or(|at| self.last < at + LINGER);
        self.over && !lingers
    }

    /// The driver shall send the kill (a process that outlives it).
    pub fn wants_kill(&self) -> bool {
        self.wants_kill
    }

    /// Is the engine hung in truth, and since when is work owed to it?
    pub fn hung(&self) -> bool {
        self.fault.is_some()
    }

    /// What is true now, for rules that are judged on the same history.
    pub fn truth(&self, now: Us) -> watch::Truth {
        match self.fault {
            Some((_, fault)) if fault.ends.is_some() || self.verdicts.blind => watch::Truth::Neutral,
            Some(_) => self.owed_at.map_or(watch::Truth::Neutral, |at| watch::Truth::Hang { since_ms: at / MS }),
            None if now <= self.env_until => watch::Truth::Neutral,
            None => watch::Truth::Benign,
        }
    }

    /// The fault has been done.
    pub fn struck(&mut self, world: &World) {
        self.fault = world.fault;
        self.chunks = 0;
        self.verdicts.blind = is_blind(world);
    }

    pub fn tick(&mut self, world: &World, outcome: &Outcome) {
        let elapsed = world.now.saturating_sub(std::mem::replace(&mut self.last, world.now));
        self.verdicts.ticks += 1;
        // a process that is not there is no engine to be right or wrong about
        self.env_until = (world.env.stood_still + ENV_GRACE).max(world.env.born.min(world.now + 1));
        if self.over {
            if self.owed_at.is_none() && self.fault.is_some() {
                self.note_owed(world);
            }
            return;
        }
        match self.fault {
            None => self.benign(world, outcome, elapsed),
            Some((at, fault)) => match fault.ends {
                Some(span) if world.now > at + span + 15 * SECOND => self.benign(world, outcome, elapsed),
                Some(_) => self.passing(world, outcome),
                None => self.hanging(world, outcome, fault),
            },
        }
    }

    fn benign(&mut self, world: &World, outcome: &Outcome, elapsed: Us) {
        self.verdicts.benign_us += elapsed;
        if world.engine.book.in_flight > 0 {
            self.verdicts.busy_us += elapsed;
        }
        if let Some((at, scene)) = self.verdicts.fences.tick(world, outcome) {
            self.note(at, Failure::FalseFence, || scene);
        }
        if outcome.actions.contains(&Action::WantRestart) {
            self.verdicts.false_evictions += 1;
            self.fail(world, outcome, Failure::FalseEviction);
            self.over = true;
        }
    }

    /// A freeze that passes: fenced is right, confirmed is the policy's.
    fn passing(&mut self, world: &World, outcome: &Outcome) {
        self.note_owed(world);
        if outcome.verdict.class().is_some() && self.verdicts.fence_ms.is_none() {
            self.verdicts.fence_ms = Some(self.age_ms(world.now));
        }
        if outcome.actions.contains(&Action::WantRestart) && self.verdicts.confirm_ms.is_none() {
            self.verdicts.confirm_ms = Some(self.age_ms(world.now));
            self.verdicts.class = outcome.verdict.class().cloned();
            self.over = true;
        }
    }

    fn note_owed(&mut self, world: &World) {
        // what was under way comes out yet, be it only from the core: the hang is owed for from the last of it
        let front = self.fault.is_some_and(|(_, fault)| fault.way == Way::Front);
        let counters = &world.engine.counters;
        let turns = match self.fault.map(|(_, fault)| fault.way) {
            // a loop that only turns takes in whom it still can, and does their prompts
            Some(Way::Livelock) => counters.admitted + counters.prompt,
            Some(Way::Decode) => counters.admitted,
            _ => 0,
        };
        let core = if front { counters.generated } else { 0 } + turns;
        let out = world.engine.book.chunks + core;
        let owed_before = self.owed_at;
        if out != self.chunks {
            self.chunks = out;
            self.owed_at = self.owed_at.map(|_| world.now);
        }
        if world.engine.book.in_flight > 0 {
            if self.owed_at.is_none() {
                let forwarded = world.engine.live.iter().filter(|r| !r.gone).map(|r| r.forwarded).min();
                self.owed_at = Some(forwarded.unwrap_or(world.now).max(self.fault.map_or(0, |(at, _)| at)));
            }
            self.verdicts.unowed = false;
        } else if self.owed_at.is_some() {
            self.drained = true;
        }
        if self.owed_at != owed_before {
            self.stood_before =
                world.env.stood_us - world.env.stood_still.saturating_sub(world.now).min(world.env.stood_us);
        }
    }

    fn age_ms(&self, now: Us) -> u64 {
        let unowed_at = || self.fault.filter(|(_, fault)| fault.way == Way::CoreGone).map_or(now, |(at, _)| at);
        now.saturating_sub(self.owed_at.unwrap_or_else(unowed_at)) / MS
    }

    fn hanging(&mut self, world: &World, outcome: &Outcome, fault: Fault) {
        if matches!(fault.way, Way::Startup | Way::Crash) {
            self.owed_at = self.owed_at.or(self.fault.map(|(at, _)| at));
            self.verdicts.unowed = false;
        } else {
            self.note_owed(world);
        }
        if let Some(step) = world.engine.step.filter(|_| world.engine.native()) {
            self.lease_ms = self.lease_ms.max(step.lease_ms);
        }
        self.in_decode &= world.engine.book.prompt_owed == 0;
        // that a process is gone is told whether or not anything is owed
        self.verdicts.unowed &= outcome.verdict.class() != Some(&StallClass::ProcessDied);
        let dead = fault.way == Way::Crash || fault.way == Way::CoreGone;
        let caught = outcome.verdict.class().is_some() || (dead && outcome.verdict == Verdict::Dead);
        if caught && self.fence_at.is_none() {
            self.fence_at = Some(world.now);
            self.verdicts.fence_ms = Some(self.age_ms(world.now));
            self.verdicts.deadline = deadline(outcome);
            self.judge_warm(world, outcome);
        }
        if let Verdict::Stalled(class) = &outcome.verdict {
            let first = self.verdicts.confirm_ms.is_none();
            if first {
                self.verdicts.confirm_ms = Some(self.age_ms(world.now));
                self.verdicts.class_right = fault.accepts(&world.engine.profile, class);
                self.verdicts.class = Some(class.clone());
            }
            self.wants_kill = fault.undead;
            let escalated = outcome.actions.contains(&Action::EscalateToNode);
            if !fault.undead || escalated {
                self.verdicts.class_right &= !fault.undead || *class == StallClass::Unkillable;
                self.over = true;
                self.judge_class(world, outcome);
            }
        } else if dead && outcome.verdict == Verdict::Dead {
            (self.verdicts.confirm_ms, self.verdicts.class_right) = (Some(self.age_ms(world.now)), true);
            self.over = true;
        }
        self.watch_bounds(world, outcome, fault);
    }

    /// Goal 1c: warm decode is fenced by its own rhythm, or sooner by a number of the policy, as long as nobody has come since whose prompt
    /// could say otherwise.
    fn judge_warm(&mut self, world: &World, outcome: &Outcome) {
        let silence = world.now.saturating_sub(self.owed_at.unwrap_or(world.now));
        let most = self
            .verdicts
            .deadline
            .map(|deadline| warm_fence_max(world, deadline) + world.env.stood_us.saturating_sub(self.stood_before));
        if self.in_decode && most.is_none_or(|most| silence > most) {
            self.fail(world, outcome, Failure::MissedFence);
        }
    }

    fn judge_class(&mut self, world: &World, outcome: &Outcome) {
        // which of several engines it was, where its gauges are frozen at zero, no signal tells
        let nameless = world.engine.profile.engines > 1 && is_blind(world);
        if !self.verdicts.class_right && !nameless {
            self.fail(world, outcome, Failure::WrongClass);
        }
    }

    fn watch_bounds(&mut self, world: &World, outcome: &Outcome, fault: Fault) {
        let Some(owed_at) = self.owed_at.filter(|_| !self.over && !self.verdicts.blind) else { return };
        let owed_at = owed_at.max(world.env.excused_until);
        let fence_max = fence_max(world, fault, self.lease_ms) + world.env.stood_us.saturating_sub(self.stood_before);
        if self.fence_at.is_none() && is_blind(world) {
            self.verdicts.blind = true;
            self.over = true;
            return;
        }
        let age = world.now.saturating_sub(owed_at);
        match self.fence_at {
            None if age > fence_max + if self.drained { CONFIRM_DRAINED_MAX } else { 0 } => {
                self.fail(world, outcome, Failure::MissedFence);
                self.over = true;
            }
            Some(at) if world.now > confirm_by(world, fault, owed_at, at.max(owed_at + fence_max), self.drained) => {
                self.fail(world, outcome, Failure::MissedStall);
                self.over = true;
            }
            _ => {}
        }
    }

    fn fail(&mut self, world: &World, outcome: &Outcome, failure: Failure) {
        self.note(world.now, failure, || scene(world, outcome));
    }

    fn note(&mut self, at: Us, failure: Failure, scene: impl FnOnce() -> String) {
        if self.verdicts.failures.is_empty() {
            self.verdicts.scene = scene();
        }
        if self.verdicts.failures.len() < 16 {
            self.verdicts.failures.push((at, failure));
        }
    }

    /// The history is over.
    pub fn finish(mut self, world: &World) -> Verdicts {
        if self.verdicts.fences.blinks > Fences::blinks_max(self.verdicts.benign_us, world.env.agent_restarts) {
            self.note(world.now, Failure::FalseFence, || "more blinks than docs/decisions promises".to_owned());
        }
        if self.verdicts.kind.truth != Truth::Hang || self.over || self.verdicts.blind {
            return self.verdicts;
        }
        if self.owed_at.is_some() {
            let missed = if self.fence_at.is_some() { Failure::MissedStall } else { Failure::MissedFence };
            self.verdicts.failures.push((world.now, missed));
        }
        self.verdicts
    }
}
