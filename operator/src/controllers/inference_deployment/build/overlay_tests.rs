//! What an overlay may do, and that nothing of the pod contract can be taken away by one.

use super::*;
use crate::controllers::inference_deployment::{
    build,
    testing::{self, infd, infd_vllm},
    validate::validate,
};

fn overlaid(overlay: Value) -> crds::InferenceDeployment {
    let mut object = infd_vllm("llama");
    object.spec.pod_overlay = Some(serde_json::from_value(overlay).unwrap());
    object
}

fn template(overlay: Value) -> Value {
    let object = overlaid(overlay);
    assert_eq!(validate(&object), Vec::<String>::new());
    testing::template(&object)
}

#[test]
fn parts_of_every_kind_are_merged() {
    let template = template(json!({
        "metadata": {"labels": {"team": "a"}, "annotations": {"example.com/note": "b"}},
        "spec": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "kernels"}}],
            "containers": [{"name": "engine", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}],
            "initContainers": [{"name": "fetch", "image": "fetch:1", "volumeMounts": [{"name": "cache", "mountPath": "/cache"}]}],
        },
    }));
    let spec = &template["spec"];
    assert_eq!((&template["metadata"]["labels"]["team"], &spec["nodeSelector"]["gpu"]), (&json!("a"), &json!("h100")));
    let names = |list: &str| -> Vec<String> {
        spec[list].as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(
        (names("initContainers"), names("containers")),
        (vec!["fetch".into(), "agent".into()], vec!["engine".into()])
    );
    assert!(names("volumes").contains(&"cache".to_owned()) && names("volumes").contains(&"page".to_owned()));
    let engine = &spec["containers"][0];
    let mounts = engine["volumeMounts"].as_array().unwrap();
    assert!(mounts.len() > 3 && mounts.iter().any(|mount| mount["mountPath"] == "/cache"));
    assert!(engine["readinessProbe"].is_object() && engine["image"] == "vllm:1", "ours are still there");
    assert_eq!(spec["initContainers"][0]["securityContext"]["capabilities"]["drop"][0], "ALL");
    let typed: k8s_openapi::api::core::v1::PodTemplateSpec = serde_json::from_value(template.clone()).unwrap();
    assert_eq!(serde_json::to_value(typed).unwrap(), template, "the typed API reads all of it");
}

#[test]
fn fault_a17_what_no_pod_has_room_for_is_refused_in_words() {
    let of_size = |bytes: usize| {
        let empty = json!({"nodeSelector": {"example.com/blob": ""}}).to_string().len();
        validate(&overlaid(json!({"spec": {"nodeSelector": {"example.com/blob": "x".repeat(bytes - empty)}}})))
    };
    assert_eq!(of_size(SPEC_BYTES_MAX), Vec::<String>::new());
    let said = "spec.podOverlay.spec: 524289 bytes are too many, at most 524288 can stand in every pod";
    assert_eq!(of_size(SPEC_BYTES_MAX + 1), [said]);
}

/// What other people's templates leave behind takes nothing of ours away.
#[test]
fn a_field_that_is_null_says_nothing() {
    let bare = template(json!({"spec": {"nodeSelector": {"gpu": "h100"}}}));
    let nulls = template(json!({"spec": {
        "nodeSelector": {"gpu": "h100", "zone": null}, "volumes": null, "dnsPolicy": null, "initContainers": null, "affinity": {"nodeAffinity": null},
        "containers": [{"name": "engine", "volumeMounts": null, "envFrom": null}],
    }}));
    assert_eq!(nulls, bare, "to the revision");
    assert_eq!(template(json!({"spec": {"containers": null}}))["spec"]["containers"][0]["name"], "engine");
}

#[test]
fn a_claimed_device_reaches_the_engine_and_has_no_spare_for_a_surge() {
    let mut object = overlaid(json!({"spec": {
        "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "two-h100"}],
        "containers": [{"name": "engine", "resources": {"claims": [{"name": "gpus"}]}}],
    }}));
    object.spec.engine.resources = None;
    assert_eq!(validate(&object), Vec::<String>::new());
    let spec = testing::template(&object)["spec"].clone();
    assert_eq!(spec["resourceClaims"][0]["resourceClaimTemplateName"], "two-h100");
    assert_eq!(spec["containers"][0]["resources"]["claims"], json!([{"name": "gpus"}]));
    assert!(crate::controllers::inference_deployment::validate::asks_for_devices(&object.spec));
    let limits = json!({"spec": {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "1"}}}]}});
    let problems = validate(&overlaid(limits)).join("; ");
    assert!(problems.contains("resources.limits") && problems.contains("set spec.engine.resources"), "{problems}");
}

#[test]
fn what_the_pod_contract_hangs_on_is_refused_with_a_message() {
    let container = |fields: Value| {
        let mut container = json!({"name": "engine"});
        container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"spec": {"containers": [container]}})
    };
    let init = |fields: Value| {
        let mut container = json!({"name": "fetch", "image": "fetch:1"});
        container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"spec": {"initContainers": [container]}})
    };
    let cases = [
        (json!({"spec": {"shareProcessNamespace": false}}), "watches the engine's processes"),
        (json!({"spec": {"serviceAccountName": "admin"}}), "the agent's right"),
        (json!({"spec": {"hostNetwork": true}}), "cannot be laid over"),
        (json!({"spec": {"terminationGracePeriodSeconds": 1}}), "set spec.drainSeconds"),
        (json!({"spec": {"nodeSelektor": {}}}), "nodeSelektor is no field"),
        (json!({"spec": {"nodeSelector": 7}}), "invalid type"),
        (json!({"spec": {"containers": [{"name": "helper", "image": "x"}]}}), "only engine may be named"),
        (json!({"spec": {"containers": [{"name": "agent", "image": "x"}]}}), "spec.agent"),
        (container(json!({"livenessProbe": {"httpGet": {"path": "/health", "port": 8000}}})), "without a grant"),
        (container(json!({"readinessProbe": {"httpGet": {"path": "/health", "port": 8000}}})), "out of traffic"),
        (container(json!({"securityContext": {"privileged": true}})), "without any right"),
        (container(json!({"image": "x"})), "set spec.engine.image"),
        (container(json!({"volumeMounts": [{"name": "c", "mountPath": "/run/truebeat/x"}]})), "mounts its own"),
        (container(json!({"volumeMounts": [{"name": "token", "mountPath": "/t"}]})), "\"token\" is the operator's"),
        (json!({"spec": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]}}), "hostPath is not allowed"),
        (json!({"spec": {"volumes": [{"name": "page", "emptyDir": {}}]}}), "this name is the operator's"),
        (
            json!({"spec": {"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}}),
            "the agent's right",
        ),
        (init(json!({"restartPolicy": "Always"})), "must end before the agent"),
        (init(json!({"securityContext": {"privileged": true}})), "without any right"),
        (init(json!({"volumeMounts": [{"name": "agent", "mountPath": "/a"}]})), "\"agent\" is the operator's"),
        (json!({"spec": {"initContainers": [{"name": "agent", "image": "x"}]}}), "this name is the operator's"),
        (json!({"spec": {"readinessGates": [{"conditionType": "truebeat.io/progressing"}]}}), "is the operator's"),
        (json!({"metadata": {"labels": {crds::LABEL_DEPLOYMENT: "other"}}}), "is the operator's"),
        (json!({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}), "is the operator's"),
        (json!({"metadata": {"annotations": {"truebeat.io/restart-grant": "e"}}}), "is the operator's"),
        (
            json!({"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "9"}}}),
            "is the operator's",
        ),
    ];
    for (overlay, words) in cases {
        let problems = validate(&overlaid(overlay.clone()));
        assert!(problems.len() == 1 && problems[0].contains(words), "{overlay}: {problems:?}");
        assert!(problems[0].starts_with("spec.podOverlay"), "{problems:?}");
    }
}

#[test]
fn an_empty_overlay_changes_nothing() {
    let mut object = infd("chat");
    let before = build::build(&object).pop().unwrap().body;
    object.spec.pod_overlay = Some(PodOverlay::default());
    assert_eq!(build::build(&object).pop().unwrap().body, before);
}
