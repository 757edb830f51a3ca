//! What a former leader dated ahead, by a clock that was wrong, holds nothing up.

use super::{
    tests::{NOW, frozen, granted_now, past},
    *,
};
use crate::controllers::inference_deployment::{
    observed::Ground,
    past::{recent, suspect_node},
    testing::infd,
};

/// An hour ahead, and as far as clocks differ.
const AHEAD: [&str; 3] = ["2026-01-01T02:00:00Z", "2026-01-01T02:01:00Z", "2026-01-01T02:02:00Z"];
const NEAR: [&str; 3] = ["2026-01-01T01:05:00Z", "2026-01-01T01:04:00Z", "2026-01-01T01:03:00Z"];

fn recovered(ats: &[&str]) -> InferenceDeployment {
    let mut object = infd("chat");
    object.status.get_or_insert_default().recovery.recent = ats.iter().map(|at| past("uid-p0", "n1", at)).collect();
    object
}

#[test]
fn it_withholds_nobody_for_longer_than_a_pause() {
    let pods = frozen(1);
    let until = |ats: &[&str]| {
        let object = recovered(ats);
        Terms::of(&object, &pods, None).backs_off_until(&pods[0], NOW).map(|until| until.to_string())
    };
    assert_eq!(until(&AHEAD), None, "an hour ahead");
    assert_eq!(until(&["2026-01-01T01:00:10Z"]).as_deref(), Some("2026-01-01T01:00:20Z"), "clocks differ a little");
    let both = ["2026-01-01T00:59:55Z", "2026-01-01T02:00:00Z"];
    assert_eq!(until(&both).as_deref(), Some("2026-01-01T01:00:05Z"), "10 s after the one that has a time");
}

#[test]
fn it_replaces_no_pod_and_is_forgotten() {
    let pods = frozen(2);
    let of = |ats: &[&str]| {
        let object = recovered(ats);
        let terms = Terms::of(&object, &pods, None);
        let kept = recent(&terms, Ground::of(&pods), &[&granted_now("uid-p1")], NOW);
        (action(&pods[0], &terms, NOW), kept.len())
    };
    assert_eq!(of(&AHEAD), (GrantAction::Restart, 1));
    assert_eq!(of(&NEAR), (GrantAction::Replace, 4), "clocks differ a little");
}

#[test]
fn it_puts_no_node_under_suspicion() {
    let suspect = |ats: &[&str]| {
        let list: Vec<PastGrant> = ats.iter().map(|at| past("u", "n1", at)).collect();
        suspect_node(&list, SignedDuration::from_mins(10), NOW)
    };
    assert_eq!((suspect(&AHEAD), suspect(&NEAR).as_deref()), (None, Some("n1")));
}
