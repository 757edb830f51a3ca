//! What the API server does not let in: a quota that no successor fits into (A18).

use serde_json::json;

use super::{
    act::Act,
    rows::{Row, row},
    story::{Story, create, edit, freeze, plain, spec},
};

const DELETE: &str = "DELETE /api/v1/namespaces/serving/pods/";

pub fn rows() -> Vec<Row> {
    vec![
        row("a18-quota-after-the-grant", refused_after_the_grant, |log| {
            let granted = log.changes("\"action\":\"Replace\"", (80_000, 90_000));
            let instead = log.changes("truebeat.io/restart-grant", (87_000, 120_000));
            vec![log.no_delete(), granted, instead, log.has("PodsRefused")]
        }),
        row("a18-quota-below-its-use", lowered_quota, |log| {
            let deleted = log.times(&[DELETE, " 200 "]);
            let one = (deleted.len() != 1).then(|| format!("pods were deleted at {deleted:?} ms"));
            let instead = log.changes("truebeat.io/restart-grant", (150_000, 200_000));
            vec![one, instead, log.changes("PodsRefused", (80_000, 120_000))]
        }),
    ]
}

/// The replacement is granted and waits for its record; meanwhile there is no room for another pod.
fn refused_after_the_grant() -> Story {
    let quota = [(83_000, Act::Quota { pods: Some(2) }), edit(84_500, json!({"replicas": 3}))];
    let lifted = [(150_000, Act::ExpectServing { count: 2 }), (160_000, Act::Quota { pods: None })];
    let acts = [hasty(2), vec![freeze(20_000, 0), freeze(80_000, 0)], quota.to_vec(), lifted.to_vec()].concat();
    let mut story = plain(acts, Vec::new());
    story.faults.rules.push(super::doubts::records_refused((80_000, 125_000)));
    story
}

/// A quota that was lowered below what stands tells nobody until somebody goes: the first one that is replaced has no successor, and no other
/// one goes.
fn lowered_quota() -> Story {
    let stalls = [freeze(20_000, 0), freeze(25_000, 1), (70_000, Act::Quota { pods: Some(2) })];
    let again = [freeze(80_000, 0), freeze(150_000, 0), (240_000, Act::Quota { pods: None })];
    let mut story = plain([hasty(3), stalls.to_vec(), again.to_vec()].concat(), Vec::new());
    story.fleet.restarts_percent = 100; // the one that is away leaves a slot to the next
    story
}

/// Two may be away, and one restart in vain is enough.
fn hasty(replicas: u64) -> Vec<(u64, Act)> {
    let mut spec = spec(replicas, "Recover");
    spec["recovery"]["restartsBeforeReplace"] = json!(1);
    spec["recovery"]["maxUnavailable"] = json!(2);
    vec![(0, Act::Create { name: "chat", spec })]
}
