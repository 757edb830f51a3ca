//! What stands in the way: a revision that is taken back while the cluster makes no pods, so that its replicas stand on, and what an
//! InferenceDeployment of the same name has left; and a child that goes before its kind is watched.

use serde_json::json;

use super::{
    act::Act,
    faults::Rule,
    rows::{Row, row},
    said::Log,
    story::{Story, create, edit, plain, spec},
};

const GRANT: &str = "truebeat.io/restart-grant";

pub fn rows() -> Vec<Row> {
    vec![
        row("i2-rollback-that-cannot-move", cannot_move, recovered_where_it_stands),
        row("p13-made-anew", made_anew, waits_for_the_one_before),
        row("a4-gone-before-the-first-list", unwatched, |log| {
            vec![log.changes("services/chat 201", (70_000, 110_000))]
        }),
    ]
}

/// One of two new replicas freezes, goes with its revision, and nobody may come in its place; the other freezes half a minute later.
fn cannot_move() -> Story {
    let mut spec = spec(2, "Recover");
    spec["rollout"] = json!({"soakSeconds": 30});
    let frozen = |at_ms| (at_ms, Act::FreezeOf { image: "engine:2" });
    let acts = vec![
        (0, Act::Create { name: "chat", spec }),
        edit(90_000, json!({"engine": {"image": "engine:2"}})),
        frozen(145_000),
        (146_000, Act::Quota { pods: Some(2) }),
        frozen(165_000),
        (320_000, Act::Quota { pods: None }),
    ];
    plain(acts, Vec::new())
}

fn recovered_where_it_stands(log: &Log<'_>) -> Vec<Option<String>> {
    vec![log.has("rolled-back"), log.no_grant_before(150_000), log.changes(GRANT, (150_000, 320_000))]
}

/// Deleted and made anew at once; the garbage collector takes its time.
fn made_anew() -> Story {
    let again = (50_000, create(2).1);
    let acts = vec![create(2), (50_000, Act::Delete { name: "chat" }), again];
    Story { garbage_ms: 4_000, ..plain(acts, Vec::new()) }
}

/// Another operator leads from 37 s on, whose Services are refused until 70 s; one is deleted after its first pass and before its first list.
fn unwatched() -> Story {
    let acts = vec![create(2), (20_000, Act::Kill { operator: 0 }), (60_000, Act::DeleteChild { plural: "services" })];
    let why = (503, "ServiceUnavailable", "etcdserver: no leader");
    let mut story = plain(acts, Vec::new());
    story.faults.rules.push(Rule::refuse((20_250, 70_000), &["list"], &["services"], why));
    story
}

/// It is no stranger's, and nobody needs a person for it.
fn waits_for_the_one_before(log: &Log<'_>) -> Vec<Option<String>> {
    let stranger = log.times(&["belongs to somebody else"]);
    let made = log.changes("deployments/chat 201", (54_000, 80_000));
    vec![log.has("and is waited for: "), made, stranger.first().map(|at_ms| format!("refused at {at_ms} ms"))]
}
