//! What stands on nodes, from nothing to a mark and back.

use super::*;
use crate::controllers::inference_deployment::testing::infd;
use crds::{
    Avoided, PastGrant,
    xid::{Xid, XidRemedy},
};

fn now() -> Timestamp {
    "2026-01-01T01:00:00Z".parse().unwrap()
}

fn sick(name: &str, recoveries: usize, avoids: bool) -> InferenceDeployment {
    let mut object = infd(name);
    let recovery = &mut object.status.get_or_insert_default().recovery;
    recovery.recent = (0..recoveries)
        .map(|n| PastGrant {
            pod_uid: format!("u{n}"),
            node: "n1".into(),
            granted_at: "2026-01-01T00:55:00Z".into(),
            ..PastGrant::default()
        })
        .collect();
    if avoids {
        let until = "2026-01-01T02:00:00Z".to_owned();
        recovery.avoid = vec![Avoided { node: "n1".into(), until, ..Avoided::default() }];
    }
    object
}

fn wishes(infds: &[InferenceDeployment], now: Timestamp) -> BTreeMap<String, Wish> {
    super::wishes(infds, &[], now)
}

fn n1() -> NodeView {
    NodeView { name: "n1".into(), uid: "u-n1".into(), usable: true, ..NodeView::default() }
}

/// The node after the patch, as the API would show it.
fn after(node: &NodeView, patch: &NodePatch) -> NodeView {
    let mut node = node.clone();
    for (key, value) in patch.labels.iter().flat_map(|p| p["metadata"]["labels"].as_object().into_iter().flatten()) {
        match (key.as_str() == LABEL_SUSPECT, value.as_str()) {
            (true, value) => node.suspect = value.is_some(),
            (false, Some(until)) => _ = node.avoid.insert(key.clone(), until.to_owned()),
            (false, None) => _ = node.avoid.remove(key),
        }
    }
    if let Some(said) = patch.condition.as_ref().map(|c| &c["status"]["conditions"][0]) {
        let text = |key: &str| said[key].as_str().unwrap_or_default().to_owned();
        let (is_true, since) = (said["status"] == "True", Some(text("lastTransitionTime")));
        node.stalls = Some(StallsCondition { is_true, reason: text("reason"), message: text("message"), since });
    }
    node
}

#[test]
fn labels_are_valid_and_tell_deployments_apart() {
    let long = avoid_label("a-namespace-of-a-very-long-name-that-is-as-long-as-can-be-63-chr", &"x".repeat(48));
    assert!(long.rsplit('/').next().is_some_and(|name| name.len() <= 63), "{long}");
    assert_ne!(avoid_label("a", "chat"), avoid_label("b", "chat"));
    assert_eq!(label_time("2026-01-01T02:00:00.123Z"), "2026-01-01T02-00-00Z");
}

#[test]
fn a_place_is_marked_told_of_and_forgotten() {
    let wished = wishes(&[sick("chat", 3, true)], now());
    let first = patch(&n1(), &wished["n1"], now()).expect("something to write");
    insta::assert_json_snapshot!((&first.labels, &first.condition));
    let marked = after(&n1(), &first);
    assert_eq!(patch(&marked, &wished["n1"], now()), None, "quiescent = silent (P7)");

    let later: Timestamp = "2026-01-01T01:30:00Z".parse().unwrap();
    let wished = wishes(&[sick("chat", 3, true)], later);
    assert_eq!(wished["n1"].finding, None, "the recoveries are long ago");
    assert_eq!(patch(&marked, &wished["n1"], later), None, "but nobody was there to stall");

    let end = patch(&marked, &Wish::default(), later).expect("it ends");
    let free = after(&marked, &end);
    assert!(free.avoid.is_empty() && !free.suspect && free.stalls.as_ref().is_some_and(|c| !c.is_true), "{free:?}");
    assert_eq!(patch(&free, &Wish::default(), later), None);
}

/// Tools drain a node when this has been `True` for some time, and reckon from its last transition.
#[test]
fn another_finding_is_no_transition() {
    let since = |node: &NodeView| node.stalls.clone().and_then(|said| said.since).expect("a condition");
    let look = |node: &NodeView, infds: &[InferenceDeployment], at: &str| {
        let at: Timestamp = at.parse().unwrap();
        let wish = wishes(infds, at).remove("n1").unwrap_or_default();
        let changed = patch(node, &wish, at).map_or_else(|| node.clone(), |patch| after(node, &patch));
        assert_eq!(patch(&changed, &wish, at), None, "quiescent = silent (P7)");
        changed
    };
    let first = look(&n1(), &[sick("chat", 3, true)], "2026-01-01T01:00:00Z");
    let more = look(&first, &[sick("chat", 3, true), sick("other", 3, true)], "2026-01-01T01:01:00Z");
    let said = |node: &NodeView| node.stalls.clone().map(|said| said.message);
    assert_ne!(said(&more), said(&first));
    assert_eq!((since(&first), since(&more)), ("2026-01-01T01:00:00Z".into(), "2026-01-01T01:00:00Z".into()));
    let mut undead = sick("chat", 0, true);
    undead.status.as_mut().unwrap().recovery.avoid[0].because = AvoidedBecause::Unkillable;
    let graver = look(&more, &[undead], "2026-01-01T01:02:00Z");
    assert_eq!(since(&graver), "2026-01-01T01:00:00Z");
    let over = look(&graver, &[], "2026-01-01T01:03:00Z");
    assert_eq!(since(&over), "2026-01-01T01:03:00Z");
    let again = look(&over, &[sick("chat", 3, false)], "2026-01-01T01:04:00Z");
    assert_eq!(since(&again), "2026-01-01T01:04:00Z");
}

#[test]
fn one_stall_more_or_less_marks_no_node() {
    assert!(wishes(&[sick("chat", 2, false)], now()).is_empty());
    let two = wishes(&[sick("chat", 2, false), sick("other", 1, false)], now());
    let (reason, why) = two["n1"].finding.clone().expect("three of two deployments");
    assert_eq!(reason, "RepeatedStalls");
    assert!(why.contains("serving/chat, serving/other"), "{why}");
    assert!(two["n1"].avoid.is_empty(), "and nobody keeps away who does not wish to");
}

#[test]
fn an_engine_that_cannot_be_killed_is_told_of_at_once() {
    let mut object = sick("chat", 0, true);
    object.status.as_mut().unwrap().recovery.avoid[0].because = AvoidedBecause::Unkillable;
    let wished = wishes(&[object], now());
    assert_eq!(wished["n1"].finding.as_ref().map(|(reason, _)| *reason), Some("UnkillableEngine"));
}

#[test]
fn what_is_broken_is_told_of_without_a_label() {
    let mut object = sick("chat", 0, true);
    let recovery = &mut object.status.as_mut().unwrap().recovery;
    recovery.broken = std::mem::take(&mut recovery.avoid);
    recovery.broken[0].because = AvoidedBecause::Unkillable;
    object.spec.recovery.avoid_for = "0s".to_owned();
    let wish = wishes(std::slice::from_ref(&object), now()).remove("n1").expect("a finding");
    assert_eq!((wish.finding.as_ref().map(|(reason, _)| *reason), wish.avoid.len()), (Some("UnkillableEngine"), 0));
    let told = after(&n1(), &patch(&n1(), &wish, now()).expect("something to write"));
    assert!(told.suspect && told.avoid.is_empty() && told.stalls.as_ref().is_some_and(|c| c.is_true), "{told:?}");
    assert_eq!(patch(&told, &wish, now()), None, "quiescent = silent (P7)");
    let end: Timestamp = "2026-01-01T02:00:00Z".parse().unwrap();
    assert!(wishes(&[object], end).is_empty());
}

#[test]
fn what_is_over_is_told_no_longer_by_who_keeps_away_for_less() {
    let said = |node: &NodeView| node.stalls.clone().map(|said| (said.is_true, said.reason, said.since)).unwrap();
    let mut undead = sick("chat", 0, true);
    undead.status.as_mut().unwrap().recovery.avoid[0].because = AvoidedBecause::Unkillable;
    let wish = wishes(&[undead, sick("other", 0, true)], now()).remove("n1").unwrap();
    let node = after(&n1(), &patch(&n1(), &wish, now()).unwrap());
    let since = said(&node).2;
    let later: Timestamp = "2026-01-01T01:30:00Z".parse().unwrap();
    let mut wish = wishes(&[sick("other", 0, true)], later).remove("n1").unwrap();
    let less = after(&node, &patch(&node, &wish, later).unwrap());
    assert_eq!(said(&less), (true, "RepeatedStalls".to_owned(), since));
    assert_eq!(patch(&less, &wish, later), None, "quiescent = silent (P7)");
    wish.avoid = node.avoid.clone();
    wish.in_doubt = true;
    assert_eq!(patch(&node, &wish, later), None, "one that cannot be read may say so still");
}

#[test]
fn fault_f1_the_condition_says_which_xid_asks_for_what() {
    let with = |xids: &[(i32, XidRemedy)], because| {
        let mut object = sick("chat", 3, true);
        let place = &mut object.status.as_mut().unwrap().recovery.avoid[0];
        place.xids =
            xids.iter().map(|(code, remedy)| Xid { code: *code, gpu: "GPU-1".into(), remedy: *remedy }).collect();
        place.because = because;
        wishes(&[object], now())["n1"].finding.clone().expect("a finding")
    };
    let (lost, ecc) = ((79, XidRemedy::RestartNode), (48, XidRemedy::ResetGpu));
    let (reason, why) = with(&[ecc], AvoidedBecause::GpuFault);
    assert_eq!((reason, why.as_str()), ("GpuNeedsReset", "the driver reports Xid 48 of GPU-1: the GPU must be reset"));
    let (reason, why) = with(&[ecc, lost], AvoidedBecause::GpuFault);
    assert_eq!(reason, "NodeNeedsRestart", "the one that asks for most");
    assert!(why.contains("Xid 79 of GPU-1: the node must be drained and restarted") && why.contains("Xid 48"), "{why}");
    assert_eq!(with(&[(54, XidRemedy::ContactSupport), lost], AvoidedBecause::GpuFault).0, "NodeNeedsSupport");
    let (reason, why) = with(&[lost], AvoidedBecause::Unkillable);
    assert!(reason == "UnkillableEngine" && why.contains("SIGKILL") && why.contains("Xid 79"), "{why}");
    assert_eq!(with(&[], AvoidedBecause::RestartsDidNotCure).0, "RepeatedStalls");
}

#[test]
fn what_is_over_or_on_its_way_out_wishes_nothing() {
    let mut over = sick("chat", 0, true);
    over.status.as_mut().unwrap().recovery.avoid[0].until = "2026-01-01T01:00:00Z".into();
    assert!(wishes(&[over], now()).is_empty());
    let mut leaving = sick("chat", 3, true);
    leaving.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    assert!(wishes(&[leaving], now()).is_empty());
}

#[test]
fn what_a_former_leader_dated_ahead_wishes_nothing() {
    let dated = |until: &str, granted_at: &str| {
        let mut object = sick("chat", 3, true);
        let recovery = &mut object.status.as_mut().unwrap().recovery;
        recovery.avoid[0].until = until.to_owned();
        recovery.recent.iter_mut().for_each(|past| past.granted_at = granted_at.to_owned());
        wishes(&[object], now()).remove("n1").map(|wish| (wish.avoid.len(), wish.finding.is_some()))
    };
    // avoidFor is an hour, and clocks differ by five minutes
    assert_eq!(dated("2026-01-01T02:05:00Z", "2026-01-01T01:05:00Z"), Some((1, true)));
    assert_eq!(dated("2026-01-01T02:05:01Z", "2026-01-01T01:05:01Z"), None);
}

#[test]
fn the_next_end_is_the_nearest_and_never_in_the_past() {
    let ends = |times: &[&str]| next_end(times.iter().map(|t| (*t).to_owned()), now()).map(|d| d.as_secs());
    assert_eq!(ends(&["2026-01-01T01:00:30Z", "2026-01-01T01:00:10Z"]), Some(10));
    assert_eq!((ends(&["2026-01-01T00:00:00Z"]), ends(&[])), (Some(0), None));
}

/// A tool that reboots nodes because of what their condition says would go on for ever.
#[test]
fn a_node_that_was_started_anew_is_judged_anew() {
    let mut object = sick("chat", 3, true);
    let recovery = &mut object.status.get_or_insert_default().recovery;
    recovery.recent.iter_mut().for_each(|past| past.boot_id = "b1".to_owned());
    let until = "2026-01-01T02:00:00Z".to_owned();
    let boot_id = "b1".to_owned();
    let because = AvoidedBecause::Unkillable;
    recovery.broken = vec![Avoided { node: "n1".into(), until, because, boot_id, ..Avoided::default() }];
    recovery.avoid[0].boot_id = "b1".to_owned();
    let of = |boot: &str| super::wishes(&[object.clone()], &[NodeView { boot_id: boot.to_owned(), ..n1() }], now());
    assert_eq!(of("b1"), of(""), "nobody knows of a restart");
    let bad = of("b1").remove("n1").unwrap();
    assert_eq!((bad.avoid.len(), bad.finding.as_ref().map(|(reason, _)| *reason)), (1, Some("UnkillableEngine")));
    assert!(of("b2").is_empty());
    let marked = after(&n1(), &patch(&n1(), &bad, now()).unwrap());
    let free = after(&marked, &patch(&marked, &Wish::default(), now()).unwrap());
    assert!(free.avoid.is_empty() && free.stalls.is_some_and(|said| !said.is_true));
    // of three recoveries two were in the boot of now
    let recent = &mut object.status.get_or_insert_default().recovery.recent;
    recent[1..].iter_mut().for_each(|past| past.boot_id = "b2".to_owned());
    let again = super::wishes(&[object.clone()], &[NodeView { boot_id: "b2".to_owned(), ..n1() }], now());
    assert!(again.is_empty());
}

#[test]
fn a_node_bears_no_more_labels_than_it_can_and_no_tenant_takes_them_all() {
    let mut many: Vec<InferenceDeployment> = (0..100).map(|n| sick(&format!("d{n:03}"), 0, true)).collect();
    let wish = wishes(&many, now()).remove("n1").unwrap();
    assert_eq!((wish.avoid.len(), wish.left_off), (AVOID_LABELS_MAX, 100 - AVOID_LABELS_MAX));
    assert_eq!(wish, wishes(&many, now()).remove("n1").unwrap(), "the same at every look (P7)");
    let namespace = many[0].namespace().unwrap_or_default();
    let left_off: Vec<usize> =
        (0..100).filter(|n| !wish.avoid.contains_key(&avoid_label(&namespace, &format!("d{n:03}")))).collect();
    many[left_off[0]].status.as_mut().unwrap().recovery.avoid[0].until = "2026-01-01T02:00:01Z".to_owned();
    let longest = avoid_label(&namespace, &format!("d{:03}", left_off[0]));
    assert!(wishes(&many, now())["n1"].avoid.contains_key(&longest), "who is to keep away for longest");
    let mut other = sick("d000", 0, true);
    other.metadata.namespace = Some("others".to_owned());
    other.status.as_mut().unwrap().recovery.avoid[0].until = "2026-01-01T01:00:01Z".to_owned();
    many.push(other);
    let avoid = &wishes(&many, now())["n1"].avoid;
    assert!(avoid.contains_key(&avoid_label("others", "d000")), "S16: it has a turn of its own");
}
