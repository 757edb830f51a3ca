//! What the record keeps, and what it forgets.

use crds::{GrantAction, InferenceDeployment, inference_deployment::RecoveryMode};

use super::*;
use crate::controllers::inference_deployment::{
    escalate::{
        action,
        tests::{NOW, frozen, granted_now, past},
    },
    grants,
    testing::{infd, pod},
};

#[test]
fn the_record_is_bounded_and_written_only_with_a_grant() {
    let mut object = infd("chat");
    object.status.get_or_insert_default().recovery.recent = vec![past("x", "n1", "2025-01-01T00:00:00Z")];
    let terms = Terms::of(&object, &[], None);
    assert_eq!(recent(&terms, Ground::of(&[]), &[], NOW).len(), 1, "time alone writes nothing");
    let pods = frozen(1);
    let fresh = grants::next(&[], &pods, &Terms::simple(RecoveryMode::Recover, 1), NOW);
    let after = recent(&terms, Ground::of(&pods), &fresh.iter().collect::<Vec<_>>(), NOW);
    assert_eq!((after.len(), after[0].node.as_str()), (1, "n1"), "the old one is dropped, the new one is dated");
}

#[test]
fn a_burst_of_many_pods_makes_nobody_forget_a_pods_own_restarts() {
    let mut object = infd("chat");
    let at = "2026-01-01T00:58:00Z";
    let twice = [past("uid-p0", "n1", at), past("uid-p0", "n1", at)];
    object.status.get_or_insert_default().recovery.recent = twice.to_vec();
    let mut pods = frozen(1);
    for round in 0..60 {
        let many: Vec<PodView> = (0..20).map(|n| pod(&format!("r{round}-{n}"), "Stalled", 1)).collect();
        pods.extend(many.iter().cloned());
        let terms = Terms::of(&object, &pods, None);
        let fresh: Vec<Grant> = many.iter().map(|pod| granted_now(&pod.uid)).collect();
        // the pods of the first rounds are gone by now
        let here: Vec<PodView> = pods.iter().filter(|pod| round < 40 || !pod.name.starts_with("r1")).cloned().collect();
        let after = recent(&terms, Ground::of(&here), &fresh.iter().collect::<Vec<_>>(), NOW);
        object.status.get_or_insert_default().recovery.recent = after;
    }
    let kept = object.status.clone().unwrap_or_default().recovery.recent;
    assert_eq!((kept.len(), &kept[..2]), (RECENT_MAX, &twice[..]), "whoever is gone goes first");
    assert_eq!(action(&pods[0], &Terms::of(&object, &pods, None), NOW), GrantAction::Replace);
}

#[test]
fn of_one_pod_no_more_is_kept_than_counts() {
    let mut object = infd("chat");
    let many: Vec<PastGrant> =
        (0..40).map(|n| past("uid-p0", "n1", &format!("2026-01-01T00:5{}:00Z", n / 4))).collect();
    object.status.get_or_insert_default().recovery.recent = many;
    let pods = frozen(2);
    let kept = recent(&Terms::of(&object, &[], None), Ground::of(&pods), &[&granted_now("uid-p1")], NOW);
    assert_eq!((kept.len(), kept[0].granted_at.as_str()), (RECENT_OF_POD_MAX + 1, "2026-01-01T00:56:00Z"));
}

#[test]
fn a_node_is_under_suspicion_after_three() {
    let list: Vec<_> = ["00:52", "00:54", "00:56"].map(|at| past("u", "n1", &format!("2026-01-01T{at}:00Z"))).into();
    let window = SignedDuration::from_mins(10);
    assert_eq!(suspect_node(&list, window, NOW).as_deref(), Some("n1"));
    assert_eq!(suspect_node(&list[..2], window, NOW), None);
    assert_eq!(suspect_node(&list, SignedDuration::from_mins(5), NOW), None);
}

#[test]
fn an_engine_that_wakes_each_time_before_its_kill_is_replaced_at_last() {
    let mut object = infd("chat");
    let terms = |object: &InferenceDeployment| Terms::of(object, &[], None).restarts_before_replace;
    let stalled = pod("p0", "Stalled", 1);
    let mut keys = Vec::new();
    for second in 0..=terms(&object) {
        let at = format!("2026-01-01T00:5{second}:00Z");
        let pods = [stalled.clone()];
        let next =
            grants::next(&[], &pods, &Terms { backoff: Default::default(), ..Terms::of(&object, &pods, None) }, &at);
        keys.extend(next.iter().map(|grant| grant.action));
        let granted: Vec<&Grant> = next.iter().collect();
        let kept = recent(&Terms::of(&object, &pods, None), Ground::of(&pods), &granted, &at);
        let spared = [pod("p0", "Cleared", 1)];
        object.status.get_or_insert_default().recovery.recent = kept;
        let kept = recent(&Terms::of(&object, &spared, None), Ground::of(&spared), &[], &at);
        assert_eq!(kept.len(), second + 1, "that nobody used it makes no stall undone");
    }
    assert_eq!(keys, [GrantAction::Restart, GrantAction::Restart, GrantAction::Replace]);
}
