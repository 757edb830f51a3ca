//! Several data-parallel engines in one pod: each a world of its own with its own load, one agent beside them, one gate and one front end
//! before them. What the agent sees of all of them is put together here as the real sources put it together.
//!
//! The history is about one of them, the subject; the checker knows that one alone. What happens to the machine happens to all.

use super::agent::{Agent, read_metrics};
use super::chance::Chance;
use super::profile::{MS, Us};
use super::shows;
use super::world::World;
use crate::observation::{GateObs, GpuObs, MetricsObs, Ms, Observation, PageObs, ProcObs, RankMetrics, Signal};

/// The other engines of the pod, and what the agent makes of all.
#[derive(Debug, Clone, Default)]
pub struct Pod {
    peers: Vec<Peer>,
    /// All of them together; used where there are peers.
    pub obs: Observation,
    /// Tokens, steps and step of each engine at the look before, and when these last moved.
    moved: Vec<([u64; 3], Us)>,
    /// The engine whose process was looked at last.
    watched: usize,
}

#[derive(Debug, Clone)]
struct Peer {
    world: World,
    agent: Agent,
}

impl Pod {
    pub fn new(worlds: Vec<World>, chance: &mut Chance) -> Self {
        let peer = |world: World| Peer { agent: Agent::new(world.now, chance.split()), world };
        Self { peers: worlds.into_iter().map(peer).collect(), ..Self::default() }
    }

    pub fn is_alone(&self) -> bool {
        self.peers.is_empty()
    }

    /// Does any of the others hold work?
    pub fn works(&self) -> bool {
        self.peers.iter().any(|peer| !peer.world.engine.live.is_empty())
    }

    /// The front end sends nobody, or somebody again; the kill is for the whole tree.
    pub fn follow(&mut self, subject: &World) {
        for peer in &mut self.peers {
            (peer.world.fenced, peer.world.kill_sent) = (subject.fenced, subject.kill_sent);
        }
    }

    /// Brings the others up to the subject's time, and puts together what is seen of all.
    pub fn look(&mut self, subject: &mut World, agent: &Agent) {
        for peer in &mut self.peers {
            while peer.world.now < subject.now {
                peer.world.advance(subject.now);
            }
            peer.world.engine.book.pass_lumps(peer.world.now);
            shows::observe(&peer.world, &mut peer.agent);
            // what stands in the way of one of them is an excuse for whatever is said of the pod
            let (env, theirs) = (&mut subject.env, &peer.world.env);
            env.stood_still = env.stood_still.max(theirs.stood_still);
            env.eventful = env.eventful.max(theirs.eventful);
        }
        let mut all: Vec<(&World, &Agent)> = self.peers.iter().map(|peer| (&peer.world, &peer.agent)).collect();
        let place = subject.engine.profile.place as usize;
        all.insert(place.min(all.len()), (subject, agent));
        self.moved.resize(all.len(), ([0; 3], 0));
        self.watched = watch(&all, &mut self.moved, self.watched);
        let scraped = agent.obs.metrics.at_ms != self.obs.metrics.at_ms || agent.obs.metrics.value.is_none();
        let metrics = if scraped { metrics(&all, agent) } else { std::mem::take(&mut self.obs.metrics) };
        self.obs = Observation {
            proc: proc(&all, agent, self.watched),
            pages: pages(&all, agent),
            gate: gate(&all, agent),
            metrics,
            log: all.iter().flat_map(|(_, agent)| agent.obs.log.iter().cloned()).collect(),
            gpus: gpus(&all, agent),
            xids: agent.obs.xids.clone(),
            ras: agent.obs.ras.clone(),
            frontend: agent.obs.frontend.clone(),
            maintenance: agent.obs.maintenance,
            agent_gap_ms: agent.obs.agent_gap_ms,
            ..Observation::default()
        };
    }
}

/// Whose process is looked at: where there are pages, of the engine that has stood for longest with work (`agent/src/sources/page.rs`); else
/// of one that is found running, as the tree's busiest is.
fn watch(all: &[(&World, &Agent)], moved: &mut [([u64; 3], Us)], watched: usize) -> usize {
    let mut longest = (0, None);
    let mut before = None;
    for (place, ((world, agent), (last, at))) in all.iter().zip(moved).enumerate() {
        let engine = &world.engine;
        let now = [engine.counters.generated, engine.counters.steps, engine.step.map_or(0, |step| step.start)];
        if std::mem::replace(last, now) != now {
            *at = world.now;
        }
        let works = if engine.profile.signals.page {
            engine.step.is_some() || engine.queue() != (0, 0)
        } else {
            agent.obs.proc.value.as_ref().is_some_and(|proc| proc.state == Some('R'))
        };
        let stood = works.then(|| if engine.profile.signals.page { world.now - *at } else { 0 });
        before = if place == watched { stood } else { before };
        longest = if stood > longest.1 { (place, stood) } else { longest };
    }
    match (before, longest) {
        (Some(before), (_, Some(most))) if most < before + 100 * MS => watched,
        (_, (_, None)) => watched.min(all.len().saturating_sub(1)),
        (_, (place, Some(_))) => place,
    }
}

/// The tree is one: its CPU time and reads are everybody's, its state is that of the process which is looked at.
fn proc(all: &[(&World, &Agent)], agent: &Agent, watched: usize) -> Signal<ProcObs> {
    let Some(own) = &agent.obs.proc.value else { return Signal { value: None, at_ms: agent.obs.proc.at_ms } };
    let seen = || all.iter().filter_map(|(_, agent)| agent.obs.proc.value.as_ref());
    let looked = all.get(watched).and_then(|(_, agent)| agent.obs.proc.value.as_ref()).unwrap_or(own);
    let sum = |of: fn(&ProcObs) -> u32| Some(seen().map(of).sum());
    let sum_ms = |of: fn(&ProcObs) -> u64| seen().map(of).sum::<u64>();
    let value = ProcObs {
        state: looked.state,
        wchan: looked.wchan.clone(),
        queued_ms: looked.queued_ms,
        cpu_ms: sum_ms(|proc| proc.cpu_ms),
        compilers_cpu_ms: sum_ms(|proc| proc.compilers_cpu_ms),
        stopped: seen().map(|proc| proc.stopped).sum(),
        connections: sum(|proc| proc.connections.unwrap_or(0)),
        accept_queue: sum(|proc| proc.accept_queue.unwrap_or(0)),
        read_chars: Some(sum_ms(|proc| proc.read_chars.unwrap_or(0))),
        read_bytes: Some(sum_ms(|proc| proc.read_bytes.unwrap_or(0))),
        ..own.clone()
    };
    Signal::at(agent.obs.proc.at_ms, value)
}

/// Ranks follow one another, engine by engine (H1.7).
fn pages(all: &[(&World, &Agent)], agent: &Agent) -> Signal<Vec<PageObs>> {
    let engines = all.len() as u32;
    let mut value = Vec::new();
    for (place, (world, agent)) in (0..).zip(all) {
        let tp = world.engine.profile.ranks;
        value.extend(agent.obs.pages.value.iter().flatten().map(|page| PageObs {
            rank: place * tp + page.rank,
            world_size: engines * tp,
            engines,
            ..page.clone()
        }));
    }
    let value = Some(value).filter(|pages| !pages.is_empty());
    Signal { value, at_ms: agent.obs.pages.at_ms }
}

/// One gate counts for all.
fn gate(all: &[(&World, &Agent)], agent: &Agent) -> Signal<GateObs> {
    let mut sum: Option<GateObs> = None;
    for gate in all.iter().filter_map(|(_, agent)| agent.obs.gate.value.as_ref()) {
        let Some(sum) = &mut sum else {
            sum = Some(gate.clone());
            continue;
        };
        sum.in_flight += gate.in_flight;
        sum.awaiting_first_byte += gate.awaiting_first_byte;
        sum.prompt_tokens_owed += gate.prompt_tokens_owed;
        sum.prompt_tokens_taken += gate.prompt_tokens_taken;
        sum.chunks_delivered += gate.chunks_delivered;
        sum.bytes_delivered += gate.bytes_delivered;
        sum.requests_done += gate.requests_done;
        sum.requests_abandoned += gate.requests_abandoned;
        sum.client_blocked += gate.client_blocked;
        sum.unstreamed = sum.unstreamed.zip(gate.unstreamed).map(|(one, other)| one + other);
        sum.longest_prompt_owed = sum.longest_prompt_owed.max(gate.longest_prompt_owed);
        sum.oldest_in_flight_ms = first(sum.oldest_in_flight_ms, gate.oldest_in_flight_ms);
        sum.quietest_begun_ms = first(sum.quietest_begun_ms, gate.quietest_begun_ms);
        sum.last_delivery_ms = sum.last_delivery_ms.max(gate.last_delivery_ms);
    }
    Signal { value: sum, at_ms: agent.obs.gate.at_ms }
}

fn first(one: Option<Ms>, other: Option<Ms>) -> Option<Ms> {
    one.into_iter().chain(other).min()
}

/// One page tells of all, at the moment at which the subject's was read.
fn metrics(all: &[(&World, &Agent)], agent: &Agent) -> Signal<MetricsObs> {
    let at_ms = agent.obs.metrics.at_ms;
    let Some(own) = &agent.obs.metrics.value else { return Signal { value: None, at_ms } };
    let mut sum = MetricsObs { ranks: Vec::new(), ..own.clone() };
    for (place, (world, theirs)) in all.iter().enumerate() {
        let mut one = MetricsObs::default();
        read_metrics(world, &mut one);
        sum.ranks.push(RankMetrics {
            rank: place as u32,
            running: one.running,
            waiting: one.waiting,
            progress_digest: one.progress_digest,
        });
        if std::ptr::eq(*theirs, agent) {
            continue;
        }
        let add = |sum: &mut Option<f64>, more: Option<f64>| *sum = sum.zip(more).map(|(sum, more)| sum + more);
        add(&mut sum.running, one.running);
        add(&mut sum.waiting, one.waiting);
        add(&mut sum.generation_tokens, one.generation_tokens);
        add(&mut sum.prompt_tokens, one.prompt_tokens);
        add(&mut sum.iterations, one.iterations);
        add(&mut sum.requests_finished, one.requests_finished);
        add(&mut sum.server_load, one.server_load);
        sum.kv_usage = sum.kv_usage.zip(one.kv_usage).map(|(one, other)| one.max(other));
        sum.counters_digest = sum.counters_digest.wrapping_mul(31).wrapping_add(one.counters_digest);
        sum.progress_digest = sum.progress_digest.wrapping_mul(31).wrapping_add(one.progress_digest);
    }
    Signal::at(at_ms, sum)
}

fn gpus(all: &[(&World, &Agent)], agent: &Agent) -> Signal<Vec<GpuObs>> {
    let value: Vec<GpuObs> = all.iter().flat_map(|(_, agent)| agent.obs.gpus.value.iter().flatten().cloned()).collect();
    Signal { value: Some(value).filter(|gpus| !gpus.is_empty()), at_ms: agent.obs.gpus.at_ms }
}
