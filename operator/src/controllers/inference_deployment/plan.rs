//! Stage 4, pure: from what is and what should be to the writes that are needed. An unchanged world needs none (P7).

use std::collections::BTreeMap;

use crds::{
    Avoided, Grant, HoldStatus, PastGrant,
    episode::{ANNOTATION_LAST_SERVING, ANNOTATION_RESTART_GRANT, ANNOTATION_RESTART_QUEUED},
    inference_deployment::RecoveryMode,
    recovery_note::{ANNOTATION_RECOVERY, RecoveryNote},
};
use jiff::Timestamp;
use kube::ResourceExt;
use serde_json::Value;

use super::{
    avoid,
    build::{Child, revision},
    drift::covers,
    escalate::{self, Hold, Terms},
    fleet::Fleet,
    grants,
    observed::{ANNOTATION_DELETION_COST, Observed, PodView, owned_by},
    past,
    rollout::{self, Course},
    scaling, trials, waits,
};
use crate::{
    controllers::incidents::{
        plan::{IncidentPlan, Kept, plan as plan_incidents},
        poison,
    },
    digest::short,
};

/// Annotation on children: hash of what the operator last applied, so that a field it no longer wants is noticed.
pub const ANNOTATION_APPLIED: &str = "inference.truebeat.io/applied";
/// Deletion cost of a pod that does not progress: far below everything a person would set.
const COST_FROZEN: &str = "-1000";
const COST_FINE: &str = "0";

/// The writes of one pass, in the order in which `execute` makes them.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    /// Children to apply.
    pub applies: Vec<Child>,
    /// Children whose name is taken by an object of somebody else (P9: never touched).
    pub foreign: Vec<String>,
    /// The restart budget in use after this pass; stored before any pod hears of it (I2).
    pub grants: Vec<Grant>,
    /// The record of grants that goes with them.
    pub recent: Vec<PastGrant>,
    /// Why nothing new is granted although it is wanted.
    pub hold: Hold,
    /// What is remembered of it, and of what was tried under it.
    pub hold_status: Option<HoldStatus>,
    /// What is tried under it, in words.
    pub trial: String,
    /// What a stall that may be recovered waits for, in words.
    pub waits: Option<String>,
    /// Places from which new pods keep away.
    pub avoid: Vec<Avoided>,
    /// Places of which others must hear, and from which new pods do not keep away.
    pub broken: Vec<Avoided>,
    /// Nodes (and until when) that must be marked before any pod is deleted.
    pub marks: Vec<(String, String)>,
    /// Which revision the replicas are brought to, and why.
    pub rollout: Course,
    /// Why a rollback does not move, in words: what it takes back is recovered meanwhile as any other.
    pub stuck: Option<String>,
    /// Why the number of replicas is not the spec's.
    pub scaling_held: Option<String>,
    /// Pods (by UID) whose next recovery waits until then because the last one is too young.
    pub backing_off: Vec<(String, Timestamp)>,
    /// A node that came under suspicion by what is granted now.
    pub suspect_node: Option<String>,
    /// Pods to annotate.
    pub pods: Vec<PodPatch>,
    /// Pods to delete: their replacement is granted.
    pub replaces: Vec<Replacement>,
    pub incidents: IncidentPlan,
}

/// A pod to delete as it was looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replacement {
    pub name: String,
    pub uid: String,
    /// The version that was looked at.
    pub version: String,
    /// Where it runs: that place is marked first.
    pub node: String,
}

impl Replacement {
    fn of(pod: &PodView) -> Self {
        let (name, uid, version) = (pod.name.clone(), pod.uid.clone(), pod.version.clone());
        Replacement { name, uid, version, node: pod.node.clone() }
    }
}

/// Annotations to set on one pod of exactly this UID.
#[derive(Debug, Clone, PartialEq)]
pub struct PodPatch {
    pub name: String,
    pub uid: String,
    /// `None` takes the annotation off.
    pub annotations: BTreeMap<&'static str, Option<String>>,
}

impl PodPatch {
    /// Does it grant a restart? Such a pod hears of it last: with the kill its clients go elsewhere, and elsewhere must know (I7).
    pub fn grants(&self) -> bool {
        self.annotations.contains_key(ANNOTATION_RESTART_GRANT)
    }
}

/// Compares. `desired` is empty when the spec cannot be built; records and budget are kept all the same.
pub fn plan(observed: &Observed, mut desired: Vec<Child>, fleet: Option<&Fleet>, now: Timestamp) -> Plan {
    let infd = &observed.infd;
    let (recovery, at) = (&infd.spec.recovery, now.to_string());
    let held = infd.status.as_ref().map(|s| s.recovery.grants.as_slice()).unwrap_or_default();
    // Judged before anything is granted: replicas of a revision that is taken back need no restart, they go.
    let rollout = rollout::steer(observed, &mut desired, now);
    let scaling_held = scaling::steer(observed, &mut desired, now);
    let stuck = rollout::stuck(observed, &rollout, now);
    let going = if stuck.is_some() { "" } else { rollout.taken_back() };
    let terms = Terms::of(infd, &observed.pods, fleet).without_restarts_of(going);
    let terms =
        terms.with_replicas(scaling::replicas_of(&desired)).with_pods_refused(observed.pods_refused().is_some());
    let terms = terms.with_places(&observed.nodes, &observed.pods, fleet, recovery.hold_percent);
    let remembered = infd.status.as_ref().and_then(|s| s.recovery.hold.as_ref());
    let hold = trials::next(remembered, (held, &observed.pods), &terms, now);
    let trial_after = escalate::duration_of(&recovery.trial_after).unwrap_or_default();
    let may_try = trials::due(hold.as_ref(), (fleet, &terms), trial_after, now);
    let terms = terms.with_trial(may_try);
    let grants = grants::next(held, &observed.pods, &terms, &at);
    let granted: Vec<&Grant> = grants::fresh(&grants, held).collect();
    let recent = past::recent(&terms, observed.ground(), &granted, &at);
    let hold = trials::with_trial(hold, granted.iter(), &terms, &observed.pods);
    let avoid = avoid::next(infd, observed.ground(), &granted, now);
    let last = escalate::last_serving(recovery.last_replica, recovery.mode, &observed.pods);
    let queue = |pod: &PodView, grants: &[Grant]| grants::to_queue(grants, pod, recovery.mode, now);
    // A key that was granted and not yet handed out stays in the drawer once somebody has said that nothing be killed.
    let announced = |pod: &PodView| {
        let handed = recovery.mode == RecoveryMode::Recover && !terms.taken_back(pod);
        if handed { grants.as_slice() } else { &[] }
    };
    let note = RecoveryNote::of(recovery).text();
    let patch = |pod: &PodView| pod_patch(pod, &note, announced(pod), (queue(pod, &grants), last.contains(&pod.uid)));
    let replaced = observed.pods.iter().filter(|pod| grants::to_replace(announced(pod), pod, &terms));
    let replaces: Vec<Replacement> = replaced.map(Replacement::of).collect();
    let waiting = observed.pods.iter().filter(|pod| grants::wants_slot(pod));
    let mut plan = Plan {
        backing_off: waiting.filter_map(|pod| Some((pod.uid.clone(), terms.backs_off_until(pod, &at)?))).collect(),
        pods: observed.pods.iter().filter_map(patch).collect(),
        broken: avoid::broken(infd, observed.ground(), &avoid, now),
        marks: avoid::marks(&avoid, &observed.pods, &replaces),
        replaces,
        avoid,
        incidents: plan_incidents(&infd.name_any(), Kept::of(recovery), observed.ground(), now),
        waits: waits::why(&grants, &observed.pods, (&terms, fleet), &at),
        suspect_node: past::suspect_node(&recent, terms.window, &at).filter(|_| !granted.is_empty()),
        recent,
        trial: hold
            .as_ref()
            .map(|hold| trials::words(hold, remembered.is_some(), trial_after, terms.fleet_alarmed))
            .unwrap_or_default(),
        hold_status: hold,
        hold: terms.hold.clone(),
        rollout,
        stuck,
        scaling_held,
        grants,
        ..Plan::default()
    };
    poison::annotate(observed, &mut plan.pods, now);
    // a write of ours would make a pod that goes now another than the one that was looked at
    plan.pods.retain(|patch| !plan.replaces.iter().any(|pod| pod.uid == patch.uid));
    for child in desired {
        sort_in(&mut plan, observed, child);
    }
    plan
}

/// Where a wanted child belongs: to what is applied, to what cannot be, or, while what has its name is on its way out, to neither.
pub fn sort_in(plan: &mut Plan, observed: &Observed, child: Child) {
    let infd = &observed.infd;
    let (kind, live) = (&child.resource.kind, observed.children.get(&child.resource.kind));
    if observed.going.iter().any(|going| going == kind) || !observed.is_read(kind) {
        return;
    }
    if live.is_some_and(|live| !owned_by(live, infd.uid().as_deref().unwrap_or_default())) {
        plan.foreign.push(format!("{kind} {}", child.name));
    } else {
        plan.applies.extend(to_apply(child, live));
    }
}

/// The child with its hash, meant for the very object that was looked at (P8), or `None` if that one has all of it already.
fn to_apply(mut child: Child, live: Option<&Value>) -> Option<Child> {
    let hash = short(&revision::canonical(&child.body), 8);
    child.body["metadata"]["annotations"][ANNOTATION_APPLIED] = Value::String(hash);
    let same = live.is_some_and(|live| covers(live, &child.body));
    if let Some(uid) = live.map(|live| &live["metadata"]["uid"]) {
        child.body["metadata"]["uid"].clone_from(uid);
    }
    (!same).then_some(child)
}

/// What says who goes first in a scale-in, where it is to be written `apart`, and what else pods are to hear.
pub fn order_apart(patches: &[PodPatch], apart: bool) -> (Vec<PodPatch>, Vec<PodPatch>) {
    let part = |order: bool| {
        let of = |patch: &PodPatch| {
            let all = patch.annotations.iter().filter(|(key, _)| (apart && **key == ANNOTATION_DELETION_COST) == order);
            PodPatch { annotations: all.map(|(key, text)| (*key, text.clone())).collect(), ..patch.clone() }
        };
        patches.iter().map(of).filter(|patch| !patch.annotations.is_empty()).collect()
    };
    (part(true), part(false))
}

/// The second key (I1), or the note that it must wait, and the order of scale-in: the frozen one goes first.
fn pod_patch(
    pod: &PodView,
    recovery: &str,
    grants: &[Grant],
    (queued, last): (Option<String>, bool),
) -> Option<PodPatch> {
    let mut annotations = BTreeMap::new();
    if pod.recovery.as_deref() != Some(recovery) {
        annotations.insert(ANNOTATION_RECOVERY, Some(recovery.to_owned()));
    }
    if let Some(grant) = grants::to_announce(grants, pod) {
        annotations.insert(ANNOTATION_RESTART_GRANT, Some(grant.episode.clone()));
    }
    annotations.extend(queued.map(|note| (ANNOTATION_RESTART_QUEUED, Some(note))));
    if last != pod.last_serving {
        annotations.insert(ANNOTATION_LAST_SERVING, last.then(|| "true".to_owned()));
    }
    let frozen = pod.progressing == Some(false) || pod.open_episode().is_some();
    let cost = match (frozen, pod.deletion_cost.as_deref()) {
        (true, Some(COST_FROZEN)) => None,
        (true, _) => Some(COST_FROZEN),
        (false, Some(COST_FROZEN)) => Some(COST_FINE), // ours; anybody else's value is left alone (P9)
        (false, _) => None,
    };
    annotations.extend(cost.map(|cost| (ANNOTATION_DELETION_COST, Some(cost.to_owned()))));
    let wanted = !pod.leaving && !annotations.is_empty();
    wanted.then(|| PodPatch { name: pod.name.clone(), uid: pod.uid.clone(), annotations })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        build::build,
        testing::{healthy, infd, looked, pod},
    };
    use crds::GrantAction;
    use serde_json::json;

    fn observed(pods: Vec<PodView>) -> Observed {
        looked(infd("chat"), pods)
    }

    fn now() -> Timestamp {
        "2026-01-01T00:02:00Z".parse().unwrap()
    }

    /// The world after the children were applied and the server added its defaults.
    fn settled(pods: Vec<PodView>) -> Observed {
        let mut world = observed(pods);
        for child in plan(&world, build(&world.infd), None, now()).applies {
            let mut live = child.body.clone();
            live["metadata"]["resourceVersion"] = json!("7");
            live["spec"]["clusterIP"] = json!("10.0.0.1");
            world.children.insert(child.resource.kind, live);
        }
        world
    }

    #[test]
    fn a_settled_world_needs_no_write() {
        let world = settled(vec![healthy("a"), healthy("b")]);
        let plan = plan(&world, build(&world.infd), None, now());
        assert!(plan.applies.is_empty() && plan.pods.is_empty() && plan.incidents.writes.is_empty());
    }

    #[test]
    fn drift_and_removal_are_both_seen() {
        let mut world = settled(vec![]);
        world.children.get_mut("Deployment").unwrap()["spec"]["replicas"] = json!(7);
        assert_eq!(plan(&world, build(&world.infd), None, now()).applies[0].resource.kind, "Deployment");
        let mut world = settled(vec![]);
        world.infd.spec.engine.image_pull_policy = None; // a field that is no longer wanted
        assert_eq!(plan(&world, build(&world.infd), None, now()).applies.len(), 1);
    }

    #[test]
    fn the_second_in_the_queue_gets_the_note_and_not_the_key() {
        let plan = plan(&observed(vec![pod("a", "Stalled", 2), pod("b", "Stalled", 1)]), Vec::new(), None, now());
        let of = |name: &str| &plan.pods.iter().find(|patch| patch.name == name).unwrap().annotations;
        assert_eq!(of("a")[ANNOTATION_RESTART_QUEUED].as_deref(), Some("e-a@2026-01-01T00:02:00Z"));
        assert!(!of("a").contains_key(ANNOTATION_RESTART_GRANT) && !of("b").contains_key(ANNOTATION_RESTART_QUEUED));
        assert!(plan.incidents.open > 0, "what keeps the pass coming back to renew the note");
    }

    #[test]
    fn other_modes_hand_out_no_key_even_if_one_is_stored() {
        let mut world = observed(vec![pod("a", "Stalled", 1)]);
        let grants = plan(&world, Vec::new(), None, now()).grants;
        world.infd.status.get_or_insert_default().recovery.grants = grants.clone();
        for mode in [RecoveryMode::Observe, RecoveryMode::Fence] {
            world.infd.spec.recovery.mode = mode;
            let plan = plan(&world, Vec::new(), None, now());
            assert_eq!(plan.grants, grants, "what was granted counts until it is over");
            let said: Vec<_> = plan.pods[0].annotations.keys().copied().collect();
            assert_eq!(said, [ANNOTATION_DELETION_COST, ANNOTATION_RECOVERY], "{mode:?}");
        }
    }

    #[test]
    fn an_object_of_somebody_else_is_never_touched() {
        let mut world = settled(vec![]);
        world.children.get_mut("Service").unwrap()["metadata"]["ownerReferences"] = json!([]);
        let plan = plan(&world, build(&world.infd), None, now());
        assert_eq!((plan.foreign.as_slice(), plan.applies.len()), (["Service chat".to_owned()].as_slice(), 0));
    }

    #[test]
    fn what_goes_is_neither_touched_nor_called_somebody_elses() {
        let mut world = settled(vec![]);
        world.children.remove("Service");
        world.going = vec!["Service".to_owned()];
        let waits = plan(&world, build(&world.infd), None, now());
        assert_eq!((waits.foreign.len(), waits.applies.len()), (0, 0));
        world.going.clear();
        assert_eq!(plan(&world, build(&world.infd), None, now()).applies[0].resource.kind, "Service");
    }

    #[test]
    fn a_frozen_pod_is_granted_and_goes_first_on_scale_in() {
        let plan = plan(&observed(vec![healthy("a"), pod("b", "Stalled", 1)]), Vec::new(), None, now());
        assert_eq!(plan.grants.len(), 1);
        let last = &plan.pods[0];
        assert_eq!((last.name.as_str(), last.annotations.len()), ("a", 1));
        assert_eq!(last.annotations[ANNOTATION_LAST_SERVING].as_deref(), Some("true"), "I3");
        let patch = &plan.pods[1];
        assert_eq!((patch.name.as_str(), patch.uid.as_str()), ("b", "uid-b"));
        assert_eq!(patch.annotations[ANNOTATION_RESTART_GRANT].as_deref(), Some("e-b"));
        assert_eq!(patch.annotations[ANNOTATION_DELETION_COST].as_deref(), Some(COST_FROZEN));
    }

    #[test]
    fn a_replacement_is_for_the_stall_that_it_was_granted_for() {
        let look = |stage: &str, granted_at: &str| {
            let mut world = observed(vec![healthy("b"), pod("a", stage, 1)]);
            let replace = Grant {
                episode: "e-before".to_owned(),
                pod_uid: "uid-a".to_owned(),
                action: GrantAction::Replace,
                granted_at: granted_at.to_owned(),
                ..Grant::default()
            };
            world.infd.status.get_or_insert_default().recovery.grants = vec![replace];
            let plan = plan(&world, Vec::new(), None, now());
            (plan.replaces.len(), plan.grants.into_iter().map(|grant| grant.episode).collect::<Vec<_>>())
        };
        let (just_now, a_while_ago) = ("2026-01-01T00:01:50Z", "2026-01-01T00:01:00Z");
        assert_eq!(look("Suspect", just_now), (0, vec!["e-before".to_owned()]), "a suspicion deletes nothing (I1)");
        assert_eq!(look("Stalled", just_now), (0, vec!["e-before".to_owned()]));
        assert_eq!(look("Suspect", a_while_ago), (0, vec![]));
        assert_eq!(look("Stalled", a_while_ago), (0, vec!["e-a".to_owned()]), "what it stalls by now is granted anew");
    }

    #[test]
    fn a_pod_that_is_replaced_goes_as_it_was_looked_at() {
        let seen = PodView { version: "7".to_owned(), recovery: None, last_serving: true, ..pod("a", "Stalled", 1) };
        let mut world = observed(vec![seen, pod("b", "Stalled", 2)]);
        world.infd.spec.recovery.restarts_before_replace = 0;
        let plan = plan(&world, Vec::new(), None, now());
        let [name, uid, version, node] = ["a", "uid-a", "7", "n1"].map(str::to_owned);
        assert_eq!(plan.replaces, [Replacement { name, uid, version, node }]);
        let written = plan.pods.iter().map(|patch| patch.name.as_str());
        assert_eq!(written.collect::<Vec<_>>(), ["b"], "whatever else it should hear");
    }

    #[test]
    fn a_recovered_pod_loses_our_cost_and_keeps_a_foreign_one() {
        for (before, after) in [(Some(COST_FROZEN), Some(COST_FINE)), (Some("42"), None), (None, None)] {
            let pod = PodView { deletion_cost: before.map(str::to_owned), ..healthy("a") };
            let patch = pod_patch(&pod, pod.recovery.as_deref().unwrap(), &[], (None, false));
            assert_eq!(
                patch.and_then(|p| p.annotations[ANNOTATION_DELETION_COST].clone()).as_deref(),
                after,
                "{before:?}"
            );
        }
    }
}
