//! Scenes for what the operator has a word for and no other story brings about (`spoken.rs`).

use serde_json::{Value, json};

use super::{
    act::Act,
    broken::Fault,
    faults::Outage,
    rows::{Row, row},
    said::Log,
    story::{Story, create, edit, freeze, plain, spec},
};

pub fn rows() -> Vec<Row> {
    vec![
        row("f1-xid-needs-a-reset-or-a-person", reset_or_person, |log| {
            vec![log.no_grant_before(u64::MAX), log.has("GpuNeedsReset"), log.has("NodeNeedsSupport")]
        }),
        row("i2-hold-of-one-node", one_node, |log| {
            vec![log.has("PlaceCommonCause"), log.grants_at_most(1), log.granted_between((105_000, 110_000))]
        }),
        row("p13-scaled-to-zero", to_zero, |log| vec![log.changes("ScaledToZero", (20_000, 30_000))]),
        row("p13-another-stall-than-was-known", another_stall, |log| {
            vec![log.incidents(2), closed_as(log, "Superseded")]
        }),
        row("p13-fenced-by-a-person", fenced, |log| vec![log.grants_at_most(0), closed_as(log, "Unfenced")]),
        row("p13-the-first-revision-of-all-fails", first_fails, |log| {
            vec![log.has("no way back"), log.changes("RolloutFailed", (1_000, 20_000))]
        }),
    ]
}

/// The GPU of one node asks for a reset, that of another one for a person.
fn reset_or_person() -> Story {
    let breaks =
        |at_ms, node, code, remedy| (at_ms, Act::GpuFault { node, fault: Fault { code, remedy }, dies: false });
    let faults = vec![breaks(20_000, 0, 119, "ResetGpu"), breaks(60_000, 1, 54, "ContactSupport")];
    let marked = [0, 1].map(|node| (110_000, Act::ExpectMarked { node, marked: true }));
    let end = vec![(110_000, Act::ExpectServing { count: 2 })];
    plain([vec![create(2)], faults, marked.to_vec(), end].concat(), Vec::new())
}

/// All three replicas of one node freeze for a while, and then one of the other node of its failure domain, which waits until they are well: four
/// of six stall there.
fn one_node() -> Story {
    let mut spec = spec(12, "Recover");
    spec["recovery"]["holdPercent"] = json!(60);
    let stalls = [0, 4, 8].map(|nth| (45_000, Act::Freeze { nth, heals_ms: Some(60_000) }));
    let held = (60_000, Act::Expect { condition: "RestartsHeld", status: Some("True") });
    let acts = [vec![(0, Act::Create { name: "chat", spec })], stalls.to_vec(), vec![held, freeze(62_000, 1)]];
    plain(acts.concat(), Vec::new())
}

/// Nobody is wanted for a while.
fn to_zero() -> Story {
    let ready = (40_000, Act::Expect { condition: "Ready", status: Some("True") });
    let acts = vec![create(2), edit(20_000, json!({"replicas": 0})), ready, edit(60_000, json!({"replicas": 2}))];
    plain(acts, Vec::new())
}

/// A stall is recorded, and goes while nobody can reach the API; when they can the same replica stalls anew.
fn another_stall() -> Story {
    let heals = (20_000, Act::Freeze { nth: 0, heals_ms: Some(5_000) });
    let mut story = plain(vec![create(2), heals, freeze(30_000, 0)], Vec::new());
    story.faults.outages.push(Outage { from_ms: 22_000, to_ms: 36_000, black_hole: false });
    story
}

/// A person takes all out of traffic, and lets them serve again. (The engines go on, and the gates are no part of this world.)
fn fenced() -> Story {
    let fence =
        |text: Value| Act::PatchPods { patch: json!({"metadata": {"annotations": {"truebeat.io/fence": text}}}) };
    let begun = (20_000, fence(json!(r#"{"by": "on-call", "why": "a look"}"#)));
    plain(vec![create(2), begun, (60_000, fence(Value::Null))], Vec::new())
}

/// The engines of the very first revision end again and again before they serve; there is nothing to go back to, and another spec is what helps.
fn first_fails() -> Story {
    let crashes = (1..40).flat_map(|second| [0, 1].map(|nth| (1_000 * second, Act::Crash { nth })));
    let told = (20_000, Act::Expect { condition: "Stalled", status: Some("True") });
    let mended = edit(41_000, json!({"engine": {"args": ["--mended"]}}));
    plain([vec![create(2)], crashes.collect(), vec![told, mended]].concat(), Vec::new())
}

fn closed_as(log: &Log<'_>, outcome: &str) -> Option<String> {
    log.has(&format!("\"outcome\":\"{outcome}\""))
}
