//! One pass over one InferenceDeployment: gather → validate → build → plan → execute → status (O1). Level-triggered:
//! a pass looks at all there is and needs to know nothing of what happened before or why it was called.

pub mod avoid;
pub mod believed;
pub mod blame;
pub mod build;
pub mod drift;
pub mod elsewhere;
pub mod escalate;
pub mod events;
pub mod execute;
pub mod fleet;
pub mod gather;
pub mod grants;
pub mod hindrance;
pub mod ledger;
pub mod observed;
pub mod past;
pub mod places;
pub mod plan;
pub mod proofs;
pub mod quantity;
pub mod repairs;
pub mod restarts;
pub mod rollout;
pub mod scaling;
pub mod standing;
pub mod status;
#[cfg(test)]
pub mod testing;
pub mod trials;
pub mod unbuildable;
pub mod validate;
pub mod waits;

#[cfg(test)]
pub mod effects;
#[cfg(test)]
mod effects_table;
#[cfg(test)]
mod effects_words;
#[cfg(test)]
mod kstatus_tests;
#[cfg(test)]
mod model;

use std::{collections::BTreeSet, time::Duration};

use crds::{HoldScope, HoldStatus, InferenceDeployment};
use jiff::Timestamp;
use kube::ResourceExt;
use thiserror::Error;
use tokio::{sync::MutexGuard, time::Instant};

use self::{
    escalate::Hold,
    execute::StepError,
    fleet::{Fleet, Unseen},
    gather::Look,
    observed::Observed,
    plan::Plan,
};
use crate::{
    client::{CallError, Calls},
    metrics::Metrics,
};

/// While something is open the world is looked at this often even if every watch is silent.
const RECHECK_OPEN: Duration = Duration::from_secs(2);
/// While an object of somebody else has the name of a child, or one that goes: its going may be no event of any watch of ours.
const RECHECK_BLOCKED: Duration = Duration::from_secs(20);
/// Otherwise; heals what a lost event or a foreign hand left behind.
const RECHECK_QUIET: Duration = Duration::from_secs(300);

/// Why a pass must be repeated soon.
#[derive(Debug, Error)]
pub enum PassError {
    #[error("look at {name}: {source}")]
    Gather { name: String, source: CallError },
    #[error("store the status of {name}: {source}")]
    Status { name: String, source: CallError },
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Steps(Vec<StepError>),
}

/// One pass, with its name on whatever is logged in it. Returns when to look again if nothing happens; `None`: there is nothing to look at any more.
#[tracing::instrument(level = "debug", skip_all, fields(namespace = namespace, name = name))]
pub async fn pass(calls: &Calls, namespace: &str, name: &str) -> Result<Option<Duration>, PassError> {
    let named = |source| PassError::Gather { name: format!("{namespace}/{name}"), source };
    let observed = match gather::gather(calls, namespace, name).await.map_err(named)? {
        Look::Whole(observed) => *observed,
        Look::Blind(infd, source) => {
            let told = status::blind(&infd, &source, calls.wall.now());
            let stored = execute::status(calls, &infd, told).await;
            stored.map_err(|source| PassError::Status { name: format!("{namespace}/{name}"), source })?;
            return Err(named(source));
        }
        Look::Leaves => return Ok(forget(calls, (namespace, name), &[])),
        Look::Gone(pods) => return Ok(forget(calls, (namespace, name), &pods)),
    };
    let problems = validate::validate(&observed.infd);
    let planned = |fleet: Option<&Fleet>| {
        let now = calls.wall.now();
        if problems.is_empty() {
            plan::plan(&observed, observed.readable(build::build(&observed.infd)), fleet, now)
        } else {
            unbuildable::go_on(plan::plan(&observed, Vec::new(), fleet, now), &observed, now)
        }
    };
    let mut plan = planned(None);
    let before = observed.infd.status.as_ref().map(|s| s.recovery.clone()).unwrap_or_default();
    // Whoever grants looks at the whole fleet first, and nobody else grants meanwhile (I2). By its own replicas alone nobody can tell whether
    // the fleet is still held.
    let (mut turn, mut unlisted) = (None, None);
    let grants_anything = grants::fresh(&plan.grants, &before.grants).next().is_some();
    if grants_anything || before.hold.as_ref().is_some_and(HoldStatus::stands) {
        turn = Some(calls.fleet.turn.lock().await);
        plan = match gather::fleet(calls, &observed.infd).await {
            Ok(fleet) => planned(Some(&fleet)),
            // nothing is granted, and whether the hold is over nobody can tell; but all else goes on, or agents that hear nothing help themselves
            Err(source) => {
                let held = before.hold.as_ref().is_some_and(of_the_fleet);
                let unseen = Fleet::unseen(if held { Unseen::Held } else { Unseen::Free });
                let next = planned(Some(&unseen));
                if grants::fresh(&next.grants, &before.grants).next().is_some() {
                    // on a slot that it has: whether a common cause holds it nobody can tell
                    return Err(PassError::Gather { name: "the fleet".to_owned(), source });
                }
                unlisted = Some(source).filter(|_| grants_anything && !held);
                Plan { hold_status: before.hold.clone(), ..next }
            }
        };
    }
    let key = (namespace.to_owned(), name.to_owned());
    let held_back = calls.fleet.repairs.hold_back(&key, &mut plan.applies, Instant::now());
    tell(&calls.metrics, (namespace, name), &observed, &plan);
    let errors = execute_plan(calls, &observed, &plan, &problems, turn).await?;
    calls.metrics.grants_held.with_label_values(&[namespace, name]).set(i64::try_from(plan.grants.len()).unwrap_or(0));
    if let Some(source) = unlisted {
        return Err(PassError::Gather { name: "the fleet".to_owned(), source }); // whoever waits for a restart does so for this
    }
    if !errors.is_empty() {
        return Err(PassError::Steps(errors));
    }
    let quiet = recheck(&plan, &observed, calls.wall.now());
    Ok(Some(held_back.unwrap_or(quiet).min(quiet)))
}

fn of_the_fleet(hold: &HoldStatus) -> bool {
    hold.stands() && hold.scope == Some(HoldScope::Fleet)
}

/// There is no such InferenceDeployment, or soon will be none. Whatever pods are `left` have a label that is not what it was (A16), or their
/// owner is just being cleared away: nothing is done with them, and they are counted until they go.
fn forget(calls: &Calls, (namespace, name): (&str, &str), left: &[String]) -> Option<Duration> {
    calls.metrics.forget(namespace, name);
    calls.fleet.proofs.forget(namespace, name);
    calls.fleet.elsewhere.forget(namespace, name);
    calls.fleet.repairs.forget(namespace, name);
    calls.fleet.nodes.changed(); // what it had nodes marked for is no reason any more, and whoever uninstalls does not wait
    let count = i64::try_from(left.len()).ok().filter(|count| *count > 0)?;
    tracing::warn!(namespace, name, pods = ?left, "pods are labelled as those of an InferenceDeployment that is not there");
    calls.metrics.objects_doubted.with_label_values(&[namespace, name]).set(count);
    Some(RECHECK_BLOCKED)
}

/// What of a plan the metrics tell, whatever becomes of its writes.
fn tell(metrics: &Metrics, (namespace, name): (&str, &str), observed: &Observed, plan: &Plan) {
    let stay = || observed.pods.iter().filter(|pod| !pod.leaving);
    let by_person = stay().filter(|pod| pod.fenced_by_person()).count();
    let ready = stay().filter(|pod| pod.ready).count();
    let lies = stay().filter(|pod| pod.health_lies).count();
    for (gauge, value) in [
        (&metrics.restarts_held, i64::from(plan.hold != Hold::No)),
        (&metrics.trials_failed, i64::from(plan.hold_status.as_ref().filter(|h| h.stands()).map_or(0, |h| h.failed))),
        (&metrics.rollout_failed, i64::from(plan.rollout.state != rollout::State::Well)),
        (&metrics.fenced_by_person, i64::try_from(by_person).unwrap_or(i64::MAX)),
        (&metrics.objects_doubted, i64::try_from(observed.doubted.len() + plan.foreign.len()).unwrap_or(i64::MAX)),
        (&metrics.health_lies, i64::try_from(lies).unwrap_or(i64::MAX)),
        (&metrics.replicas_wanted, i64::from(observed.infd.spec.replicas)),
        (&metrics.replicas_ready, i64::try_from(ready).unwrap_or(i64::MAX)),
    ] {
        gauge.with_label_values(&[namespace, name]).set(value);
    }
    metrics.repaired_from_zero(namespace, name);
}

/// When to look again if nothing happens. A person's fence ends by an event, and nobody has to look after it meanwhile.
fn recheck(plan: &Plan, observed: &Observed, now: Timestamp) -> Duration {
    let on_trial = plan.hold_status.as_ref().is_some_and(|hold| hold.pending().is_some());
    if plan.incidents.open > plan.incidents.by_hand
        || !plan.grants.is_empty()
        || plan.scaling_held.is_some()
        || on_trial
    {
        return RECHECK_OPEN;
    }
    let in_order = plan.foreign.is_empty() && observed.doubted.is_empty() && observed.going.is_empty();
    let quiet = if in_order { RECHECK_QUIET } else { RECHECK_BLOCKED };
    let end = avoid::recheck(&plan.avoid, &observed.pods, now).and_then(|end| Duration::try_from(end).ok());
    quiet.min(end.unwrap_or(quiet).max(RECHECK_OPEN))
}

/// The writes in their order. An error of the status is an error of the pass: the budget may not be stored.
///
/// What pods hear of must be stored before (I2), so a change of the grants is written early: first of all where others wait for their turn to
/// grant, or one tenant's slow webhook would hold up the fleet. The conditions stay as they were: the errors that they tell of are known only
/// at the end. There they are written once, and only if they differ (P7): a failure that lasts must not make each pass write, for each write
/// would start the next pass.
///
/// Until it is recorded, an episode is told by its pod alone: whatever takes pods away comes after the incidents, for it may be the last
/// thing that this process does (P1), and waits for a while where the API refuses them. So does it come after the notes that say who goes
/// first, or a frozen replica outlives a scale-in. A pod that is to hear of a grant does not wait.
async fn execute_plan(
    calls: &Calls,
    observed: &Observed,
    plan: &Plan,
    problems: &[String],
    turn: Option<MutexGuard<'_, ()>>,
) -> Result<Vec<StepError>, PassError> {
    let infd = &observed.infd;
    let namespace = infd.namespace().unwrap_or_default();
    let named = |source| PassError::Status { name: format!("{namespace}/{}", infd.name_any()), source };
    let mut stored = infd.clone();
    if rollout::stored_first(observed, &plan.rollout.memory) {
        stored = execute::status(calls, infd, status::early(observed, plan, calls.wall.now())).await.map_err(named)?;
    }
    let had_the_turn = turn.is_some();
    if had_the_turn {
        stored = store_budget(calls, observed, plan, stored).await?;
    }
    drop(turn); // what was granted stands in the API: whoever looks at the fleet from now on counts it, and waits for no child of ours
    let mut errors: Vec<StepError> = observed.unread.values().cloned().collect();
    let replicas_may_go = plan.applies.iter().any(|child| child.resource.kind == "Deployment");
    let (mut untold, mut wait) = (BTreeSet::new(), false);
    if replicas_may_go {
        untold = execute::incidents(calls, infd, (&plan.incidents, &observed.incidents), &mut errors).await;
        wait = calls.fleet.proofs.wait(observed, &untold, proofs::pods_would_go(observed, plan), Instant::now());
    }
    let (order, pods) = plan::order_apart(&plan.pods, replicas_may_go);
    errors.extend(execute::pods(calls, &namespace, &order).await);
    errors.extend(execute::children(calls, infd, plan, wait).await);
    if !had_the_turn {
        stored = store_budget(calls, observed, plan, stored).await?;
    }
    errors.extend(execute::pods(calls, &namespace, &pods).await);
    if !replicas_may_go {
        untold = execute::incidents(calls, infd, (&plan.incidents, &observed.incidents), &mut errors).await;
    }
    let proof_goes = plan.replaces.iter().any(|pod| untold.contains(&pod.uid));
    if !calls.fleet.proofs.wait(observed, &untold, proof_goes, Instant::now()) {
        untold.clear();
    }
    errors.extend(execute::replaces(calls, infd, plan, &untold).await);
    // The status tells the truth on every path (P13).
    let wanted = status::status(observed, plan, problems, &errors, calls.wall.now());
    let told = execute::status(calls, &stored, wanted).await;
    events::publish(calls, events::of(observed, plan, calls.wall.now())).await;
    told.map_err(named)?;
    Ok(errors)
}

/// Stores the grants, their record and the places to keep away from, where any of these is another than it was; returns what stands then.
async fn store_budget(
    calls: &Calls,
    observed: &Observed,
    plan: &Plan,
    mut stored: InferenceDeployment,
) -> Result<InferenceDeployment, PassError> {
    let infd = &observed.infd;
    let name = format!("{}/{}", infd.namespace().unwrap_or_default(), infd.name_any());
    let named = |source| PassError::Status { name, source };
    let before = infd.status.as_ref().map(|s| s.recovery.clone()).unwrap_or_default();
    let (held, places) = (before.grants.as_slice(), (&plan.avoid, &plan.broken));
    if plan.grants != held || plan.recent != before.recent || places != (&before.avoid, &before.broken) {
        let early = status::early(observed, plan, calls.wall.now());
        stored = execute::status(calls, &stored, early).await.map_err(named)?;
        let fresh = grants::fresh(&plan.grants, held).count();
        calls.metrics.grants.inc_by(u64::try_from(fresh).unwrap_or(0));
        calls.fleet.nodes.changed();
    }
    Ok(stored)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crds::fence::Fence;
    use observed::PodView;
    use testing::{healthy, infd, looked, pod};

    /// When the next pass over these pods would be.
    fn next_look(pods: Vec<PodView>) -> Duration {
        let observed = looked(infd("chat"), pods);
        let now = "2026-01-01T00:02:00Z".parse().unwrap();
        recheck(&plan::plan(&observed, Vec::new(), None, now), &observed, now)
    }

    #[test]
    fn replicas_are_counted_and_a_persons_fence_apart_from_stalls() {
        let leaves = PodView { leaving: true, health_lies: true, ..healthy("d") };
        let fenced = PodView { fence: Fence::read("yes"), ready: false, ..healthy("a") };
        let lies = PodView { health_lies: true, ..pod("b", "Stalled", 1) };
        let pods = vec![fenced, lies, healthy("c"), leaves];
        let observed = looked(infd("chat"), pods);
        let plan = plan::plan(&observed, Vec::new(), None, "2026-01-01T00:02:00Z".parse().unwrap());
        let metrics = Metrics::new().unwrap();
        tell(&metrics, ("serving", "chat"), &observed, &plan);
        let told = [&metrics.fenced_by_person, &metrics.health_lies, &metrics.replicas_wanted, &metrics.replicas_ready];
        let told = told.map(|gauge| gauge.with_label_values(&["serving", "chat"]).get());
        assert_eq!(told, [1, 1, i64::from(observed.infd.spec.replicas), 1]);
    }

    #[test]
    fn a_hold_of_the_fleet_stands_while_nobody_can_look_at_it() {
        let of = |stage, fleet: Option<&Fleet>| {
            let observed = looked(infd("chat"), vec![pod("a", stage, 1), healthy("b")]);
            let plan = plan::plan(&observed, Vec::new(), fleet, "2026-01-01T00:02:00Z".parse().unwrap());
            (plan.grants.len(), matches!(plan.hold, Hold::Fleet(_)), plan.incidents.open)
        };
        assert_eq!(of("Stalled", None), (1, false, 1), "who has not looked would grant");
        let unseen = |stage, how| of(stage, Some(&Fleet::unseen(how)));
        assert_eq!(unseen("Stalled", Unseen::Held), (0, true, 1), "and the agents hear that they wait");
        assert_eq!(unseen("Stalled", Unseen::Free), (0, false, 1), "nobody knows of a slot, nor of a common cause");
        assert_eq!(unseen("Recovered", Unseen::Held), (0, false, 0), "nobody waits");
    }

    #[test]
    fn fault_a16_what_is_doubted_is_counted_and_looked_at_again() {
        let (mut children, pods, incidents, nodes): (std::collections::BTreeMap<_, _>, _, _, _) = Default::default();
        children.insert("Service".to_owned(), serde_json::json!({"metadata": {"ownerReferences": [{"uid": "uid-x"}]}}));
        let doubted = vec!["chat-a".to_owned(), "chat-b".to_owned()];
        let observed = Observed { children, pods, incidents, nodes, doubted, ..looked(infd("chat"), Vec::new()) };
        let now = "2026-01-01T00:02:00Z".parse().unwrap();
        let plan = plan::plan(&observed, build::build(&observed.infd), None, now);
        let metrics = Metrics::new().unwrap();
        tell(&metrics, ("serving", "chat"), &observed, &plan);
        assert_eq!(metrics.objects_doubted.with_label_values(&["serving", "chat"]).get(), 3);
        assert_eq!(recheck(&plan, &observed, now), RECHECK_BLOCKED);
    }

    #[tokio::test]
    async fn fault_a16_pods_of_a_name_that_is_nobodys_are_counted_until_they_go() {
        let service = tower::service_fn(|_: http::Request<kube::client::Body>| async {
            Ok::<_, std::convert::Infallible>(http::Response::new(kube::client::Body::empty()))
        });
        let metrics = std::sync::Arc::new(Metrics::new().unwrap());
        let leadership = std::sync::Arc::default();
        let calls = Calls::new(kube::Client::new(service, "serving"), leadership, metrics.clone());
        let left = ["chat-a".to_owned()];
        assert_eq!(forget(&calls, ("serving", "chau"), &left), Some(RECHECK_BLOCKED));
        assert_eq!(metrics.objects_doubted.with_label_values(&["serving", "chau"]).get(), 1);
        assert_eq!(forget(&calls, ("serving", "chau"), &[]), None);
        assert!(!String::from_utf8(metrics.text().unwrap()).unwrap().contains("chau"));
    }

    #[test]
    fn a_persons_fence_needs_no_looking_after_and_a_stall_does() {
        let fenced = |pod: PodView| PodView { fence: Fence::read("yes"), ..pod };
        assert_eq!(next_look(vec![healthy("a")]), RECHECK_QUIET);
        assert_eq!(
            next_look(vec![fenced(healthy("a")), fenced(healthy("b"))]),
            RECHECK_QUIET,
            "quiescent is silent (P7)"
        );
        assert_eq!(next_look(vec![fenced(pod("a", "Stalled", 1))]), RECHECK_OPEN);
        assert_eq!(next_look(vec![fenced(healthy("a")), pod("b", "Suspect", 1)]), RECHECK_OPEN);
    }
}
