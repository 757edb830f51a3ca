//! Each bound of avoidance both ways.

use crds::EngineIncident;

use super::*;
use crate::controllers::inference_deployment::{
    observed::EpisodeView,
    testing::{died, healthy, infd, infd_vllm, pod, undead, with_xid},
};

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn nodes(count: usize) -> Vec<NodeView> {
    (1..=count).map(|n| NodeView { name: format!("n{n}"), usable: true, ..NodeView::default() }).collect()
}

/// By pods and nodes of which nobody has a record.
fn next(
    infd: &InferenceDeployment,
    pods: &[PodView],
    fresh: &[&Grant],
    nodes: &[NodeView],
    now: Timestamp,
) -> Vec<Avoided> {
    super::next(infd, Ground { pods, nodes, incidents: &[] }, fresh, now)
}

fn broken(infd: &InferenceDeployment, pods: &[PodView], avoid: &[Avoided], now: Timestamp) -> Vec<Avoided> {
    super::broken(infd, Ground::of(pods), avoid, now)
}

fn grant(pod: &PodView, action: GrantAction) -> Grant {
    Grant { pod_uid: pod.uid.clone(), action, ..Grant::default() }
}

/// The nodes avoided after the replacement of a pod on each of `on`.
fn after(infd: &InferenceDeployment, on: &[&str], nodes: &[NodeView]) -> Vec<String> {
    let place = |(i, node): (usize, &&str)| PodView { node: (*node).to_owned(), ..pod(&format!("p{i}"), "Stalled", 1) };
    let pods: Vec<PodView> = on.iter().enumerate().map(place).collect();
    let grants: Vec<Grant> = pods.iter().map(|pod| grant(pod, GrantAction::Replace)).collect();
    next(infd, &pods, &grants.iter().collect::<Vec<_>>(), nodes, now()).into_iter().map(|place| place.node).collect()
}

#[test]
fn a_replacement_avoids_its_place_for_a_time_and_a_restart_does_not() {
    let mut sick = pod("a", "Stalled", 1);
    if let EpisodeView::Known(reported) = &mut sick.episode {
        reported.episode.gpu_uuids = vec!["GPU-1".to_owned()];
    }
    let pods = [sick, healthy("b")];
    let of = |action| next(&infd("chat"), &pods, &[&grant(&pods[0], action)], &nodes(4), now());
    assert!(of(GrantAction::Restart).is_empty());
    let places = of(GrantAction::Replace);
    insta::assert_json_snapshot!(places);

    let mut object = infd("chat");
    object.status.get_or_insert_default().recovery.avoid = places.clone();
    assert_eq!(next(&object, &pods, &[], &nodes(4), now()), places, "time alone changes nothing (P7)");
    assert_eq!(recheck(&places, &pods, now()), Some(SignedDuration::from_hours(1)));
    let end = now() + SignedDuration::from_hours(1);
    assert!(next(&object, &pods, &[], &nodes(4), end).is_empty(), "and it ends");
    let before = now() - SignedDuration::from_mins(6);
    assert!(next(&object, &pods, &[], &nodes(4), before).is_empty(), "written by a clock that was six minutes ahead");
    let again = next(
        &object,
        &pods,
        &[&grant(&pods[0], GrantAction::Replace)],
        &nodes(4),
        now() + SignedDuration::from_mins(9),
    );
    assert_eq!((again.len(), again[0].until.as_str()), (1, "2026-01-01T02:09:00Z"), "news move the end");
}

#[test]
fn the_policy_says_how_long_or_never() {
    let mut object = infd("chat");
    object.spec.recovery.avoid_for = "0s".to_owned();
    assert!(after(&object, &["n1"], &nodes(4)).is_empty());
    object.spec.recovery.avoid_for = "90s".to_owned();
    let pods = [pod("a", "Stalled", 1)];
    let places = next(&object, &pods, &[&grant(&pods[0], GrantAction::Replace)], &nodes(4), now());
    assert_eq!(places[0].until, "2026-01-01T01:01:30Z");
}

#[test]
fn never_more_than_its_share_of_the_places_and_never_the_last() {
    let mut object = infd("chat");
    assert_eq!(after(&object, &["n1"], &nodes(0)), Vec::<String>::new(), "nodes are not known");
    assert!(after(&object, &["n1"], &nodes(1)).is_empty(), "the only one");
    assert_eq!(after(&object, &["n1", "n2"], &nodes(2)), ["n1"]);
    assert_eq!(after(&object, &["n1", "n2", "n3"], &nodes(9)), ["n1", "n2"], "30 % of nine");
    object.spec.recovery.avoid_nodes_percent = 50;
    assert_eq!(after(&object, &["n1", "n2", "n3"], &nodes(9)).len(), 3);
    let mut closed = nodes(4);
    closed[1..].iter_mut().for_each(|node| node.usable = false);
    assert!(after(&object, &["n1"], &closed).is_empty(), "the others take no pod");
    assert!(after(&infd_vllm("llama"), &["n1"], &nodes(4)).is_empty(), "the others have no GPU");
    let mut chosen = infd("chat");
    let overlay = chosen.spec.pod_overlay.get_or_insert_default();
    overlay.spec.insert("nodeSelector".to_owned(), serde_json::json!({"pool": "chat"}));
    let mut pools = nodes(9);
    pools[..2].iter_mut().for_each(|node| drop(node.labels.insert("pool".to_owned(), "chat".to_owned())));
    assert_eq!(after(&chosen, &["n1", "n2"], &pools), ["n1"], "it may run on two of nine");
}

#[test]
fn a_node_that_is_gone_takes_no_share_of_those_that_may_be_avoided() {
    let mut object = infd("chat");
    let held =
        |node: &str| Avoided { node: node.into(), until: "2026-01-01T01:59:00.5Z".to_owned(), ..Avoided::default() };
    object.status.get_or_insert_default().recovery.avoid = vec![held("n2")];
    assert_eq!(after(&object, &["n1"], &nodes(2)), ["n2"], "one of two");
    object.status.get_or_insert_default().recovery.avoid = vec![held("gone")];
    assert_eq!(after(&object, &["n1"], &nodes(2)), ["gone", "n1"]);
}

#[test]
fn a_pod_without_a_place_lifts_everything_unless_it_had_none_before() {
    let mut object = infd("chat");
    let until = "2026-01-01T01:59:00.5Z".to_owned();
    object.status.get_or_insert_default().recovery.avoid =
        vec![Avoided { node: "n1".into(), until, ..Avoided::default() }];
    let waits = |at: &str| PodView { unschedulable_since: Some(at.to_owned()), node: String::new(), ..healthy("c") };
    // another replica is on that node still
    let stays = || PodView { node: "n1".into(), ..healthy("b") };
    let left = |pod: PodView| next(&object, &[pod, stays()], &[], &nodes(4), now()).len();
    assert_eq!((left(waits("2026-01-01T00:59:31Z")), left(waits("2026-01-01T00:59:30Z"))), (1, 0));
    // a place is avoided since 00:59:00.5, and the scheduler tells whole seconds
    assert_eq!((left(waits("2026-01-01T00:59:00Z")), left(waits("2026-01-01T00:58:59Z"))), (0, 1));
    let held = object.status.clone().unwrap().recovery.avoid;
    assert_eq!(recheck(&held, &[waits("2026-01-01T01:00:00Z")], now()), Some(SignedDuration::from_secs(5)));
}

/// Every GPU was taken when it began to wait. The one that was left since then is just what it waits for, whyever it was left.
#[test]
fn who_waited_before_lifts_a_place_that_all_have_left() {
    let mut object = infd("chat");
    let until = "2026-01-01T01:59:00Z".to_owned();
    object.status.get_or_insert_default().recovery.avoid =
        vec![Avoided { node: "n1".into(), until, ..Avoided::default() }];
    let since = Some("2026-01-01T00:40:00Z".to_owned());
    let waits = || PodView { unschedulable_since: since.clone(), node: String::new(), ..healthy("c") };
    let on = |node: &str| PodView { node: node.into(), ..healthy("b") };
    let left =
        |pods: &[PodView], nodes: &[NodeView], at: &str| next(&object, pods, &[], nodes, at.parse().unwrap()).len();
    let due = "2026-01-01T00:59:30Z";
    assert_eq!(left(&[waits(), on("n2")], &nodes(4), "2026-01-01T00:59:29Z"), 1, "the scheduler has had no time yet");
    assert_eq!(left(&[waits(), on("n2")], &nodes(4), due), 0);
    assert_eq!(left(&[waits(), on("n1")], &nodes(4), due), 1, "somebody is there");
    assert_eq!(left(&[PodView { leaving: true, ..waits() }, on("n2")], &nodes(4), due), 1, "nobody waits any more");
    let mut closed = nodes(4);
    closed[0].usable = false;
    assert_eq!(left(&[waits(), on("n2")], &closed, due), 1, "it would not take a pod");
    assert_eq!(left(&[waits(), on("n2")], &[], due), 1, "the node is gone");
}

/// A rollout took its pod away, or a person, before anybody knew that the engine outlives its kill: the successor waits for a place since then.
#[test]
fn who_waits_since_the_place_was_left_has_been_stranded_by_it() {
    let left =
        |at: &str| PodView { leaving: true, leaving_since: Some(at.to_owned()), ..undead(pod("a", "Killed", 1)) };
    let waits = |at: &str| PodView { unschedulable_since: Some(at.to_owned()), node: String::new(), ..healthy("c") };
    let avoided = |pods: &[PodView], seconds| {
        let mut object = infd("chat");
        let recovery = &mut object.status.get_or_insert_default().recovery;
        recovery.avoid = next(&infd("chat"), pods, &[], &nodes(4), now());
        assert_eq!((recovery.avoid.len(), recovery.avoid[0].until.as_str()), (1, "2026-01-01T02:00:00Z"));
        let then = now() + SignedDuration::from_secs(seconds);
        // the pod is gone by then, and with it what it showed; another is there still
        let later = [pods[1].clone(), PodView { node: "n1".into(), ..healthy("b") }];
        next(&object, &later, &[], &nodes(4), then).len()
    };
    let since = "2026-01-01T00:58:30Z";
    assert_eq!(avoided(&[left(since), waits(since)], 29), 1, "the scheduler has had no time yet");
    assert_eq!(avoided(&[left(since), waits(since)], 30), 0);
    assert_eq!(avoided(&[left(since), waits("2026-01-01T00:58:28Z")], 30), 1, "it waited for something else before");
    let stays = PodView { leaving: false, leaving_since: None, ..left(since) };
    assert_eq!(avoided(&[stays, waits(since)], 30), 1, "nothing was left");
}

#[test]
fn an_engine_that_cannot_be_killed_makes_its_place_bad_without_a_grant() {
    let undead = undead(pod("a", "Killed", 1));
    let places = next(&infd("chat"), std::slice::from_ref(&undead), &[], &nodes(4), now());
    assert_eq!(places[0].because, AvoidedBecause::Unkillable);
    let mut object = infd("chat");
    object.status.get_or_insert_default().recovery.avoid = places.clone();
    let later = now() + SignedDuration::from_mins(5);
    assert_eq!(next(&object, &[undead], &[], &nodes(4), later), places, "seen again is no news");
}

#[test]
fn fault_f1_a_gpu_that_needs_more_than_a_restart_makes_its_place_bad_by_itself() {
    let reset = crds::xid::XidRemedy::ResetGpu;
    let of = |pod: PodView, grants: &[&Grant]| next(&infd("chat"), &[pod], grants, &nodes(4), now());
    let lost = with_xid(died(pod("a", "Stalled", 1)), 119, reset);
    let places = of(lost.clone(), &[]);
    assert_eq!((places[0].because, places[0].xids[0].code), (AvoidedBecause::GpuFault, 119));
    let mut object = infd("chat");
    object.status.get_or_insert_default().recovery.avoid = places.clone();
    let later = now() + SignedDuration::from_mins(5);
    let grant = grant(&lost, GrantAction::Replace);
    assert_eq!(
        next(&object, std::slice::from_ref(&lost), &[&grant], &nodes(4), later),
        places,
        "seen again is no news"
    );
    let again = next(&object, &[with_xid(lost.clone(), 79, reset)], &[], &nodes(4), later);
    assert_eq!(
        (again[0].until.as_str(), again[0].xids.len()),
        (places[0].until.as_str(), 2),
        "and a second Xid is told"
    );
    assert!(of(with_xid(pod("a", "Suspect", 1), 119, reset), &[]).is_empty(), "a suspicion is no stall");
    let hit = with_xid(died(pod("a", "Stalled", 1)), 94, crds::xid::XidRemedy::RestartApplication);
    assert!(of(hit, &[]).is_empty(), "a restart mends it");
    assert!(next(&infd("chat"), &[lost], &[], &nodes(1), now()).is_empty(), "never the last place");
}

/// Whether or not there is another place, a process that outlives SIGKILL owns its GPU.
#[test]
fn what_is_broken_is_told_where_nobody_may_keep_away() {
    use AvoidedBecause::{GpuFault, Unkillable};
    let outlives = undead(pod("a", "Killed", 1));
    let lost = with_xid(died(pod("b", "Stalled", 1)), 119, crds::xid::XidRemedy::ResetGpu);
    let look = |object: &InferenceDeployment, pods: &[PodView], count, at| {
        let grants: Vec<Grant> = pods.iter().map(|pod| grant(pod, GrantAction::Replace)).collect();
        let avoid = next(object, pods, &grants.iter().collect::<Vec<_>>(), &nodes(count), at);
        let broken = broken(object, pods, &avoid, at);
        (avoid, broken)
    };
    let why = |places: &[Avoided]| places.iter().map(|place| place.because).collect::<Vec<_>>();
    let (avoid, told) = look(&infd("chat"), std::slice::from_ref(&outlives), 4, now());
    assert_eq!((why(&avoid), why(&told)), (vec![Unkillable], vec![]), "once");

    let mut stranded = infd("chat");
    stranded.status.get_or_insert_default().recovery.avoid = avoid;
    let waits = PodView { unschedulable_since: Some(now().to_string()), node: "".into(), ..healthy("c") };
    let then = now() + SignedDuration::from_secs(30);
    let (avoid, told) = look(&stranded, &[outlives.clone(), waits.clone()], 4, then);
    assert_eq!((why(&avoid), why(&told)), (vec![], vec![Unkillable]), "its successor finds no other place");
    assert_eq!(look(&stranded, &[waits], 4, then).1, told, "nor when its pod is gone, before its time");

    let never = |object: &mut InferenceDeployment| object.spec.recovery.avoid_for = "0s".to_owned();
    let mut by_policy = infd("chat");
    never(&mut by_policy);
    for (object, count) in [(&infd("chat"), 1), (&infd("chat"), 0), (&by_policy, 4)] {
        let (avoid, told) = look(object, std::slice::from_ref(&lost), count, now());
        assert_eq!((why(&avoid), why(&told)), (vec![], vec![GpuFault]), "{count} nodes");
        assert_eq!((told[0].until.as_str(), told[0].xids[0].code), ("2026-01-01T02:00:00Z", 119));
        assert_eq!(look(object, &[pod("a", "Stalled", 1)], count, now()).1, [], "a suspicion is no more than that");
        let mut later = object.clone();
        later.status.get_or_insert_default().recovery.broken = told.clone();
        let after = now() + SignedDuration::from_mins(59);
        assert_eq!(look(&later, std::slice::from_ref(&lost), count, after).1, told, "seen again is no news (P7)");
        assert_eq!(look(&later, &[], count, after + SignedDuration::from_mins(1)).1, [], "and it ends");
    }
}

/// A node is one place for all pods on it: what is known of it by one must not hide what another tells.
#[test]
fn the_gravest_of_what_pods_tell_is_what_a_place_is_known_for() {
    use AvoidedBecause::{GpuFault, RestartsDidNotCure, Unkillable};
    let at = |minutes| now() + SignedDuration::from_mins(minutes);
    let replaced = pod("a", "Stalled", 1);
    let lost = with_xid(died(pod("b", "Stalled", 1)), 119, crds::xid::XidRemedy::ResetGpu);
    let outlives = undead(pod("c", "Killed", 1));
    let look = |places: &[Avoided], pods: &[&PodView], minutes| {
        let mut object = infd("chat");
        object.status.get_or_insert_default().recovery.avoid = places.to_vec();
        let pods: Vec<PodView> = pods.iter().map(|pod| (*pod).clone()).collect();
        let grant = grant(&replaced, GrantAction::Replace);
        next(&object, &pods, &[&grant], &nodes(4), at(minutes))
    };
    let seen = |places: &[Avoided]| (places.len(), places[0].because, places[0].until.clone());
    let until = |minutes: i64| (at(minutes) + SignedDuration::from_hours(1)).to_string();

    let first = look(&[], &[&replaced], 0);
    assert_eq!(seen(&first), (1, RestartsDidNotCure, until(0)));
    let graver = look(&first, &[&lost], 5);
    assert_eq!(seen(&graver), (1, GpuFault, until(5)), "which is news");
    let gravest = look(&graver, &[&lost, &outlives], 10);
    assert_eq!(seen(&gravest), (1, Unkillable, until(10)));
    assert_eq!(
        look(&gravest, &[&outlives, &lost], 15),
        gravest,
        "seen again is no news, whoever is looked at first (P7)"
    );
    assert_eq!(seen(&look(&first, &[&outlives], 5)), (1, Unkillable, until(5)));
    let more = look(&gravest, &[&outlives, &replaced], 20);
    assert_eq!(seen(&more), (1, Unkillable, until(20)), "a replacement moves the end and lessens nothing");
    assert_eq!(seen(&look(&graver, &[&replaced], 20)), (1, GpuFault, until(20)));
    assert_eq!(more[0].xids, graver[0].xids, "nor is a Xid forgotten");
}

#[test]
fn only_the_places_of_the_pods_that_go_are_marked_now() {
    let place = |node: &str| Avoided { node: node.into(), until: "t".into(), ..Avoided::default() };
    let on = |name: &str, node: &str| PodView { node: node.into(), ..pod(name, "Stalled", 1) };
    let pods = [on("a", "n1"), on("b", "n2")];
    let marks =
        marks(&[place("n1"), place("n2")], &pods, &[Replacement { uid: "uid-a".into(), ..Replacement::default() }]);
    assert_eq!(marks, [("n1".to_owned(), "t".to_owned())]);
}

/// The record outlasts the reboot of a node, and so does the word of its agents, until they are up again.
#[test]
fn what_was_so_before_the_node_was_started_anew_is_not_held_against_it() {
    let sick = [undead(pod("a", "Killed", 1))];
    let booted = |boot: &str| {
        let mut nodes = nodes(4);
        nodes[0].boot_id = boot.to_owned();
        nodes
    };
    let mut object = infd("chat");
    let places = next(&object, &sick, &[], &booted("b1"), now());
    assert_eq!((places[0].node.as_str(), places[0].boot_id.as_str()), ("n1", "b1"));
    let told = super::broken(&object, Ground { pods: &sick, nodes: &booted("b1"), incidents: &[] }, &[], now());
    assert_eq!(told[0].boot_id, "b1");
    let recovery = &mut object.status.get_or_insert_default().recovery;
    (recovery.avoid, recovery.broken) = (places, told);
    let record: EngineIncident = serde_json::from_value(serde_json::json!({
        "metadata": {"name": "i"},
        "spec": {"deployment": "chat", "pod": "a", "podUid": "uid-a", "class": "Unkillable", "episodeId": "e-a", "bootId": "b1"},
    }))
    .unwrap();
    let of = |boot: &str| {
        let nodes = booted(boot);
        let ground = Ground { pods: &sick, nodes: &nodes, incidents: std::slice::from_ref(&record) };
        (super::next(&object, ground, &[], now()).len(), super::broken(&object, ground, &[], now()).len())
    };
    assert_eq!((of("b1"), of("")), ((1, 1), (1, 1)));
    assert_eq!(of("b2"), (0, 0), "though the pod still says so");
}

#[test]
fn a_place_of_which_no_boot_is_known_learns_it() {
    let mut object = infd("chat");
    let until = "2026-01-01T01:59:00Z".to_owned();
    object.status.get_or_insert_default().recovery.avoid =
        vec![Avoided { node: "n1".into(), until, because: AvoidedBecause::Unkillable, ..Avoided::default() }];
    let mut nodes = nodes(4);
    nodes[0].boot_id = "b1".to_owned();
    let sick = [undead(pod("a", "Killed", 1))];
    assert_eq!(next(&object, &sick, &[], &nodes, now())[0].boot_id, "b1");
}

/// Its process is still there: the same word would mark its place anew, and the pod that waits would be one that had no place before.
#[test]
fn what_was_lifted_for_a_pod_stays_so_without_news() {
    let mut object = infd("chat");
    let waits =
        PodView { unschedulable_since: Some("2026-01-01T00:59:00Z".into()), node: String::new(), ..healthy("c") };
    let stuck = [undead(pod("a", "Killed", 1)), waits];
    let until = "2026-01-01T01:59:00Z".to_owned();
    let because = AvoidedBecause::Unkillable;
    object.status.get_or_insert_default().recovery.avoid =
        vec![Avoided { node: "n1".into(), until, because, ..Avoided::default() }];
    let mut at = now();
    let mut look = |object: &mut InferenceDeployment, pods: &[PodView], grants: &[&Grant]| {
        let avoid = next(object, pods, grants, &nodes(4), at);
        let broken = broken(object, pods, &avoid, at);
        at += SignedDuration::from_mins(50);
        let recovery = &mut object.status.get_or_insert_default().recovery;
        (recovery.avoid, recovery.broken) = (avoid, broken);
        (recovery.avoid.len(), recovery.broken.iter().map(|place| place.lifted).collect::<Vec<_>>())
    };
    assert_eq!(look(&mut object, &stuck, &[]), (0, vec![true]));
    assert_eq!(look(&mut object, &stuck, &[]), (0, vec![true]), "though the pod says so still");
    assert_eq!(look(&mut object, &stuck[..1], &[]), (0, vec![true]), "nor when the other has its place");
    assert_eq!(look(&mut object, &stuck[..1], &[]), (0, vec![true]), "nor when the hour of the word is over");
    let other = PodView { node: "n1".into(), ..pod("d", "Stalled", 1) };
    let replaced = grant(&other, GrantAction::Replace);
    assert_eq!(look(&mut object, &[other], &[&replaced]).0, 1, "restarts were in vain there since");
}
