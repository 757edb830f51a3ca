//! What pods are told of poison requests, from the world's side.

use super::*;
use crate::controllers::inference_deployment::{
    observed::EpisodeView,
    plan::plan,
    testing::{healthy, infd, looked, pod},
};
use crds::poison::{InFlight, Refused, read};

const POISON: &str = "00000000000000aa";
const PROBE: &str = "00000000000000bb";

fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

/// A confirmed stall with these requests in flight, each with the time of its last success there.
fn stalled(name: &str, second: u8, in_flight: &[(&str, Option<&str>)]) -> PodView {
    let mut pod = pod(name, "Stalled", second);
    let EpisodeView::Known(reported) = &mut pod.episode else { panic!("it has one") };
    reported.episode.confirmed_at = reported.episode.suspect_at.clone();
    let one = |(request, at): &(&str, Option<&str>)| InFlight {
        request: (*request).to_owned(),
        completed_at: at.map(str::to_owned),
    };
    reported.episode.in_flight = in_flight.iter().map(one).collect();
    pod
}

fn world(pods: Vec<PodView>) -> Observed {
    looked(infd("chat"), pods)
}

/// What each pod's gate refuses after this pass, in the order in which pods are told.
fn told(world: &Observed) -> Vec<(String, Vec<Refused>)> {
    let patches = plan(world, Vec::new(), None, now()).pods.into_iter();
    let text = |patch: PodPatch| Some((patch.name, patch.annotations.get(ANNOTATION_POISON)?.clone()));
    patches.filter_map(text).map(|(name, text)| (name, read(&text.unwrap_or_default()))).collect()
}

#[test]
fn what_stalled_two_replicas_is_refused_by_all_before_the_second_is_restarted() {
    let first = stalled("a", 1, &[(POISON, None), (PROBE, None)]);
    assert_eq!(told(&world(vec![first.clone(), healthy("c")])), [], "once is chance");
    let second = stalled("b", 2, &[(POISON, None), (PROBE, Some("2026-01-01T00:00:01.5Z"))]);
    let all = told(&world(vec![first, second, healthy("c")]));
    assert_eq!(all.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["b", "c", "a"], "the granted one last");
    let poison = Refused {
        request: POISON.to_owned(),
        since_ms: 1_767_225_602_000 - 6 * 3_600_000,
        until_ms: 1_767_225_602_000 + 6 * 3_600_000,
        stalls: 2,
    };
    assert!(
        all.iter().all(|(_, refused)| *refused == [poison.clone()]),
        "the probe was answered in those hours: {all:?}"
    );
}

#[test]
fn the_records_remember_what_pods_report_no_more_and_a_settled_world_is_silent() {
    let mut then = world(vec![stalled("a", 1, &[(POISON, None)])]);
    for write in plan(&then, Vec::new(), None, now()).incidents.writes {
        let mut incident = EngineIncident::new(&write.name, write.spec.unwrap());
        incident.status = write.status;
        then.incidents.push(incident);
    }
    then.pods = vec![stalled("b", 50, &[(POISON, None)]), healthy("c")];
    let all = told(&then);
    assert_eq!(all.len(), 2);
    let patches = plan(&then, Vec::new(), None, now()).pods;
    for pod in &mut then.pods {
        let patch = patches.iter().find(|patch| patch.uid == pod.uid).unwrap();
        pod.poison.clone_from(&patch.annotations[ANNOTATION_POISON]);
    }
    assert_eq!(told(&then), [], "quiescent = silent (P7)");
    then.infd.spec.recovery.mode = RecoveryMode::Observe;
    assert!(told(&then).iter().all(|(_, refused)| refused.is_empty()) && told(&then).len() == 2, "it only observes");
    then.infd.spec.recovery.mode = RecoveryMode::Fence;
    assert_eq!(told(&then), []);
    then.infd.spec.recovery.poison_requests = PoisonRequests::Ignore;
    assert!(told(&then).iter().all(|(_, refused)| refused.is_empty()) && told(&then).len() == 2, "taken off");
}

/// What docs/poison.md tells of taking a record away.
#[test]
fn a_record_that_is_taken_away_comes_back_for_as_long_as_its_pod_tells_of_it() {
    let mut then = world(vec![stalled("a", 1, &[(POISON, None)]), stalled("b", 2, &[(POISON, None)])]);
    for write in plan(&then, Vec::new(), None, now()).incidents.writes {
        let mut incident = EngineIncident::new(&write.name, write.spec.unwrap());
        incident.status = write.status;
        then.incidents.push(incident);
    }
    let refused_by_b = |world: &Observed| {
        told(world).into_iter().find(|(name, _)| name == "b").is_some_and(|(_, refused)| !refused.is_empty())
    };
    let first = then.incidents.remove(0);
    assert_eq!(first.spec.pod, "a");
    let written = |world: &Observed| plan(world, Vec::new(), None, now()).incidents.writes.len();
    assert!(written(&then) == 1 && refused_by_b(&then), "its pod tells of it");
    then.pods.remove(0);
    assert!(written(&then) == 0 && !refused_by_b(&then), "one stall is chance");
    then.incidents.push(first);
    assert!(refused_by_b(&then), "the pod's going alone does not help: the record remembers");
}

#[test]
fn two_stalls_of_one_pod_bind_that_pod_alone() {
    let mut then = world(vec![stalled("a", 1, &[(POISON, None)])]);
    for write in plan(&then, Vec::new(), None, now()).incidents.writes {
        let mut incident = EngineIncident::new(&write.name, write.spec.unwrap());
        incident.status = write.status;
        then.incidents.push(incident);
    }
    then.pods = vec![stalled("a", 50, &[(POISON, None)]), healthy("b")];
    let all = told(&then);
    assert_eq!((all.len(), all[0].0.as_str(), all[0].1.len()), (1, "a", 1), "whoever owns a pod harms its own replica");
}

#[test]
fn a_suspicion_that_ended_by_itself_is_no_stall() {
    let mut suspect = stalled("b", 2, &[(POISON, None)]);
    let EpisodeView::Known(reported) = &mut suspect.episode else { panic!("it has one") };
    reported.episode.confirmed_at = None;
    assert_eq!(told(&world(vec![stalled("a", 1, &[(POISON, None)]), suspect])), []);
}
