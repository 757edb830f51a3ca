//! Progress-gated rollouts, pure: which revision the replicas are brought to, when a new one has failed, and where to go back to.
//!
//! Kubernetes' own rolling update is the motor. A new replica is ready only when it delivers (the agent's word, by its readiness), counts
//! after `soakSeconds`, and no further one is replaced before. What is added here is the judgement: a new revision whose replicas stall,
//! crash or never come to count is taken back (or held, by policy), and it is remembered as failed before anything is changed, so that no
//! crash and no other leader tries it once more. The spec stays what its author wrote; the status tells what runs instead.
//!
//! A spec that nobody has changed is no reason to take replicas down: where another version of the operator would write their pods in
//! another way, they stay as they were made.

use crds::rollout::{FailedRevision, OnFailure, RolloutStatus};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::{
    blame::failure,
    build::{Child, revision},
    escalate::{is_past, older},
    observed::{Observed, PodView, owned_by},
};

const FAILED_MAX: usize = 10;
/// A rollback gets so long before anybody asks whether it moves.
const MOVES_BY: SignedDuration = SignedDuration::from_secs(30);
/// A record may be waited for before it begins, and a leader may die.
const BEGUN_BY: SignedDuration = SignedDuration::from_mins(2);

/// Where a look at a rollout came to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Course {
    /// The memory after this look.
    pub memory: RolloutStatus,
    pub state: State,
}

impl Course {
    /// The revision that is taken back; empty: none is.
    pub fn taken_back(&self) -> &str {
        match &self.state {
            State::RolledBack(failed) => &failed.revision,
            State::Well | State::Held(_) | State::Failed(_) => "",
        }
    }
}

/// How it goes.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum State {
    /// As it should, or there is no rollout.
    #[default]
    Well,
    /// The revision of the spec has failed; the last good one stands in its place.
    RolledBack(FailedRevision),
    /// It has failed and, by policy, stays as far as it has come: no further replica is brought to it, and none is brought back.
    Held(FailedRevision),
    /// It has failed and there is no way back; why, for people.
    Failed(String),
}

/// Is the history of templates needed to decide? Only while another revision than the last good one is wanted or stands, one has failed, or
/// there is one that this version of the operator does not make.
pub fn needs_history(memory: &RolloutStatus, deployment: Option<&Value>) -> bool {
    let standing = deployment.map(|live| revision::of(&live["spec"]["template"])).unwrap_or_default();
    let unsettled = !memory.stable.is_empty() && standing != memory.stable;
    unsettled || !memory.failed.is_empty() || !memory.newer.is_empty()
}

/// Must `memory` stand in the API before the children are changed? A revision is remembered as failed before it is taken back, or a crash
/// in between would have it tried once more (P1); and what the pods are brought to is remembered before they are, or an operator of another
/// version that comes after the crash would not know what it finds, and replace it by its own.
pub fn stored_first(observed: &Observed, memory: &RolloutStatus) -> bool {
    let before = observed.infd.status.as_ref().map(|status| status.rollout.clone()).unwrap_or_default();
    let anew = (&memory.wanted, &memory.spec) != (&before.wanted, &before.spec);
    memory.failed != before.failed || (anew && observed.children.contains_key("Deployment"))
}

/// Judges the rollout, and where the spec's own revision has failed does to the wanted Deployment what the policy says.
pub fn steer(observed: &Observed, desired: &mut [Child], now: Timestamp) -> Course {
    let mut memory = observed.infd.status.as_ref().map(|status| status.rollout.clone()).unwrap_or_default();
    let Some(child) = desired.iter_mut().find(|child| child.resource.kind == "Deployment") else {
        return Course { memory, state: State::Well };
    };
    let spec = &mut child.body["spec"];
    let wanted = stands_for(observed, &mut memory, &mut spec["template"]);
    if complete(observed, &wanted) {
        memory.stable.clone_from(&wanted);
        memory.stable_spec.clone_from(&memory.spec);
        memory.failed.retain(|failed| failed.revision != wanted);
    }
    let mut state = State::Well;
    if memory.stable != wanted {
        let known = memory.failed.iter().find(|failed| failed.revision == wanted).cloned();
        if let Some(failure) = known.or_else(|| failure(observed, &wanted, now)) {
            // also where there is no way back: a replica that is up between two crashes is no proof of it
            remember(&mut memory.failed, &failure);
            state = verdict(observed, &memory.stable, failure, spec);
        }
    }
    revision::of(&spec["template"]).clone_into(&mut memory.target);
    Course { memory, state }
}

/// The revision that the spec stands for, made true in `template`, which is this operator's. It is that one if the spec says something
/// else than it did; if only the operator is another, what was made of the spec stays, as long as the history still has it.
fn stands_for(observed: &Observed, memory: &mut RolloutStatus, template: &mut Value) -> String {
    let fresh = revision::of(template).to_owned();
    let spec = revision::of_spec(&observed.infd.spec);
    remember_what_stands(observed, memory, &spec);
    let kept = made_before(observed, memory, &fresh, &spec);
    memory.spec = spec;
    match kept {
        Some((revision, kept)) => {
            *template = kept;
            memory.wanted = revision;
            memory.newer = fresh;
        }
        None => {
            memory.wanted = fresh;
            memory.newer.clear();
        }
    }
    memory.wanted.clone()
}

/// An operator from before this memory has left only what it brought the replicas to; of the spec of today, if it has seen that one.
fn remember_what_stands(observed: &Observed, memory: &mut RolloutStatus, spec: &str) {
    let seen = observed.infd.status.as_ref().map(|status| status.observed_generation);
    if memory.wanted.is_empty() && memory.failed.is_empty() && seen == observed.infd.metadata.generation {
        memory.wanted.clone_from(&memory.target);
        spec.clone_into(&mut memory.spec);
    }
}

/// Another revision than `fresh` that was made of the same spec, and its template: the one wanted last, or the last good one.
fn made_before(observed: &Observed, memory: &RolloutStatus, fresh: &str, spec: &str) -> Option<(String, Value)> {
    if memory.spec == spec && memory.wanted == fresh {
        return None;
    }
    let made = [(&memory.spec, &memory.wanted), (&memory.stable_spec, &memory.stable)];
    made.into_iter().filter(|(of, revision)| *of == spec && *revision != fresh).find_map(|(_, revision)| {
        // one that has failed and is gone needs no template: the last good one will take its place
        let failed = memory.failed.iter().any(|failed| failed.revision == *revision);
        let template = template_of(observed, revision)
            .or_else(|| failed.then(|| template_of(observed, &memory.stable)).flatten())?;
        Some((revision.clone(), template))
    })
}

/// What becomes of a revision that has failed, made true in the Deployment's wanted `spec`.
fn verdict(observed: &Observed, stable: &str, failure: FailedRevision, spec: &mut Value) -> State {
    let standing = standing(observed, spec);
    let hold = observed.infd.spec.rollout.on_failure == OnFailure::Hold;
    let held_at_all = hold && !standing.is_empty();
    // Where none of it stands there is nothing to hold: all that comes up next would come up on it.
    let back = template_of(observed, stable).filter(|_| !hold || !standing.contains(&failure.revision.as_str()));
    match back {
        Some(good) => {
            spec["template"] = good;
            State::RolledBack(failure)
        }
        // The Deployment controller replaces no replica of a paused Deployment, it only keeps their number.
        None if held_at_all => {
            spec["paused"] = Value::Bool(true);
            State::Held(failure)
        }
        // A paused Deployment that has no ReplicaSet is given none, and would never have a pod.
        None => State::Failed(why_not_back(stable, &failure)),
    }
}

/// The revisions of which replicas stand now and are to stand on: a pause keeps those, and brings in no other. Not the pods tell, which
/// outlive their Deployment for a moment, but its own ReplicaSets. One that has none, or is at zero, has nothing to keep.
fn standing<'a>(observed: &'a Observed, wanted: &Value) -> Vec<&'a str> {
    let Some(live) = observed.children.get("Deployment") else { return Vec::new() };
    if number(&wanted["replicas"]) == 0 || number(&live["spec"]["replicas"]) == 0 {
        return Vec::new();
    }
    match observed.children.get("ReplicaSet") {
        Some(_) => {
            let active = own_sets(observed).into_iter().filter(|set| number(&set["spec"]["replicas"]) > 0);
            active.map(|set| revision::of(&set["spec"]["template"])).collect()
        }
        // in the first rollout of all, before anything has failed, nobody has asked for the history
        None => vec![revision::of(&live["spec"]["template"])],
    }
}

fn why_not_back(stable: &str, failure: &FailedRevision) -> String {
    let why = if stable.is_empty() {
        "there is no earlier revision to go back to".to_owned()
    } else {
        format!("no ReplicaSet of the last good revision {stable} is left to go back to")
    };
    format!("revision {}: {}; {why}", failure.revision, failure.message)
}

fn remember(failed: &mut Vec<FailedRevision>, failure: &FailedRevision) {
    if !failed.contains(failure) {
        failed.push(failure.clone());
        failed.drain(..failed.len().saturating_sub(FAILED_MAX));
    }
}

/// Does every replica run `wanted`, and has each for which there is a place shown that it delivers, for as long as the policy asks? Together, once:
/// a judgement that waits for a moment at which nobody stalls and nobody sleeps may never end, and weeks later it would take a fleet back for
/// one ordinary stall.
fn complete(observed: &Observed, wanted: &str) -> bool {
    let Some(live) = observed.children.get("Deployment") else { return false };
    let (metadata, spec, status) = (&live["metadata"], &live["spec"], &live["status"]);
    let replicas = number(&spec["replicas"]);
    let pods: Vec<&PodView> = observed.pods.iter().filter(|pod| !pod.leaving).collect();
    let brought = revision::of(&spec["template"]) == wanted
        && number(&status["observedGeneration"]) >= number(&metadata["generation"])
        && replicas > 0
        && number(&status["updatedReplicas"]) == replicas
        && i64::try_from(pods.len()) == Ok(replicas)
        && pods.iter().all(|pod| pod.revision == wanted);
    brought && (all_deliver(&pods, number(&status["availableReplicas"])) || came_once(live, &pods))
}

/// Those for which the cluster has no place say nothing of the revision.
fn all_deliver(pods: &[&PodView], available: i64) -> bool {
    let delivers = |pod: &&PodView| pod.ready && pod.progressing == Some(true) && pod.open_episode().is_none();
    let placed: Vec<_> = pods.iter().filter(|pod| pod.unschedulable_since.is_none()).collect();
    let count = i64::try_from(placed.len()).unwrap_or(i64::MAX);
    count > 0 && available >= count && placed.into_iter().all(delivers)
}

/// Were all available at the same time, as the Deployment itself remembers? That outlasts a stall, a sleep and a scale-out. A template that came
/// while there were no replicas was there at once: what is older than every replica tells of none.
fn came_once(live: &Value, pods: &[&PodView]) -> bool {
    let came = condition(live, "Progressing").filter(|c| c["reason"] == "NewReplicaSetAvailable");
    let time = |text: Option<&str>| text?.parse::<Timestamp>().ok();
    let Some(at) = time(came.and_then(|c| c["lastUpdateTime"].as_str())) else { return false };
    pods.iter().any(|pod| time(pod.created_at.as_deref()).is_some_and(|created| created <= at))
}

/// Why a Deployment that was taken back cannot get further, in words; `None`: it moves, or has not had its time. Its controller takes away no
/// replica, frozen or not, while one more would be missing for it (`reconcileOldReplicaSets` of Kubernetes), and makes none without a place
/// or a right to it. So what stands stands for long, and recovery is all that it has.
pub fn stuck(observed: &Observed, course: &Course, now: Timestamp) -> Option<String> {
    let State::RolledBack(failed) = &course.state else { return None };
    let live = observed.children.get("Deployment")?;
    let now = &now.to_string();
    if !is_past(&failed.at, MOVES_BY, now) {
        return None; // the controller may not have looked yet
    }
    let paused = live["spec"]["paused"] == true;
    if revision::of(&live["spec"]["template"]) != course.memory.target {
        let infd = &observed.infd;
        let seen = infd.status.as_ref().map(|status| status.observed_generation) == infd.metadata.generation;
        let refused = seen && !paused && is_past(&failed.at, BEGUN_BY, now);
        return refused.then(|| "the Deployment could not be changed".to_owned());
    }
    let unplaced =
        |pod: &&PodView| !pod.leaving && pod.unschedulable_since.as_deref().is_some_and(|at| older(at, MOVES_BY, now));
    if paused {
        return Some("the Deployment is paused".to_owned());
    }
    if let Some(pod) = observed.pods.iter().find(unplaced) {
        return Some(format!("there is no place for {}", pod.name));
    }
    if observed.pods_refused().is_some() {
        return Some("the API server refuses to make a pod".to_owned());
    }
    (reason(live, "Progressing") == "ProgressDeadlineExceeded").then(|| "its replicas do not come up".to_owned())
}

/// The reason of a condition of the Deployment; empty: it has none.
pub fn reason<'a>(deployment: &'a Value, type_: &str) -> &'a str {
    condition(deployment, type_).and_then(|c| c["reason"].as_str()).unwrap_or_default()
}

fn condition<'a>(deployment: &'a Value, type_: &str) -> Option<&'a Value> {
    deployment["status"]["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == type_)
}

/// The Deployment's own ReplicaSets. One of somebody else may bear the same labels, and would bring its author's pods in under our name
/// (P9, A16).
pub fn own_sets(observed: &Observed) -> Vec<&Value> {
    let uid = observed.children.get("Deployment").and_then(|live| live["metadata"]["uid"].as_str()).unwrap_or_default();
    let sets = observed.children.get("ReplicaSet").and_then(Value::as_array).into_iter().flatten();
    sets.filter(|set| owned_by(set, uid)).collect()
}

/// What `kubectl rollout restart` sets.
pub const RESTARTED: &str = "kubectl.kubernetes.io/restartedAt";

/// The template of an earlier revision, as the Deployment's own history has it, and as it was applied: without what the controller and
/// `kubectl rollout restart` add, unless the spec asks for just that. Of two of the same revision the older is ours, the other came of a change by hand.
pub fn template_of(observed: &Observed, revision: &str) -> Option<Value> {
    if revision.is_empty() {
        return None;
    }
    let deployment = observed.children.get("Deployment")?;
    let mut sets = own_sets(observed);
    sets.sort_by_key(|set| set["metadata"]["creationTimestamp"].as_str());
    let templates = sets.into_iter().chain([deployment]).map(|object| &object["spec"]["template"]);
    let mut template = templates.into_iter().find(|template| revision::of(template) == revision)?.clone();
    let asked = observed.infd.spec.pod_overlay.as_ref().is_some_and(|o| o.metadata.annotations.contains_key(RESTARTED));
    for (map, key) in
        [("labels", "pod-template-hash")].into_iter().chain((!asked).then_some(("annotations", RESTARTED)))
    {
        if let Some(map) = template["metadata"][map].as_object_mut() {
            map.remove(key);
        }
    }
    without_nulls(&mut template);
    Some(template)
}

/// An apply takes a null for a wish.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(without_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

pub fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or_default()
}

#[cfg(test)]
#[path = "rollout_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "blame_tests.rs"]
mod blame_tests;

#[cfg(test)]
#[path = "proven_tests.rs"]
mod proven_tests;

#[cfg(test)]
#[path = "stuck_tests.rs"]
mod stuck_tests;

#[cfg(test)]
#[path = "upgrade_tests.rs"]
mod upgrade_tests;
