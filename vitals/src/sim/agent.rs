//! The agent beside the engine: its ticks, its 1 Hz scrape and probe (at most one of each outstanding), its own lateness.

use super::book::At;
use super::chance::Chance;
use super::fault::Way;
use super::profile::{EngineKind, MS, SECOND, Us};
use super::queue::QueueLook;
use super::shows::answer_us;
use super::world::{Missing, World};
use crate::observation::{FrontendObs, MetricsObs, Ms, Observation, Signal};

const SCRAPE_DEADLINE: Us = 5 * SECOND;
const PROBE_DEADLINE: Us = 2 * SECOND;

/// A question that is out: when it was asked and when its answer, if any, is there.
type Asked = Option<(Us, Option<Us>)>;

/// What the agent keeps from tick to tick; the observation's allocations are reused.
#[derive(Debug, Clone)]
pub struct Agent {
    pub obs: Observation,
    pub chance: Chance,
    pub log_seen: Us,
    pub looked_at: Us,
    pub busy_before: Us,
    pub cpu_us: Us,
    pub compiler_us: Us,
    pub gpu_next: Us,
    pub queue: QueueLook,
    pub xids_told: usize,
    scrape_next: Us,
    scrape: Asked,
    probe_next: Us,
    probe: Asked,
    born: Us,
}

impl Agent {
    pub fn new(now: Us, chance: Chance) -> Self {
        Self {
            obs: Observation::default(),
            chance,
            log_seen: now,
            looked_at: now,
            busy_before: 0,
            cpu_us: 0,
            compiler_us: 0,
            gpu_next: 0,
            queue: QueueLook::default(),
            xids_told: 0,
            scrape_next: now,
            scrape: None,
            probe_next: now,
            probe: None,
            born: 0,
        }
    }

    /// A state letter is a sample: a thread that steps is found running four times in five.
    pub fn chance_of_running(&mut self) -> bool {
        !self.chance.bits().is_multiple_of(5)
    }

    /// A native start-up that is stuck last said something a little before it stuck.
    pub fn startup_said_ms(&self, world: &World) -> Ms {
        world.fault.map_or(0, |(at, _)| at / MS)
    }

    /// A new process: what was asked of the old one is void.
    fn follow(&mut self, world: &World) {
        if self.born == world.env.born {
            return;
        }
        self.born = world.env.born;
        (self.scrape, self.probe) = (None, None);
        (self.busy_before, self.cpu_us, self.compiler_us) = (0, 0, 0);
        self.obs.metrics = Signal::default();
        self.obs.frontend = Signal::default();
    }

    /// Connections of the agent's own: questions that are out.
    pub fn asking(&self) -> u32 {
        u32::from(self.scrape.is_some()) + u32::from(self.probe.is_some())
    }

    pub fn scrape(&mut self, world: &World) {
        self.follow(world);
        if !world.engine.profile.signals.metrics || world.misses(Missing::Metrics) {
            self.scrape = None;
            return;
        }
        if self.scrape.is_none() && world.now >= self.scrape_next {
            let answer = answer_us(world, self, true).map(|after| world.now.saturating_add(after));
            self.scrape = Some((world.now, answer));
        }
        let Some((asked, answer)) = self.scrape else { return };
        // what is there within a few milliseconds is there for this tick
        if answer.is_some_and(|at| at <= world.now + 60 * MS && at < asked + SCRAPE_DEADLINE) {
            read_metrics(world, self.obs.metrics.value.get_or_insert_with(MetricsObs::default));
            self.obs.metrics.at_ms = asked / MS;
            self.scrape_over(asked, world.now);
        } else if world.now >= asked + SCRAPE_DEADLINE {
            self.scrape_over(asked, world.now);
        }
    }

    fn scrape_over(&mut self, asked: Us, now: Us) {
        self.scrape = None;
        self.scrape_next = (asked + SECOND).max(now);
    }

    pub fn probe(&mut self, world: &World) {
        if !world.engine.profile.signals.frontend || world.misses(Missing::Frontend) {
            self.probe = None;
            return;
        }
        if self.probe.is_none() && world.now >= self.probe_next {
            let answer = answer_us(world, self, false).map(|after| world.now.saturating_add(after));
            self.probe = Some((world.now, answer));
        }
        let Some((asked, answer)) = self.probe else { return };
        let refused = world.now < world.env.ready;
        let known = self.obs.frontend.value;
        if answer.is_some_and(|at| at <= world.now + 60 * MS && at <= asked + PROBE_DEADLINE) {
            let up = FrontendObs {
                answers: true,
                status: Some(200),
                silent_since_ms: None,
                ever_answered: true,
                elsewhere: false,
            };
            self.obs.frontend = Signal::at(world.now / MS, up);
        } else if refused || world.now >= asked + PROBE_DEADLINE {
            let down = FrontendObs {
                answers: false,
                status: None,
                silent_since_ms: known.and_then(|k| k.silent_since_ms).or(Some(asked / MS)),
                ever_answered: known.is_some_and(|k| k.ever_answered),
                elsewhere: false,
            };
            self.obs.frontend = Signal::at(world.now / MS, down);
        } else {
            return;
        }
        self.probe = None;
        self.probe_next = (asked + SECOND).max(world.now);
    }
}

/// What the engine's page of metrics says now.
pub(super) fn read_metrics(world: &World, metrics: &mut MetricsObs) {
    let engine = &world.engine;
    let asleep = world.now < world.env.asleep;
    let load = engine.profile.signals.load.then_some(engine.book.in_flight);
    let native = engine.profile.kind == EngineKind::Native;
    let load = if native { Some(engine.book.in_flight) } else { load };
    engine.shown.observe(&engine.profile, asleep, load, metrics);
    // a scheduler that admits nobody still says how many wait
    let closed = world.fault.is_some_and(|(_, fault)| fault.way == Way::Admission) && engine.step.is_none();
    // llama.cpp counts its slots when it is asked
    if (closed && engine.profile.iter_stats) || engine.profile.kind == EngineKind::LlamaCpp {
        let (running, waiting) = engine.queue();
        (metrics.running, metrics.waiting) = (Some(f64::from(running)), Some(f64::from(waiting)));
    }
    // the router's queue goes on behind a shard that hangs
    if engine.profile.kind == EngineKind::Tgi && !engine.mood.front_dead {
        let came = |at: At| matches!(at, At::Waiting) || matches!(at, At::Front(at) if at <= world.now);
        let queued = engine.live.iter().filter(|request| !request.gone && came(request.at)).count();
        metrics.waiting = Some(queued as f64);
    }
}
