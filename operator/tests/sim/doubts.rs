//! Scenes for the rows about writes whose end their writer does not learn, because the answer is late or lost, or because it dies.

use serde_json::json;

use super::{
    act::Act,
    changes::BAD_IMAGE,
    faults::{Fate, Outage, Rule},
    rows::{CHANGES, all_kinds, scene},
    said::Log,
    story::{Story, create, edit, freeze, plain, spec},
};

pub fn unheard() -> Story {
    scene(Vec::new(), vec![all_kinds(Fate::Applied504, (10_000, 45_000), CHANGES, 1000)])
}

pub fn slow() -> Story {
    let fate = Fate::Served { effect_ms: 100, answer_ms: 30_000 };
    scene(Vec::new(), vec![all_kinds(fate, (10_000, 70_000), &[], 1000)])
}

/// Two objects each have a stalled replica, and the fleet has one restart for both: whoever does not hear that its grant was stored must
/// not let the other one believe that it was not.
pub fn unheard_grant() -> Story {
    let other = (0, Act::Create { name: "other", spec: spec(2, "Recover") });
    // pods in the order of their names: two of chat, two of other
    let mut story = plain(vec![create(2), other, freeze(45_000, 0), freeze(45_000, 2)], Vec::new());
    let (from_ms, to_ms, fate) = (45_000, 60_000, Fate::Applied504);
    let (verbs, plurals) = (&["replace"], &["inferencedeployments"]);
    story.faults.rules.push(Rule { from_ms, to_ms, verbs, plurals, path: "/status", chance: 1000, fate });
    story
}

/// A bad revision stalls while nobody can reach the API, and who takes it back dies of that: what is known of the stall is on the pod that
/// the rollback takes away, and must have been recorded before; and that the revision failed must be remembered before, or it is tried
/// once more.
pub fn dies_of_a_rollback() -> Story {
    let acts = vec![create(2), edit(50_000, json!({"engine": {"image": BAD_IMAGE}}))];
    let mut story = plain(acts, Vec::new());
    story.faults.outages.push(Outage { from_ms: 53_000, to_ms: 68_000, black_hole: false });
    let (from_ms, to_ms, fate) = (68_000, 75_000, Fate::Death);
    let rule = Rule { from_ms, to_ms, verbs: &["patch"], plurals: &["deployments"], path: "", chance: 1000, fate };
    story.faults.rules.push(rule);
    story
}

/// A bad revision stalls while somebody's webhook refuses every record, until `to_ms`: what is known of the stall is on the pod that the
/// rollback takes away.
pub fn record_refused(to_ms: u64) -> Story {
    let mut story = plain(vec![create(2), edit(50_000, json!({"engine": {"image": BAD_IMAGE}}))], Vec::new());
    story.faults.rules.push(records_refused((50_000, to_ms)));
    story
}

/// A restart has cured nothing, and while the grant of its replacement is stored, slowly, the pod goes on by itself: it serves when the delete
/// would come.
pub fn went_on() -> Story {
    let mut hasty = spec(2, "Recover");
    hasty["recovery"]["restartsBeforeReplace"] = json!(1);
    let heals = Act::Freeze { nth: 0, heals_ms: Some(4_500) };
    let acts = vec![(0, Act::Create { name: "chat", spec: hasty }), freeze(20_000, 0), (80_000, heals)];
    let mut story = plain(acts, Vec::new());
    let (from_ms, to_ms, fate) = (83_000, 84_500, Fate::Served { effect_ms: 3_000, answer_ms: 1 });
    let (verbs, plurals) = (&["replace"], &["inferencedeployments"]);
    story.faults.rules.push(Rule { from_ms, to_ms, verbs, plurals, path: "/status", chance: 1000, fate });
    story
}

/// A restart has cured nothing, and the records of the stall whose pod is to be replaced are refused for a while.
pub fn record_refused_of_a_replaced() -> Story {
    replaced_while(records_refused((80_000, 100_000)))
}

/// The same, and the mark of its node is refused, for much longer than anybody waits for it.
pub fn mark_refused() -> Story {
    let why = (500, "InternalError", "failed calling webhook \"policy.example.com\"");
    replaced_while(Rule::refuse((80_000, 300_000), &["patch"], &["nodes"], why))
}

fn replaced_while(rule: Rule) -> Story {
    let mut hasty = spec(2, "Recover");
    hasty["recovery"]["restartsBeforeReplace"] = json!(1);
    let acts = vec![(0, Act::Create { name: "chat", spec: hasty }), freeze(20_000, 0), freeze(80_000, 0)];
    let mut story = plain(acts, Vec::new());
    story.faults.rules.push(rule);
    story
}

/// Somebody's webhook is down.
pub fn records_refused(between_ms: (u64, u64)) -> Rule {
    let why = (500, "InternalError", "failed calling webhook \"policy.example.com\"");
    Rule::refuse(between_ms, &["patch"], &["engineincidents"], why)
}

/// A pod's annotations have no room for what it is to be told (A17).
pub fn annotations_full() -> Story {
    let why = (422, "Invalid", "metadata.annotations: Too long: may not be more than 262144 bytes");
    scene(Vec::new(), vec![Rule::refuse((15_000, 70_000), &["patch"], &["pods"], why)])
}

/// The key comes when there is room for it; until then the status says why it does not, and nobody tries without a pause.
pub fn told_once_there_is_room(log: &Log<'_>) -> Vec<Option<String>> {
    vec![
        log.granted_between((70_000, 90_000)),
        log.changes("more than 262144 bytes", (22_000, 40_000)),
        log.no_hot_loop(),
        log.no_delete(),
    ]
}
