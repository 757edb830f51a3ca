//! kstatus conformance: the published rules (`sigs.k8s.io/cli-utils`, package kstatus, `Compute`) as a function, and what Flux, Argo CD,
//! `kubectl wait` and `helm --wait` would therefore say of an InferenceDeployment in every state that its status can tell of.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    build::{build, revision},
    execute::StepError,
    observed::{Observed, PodView},
    plan::plan,
    status::status,
    testing::{healthy, infd, looked, pod, template},
    validate::validate,
};

/// The rules in their published order: deletion, generation, then the first of `Reconciling` and `Stalled` that is `True`. A kind that
/// the package does not know is `Current` otherwise.
fn compute(object: &Value) -> &'static str {
    let (metadata, status) = (&object["metadata"], &object["status"]);
    if metadata["deletionTimestamp"].as_str().is_some_and(|at| !at.is_empty()) {
        return "Terminating";
    }
    let observed = status["observedGeneration"].as_i64();
    if observed.is_some() && observed != metadata["generation"].as_i64() {
        return "InProgress";
    }
    for condition in status["conditions"].as_array().into_iter().flatten() {
        match (condition["type"].as_str(), condition["status"].as_str()) {
            (Some("Reconciling"), Some("True")) => return "InProgress",
            (Some("Stalled"), Some("True")) => return "Failed",
            _ => {}
        }
    }
    "Current"
}

fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

/// Everything as the spec wants it, but for the pods.
fn world(pods: Vec<PodView>) -> Observed {
    let mut infd = infd("chat");
    let template = template(&infd);
    let revision = revision::of(&template).to_owned();
    let live = json!({
        "metadata": {"generation": 1, "ownerReferences": [{"uid": "uid-infd", "controller": true}]},
        "spec": {"replicas": 2, "template": template},
        "status": {"observedGeneration": 1, "replicas": 2, "updatedReplicas": 2, "availableReplicas": 2},
    });
    infd.status.get_or_insert_default().rollout.stable.clone_from(&revision);
    let pods = pods.into_iter().map(|pod| PodView { revision: revision.clone(), ..pod }).collect();
    Observed { children: [("Deployment".to_owned(), live)].into(), ..looked(infd, pods) }
}

fn two() -> Vec<PodView> {
    vec![healthy("a"), healthy("b")]
}

/// The object as a pass over `observed` would leave it.
fn stored(observed: &Observed, errors: &[StepError]) -> Value {
    let problems = validate(&observed.infd);
    let desired = if problems.is_empty() { build(&observed.infd) } else { Vec::new() };
    let plan = plan(observed, desired, None, now());
    let mut object = serde_json::to_value(&observed.infd).unwrap();
    object["status"] = serde_json::to_value(status(observed, &plan, &problems, errors, now())).unwrap();
    object
}

fn changed(pods: Vec<PodView>, change: impl FnOnce(&mut Observed)) -> Value {
    let mut observed = world(pods);
    change(&mut observed);
    stored(&observed, &[])
}

#[test]
fn every_state_is_what_the_published_rules_call_it() {
    let error = |lasting| StepError { subject: "apply Deployment chat".into(), lasting, message: "no".into() };
    let live = |o: &mut Observed, path: &str, value: Value| {
        *o.children.get_mut("Deployment").unwrap().pointer_mut(path).unwrap() = value;
    };
    let table = [
        ("all well", stored(&world(two()), &[]), "Current"),
        ("no Deployment yet", changed(vec![], |o| o.children.clear()), "InProgress"),
        ("made anew, and the one before goes", changed(two(), |o| o.going = vec!["Service".into()]), "InProgress"),
        ("rolling out", changed(two(), |o| live(o, "/status/updatedReplicas", json!(1))), "InProgress"),
        ("scaling out", changed(two(), |o| o.infd.spec.replicas = 5), "InProgress"),
        ("edited, first pass", changed(two(), edited), "InProgress"),
        ("the API is away", stored(&world(two()), &[error(false)]), "InProgress"),
        (
            "brought in, not proven yet",
            changed(two(), |o| {
                o.infd.status.as_mut().unwrap().rollout.stable = "before".to_owned();
                live(o, "/status/availableReplicas", json!(1));
            }),
            "InProgress",
        ),
        // an engine that hangs is no failure of the controller: GitOps tools must not roll back for it
        ("an engine stalls", changed(vec![healthy("a"), pod("b", "Stalled", 1)], |_| ()), "Current"),
        ("a bad spec", changed(two(), |o| o.infd.spec.recovery.unattended_after = "soon".into()), "Failed"),
        (
            "a bad spec, nothing built",
            {
                changed(vec![], |o| {
                    o.children.clear();
                    o.infd.spec.recovery.unattended_after = "soon".into();
                })
            },
            "Failed",
        ),
        ("a foreign Service", changed(two(), |o| drop(o.children.insert("Service".into(), json!({})))), "Failed"),
        ("refused", stored(&world(two()), &[error(true)]), "Failed"),
        ("refused, and the API away", stored(&world(two()), &[error(true), error(false)]), "Failed"),
        (
            "a crash loop in the first rollout",
            {
                let crashing = PodView { ready: false, restarts: 7, ..healthy("b") };
                changed(vec![healthy("a"), crashing], |o| {
                    o.infd.status = None;
                    live(o, "/status/availableReplicas", json!(1));
                })
            },
            "Failed",
        ),
        (
            "on its way out",
            {
                let mut object = stored(&world(two()), &[]);
                object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
                object
            },
            "Terminating",
        ),
        (
            "edited, not looked at yet",
            {
                let mut object = stored(&world(two()), &[]);
                object["metadata"]["generation"] = json!(2);
                object
            },
            "InProgress",
        ),
    ];
    for (name, object, wanted) in table {
        assert_eq!(compute(&object), wanted, "{name}: {}", object["status"]["conditions"]);
        let of = |type_: &str| {
            let list = object["status"]["conditions"].as_array().unwrap();
            list.iter().find(|c| c["type"] == type_).map(|c| c["status"].as_str().unwrap().to_owned())
        };
        assert!(of("Ready").is_some(), "{name}: Ready is always there");
        for abnormal in ["Reconciling", "Stalled", "RestartsHeld", "ScalingHeld"] {
            assert!(of(abnormal).is_none_or(|word| word == "True"), "{name}: {abnormal} is there only while it is so");
        }
        assert!(of("Reconciling").is_none() || of("Stalled").is_none(), "{name}: never both");
    }
}

/// Its author has changed the image; the Deployment that is looked at is the whole one of before.
fn edited(observed: &mut Observed) {
    observed.infd.metadata.generation = Some(2);
    observed.infd.spec.engine.image = "engine:2".to_owned();
}

/// Whoever waits by `Ready` alone, as `kubectl wait` does, reads it beside the generation that it speaks of.
#[test]
fn a_template_that_nobody_runs_yet_is_not_ready() {
    let ready = |object: &Value| {
        let list = object["status"]["conditions"].as_array().unwrap();
        let ready = list.iter().find(|c| c["type"] == "Ready").unwrap();
        let words = ["status", "reason"].map(|key| ready[key].as_str().unwrap().to_owned());
        (words.join("/"), ready["observedGeneration"].as_i64().unwrap())
    };
    assert_eq!(ready(&changed(two(), edited)), ("False/RolloutInProgress".to_owned(), 2));
    let refused = StepError { subject: "apply Deployment chat".into(), lasting: false, message: "no".into() };
    let mut observed = world(two());
    edited(&mut observed);
    assert_eq!(ready(&stored(&observed, &[refused])).0, "False/RolloutInProgress", "nor while it cannot be brought in");
    // another version of the operator made these pods of the same spec, and nobody is rolled for that
    let kept = changed(two(), |o| {
        let before = "before".to_owned();
        let labels = &mut o.children.get_mut("Deployment").unwrap()["spec"]["template"]["metadata"]["labels"];
        labels[crds::LABEL_REVISION] = json!(before);
        o.pods.iter_mut().for_each(|pod| pod.revision.clone_from(&before));
        let rollout = &mut o.infd.status.as_mut().unwrap().rollout;
        let spec = revision::of_spec(&o.infd.spec);
        (rollout.wanted, rollout.stable, rollout.target) = (before.clone(), before.clone(), before);
        (rollout.spec, rollout.stable_spec) = (spec.clone(), spec);
    });
    assert_eq!(ready(&kept), ("True/AllReplicasReady".to_owned(), 1));
}

/// An object that no operator has seen is not `Current`: the CRD's default for the status says that generation -1 was observed.
#[test]
fn what_nobody_has_looked_at_is_in_progress() {
    let crds = crds::yaml::crdgen().unwrap();
    for (file, text) in crds.iter().filter(|(file, _)| file.starts_with("inferencedeployments")) {
        assert!(text.contains("observedGeneration: -1"), "{file}: no default for the status");
    }
    assert_eq!(compute(&json!({"metadata": {"generation": 1}, "status": {"observedGeneration": -1}})), "InProgress");
}
