//! Signs: what moved since the last tick, and when each thing last moved, in counted time (see [`crate::excuse`]).
//!
//! This is the only place that compares two observations. A counter that goes back is a new process or a new gate: a new baseline,
//! never a movement.

mod front;
mod rest;
mod sight;
mod silence;

pub use self::sight::Sight;
pub(crate) use self::sight::handed_on_at;
use crate::backlog::Backlog;
use crate::cache::CacheSign;
use crate::ended::EndedSign;
use crate::excuse::Tick;
use crate::leaders::Leaders;
use crate::leavers::Leavers;
use crate::observation::{GateObs, MetricsObs, Ms, Observation};
use crate::owed::owed;
use crate::policy::Policy;
use crate::ranks::Ranks;
use crate::schedulers::Schedulers;
use front::FrontSign;
use rest::RestSign;
use silence::SilenceSign;

/// So many bytes read or written within so long are weights on their way, not a heartbeat's crumbs: ranks that wait for one another read
/// some hundred bytes of `/proc` at each look, for ever.
const READ_MIN: u64 = 1 << 20;
const READ_MS: Ms = 10_000;
/// So many are an adapter, a cache or weights once an engine serves: a front end whose processes keep their metrics in files reads them all at
/// each scrape, a few hundred kilobytes a second.
const LOADS_MIN: u64 = 32 << 20;
/// CPU time of a start-up is told over no less: the kernel counts it in ticks of 10 ms, and one of them in a look of 100 ms is no work.
const STARTUP_CPU_MS: Ms = 2_000;
/// What waits uses less of a core than this, in thousandths.
const STARTUP_CPU_PERMILLE: u64 = 100;

/// So many more open files are clients: our own scrape and probe have a connection each.
const OPENED_MIN: f64 = 3.0;

/// The state of all trackers. Marks are counted times.
#[derive(Debug, Clone, Default)]
pub struct Signs {
    pub ranks: Ranks,
    pub leaders: Leaders,
    pub schedulers: Schedulers,
    gate: Option<GateObs>,
    metrics: Option<MetricsObs>,
    /// When the scrape that `metrics` holds was true.
    pub metrics_sampled_ms: Ms,
    /// When what the gate said was true.
    pub gate_sampled_ms: Ms,
    pub gate_delivered_at: Ms,
    pub metrics_tokens_at: Ms,
    pub metrics_prompt_at: Ms,
    pub metrics_moved_at: Ms,
    /// The same without room that leavers gave back, which an engine does that does nothing else.
    metrics_worked_at: Ms,
    leavers: Leavers,
    pub metrics_iterations_at: Ms,
    pub cache: CacheSign,
    pub backlog: Backlog,
    pub ended: EndedSign,
    pub rest: RestSign,
    pub silence: SilenceSign,
    /// Files that the engine said it had open when anything of its page last moved.
    fds_at_move: Option<f64>,
    /// The engine's own queue grew: its scheduler has been told of work.
    pub metrics_queued_at: Ms,
    /// A progress series has moved between two scrapes while the gate held work and no request of it began or ended: this engine
    /// counts as it goes.
    pub counters_live: bool,
    /// Tokens have been counted between two scrapes while no request ended: this engine counts them as it makes them.
    pub tokens_live: bool,
    /// The gate's chunks, requests answered, and work held at the scrape before.
    gate_at_scrape: Option<(u64, u64, bool)>,
    /// The most prompt tokens that the gate has owed since the last delivery: a client that leaves takes its prompt out of the gate's
    /// sum at once, and out of the step under way never.
    pub prompt_in_step: u64,
    /// The longest prompt among them, where the gate tells.
    longest_in_step: Option<u64>,
    prompt_in_step_at: Ms,
    /// The most that the gate was seen to owe since the last delivery.
    owed_peak: u64,
    /// Since when work is owed without a break.
    pub owed_since: Ms,
    pub startup_moved_at: Ms,
    /// The same without CPU time, which a rank that waits for another burns as well: pages, bytes read or written, compilers.
    pub startup_solid_at: Ms,
    front: FrontSign,
    /// Bytes read and written, and since when they are counted.
    moved: Option<(u64, Ms)>,
    /// The same for what is loaded while it serves, and when that was last seen.
    loads_read: Option<(u64, Ms)>,
    loads_at: Option<Ms>,
    /// CPU time of a start-up, and since when it is counted.
    startup_cpu: Option<(Ms, Ms)>,
    /// There was a look at this process before.
    looked: bool,
    owed_before: bool,
    /// A lease was seen: the page keeps the whole contract (H5), also in a phase that declares none.
    native: bool,
}

impl Signs {
    /// A fresh process: page and metrics begin anew; the gate may well live on.
    pub fn restarted(&mut self, counted_ms: Ms) {
        let gate = self.gate.take();
        *self = Self {
            gate,
            startup_moved_at: counted_ms,
            startup_solid_at: counted_ms,
            gate_delivered_at: counted_ms,
            owed_since: counted_ms,
            ..Self::default()
        };
    }

    /// Takes one observation in.
    pub fn look<'a>(&mut self, tick: &Tick, obs: &'a Observation, policy: &Policy) -> Sight<'a> {
        let mut sight = Sight::of(tick.now_ms, obs, policy);
        self.native |= sight.pages.iter().any(|page| page.lease_ms > 0);
        sight.native = self.native;
        self.gate_sampled_ms = obs.gate.at_ms;
        self.look_at_gate(tick, &mut sight, policy);
        sight.startup_moved = self.ranks.look(tick, sight.pages);
        self.look_at_page(tick, &mut sight);
        self.look_at_metrics(tick, obs.metrics.at_ms, &mut sight);
        self.schedulers.look(tick, &sight, obs.metrics.at_ms);
        let scraped = obs.metrics.at_ms != sight.metrics_since_ms;
        self.cache.look(tick, &sight, scraped, obs.metrics.at_ms);
        self.backlog.look(tick, sight.proc);
        self.ended.look(tick, &sight);
        self.look_at_startup(tick, &mut sight);
        sight.frontend_silent_ms = self.front.look(tick, &sight, obs.frontend.at_ms, self.metrics_sampled_ms);
        sight.owed = owed(&sight);
        if sight.owed.is_some() && (!self.owed_before || sight.gate_began) {
            let since = sight.gate.and_then(|g| g.oldest_in_flight_ms).unwrap_or(tick.now_ms);
            self.owed_since = tick.mark(since);
        }
        self.owed_before = sight.owed.is_some();
        self.silence.look(tick, &sight, scraped);
        if let Some(rested_at) = self.rest.look(tick, &sight, self.metrics_sampled_ms, &self.leaders) {
            self.owed_since = self.owed_since.max(rested_at);
        }
        sight
    }

    fn look_at_gate(&mut self, tick: &Tick, sight: &mut Sight<'_>, policy: &Policy) {
        let Some(gate) = sight.gate else { return };
        let mut owed_before = self.gate.as_ref().map_or(0, |last| last.prompt_tokens_owed);
        if let Some(last) = self.gate.as_ref().filter(|last| last.epoch == gate.epoch) {
            let moved = gate.chunks_delivered > last.chunks_delivered || gate.bytes_delivered > last.bytes_delivered;
            sight.gate_delivered = moved;
            sight.delivered_count = gate.chunks_delivered.saturating_sub(last.chunks_delivered);
            sight.answered_count = gate.answered().saturating_sub(last.answered());
            sight.left_count = gate.requests_abandoned.saturating_sub(last.requests_abandoned);
            // whoever came and left since is in no sum, and may be in the step
            sight.prompt_tokens_came = gate.prompt_tokens_taken.saturating_sub(last.prompt_tokens_taken);
            owed_before = owed_before.saturating_add(sight.prompt_tokens_came);
            sight.gate_began = last.in_flight == 0 && gate.in_flight > 0;
            if moved {
                self.gate_delivered_at =
                    tick.mark(gate.last_delivery_ms.unwrap_or(tick.now_ms)).max(self.gate_delivered_at);
            }
        } else {
            // a gate that began anew owes us its history: count from its last delivery, or from now
            self.gate_delivered_at =
                gate.last_delivery_ms.map_or(tick.counted_ms, |at| tick.mark(at)).max(self.gate_delivered_at);
        }
        // who came and left between two deliveries may be in the step after the second
        owed_before = owed_before.max(self.owed_peak);
        self.owed_peak = gate.prompt_tokens_owed.max(if sight.gate_delivered { 0 } else { self.owed_peak });
        // the step after a delivery holds what was owed when it began, a look ago
        let longest_before =
            self.gate.as_ref().filter(|_| sight.gate_delivered).and_then(|last| last.longest_prompt_owed);
        let over = sight.gate_delivered || tick.since(self.prompt_in_step_at) > policy.patience_cap_ms;
        let longest_in_step = if over { longest_before } else { self.longest_in_step };
        self.longest_in_step = gate.longest_prompt_owed.map(|longest| longest.max(longest_in_step.unwrap_or(0)));
        let least = gate.prompt_tokens_owed.max(if sight.gate_delivered { owed_before } else { 0 });
        if over || least >= self.prompt_in_step {
            self.prompt_in_step = least;
            self.prompt_in_step_at = tick.counted_ms;
        }
        self.gate = Some(gate.clone());
    }

    fn look_at_page(&mut self, tick: &Tick, sight: &mut Sight<'_>) {
        if let Some(entered_at) = self.leaders.look(tick, sight) {
            self.startup_moved_at = self.startup_moved_at.max(entered_at);
        }
        sight.page_owed = self.leaders.owed();
        sight.steps_done = self.leaders.first().map_or(0, |leader| leader.steps_done);
        let tokens = self.leaders.present().fold(0, |sum: u64, (_, leader)| sum.saturating_add(leader.tokens_done));
        sight.page_delivered = tokens > 0;
        if sight.gate.is_none() {
            sight.delivered_count = tokens;
        }
    }

    fn look_at_metrics(&mut self, tick: &Tick, at_ms: Ms, sight: &mut Sight<'_>) {
        let Some(metrics) = sight.metrics else {
            self.leavers.lose_sight();
            return;
        };
        sight.metrics_since_ms = std::mem::replace(&mut self.metrics_sampled_ms, at_ms);
        let rose = |now: Option<f64>, then: Option<f64>| matches!((now, then), (Some(now), Some(then)) if now > then);
        let Some(last) = self.metrics.as_ref() else {
            // a first scrape shows no movement; where a gate remembers the last delivery, that is what silence is counted from
            let since = if sight.gate.is_some() { 0 } else { tick.counted_ms };
            for mark in [
                &mut self.metrics_tokens_at,
                &mut self.metrics_prompt_at,
                &mut self.metrics_moved_at,
                &mut self.metrics_iterations_at,
            ] {
                *mark = since;
            }
            // who sees a first fall has not seen what was before it
            self.metrics_worked_at = tick.counted_ms;
            self.fds_at_move = metrics.open_fds;
            self.metrics = Some(metrics.clone());
            return;
        };
        let mark = tick.mark(at_ms);
        let (tokens, ends) = (
            rose(metrics.generation_tokens, last.generation_tokens),
            rose(metrics.requests_finished, last.requests_finished),
        );
        if tokens || ends {
            self.tokens_live |= tokens && !ends && metrics.requests_finished.is_some();
            self.metrics_tokens_at = mark;
            sight.metrics_delivered = true;
            if sight.gate.is_none() && sight.page.is_none() {
                let tokens = metrics.generation_tokens.unwrap_or(0.0) - last.generation_tokens.unwrap_or(0.0);
                sight.delivered_count = tokens.clamp(0.0, 1e12) as u64;
            }
        }
        if rose(metrics.prompt_tokens, last.prompt_tokens) {
            self.metrics_prompt_at = mark;
        }
        sight.iterations_moved = rose(metrics.iterations, last.iterations);
        if sight.iterations_moved {
            self.metrics_iterations_at = mark;
        }
        if rose(metrics.waiting, last.waiting) {
            self.metrics_queued_at = mark;
        }
        let moved = metrics.progress_digest != last.progress_digest;
        let gave_back = self.leavers.gave_back(tick, sight, at_ms != sight.metrics_since_ms, moved);
        if moved {
            self.metrics_moved_at = mark;
            if !gave_back {
                self.metrics_worked_at = mark;
            }
            sight.metrics_moved = true;
            self.fds_at_move = metrics.open_fds;
        }
        if at_ms != sight.metrics_since_ms {
            let now = sight.gate.map(|gate| (gate.chunks_delivered, gate.answered(), gate.in_flight > 0));
            self.counters_live |= sight.metrics_moved && now.is_some_and(|now| now.2) && now == self.gate_at_scrape;
            self.gate_at_scrape = now;
        }
        self.metrics = Some(metrics.clone());
    }

    fn look_at_loads(&mut self, tick: &Tick, read: Option<u64>) {
        let Some(read) = read else { return };
        let (before, since) = *self.loads_read.get_or_insert((read, tick.counted_ms));
        let loads = read.saturating_sub(before) >= LOADS_MIN;
        if loads {
            self.loads_at = Some(tick.counted_ms);
        }
        // less than before: a process has ended
        if loads || read < before || tick.since(since) >= READ_MS {
            self.loads_read = Some((read, tick.counted_ms));
        }
    }

    /// Does the tree load something from a disk?
    pub fn loads(&self, tick: &Tick) -> bool {
        self.loads_at.is_some_and(|at| tick.since(at) < READ_MS)
    }

    fn look_at_startup(&mut self, tick: &Tick, sight: &mut Sight<'_>) {
        // a process that is found old was not seen to be silent (the agent was restarted); what a page tells is dated by the page
        if !std::mem::replace(&mut self.looked, true) && sight.page.is_none() {
            self.startup_moved_at = tick.counted_ms;
            self.startup_solid_at = tick.counted_ms;
        }
        // by calls, or from a disk by faults of pages that are mapped, which no call shows; what comes by both counts twice
        let sum = |counts: &[Option<u64>]| counts.iter().flatten().copied().reduce(u64::saturating_add);
        let counts = sight.proc.map_or([None; 3], |proc| [proc.read_chars, proc.read_bytes, proc.written]);
        // what is written shows that a start-up moves, and nothing of what a step needs
        let (read, moved) = (sum(&counts[..2]), sum(&counts));
        let (before, since) = *self.moved.get_or_insert((moved.unwrap_or(0), tick.counted_ms));
        let much = moved.is_some_and(|moved| moved.abs_diff(before) >= READ_MIN);
        sight.startup_moved |= much;
        self.look_at_loads(tick, read);
        if much || tick.since(since) >= READ_MS {
            self.moved = moved.map(|moved| (moved, tick.counted_ms));
        }
        sight.startup_solid = sight.startup_moved || sight.proc.is_some_and(|proc| proc.compilers > 0);
        if sight.startup_solid {
            self.startup_solid_at = tick.counted_ms;
        }
        sight.startup_moved |= sight.page.is_none() && self.starts_with_a_core(tick, sight);
        if sight.startup_moved {
            self.startup_moved_at = tick.counted_ms;
        }
    }

    /// Has the tree used a core, or a good part of one, since the last time that this was told?
    fn starts_with_a_core(&mut self, tick: &Tick, sight: &Sight<'_>) -> bool {
        let Some(proc) = sight.proc else { return false };
        let (before, since) = *self.startup_cpu.get_or_insert((proc.cpu_ms, tick.counted_ms));
        let span_ms = tick.since(since);
        if span_ms < STARTUP_CPU_MS {
            return false;
        }
        self.startup_cpu = Some((proc.cpu_ms, tick.counted_ms));
        proc.cpu_ms.saturating_sub(before).saturating_mul(1000) / span_ms >= STARTUP_CPU_PERMILLE
    }

    /// The longest prompt that the gate has owed since the last delivery; where it does not tell, all are as long as each other.
    pub fn longest_in_step(&self, gate: &GateObs) -> u64 {
        self.longest_in_step.unwrap_or(self.prompt_in_step / u64::from(gate.awaiting_first_byte.max(1)))
    }

    /// When anything was last delivered, by whatever tells of it.
    pub fn delivered_at(&self) -> Ms {
        self.gate_delivered_at.max(self.metrics_tokens_at).max(self.leaders.tokens_at())
    }

    /// When prompts were last seen to be taken in: room in the cache, or prompt tokens of a page.
    pub fn taken_in_at(&self) -> Ms {
        self.cache.filled_at.max(self.leaders.prefill_at())
    }

    /// Does this data-parallel engine's page, or this tick's scrape, show that it moved?
    pub fn delivers(&self, engine: u32) -> bool {
        self.leaders.of(engine).is_some_and(|leader| leader.tokens_done > 0) || self.schedulers.moves(engine, 0)
    }

    /// Does another data-parallel engine of the pod work on?
    pub fn others_go_on(&self, engine: u32, tick: &Tick, within_ms: Ms) -> bool {
        self.leaders.others_go_on(engine, tick, within_ms) || self.schedulers.others_go_on(engine, within_ms)
    }

    /// For how long the one of several data-parallel engines has stood that has stood for longest with work.
    pub fn standing_ms(&self, tick: &Tick, gate: Option<&GateObs>) -> Ms {
        self.leaders.standing_ms(tick).max(self.schedulers.standing(gate).map_or(0, |(_, ms)| ms))
    }

    /// Have connections come since anything of the engine's page last moved, by the files that it says it has open?
    pub fn clients_came(&self) -> bool {
        let now = self.metrics.as_ref().and_then(|metrics| metrics.open_fds);
        now.zip(self.fds_at_move).is_some_and(|(now, before)| now >= before + OPENED_MIN)
    }

    /// Has `/metrics` of this process ever been read?
    pub fn was_scraped(&self) -> bool {
        self.metrics.is_some()
    }

    /// When anything of the engine's own last moved: figures of its page or of its scrapes.
    pub fn moved_at(&self) -> Ms {
        self.metrics_moved_at.max(self.counted_at())
    }

    /// The same of what is work: not room that it gave back because a client had left.
    pub fn worked_at(&self) -> Ms {
        self.metrics_worked_at.max(self.counted_at())
    }

    fn counted_at(&self) -> Ms {
        self.metrics_prompt_at
            .max(self.metrics_iterations_at)
            .max(self.leaders.steps_at())
            .max(self.metrics_tokens_at)
            .max(self.leaders.tokens_at())
    }
}
