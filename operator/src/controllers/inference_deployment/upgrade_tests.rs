//! What another version of the operator has made, and what becomes of it.

use super::{
    tests::{changed, now, of_revision},
    *,
};
use crate::controllers::inference_deployment::{
    build::build,
    testing::{healthy, infd, looked, template},
};
use crds::InferenceDeployment;
use serde_json::json;

/// What another version of the operator has made of the same spec, settled: a template of another revision.
fn made_by_another() -> (Observed, Value) {
    made_of(infd("chat"))
}

fn made_of(object: InferenceDeployment) -> (Observed, Value) {
    let spec = object.spec.clone();
    let mut theirs = template(&object);
    theirs["spec"]["terminationGracePeriodSeconds"] = json!(77);
    revision::stamp(&mut theirs, 0);
    let revision = revision::of(&theirs).to_owned();
    let live = json!({
        "metadata": {"generation": 1, "uid": "uid-deployment"},
        "spec": {"replicas": 2, "template": theirs},
        "status": {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2},
    });
    let pods = ["a", "b"].map(|name| of_revision(&revision, healthy(name))).to_vec();
    let children = [("Deployment".to_owned(), live)].into();
    let mut observed = Observed { children, ..looked(object, pods) };
    let memory = &mut observed.infd.status.get_or_insert_default().rollout;
    (memory.stable, memory.wanted, memory.target) = (revision.clone(), revision.clone(), revision);
    memory.spec = revision::of_spec(&spec);
    memory.stable_spec.clone_from(&memory.spec);
    (observed, theirs)
}

/// The memory after a look, which the next look begins with, and the template.
fn look_on(observed: &mut Observed) -> (RolloutStatus, Value) {
    let mut desired = build(&observed.infd);
    let course = steer(observed, &mut desired, now());
    observed.infd.status.get_or_insert_default().rollout = course.memory.clone();
    (course.memory, desired.pop().unwrap().body["spec"]["template"].take())
}

#[test]
fn another_operator_alone_replaces_no_replica() {
    let (mut observed, theirs) = made_by_another();
    let fresh = |observed: &Observed| revision::of(&template(&observed.infd)).to_owned();
    let (memory, kept) = look_on(&mut observed);
    let stays = (revision::of(&theirs).to_owned(), fresh(&observed));
    assert_eq!((&kept, &memory.target, &memory.stable), (&theirs, &stays.0, &stays.0));
    assert_eq!((memory.wanted.clone(), memory.newer.clone()), stays);
    assert_eq!(look_on(&mut observed).0, memory, "quiescent is silent (P7)");
    changed(&mut observed, |spec| (spec.recovery.hold_percent, spec.replicas) = (33, 7));
    assert_eq!(look_on(&mut observed).1, theirs, "what the pods do not show is no reason either");
    changed(&mut observed, |spec| spec.engine.image = "engine:2".to_owned());
    let (memory, new) = look_on(&mut observed);
    assert_eq!((new, memory.newer.as_str()), (template(&observed.infd), ""), "a change of the spec is");
    assert_eq!((memory.wanted, memory.target), (fresh(&observed), fresh(&observed)));
}

#[test]
fn a_restart_that_the_spec_itself_asks_for_stays_in_the_template() {
    let mut object = infd("chat");
    let overlay = json!({"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "2026-01-01T12:00:00Z"}}});
    object.spec.pod_overlay = Some(serde_json::from_value(overlay).unwrap());
    let (mut observed, theirs) = made_of(object);
    assert_eq!(look_on(&mut observed).1, theirs);
    assert!(theirs.to_string().contains("restartedAt"));
}

/// Who sets `Observe` at night wants nothing to move.
#[test]
fn how_far_recovery_goes_is_told_to_the_pods_and_replaces_none() {
    use crate::controllers::inference_deployment::plan::plan;
    use crds::{inference_deployment::RecoveryMode, recovery_note::ANNOTATION_RECOVERY};
    let (mut observed, theirs) = made_by_another();
    changed(&mut observed, |spec| {
        (spec.recovery.mode, spec.recovery.unattended_after) = (RecoveryMode::Observe, "7m".to_owned());
    });
    assert_eq!(look_on(&mut observed).1, theirs);
    let told = plan(&observed, build(&observed.infd), None, now()).pods;
    let note = r#"{"mode":"Observe","unattendedAfter":"7m","unattendedWindow":"1h"}"#;
    assert_eq!(told.len(), 2);
    for patch in &told {
        assert_eq!(patch.annotations, [(ANNOTATION_RECOVERY, Some(note.to_owned()))].into(), "{}", patch.name);
    }
    observed.pods.iter_mut().for_each(|pod| pod.recovery = Some(note.to_owned()));
    assert_eq!(plan(&observed, build(&observed.infd), None, now()).pods, [], "once");
}

#[test]
fn another_attempt_brings_the_newer_template_and_so_does_a_lost_one() {
    let (mut observed, _) = made_by_another();
    look_on(&mut observed);
    changed(&mut observed, |spec| spec.rollout.attempt = 1);
    assert_eq!(look_on(&mut observed).1, template(&observed.infd));
    let (mut observed, _) = made_by_another();
    observed.children.clear();
    assert_eq!(look_on(&mut observed).1, template(&observed.infd), "there is nothing to keep");
}

#[test]
fn a_spec_that_changed_while_no_operator_ran_is_judged_by_what_pods_show() {
    let (mut observed, theirs) = made_by_another();
    changed(&mut observed, |spec| spec.replicas = 9);
    assert_eq!(look_on(&mut observed).1, theirs, "an autoscaler was there");
    let (mut observed, _) = made_by_another();
    changed(&mut observed, |spec| spec.engine.image = "engine:2".to_owned());
    let fresh = template(&observed.infd);
    // as if this operator had made just that of the spec before
    observed.infd.status.as_mut().unwrap().rollout.newer = revision::of(&fresh).to_owned();
    assert_eq!(look_on(&mut observed).1, fresh, "what somebody writes into the spec comes");
}

#[test]
fn a_revert_after_an_upgrade_finds_the_replicas_that_run() {
    let (mut observed, theirs) = made_by_another();
    look_on(&mut observed);
    changed(&mut observed, |spec| spec.engine.image = "engine:2".to_owned());
    assert_eq!(look_on(&mut observed).0.newer, "");
    changed(&mut observed, |spec| *spec = infd("chat").spec);
    let (memory, kept) = look_on(&mut observed);
    assert_eq!((&kept, &memory.target, &memory.stable), (&theirs, &memory.wanted, &memory.wanted));
    assert_eq!(memory.newer, revision::of(&template(&observed.infd)));
}

#[test]
fn an_operator_without_this_memory_leaves_what_it_brought_the_replicas_to() {
    let (mut observed, theirs) = made_by_another();
    let status = observed.infd.status.as_mut().unwrap();
    let memory = std::mem::take(&mut status.rollout);
    let theirs_alone = RolloutStatus { stable: memory.stable, target: memory.target, ..RolloutStatus::default() };
    (status.rollout, status.observed_generation) = (theirs_alone.clone(), 1);
    assert_eq!(look_on(&mut observed).1, theirs);
    let status = observed.infd.status.as_mut().unwrap();
    (status.rollout, status.observed_generation) = (theirs_alone, 0);
    assert_eq!(look_on(&mut observed).1, template(&observed.infd), "of another spec, for all that is known");
}

#[test]
fn a_template_that_is_kept_is_still_guarded() {
    let (mut observed, theirs) = made_by_another();
    look_on(&mut observed);
    let of = |template: &Value, created: &str| {
        let owner = json!({"uid": "uid-deployment", "controller": true});
        json!({"metadata": {"ownerReferences": [owner], "creationTimestamp": created}, "spec": {"template": template}})
    };
    let (mut restarted, mut by_hand) = (theirs.clone(), theirs.clone());
    restarted["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = json!("2026-01-01T12:00:00Z");
    by_hand["spec"]["terminationGracePeriodSeconds"] = json!(1);
    let sets = json!([of(&by_hand, "2026-01-02T00:00:00Z"), of(&restarted, "2026-01-01T00:00:00Z")]);
    observed.children.insert("ReplicaSet".to_owned(), sets);
    observed.children.get_mut("Deployment").unwrap()["spec"]["template"] = by_hand;
    assert!(needs_history(&observed.infd.status.as_ref().unwrap().rollout, observed.children.get("Deployment")));
    assert_eq!(look_on(&mut observed).1, theirs, "a change by hand is taken back");
}
