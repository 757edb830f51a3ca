//! Which incidents to write, close and forget, pure. One incident an episode, its name derived from the episode's id, so
//! that any operator after any crash writes the same record (P1, P12).

use crds::{
    EngineIncident, EngineIncidentSpec, EngineIncidentStatus, Timeline, fence::FENCED_BY_PERSON,
    inference_deployment::Recovery,
};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use super::by_hand;
use crate::{
    controllers::inference_deployment::{
        observed::{EpisodeView, PodView, ReportedEpisode},
        validate::DURATION_MAX,
    },
    digest::short,
};

/// At most so many closed incidents of one InferenceDeployment are kept, however young.
const KEPT_COUNT_MAX: usize = 50;

/// How long closed incidents are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// `spec.recovery.incidentTtl`.
    ttl: SignedDuration,
    /// `spec.recovery.poisonFor`: for so long a stall that told what was in flight is compared with later ones (I7).
    told: SignedDuration,
}

impl Kept {
    /// What the policy says. A text that is no duration keeps everything as long as any may ask for: what is deleted cannot be had back.
    pub fn of(recovery: &Recovery) -> Self {
        let read = |text: &str| humantime::parse_duration(text).unwrap_or(DURATION_MAX).min(DURATION_MAX);
        let of = |text: &str| SignedDuration::try_from(read(text)).unwrap_or(SignedDuration::MAX);
        let ttl = of(&recovery.incident_ttl);
        Kept { ttl, told: of(&recovery.poison_for).max(ttl) }
    }
}

/// What to do about incidents.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct IncidentPlan {
    pub writes: Vec<IncidentWrite>,
    /// Name and UID of the incidents to forget.
    pub deletes: Vec<(String, String)>,
    /// How many are open once this is done.
    pub open: usize,
    /// How many of these tell of a person's fence: they end by that person's hand alone, which is an event.
    pub by_hand: usize,
}

/// One incident as it should be; `None` where that half is right already.
#[derive(Debug, Clone, PartialEq)]
pub struct IncidentWrite {
    pub name: String,
    /// The pod (by UID) that tells of it; `None`: what is written now is no pod's word.
    pub told_by: Option<String>,
    pub spec: Option<EngineIncidentSpec>,
    pub status: Option<EngineIncidentStatus>,
}

/// The name of the incident of an episode.
pub fn name_of(infd: &str, episode: &str) -> String {
    format!("{infd}-{}", short(episode, 6))
}

/// Compares the episodes on `pods` with the `incidents` that exist.
pub fn plan(infd: &str, kept: Kept, pods: &[PodView], incidents: &[EngineIncident], now: Timestamp) -> IncidentPlan {
    let mut plan = IncidentPlan::default();
    let mut reported = Vec::new();
    for pod in pods {
        let Some(episode) = pod.reported() else { continue };
        let name = name_of(infd, &episode.episode.id);
        let existing = incidents.iter().find(|incident| incident.name_any() == name);
        if let Some(write) = write_of((infd, kept), pod, episode, &name, existing, now) {
            plan.writes.extend((write.spec.is_some() || write.status.is_some()).then_some(write));
            plan.open += usize::from(episode.open);
        }
        reported.push(name);
    }
    for (pod, fence) in pods.iter().filter_map(|pod| Some((pod, pod.fence.as_ref()?))) {
        let name = by_hand::name(infd, pod, fence);
        let existing = incidents.iter().find(|incident| incident.name_any() == name);
        let write = by_hand::write(infd, pod, fence, existing, now);
        plan.writes.extend((write.spec.is_some() || write.status.is_some()).then_some(write));
        plan.open += 1;
        plan.by_hand += 1;
        reported.push(name);
    }
    for incident in incidents.iter().filter(|i| !reported.contains(&i.name_any())) {
        if is_closed(incident) {
            continue;
        }
        match orphan_outcome(incident, pods) {
            Some(outcome) => plan.writes.push(closing(incident, outcome, now)),
            None => plan.open += 1,
        }
    }
    plan.deletes = forget(kept, incidents, &reported, now);
    plan
}

/// The write that makes the incident of a reported episode true. `None`: an old closed episode without a record, which
/// was forgotten on purpose; writing it again would go on for ever.
fn write_of(
    (infd, kept): (&str, Kept),
    pod: &PodView,
    reported: &ReportedEpisode,
    name: &str,
    existing: Option<&EngineIncident>,
    now: Timestamp,
) -> Option<IncidentWrite> {
    let closed_at = reported.episode.serving_at.clone().or_else(|| reported.changed_at.clone());
    if existing.is_none() && !reported.open && closed_at.as_deref().is_none_or(|at| older(at, kept.ttl, now)) {
        return None;
    }
    let spec = spec_of(infd, pod, reported);
    let mut status = status_of(reported, closed_at);
    // The pod says how it is now, the record how it was: one lie is enough.
    let lied = existing.and_then(|incident| incident.status.as_ref()).is_some_and(|status| status.health_lied);
    status.health_lied = lied || (reported.open && pod.health_lies);
    Some(IncidentWrite {
        name: name.to_owned(),
        told_by: Some(pod.uid.clone()),
        spec: (existing.map(|i| &i.spec) != Some(&spec)).then_some(spec),
        status: (existing.and_then(|i| i.status.as_ref()) != Some(&status)).then_some(status),
    })
}

fn spec_of(infd: &str, pod: &PodView, reported: &ReportedEpisode) -> EngineIncidentSpec {
    let episode = &reported.episode;
    EngineIncidentSpec {
        deployment: infd.to_owned(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        node: pod.node.clone(),
        gpu_uuids: episode.gpu_uuids.clone(),
        xids: episode.xids.clone(),
        class: episode.class.clone(),
        episode_id: episode.id.clone(),
        fingerprint: episode.fingerprint.clone().unwrap_or_default(),
    }
}

fn status_of(reported: &ReportedEpisode, closed_at: Option<String>) -> EngineIncidentStatus {
    let episode = &reported.episode;
    let closed_at = closed_at.filter(|_| !reported.open);
    let outcome = if episode.stage == "Recovered" { "Recovered" } else { "Cleared" };
    EngineIncidentStatus {
        stage: episode.stage.clone(),
        reasons: episode.reasons.clone(),
        timeline: Timeline {
            suspect_at: episode.suspect_at.clone(),
            fenced_at: episode.fenced_at.clone(),
            confirmed_at: episode.confirmed_at.clone(),
            evidence_at: episode.evidence_at.clone(),
            granted_at: episode.granted_at.clone(),
            killed_at: episode.killed_at.clone(),
            serving_at: episode.serving_at.clone(),
        },
        granted_by: episode.granted_by.clone(),
        requests_lost: i64::try_from(episode.requests_lost).unwrap_or(i64::MAX),
        requests_refused: i64::try_from(episode.requests_refused).unwrap_or(i64::MAX),
        bundle: episode.bundle.clone(),
        in_flight: episode.in_flight.clone(),
        outcome: (!reported.open).then(|| outcome.to_owned()),
        duration: closed_at.as_deref().and_then(|end| duration(episode.suspect_at.as_deref()?, end)),
        closed_at,
        health_lied: false,
    }
}

fn is_closed(incident: &EngineIncident) -> bool {
    incident.status.as_ref().is_some_and(|status| status.outcome.is_some())
}

/// How an open incident ended that no pod reports any more; `None`: nobody knows, so it stays open.
fn orphan_outcome(incident: &EngineIncident, pods: &[PodView]) -> Option<&'static str> {
    let Some(pod) = pods.iter().find(|pod| pod.uid == incident.spec.pod_uid) else { return Some("PodGone") };
    if incident.spec.class == FENCED_BY_PERSON {
        return Some("Unfenced"); // no pod bears it any more
    }
    match &pod.episode {
        EpisodeView::Known(_) => Some("Superseded"),
        // The agent forgot it and says that the pod may serve.
        EpisodeView::None if pod.ready => Some("Cleared"),
        EpisodeView::None | EpisodeView::Unreadable(_) => None,
    }
}

fn closing(incident: &EngineIncident, outcome: &str, now: Timestamp) -> IncidentWrite {
    let mut status = incident.status.clone().unwrap_or_default();
    let end = now.to_string();
    status.outcome = Some(outcome.to_owned());
    status.duration = status.timeline.suspect_at.as_deref().and_then(|start| duration(start, &end));
    status.closed_at = Some(end);
    IncidentWrite { name: incident.name_any(), told_by: None, spec: None, status: Some(status) }
}

/// Closed incidents that are too old or too many; one that a pod still reports stays. Suspicions that came to nothing and persons' fences go
/// first: by stalls replicas learn from each other (I7).
fn forget(kept: Kept, incidents: &[EngineIncident], reported: &[String], now: Timestamp) -> Vec<(String, String)> {
    let closed_at = |i: &EngineIncident| i.status.as_ref().and_then(|s| s.closed_at.clone()).unwrap_or_default();
    let mut closed: Vec<&EngineIncident> = incidents.iter().filter(|i| is_closed(i)).collect();
    closed.sort_by_key(|incident| std::cmp::Reverse((incident.is_stall(), closed_at(incident), incident.name_any())));
    let tells = |i: &EngineIncident| i.is_stall() && i.status.as_ref().is_some_and(|s| !s.in_flight.is_empty());
    let over = |(rank, incident): &(usize, &EngineIncident)| {
        let age = if tells(incident) { kept.told } else { kept.ttl };
        *rank >= KEPT_COUNT_MAX || older(&closed_at(incident), age, now)
    };
    closed
        .into_iter()
        .enumerate()
        .filter(|entry| over(entry) && !reported.contains(&entry.1.name_any()))
        .filter_map(|(_, incident)| Some((incident.name_any(), incident.uid()?)))
        .collect()
}

/// Is `at` longer ago than `age`? A time that cannot be read is not.
fn older(at: &str, age: SignedDuration, now: Timestamp) -> bool {
    at.parse::<Timestamp>().is_ok_and(|at| now.duration_since(at) > age)
}

/// From `start` to `end` for people: `12.3s`.
fn duration(start: &str, end: &str) -> Option<String> {
    let (start, end) = (start.parse::<Timestamp>().ok()?, end.parse::<Timestamp>().ok()?);
    Some(format!("{:.1}s", end.duration_since(start).as_secs_f64().max(0.0)))
}

/// [`plan`] under the policy of one who said nothing.
#[cfg(test)]
pub fn plan_by_default(infd: &str, pods: &[PodView], incidents: &[EngineIncident], now: Timestamp) -> IncidentPlan {
    plan(infd, Kept::of(&Recovery::default()), pods, incidents, now)
}

#[cfg(test)]
mod tests {
    use super::{plan_by_default as plan, *};
    use crate::controllers::inference_deployment::testing::{healthy, pod};
    use crds::poison::InFlight;

    fn now() -> Timestamp {
        "2026-01-01T00:02:00Z".parse().unwrap()
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
    fn a_stall_is_remembered_longer_than_what_came_to_nothing() {
        let mut stalled = pod("stalled", "Recovered", 0);
        if let EpisodeView::Known(reported) = &mut stalled.episode {
            reported.episode.confirmed_at = Some("2026-01-01T00:00:01Z".to_owned());
            let request = InFlight { request: "0123456789abcdef".to_owned(), completed_at: None };
            reported.episode.in_flight = vec![request];
        }
        let mut incidents = Vec::new();
        apply(&plan("chat", &[stalled], &incidents, now()), &mut incidents);
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
            apply(&super::plan("chat", poison_for(told), &[], &incidents, later), &mut incidents);
            assert_eq!(stays(&incidents), kept, "{days} days, poisonFor {told}");
        }
    }

    #[test]
    fn a_record_is_kept_for_its_ttl_and_no_longer() {
        let mut incidents = Vec::new();
        apply(&plan("chat", &[pod("a", "Recovered", 10)], &[], now()), &mut incidents); // it ended at 00:01
        for (ttl, minutes, deleted) in
            [("1m", 0, 0), ("1m", 1, 1), ("90m", 89, 0), ("90m", 91, 1), ("168h", 91, 0), ("soon", 10_081, 0)]
        {
            let kept = Kept::of(&Recovery { incident_ttl: ttl.to_owned(), ..Recovery::default() });
            let deletes =
                super::plan("chat", kept, &[], &incidents, now() + SignedDuration::from_mins(minutes)).deletes;
            assert_eq!(deletes.len(), deleted, "{ttl}, {minutes} minutes later");
            let uid = incidents[0].metadata.uid.clone().unwrap();
            assert!(deletes.iter().all(|(_, of)| *of == uid), "that one and no namesake");
        }
    }
}
