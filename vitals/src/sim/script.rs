//! From a kind and a seed to a world with a script: which engine, which load, what happens when.

use super::act::FETCH_PERMILLE;
use super::bystanders::Bystanders;
use super::chance::{Chance, mix};
use super::clients::{Clients, Mode};
use super::fault::{Fault, Look, Way};
use super::kinds::{Kind, Truth};
use super::mixture;
use super::profile::{EngineKind, HOUR, MINUTE, MS, Profile, SECOND, Us};
use super::waits::Asks;
use super::world::{Act, Missing, World};

/// Virtual time at which every history begins (not zero: nothing may depend on that).
pub const START: Us = 1_000 * SECOND;

/// A history before it is run.
#[derive(Debug, Clone)]
pub struct Plot {
    pub world: World,
    /// The other data-parallel engines of the pod.
    pub peers: Vec<World>,
    pub ends: Us,
}

const MIXED: &[Mode] = &[Mode::Idle, Mode::Light, Mode::Steady, Mode::Bursts, Mode::Agents];
const BUSY: &[Mode] = &[Mode::Steady, Mode::Bursts, Mode::Agents, Mode::Full];
const ANY_KIND: [EngineKind; 5] =
    [EngineKind::Native, EngineKind::Vllm, EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp];
/// All of them, for kinds of history that are younger than two of these.
const EVERY_KIND: [EngineKind; 8] = [
    EngineKind::Native,
    EngineKind::Native,
    EngineKind::Vllm,
    EngineKind::Vllm,
    EngineKind::Sglang,
    EngineKind::LlamaCpp,
    EngineKind::Tgi,
    EngineKind::TensorRtLlm,
];
const FOREIGN: [EngineKind; 4] = [EngineKind::Vllm, EngineKind::Vllm, EngineKind::Sglang, EngineKind::LlamaCpp];

/// Writes the history of this kind and seed.
pub fn write(kind: &Kind, seed: u64) -> Plot {
    let mut chance = Chance::new(seed);
    let profile = engine_for(kind.name, seed, &mut chance);
    let (modes, length) = load_for(kind, &mut chance);
    let mut clients = Clients::new(modes, chance.split());
    if kind.name == "clients" {
        (clients.hasty_permille, clients.slow_permille) = (400, 150);
    }
    if kind.name == "warm" {
        // a deadline that was longer for the prompt of a client who left is nobody's any more
        clients.hasty_permille = 0;
    }
    clients.asks = match kind.name {
        "tool" => Asks::Tools,
        "argument" | "argument-lumps" => Asks::Arguments,
        "grammar" => Asks::Grammars,
        _ => Asks::Nothing,
    };
    let mut world = World::new(profile, clients, START, chance.split());
    if kind.name == "fetch" {
        (world.env.boot_permille, world.env.fetched) = (FETCH_PERMILLE, true);
    }
    let up = world.env.ready + 5 * SECOND;
    let ends = up + length;
    if kind.truth == Truth::Benign {
        let mut own = Chance::new(mix(seed ^ BYSTANDERS));
        world.bystanders = Bystanders::draw(&world.engine.profile, (up, ends), &mut own);
    }
    light_noise(&mut world, up, ends, &mut chance);
    match kind.truth {
        Truth::Benign if kind.name == "benign-mutant" => mixture::disturb(&mut world, (up, ends), &mut chance),
        Truth::Benign => disturb(kind.name, &mut world, (up, ends), &mut chance),
        Truth::Hang | Truth::Passing => strike(kind, &mut world, up, &mut chance),
    }
    let peers = peers(kind.name, &mut world, &mut chance);
    Plot { world, peers, ends }
}

/// The other engines of a data-parallel pod: the same engine, each with a load of its own. What befalls the machine, the front end or the
/// process befalls all; steps that are slow are one's own.
fn peers(name: &str, world: &mut World, chance: &mut Chance) -> Vec<World> {
    if !name.starts_with("dp") {
        return Vec::new();
    }
    let engines = chance.between(2, 4) as u32;
    let profile = &mut world.engine.profile;
    (profile.engines, profile.place) = (engines, chance.between(0, u64::from(engines) - 1) as u32);
    let loads: [&[Mode]; 6] =
        [&[Mode::Idle], &[Mode::Idle, Mode::Light], &[Mode::Steady], &[Mode::Agents], &[Mode::Full], MIXED];
    let places = (0..engines).filter(|place| *place != world.engine.profile.place);
    let peer = |place| {
        let profile = Profile { place, ..world.engine.profile.clone() };
        let clients = Clients::new(chance.pick(&loads), chance.split());
        let mut peer = World::new(profile, clients, START, chance.split());
        let shared = |act: &Act| match act {
            Act::Fault(fault) => fault.whole_pod,
            act => !matches!(act, Act::Crawl(..) | Act::Swap(_) | Act::Burst(_)),
        };
        peer.script = world.script.iter().filter(|(_, act)| shared(act)).copied().collect();
        peer
    };
    places.map(peer).collect()
}

/// Streams of chance of their own, so that what a seed gave before these came it gives still. The second is such that no history by name in
/// `vitals/tests/sim.rs` has another engine than it had.
const BYSTANDERS: u64 = 0x6279;
const NEWCOMERS: u64 = 0x6eaa;

/// Text Generation Inference and TensorRT-LLM stand in for one in six engines of which no more is asked than that they are foreign.
fn newcomer(name: &str, seed: u64, of: EngineKind) -> EngineKind {
    let mut own = Chance::new(mix(seed ^ NEWCOMERS));
    let fits = matches!(
        name,
        "H1" | "H2"
            | "H5"
            | "H8"
            | "H9"
            | "H10"
            | "H11"
            | "H13"
            | "S4"
            | "warm"
            | "mutant"
            | "c0"
            | "crash"
            | "frontend"
    ) || matches!(
        name,
        "B2" | "B4" | "B5" | "B6" | "B7" | "B9" | "day" | "agents" | "full" | "preempt" | "clients"
    ) || matches!(name, "late" | "agent" | "scrapes" | "restarts" | "fetch");
    if of == EngineKind::Native || !fits || !own.permille(167) {
        return of;
    }
    own.pick(&[EngineKind::Tgi, EngineKind::TensorRtLlm])
}

fn engine_for(name: &str, seed: u64, chance: &mut Chance) -> Profile {
    let of = match name {
        "H3" | "H4" | "H6" | "H12" | "B8" | "stopped" => {
            chance.pick(&[EngineKind::Vllm, EngineKind::Vllm, EngineKind::Sglang])
        }
        "H7" => EngineKind::Sglang,
        "B1" => EngineKind::LlamaCpp,
        "H8" | "B5" | "H9" | "S4" => chance.pick(&ANY_KIND),
        "native" => EngineKind::Native,
        "tool" | "grammar" => EngineKind::Vllm,
        "argument" => chance.pick(&[EngineKind::Native, EngineKind::Vllm]),
        "argument-lumps" => chance.pick(&[EngineKind::Sglang, EngineKind::LlamaCpp]),
        "benign-mutant" | "excused" => chance.pick(&EVERY_KIND),
        name if name.starts_with("dp") => chance.pick(&[
            EngineKind::Native,
            EngineKind::Native,
            EngineKind::Vllm,
            EngineKind::Vllm,
            EngineKind::Sglang,
        ]),
        "warm" | "H1" | "H2" | "H5" | "H10" | "B2" | "B4" | "B7" | "fetch" => chance.pick(&FOREIGN),
        _ => chance.pick(&ANY_KIND),
    };
    let of = newcomer(name, seed, of);
    let mut profile = Profile::draw(of, chance);
    match name {
        "H11" => profile.ranks = profile.ranks.max(2),
        "H1" | "H2" | "H13" if of != EngineKind::Native => profile.on_gpu = true,
        "warm" => profile.stream_permille = chance.pick(&[800, 1_000]),
        "B1" => profile.stream_permille = chance.pick(&[0, 0, 300, 1_000]),
        "B3" => profile.chunk = Some(chance.pick(&[512, 2_048]).max(512)),
        "preempt" => profile.kv_tokens = u64::from(profile.prompt_max.min(8_192)) + u64::from(profile.seqs_max) * 150,
        _ => {}
    }
    if name == "fetch" {
        profile.startup_us = chance.scale(5 * MINUTE, 40 * MINUTE);
    }
    if matches!(name, "B2" | "B6" | "H13" | "dp-hard" | "benign-mutant" | "fetch" | "excused") {
        // what excuses these is seen in /proc alone, and who can kill sees whom
        profile.signals.proc = true;
    }
    if name.starts_with("dp") {
        // pages of strangers have leases or are none
        profile.signals.page = of == EngineKind::Native;
        profile.signals.gate |= of != EngineKind::Native;
    }
    if matches!(name, "warm" | "native" | "agents" | "B3") {
        profile.signals.gate = true;
    }
    if matches!(name, "tool" | "argument" | "argument-lumps" | "grammar") {
        // room for answers that are a file long: nobody is preempted for one
        profile.kv_tokens = profile.kv_tokens.max(1_000_000);
        // what tells such a silence from a hang: who has begun to answer, and what the engine's books hold
        (profile.signals.gate, profile.signals.metrics, profile.stream_permille) = (true, true, 1_000);
    }
    profile
}

fn load_for(kind: &Kind, chance: &mut Chance) -> (&'static [Mode], Us) {
    let hours = |chance: &mut Chance, low: u64, high: u64| chance.scale(low * HOUR / 4, high * HOUR / 4);
    if kind.truth != Truth::Benign {
        let modes: &[&'static [Mode]] = match kind.name {
            "H2" | "H10" => &[&[Mode::Light], &[Mode::Agents]],
            "H3" => &[&[Mode::Light], &[Mode::Bursts]],
            "warm" | "native" => &[&[Mode::Steady]],
            "H1" | "H5" => &[&[Mode::Steady], &[Mode::Full], &[Mode::Agents]],
            _ => &[&[Mode::Light], &[Mode::Steady], &[Mode::Bursts], &[Mode::Agents], &[Mode::Full]],
        };
        let index = chance.between(0, modes.len() as u64 - 1) as usize;
        return (modes[index], 4 * HOUR);
    }
    match kind.name {
        "B9" => (&[Mode::Idle, Mode::Idle, Mode::Light], hours(chance, 32, 200)),
        "B3" | "agents" => (&[Mode::Agents], hours(chance, 1, 8)),
        "dp" | "dp-hard" => {
            let modes: [&[Mode]; 5] = [&[Mode::Idle, Mode::Light], &[Mode::Steady], &[Mode::Agents], BUSY, MIXED];
            (chance.pick(&modes), hours(chance, 2, 12))
        }
        "full" => (&[Mode::Full], hours(chance, 1, 4)),
        "preempt" => (&[Mode::Full, Mode::Steady], hours(chance, 1, 4)),
        "B5" => (&[Mode::Light, Mode::Steady], hours(chance, 2, 12)),
        "tool" | "argument" | "argument-lumps" => (&[Mode::Light, Mode::Agents], hours(chance, 2, 12)),
        "grammar" => (&[Mode::Light], hours(chance, 2, 12)),
        "B4" | "late" | "clients" => (BUSY, hours(chance, 2, 12)),
        "B1" => (&[Mode::Light, Mode::Steady, Mode::Agents], hours(chance, 2, 16)),
        _ => (MIXED, hours(chance, 8, 96)),
    }
}

/// What every machine has.
fn light_noise(world: &mut World, from: Us, until: Us, chance: &mut Chance) {
    let mut sprinkle = |mean: Us, act: &mut dyn FnMut(&mut Chance) -> Act| {
        let mut at = from;
        loop {
            at += chance.exponential(mean).max(SECOND);
            if at >= until {
                return;
            }
            let act = act(chance);
            world.script.push((at, act));
        }
    };
    sprinkle(20 * MINUTE, &mut |chance| Act::Late(chance.heavy(150 * MS, 5 * SECOND)));
    sprinkle(30 * MINUTE, &mut |chance| Act::Starve(chance.heavy(50 * MS, 1_500 * MS)));
    sprinkle(4 * HOUR, &mut |chance| Act::VmPause(chance.heavy(200 * MS, 30 * SECOND)));
    world.script.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
}

/// The kind's own disturbance, again and again.
fn disturb(name: &str, world: &mut World, (from, until): (Us, Us), chance: &mut Chance) {
    let mut at = from + chance.scale(30 * SECOND, 10 * MINUTE);
    while at < until && world.script.len() < 4_000 {
        let Some((act, rest)) = disturbance(name, chance) else { return };
        world.plan(at, bearable(act, &world.engine.profile));
        at += rest + chance.exponential(10 * MINUTE) + 30 * SECOND;
    }
}

/// The slowest that the field has seen and called alive is 0.28 tokens a second: no crawl is slower.
pub(super) fn bearable(act: Act, profile: &Profile) -> Act {
    match act {
        Act::Crawl(span, pace) => Act::Crawl(span, pace.min(3_600 * SECOND / profile.step_us.max(1)).max(2_000)),
        act => act,
    }
}

/// One disturbance of this kind and how long it lasts; `None` where the load alone is the kind.
pub(super) fn disturbance(name: &str, chance: &mut Chance) -> Option<(Act, Us)> {
    let span = match name {
        "B2" => chance.scale(30 * SECOND, 70 * SECOND),
        "B8" => chance.scale(5 * SECOND, 30 * MINUTE),
        "scrapes" | "B4" => chance.scale(20 * SECOND, 20 * MINUTE),
        "agent" => chance.scale(2 * SECOND, 5 * MINUTE),
        _ => chance.scale(10 * SECOND, 10 * MINUTE),
    };
    let act = match name {
        "B2" => Act::Jit(span),
        "B4" => Act::Hot(span),
        "B5" => Act::Crawl(span, chance.scale(5_000, 120_000)),
        "B6" => match chance.between(0, 4) {
            0 => Act::Throttle(span, chance.scale(2_000, 30_000)),
            1 => Act::Freeze(span),
            2 => Act::Debug(span),
            _ => Act::VmPause(chance.scale(200 * MS, 5 * MINUTE)),
        },
        "B7" => Act::Restart(chance.scale(2 * SECOND, 2 * MINUTE), chance.scale(20, 600)),
        "B8" => match chance.between(0, 3) {
            0 => Act::Sleep(span),
            1 => Act::Pause(span),
            2 => Act::Maintenance(span),
            _ => Act::Swap(chance.scale(100 * MS, 2 * SECOND)),
        },
        "fetch" => Act::Fetch(chance.scale(5 * MINUTE, 40 * MINUTE)),
        "late" => Act::Loaded(span, chance.scale(1_000, 8_000)),
        "scrapes" => Act::SlowScrapes(span),
        "agent" => match chance.between(0, 3) {
            0 => Act::AgentRestart,
            1 => Act::GateRestart,
            _ => Act::Blind(
                span,
                chance.pick(&[Missing::Metrics, Missing::Proc, Missing::Gate, Missing::Page, Missing::Frontend]),
            ),
        },
        "restarts" => match chance.between(0, 2) {
            // a slow network: hardly any CPU for many minutes
            0 => Act::Restart(chance.scale(5 * MINUTE, 40 * MINUTE), chance.scale(30, 900)),
            _ => Act::Restart(chance.scale(20 * SECOND, 10 * MINUTE), chance.scale(200, 2_000)),
        },
        "dp-hard" => match chance.between(0, 7) {
            0 | 1 => Act::Crawl(span, chance.scale(5_000, 120_000)),
            2 => Act::Jit(chance.scale(30 * SECOND, 70 * SECOND)),
            3 => Act::Loaded(span, chance.scale(1_000, 8_000)),
            4 => Act::Restart(chance.scale(20 * SECOND, 5 * MINUTE), chance.scale(200, 2_000)),
            5 => Act::Sleep(span),
            6 => Act::SlowScrapes(span),
            _ => Act::Blind(span, chance.pick(&[Missing::Metrics, Missing::Proc, Missing::Gate, Missing::Page])),
        },
        "preempt" | "full" => Act::Burst(chance.scale(5, 60) as u32),
        _ => return None,
    };
    let lasts = match act {
        Act::Restart(span, _) | Act::Fetch(span) => span,
        _ => span,
    };
    Some((act, lasts))
}

/// The fault and its moment.
fn strike(kind: &Kind, world: &mut World, up: Us, chance: &mut Chance) {
    let profile = &world.engine.profile;
    let fault = fault_for(kind.name, profile, chance);
    let at = match fault.way {
        Way::Startup => START + chance.between(SECOND, world.env.ready - START - SECOND),
        _ if matches!(kind.name, "warm" | "native") => up + chance.between(3 * MINUTE, 15 * MINUTE),
        _ => up + chance.scale(10 * SECOND, 20 * MINUTE),
    };
    match kind.name {
        "mutant" => mixture::mutate(world, chance),
        "excused" => mixture::excuse(world, at, chance),
        _ => {}
    }
    world.plan(at, Act::Fault(fault));
    // whoever comes after the hang may owe a prompt that is allowed more than decode is
    if kind.name == "warm" && chance.permille(500) {
        world.plan(at, Act::Hush);
    }
}

fn fault_for(name: &str, profile: &Profile, chance: &mut Chance) -> Fault {
    let spin = |way| Fault::new(way, Look::Spin);
    let lock = |way| Fault::new(way, Look::Lock);
    match name {
        "H1" | "H2" | "H3" | "H5" | "H10" => spin(Way::Step),
        "H4" => lock(Way::Admission),
        "H6" | "H7" => lock(Way::CoreGone),
        "H8" => spin(Way::Livelock),
        "H9" => spin(Way::Decode),
        "H11" => spin(Way::Rank(chance.between(0, u64::from(profile.ranks.max(2)) - 1) as u32)),
        "H12" => lock(Way::Step),
        "H13" => Fault { undead: true, ..spin(Way::Step) },
        "S4" => lock(Way::Startup),
        "frontend" => Fault::new(Way::Front, Look::Stopped),
        "stopped" => Fault::new(Way::Anywhere, Look::Stopped),
        "crash" => lock(Way::Crash),
        "warm" | "native" => Fault::new(Way::Step, chance.pick(&[Look::Spin, Look::Lock, Look::Stopped])),
        "dp-one" => one_of_several(profile, chance),
        "dp-all" => {
            // who shuts its door serves on for minutes those that it has
            let way = chance.pick(&[Way::Step, Way::Anywhere]);
            Fault { whole_pod: true, way, ..one_of_several(profile, chance) }
        }
        "c0" => {
            let look = chance.pick(&[Look::Spin, Look::Lock, Look::Stopped]);
            Fault { ends: Some(chance.scale(10 * SECOND, 60 * SECOND)), ..Fault::new(Way::Anywhere, look) }
        }
        _ => Fault::any(profile, chance),
    }
}

/// A hang of a data-parallel engine that is told by what is its own. A stranger's livelock is not: who is admitted and who leaves moves its
/// cache as work does.
fn one_of_several(profile: &Profile, chance: &mut Chance) -> Fault {
    let look = chance.pick(&[Look::Spin, Look::Spin, Look::Lock, Look::Lock, Look::Stopped]);
    let way = if profile.kind == EngineKind::Native {
        chance.pick(&[Way::Step, Way::Step, Way::Step, Way::Anywhere, Way::Livelock, Way::Decode, Way::Admission])
    } else {
        chance.pick(&[Way::Step, Way::Step, Way::Step, Way::Anywhere, Way::Admission])
    };
    Fault::new(way, look)
}
