//! The CEL rules, evaluated offline by the very text that the API server gets: each both ways.

#![allow(clippy::expect_used, reason = "helpers of tests; the lint sees test functions alone")]

use crds::{EngineIncident, EngineIncidentSpec, InferenceDeployment};
use serde_json::{Value, json};

fn infd(change: impl FnOnce(&mut Value)) -> InferenceDeployment {
    let mut object = json!({
        "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": "chat", "namespace": "default"},
        "spec": {
            "model": {"source": {"file": {"path": "/models/tiny"}}},
            "engine": {"kind": "Truebeat", "image": "engine:1"},
            "agent": {"image": "agent:1"},
        }
    });
    change(&mut object);
    serde_json::from_value(object).expect("the test's object has the right shape")
}

fn accepted(change: impl FnOnce(&mut Value)) {
    infd(change).validate_cel().expect("this object is valid");
}

fn refused(message: &str, change: impl FnOnce(&mut Value)) {
    let errors = infd(change).validate_cel().expect_err("this object is not valid").to_string();
    assert!(errors.contains(message), "{errors}");
}

#[test]
fn the_smallest_object_is_valid_and_gets_defaults() {
    let object = infd(|_| ());
    object.validate_cel().expect("valid");
    assert_eq!((object.spec.replicas, object.spec.engine.port, object.spec.gate.port), (1, 8000, 8080));
    assert_eq!(object.spec.recovery.max_unavailable, 1);
}

#[test]
fn exactly_one_source() {
    let oci = || json!({"reference": "registry.example/weights@sha256:0123", "pullPolicy": "IfNotPresent"});
    accepted(|o| o["spec"]["model"]["source"] = json!({"pvc": {"claimName": "m", "path": "tiny"}}));
    accepted(|o| o["spec"]["model"]["source"] = json!({"oci": oci()}));
    refused("exactly one of file, pvc and oci", |o| o["spec"]["model"]["source"] = json!({}));
    for (other, source) in [("pvc", json!({"claimName": "m"})), ("oci", oci())] {
        refused("exactly one of file, pvc and oci", |o| o["spec"]["model"]["source"][other] = source);
    }
}

#[test]
fn a_path_stays_inside_its_volume() {
    for path in ["../etc", "a/../../b", "/abs"] {
        refused("relative to the volume", |o| {
            o["spec"]["model"]["source"] = json!({"pvc": {"claimName": "m", "path": path}});
        });
        refused("relative to the image", |o| {
            o["spec"]["model"]["source"] = json!({"oci": {"reference": "weights:1", "path": path}});
        });
    }
    refused("without blanks", |o| o["spec"]["model"]["source"] = json!({"oci": {"reference": "weights 1"}}));
}

#[test]
fn ranks_are_told_once_to_an_engine_that_can_be_told_and_have_gpus() {
    let engine = |patch: Value| {
        move |o: &mut Value| patch.as_object().unwrap().iter().for_each(|(k, v)| o["spec"]["engine"][k] = v.clone())
    };
    let gpus = |n: &str| json!({"limits": {"nvidia.com/gpu": n}});
    for kind in ["Truebeat", "VLLM", "SGLang"] {
        accepted(engine(json!({"kind": kind, "tensorParallel": 8, "resources": gpus("8"), "args": ["--top"]})));
    }
    accepted(engine(json!({"kind": "Custom", "args": ["--tensor-parallel-size", "2"]})));
    accepted(engine(json!({"tensorParallel": 2, "resources": {"limits": {"cpu": "1"}}})));
    refused("kind Custom", engine(json!({"kind": "Custom", "tensorParallel": 2})));
    let split = |kind: &'static str, n: u8| engine(json!({"kind": kind, "tensorParallel": n}));
    accepted(split("Truebeat", 16));
    accepted(split("VLLM", 64));
    refused("at most 16 ranks", split("Truebeat", 17));
    for flag in ["--tensor-parallel", "--tensor-parallel-size=2", "-tp", "-tp=2", "--tp", "--tp=2", "--tp-size"] {
        refused("say it once", engine(json!({"kind": "VLLM", "tensorParallel": 2, "args": ["a", flag, "2"]})));
    }
    refused("a GPU for each rank", engine(json!({"tensorParallel": 4, "resources": gpus("2")})));
}

#[test]
fn durations_are_read_at_admission() {
    const FIELDS: [&str; 9] = [
        "restartBackoff",
        "restartBackoffMax",
        "trialAfter",
        "stabilityWindow",
        "avoidFor",
        "unattendedAfter",
        "unattendedWindow",
        "poisonFor",
        "incidentTtl",
    ];
    let set = |field: &'static str, text: &'static str| {
        move |o: &mut Value| {
            // (so that the pause that is tried is not above its bound)
            o["spec"]["recovery"] = json!({"restartBackoffMax": "720h"});
            if field == "restartBackoffMax" {
                o["spec"]["recovery"]["restartBackoff"] = json!("0s");
            }
            o["spec"]["recovery"][field] = json!(text);
        }
    };
    for field in FIELDS {
        for fine in ["60000ms", "90s", "1h30m", "43200m", "720h", "2592000000ms"] {
            accepted(set(field, fine));
        }
        for bad in ["5", "soon", "5 m", "-5m", "1d", "1.5h", "720h1s", "999h", "99999999999h", "99999999999ms"] {
            refused("a number with a unit", set(field, bad));
        }
    }
    refused("at least 1m", set("incidentTtl", "59s"));
    refused("at least 1m before one is tried", set("trialAfter", "59s"));
    accepted(set("trialAfter", "60s"));
    accepted(set("trialAfter", "0s"));
    accepted(set("avoidFor", "0s"));
}

#[test]
fn the_truebeat_engine_needs_a_model_and_others_do_not() {
    refused("needs model.source", |o| drop(o["spec"].as_object_mut().unwrap().remove("model")));
    accepted(|o| {
        o["spec"].as_object_mut().unwrap().remove("model");
        o["spec"]["engine"]["kind"] = json!("VLLM");
    });
}

#[test]
fn ports_differ() {
    accepted(|o| o["spec"]["engine"]["port"] = json!(8001));
    refused("must differ", |o| o["spec"]["engine"]["port"] = json!(8080));
    refused("must differ", |o| o["spec"]["gate"] = json!({"port": 9400}));
}

#[test]
fn a_rollout_can_be_in_time() {
    accepted(|o| o["spec"]["rollout"] = json!({"soakSeconds": 59, "progressDeadlineSeconds": 60}));
    refused("no rollout would ever be in time", |o| {
        o["spec"]["rollout"] = json!({"soakSeconds": 60, "progressDeadlineSeconds": 60});
    });
}

#[test]
fn a_pause_fits_its_bound() {
    let pauses = |first: &'static str, most: &'static str| {
        move |o: &mut Value| o["spec"]["recovery"] = json!({"restartBackoff": first, "restartBackoffMax": most})
    };
    accepted(pauses("0s", "0s"));
    accepted(pauses("90s", "1m30s"));
    refused("the pause that it bounds", pauses("90s", "1m29s"));
    refused("the pause that it bounds", |o| o["spec"]["recovery"] = json!({"restartBackoff": "1h"}));
}

#[test]
fn the_gates_port_stays_what_it_was() {
    let old = infd(|_| ());
    infd(|o| o["spec"]["replicas"] = json!(7)).validate_cel_update(&old).expect("everything else may change");
    let moved = infd(|o| o["spec"]["gate"] = json!({"port": 8081}));
    moved.validate_cel().expect("valid for a new object");
    let errors = moved.validate_cel_update(&old).expect_err("another port").to_string();
    assert!(errors.contains("make another InferenceDeployment"), "{errors}");
}

#[test]
fn names_fit_a_service_and_labels() {
    accepted(|o| o["metadata"]["name"] = json!("a".repeat(48)));
    for name in ["a".repeat(49), "1abc".to_owned(), "a.b".to_owned()] {
        refused("also names a Service", |o| o["metadata"]["name"] = json!(name));
    }
}

#[test]
fn environment_rules() {
    let env = |e: Value| move |o: &mut Value| o["spec"]["engine"]["env"] = json!([e]);
    accepted(env(json!({"name": "A", "value": "1"})));
    accepted(env(json!({"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})));
    refused(
        "not both",
        env(json!({"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})),
    );
    refused("exactly one of secretKeyRef", env(json!({"name": "A", "valueFrom": {}})));
    refused("are the operator's", env(json!({"name": "TRUEBEAT_PAGE_DIR", "value": "/x"})));
}

#[test]
fn quantities() {
    let limits =
        |q: &'static str| move |o: &mut Value| o["spec"]["engine"]["resources"] = json!({"limits": {"cpu": q}});
    for quantity in ["1", "500m", "0.5", "8Gi", "1e3"] {
        accepted(limits(quantity));
    }
    for quantity in ["", "much", "1 Gi", "-1"] {
        refused("a quantity is a string", limits(quantity));
    }
}

#[test]
fn an_incident_never_changes_its_subject() {
    let spec = EngineIncidentSpec { episode_id: "a".into(), pod_uid: "u".into(), ..Default::default() };
    let old = EngineIncident::new("i", spec.clone());
    let class = EngineIncidentSpec { class: "Livelock".into(), ..spec.clone() };
    EngineIncident::new("i", class).validate_cel_update(&old).expect("a better class is allowed");
    let other = EngineIncidentSpec { episode_id: "b".into(), ..spec };
    let errors = EngineIncident::new("i", other).validate_cel_update(&old).expect_err("another episode").to_string();
    assert!(errors.contains("one episode of one pod"), "{errors}");
}

#[test]
fn the_examples_are_valid() {
    let folder = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).expect("docs/examples") {
        let path = entry.unwrap().path();
        if path.is_dir() {
            continue; // other people's kinds
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for document in text.split("\n---\n") {
            let value: Value = serde_saphyr::from_str(document).unwrap();
            if value["kind"] == "InferenceDeployment" {
                let object: InferenceDeployment =
                    serde_json::from_value(value).expect("an example has the right shape");
                object.validate_cel().unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                seen += 1;
            }
        }
    }
    assert!(seen >= 6, "Truebeat twice, vLLM twice, SGLang and llama.cpp");
}
