//! One replica, its clients and its host in virtual time: what happens, when, and what it does to the engine.

use super::act::FETCH_PERMILLE;
pub use super::act::{Act, Missing};
use super::bystanders::Bystanders;
use super::chance::Chance;
use super::clients::{Clients, Mode};
use super::engine::Engine;
use super::fault::Fault;
use super::fences::ENV_GRACE;
use super::profile::{EngineKind, MS, Profile, SECOND, Us};

/// States of the environment that last: each until a time.
#[derive(Debug, Clone, Default)]
pub struct Env {
    pub starved: Us,
    /// When that began.
    pub starved_since: Us,
    pub throttled: Us,
    pub frozen: Us,
    pub debugged: Us,
    pub jit: Us,
    pub asleep: Us,
    pub paused: Us,
    pub maintained: Us,
    pub hot: Us,
    pub slow_scrapes: Us,
    pub loaded: Us,
    pub crawling: Us,
    pub blind: [(Us, Missing); 2],
    /// The agent does not run before.
    pub agent_held: Us,
    /// The whole machine stands still until then.
    pub paused_vm: Us,
    /// The process does not exist before; it can serve after `ready`.
    pub born: Us,
    pub ready: Us,
    pub boot_permille: u64,
    /// The start-up fetches its model instead of reading it.
    pub fetched: bool,
    /// Anything that deserves a close look lasts until then.
    pub eventful: Us,
    /// The environment stood in the engine's way until then, and so long in all.
    pub stood_still: Us,
    pub stood_us: Us,
    /// Until then steps are many times longer than any before, and nothing announced it.
    pub slowed: Us,
    /// What excuses any silence of a hang's history ends then.
    pub excused_until: Us,
    /// How often the agent has begun anew.
    pub agent_restarts: u64,
    /// Log lines to come: when, and which signature.
    pub log: Vec<(Us, &'static str)>,
}

/// The whole.
#[derive(Debug, Clone)]
pub struct World {
    pub now: Us,
    pub engine: Engine,
    pub clients: Clients,
    pub env: Env,
    /// What will happen, the next last.
    pub script: Vec<(Us, Act)>,
    pub fault: Option<(Us, Fault)>,
    /// The gate is shut.
    pub fenced: bool,
    pub kill_sent: Option<Us>,
    /// Set by [`Act::AgentRestart`] and [`Act::Restart`] until the history takes notice.
    pub agent_restarted: bool,
    pub bystanders: Bystanders,
    next_leave: Us,
    pub chance: Chance,
}

impl World {
    /// A replica whose process starts now.
    pub fn new(profile: Profile, clients: Clients, start: Us, mut chance: Chance) -> Self {
        let ready = start + profile.startup_us;
        let mut engine = Engine::new(profile, start, chance.split());
        engine.free_at = ready;
        let env = Env { born: start, ready, boot_permille: 700, ..Env::default() };
        Self {
            now: start,
            engine,
            clients,
            env,
            script: Vec::new(),
            fault: None,
            fenced: true,
            kill_sent: None,
            agent_restarted: false,
            bystanders: Bystanders::default(),
            next_leave: Us::MAX,
            chance,
        }
    }

    /// Adds to the script; the order does not matter.
    pub fn plan(&mut self, at: Us, act: Act) {
        self.script.push((at, act));
        self.script.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    }

    /// When the next scripted thing happens.
    pub fn next_act(&self) -> Us {
        self.script.last().map_or(Us::MAX, |(at, _)| *at)
    }

    /// Runs to `until`; stops early where something begins that deserves a close look. Returns what happened, if anything did.
    pub fn advance(&mut self, until: Us) -> Option<Act> {
        while self.now < until {
            let next = until
                .min(self.clients.next.min(self.clients.mode_ends))
                .min(self.next_leave)
                .min(self.next_act())
                .min(self.pace_ends());
            let next = next.max(self.now);
            let reached = self.engine.advance(next);
            self.now = self.now.max(reached);
            if reached < next {
                return None;
            }
            self.leave();
            self.settle();
            if let Some(act) = self.script.pop_if(|(at, _)| *at <= self.now).map(|(_, act)| act) {
                self.happen(act);
                return Some(act);
            }
            if self.arrive() {
                return None;
            }
        }
        None
    }

    /// Who comes now; true where somebody comes to an engine that owes nothing.
    fn arrive(&mut self) -> bool {
        self.clients.turn(self.now, &self.engine.profile);
        if self.now < self.clients.next {
            return false;
        }
        let before = self.engine.book.in_flight;
        let coming = self.clients.come(self.now, before);
        if self.fenced || self.now < self.env.ready {
            return false;
        }
        for _ in 0..coming {
            self.submit();
        }
        before == 0 && coming > 0
    }

    pub fn submit(&mut self) {
        let request = self.clients.request(self.now, &self.engine.profile);
        self.next_leave = self.next_leave.min(request.leaves);
        self.engine.submit(request);
    }

    fn leave(&mut self) {
        if self.now < self.next_leave {
            return;
        }
        let engine = &mut self.engine;
        for request in engine.live.change().iter_mut().filter(|request| !request.gone && request.leaves <= self.now) {
            request.gone = true;
            engine.book.abandon(request);
        }
        let left = engine.live.iter().filter(|request| !request.gone);
        self.next_leave = left.map(|request| request.leaves).min().unwrap_or(Us::MAX);
    }

    /// A silence on purpose that this engine's signals cannot show is done under maintenance, as the runbooks want it.
    fn declared(&self, act: Act) -> Act {
        let (kind, signals) = (self.engine.profile.kind, self.engine.profile.signals);
        match act {
            Act::Sleep(span) if !(kind == EngineKind::Vllm && signals.metrics || signals.page) => {
                Act::Maintenance(span)
            }
            Act::Pause(span) if kind != EngineKind::Vllm || !signals.log => Act::Maintenance(span),
            act => act,
        }
    }

    /// Does an act.
    fn happen(&mut self, act: Act) {
        let now = self.now;
        if now < self.env.paused_vm {
            // nothing happens on a machine that stands still
            return self.plan(self.env.paused_vm, act);
        }
        let act = self.declared(act);
        let env = &mut self.env;
        let mut stop = |env: &mut Env, span: Us| {
            env.stood_us += self.engine.hold(now, now + span);
            env.stood_still = env.stood_still.max(now + span);
            env.eventful = env.eventful.max(now + span + 20 * SECOND);
            now + span
        };
        match act {
            Act::VmPause(span) => {
                env.paused_vm = stop(env, span);
                env.agent_held = env.agent_held.max(now + span);
            }
            Act::Starve(span) => {
                if now >= env.starved {
                    env.starved_since = now;
                }
                env.starved = stop(env, span).max(env.starved);
            }
            // two that a paused machine put off begin at once: the longer counts
            Act::Freeze(span) => env.frozen = stop(env, span).max(env.frozen),
            Act::Debug(span) => env.debugged = stop(env, span).max(env.debugged),
            Act::Late(span) => {
                env.agent_held = env.agent_held.max(now + span);
                env.eventful = env.eventful.max(now + span + 20 * SECOND);
            }
            Act::Jit(span) => {
                env.jit = stop(env, span).max(env.jit);
                env.stood_still = env.stood_still.min(now);
            }
            Act::Swap(span) => {
                env.slowed = env.slowed.max(stop(env, span) + ENV_GRACE);
                env.stood_still = env.stood_still.min(now);
            }
            Act::Sleep(span) => {
                env.asleep = stop(env, span).max(env.asleep);
            }
            Act::Pause(span) => {
                env.paused = stop(env, span);
                env.log.push((now, "vllm-paused"));
                env.log.push((now + span, "vllm-resumed"));
            }
            Act::Maintenance(span) => env.maintained = stop(env, span).max(env.maintained),
            Act::Fault(fault) => {
                self.fault = Some((now, fault));
                env.eventful = Us::MAX;
                fault.strike(now, &mut self.engine, env, &mut self.chance);
            }
            other => self.lasting(other),
        }
    }

    /// Acts that change a state and stop nothing.
    fn lasting(&mut self, act: Act) {
        let now = self.now;
        let env = &mut self.env;
        match act {
            Act::Loaded(span, pace) => {
                env.loaded = now + span;
                env.eventful = env.eventful.max(now + span + 20 * SECOND);
                self.engine.set_host(now, pace);
                self.noise(span);
            }
            Act::Throttle(span, pace) => {
                (env.throttled, env.stood_still) = (now + span, env.stood_still.max(now + span));
                env.eventful = env.eventful.max(now + span + 20 * SECOND);
                self.engine.set_pace(now, pace);
            }
            Act::Crawl(span, pace) => {
                (env.crawling, env.slowed) = (now + span, now + span + 3 * ENV_GRACE);
                env.eventful = env.eventful.max(now + span + 20 * SECOND);
                self.engine.set_pace(now, pace);
            }
            Act::Hot(span) => {
                (env.hot, env.slow_scrapes) = (now + span, now + span);
                env.eventful = env.eventful.max(now + span);
                self.engine.book.lump = self.chance.scale(100 * MS, 1_500 * MS);
            }
            Act::SlowScrapes(span) => {
                env.slow_scrapes = now + span;
                env.eventful = env.eventful.max(now + span);
            }
            Act::Blind(span, missing) => {
                env.blind = [(now + span, missing), env.blind[0]];
                env.eventful = env.eventful.max(now + span + 20 * SECOND);
            }
            Act::AgentRestart => {
                self.agent_restarted = true;
                env.agent_restarts += 1;
                env.eventful = env.eventful.max(now + 20 * SECOND);
            }
            Act::GateRestart => {
                for request in self.engine.live.change() {
                    request.gone = true;
                }
                self.engine.book.restart();
                env.eventful = env.eventful.max(now + 20 * SECOND);
            }
            Act::Restart(span, permille) => self.restart(span, permille, false),
            Act::Fetch(span) => self.restart(span, FETCH_PERMILLE, true),
            Act::Hush => (self.clients.modes, self.clients.mode_ends) = (vec![Mode::Idle], now),
            Act::Burst(count) if !self.fenced => (0..count).for_each(|_| self.submit()),
            _ => {}
        }
    }

    fn restart(&mut self, span: Us, permille: u64, fetched: bool) {
        let env = &mut self.env;
        env.born = self.now + 1_000 * MS;
        env.ready = env.born + span;
        (env.boot_permille, env.fetched) = (permille, fetched);
        // what the old process was told ends with it
        (env.asleep, env.paused, env.jit) = (env.asleep.min(self.now), env.paused.min(self.now), env.jit.min(self.now));
        env.eventful = env.eventful.max(env.ready + 60 * SECOND);
        self.engine.restart(env.ready);
    }

    /// A loaded host: pauses of either, heavy-tailed, for this long.
    fn noise(&mut self, span: Us) {
        let mut at = self.now;
        let until = self.now + span;
        while self.script.len() < 4_000 {
            at += self.chance.exponential(8 * SECOND).max(50 * MS);
            if at >= until {
                break;
            }
            let length = self.chance.heavy(40 * MS, 2 * SECOND);
            let act = if self.chance.permille(500) { Act::Late(length) } else { Act::Starve(length) };
            self.script.push((at, act));
        }
        self.script.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    }

    /// When steps next have their usual length again, if that is to come.
    fn pace_ends(&self) -> Us {
        let env = &self.env;
        let ends = [env.loaded, env.crawling.max(env.throttled)];
        ends.into_iter().filter(|at| *at > self.now).min().unwrap_or(Us::MAX)
    }

    /// Ends the states whose time is over.
    fn settle(&mut self) {
        let (now, env) = (self.now, &self.env);
        if now >= env.loaded {
            self.engine.set_host(now, 1_000);
        }
        if now >= env.crawling.max(env.throttled) {
            self.engine.set_pace(now, 1_000);
        }
        if now >= env.hot {
            self.engine.book.lump = 0;
        }
    }

    /// Is this signal missing now?
    pub fn misses(&self, missing: Missing) -> bool {
        self.env.blind.iter().any(|(until, which)| *which == missing && self.now < *until)
    }

    /// Does nothing happen that needs more than a look a second, and one where something begins or ends?
    pub fn steady(&self) -> bool {
        self.now >= self.env.eventful && !self.settling()
    }

    /// Does it start, or has it come up a moment ago? Who comes then may find the gate shut, so each look counts.
    pub fn settling(&self) -> bool {
        self.now < self.env.ready.saturating_add(30 * SECOND)
    }

    /// Is a long step or a silence under way, so that a deadline of the detector's may pass in it?
    pub fn pending(&self) -> bool {
        let engine = &self.engine;
        let silent = engine.book.in_flight > 0 && engine.watch.is_silent(self.now);
        silent || engine.step.as_ref().is_some_and(|step| engine.watch.is_long(step))
    }
}
