//! Scenes for the rows about an API server that holds what is not so (corrupted, or restored from a backup), or makes no pods.

use serde_json::json;

use super::{
    act::Act,
    faults::Rule,
    rows::{CHANGES, CRDS, scene},
    said::Log,
    story::{Story, edit, freeze, spec},
};

/// Versions are no numbers, and nobody says how far a watch has come.
pub fn opaque() -> Story {
    let mut story = scene(vec![(0, Act::OpaqueVersions)], Vec::new());
    story.faults.bookmarks = false;
    story
}

pub fn corrupted() -> Story {
    let owners = |at_ms, kind| (at_ms, Act::PatchOwners { kind });
    scene(vec![owners(19_000, "ReplicaSex"), owners(60_000, "ReplicaSet")], Vec::new())
}

pub fn mislabelled() -> Story {
    let label = |name| Act::PatchPods { patch: json!({"metadata": {"labels": {crds::LABEL_DEPLOYMENT: name}}}) };
    scene(vec![(19_000, label("chau")), (60_000, label("chat"))], Vec::new())
}

/// What fails the cross-check of label and owner is nobody's replica: the status says that one is missing, and names it.
pub fn named_until_mended(log: &Log<'_>) -> Vec<Option<String>> {
    let mut all = unknown_until_mended(log);
    all.push(log.changes("OwnerMismatch", (19_000, 60_000)));
    all
}

/// The same where the name of the InferenceDeployment is not on it any more: it is missing.
pub fn unknown_until_mended(log: &Log<'_>) -> Vec<Option<String>> {
    let missed = log.changes("NoReplicas", (19_000, 60_000));
    vec![log.no_grant_before(60_000), log.no_delete(), missed, log.granted_by(80_000)]
}

/// No pod of the new revision can be made, and an old one freezes whose restarts were in vain so far: it is restarted once more, for
/// nobody would come in its place.
pub fn quota() -> Story {
    let mut hasty = spec(2, "Recover");
    hasty["recovery"]["restartsBeforeReplace"] = json!(1);
    let image = json!({"engine": {"image": "engine:2"}});
    let mut story = scene(Vec::new(), Vec::new());
    let full = [(15_000, Act::Quota { pods: Some(2) }), edit(20_000, image), freeze(22_000, 0), freeze(60_000, 0)];
    let lifted = [(140_000, Act::ExpectServing { count: 2 }), (141_000, Act::Quota { pods: None })];
    let made = vec![(0, Act::Create { name: "chat", spec: hasty })];
    story.acts = [made, full.to_vec(), lifted.to_vec()].concat();
    story
}

/// Nobody is deleted, nor is it granted, and the server's words are told.
pub fn restarted_where_it_is(log: &Log<'_>) -> Vec<Option<String>> {
    let replaced = log.times(&["\"action\":\"Replace\""]).into_iter().next();
    let granted = replaced.map(|at_ms| format!("a replacement is granted at {at_ms} ms"));
    vec![log.no_delete(), granted, log.has("PodsRefused"), log.has("exceeded quota")]
}

/// Restored to before a restart that is going on: neither the grant nor the stall is in the API any more.
pub fn restored_in_a_restart() -> Story {
    let mut story = scene(vec![(15_000, Act::Backup), (24_500, Act::Restore)], Vec::new());
    story.settle_ms = 150_000;
    story
}

/// Restored to the middle of a stall that is long over, and that no restart would have been tried for: what the API holds says that a
/// replica which serves is to be deleted, until its agent says its word again.
pub fn restored_in_a_stall() -> Story {
    restored_to_a_stall(vec![(110_000, Act::Restore), freeze(300_000, 1)])
}

/// The same when no operator lives that could have seen it: all of them start after it. (Until 489 s no agent repeats its word.)
pub fn restored_unseen() -> Story {
    let dies = |operator| (432_000, Act::Kill { operator });
    restored_to_a_stall(vec![dies(0), dies(1), (432_000, Act::Restore), freeze(600_000, 1)])
}

fn restored_to_a_stall(then: Vec<(u64, Act)>) -> Story {
    let mut hasty = spec(2, "Recover");
    hasty["recovery"]["restartsBeforeReplace"] = json!(1);
    let unheard = Rule::refuse((60_000, 70_000), CHANGES, CRDS, (500, "InternalError", "etcdserver: no leader"));
    let again = Act::Freeze { nth: 0, heals_ms: Some(9_000) };
    let mut story = scene(Vec::new(), vec![unheard]);
    story.acts = vec![(0, Act::Create { name: "chat", spec: hasty }), freeze(20_000, 0), (60_000, again)];
    story.acts.push((68_000, Act::Backup));
    story.acts.extend(then);
    story
}
