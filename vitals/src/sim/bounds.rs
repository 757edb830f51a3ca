//! How late the detector may be in each hang, which hangs no signal can show, and what a failure looked like. Pure.

use super::book::Request;
use super::fault::{Fault, Way};
use super::profile::{EngineKind, MINUTE, MS, SECOND, Us};
use super::world::World;
use crate::verdict::Outcome;

/// A foreign engine is fenced within the rivals' patience, and this much more.
const FOREIGN_FENCE_MAX: Us = 306 * SECOND;
/// Confirmation after the fence, while work stays owed: the longest confirm time and a little.
const CONFIRM_MAX: Us = 130 * SECOND;
/// The same where the work went away and trials came between.
pub const CONFIRM_DRAINED_MAX: Us = 40 * MINUTE;
/// Where nothing but silence speaks while somebody works, the rivals' patience is the bound.
const PATIENCE_MAX: Us = 325 * SECOND;
/// The patience itself.
const PATIENCE: Us = 300 * SECOND;
/// The same where a crawl looks like the hang: a loop that turns without a page, whose requests may all be such as are silent until they end,
/// from the last of what prefill still did; and whoever was fenced only after the rivals' patience, because nothing comparable was learned.
const WHOLE_ANSWERS_MAX: Us = 1_000 * SECOND;
/// SGLang writes its gauges this much later than what they show, where it is idle.
const GAUGES_LATE: Us = 31 * SECOND;

/// Until when a hang that is owed for since `owed_at` and should be fenced by `fenced` must be confirmed.
pub fn confirm_by(world: &World, fault: Fault, owed_at: Us, fenced: Us, drained: bool) -> Us {
    let most = if drained { CONFIRM_DRAINED_MAX } else { CONFIRM_MAX };
    let signals = world.engine.profile.signals;
    let turns = matches!(fault.way, Way::Livelock | Way::Decode);
    let unlearned = fenced.saturating_sub(owed_at) + 10 * SECOND >= PATIENCE;
    let patience = if unlearned || (turns && !signals.page) { WHOLE_ANSWERS_MAX } else { PATIENCE_MAX };
    let patience = patience * crowd_milli(world) / 1_000;
    (fenced + most).max(owed_at + patience)
}

/// The deadline that a fence names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline {
    /// The engine's own rhythm; else the policy, a lease, or the rivals' patience.
    pub learned: bool,
    pub ms: u64,
}

/// As the detector words it (`Allowed::words`): the one sentence in which people find it as well.
const LEARNED: &str = " ms is what this engine's own rhythm allows";
const POLICY: &str = "the policy allows ";

/// The deadline in the words of a fence; `None` where that is no rhythm and no number of the policy.
pub fn deadline(outcome: &Outcome) -> Option<Deadline> {
    let said = outcome.reasons.first()?.text.rsplit_once("; ")?.1;
    let number = |words: &str| words.trim_end_matches(" ms").parse().ok();
    match said.strip_suffix(LEARNED) {
        Some(ms) => number(ms).map(|ms| Deadline { learned: true, ms }),
        None => said.strip_prefix(POLICY).and_then(number).map(|ms| Deadline { learned: false, ms }),
    }
}

/// Goal 1c: a foreign engine in warm decode is fenced within this, or the bound that was learned of it.
const WARM_FENCE_MAX: Us = 5 * SECOND;

/// When a hang in warm decode must be fenced whose fence names this deadline.
pub fn warm_fence_max(world: &World, deadline: Deadline) -> Us {
    WARM_FENCE_MAX.max(deadline.ms * MS) * crowd_milli(world) / 1_000 + jitter(world)
}

/// What the detector said and what the engine was doing, in one line for people.
pub fn scene(world: &World, outcome: &Outcome) -> String {
    let (engine, now) = (&world.engine, world.now);
    let said: Vec<&str> = outcome.reasons.iter().map(|reason| reason.text.as_str()).collect();
    let step = engine.step.map_or("no step".to_owned(), |step| {
        let length = step.end.saturating_sub(step.start) / MS;
        let age = now.saturating_sub(step.start) / MS;
        format!("step of {} prompt tokens and {} sequences, {age} of {length} ms", step.prefill, step.decoding)
    });
    let (running, waiting) = engine.queue();
    format!(
        "{:?}: {} | in truth: {step}, {running} running, {waiting} waiting, {} in flight, {} unanswered, {} prompt tokens owed, last delivery {} ms ago",
        outcome.verdict,
        said.join("; "),
        engine.book.in_flight,
        engine.book.awaiting,
        engine.book.prompt_owed,
        now.saturating_sub(engine.book.last_delivery.unwrap_or(0)) / MS
    )
}

/// The bound to the fence, independent of what the detector has learned.
pub fn fence_max(world: &World, fault: Fault, lease_ms: u64) -> Us {
    unhurried_fence_max(world, fault, lease_ms, jitter(world)) * crowd_milli(world) / 1_000
}

fn jitter(world: &World) -> Us {
    world.env.agent_held.saturating_sub(world.now) + 6 * SECOND
}

/// A hang that spins stands in line as a healthy step does, and may take up to four times as long
/// (`docs/decisions/2026-11-21-time-in-line-for-a-core.md`).
fn crowd_milli(world: &World) -> u64 {
    world.engine.mood.host_milli.clamp(1_000, 4_000)
}

fn unhurried_fence_max(world: &World, fault: Fault, lease_ms: u64, jitter: Us) -> Us {
    match fault.way {
        Way::Crash => 2 * SECOND + jitter,
        _ if world.engine.native() && matches!(fault.way, Way::Step | Way::Rank(_)) => {
            lease_ms.max(1_000) * MS + jitter
        }
        // what is prefilled again takes room in the cache again, and clients who leave make room: nobody can tell that from prefill
        // one that tells nothing of its cache has the patience of answers that come whole
        Way::Livelock if world.engine.profile.kind == EngineKind::Tgi => WHOLE_ANSWERS_MAX + jitter,
        Way::Decode if !world.engine.native() => WHOLE_ANSWERS_MAX + jitter,
        // what was admitted before is prefilled yet, which is progress, and may be twice where a page tells of it
        Way::Livelock | Way::Decode => FOREIGN_FENCE_MAX + MINUTE + jitter + prefill_twice(world),
        _ if world.engine.profile.idle_refresh => FOREIGN_FENCE_MAX + GAUGES_LATE + jitter,
        _ => FOREIGN_FENCE_MAX + jitter,
    }
}

/// The time of prefilling all prompts that are owed twice.
fn prefill_twice(world: &World) -> Us {
    let owed = u32::try_from(world.engine.book.prompt_owed).unwrap_or(u32::MAX);
    if world.engine.profile.signals.page { 2 * world.engine.profile.prefill_us(owed, 0) } else { 0 }
}

/// Without a gate only gauges tell of work; frozen at zero, or unread, they tell nothing, and nothing else does.
pub fn is_blind(world: &World) -> bool {
    let (signals, shown) = (world.engine.profile.signals, &world.engine.shown);
    match world.fault.map(|(_, fault)| fault.way) {
        // its page and its port are gone, and so is all work that was owed
        Some(Way::Crash) => return !signals.proc,
        Some(Way::Startup) => return !signals.proc && !signals.page,
        _ => {}
    }
    if turns_unseen(world) {
        return true;
    }
    if world.engine.profile.engines > 1 && world.fault.is_some_and(|(_, fault)| !fault.whole_pod) {
        return is_one_blind(world);
    }
    // llama.cpp answers /metrics between two steps only, and one without iteration statistics has no gauges
    let mute = world.engine.profile.kind == EngineKind::LlamaCpp || !world.engine.profile.iter_stats;
    // what only a gauge says is believed where somebody's connection is seen as well
    let witnessed = signals.load || world.engine.native() || (signals.proc && shown.running + shown.waiting > 0);
    let gauges = signals.metrics && !mute && witnessed;
    let front = world.fault.is_some_and(|(_, fault)| fault.way == Way::Front);
    let (running, waiting) = world.engine.queue();
    let gone = world.fault.is_some_and(|(_, fault)| fault.way == Way::CoreGone);
    let page_tells = signals.page && !front && !gone && running + waiting > 0;
    !signals.gate && !page_tells && (front || !gauges)
}

/// A loop that turns for answers which come whole, of an engine that tells neither of its tokens nor of its cache: counters move, and nothing
/// says that they should not.
fn turns_unseen(world: &World) -> bool {
    let turns = world.fault.is_some_and(|(_, fault)| matches!(fault.way, Way::Livelock | Way::Decode));
    let whole = |request: &Request| request.gone || !(request.stream || request.answered);
    turns && world.engine.profile.kind == EngineKind::Tgi && world.engine.live.iter().all(whole)
}

/// One of several data-parallel engines whose others serve on: its page tells of what its loop knows of. Without pages its gauges must hold
/// work, and the gate, which knows of no engines, a stream that it left standing.
fn is_one_blind(world: &World) -> bool {
    let (engine, signals) = (&world.engine, world.engine.profile.signals);
    if signals.page {
        let loop_stands = world.fault.is_some_and(|(_, fault)| fault.way == Way::Anywhere);
        return loop_stands && engine.queue() == (0, 0);
    }
    let stands = |request: &Request| !request.gone && request.answered && request.unread_until <= world.now;
    let held = engine.shown.running + engine.shown.waiting > 0;
    !(signals.gate && signals.metrics && held && engine.live.iter().any(stands))
}
