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
    controllers::{
        inference_deployment::{
            observed::{EpisodeView, Ground, PodView, ReportedEpisode},
            validate::DURATION_MAX,
        },
        nodes::{boot, view::NodeView},
    },
    digest::short,
    wall::ahead,
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

/// The name of the incident of an episode of this pod. An id is unique in its pod alone, and whoever can reach that pod can read it: by the
/// id alone a sibling would take the record for its own.
pub fn name_of(infd: &str, pod_uid: &str, episode: &str) -> String {
    format!("{infd}-{}", short(&format!("{pod_uid}/{episode}"), 6))
}

/// The same where it may be recorded already: by the name that it has. An earlier version made names of the id alone.
pub fn name_among(incidents: &[EngineIncident], infd: &str, pod_uid: &str, episode: &str) -> String {
    let known = incidents.iter().find(|incident| incident.tells_of(episode, pod_uid));
    known.map_or_else(|| name_of(infd, pod_uid, episode), ResourceExt::name_any)
}

/// Compares the episodes on the pods with the incidents that exist.
pub fn plan(infd: &str, kept: Kept, ground: Ground<'_>, now: Timestamp) -> IncidentPlan {
    let Ground { pods, incidents, nodes } = ground;
    let mut plan = IncidentPlan::default();
    let mut reported = Vec::new();
    for pod in pods {
        let Some(episode) = pod.reported() else { continue };
        let name = name_among(incidents, infd, &pod.uid, &episode.episode.id);
        let existing = incidents.iter().find(|incident| incident.name_any() == name);
        if let Some(write) = write_of((infd, kept), (pod, nodes), episode, &name, existing, now) {
            plan.writes.extend((write.spec.is_some() || write.status.is_some()).then_some(write));
            plan.open += usize::from(episode.open);
        }
        reported.push(name);
    }
    for (pod, fence) in pods.iter().filter_map(|pod| Some((pod, pod.fence.as_ref()?))) {
        let name = name_among(incidents, infd, &pod.uid, &by_hand::id(pod, fence));
        let existing = incidents.iter().find(|incident| incident.name_any() == name);
        let write = by_hand::write((infd, &name), (pod, fence), existing, now);
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
    (pod, nodes): (&PodView, &[NodeView]),
    reported: &ReportedEpisode,
    name: &str,
    existing: Option<&EngineIncident>,
    now: Timestamp,
) -> Option<IncidentWrite> {
    let closed_at = reported.episode.serving_at.clone().or_else(|| reported.changed_at.clone());
    if existing.is_none() && !reported.open && closed_at.as_deref().is_none_or(|at| older(at, kept.ttl, now)) {
        return None;
    }
    let boot_id =
        existing.map_or_else(|| boot::of(nodes, &pod.node).to_owned(), |incident| incident.spec.boot_id.clone());
    let spec = EngineIncidentSpec { boot_id, ..spec_of(infd, pod, reported) };
    let closed_at = closed_at.map(|told| end_of(told, &reported.episode.stage, existing, now));
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
        ..EngineIncidentSpec::default()
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

/// When it ended: what its pod tells, but for a time that has not come yet. Such a word would make a record that never ages, and honest ones
/// would be forgotten for it. What was recorded of the same word stays.
fn end_of(told: String, stage: &str, existing: Option<&EngineIncident>, now: Timestamp) -> String {
    let has_come = |at: &String| at.parse::<Timestamp>().is_ok_and(|at| !ahead(at, now));
    let same = existing.and_then(|incident| incident.status.as_ref()).filter(|status| status.stage == stage);
    let known = same.and_then(|status| status.closed_at.clone()).filter(has_come);
    known.unwrap_or_else(|| if has_come(&told) { told } else { now.to_string() })
}

fn is_closed(incident: &EngineIncident) -> bool {
    incident.status.as_ref().is_some_and(|status| status.outcome.is_some())
}

/// A confirmed stall whose record is closed.
#[derive(Debug, Clone, PartialEq)]
pub struct ClosedStall<'a> {
    /// One of [`crds::engine_incident::OUTCOMES`].
    pub outcome: &'a str,
    /// From its suspicion to its end.
    pub seconds: f64,
    /// What each of [`crds::engine_incident::STEPS`] that it took lasted, from the step before.
    pub steps: Vec<(&'static str, f64)>,
}

/// The stall whose record this write closes.
pub fn closed_stall<'a>(write: &'a IncidentWrite, incidents: &[EngineIncident]) -> Option<ClosedStall<'a>> {
    let status = write.status.as_ref()?;
    let existing = incidents.iter().find(|incident| incident.name_any() == write.name);
    let spec = write.spec.as_ref().or(existing.map(|incident| &incident.spec))?;
    if !spec.is_stall(Some(status)) || existing.is_some_and(is_closed) {
        return None;
    }
    let suspect_at = status.timeline.suspect_at.as_deref()?;
    Some(ClosedStall {
        outcome: status.outcome.as_deref()?,
        seconds: seconds(suspect_at, status.closed_at.as_deref()?)?,
        steps: steps(suspect_at, &status.timeline),
    })
}

/// Each step with what it lasted: in the order of their times, for a fence may come before what confirms it, and after.
fn steps(suspect_at: &str, timeline: &Timeline) -> Vec<(&'static str, f64)> {
    let mut steps: Vec<(&'static str, f64)> =
        timeline.steps().into_iter().filter_map(|(step, at)| Some((step, seconds(suspect_at, at?)?))).collect();
    steps.sort_by(|a, b| a.1.total_cmp(&b.1));
    let mut before = 0.0;
    for (_, seconds) in &mut steps {
        (before, *seconds) = (*seconds, *seconds - before);
    }
    steps
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
    let mut closed: Vec<&EngineIncident> = incidents.iter().filter(|i| is_closed(i)).collect();
    closed.sort_by_key(|incident| {
        std::cmp::Reverse((incident.is_stall(), known_since(incident, now), incident.name_any()))
    });
    let tells = |i: &EngineIncident| i.is_stall() && i.status.as_ref().is_some_and(|s| !s.in_flight.is_empty());
    let over = |(rank, incident): &(usize, &EngineIncident)| {
        let age = if tells(incident) { kept.told } else { kept.ttl };
        *rank >= KEPT_COUNT_MAX || known_since(incident, now).is_some_and(|at| now.duration_since(at) > age)
    };
    closed
        .into_iter()
        .enumerate()
        .filter(|entry| over(entry) && !reported.contains(&entry.1.name_any()))
        .filter_map(|(_, incident)| Some((incident.name_any(), incident.uid()?)))
        .collect()
}

/// From when on a closed record ages: its end, by the pod's word, but not from before there was a record. A node's clock may be behind by more
/// than records are kept, and one that was ahead when an earlier version believed it says nothing.
fn known_since(incident: &EngineIncident, now: Timestamp) -> Option<Timestamp> {
    let told = incident.status.as_ref().and_then(|status| status.closed_at.as_deref()?.parse::<Timestamp>().ok());
    let made = incident.metadata.creation_timestamp.as_ref().map(|time| time.0);
    told.filter(|at| !ahead(*at, now)).max(made)
}

/// Is `at` longer ago than `age`? A time that cannot be read is not.
fn older(at: &str, age: SignedDuration, now: Timestamp) -> bool {
    at.parse::<Timestamp>().is_ok_and(|at| now.duration_since(at) > age)
}

/// From `start` to `end` for people: `12.3s`.
fn duration(start: &str, end: &str) -> Option<String> {
    Some(format!("{:.1}s", seconds(start, end)?))
}

fn seconds(start: &str, end: &str) -> Option<f64> {
    let (start, end) = (start.parse::<Timestamp>().ok()?, end.parse::<Timestamp>().ok()?);
    Some(end.duration_since(start).as_secs_f64().max(0.0))
}

/// [`plan`] under the policy of one who said nothing.
#[cfg(test)]
pub fn plan_by_default(infd: &str, pods: &[PodView], incidents: &[EngineIncident], now: Timestamp) -> IncidentPlan {
    plan(infd, Kept::of(&Recovery::default()), Ground { pods, incidents, nodes: &[] }, now)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
