//! Stage 3, pure: from a spec to the objects that realise it. No client, no clock; equal input gives equal bytes.
//!
//! Objects are JSON with only the fields that the operator owns, for server-side apply (P9: a field that is not here
//! stays its owner's). A test reads each back through the typed API, so that a misspelt field cannot hide.

pub mod overlay;
mod place;
mod pod;
pub mod revision;

#[cfg(test)]
mod hostile_tests;

use crds::{
    AGENT_SERVICE_ACCOUNT_SUFFIX, InferenceDeployment, LABEL_DEPLOYMENT, LABEL_ENGINE_KIND,
    recovery_note::{ANNOTATION_RECOVERY, RecoveryNote},
};
use kube::{Resource, ResourceExt, core::ApiResource};
use serde_json::{Value, json};

use super::validate::asks_for_devices;
use crate::controllers::nodes::plan::avoid_label;

/// Port of the agent's HTTP: probes, verdict, metrics, drain.
pub const AGENT_PORT: i32 = 9400;
/// What an engine may need to exit after SIGTERM, in seconds, on top of the drain.
pub const ENGINE_EXIT_SECONDS: i32 = 15;

/// One object that belongs to an InferenceDeployment.
#[derive(Debug, Clone, PartialEq)]
pub struct Child {
    /// Group, version, kind and plural, for a dynamic API.
    pub resource: ApiResource,
    pub name: String,
    /// The whole object, `apiVersion` to the last field that the operator owns.
    pub body: Value,
}

/// The kinds that [`build`] makes, in the order in which they are applied: rights before the pods that need them.
pub fn kinds() -> [ApiResource; 6] {
    use k8s_openapi::api::{apps::v1::Deployment, core::v1::Service, core::v1::ServiceAccount};
    use k8s_openapi::api::{policy::v1::PodDisruptionBudget, rbac::v1::Role, rbac::v1::RoleBinding};
    [
        ApiResource::erase::<ServiceAccount>(&()),
        ApiResource::erase::<Role>(&()),
        ApiResource::erase::<RoleBinding>(&()),
        ApiResource::erase::<Service>(&()),
        ApiResource::erase::<PodDisruptionBudget>(&()),
        ApiResource::erase::<Deployment>(&()),
    ]
}

/// Name of the child of `kind`: the InferenceDeployment's own, except for the agent's rights.
pub fn child_name(infd: &str, kind: &str) -> String {
    match kind {
        "ServiceAccount" | "Role" | "RoleBinding" => format!("{infd}{AGENT_SERVICE_ACCOUNT_SUFFIX}"),
        _ => infd.to_owned(),
    }
}

/// The label selector of the pods, as a string (scale subresource, list calls).
pub fn selector(infd: &str) -> String {
    format!("{LABEL_DEPLOYMENT}={infd}")
}

/// Everything that realises `infd`.
pub fn build(infd: &InferenceDeployment) -> Vec<Child> {
    kinds()
        .into_iter()
        .map(|resource| {
            let name = child_name(&infd.name_any(), &resource.kind);
            let mut body = match resource.kind.as_str() {
                "ServiceAccount" => json!({"automountServiceAccountToken": false}),
                "Role" => role(),
                "RoleBinding" => role_binding(infd, &name),
                "Service" => service(infd),
                "PodDisruptionBudget" => disruption_budget(infd),
                _ => deployment(infd),
            };
            body["apiVersion"] = json!(resource.api_version);
            body["kind"] = json!(resource.kind);
            body["metadata"] = metadata(infd, &name);
            Child { resource, name, body }
        })
        .collect()
}

fn metadata(infd: &InferenceDeployment, name: &str) -> Value {
    let owner = infd.controller_owner_ref(&());
    json!({
        "name": name,
        "namespace": infd.namespace(),
        "labels": labels(&infd.name_any()),
        "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
    })
}

/// Labels of every child and of the pods.
pub fn labels(infd: &str) -> Value {
    json!({
        LABEL_DEPLOYMENT: infd,
        "app.kubernetes.io/name": "truebeat",
        "app.kubernetes.io/instance": infd,
        "app.kubernetes.io/component": "inference",
        "app.kubernetes.io/managed-by": "truebeat-operator",
    })
}

/// The agent's only right. The ValidatingAdmissionPolicy narrows it to `truebeat.io/*` conditions of its own pod.
fn role() -> Value {
    json!({"rules": [{"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]}]})
}

fn role_binding(infd: &InferenceDeployment, account: &str) -> Value {
    json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": infd.namespace()}],
    })
}

/// The target port is a number: a port name of a sidecar is not found by every version of the endpoint controller.
fn service(infd: &InferenceDeployment) -> Value {
    json!({"spec": {
        "type": "ClusterIP",
        "selector": {LABEL_DEPLOYMENT: infd.name_any()},
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": infd.spec.gate.port}],
    }})
}

/// Drains of nodes take replicas one after another. One that serves nobody is never in their way.
fn disruption_budget(infd: &InferenceDeployment) -> Value {
    json!({"spec": {
        "maxUnavailable": infd.spec.rollout.max_unavailable,
        "selector": {"matchLabels": {LABEL_DEPLOYMENT: infd.name_any()}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }})
}

fn deployment(infd: &InferenceDeployment) -> Value {
    let rollout = &infd.spec.rollout;
    // A spare GPU is rare: replace in place where devices are asked for, else bring the new one up first.
    let surge = rollout.max_surge.unwrap_or(i32::from(!asks_for_devices(&infd.spec)));
    let unavailable = if surge == 0 { rollout.max_unavailable } else { 0 };
    let mut body = json!({"spec": {
        "replicas": infd.spec.replicas,
        "selector": {"matchLabels": {LABEL_DEPLOYMENT: infd.name_any()}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}},
        "revisionHistoryLimit": 3,
        "minReadySeconds": rollout.soak_seconds,
        "progressDeadlineSeconds": rollout.progress_deadline_seconds,
    }});
    body["spec"]["template"] = template(infd); // (what stands in `json!` is copied, and this is most of the object)
    body
}

/// The pod template with the user's overlay and its revision.
fn template(infd: &InferenceDeployment) -> Value {
    let mut template = bare_template(infd);
    if let Some(overlay) = &infd.spec.pod_overlay {
        overlay::merge(&mut template, overlay, &pod::security());
    }
    // after the overlay: nobody's own affinity takes the rule away
    place::keep_away(&mut template["spec"], &avoid_label(&infd.namespace().unwrap_or_default(), &infd.name_any()));
    revision::stamp(&mut template, infd.spec.rollout.attempt);
    template
}

/// The pod template as the operator alone builds it.
pub fn bare_template(infd: &InferenceDeployment) -> Value {
    let mut labels = labels(&infd.name_any());
    labels[LABEL_ENGINE_KIND] = json!(pod::kind_name(infd.spec.engine.kind));
    let recovery = RecoveryNote::of(&infd.spec.recovery).text();
    let annotations = json!({"kubectl.kubernetes.io/default-container": "engine", ANNOTATION_RECOVERY: recovery});
    let metadata = json!({"labels": labels, "annotations": annotations});
    let mut template = json!({"metadata": metadata});
    template["spec"] = pod::spec(infd);
    template
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{infd, infd_vllm};
    use serde::{Serialize, de::DeserializeOwned};

    fn typed<K: Serialize + DeserializeOwned>(child: &Child) {
        let object: K = serde_json::from_value(child.body.clone()).expect("the typed API reads it");
        assert_eq!(serde_json::to_value(object).unwrap(), child.body, "{}: a field got lost", child.resource.kind);
    }

    #[test]
    fn every_child_survives_the_typed_api() {
        for object in [infd("chat"), infd_vllm("llama")] {
            let children = build(&object);
            typed::<k8s_openapi::api::core::v1::ServiceAccount>(&children[0]);
            typed::<k8s_openapi::api::rbac::v1::Role>(&children[1]);
            typed::<k8s_openapi::api::rbac::v1::RoleBinding>(&children[2]);
            typed::<k8s_openapi::api::core::v1::Service>(&children[3]);
            typed::<k8s_openapi::api::policy::v1::PodDisruptionBudget>(&children[4]);
            typed::<k8s_openapi::api::apps::v1::Deployment>(&children[5]);
        }
    }

    #[test]
    fn children_of_a_truebeat_engine() {
        let bodies: Vec<_> = build(&infd("chat")).into_iter().map(|c| c.body).collect();
        insta::assert_json_snapshot!(bodies);
    }

    #[test]
    fn deployment_of_a_vllm_engine() {
        insta::assert_json_snapshot!(build(&infd_vllm("llama"))[5].body);
    }

    /// An image knows no user 1000, and PyTorch ends where the user has no name.
    #[test]
    fn an_engine_has_a_home_and_a_users_name_and_the_specs_own_win() {
        let value_of = |infd: &InferenceDeployment, name: &str| {
            let env = &build(infd)[5].body["spec"]["template"]["spec"]["containers"][0]["env"];
            let named: Vec<Value> = env.as_array().unwrap().iter().filter(|v| v["name"] == name).cloned().collect();
            assert_eq!(named.len(), 1, "{name}: {named:?}");
            named[0]["value"].clone()
        };
        let mut object = infd("chat");
        assert_eq!((value_of(&object, "HOME"), value_of(&object, "USER")), (json!("/tmp"), json!("truebeat")));
        object.spec.engine.env =
            serde_json::from_value(json!([{"name": "USER", "value": "vllm"}, {"name": "HOME", "value": "/h"}]))
                .unwrap();
        assert_eq!((value_of(&object, "HOME"), value_of(&object, "USER")), (json!("/h"), json!("vllm")));
    }

    /// The agent follows the file that the engine is told of, and makes room in it.
    #[test]
    fn engine_and_agent_see_one_log_that_is_in_nobodys_way() {
        let spec = &build(&infd("chat"))[5].body["spec"]["template"]["spec"];
        let named = |list: &Value, name: &str| -> Value {
            list.as_array().unwrap().iter().find(|item| item["name"] == name).cloned().unwrap_or_default()
        };
        let [engine, agent] = [&spec["containers"][0], &spec["initContainers"][0]].map(|container| {
            let file = named(&container["env"], "TRUEBEAT_LOG_FILE")["value"].as_str().unwrap().to_owned();
            let mount = named(&container["volumeMounts"], "engine-log");
            assert!(
                file.starts_with(&format!("{}/", mount["mountPath"].as_str().unwrap())) && mount["readOnly"].is_null()
            );
            file
        });
        assert_eq!(engine, agent);
        let volume = named(&spec["volumes"], "engine-log");
        assert_eq!(volume["emptyDir"], json!({"medium": "Memory", "sizeLimit": "16Mi"}));
        assert_eq!(named(&spec["initContainers"][0]["env"], "TRUEBEAT_TRIM_LOG")["value"], "true");
    }

    /// A pod writes to its own folder alone, reads all, and its engine sees neither.
    #[test]
    fn evidence_on_a_claim_is_written_in_a_folder_of_its_own_and_read_whole() {
        let mounts = |spec: &Value, list: &str| -> Vec<Value> {
            let all = spec[list][0]["volumeMounts"].as_array().unwrap().iter();
            all.filter(|mount| mount["name"] == "bundles").cloned().collect()
        };
        let spec = |infd: &InferenceDeployment| build(infd)[5].body["spec"]["template"]["spec"].clone();
        let mut object = infd("chat");
        let plain = json!({"name": "bundles", "mountPath": "/var/lib/truebeat/bundles"});
        assert_eq!(mounts(&spec(&object), "initContainers"), std::slice::from_ref(&plain));
        object.spec.agent.evidence = Some(crds::agent::Evidence { claim_name: "evidence".to_owned() });
        let (mut own, mut all) = (plain.clone(), plain);
        own["subPathExpr"] = json!("$(POD_NAME)");
        (all["mountPath"], all["readOnly"]) = (json!("/var/lib/truebeat/evidence"), json!(true));
        assert_eq!(mounts(&spec(&object), "initContainers"), [own, all]);
        assert_eq!(mounts(&spec(&object), "containers"), Vec::<Value>::new());
    }

    #[test]
    fn every_child_is_owned_and_in_the_same_namespace() {
        for child in build(&infd("chat")) {
            assert_eq!(child.body["metadata"]["namespace"], "serving"); // P10
            assert_eq!(child.body["metadata"]["ownerReferences"][0]["controller"], true);
        }
    }
}
