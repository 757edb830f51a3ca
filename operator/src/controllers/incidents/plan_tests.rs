//! Episodes and records, from the first word to the last.

use super::{plan_by_default as plan, *};
use crate::controllers::inference_deployment::testing::{healthy, pod};
use crds::poison::InFlight;

fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

/// Records, and no pod.
fn nobody(incidents: &[EngineIncident]) -> Ground<'_> {
    Ground { pods: &[], nodes: &[], incidents }
}

/// What the API would hold after `plan`.
fn apply(plan: &IncidentPlan, incidents: &mut Vec<EngineIncident>) {
    for write in &plan.writes {
        if !incidents.iter().any(|i| i.name_any() == write.name) {
            let mut created = EngineIncident::new(&write.name, write.spec.clone().expect("a new one has a spec"));
            created.metadata.uid = Some(format!("uid-{}", write.name));
            incidents.push(created);
        }
        let incident = incidents.iter_mut().find(|i| i.name_any() == write.name).unwrap();
        incident.spec = write.spec.clone().unwrap_or_else(|| incident.spec.clone());
        incident.status = write.status.clone().or_else(|| incident.status.clone());
    }
    incidents.retain(|i| !plan.deletes.iter().any(|(name, _)| *name == i.name_any()));
}

#[test]
fn an_episode_is_recorded_once_followed_and_closed() {
    let mut incidents = Vec::new();
    for (stage, open) in [("Suspect", 1), ("Stalled", 1), ("Killed", 1), ("Recovered", 0)] {
        let pods = [pod("a", stage, 10)];
        let step = plan("chat", &pods, &incidents, now());
        assert_eq!((step.open, step.writes.len()), (open, 1), "{stage}");
        assert_eq!(closed_stall(&step.writes[0], &incidents), None, "{stage}: it was never confirmed");
        apply(&step, &mut incidents);
        let again = plan("chat", &pods, &incidents, now());
        assert_eq!(again.writes, [], "quiescent = silent (P7)");
    }
    assert_eq!(incidents.len(), 1);
    let status = incidents[0].status.as_ref().unwrap();
    assert_eq!((status.outcome.as_deref(), status.duration.as_deref()), (Some("Recovered"), Some("50.0s")));
}

#[test]
fn a_health_that_lied_once_stays_in_the_record() {
    let mut incidents = Vec::new();
    let lied = |incidents: &[EngineIncident]| incidents[0].status.as_ref().unwrap().health_lied;
    let stalled = pod("a", "Stalled", 10);
    apply(&plan("chat", std::slice::from_ref(&stalled), &incidents, now()), &mut incidents);
    assert!(!lied(&incidents));
    for (lies, stage) in [(true, "Stalled"), (false, "Killed"), (false, "Recovered")] {
        let pods = [PodView { health_lies: lies, ..pod("a", stage, 10) }];
        apply(&plan("chat", &pods, &incidents, now()), &mut incidents);
        assert!(lied(&incidents), "{stage}");
        assert_eq!(plan("chat", &pods, &incidents, now()).writes, [], "quiescent is silent (P7)");
    }
}

#[test]
fn a_pod_that_disappears_closes_its_incident() {
    let mut incidents = Vec::new();
    apply(&plan("chat", &[pod("a", "Stalled", 10)], &[], now()), &mut incidents);
    let gone = plan("chat", &[healthy("b")], &incidents, now());
    assert_eq!(gone.open, 0);
    apply(&gone, &mut incidents);
    assert_eq!(incidents[0].status.as_ref().unwrap().outcome.as_deref(), Some("PodGone"));
    assert_eq!(incidents[0].status.as_ref().unwrap().stage, "Stalled", "the stage it had reached stays");
}

#[test]
fn silence_leaves_it_open_and_a_newer_episode_supersedes_it() {
    let mut incidents = Vec::new();
    apply(&plan("chat", &[pod("a", "Stalled", 10)], &[], now()), &mut incidents);
    let silent = plan("chat", &[PodView { ready: false, ..healthy("a") }], &incidents, now());
    assert_eq!((silent.writes.len(), silent.open), (0, 1));
    let serving = plan("chat", &[healthy("a")], &incidents, now());
    assert_eq!((serving.writes.len(), serving.open), (1, 0), "forgotten, and it serves");
    let mut newer = pod("b", "Stalled", 20);
    newer.uid = "uid-a".to_owned();
    let step = plan("chat", &[newer], &incidents, now());
    let outcomes: Vec<_> = step.writes.iter().filter_map(|w| w.status.as_ref()?.outcome.as_deref()).collect();
    assert_eq!((outcomes, step.open), (vec!["Superseded"], 1));
}

#[test]
fn an_operator_that_slept_through_it_still_records_it_but_not_after_a_week() {
    let done = [pod("a", "Recovered", 10)];
    assert_eq!(plan("chat", &done, &[], now()).writes.len(), 1);
    let later = now() + SignedDuration::from_hours(8 * 24);
    assert_eq!(plan("chat", &done, &[], later), IncidentPlan::default());
}

#[test]
fn closed_ones_are_forgotten_by_age_and_count() {
    let mut incidents = Vec::new();
    for n in 0..60 {
        apply(&plan("chat", &[pod(&format!("p{n}"), "Recovered", n)], &incidents, now()), &mut incidents);
    }
    assert!(incidents.len() <= KEPT_COUNT_MAX + 1);
    let later = now() + SignedDuration::from_hours(8 * 24);
    assert_eq!(plan("chat", &[], &incidents, later).deletes.len(), incidents.len());
    let reported = [pod("p59", "Recovered", 59)];
    assert_eq!(plan("chat", &reported, &incidents, later).deletes.len(), incidents.len() - 1);
}

#[test]
fn each_step_of_a_repair_lasts_from_the_one_before() {
    let mut stalled = pod("stalled", "Recovered", 0);
    let EpisodeView::Known(reported) = &mut stalled.episode else { panic!("it reports an episode") };
    let at = |second: u32| Some(format!("2026-01-01T00:00:{second:02}Z"));
    let episode = &mut reported.episode;
    (episode.suspect_at, episode.confirmed_at, episode.fenced_at) = (at(1), at(3), at(4));
    (episode.evidence_at, episode.granted_at, episode.killed_at) = (at(6), at(16), None);
    episode.serving_at = at(46);
    let step = plan("chat", &[stalled], &[], now());
    let lasted = closed_stall(&step.writes[0], &[]).unwrap().steps;
    assert_eq!(lasted, [("confirmed", 2.0), ("fenced", 1.0), ("evidence", 2.0), ("granted", 10.0), ("serving", 30.0)]);
}

#[test]
fn a_stall_is_remembered_longer_than_what_came_to_nothing() {
    let mut stalled = pod("stalled", "Recovered", 0);
    if let EpisodeView::Known(reported) = &mut stalled.episode {
        reported.episode.confirmed_at = Some("2026-01-01T00:00:01Z".to_owned());
        let request = InFlight { request: "0123456789abcdef".to_owned(), completed_at: None };
        reported.episode.in_flight = vec![request];
    }
    let mut incidents = Vec::new();
    let step = plan("chat", &[stalled], &incidents, now());
    let closed = closed_stall(&step.writes[0], &incidents).unwrap();
    assert_eq!((closed.outcome, closed.seconds), ("Recovered", 60.0));
    apply(&step, &mut incidents);
    assert_eq!(closed_stall(&step.writes[0], &incidents), None, "it was closed before");
    for n in 1..=KEPT_COUNT_MAX {
        apply(&plan("chat", &[pod(&format!("p{n}"), "Cleared", 50)], &incidents, now()), &mut incidents);
    }
    let stays = |incidents: &[EngineIncident]| incidents.iter().any(|i| i.spec.pod == "stalled");
    assert!(incidents.len() > KEPT_COUNT_MAX && stays(&incidents));
    let poison_for = |text: &str| Kept::of(&Recovery { poison_for: text.to_owned(), ..Recovery::default() });
    for (told, days, kept) in
        [("720h", 0, true), ("720h", 8, true), ("720h", 31, false), ("6h", 6, true), ("6h", 8, false)]
    {
        let mut incidents = incidents.clone();
        let later = now() + SignedDuration::from_hours(days * 24);
        apply(&super::plan("chat", poison_for(told), nobody(&incidents), later), &mut incidents);
        assert_eq!(stays(&incidents), kept, "{days} days, poisonFor {told}");
    }
}

/// A pod whose episode ended at this time, by its own word.
fn ended(name: &str, at: &str) -> PodView {
    let mut pod = pod(name, "Recovered", 10);
    if let EpisodeView::Known(reported) = &mut pod.episode {
        reported.episode.serving_at = Some(at.to_owned());
    }
    pod
}

#[test]
fn an_end_that_has_not_come_is_the_moment_at_which_it_was_told() {
    let closed_at = |incidents: &[EngineIncident]| incidents[0].status.as_ref().unwrap().closed_at.clone().unwrap();
    for (told, known) in [
        ("9998-01-01T00:00:00Z", "2026-01-01T00:02:00Z"),
        ("2026-01-01T00:07:01Z", "2026-01-01T00:02:00Z"),
        ("2026-01-01T00:07:00Z", "2026-01-01T00:07:00Z"), // clocks differ a little
    ] {
        let (mut incidents, pods) = (Vec::new(), [ended("a", told)]);
        apply(&plan("chat", &pods, &incidents, now()), &mut incidents);
        assert_eq!(closed_at(&incidents), known, "{told}");
        let later = now() + SignedDuration::from_secs(1);
        assert_eq!(plan("chat", &pods, &incidents, later).writes, [], "told once (P7)");
        let week = now() + SignedDuration::from_hours(8 * 24);
        assert_eq!(plan("chat", &[], &incidents, week).deletes.len(), 1, "it ages as any other");
    }
}

#[test]
fn whoever_lies_about_the_time_takes_no_other_record_away() {
    let mut incidents = Vec::new();
    apply(&plan("chat", &[pod("honest", "Recovered", 10)], &[], now()), &mut incidents);
    for n in 0..KEPT_COUNT_MAX {
        let pods = [ended(&format!("p{n}"), "2026-01-01T00:01:30Z")];
        apply(&plan("chat", &pods, &incidents, now()), &mut incidents);
    }
    // (as an earlier version believed it)
    for incident in incidents.iter_mut().filter(|incident| incident.spec.pod != "honest") {
        incident.status.as_mut().unwrap().closed_at = Some("9998-01-01T00:00:00Z".to_owned());
    }
    let deletes = plan("chat", &[], &incidents, now()).deletes;
    assert!(deletes.len() == 1 && deletes[0].0 != incidents[0].name_any(), "{deletes:?}");
}

#[test]
fn a_record_ages_from_no_earlier_than_there_was_one() {
    let (mut incidents, pods) = (Vec::new(), [ended("a", "2025-11-01T00:00:00Z")]);
    apply(&plan("chat", &[pod("a", "Stalled", 10)], &[], now()), &mut incidents);
    incidents[0].metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    apply(&plan("chat", &pods, &incidents, now()), &mut incidents);
    let forgotten = |days: i64| plan("chat", &[], &incidents, now() + SignedDuration::from_hours(days * 24)).deletes;
    assert_eq!((forgotten(0).len(), forgotten(8).len()), (0, 1), "its node's clock is two months behind");
}

#[test]
fn a_record_is_kept_for_its_ttl_and_no_longer() {
    let mut incidents = Vec::new();
    apply(&plan("chat", &[pod("a", "Recovered", 10)], &[], now()), &mut incidents); // it ended at 00:01
    for (ttl, minutes, deleted) in
        [("1m", 0, 0), ("1m", 1, 1), ("90m", 89, 0), ("90m", 91, 1), ("168h", 91, 0), ("soon", 10_081, 0)]
    {
        let kept = Kept::of(&Recovery { incident_ttl: ttl.to_owned(), ..Recovery::default() });
        let deletes = super::plan("chat", kept, nobody(&incidents), now() + SignedDuration::from_mins(minutes)).deletes;
        assert_eq!(deletes.len(), deleted, "{ttl}, {minutes} minutes later");
        let uid = incidents[0].metadata.uid.clone().unwrap();
        assert!(deletes.iter().all(|(_, of)| *of == uid), "that one and no namesake");
    }
}

/// A pod that reports an episode of another one, whose id anybody can read at that pod's port.
#[test]
fn two_pods_with_one_id_have_a_record_each() {
    let copy = PodView { name: "b".to_owned(), uid: "uid-b".to_owned(), ..pod("a", "Stalled", 10) };
    let mut incidents = Vec::new();
    for pods in [[copy.clone(), pod("a", "Stalled", 10)], [pod("a", "Killed", 10), copy.clone()]] {
        apply(&plan("chat", &pods, &incidents, now()), &mut incidents);
        assert_eq!(plan("chat", &pods, &incidents, now()).writes, [], "neither writes the other's");
    }
    let mut told: Vec<_> = incidents.iter().map(|i| (i.spec.pod.as_str(), i.spec.pod_uid.as_str())).collect();
    told.sort_unstable();
    assert_eq!(told, [("a", "uid-a"), ("b", "uid-b")]);
}

#[test]
fn a_record_that_an_earlier_version_named_is_continued() {
    let mut incidents = Vec::new();
    apply(&plan("chat", &[pod("a", "Suspect", 10)], &[], now()), &mut incidents);
    incidents[0].metadata.name = Some("chat-by-the-id-alone".to_owned());
    for stage in ["Stalled", "Recovered"] {
        let step = plan("chat", &[pod("a", stage, 10)], &incidents, now());
        assert_eq!(step.writes.iter().map(|write| write.name.as_str()).collect::<Vec<_>>(), ["chat-by-the-id-alone"]);
        apply(&step, &mut incidents);
    }
    let outcome = incidents[0].status.as_ref().unwrap().outcome.as_deref();
    assert_eq!((incidents.len(), outcome), (1, Some("Recovered")));
}

/// What a pod says of an episode that began before its node was started anew is not held against the node.
#[test]
fn the_boot_of_a_record_is_that_in_which_it_was_made() {
    let node = |boot: &str| [NodeView { name: "n1".into(), boot_id: boot.to_owned(), ..NodeView::default() }];
    let pods = [pod("a", "Stalled", 10)];
    let step = |boot: &str, incidents: &[EngineIncident]| {
        let nodes = node(boot);
        super::plan("chat", Kept::of(&Recovery::default()), Ground { pods: &pods, nodes: &nodes, incidents }, now())
    };
    let mut incidents = Vec::new();
    apply(&step("b1", &incidents), &mut incidents);
    assert_eq!(incidents[0].spec.boot_id, "b1");
    assert_eq!(step("b2", &incidents).writes, [], "the record stays as it is");
}
