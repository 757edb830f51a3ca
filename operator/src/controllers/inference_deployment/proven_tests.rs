//! When a revision counts as good: its replicas together, once.

use super::tests::{Bench, of_revision};
use super::*;
use crate::controllers::inference_deployment::testing::{healthy, pod};
use serde_json::json;

#[test]
fn a_revision_is_good_when_every_replica_has_shown_it() {
    let mut bench = Bench::new(Vec::new());
    let stable = |bench: &Bench| bench.look().0.memory.stable == bench.bad;
    bench.observed.pods = vec![of_revision(&bench.bad, healthy("c")), of_revision(&bench.bad, healthy("d"))];
    assert!(!stable(&bench), "the Deployment does not count them yet");
    let live = bench.observed.children.get_mut("Deployment").unwrap();
    live["status"] = json!({"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2});
    assert!(stable(&bench));
    bench.observed.children.get_mut("Deployment").unwrap()["status"]["availableReplicas"] = json!(1);
    assert!(!stable(&bench), "one has not served for long enough");
    bench.observed.children.get_mut("Deployment").unwrap()["status"]["availableReplicas"] = json!(2);
    let silent = PodView { progressing: None, ..healthy("d") };
    for other in [of_revision(&bench.good, healthy("d")), of_revision(&bench.bad, silent), pod("d", "Suspect", 1)] {
        bench.observed.pods[1] = other;
        assert!(!stable(&bench));
    }
    bench.observed.pods.clear();
    bench.observed.children.get_mut("Deployment").unwrap()["spec"]["replicas"] = json!(0);
    assert!(!stable(&bench), "none has shown nothing");
}

/// All of them together once, but for one without a place: weeks later one ordinary stall is no reason to take a fleet back.
#[test]
fn a_revision_stays_good_when_a_replica_stalls_later_and_waits_for_no_place() {
    let whole = |available: i64, came: &str| {
        json!({
            "observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "availableReplicas": available,
            "conditions": [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable", "lastUpdateTime": came}],
        })
    };
    let made = |name: &str, pod: PodView| PodView {
        name: name.to_owned(),
        created_at: Some("2026-01-01T00:01:00Z".into()),
        ..pod
    };
    let judged = |second: PodView, status: Value| {
        let mut bench = Bench::new(Vec::new());
        bench.observed.pods = vec![of_revision(&bench.bad, made("c", healthy("c"))), of_revision(&bench.bad, second)];
        bench.observed.children.get_mut("Deployment").unwrap()["status"] = status;
        (bench.look().0.memory.stable == bench.bad, bench.word())
    };
    let stalls = || made("d", pod("d", "Stalled", 1));
    assert_eq!(judged(stalls(), whole(1, "2026-01-01T00:01:30Z")), (true, String::new()), "it came, and stalls later");
    assert_eq!(
        judged(stalls(), whole(1, "2026-01-01T00:00:59Z")),
        (false, "ReplicaStalled".into()),
        "that was of nobody"
    );
    let sleeps = made("d", PodView { progressing: None, ..healthy("d") });
    assert!(judged(sleeps, whole(2, "2026-01-01T00:01:30Z")).0);
    let pending = |since: Option<&str>| {
        let unplaced =
            PodView { ready: false, progressing: None, unschedulable_since: since.map(str::to_owned), ..healthy("d") };
        judged(made("d", unplaced), whole(1, "2026-01-01T00:00:30Z")).0
    };
    assert!(pending(Some("2026-01-01T00:01:10Z")), "nobody can tell how it would do");
    assert!(!pending(None), "it has a place and shows nothing");
}
