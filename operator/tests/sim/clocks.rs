//! Clocks that are wrong, of operators and of agents (B4, C1), and an executor that is starved (B9): who leads, what it may cost where two
//! believe that they do, and what nobody may conclude from a time that another clock told.

use serde_json::json;

use super::{
    act::Act,
    broken::Fault,
    faults::{Fate, Rule},
    rows::{Row, row, scene},
    said::Log,
    story::{Story, create, freeze, plain, spec},
};

/// What is wrong with the clocks of an operator's machine, for all processes that run there.
#[derive(Debug, Clone)]
pub enum Clock {
    /// The wall clock is so far ahead, or behind.
    Off { ms: i64 },
    /// The monotonic clock all but stands still for so long: to that operator its lease does not run out, and its elector's pauses do not end.
    Stands { ms: u64 },
}

/// Whoever has the Lease, and whoever has not.
const LEADER: usize = 0;
const OTHER: usize = 1;
const STATUS: &str = "/inferencedeployments/chat/status 409";
const HOURS: i64 = 3 * 3_600_000;

pub fn rows() -> Vec<Row> {
    vec![
        row("b4-two-leaders", two_leaders, two_write_and_one_is_refused),
        row("b4-two-leaders-of-two-minds", two_minds, the_second_is_refused),
        row("b4-clocks-apart", || apart(120_000), |log| vec![log.granted_by(45_000), log.incidents(3)]),
        row("b4-clocks-hours-apart", || apart(3_600_000), |log| vec![log.granted_by(45_000), log.incidents(3)]),
        row("b4-clocks-hours-apart-and-a-queue", apart_with_a_queue, the_slot_is_kept),
        row("b4-agents-clock-behind", behind, |log| {
            vec![log.has("grants itself"), log.granted_between((46_000, 55_000))]
        }),
        row("b4-agents-clock-ahead", ahead, |log| {
            vec![log.has("grants itself"), log.granted_between((673_000, 690_000))]
        }),
        row("b9-starved-executor", starved, |log| vec![log.granted_by(45_000), log.incidents(1)]),
    ]
}

/// The leader's clock stands for a minute: for most of it two lead, and everything stalls meanwhile. Then it knows, and one leads.
fn two_leaders() -> Story {
    let stands = Act::Clock { operator: LEADER, clock: Clock::Stands { ms: 60_000 } };
    let stalls = [freeze(45_000, 0), freeze(45_000, 1), freeze(46_000, 2), freeze(90_000, 0)];
    plain([vec![create(3), (20_000, stands)], stalls.to_vec()].concat(), Vec::new())
}

/// Both are at work at the same time, and it is the precondition of a write that keeps the budget. (P15 is asked at every step.)
fn two_write_and_one_is_refused(log: &Log<'_>) -> Vec<Option<String>> {
    let refused = log.times(&["PUT /apis/", STATUS]).into_iter().any(|at_ms| (45_000..80_000).contains(&at_ms));
    vec![
        log.writers_between((45_000, 80_000), 2),
        (!refused).then(|| "no write of the one was refused for the other's".to_owned()),
        log.granted_by(55_000),
        log.incidents(4),
        log.writers_between((90_000, 120_000), 1),
    ]
}

/// The leader whose clock stands grants the first of two, and its write is long on its way. Meanwhile a person asks for the second one, and the
/// other leader, which was frozen for a moment, grants that one.
fn two_minds() -> Story {
    let stands = Act::Clock { operator: LEADER, clock: Clock::Stands { ms: 60_000 } };
    // (by then the Lease names the other one)
    let frozen = Act::Pause { operator: LEADER, ms: 3_000 };
    let wish = json!({"by": "ann", "episode": "00000000-0000-4000-8000-000000000015-1"}).to_string();
    let asked = Act::PatchPods { patch: json!({"metadata": {"annotations": {"truebeat.io/restart": wish}}}) };
    let stalls = [freeze(45_000, 0), freeze(45_000, 1)];
    let acts = [vec![create(3), (20_000, stands)], stalls.to_vec(), vec![(47_000, frozen), (49_500, asked)]].concat();
    let mut story = plain(acts, Vec::new());
    let (from_ms, to_ms, fate) = (47_500, 49_500, Fate::Served { effect_ms: 3_500, answer_ms: 1 });
    let (verbs, plurals) = (&["replace"], &["inferencedeployments"]);
    story.faults.rules.push(Rule { from_ms, to_ms, verbs, plurals, path: "/status", chance: 1000, fate });
    story
}

/// What it was planned from is not there any more: that grant is stored by nobody, and no pod hears of it. (P15 is asked at every step.)
fn the_second_is_refused(log: &Log<'_>) -> Vec<Option<String>> {
    let refused = log.times(&["PUT /apis/", STATUS]).into_iter().any(|at_ms| (51_000..52_500).contains(&at_ms));
    vec![
        (!refused).then(|| "the write that was long on its way was not refused".to_owned()),
        log.granted_between((50_000, 51_500)),
        log.has("asked for by ann"),
        log.incidents(2),
    ]
}

/// The wall clocks of the two differ by twice as much, and the one takes over from the other in the middle of a recovery, and back.
fn apart(ms: i64) -> Story {
    let off = |operator, ms| (0, Act::Clock { operator, clock: Clock::Off { ms } });
    let dies = |at_ms| (at_ms, Act::Kill { operator: LEADER });
    let clocks = vec![create(3), off(LEADER, ms), off(OTHER, -ms)];
    let story = vec![freeze(20_000, 0), dies(23_500), freeze(90_000, 1), dies(93_500), freeze(170_000, 2)];
    let mut story = plain([clocks, story].concat(), Vec::new());
    story.settle_ms = 400_000;
    story
}

/// The clock of whoever takes over in the middle of a restart is two hours ahead of its predecessor's, and another replica waits. (The fourth
/// restart of a container takes 43 s.)
fn apart_with_a_queue() -> Story {
    let mut spec = spec(3, "Recover");
    spec["recovery"]["restartsBeforeReplace"] = json!(5);
    let off = |operator, ms| (15_000, Act::Clock { operator, clock: Clock::Off { ms } });
    let clocks = vec![(0, Act::Create { name: "chat", spec }), off(LEADER, -3_600_000), off(OTHER, 3_600_000)];
    let stalls = [20_000, 50_000, 100_000, 170_000].map(|at_ms| freeze(at_ms, 0));
    let ends = vec![freeze(172_000, 1), (176_000, Act::Terminate { operator: LEADER })];
    Story { settle_ms: 400_000, ..plain([clocks, stalls.to_vec(), ends].concat(), Vec::new()) }
}

/// A restart is not overdue because another clock began it: the next one has its key when the first one serves. (P15 is asked at every step.)
fn the_slot_is_kept(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn = matches!(grants[..], [.., fourth, fifth] if fourth < 176_000 && (220_000..240_000).contains(&fifth));
    vec![(!in_turn || grants.len() != 5).then(|| format!("grants at {grants:?}")), log.succeeded_by(210_000)]
}

/// An agent to whom no operator answers restarts its engine by itself, and another replica stalls; the agent's node is hours off.
fn by_itself(ms: i64, at_ms: u64, stall: Act) -> Vec<(u64, Act)> {
    let mut spec = spec(3, "Recover");
    spec["recovery"]["unattendedAfter"] = json!("10s");
    spec["rollout"] = json!({"progressDeadlineSeconds": 600});
    vec![
        (0, Act::Create { name: "chat", spec }),
        (15_000, Act::AgentClock { nth: 0, ms }),
        (at_ms, stall),
        (at_ms + 2_500, Act::Pause { operator: LEADER, ms: 12_000 }),
        freeze(at_ms + 10_000, 1),
    ]
}

/// The restart takes 12 s from the kill, and began hours ago if the agent is believed. The other replica waits for its end.
fn behind() -> Story {
    let mut acts = by_itself(-HOURS, 20_000, Act::Freeze { nth: 0, heals_ms: None });
    acts.extend([(19_000, Act::Unkillable { exit_ms: 9_000 }), (40_000, Act::Unkillable { exit_ms: 1_500 })]);
    acts.sort_by_key(|(at, _)| *at);
    plain(acts, Vec::new())
}

/// The engine ends at every start until its node is started anew, and has not begun to restart yet if the agent is believed. The other replica
/// waits for as long as anybody waits for a restart, and no longer.
fn ahead() -> Story {
    let fails = Act::GpuFault { node: 0, fault: Fault { code: 31, remedy: "Unknown" }, dies: false };
    let mut acts = by_itself(HOURS, 60_000, fails);
    acts.push((800_000, Act::Reboot { node: 0 }));
    plain(acts, Vec::new())
}

/// One call blocks the leader's executor for a minute, in the middle of a recovery: neither a pass nor the elector runs, nor a deadline.
fn starved() -> Story {
    scene(vec![(23_250, Act::Pause { operator: LEADER, ms: 60_000 })], Vec::new())
}
