//! What speaks against a new revision and what does not, as tables over a Deployment that runs the good one and a spec that wants another.

use super::tests::{Bench, now, of_revision};
use crate::controllers::inference_deployment::{
    blame::is_named_by,
    observed::{EpisodeView, PodView},
    testing::{died, healthy, pod, undead, with_xid},
};
use crds::{EngineIncident, rollout::FailedRevision, xid::XidRemedy};
use serde_json::{Value, json};

/// A record of a stall of this pod that was confirmed at that minute and second, and is over.
fn record(pod: &str, class: &str, confirmed: &str, outcome: &str) -> EngineIncident {
    serde_json::from_value(json!({
        "metadata": {"name": format!("i-{pod}-{confirmed}")},
        "spec": {"deployment": "chat", "pod": pod, "podUid": format!("uid-{pod}"), "class": class, "episodeId": format!("e-{confirmed}")},
        "status": {"stage": outcome, "timeline": {"confirmedAt": format!("2026-01-01T00:{confirmed}Z")}, "outcome": outcome},
    }))
    .unwrap()
}

fn confirmed(mut pod: PodView, at: &str) -> PodView {
    let EpisodeView::Known(reported) = &mut pod.episode else { panic!("it reports an episode") };
    reported.episode.confirmed_at = Some(format!("2026-01-01T00:{at}Z"));
    pod
}

fn with(pods: Vec<PodView>, change: impl FnOnce(&mut Bench)) -> String {
    let mut bench = Bench::new(pods);
    change(&mut bench);
    bench.word()
}

/// What becomes of a revision one of whose replicas stalls since second 30, where `change` has befallen the others.
fn stalls(change: impl FnOnce(&mut Bench)) -> String {
    with(vec![pod("c", "Stalled", 30)], change)
}

fn old(bench: &mut Bench, pod: PodView) {
    bench.observed.pods[0] = of_revision(&bench.good, pod);
}

#[test]
fn what_befell_an_old_replica_at_the_same_time_is_no_fault_of_the_revision() {
    let blamed = "ReplicaStalled";
    assert_eq!(stalls(|_| ()), blamed);
    assert_eq!(stalls(|b| old(b, pod("a", "Stalled", 1))), "");
    assert_eq!(stalls(|b| old(b, pod("a", "Suspect", 1))), "", "it may be confirmed a second later");
    assert_eq!(stalls(|b| old(b, pod("a", "Cleared", 1))), blamed, "a suspicion that came to nothing");
    assert_eq!(stalls(|b| old(b, died(pod("a", "Stalled", 1)))), blamed, "a death is no stall");
    assert_eq!(
        stalls(|b| old(b, confirmed(pod("a", "Recovered", 1), "00:05"))),
        "",
        "well again, and the cause was common"
    );
    assert_eq!(stalls(|b| old(b, PodView { leaving: true, ..confirmed(pod("a", "Stalled", 1), "00:05") })), "");
    let recorded = |incident: EngineIncident| stalls(|b| b.observed.incidents.push(incident));
    assert_eq!(recorded(record("a", "Livelock", "00:05", "Recovered")), "");
    assert_eq!(recorded(record("a", "Livelock", "10:31", "Recovered")), blamed, "more than ten minutes later");
    assert_eq!(recorded(record("a", "Dead", "00:05", "Recovered")), blamed);
    assert_eq!(recorded(record("x", "Livelock", "00:05", "PodGone")), blamed, "nobody knows whose it was");
}

#[test]
fn who_speaks_for_a_revision_is_a_replica_of_one_that_was_good() {
    let of_set = |word: &str| {
        stalls(|bench| {
            let sets = bench.observed.children.get_mut("ReplicaSet").unwrap();
            (sets[0]["metadata"]["name"], sets[1]["metadata"]["name"]) = (json!("chat-new"), json!("chat-old"));
            bench.observed.incidents.push(record(word, "Livelock", "00:05", "PodGone"));
        })
    };
    assert_eq!(of_set("chat-old-x7"), "", "gone with the rollout, and its name tells");
    assert_eq!(of_set("chat-new-x7"), "ReplicaStalled", "that was one of its own");
    let third = |stage: &str, has_failed: bool| {
        stalls(|bench| {
            old(bench, of_revision("third", confirmed(pod("a", stage, 1), "00:05")));
            bench.observed.pods[0].revision = "third".to_owned();
            let failed = FailedRevision { revision: "third".to_owned(), ..FailedRevision::default() };
            bench.observed.infd.status.as_mut().unwrap().rollout.failed.extend(has_failed.then_some(failed));
        })
    };
    assert_eq!(third("Recovered", true), "ReplicaStalled", "it failed itself");
    assert_eq!(third("Stalled", true), "ReplicaStalled", "and what it does now excuses nobody either");
    assert_eq!(third("Stalled", false), "", "while a good one hangs nobody knows yet");
    let broken = with_xid(confirmed(pod("a", "Recovered", 1), "00:05"), 79, XidRemedy::ResetGpu);
    assert_eq!(stalls(|b| old(b, broken)), "ReplicaStalled", "a GPU of its own broke");
}

#[test]
fn an_excuse_is_for_the_stalls_of_that_time_alone() {
    let word = with(vec![confirmed(pod("c", "Stalled", 30), "20:00")], |bench| {
        bench.observed.incidents.push(record("a", "Livelock", "00:05", "Recovered"));
        bench.observed.incidents.push(record("c", "Livelock", "00:10", "Recovered"));
    });
    assert_eq!(word, "ReplicaStalled", "the second one of c is its own");
}

#[test]
fn a_broken_gpu_or_node_is_no_fault_of_the_revision() {
    let stalled = |code, remedy| with(vec![with_xid(pod("c", "Stalled", 30), code, remedy)], |_| ());
    assert_eq!(stalled(79, XidRemedy::RestartNode), "");
    assert_eq!(stalled(31, XidRemedy::RestartApplication), "ReplicaStalled");
    assert_eq!(with(vec![undead(pod("c", "Killed", 30))], |_| ()), "", "its process does not end");
    let told_later = |xids: Value| {
        stalls(|bench| {
            let mut known = record("c", "StepStalled", "00:30", "Superseded");
            known.spec.episode_id = "e-c".to_owned();
            known.spec.xids = serde_json::from_value(xids).unwrap();
            bench.observed.incidents.push(known);
        })
    };
    assert_eq!(told_later(json!([])), "ReplicaStalled");
    assert_eq!(told_later(json!([{"code": 79, "gpu": "GPU-1", "remedy": "RestartNode"}])), "", "the record knows it");
    let dies = |pod| with(vec![PodView { restarts: 3, ready: false, ..died(pod) }], |_| ());
    assert_eq!(dies(pod("c", "Stalled", 1)), "ReplicaCrashes");
    assert_eq!(dies(with_xid(pod("c", "Stalled", 1), 79, XidRemedy::ResetGpu)), "");
}

#[test]
fn deaths_from_which_a_replica_came_back_do_not_count() {
    let crashed = |records: &[(&str, &str, &str)]| {
        with(vec![PodView { ready: false, restarts: 3, ..healthy("c") }], |bench| {
            bench.observed.infd.spec.rollout.tolerated_stalls = 9;
            let of = |(class, at, outcome): &(&str, &str, &str)| record("c", class, at, outcome);
            bench.observed.incidents.extend(records.iter().map(of));
        })
    };
    assert_eq!(crashed(&[]), "ReplicaCrashes");
    assert_eq!(crashed(&[("Dead", "00:01", "Recovered")]), "", "two that it did not come back from");
    assert_eq!(crashed(&[("Dead", "00:01", "Superseded")]), "ReplicaCrashes");
    assert_eq!(crashed(&[("Livelock", "00:01", "Cleared")]), "ReplicaCrashes");
}

#[test]
fn who_has_no_place_is_late_and_its_revision_is_not() {
    let unplaced = |name: &str| PodView {
        ready: false,
        progressing: None,
        unschedulable_since: Some("2026-01-01T00:00:00Z".to_owned()),
        ..healthy(name)
    };
    let silent = |name: &str| PodView { unschedulable_since: None, ..unplaced(name) };
    let late = |pods: Vec<PodView>| {
        with(pods, |bench| {
            let overdue = json!([{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]);
            bench.observed.children.get_mut("Deployment").unwrap()["status"]["conditions"] = overdue;
        })
    };
    assert_eq!(late(vec![healthy("c"), unplaced("d")]), "", "49 of 50 deliver, and the last node is lost");
    assert_eq!(late(vec![healthy("c"), unplaced("d"), silent("e")]), "NoProgress");
    assert_eq!(late(vec![unplaced("d")]), "NoProgress", "none has shown anything");
    assert_eq!(late(vec![PodView { progressing: None, ..healthy("c") }, unplaced("d")]), "NoProgress");
}

#[test]
fn what_ends_old_engines_as_well_is_no_fault_of_the_revision() {
    let crashes = || PodView { ready: false, restarts: 3, progressing: None, ..healthy("c") };
    // two old ones, of which one is more than that share
    let of_two = || {
        let mut bench = Bench::new(vec![crashes()]);
        bench.observed.infd.spec.recovery.hold_percent = 40;
        bench
    };
    let beside = |old: PodView| {
        let mut bench = of_two();
        bench.observed.pods[0] = of_revision(&bench.good, old);
        bench.word()
    };
    assert_eq!(beside(died(pod("a", "Stalled", 1))), "", "old engines die as well");
    assert_eq!(beside(with_xid(died(pod("a", "Stalled", 1)), 79, XidRemedy::RestartNode)), "ReplicaCrashes");
    let died_at = |at: &str, of: &str| {
        let mut bench = of_two();
        let dead = serde_json::from_value(json!({
            "metadata": {"name": "i"},
            "spec": {"deployment": "chat", "pod": of, "podUid": format!("uid-{of}"), "class": "Dead", "episodeId": "e-1"},
            "status": {"stage": "Recovered", "timeline": {"suspectAt": at}, "outcome": "Recovered"},
        }));
        bench.observed.incidents.push(dead.unwrap());
        bench.word()
    };
    let (lately, long_ago) = (now().to_string(), "2025-12-31T22:00:00Z");
    assert_eq!(died_at(&lately, "a"), "", "one is back, and the new one is on its way");
    assert_eq!(
        (died_at(long_ago, "a").as_str(), died_at(&lately, "gone").as_str()),
        ("ReplicaCrashes", "ReplicaCrashes")
    );
    let mut bench = of_two();
    bench.observed.pods[0] = of_revision(&bench.good, died(pod("a", "Stalled", 1)));
    let many = ["m", "n"].map(|name| of_revision(&bench.good, healthy(name)));
    bench.observed.pods.extend(many);
    assert_eq!(bench.word(), "ReplicaCrashes", "one of three dies now and then");
    let mut bench = of_two();
    bench.observed.pods[0] = of_revision("third", died(pod("a", "Stalled", 1)));
    let failed = FailedRevision { revision: "third".to_owned(), ..FailedRevision::default() };
    bench.observed.infd.status.as_mut().unwrap().rollout.failed.push(failed);
    assert_eq!(bench.word(), "ReplicaCrashes", "one that has failed itself is no witness");
}

#[test]
fn a_pods_name_tells_its_replica_set_also_where_it_was_cut() {
    let (chat, long) = ("chat-5d8f7c9b6", format!("{}-5d8f7c9b64", "a".repeat(47)));
    assert!(is_named_by(chat, "chat-5d8f7c9b6-x7k2p"));
    for other in ["chat-5d8f7c9b6-", "chat-5d8f7c9b6-b-x7k2p", "chat-5d8f7c9b6", "chat-5d8f7c9b7-x7k2p"] {
        assert!(!is_named_by(chat, other), "{other}");
    }
    assert_eq!(format!("{long}-").len(), 59);
    assert!(is_named_by(&long, &format!("{long}x7k2p")), "no room for the dash");
    assert!(!is_named_by(&long, &format!("{}-6d8f7c9b64x7k2p", "a".repeat(47))));
}
