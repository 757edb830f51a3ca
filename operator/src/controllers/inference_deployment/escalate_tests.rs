//! Each field of the recovery policy both ways.

use super::*;
use crate::controllers::inference_deployment::{
    grants,
    testing::{died, granted_by, healthy, infd, leaving, pod, undead, with_xid},
};

pub(in crate::controllers::inference_deployment) const NOW: &str = "2026-01-01T01:00:00Z";

pub(in crate::controllers::inference_deployment) fn past(uid: &str, node: &str, at: &str) -> PastGrant {
    PastGrant { pod_uid: uid.into(), node: node.into(), granted_at: at.into(), ..PastGrant::default() }
}

pub(in crate::controllers::inference_deployment) fn granted_now(uid: &str) -> Grant {
    Grant { pod_uid: uid.into(), granted_at: NOW.into(), ..Grant::default() }
}

pub(in crate::controllers::inference_deployment) fn frozen(count: usize) -> Vec<PodView> {
    (0..count).map(|n| pod(&format!("p{n}"), "Stalled", 1)).collect()
}

#[test]
fn a_common_cause_holds_and_a_few_stalls_do_not() {
    let mut object = infd("chat");
    object.spec.replicas = 4;
    object.spec.recovery.max_unavailable = 4;
    let granted = |object: &InferenceDeployment, pods: &[PodView]| {
        grants::next(&[], pods, &Terms::of(object, pods, None), NOW).len()
    };
    assert_eq!((granted(&object, &frozen(2)), granted(&object, &frozen(3))), (2, 0), "60 % of four");
    object.spec.recovery.hold_percent = 80;
    assert_eq!((granted(&object, &frozen(3)), granted(&object, &frozen(4))), (3, 0));
    object.spec.recovery.hold_percent = 100;
    assert_eq!(granted(&object, &frozen(4)), 4);
    object.spec.replicas = 2;
    object.spec.recovery.hold_percent = 1;
    assert_eq!(granted(&object, &frozen(2)), 2, "two are no common cause");
}

#[test]
fn who_was_granted_a_restart_counts_until_it_is_up_again() {
    let mut object = infd("chat");
    object.spec.replicas = 3;
    let mut alone = object.clone();
    alone.spec.recovery.hold_percent = 100;
    let hold = |pods: &[PodView]| Terms::of(&object, pods, None).hold;
    for stage in ["Granted", "Killed", "Restarting"] {
        let staggered = [pod("a", stage, 1), pod("b", "Stalled", 2), pod("c", "Stalled", 3)];
        assert!(matches!(hold(&staggered), Hold::Deployment(why) if why.contains("3 of 3")), "{stage}");
        let fleet = Fleet { replicas: 7, stalled: 3, restarts_percent: 10, hold_percent: 40, ..Fleet::default() };
        let hold = Terms::of(&alone, &staggered, Some(&fleet)).hold;
        assert!(matches!(hold, Hold::Fleet(why) if why.contains("6 of 10")), "{stage}");
    }
    assert_eq!(hold(&[pod("a", "Recovered", 1), pod("b", "Stalled", 2), pod("c", "Stalled", 3)]), Hold::No, "it is up");
    assert_eq!(hold(&[died(pod("a", "", 1)), pod("b", "Stalled", 2), pod("c", "Stalled", 3)]), Hold::No, "it died");
    let leaving = PodView { leaving: true, ..pod("a", "Killed", 1) };
    assert_eq!(hold(&[leaving, pod("b", "Stalled", 2), pod("c", "Stalled", 3)]), Hold::No, "it goes");
    assert_eq!(hold(&["a", "b", "c"].map(|name| pod(name, "Killed", 1))), Hold::No, "nobody waits for anything");
}

#[test]
fn the_fleet_bounds_and_holds() {
    let object = infd("chat");
    let pods = frozen(2);
    let slots = |fleet: Fleet| Terms::of(&object, &pods, Some(&fleet)).fleet.count;
    let fleet = || Fleet { replicas: 98, restarts_percent: 10, hold_percent: 30, ..Fleet::default() };
    assert_eq!(slots(fleet()), 10);
    assert_eq!(slots(Fleet { granted: 10, ..fleet() }), 0);
    assert_eq!(slots(Fleet { replicas: 0, ..fleet() }), 1, "always one");
    let mut greedy = object.clone();
    greedy.spec.replicas = 1000;
    assert_eq!(Terms::of(&greedy, &pods, Some(&fleet())).fleet.count, 10, "its spec adds nothing");
    let hold = |stalled| Terms::of(&object, &pods, Some(&Fleet { stalled, ..fleet() })).hold;
    assert_eq!(hold(29), Hold::No, "29 of 98, but for its own two");
    assert!(matches!(hold(30), Hold::Fleet(why) if why.contains("32 of 100")));
    let never = Fleet { replicas: 5, stalled: 9, hold_percent: 100, ..fleet() };
    assert_eq!(
        Terms::of(&object, &pods, Some(&never)).hold,
        Hold::No,
        "100 never holds, whatever stands beyond the specs"
    );
}

#[test]
fn of_all_that_stand_so_many_stall_whatever_an_autoscaler_wants() {
    let mut object = infd("chat");
    object.spec.replicas = 2;
    let pods: Vec<PodView> = frozen(3).into_iter().chain(["x", "y", "z"].map(healthy)).collect();
    assert_eq!(Terms::of(&object, &pods, None).hold, Hold::No, "three of the six that a freeze keeps");
    assert!(matches!(Terms::of(&object, &pods[..4], None).hold, Hold::Deployment(why) if why.contains("3 of 4")));
}

#[test]
fn a_replacement_is_over_when_as_many_stand_as_a_freeze_keeps() {
    let mut object = infd("chat");
    object.spec.replicas = 20;
    let pods = ["a", "b", "c"].map(healthy);
    let gone = Grant { pod_uid: "uid-gone".to_owned(), action: GrantAction::Replace, ..Grant::default() };
    let gone = Grant { granted_at: NOW.to_owned(), ..gone };
    let terms = || Terms::of(&object, &pods, None);
    assert!(!replaced(&gone, &pods, &terms().with_replicas(None), NOW), "seventeen are on their way");
    assert!(replaced(&gone, &pods, &terms().with_replicas(Some(3)), NOW), "three are kept up, and three are up");
}

#[test]
fn restarts_in_place_end_in_a_replacement_and_time_heals() {
    let mut object = infd("chat");
    let uid = frozen(1)[0].uid.clone();
    let action = |object: &InferenceDeployment| action(&frozen(1)[0], &Terms::of(object, &[], None), NOW);
    object.status.get_or_insert_default().recovery.recent =
        vec![past(&uid, "n1", "2026-01-01T00:51:00Z"), past(&uid, "n1", "2026-01-01T00:55:00Z")];
    assert_eq!(action(&object), GrantAction::Replace);
    object.spec.recovery.restarts_before_replace = 3;
    assert_eq!(action(&object), GrantAction::Restart);
    object.spec.recovery.restarts_before_replace = 2;
    object.spec.recovery.stability_window = "5m".to_owned();
    assert_eq!(action(&object), GrantAction::Restart, "the first is long ago");
}

#[test]
fn fault_f1_a_gpu_that_no_restart_mends_ends_in_a_replacement_at_once() {
    use crds::xid::XidRemedy::{ContactSupport, Nothing, ResetGpu, RestartApplication, RestartNode, Unknown};
    let object = infd("chat");
    let granted = |pod: PodView| {
        let pods = [pod, healthy("b")];
        let grants = grants::next(&[], &pods, &Terms::of(&object, &pods, None), NOW);
        grants.first().map(|grant| grant.action)
    };
    for remedy in [ResetGpu, RestartNode, ContactSupport] {
        let stalled = with_xid(pod("a", "Stalled", 1), 79, remedy);
        assert_eq!(granted(stalled.clone()), Some(GrantAction::Replace), "{remedy:?}");
        assert_eq!(
            granted(died(stalled)),
            Some(GrantAction::Replace),
            "the kubelet starts it on the same GPU: {remedy:?}"
        );
        assert_eq!(granted(with_xid(pod("a", "Suspect", 1), 79, remedy)), None, "a suspicion is no stall: {remedy:?}");
    }
    for remedy in [Nothing, RestartApplication, Unknown] {
        let stalled = with_xid(pod("a", "Stalled", 1), 94, remedy);
        assert_eq!(granted(stalled.clone()), Some(GrantAction::Restart), "{remedy:?}");
        assert_eq!(granted(died(stalled)), None, "it is started again anyhow: {remedy:?}");
    }
}

#[test]
fn fault_f1_the_budget_and_the_holds_stay_as_they_are() {
    let mut object = infd("chat");
    object.spec.replicas = 4;
    let lost = |n: usize| with_xid(pod(&format!("p{n}"), "Stalled", 1), 79, crds::xid::XidRemedy::RestartNode);
    let dead: Vec<PodView> = (0..3).map(|n| died(lost(n))).collect();
    let granted = |object: &InferenceDeployment, pods: &[PodView]| {
        grants::next(&[], pods, &Terms::of(object, pods, None), NOW).len()
    };
    assert_eq!(granted(&object, &dead[..2]), 1, "maxUnavailable");
    assert_eq!(granted(&object, &dead), 0, "three of four at once have a common cause");
    object.spec.recovery.mode = RecoveryMode::Fence;
    assert_eq!(granted(&object, &dead[..1]), 0, "who may not destroy may not replace");
}

#[test]
fn fault_f1_a_xid_that_comes_after_the_key_turns_the_restart_into_a_replacement() {
    let object = infd("chat");
    let next = |held: &[Grant], pod: PodView| {
        let pods = [pod, healthy("b")];
        grants::next(held, &pods, &Terms::of(&object, &pods, None), NOW)
    };
    let lost = |pod: PodView| with_xid(pod, 119, crds::xid::XidRemedy::ResetGpu);
    let held = next(&[], pod("a", "Stalled", 1));
    assert_eq!(held[0].action, GrantAction::Restart);
    assert_eq!(next(&held, lost(pod("a", "Killed", 1))), held, "the kill is under way");
    assert_eq!(next(&held, pod("a", "Restarting", 1)), held);
    let after = next(&held, lost(pod("a", "Restarting", 1)));
    assert_eq!((after.len(), after[0].action), (1, GrantAction::Replace));
    assert_eq!(next(&after, lost(pod("a", "Restarting", 1))), after, "quiescent is silent (P7)");
}

#[test]
fn an_engine_that_outlives_its_kill_is_replaced_and_one_that_ended_at_last_is_not() {
    let object = infd("chat");
    let next = |held: &[Grant], pod: PodView| {
        let pods = [pod, healthy("b")];
        grants::next(held, &pods, &Terms::of(&object, &pods, None), NOW)
    };
    let held = next(&[], pod("a", "Stalled", 1));
    assert_eq!(next(&held, pod("a", "Killed", 1)), held, "the kill is under way");
    let after = next(&held, undead(pod("a", "Killed", 1)));
    assert_eq!((after.len(), after[0].action, after[0].episode.as_str()), (1, GrantAction::Replace, "e-a"));
    assert_eq!(next(&after, undead(pod("a", "Killed", 1))), after, "quiescent is silent (P7)");
    assert_eq!(next(&held, undead(pod("a", "Restarting", 1))), held, "it ended at last and is on its way up");
    let found = next(&[], undead(pod("a", "Stalled", 1)));
    assert_eq!(found[0].action, GrantAction::Replace, "a former agent's kill: no other is tried");
}

#[test]
fn a_pod_that_does_not_end_holds_its_slot_until_its_successor_is_up() {
    let terms = Terms { replicas: 2, ..Terms::simple(RecoveryMode::Recover, 1) };
    let (soon, long_ago) = ("2026-01-01T00:59:31Z", "2026-01-01T00:59:29Z");
    let (frozen, starting) = (pod("b", "Stalled", 2), PodView { ready: false, ..healthy("c") });
    for action in [GrantAction::Restart, GrantAction::Replace] {
        let held = Grant {
            episode: "e-a".to_owned(),
            pod_uid: "uid-a".to_owned(),
            action,
            granted_at: "2026-01-01T00:55:00Z".to_owned(),
            ..Grant::default()
        };
        let next = |grace_until: &str, successor: &PodView, now: &str| {
            let mut old = leaving(undead(pod("a", "Killed", 1)), grace_until);
            granted_by(&mut old, "operator");
            let pods = [old, frozen.clone(), successor.clone()];
            let next = grants::next(std::slice::from_ref(&held), &pods, &terms, now);
            next.into_iter().map(|grant| grant.episode).collect::<Vec<_>>()
        };
        assert_eq!(next(soon, &healthy("c"), NOW), ["e-a"], "it may end yet: {action:?}");
        assert_eq!(next(long_ago, &starting, NOW), ["e-a"], "two replicas would be away: {action:?}");
        assert_eq!(next(long_ago, &healthy("c"), NOW), ["e-b"], "all are up but the frozen one: {action:?}");
        assert_eq!(next(long_ago, &starting, "2026-01-01T01:05:01Z"), ["e-b"], "it has had its time: {action:?}");
    }
}

#[test]
fn an_engine_that_outlives_a_kill_of_its_own_agent_takes_the_slot_that_it_holds_already() {
    let terms = Terms { replicas: 3, ..Terms::simple(RecoveryMode::Recover, 1) };
    let mut alone = undead(pod("a", "Killed", 3));
    granted_by(&mut alone, "self");
    let pods = [alone, pod("b", "Stalled", 1), healthy("c")];
    let next = grants::next(&[], &pods, &terms, NOW);
    let next: Vec<_> = next.into_iter().map(|grant| (grant.episode, grant.action)).collect();
    assert_eq!(next, [("e-a".to_owned(), GrantAction::Replace)], "one at a time, and the other one waits for its end");
}

#[test]
fn the_pause_between_two_recoveries_of_a_pod_grows_to_its_bound_and_starts_over() {
    let mut object = infd("chat");
    let pods = frozen(2);
    let until = |object: &InferenceDeployment| {
        let until = Terms::of(object, &pods, None).backs_off_until(&pods[0], NOW);
        until.map(|until| until.to_string())
    };
    let mut ats = vec!["2026-01-01T00:59:55Z"];
    let mut recover = |object: &mut InferenceDeployment, at: Option<&'static str>| {
        ats.extend(at);
        object.status.get_or_insert_default().recovery.recent = ats
            .iter()
            .map(|at| past("uid-p0", "n1", at))
            .chain([past("uid-p1", "n1", "2026-01-01T00:40:00Z")])
            .collect();
    };
    assert_eq!(until(&object), None, "never recovered");
    recover(&mut object, None);
    assert_eq!(until(&object).as_deref(), Some("2026-01-01T01:00:05Z"), "10 s after the first");
    let next = grants::next(&[], &pods, &Terms::of(&object, &pods, None), NOW);
    assert_eq!(
        next.iter().map(|grant| grant.pod.as_str()).collect::<Vec<_>>(),
        ["p1"],
        "whoever waits lets the next one pass"
    );
    for (at, wanted) in [
        ("2026-01-01T00:54:00Z", "2026-01-01T01:00:15Z"),
        ("2026-01-01T00:53:00Z", "2026-01-01T01:00:35Z"),
        ("2026-01-01T00:52:00Z", "2026-01-01T01:01:15Z"),
    ] {
        recover(&mut object, Some(at));
        assert_eq!(until(&object).as_deref(), Some(wanted));
    }
    object.spec.recovery.restart_backoff_max = "30s".to_owned();
    assert_eq!(until(&object).as_deref(), Some("2026-01-01T01:00:25Z"), "bounded");
    object.spec.recovery.restart_backoff = "0s".to_owned();
    assert_eq!(until(&object), None, "no pause at all");
    object.spec.recovery.restart_backoff = "30s".to_owned();
    object.spec.recovery.stability_window = "4s".to_owned();
    assert_eq!(until(&object), None, "the window has passed without a recovery");
}

#[test]
fn a_slot_that_a_pod_keeps_is_given_back_while_it_backs_off() {
    let mut object = infd("chat");
    let pods = frozen(1);
    let held = grants::next(&[], &pods, &Terms::of(&object, &pods, None), "2026-01-01T00:59:55Z");
    let held = [Grant { episode: "e-before".to_owned(), ..held[0].clone() }];
    let next = |object: &InferenceDeployment| grants::next(&held, &pods, &Terms::of(object, &pods, None), NOW);
    assert_eq!(next(&object)[0].episode, "e-p0", "the same pod stalled anew: the slot is still its own");
    object.status.get_or_insert_default().recovery.recent = vec![past("uid-p0", "n1", "2026-01-01T00:59:55Z")];
    assert_eq!(next(&object), []);
}

#[test]
fn a_replacement_holds_its_slot_until_its_successor_is_up() {
    let terms = Terms { replicas: 2, ..Terms::simple(RecoveryMode::Recover, 1) };
    let old = pod("a", "Stalled", 1);
    let grant = Grant {
        episode: "e-a".to_owned(),
        pod_uid: old.uid.clone(),
        action: GrantAction::Replace,
        granted_at: NOW.into(),
        ..Grant::default()
    };
    let over = |pods: &[PodView], now: &str| replaced(&grant, pods, &terms, now);
    let starting = PodView { ready: false, ..healthy("c") };
    assert!(!over(&[PodView { leaving: true, ..old.clone() }, healthy("b")], NOW), "it still runs (P16)");
    assert!(!over(&[healthy("b")], NOW) && !over(&[healthy("b"), starting.clone()], NOW));
    assert!(over(&[healthy("b"), healthy("c")], NOW));
    assert!(over(&[healthy("b"), starting], "2026-01-01T01:10:01Z"), "it has had its time");
    assert!(!over(&[old], "2026-01-01T01:10:01Z"), "but never while the old one is there");
}

#[test]
fn a_replacement_of_a_pod_that_went_on_by_itself_gives_its_slot_back() {
    let terms = Terms { replicas: 2, ..Terms::simple(RecoveryMode::Recover, 1) };
    let cured = pod("a", "Cleared", 1);
    let grant =
        Grant { pod_uid: cured.uid.clone(), action: GrantAction::Replace, granted_at: NOW.into(), ..Grant::default() };
    let over = |pod: PodView, now: &str| replaced(&grant, &[pod, healthy("b")], &terms, now);
    let later = "2026-01-01T01:00:31Z";
    assert!(!over(cured.clone(), NOW), "a delete may be on its way");
    assert!(over(cured.clone(), later) && over(PodView { episode: Default::default(), ..cured.clone() }, later));
    assert!(!over(PodView { leaving: true, ..cured.clone() }, later));
    assert!(!over(PodView { episode: Default::default(), ready: false, ..cured }, later), "a doubt keeps the slot");
}

#[test]
fn the_last_one_that_serves_is_marked_by_policy() {
    let marked = |pods: &[PodView]| last_serving(LastReplica::Serve, RecoveryMode::Recover, pods);
    let (a, b, sick) = (healthy("a"), healthy("b"), pod("s", "Suspect", 1));
    assert_eq!(marked(&[a.clone(), b.clone()]), Vec::<String>::new());
    assert_eq!(marked(&[a.clone(), sick.clone()]), [a.uid.as_str()]);
    assert_eq!(marked(std::slice::from_ref(&a)), [a.uid.as_str()]);
    let before = PodView { last_serving: true, ..sick.clone() };
    assert_eq!(marked(&[before.clone(), pod("t", "Suspect", 1)]), [before.uid.as_str()], "none serves: it stays");
    assert_eq!(marked(&[before, b.clone()]), [b.uid.as_str()], "another serves");
    assert!(last_serving(LastReplica::Fence, RecoveryMode::Recover, &[a.clone(), sick.clone()]).is_empty());
    assert!(last_serving(LastReplica::Serve, RecoveryMode::Observe, &[a, sick]).is_empty());
}
