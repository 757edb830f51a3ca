//! Kubernetes Events for people who run `kubectl describe infd`: a restart was granted, an incident has closed. One event
//! a change, under a name that follows from the change, so that a pass that is made twice says it once.
//!
//! They are a courtesy: nothing reads them back, one that cannot be published is logged and no error of the pass, and
//! they come after every write that matters.

use crds::{
    Avoided, AvoidedBecause, EngineIncident, Grant, GrantAction, TrialOutcome, conditions::RESTARTS_HELD,
    episode::Episode,
};
use futures::{FutureExt, StreamExt, stream};
use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Resource, ResourceExt};

use super::{
    avoid::{self, Lifted, span_of},
    escalate::Hold,
    execute::AT_ONCE,
    grants::{self, noted},
    observed::{Observed, PodView},
    plan::Plan,
    restarts,
    rollout::State,
};
use crate::{
    client::{CallError, Calls, FIELD_MANAGER},
    controllers::{incidents::plan::name_among, nodes::plan::in_force},
    digest::short,
};

/// validation of events.k8s.io/v1 in the API server; the message of a condition that is told may be longer.
const NOTE_BYTES_MAX: usize = 1_024;

/// The events of one plan, pure: its new grants, and the incidents that it closes.
pub fn of(observed: &Observed, plan: &Plan, now: Timestamp) -> Vec<Event> {
    let held = observed.infd.status.as_ref().map(|s| s.recovery.grants.as_slice()).unwrap_or_default();
    let mut events = Vec::new();
    for grant in grants::fresh(&plan.grants, held) {
        let incident = incident(observed, &grant.pod_uid, &grant.episode);
        // a restart that becomes a replacement is told as well: the name of an event is told once
        let (name, what) = match grant.action {
            GrantAction::Restart => ("granted", format!("restart of the engine in pod {}", grant.pod)),
            GrantAction::Replace => {
                ("replaced", format!("replacement of pod {}, {},", grant.pod, incurable(observed, grant)))
            }
        };
        let trial = plan.hold_status.as_ref().and_then(|hold| hold.pending());
        let on_trial =
            trial.is_some_and(|trial| trial.pod_uid == grant.pod_uid && trial.granted_at == grant.granted_at);
        let trial = if on_trial { " on trial, while all others are held" } else { "" };
        let asked = observed.pods.iter().find(|pod| pod.uid == grant.pod_uid).and_then(PodView::asked);
        let asked = asked.map(|wish| format!(", {}", wish.words())).unwrap_or_default();
        let note = format!("{what} granted{trial}{asked} (incident {incident})");
        let pod = (grant.pod.as_str(), grant.pod_uid.as_str());
        events.push(event(
            observed,
            format!("{incident}.{name}"),
            ("Warning", "RestartGranted", "Restart"),
            note,
            pod,
            now,
        ));
    }
    events.extend(on_hold(observed, plan, now));
    events.extend(tried(observed, plan, now));
    events.extend(delayed(observed, plan, now));
    events.extend(failed_revision(observed, plan, now));
    events.extend(newer_template(observed, plan, now));
    events.extend(suspect_node(observed, plan, now));
    events.extend(avoidance(observed, plan, now));
    for write in &plan.incidents.writes {
        let existing = observed.incidents.iter().find(|incident| incident.name_any() == write.name);
        let Some(outcome) = write.status.as_ref().and_then(|status| status.outcome.as_deref()) else { continue };
        let Some(spec) = write.spec.as_ref().or(existing.map(|incident| &incident.spec)) else { continue };
        if existing.is_some_and(is_closed) {
            continue;
        }
        let took = write.status.as_ref().and_then(|status| status.duration.as_deref());
        let took = took.map(|took| format!(" after {took}")).unwrap_or_default();
        let note = format!("incident {} ({}, pod {}) closed{took}: {outcome}", write.name, spec.class, spec.pod);
        let pod = (spec.pod.as_str(), spec.pod_uid.as_str());
        events.push(event(
            observed,
            format!("{}.closed", write.name),
            ("Normal", "IncidentClosed", "Close"),
            note,
            pod,
            now,
        ));
    }
    events
}

/// The name of the record of this episode.
fn incident(observed: &Observed, pod_uid: &str, episode: &str) -> String {
    name_among(&observed.incidents, &observed.infd.name_any(), pod_uid, episode)
}

/// Why no restart in place cures this pod.
fn incurable(observed: &Observed, grant: &Grant) -> String {
    let pod = observed.pods.iter().find(|pod| pod.uid == grant.pod_uid);
    let episode = pod.and_then(PodView::open_episode);
    if episode.is_some_and(Episode::unkillable) {
        return "whose engine outlives SIGKILL".to_owned();
    }
    if pod.is_some_and(restarts::is_left) {
        return "whose agent does not run and hears of no restart".to_owned();
    }
    let xids = episode.map(|episode| episode.xids.as_slice()).unwrap_or_default();
    match xids.iter().filter(|xid| xid.remedy.outlasts_a_restart()).max_by_key(|xid| xid.remedy) {
        Some(xid) => format!("which no restart in place cures ({})", xid.words()),
        None => "which restarts did not cure".to_owned(),
    }
}

/// Once when it begins: the condition was not there before. The name follows from the first stall that waits.
fn on_hold(observed: &Observed, plan: &Plan, now: Timestamp) -> Option<Event> {
    let (Hold::Deployment(why) | Hold::Fleet(why) | Hold::Place(why)) = &plan.hold else { return None };
    let before = observed.infd.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    let waiting = observed.pods.iter().find(|pod| grants::wants_slot(pod))?;
    if before.iter().any(|condition| condition.type_ == RESTARTS_HELD) {
        return None;
    }
    let name = format!("{}.held", incident(observed, &waiting.uid, &waiting.open_episode()?.id));
    let note = format!("{why}: no restart is granted, please look for the common cause");
    let pod = (waiting.name.as_str(), waiting.uid.as_str());
    Some(event(observed, name, ("Warning", "RestartsHeld", "Hold"), note, pod, now))
}

/// Once, when it is known what came of a restart on trial.
fn tried(observed: &Observed, plan: &Plan, now: Timestamp) -> Option<Event> {
    let before = observed.infd.status.as_ref().and_then(|s| s.recovery.hold.as_ref()?.trial.as_ref());
    let trial = plan.hold_status.as_ref()?.trial.as_ref()?;
    if before.is_some_and(|before| before.outcome == trial.outcome) {
        return None;
    }
    let (suffix, words, note) = match trial.outcome {
        TrialOutcome::Pending => return None,
        TrialOutcome::Helped => ("helped", ("Normal", "TrialHelped", "Try"), "helped: it serves, the next one follows"),
        TrialOutcome::Failed => {
            ("in-vain", ("Warning", "TrialFailed", "Try"), "was in vain: the next one waits longer")
        }
    };
    let name = format!("{}.{suffix}", incident(observed, &trial.pod_uid, &trial.episode));
    let note = format!("the restart of pod {} on trial {note}", trial.pod);
    Some(event(observed, name, words, note, (&trial.pod, &trial.pod_uid), now))
}

/// Once for each stall that has to wait because the last recovery of its pod is too young: before its agent is told for the first time.
fn delayed(observed: &Observed, plan: &Plan, now: Timestamp) -> Vec<Event> {
    let told = plan.backing_off.iter().filter_map(|(uid, until)| {
        let granted = plan.grants.iter().any(|grant| grant.pod_uid == *uid);
        let pod = observed.pods.iter().find(|pod| pod.uid == *uid && !granted && noted(pod).is_none())?;
        let name = format!("{}.delayed", incident(observed, &pod.uid, &pod.open_episode()?.id));
        let note = format!(
            "pod {} was recovered a short while ago and stalls again: the next recovery waits until {until:.0}",
            pod.name
        );
        let words = ("Warning", "RestartDelayed", "BackOff");
        Some(event(observed, name, words, note, (&pod.name, uid), now))
    });
    told.collect()
}

/// Once, when a revision is remembered as failed.
fn failed_revision(observed: &Observed, plan: &Plan, now: Timestamp) -> Option<Event> {
    let before = observed.infd.status.as_ref().map(|s| s.rollout.failed.as_slice()).unwrap_or_default();
    let failed = plan.rollout.memory.failed.iter().find(|failed| !before.contains(failed))?;
    let (what, suffix, words) = match plan.rollout.state {
        State::Held(_) => ("held where it stands", "held", ("Warning", "RolloutHeld", "Hold")),
        State::Failed(_) => ("failed, and there is no way back", "failed", ("Warning", "RolloutFailed", "Fail")),
        _ => ("rolled back", "rolled-back", ("Warning", "RolledBack", "RollBack")),
    };
    let name = format!("{}.{}.{suffix}", observed.infd.name_any(), failed.revision);
    let note = format!("revision {} {what}: {}", failed.revision, failed.message);
    let event = event(observed, name, words, note, ("", ""), now);
    Some(Event { related: None, ..event })
}

/// Once, when it is seen that this version of the operator would write the pods in another way.
fn newer_template(observed: &Observed, plan: &Plan, now: Timestamp) -> Option<Event> {
    let memory = &plan.rollout.memory;
    let before = observed.infd.status.as_ref().map(|s| s.rollout.newer.as_str()).unwrap_or_default();
    if memory.newer.is_empty() || memory.newer == before {
        return None;
    }
    let name = format!("{}.{}.newer", observed.infd.name_any(), memory.newer);
    let note = format!(
        "this version of the operator would make revision {} of the same spec; the replicas stay as they are until the spec changes, or spec.rollout.attempt",
        memory.newer
    );
    let event = event(observed, name, ("Normal", "TemplateKept", "Keep"), note, ("", ""), now);
    Some(Event { related: None, ..event })
}

/// For tools that look after nodes: stalls come back on this one.
fn suspect_node(observed: &Observed, plan: &Plan, now: Timestamp) -> Option<Event> {
    let node = plan.suspect_node.as_ref()?;
    let newest = plan.grants.last()?;
    let name = format!("{}.node", incident(observed, &newest.pod_uid, &newest.episode));
    let note = format!("engines on node {node} stall again and again; its GPU or driver may be broken");
    Some(about_node(event(observed, name, ("Warning", "NodeSuspect", "Report"), note, (node, ""), now), node))
}

/// New pods keep away from a place, or need not any longer although its time is not over.
fn avoidance(observed: &Observed, plan: &Plan, now: Timestamp) -> Vec<Event> {
    let held = avoid::held(&observed.infd);
    let begun = plan.avoid.iter().filter(|place| !held.contains(place)).map(|place| {
        let gpus =
            if place.gpu_uuids.is_empty() { String::new() } else { format!(" ({})", place.gpu_uuids.join(", ")) };
        let why = match place.because {
            AvoidedBecause::RestartsDidNotCure => "restarts did not cure a pod there",
            AvoidedBecause::Unkillable => "an engine there outlives SIGKILL",
            AvoidedBecause::GpuFault => "no restart of an engine mends a GPU there",
        };
        let xids: String = place.xids.iter().map(|xid| format!("; {}", xid.words())).collect();
        let note = format!("new pods keep away from node {}{gpus} until {}: {why}{xids}", place.node, place.until);
        (place, ("Warning", "NodeAvoided", "Avoid"), note)
    });
    let span = span_of(&observed.infd.spec.recovery);
    let early = |place: &&Avoided| in_force(&place.until, span, now);
    let gone = |place: &&Avoided| !plan.avoid.iter().any(|still| still.node == place.node);
    let lifted = held.iter().filter(early).filter(gone).map(|place| {
        let (type_, why) = match avoid::why_lifted(place, observed.ground()) {
            Lifted::NodeStartedAnew => ("Normal", "it was started anew"),
            Lifted::NoOtherPlace => ("Warning", "a pod found no other place"),
        };
        (place, (type_, "AvoidanceLifted", "Avoid"), format!("node {} is avoided no longer: {why}", place.node))
    });
    let told = begun.chain(lifted).map(|(place, words, note)| {
        let of = format!("{}/{}/{}", place.node, place.until, words.1);
        let name = format!("{}-{}.avoid", observed.infd.name_any(), short(&of, 6));
        about_node(event(observed, name, words, note, (&place.node, ""), now), &place.node)
    });
    told.collect()
}

fn about_node(mut event: Event, node: &str) -> Event {
    let reference =
        ObjectReference { kind: Some("Node".into()), name: Some(node.to_owned()), ..ObjectReference::default() };
    event.related = Some(ObjectReference { api_version: Some("v1".into()), ..reference });
    event
}

/// Publishes, begun in order. Where the server does not answer the rest is dropped: the next pass is worth more.
pub async fn publish(calls: &Calls, events: Vec<Event>) {
    let creates: Vec<_> = events.iter().map(|event| create(calls, event).boxed()).collect();
    let mut published = stream::iter(creates).buffered(AT_ONCE);
    while let Some(result) = published.next().await {
        if matches!(result, Err(CallError::Deadline { .. } | CallError::NotLeader { .. })) {
            return;
        }
    }
}

async fn create(calls: &Calls, event: &Event) -> Result<(), CallError> {
    let api: Api<Event> = Api::namespaced(calls.client.clone(), &event.namespace().unwrap_or_default());
    let name = event.name_any();
    let result = calls.create(&api, &name, event).await;
    if let Err(error) = &result {
        tracing::warn!(event = name, note = event.note, %error, "event not published");
    }
    result
}

fn is_closed(incident: &EngineIncident) -> bool {
    incident.status.as_ref().is_some_and(|status| status.outcome.is_some())
}

fn event(
    observed: &Observed,
    name: String,
    (type_, reason, action): (&str, &str, &str),
    note: String,
    (pod, pod_uid): (&str, &str),
    now: Timestamp,
) -> Event {
    let infd = &observed.infd;
    let namespace = infd.namespace();
    let pod = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.to_owned()),
        namespace: namespace.clone(),
        uid: Some(pod_uid.to_owned()),
        ..ObjectReference::default()
    };
    Event {
        metadata: ObjectMeta { name: Some(name), namespace, ..ObjectMeta::default() },
        event_time: Some(MicroTime(now)),
        type_: Some(type_.to_owned()),
        reason: Some(reason.to_owned()),
        action: Some(action.to_owned()),
        note: Some(cut(note)),
        regarding: Some(infd.object_ref(&())),
        related: Some(pod),
        reporting_controller: Some(format!("truebeat.io/{FIELD_MANAGER}")),
        reporting_instance: Some(FIELD_MANAGER.to_owned()),
        ..Event::default()
    }
}

/// What the server takes of a note: it counts bytes, and refuses an event that has more.
fn cut(mut note: String) -> String {
    note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
    note
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
