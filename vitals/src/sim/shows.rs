//! What an agent beside the engine sees: the observation of one tick, each signal as late and as wrong as it would be.

use super::agent::Agent;
use super::book::At;
use super::bystanders;
use super::fault::{Look, Way};
use super::profile::{EngineKind, MS, SECOND, Us};
use super::world::{Missing, World};
use crate::observation::{EndedObs, GateObs, GpuObs, LogHit, Ms, PageObs, PagePhase, ProcObs};

/// How the stepping thread and its tree look at one moment.
#[derive(Debug, Clone, Copy)]
struct Looks {
    state: char,
    wchan: Option<&'static str>,
    /// CPU of the tree in permille of a core; where steps go on, what they burn.
    cpu: Cpu,
    gpu: Gpu,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Cpu {
    BySteps,
    Permille(u64),
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Gpu {
    Idle,
    Working,
    Cold,
}

const IDLE: Looks = Looks { state: 'S', wchan: Some("futex_do_wait"), cpu: Cpu::BySteps, gpu: Gpu::Idle };
/// Asleep for ever: what is left is the front end's crumbs.
const ASLEEP: Looks = Looks { cpu: Cpu::Permille(12), ..IDLE };

/// Brings the agent's observation up to `world.now`.
pub fn observe(world: &World, agent: &mut Agent) {
    let now_ms = world.now / MS;
    agent.obs.log.clear();
    agent.obs.maintenance = world.now < world.env.maintained;
    let looks = looks(world, agent.chance_of_running());
    show_proc(world, agent, looks);
    show_pages(world, agent);
    show_gate(world, agent);
    show_gpus(world, agent, looks);
    bystanders::show(world, agent);
    agent.scrape(world);
    agent.probe(world);
    if world.engine.profile.signals.log {
        let seen = agent.log_seen;
        // what is written in the moment of a look is read at the next one: none is lost between the two
        let hits = world.env.log.iter().filter(|(at, _)| (seen..world.now).contains(at));
        agent.obs.log.extend(hits.map(|(_, name)| LogHit {
            signature: (*name).to_owned(),
            at_ms: now_ms,
            line: String::new(),
        }));
    }
    agent.log_seen = world.now;
}

fn looks(world: &World, running: bool) -> Looks {
    let (now, env, engine) = (world.now, &world.env, &world.engine);
    let ranks = u64::from(engine.profile.ranks);
    let burn = 1_000 * ranks;
    if now < env.ready && env.ready < Us::MAX {
        let state = if env.boot_permille >= 300 { 'R' } else { 'D' };
        return Looks { state, wchan: None, cpu: Cpu::Permille(env.boot_permille), gpu: Gpu::Idle };
    }
    if now < env.frozen || now < env.debugged {
        let state = if now < env.debugged { 't' } else { 'S' };
        return Looks { state, wchan: Some("do_freezer_trap"), cpu: Cpu::Permille(0), gpu: Gpu::Idle };
    }
    if now < env.starved {
        return Looks { state: 'R', wchan: None, cpu: Cpu::Permille(15), gpu: Gpu::Idle };
    }
    if engine.step.is_none() && world.fault.is_none() && engine.live.census().compiling > 0 {
        return Looks { state: 'R', wchan: None, cpu: Cpu::Permille(1_000), gpu: Gpu::Idle };
    }
    if now < env.jit {
        return Looks { wchan: Some("poll_schedule_timeout"), cpu: Cpu::Permille(2_000), ..IDLE };
    }
    if let Some((at, fault)) = world.fault {
        let struck = fault.ends.is_none_or(|span| now < at + span) && has_struck(world, fault.way);
        if struck {
            return frozen_looks(fault.way, fault.look, burn, engine.profile.on_gpu);
        }
    }
    if engine.step.is_some() {
        // who has a core to itself sleeps now and then; who must share one always wants it
        let shares = engine.mood.host_milli > 1_000 && !engine.profile.on_gpu;
        let state = if running || shares { 'R' } else { 'S' };
        return Looks { state, wchan: None, cpu: Cpu::BySteps, gpu: Gpu::Working };
    }
    IDLE
}

/// A fault of a step shows once a step is in it; the others at once.
fn has_struck(world: &World, way: Way) -> bool {
    match way {
        Way::Step | Way::Rank(_) => !world.engine.mood.doomed,
        Way::Livelock | Way::Decode | Way::Front | Way::Crash => false,
        Way::Admission => world.engine.step.is_none(),
        Way::Anywhere | Way::CoreGone | Way::Startup => true,
    }
}

fn frozen_looks(way: Way, look: Look, burn: u64, on_gpu: bool) -> Looks {
    let gpu = if on_gpu && look == Look::Spin { Gpu::Cold } else { Gpu::Idle };
    match (way, look) {
        (Way::CoreGone, _) | (Way::Startup, _) => Looks { wchan: Some("ep_poll"), cpu: Cpu::Permille(9), ..IDLE },
        (Way::Admission, _) => ASLEEP,
        (Way::Rank(_), Look::Spin) => Looks { state: 'R', wchan: None, cpu: Cpu::Permille(burn), gpu },
        // the peers of a rank that sleeps spin in their collective
        (Way::Rank(_), _) => {
            Looks { state: if look == Look::Stopped { 'T' } else { 'R' }, wchan: None, cpu: Cpu::Permille(burn), gpu }
        }
        (_, Look::Spin) => Looks { state: 'R', wchan: None, cpu: Cpu::Permille(burn.min(2_000)), gpu },
        (_, Look::Lock) => Looks { gpu, ..ASLEEP },
        (_, Look::Stopped) => Looks { state: 'T', wchan: Some("do_signal_stop"), cpu: Cpu::Permille(8), gpu },
        (_, Look::Disk) => Looks { state: 'D', wchan: Some("folio_wait_bit_common"), cpu: Cpu::Permille(8), gpu },
    }
}

fn show_proc(world: &World, agent: &mut Agent, looks: Looks) {
    let (env, profile) = (&world.env, &world.engine.profile);
    let elapsed = world.now.saturating_sub(agent.looked_at);
    let busy = world.engine.busy_until(world.now);
    let worked = busy.saturating_sub(agent.busy_before);
    (agent.looked_at, agent.busy_before) = (world.now, busy);
    let share = match looks.cpu {
        Cpu::BySteps => {
            let pace = if world.now < env.throttled { 150 } else { 900 };
            worked.min(elapsed) * pace / 1_000 * u64::from(profile.ranks) + elapsed * 10 / 1_000
        }
        Cpu::Permille(share) => elapsed * share / 1_000,
    };
    agent.cpu_us += share * 1_000 / world.engine.mood.host_milli.max(1_000);
    if world.now < env.jit {
        agent.compiler_us += elapsed * 2;
    }
    if !profile.signals.proc || world.misses(Missing::Proc) {
        agent.obs.proc.value = None;
        return;
    }
    let queued_ms = agent.queue.look(world, looks.state == 'R');
    let (alive, asking) = (world.now >= env.born, agent.asking());
    let proc = agent.obs.proc.value.get_or_insert_with(ProcObs::default);
    proc.alive = alive;
    proc.started_ms = if alive { env.born / MS } else { proc.started_ms };
    proc.state = Some(looks.state);
    if proc.wchan.as_deref() != looks.wchan {
        proc.wchan = looks.wchan.map(str::to_owned);
    }
    proc.cpu_ms = agent.cpu_us / MS;
    proc.queued_ms = queued_ms;
    (proc.compilers, proc.compilers_cpu_ms) = if world.now < env.jit { (4, agent.compiler_us / MS) } else { (0, 0) };
    proc.traced = world.now < env.debugged;
    proc.throttled = world.now < env.throttled;
    proc.frozen = world.now < env.frozen;
    proc.stopped = u32::from(looks.state == 'T');
    proc.stopped_cores = proc.stopped;
    let ended = ended_core(world);
    if proc.ended.as_ref().map(|known| known.pid) != ended.as_ref().map(|ended| ended.pid) {
        proc.ended = ended;
    }
    let read = weights_read(world);
    // what is fetched comes by calls that count as no read, and goes to a file
    let (read, written) = if env.fetched { (0, Some(read)) } else { (read, None) };
    (proc.read_chars, proc.read_bytes, proc.written) = (Some(read), Some(read), written);
    let front = &world.engine;
    let stuck = if front.mood.front_dead { front.book.awaiting } else { 0 };
    (proc.connections, proc.accept_queue) = (Some(front.book.in_flight + asking), Some(stuck));
    proc.listening = Some(world.now >= env.ready);
    proc.kill_sent_ms = world.kill_sent.map(|at| at / MS);
    agent.obs.proc.at_ms = world.now / MS;
}

/// The core that is gone, of an engine whose processes have titles.
fn ended_core(world: &World) -> Option<EndedObs> {
    let profile = &world.engine.profile;
    let (_, fault) = world.fault.filter(|(_, fault)| fault.way == Way::CoreGone)?;
    let name = profile.kind.core_title()?.to_owned();
    let peers = if fault.whole_pod { 0 } else { profile.engines.saturating_sub(1) };
    Some(EndedObs { pid: 42, name, at_ms: world.now / MS, peers })
}

/// Bytes of weights that the start-up has read: evenly, and no more once it stands still.
fn weights_read(world: &World) -> u64 {
    const WEIGHTS: u64 = 16_000_000_000;
    let env = &world.env;
    let stuck = world.fault.filter(|(_, fault)| fault.way == Way::Startup).map(|(at, _)| at);
    let until = stuck.unwrap_or(world.now).min(world.now);
    let total = if stuck.is_some() { world.engine.profile.startup_us } else { env.ready.saturating_sub(env.born) };
    let gone = until.saturating_sub(env.born).min(total);
    (WEIGHTS / 1_000).saturating_mul(gone.saturating_mul(1_000) / total.max(1))
}

fn show_pages(world: &World, agent: &mut Agent) {
    let hidden = !world.engine.profile.signals.page || world.misses(Missing::Page) || world.now < world.env.born;
    // the page of a process that is gone is no evidence (H2)
    let gone = world.fault.is_some_and(|(_, fault)| fault.way == Way::CoreGone);
    if hidden || gone {
        agent.obs.pages.value = None;
        return;
    }
    let first = page(world, agent);
    let silent = world.fault.and_then(|(_, fault)| match fault.way {
        Way::Rank(rank) if !world.engine.mood.doomed => Some(rank),
        _ => None,
    });
    let pages = agent.obs.pages.value.get_or_insert_with(Vec::new);
    pages.clear();
    for rank in 0..world.engine.profile.ranks {
        let mut page = PageObs { rank, world_size: world.engine.profile.ranks, ..first.clone() };
        if silent == Some(rank) {
            // it never entered the step that its peers are in
            (page.step_started_ms, page.phase_tokens) = (None, 0);
        }
        pages.push(page);
    }
    agent.obs.pages.at_ms = world.now / MS;
}

fn page(world: &World, agent: &Agent) -> PageObs {
    let (engine, env) = (&world.engine, &world.env);
    let native = engine.native();
    let now_ms = world.now / MS;
    let (running, waiting) = engine.queue();
    let owed: u64 = engine
        .live
        .iter()
        .filter(|request| matches!(request.at, At::Waiting | At::Prefill))
        .map(|request| u64::from(request.context - request.prefilled.min(request.context)))
        .sum();
    let mut page = PageObs {
        rank: 0,
        world_size: 1,
        engines: 1,
        steps_completed: engine.counters.steps,
        tokens_delivered: engine.counters.generated,
        requests_finished: engine.counters.finished,
        running,
        waiting,
        prompt_tokens_owed: owed,
        phase: PagePhase::Idle,
        phase_tokens: 0,
        phase_entered_ms: env.born / MS,
        lease_ms: 0,
        step_started_ms: None,
        work_done: 100,
        work_total: 100,
        published_ms: now_ms,
    };
    if world.now < env.ready {
        let total = env.ready.saturating_sub(env.born).max(1);
        let stuck = env.ready == Us::MAX;
        let done = if stuck { 37 } else { (world.now - env.born) * 1_000 / total };
        let said_ms = if stuck { agent.startup_said_ms(world) } else { now_ms };
        page.phase = PagePhase::Load;
        (page.work_done, page.work_total) = (done, 1_000);
        page.lease_ms = if native { said_ms - env.born / MS + 10_000 } else { 0 };
    } else if world.now < env.asleep {
        page.phase = PagePhase::Sleep;
    } else if let Some(step) = engine.step {
        page.phase = if step.prefill > 0 { PagePhase::Prefill } else { PagePhase::Decode };
        page.phase_tokens = step.prefill;
        page.step_started_ms = Some(step.start / MS);
        (page.phase_entered_ms, page.published_ms) = (step.start / MS, step.start / MS);
        page.lease_ms = if native { step.lease_ms } else { 0 };
    } else if native {
        // said again at each turn of the idle loop, and not by a loop that stands still
        let held = world.now < engine.free_at;
        page.published_ms = if held { engine.held_since / MS } else { now_ms };
        page.lease_ms = page.published_ms - page.phase_entered_ms.min(page.published_ms) + 2_000;
    }
    page
}

fn show_gate(world: &World, agent: &mut Agent) {
    let signals = world.engine.profile.signals;
    if !signals.gate {
        agent.obs.gate.value = None;
        return;
    }
    if world.misses(Missing::Gate) {
        return;
    }
    let gate = agent.obs.gate.value.get_or_insert_with(GateObs::default);
    world.engine.book.observe(&world.engine.live, world.now, gate);
    agent.obs.gate.at_ms = world.now / MS;
}

fn show_gpus(world: &World, agent: &mut Agent, looks: Looks) {
    if !world.engine.profile.signals.gpu || world.now < agent.gpu_next {
        return;
    }
    agent.gpu_next = world.now + SECOND;
    if let Some(since) = world.bystanders.nvml_silent_since(world.now) {
        // what it said last stands, beside how long ago that was
        agent.obs.gpus.value.iter_mut().flatten().for_each(|gpu| gpu.silent_since_ms = Some(since / MS));
        agent.obs.gpus.at_ms = world.now / MS;
        return;
    }
    let noise = agent.chance.unit();
    let (util, memory_util, watts) = match looks.gpu {
        Gpu::Idle => (0, 0, 80.0 + 20.0 * noise),
        Gpu::Working => (90 + (noise * 10.0) as u32, 30 + (noise * 40.0) as u32, 380.0 + 280.0 * noise),
        Gpu::Cold => (96 + (noise * 5.0) as u32, (noise * 3.0) as u32, 150.0 + 50.0 * noise),
    };
    let ranks = world.engine.profile.ranks as usize;
    let gpus = agent.obs.gpus.value.get_or_insert_with(Vec::new);
    gpus.resize_with(ranks, || GpuObs {
        uuid: String::new(),
        index: None,
        pci: None,
        util: 0,
        memory_util: 0,
        power_watts: None,
        power_limit_watts: Some(700.0),
        sm_clock_mhz: None,
        silent_since_ms: None,
    });
    for gpu in gpus {
        (gpu.util, gpu.memory_util, gpu.power_watts) = (util.min(100), memory_util, Some(watts));
        gpu.silent_since_ms = None;
    }
    agent.obs.gpus.at_ms = world.now / MS;
}

/// How long the front end takes to answer now; `None`: it does not.
pub fn answer_us(world: &World, agent: &mut Agent, metrics: bool) -> Option<Us> {
    let (now, env, engine) = (world.now, &world.env, &world.engine);
    if now < env.ready || engine.mood.front_dead || now < env.frozen || now < env.debugged {
        return None;
    }
    let usual = agent.chance.heavy(2 * MS, 60 * MS);
    let slow = if now < env.hot {
        agent.chance.heavy(600 * MS, 4 * SECOND)
    } else if now < env.slow_scrapes || now < env.loaded {
        agent.chance.heavy(100 * MS, 3_400 * MS)
    } else {
        0
    };
    // llama.cpp answers /metrics between two steps
    let busy = match engine.step {
        Some(step) if metrics && engine.profile.kind == EngineKind::LlamaCpp => step.end.saturating_sub(now),
        _ => 0,
    };
    Some(usual.max(slow).max(busy).saturating_add(env.starved.saturating_sub(now)))
}

/// Milliseconds of the detector's clock.
pub fn ms(at: Us) -> Ms {
    at / MS
}
