//! Stage 6, pure: what the status should say, on every path, errors included (P13). The write is `execute`'s.

use crds::{
    InferenceDeployment, InferenceDeploymentStatus, RecoveryStatus,
    conditions::{self, Finding, Reason},
};
use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::Value;

use super::{
    build::{revision, selector},
    escalate::Hold,
    execute::StepError,
    hindrance,
    observed::{EpisodeView, Observed, PodView},
    plan::Plan,
    rollout::State,
};
use crate::client::CallError;

/// What is repeated of a refusal: an admission webhook may say anything.
const REFUSAL_CHARS_MAX: usize = 1_000;

/// The status after a pass: `problems` are the spec's, `errors` those of the writes.
pub fn status(
    observed: &Observed,
    plan: &Plan,
    problems: &[String],
    errors: &[StepError],
    now: Timestamp,
) -> InferenceDeploymentStatus {
    let infd = &observed.infd;
    let pods: Vec<_> = observed.pods.iter().filter(|pod| !pod.leaving).collect();
    let count = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
    let ready = count(pods.iter().filter(|pod| pod.ready).count());
    let generation = infd.metadata.generation.unwrap_or_default();
    let mut findings = vec![ready_finding(observed, plan, ready, problems)];
    let stalled = stalled(plan, problems, errors);
    // Never both: whoever waits by kstatus would wait for ever for what needs a person.
    findings.extend(reconciling(observed, plan, errors).filter(|_| stalled.is_none()));
    findings.extend(stalled);
    findings.extend(held(plan));
    findings.extend(scaling_held(plan));
    findings.push(progressing(observed, plan, now));
    findings.push(readable(observed));
    findings.extend(health_lies(observed));
    findings.extend(doubted(observed));
    let old = infd.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    InferenceDeploymentStatus {
        observed_generation: generation,
        replicas: count(pods.len()),
        ready_replicas: ready,
        progressing_replicas: count(pods.iter().filter(|pod| pod.progresses(now)).count()),
        fenced_replicas: count(pods.iter().filter(|pod| pod.fenced() || pod.fence.is_some()).count()),
        fenced_by_person: count(pods.iter().filter(|pod| pod.fenced_by_person()).count()),
        stalled_replicas: count(pods.iter().filter(|pod| pod.stalled()).count()),
        open_incidents: count(plan.incidents.open),
        selector: selector(&infd.name_any()),
        conditions: conditions::merge(old, &findings, generation, now),
        recovery: RecoveryStatus {
            grants: plan.grants.clone(),
            recent: plan.recent.clone(),
            avoid: plan.avoid.clone(),
            broken: plan.broken.clone(),
            hold: plan.hold_status.clone(),
        },
        rollout: plan.rollout.memory.clone(),
    }
}

/// The status to store before any pod hears of a grant: the new budget and counts under the old conditions.
pub fn early(observed: &Observed, plan: &Plan, now: Timestamp) -> InferenceDeploymentStatus {
    let old = observed.infd.status.clone().unwrap_or_default();
    InferenceDeploymentStatus {
        observed_generation: old.observed_generation, // the conditions speak of that one
        conditions: old.conditions,
        ..status(observed, plan, &[], &[], now)
    }
}

/// The status of one whose pods or records may not be read: who has to do what, beside what was known last.
pub fn blind(infd: &InferenceDeployment, error: &CallError, now: Timestamp) -> InferenceDeploymentStatus {
    let old = infd.status.clone().unwrap_or_default();
    let message = format!("nothing is known of its replicas, and nothing is done: {error}");
    let told = Finding { type_: conditions::STALLED, status: "True", reason: Reason::Refused, message };
    let fresh = conditions::merge(&old.conditions, &[told], infd.metadata.generation.unwrap_or_default(), now);
    let kept = old
        .conditions
        .into_iter()
        .filter(|c| ![conditions::STALLED, conditions::RECONCILING].contains(&c.type_.as_str()));
    InferenceDeploymentStatus { conditions: kept.chain(fresh).collect(), ..old }
}

fn ready_finding(observed: &Observed, plan: &Plan, ready: i32, problems: &[String]) -> Finding {
    let wanted = observed.infd.spec.replicas;
    let (status, reason, message) = if let Some(problem) = problems.first() {
        ("False", Reason::InvalidSpec, problem.clone())
    } else if let Some((reason, message)) = rollout_failed(plan) {
        ("False", reason, message)
    } else if let Some(message) = refused(observed, plan) {
        ("False", Reason::PodsRefused, format!("{ready} of {wanted} replicas ready: {message}"))
    } else if rolling_out(observed, plan) {
        let why = hindrance::ending(observed, plan);
        ("False", Reason::RolloutInProgress, format!("{ready} of {wanted} replicas ready, rollout in progress{why}"))
    } else if ready < wanted {
        let (aside, names) = set_aside(observed);
        let enough = usize::try_from(wanted - ready).is_ok_and(|missing| missing <= aside);
        let reason = if enough { Reason::FencedByPerson } else { Reason::ReplicasNotReady };
        let names = if aside > 0 { format!("; a person keeps out of traffic: {names}") } else { names };
        let why = hindrance::ending(observed, plan);
        ("False", reason, format!("{ready} of {wanted} replicas ready{names}{why}"))
    } else if wanted == 0 {
        ("True", Reason::ScaledToZero, "scaled to 0 replicas".to_owned())
    } else {
        ("True", Reason::AllReplicasReady, format!("{ready} of {wanted} replicas ready"))
    };
    Finding { type_: conditions::READY, status, reason, message }
}

/// How many replicas are not ready because of a person, and which these are, each with that person's words.
fn set_aside(observed: &Observed) -> (usize, String) {
    let pods = observed.pods.iter().filter(|pod| !pod.leaving && !pod.ready && pod.fenced_by_person());
    let words = pods.filter_map(|pod| Some(format!("{} ({})", pod.name, pod.fence.as_ref()?.words())));
    let words: Vec<String> = words.collect();
    (words.len(), words.join(", "))
}

/// What keeps a Deployment from being whole, where it is what the API server admits.
fn refused(observed: &Observed, plan: &Plan) -> Option<String> {
    let why = observed.pods_refused().filter(|_| rolling_out(observed, plan))?;
    let brief: String = why.chars().take(REFUSAL_CHARS_MAX).collect();
    Some(format!("the API server refuses to make a pod: {brief}"))
}

/// Is the Deployment still on its way to the newest template or size? A frozen replica alone is no rollout. What was looked at is the world
/// before this pass: a template that the pass itself brings in is run by nobody yet, however whole the Deployment was. One that another
/// version of the operator would make, and does not, is none: the target is what stands.
fn rolling_out(observed: &Observed, plan: &Plan) -> bool {
    if observed.unread.contains_key("Deployment") {
        return false; // its pods alone tell, and why is told
    }
    let Some(live) = observed.children.get("Deployment").filter(|_| observed.going.is_empty()) else { return true };
    let target = &plan.rollout.memory.target;
    if !target.is_empty() && revision::of(&live["spec"]["template"]) != target {
        return true;
    }
    let (spec, status) = (&live["spec"], &live["status"]);
    let number = |value: &Value| value.as_i64().unwrap_or_default();
    let wanted = i64::from(observed.infd.spec.replicas);
    number(&status["observedGeneration"]) < number(&live["metadata"]["generation"])
        || number(&spec["replicas"]) != wanted
        || number(&status["updatedReplicas"]) != wanted
        || number(&status["replicas"]) != wanted
}

/// Whoever waits for a rollout waits until it can no longer be taken back.
fn unproven(observed: &Observed, plan: &Plan) -> bool {
    let memory = &plan.rollout.memory;
    observed.infd.spec.replicas > 0 && memory.target != memory.stable
}

/// kstatus: only while true. Errors that may pass by themselves keep it up.
fn reconciling(observed: &Observed, plan: &Plan, errors: &[StepError]) -> Option<Finding> {
    let transient = errors.iter().find(|error| !error.lasting);
    let (reason, message) = match transient {
        Some(error) => (Reason::ApiError, error.to_string()),
        None if !observed.going.is_empty() => {
            let kinds = observed.going.join(", ");
            (
                Reason::RolloutInProgress,
                format!("what has the name of a child is being deleted, and is waited for: {kinds}"),
            )
        }
        None if let Some(message) = refused(observed, plan) => (Reason::PodsRefused, message),
        None if rolling_out(observed, plan) => {
            let why = hindrance::ending(observed, plan);
            (Reason::RolloutInProgress, format!("the Deployment rolls out{why}"))
        }
        None if unproven(observed, plan) => {
            let target = &plan.rollout.memory.target;
            let why = hindrance::ending(observed, plan);
            (Reason::RolloutInProgress, format!("not every replica of revision {target} has proven itself yet{why}"))
        }
        None => return None,
    };
    Some(Finding { type_: conditions::RECONCILING, status: "True", reason, message })
}

/// kstatus: only while true. A person is needed.
fn stalled(plan: &Plan, problems: &[String], errors: &[StepError]) -> Option<Finding> {
    let (reason, message) = if !problems.is_empty() {
        (Reason::InvalidSpec, problems.join("; "))
    } else if !plan.foreign.is_empty() {
        let names = plan.foreign.join(", ");
        (
            Reason::Refused,
            format!("{names} already exists and belongs to somebody else: rename this object or remove that one"),
        )
    } else if let Some(error) = errors.iter().find(|error| error.lasting) {
        (Reason::Refused, error.to_string())
    } else {
        rollout_failed(plan)?
    };
    Some(Finding { type_: conditions::STALLED, status: "True", reason, message })
}

/// What runs is not what the spec asks for, and will not be without another spec.
fn rollout_failed(plan: &Plan) -> Option<(Reason, String)> {
    match &plan.rollout.state {
        State::Well => None,
        State::Failed(why) => Some((Reason::RolloutFailed, why.clone())),
        State::Held(failed) => {
            let message = format!(
                "revision {} is held where it stands: {}; change the spec, raise spec.rollout.attempt, or let spec.rollout.onFailure roll back",
                failed.revision, failed.message
            );
            Some((Reason::RolloutFailed, message))
        }
        State::RolledBack(failed) => {
            let (revision, target) = (&failed.revision, &plan.rollout.memory.target);
            let stuck =
                plan.stuck.as_ref().map(|why| format!("; that does not move ({why}), and what stands is recovered"));
            let message = format!(
                "revision {revision} was rolled back to {target}: {}{}; change the spec, or raise spec.rollout.attempt to try again",
                failed.message,
                stuck.unwrap_or_default()
            );
            Some((Reason::RolledBack, message))
        }
    }
}

/// Present only while it is so: an autoscaler's wish waits.
fn scaling_held(plan: &Plan) -> Option<Finding> {
    let message = plan.scaling_held.clone()?;
    Some(Finding { type_: conditions::SCALING_HELD, status: "True", reason: Reason::IncidentOpen, message })
}

/// Present only while it is so: somebody must look (I2).
fn held(plan: &Plan) -> Option<Finding> {
    let (reason, message) = match &plan.hold {
        Hold::No => return None,
        Hold::Deployment(why) => (Reason::CommonCause, why),
        Hold::Fleet(why) => (Reason::FleetCommonCause, why),
        Hold::Place(why) => (Reason::PlaceCommonCause, why),
    };
    let where_ = if matches!(plan.hold, Hold::Place(_)) { " there" } else { "" };
    let trial = &plan.trial;
    let message = format!("{message}: a common cause is likely, no restart is granted{where_}{trial}");
    Some(Finding { type_: conditions::RESTARTS_HELD, status: "True", reason, message })
}

/// Silence is `Unknown`, never health, and so is what was said before it (I4).
fn progressing(observed: &Observed, plan: &Plan, now: Timestamp) -> Finding {
    let pods: Vec<_> = observed.pods.iter().filter(|pod| !pod.leaving).collect();
    let frozen: Vec<&str> =
        pods.iter().filter(|pod| pod.progressing == Some(false)).map(|pod| pod.name.as_str()).collect();
    let silent = pods.iter().filter(|pod| pod.progressing.is_none()).count();
    let away = |pod: &&&PodView| pod.progressing == Some(true) && !pod.ready && !pod.fenced_by_person();
    let unvouched: Vec<&str> = pods.iter().filter(away).map(|pod| pod.name.as_str()).collect();
    let (aside, set_aside) = set_aside(observed);
    let old: Vec<&str> = pods
        .iter()
        .filter(|pod| pod.ready && pod.progressing == Some(true) && pod.word_is_old(now))
        .map(|pod| pod.name.as_str())
        .collect();
    let (status, reason, message) = if !frozen.is_empty() {
        let names = frozen.join(", ");
        (
            "False",
            Reason::EngineNotProgressing,
            format!("{} of {} engines make no progress: {names}", frozen.len(), pods.len()),
        )
    } else if pods.is_empty() {
        ("Unknown", Reason::NoReplicas, "there is no pod".to_owned())
    } else if silent > 0 {
        ("Unknown", Reason::NotReported, format!("{silent} of {} agents have not reported", pods.len()))
    } else if !old.is_empty() {
        let names = old.join(", ");
        ("Unknown", Reason::NotHeard, format!("the agent of {names} has not renewed its word, and nobody fences there"))
    } else if !unvouched.is_empty() {
        let names = unvouched.join(", ");
        (
            "Unknown",
            Reason::NotVouchedFor,
            format!("progress was the last word of {names}, and the kubelet says that it is not ready to serve"),
        )
    } else if aside > 0 {
        let message = format!("{aside} of {} engines are kept out of traffic by a person: {set_aside}", pods.len());
        ("Unknown", Reason::FencedByPerson, message)
    } else {
        ("True", Reason::AllProgressing, format!("{} of {} engines make progress", pods.len(), pods.len()))
    };
    // whatever its agent says by now, or no longer says: it is the open episode that waits
    let waits = plan.waits.as_ref().map(|why| format!("; a restart {why}")).unwrap_or_default();
    let message = message + &waits;
    Finding { type_: conditions::ENGINES_PROGRESSING, status, reason, message }
}

/// Present only while it is so: a router that goes by `/health` alone needs the gate, or this.
fn health_lies(observed: &Observed) -> Option<Finding> {
    let lies = |pod: &&PodView| !pod.leaving && pod.health_lies;
    let names: Vec<&str> = observed.pods.iter().filter(lies).map(|pod| pod.name.as_str()).collect();
    let message = format!("/health of a stalled engine answers 200: {}", names.join(", "));
    let told = Finding { type_: conditions::HEALTH_LIES, status: "True", reason: Reason::Answers200, message };
    (!names.is_empty()).then_some(told)
}

/// Present only while it is so: nobody acts on what may be somebody else's, and somebody must look (A16).
fn doubted(observed: &Observed) -> Option<Finding> {
    let names = &observed.doubted;
    let message = format!(
        "{} pods are labelled as replicas of this and owned by no ReplicaSet of it, so nothing is done with them: {}",
        names.len(),
        names.join(", ")
    );
    let told = Finding { type_: conditions::OBJECTS_DOUBTED, status: "True", reason: Reason::OwnerMismatch, message };
    (!names.is_empty()).then_some(told)
}

fn readable(observed: &Observed) -> Finding {
    let faults: Vec<String> = observed
        .pods
        .iter()
        .filter_map(|pod| match &pod.episode {
            EpisodeView::Unreadable(why) => Some(format!("{}: {why}", pod.name)),
            _ => None,
        })
        .collect();
    let (status, reason, message) = if faults.is_empty() {
        ("True", Reason::EpisodesValid, String::new())
    } else {
        ("False", Reason::EpisodeUnreadable, faults.join("; "))
    };
    Finding { type_: conditions::EPISODES_READABLE, status, reason, message }
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
