//! What a cluster needs before the first InferenceDeployment, besides the CRDs: namespace, rights, the admission policies
//! that narrow every agent and warn people, and the operator itself. `truebeat operator manifests` prints it; the committed
//! `operator/manifests/install.yaml` is the same text for the default image, held fresh by a test.

mod known_bad;
mod nodes;
mod people;

use crds::{AGENT_SERVICE_ACCOUNT_SUFFIX, GROUP};
use serde_json::{Value, json};

use crate::leader::elector::LEASE_NAME;

/// Where the operator lives.
pub const NAMESPACE: &str = "truebeat-system";
/// The image of the committed manifests.
pub const IMAGE: &str = "truebeat-operator:0.1.0";
const NAME: &str = "truebeat-operator";
const POLICY: &str = "truebeat-agent-own-pod-only";
const PORT: u16 = 9500;

/// All manifests as one YAML stream.
pub fn install(image: &str, pull_policy: &str) -> Result<String, crds::yaml::YamlError> {
    let objects = [
        ("Namespace", namespace()),
        ("ServiceAccount", account()),
        ("ClusterRole", cluster_role()),
        ("ClusterRoleBinding", binding("ClusterRoleBinding", "ClusterRole")),
        ("ClusterRole", people::view()),
        ("ClusterRole", people::edit()),
        ("Role", lease_role()),
        ("RoleBinding", binding("RoleBinding", "Role")),
        ("Lease", lease()),
        ("ValidatingAdmissionPolicy", policy()),
        ("ValidatingAdmissionPolicyBinding", policy_binding(POLICY, "Deny")),
        ("ValidatingAdmissionPolicy", nodes::policy()),
        ("ValidatingAdmissionPolicyBinding", policy_binding(nodes::POLICY, "Deny")),
        ("ValidatingAdmissionPolicy", known_bad::policy()),
        ("ValidatingAdmissionPolicyBinding", policy_binding(known_bad::POLICY, "Warn")),
        ("Deployment", deployment(image, pull_policy)),
    ];
    let mut documents = Vec::with_capacity(objects.len());
    for (name, object) in objects {
        documents.push(crds::yaml::to_yaml(name, &object)?);
    }
    Ok(documents.join("---\n"))
}

/// The parts of the chart that must never differ from these manifests, by their path below `charts/truebeat/generated`.
///
/// # Errors
/// An object cannot be written as YAML (never in practice).
pub fn chart_parts() -> Result<Vec<(String, String)>, crds::yaml::YamlError> {
    let rules = |role: Value| json!({"rules": role["rules"]});
    let parts = [
        ("cluster-role-rules.yaml", rules(cluster_role())),
        ("namespace-role-rules.yaml", json!({"rules": serving_rules()})),
        ("lease-role-rules.yaml", rules(lease_role())),
        ("view-role-rules.yaml", rules(people::view())),
        ("edit-role-rules.yaml", rules(people::edit())),
        ("admission-policy.yaml", json!({"spec": policy()["spec"]})),
        ("node-policy.yaml", json!({"spec": nodes::policy()["spec"]})),
        ("known-bad-policy.yaml", json!({"spec": known_bad::policy()["spec"]})),
    ];
    let mut files = Vec::new();
    for (name, object) in parts {
        files.push((name.to_owned(), crds::yaml::to_yaml(name, &object)?));
    }
    for (name, text) in crds::yaml::crdgen()? {
        files.push((format!("crds/{name}"), text));
    }
    Ok(files)
}

fn namespace() -> Value {
    let level = "pod-security.kubernetes.io/enforce";
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": {level: "restricted"}}})
}

fn metadata() -> Value {
    json!({"name": NAME, "namespace": NAMESPACE, "labels": labels()})
}

fn labels() -> Value {
    json!({"app.kubernetes.io/name": "truebeat", "app.kubernetes.io/component": "operator"})
}

fn account() -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata()})
}

fn cluster_role() -> Value {
    let mut rules = serving_rules();
    // where the escalation ends; what may be patched of a node is narrowed by a policy of its own ([`nodes`])
    rules.extend([rule("", &["nodes"], &["get", "list", "patch"]), rule("", &["nodes/status"], &["patch"])]);
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": NAME, "labels": labels()},
        "rules": rules,
    })
}

/// What the operator needs wherever InferenceDeployments are: all of it in the namespace of an operator that looks after one alone. No
/// delete on anything but incidents and pods that a restart did not cure: children go with their owner. `pods/status: patch` is needed
/// to hand it on.
fn serving_rules() -> Vec<Value> {
    let keep = ["get", "list", "watch", "create", "patch"];
    vec![
        rule(GROUP, &["inferencedeployments"], &["get", "list", "watch"]),
        rule(GROUP, &["inferencedeployments/status"], &["update"]),
        rule(GROUP, &["engineincidents"], &["list", "watch", "create", "patch", "delete"]),
        rule(GROUP, &["engineincidents/status"], &["patch"]),
        rule("apps", &["deployments"], &keep),
        // where a rollback finds the last good template
        rule("apps", &["replicasets"], &["list"]),
        rule("policy", &["poddisruptionbudgets"], &keep),
        rule("", &["services", "serviceaccounts"], &keep),
        rule("rbac.authorization.k8s.io", &["roles", "rolebindings"], &keep),
        rule("", &["pods"], &["list", "watch", "patch", "delete"]),
        rule("", &["pods/status"], &["patch"]),
        rule("events.k8s.io", &["events"], &["create"]),
    ]
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Value {
    json!({"apiGroups": [group], "resources": resources, "verbs": verbs})
}

fn lease_role() -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(),
        "rules": [
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create"]},
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [LEASE_NAME], "verbs": ["get", "update"]},
        ],
    })
}

/// The Lease of the leader election, held by nobody: where it is missing somebody deleted it (see `leader::lease`). It says
/// nothing of a holder, so that applying it again takes the lease from nobody.
pub fn lease() -> Value {
    let mut metadata = metadata();
    metadata["name"] = json!(LEASE_NAME);
    json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata})
}

fn binding(kind: &str, role: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": if role == "Role" { metadata() } else { json!({"name": NAME, "labels": labels()}) },
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": NAME},
        "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
    })
}

/// One policy for the agents of all namespaces (text measured in the pod contract): a token that is bound to a pod may
/// change the conditions `truebeat.io/*` of that very pod, and nothing else.
fn policy() -> Value {
    let uid_key = "authentication.kubernetes.io/pod-uid";
    let own_pod = json!({
        "expression": "variables.uid.size() == 1 && variables.uid[0] == oldObject.metadata.uid",
        "messageExpression": "'truebeat: this token may only patch the status of its own pod, not ' + object.metadata.name",
        "reason": "Forbidden",
    });
    let accounts = format!("[^:]+:.*{AGENT_SERVICE_ACCOUNT_SUFFIX}");
    update_policy(
        (POLICY, &["pods/status"]),
        ("only-truebeat-agents", &accounts),
        json!([
            {"name": "uid", "expression": format!("'{uid_key}' in request.userInfo.extra ? request.userInfo.extra['{uid_key}'] : []")},
            {"name": "oldConds", "expression": or_empty("oldObject", "status.conditions", "[]")},
            {"name": "newConds", "expression": or_empty("object", "status.conditions", "[]")},
        ]),
        vec![
            own_pod,
            validation(same_foreign_conditions(), "truebeat: only conditions of type truebeat.io/* may change"),
            validation(unchanged("status", &STATUS_FIELDS), "truebeat: only status.conditions may change"),
            validation(
                unchanged("metadata", &["labels", "annotations", "finalizers", "ownerReferences"]),
                "truebeat: metadata must not change",
            ),
        ],
    )
}

/// A policy over updates of core `resources` by service accounts (`NAMESPACE:NAME`, a regular expression).
fn update_policy(
    (name, resources): (&str, &[&str]),
    (condition, accounts): (&str, &str),
    variables: Value,
    validations: Vec<Value>,
) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name, "labels": labels()},
        "spec": {
            "failurePolicy": "Fail",
            // the scope is the server's own default: without it every apply of the same says that it configured something
            "matchConstraints": {"resourceRules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": resources, "scope": "*"},
            ]},
            "matchConditions": [{
                "name": condition,
                "expression": format!("request.userInfo.username.matches('^system:serviceaccount:{accounts}$')"),
            }],
            "variables": variables,
            "validations": validations,
        },
    })
}

fn validation(expression: String, message: &str) -> Value {
    json!({"expression": expression, "message": message, "reason": "Forbidden"})
}

/// A field that may be absent, in CEL.
fn or_empty(object: &str, path: &str, empty: &str) -> String {
    format!("has({object}.{path}) ? {object}.{path} : {empty}")
}

/// The conditions that are not ours are what they were; of the variables `oldConds` and `newConds`.
fn same_foreign_conditions() -> String {
    let foreign = |list: &str| format!("variables.{list}.filter(c, !c.type.startsWith('truebeat.io/'))");
    format!("{} == {}", foreign("oldConds"), foreign("newConds"))
}

/// CEL has no "object minus field", so each is named; `cluster_security` holds the list against the API server's own schema.
const STATUS_FIELDS: [&str; 20] = [
    "phase",
    "message",
    "reason",
    "startTime",
    "qosClass",
    "observedGeneration",
    "podIP",
    "podIPs",
    "hostIP",
    "hostIPs",
    "nominatedNodeName",
    "containerStatuses",
    "initContainerStatuses",
    "ephemeralContainerStatuses",
    "resize",
    "resources",
    "allocatedResources",
    "resourceClaimStatuses",
    "extendedResourceClaimStatus",
    "nodeAllocatableResourceClaimStatuses",
];

fn unchanged(part: &str, fields: &[&str]) -> String {
    let same = |field: &&str| format!("object.{part}.?{field} == oldObject.{part}.?{field}");
    fields.iter().map(same).collect::<Vec<_>>().join(" && ")
}

fn policy_binding(policy: &str, action: &str) -> Value {
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": policy, "labels": labels()},
        "spec": {"policyName": policy, "validationActions": [action]},
    })
}

/// Two replicas: one leads, one waits; a successor takes over at once when the lease is released.
fn deployment(image: &str, pull_policy: &str) -> Value {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let probe =
        |path: &str| json!({"httpGet": {"path": path, "port": PORT}, "periodSeconds": 5, "failureThreshold": 3});
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels()},
            "template": {
                "metadata": {"labels": labels()},
                "spec": {
                    "serviceAccountName": NAME,
                    "enableServiceLinks": false,
                    "terminationGracePeriodSeconds": 10,
                    "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [{
                        "name": "operator",
                        "image": image,
                        "imagePullPolicy": pull_policy,
                        "args": ["operator"],
                        "env": [
                            field("POD_NAME", "metadata.name"),
                            field("POD_NAMESPACE", "metadata.namespace"),
                            field("POD_UID", "metadata.uid"),
                        ],
                        "ports": [{"name": "http", "containerPort": PORT}],
                        "livenessProbe": probe("/livez"),
                        "readinessProbe": probe("/readyz"),
                        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }],
                },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Serialize, de::DeserializeOwned};

    fn fresh(path: &str, text: &str) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
            std::fs::write(&path, text).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == text, "{} is stale: run `make regenerate`", path.display());
    }

    #[test]
    fn committed_manifests_are_fresh() {
        fresh("manifests/install.yaml", &install(IMAGE, "IfNotPresent").unwrap());
    }

    #[test]
    fn the_charts_parts_are_fresh_and_no_other_file_is_there() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/truebeat/generated");
        let parts = chart_parts().unwrap();
        for (name, text) in &parts {
            fresh(&format!("../charts/truebeat/generated/{name}"), text);
        }
        let count =
            |dir: &std::path::Path| std::fs::read_dir(dir).unwrap().flatten().filter(|e| e.path().is_file()).count();
        assert_eq!(count(&folder) + count(&folder.join("crds")), parts.len());
    }

    fn typed<K: Serialize + DeserializeOwned>(object: Value) {
        let read: K = serde_json::from_value(object.clone()).expect("the typed API reads it");
        assert_eq!(serde_json::to_value(read).unwrap(), object, "a field got lost");
    }

    #[test]
    fn every_object_survives_the_typed_api() {
        use k8s_openapi::api::{
            admissionregistration::v1 as admission, apps::v1 as apps, coordination::v1 as coordination,
            core::v1 as core, rbac::v1 as rbac,
        };
        typed::<core::Namespace>(namespace());
        typed::<core::ServiceAccount>(account());
        typed::<rbac::ClusterRole>(cluster_role());
        typed::<rbac::ClusterRole>(people::view());
        typed::<rbac::ClusterRole>(people::edit());
        typed::<rbac::ClusterRoleBinding>(binding("ClusterRoleBinding", "ClusterRole"));
        typed::<rbac::Role>(lease_role());
        typed::<rbac::RoleBinding>(binding("RoleBinding", "Role"));
        typed::<admission::ValidatingAdmissionPolicy>(policy());
        typed::<admission::ValidatingAdmissionPolicy>(nodes::policy());
        typed::<admission::ValidatingAdmissionPolicy>(known_bad::policy());
        typed::<admission::ValidatingAdmissionPolicyBinding>(policy_binding(POLICY, "Deny"));
        typed::<coordination::Lease>(lease());
        typed::<apps::Deployment>(deployment(IMAGE, "IfNotPresent"));
    }

    /// The operator can hand on only what it holds (escalation is refused by the API server), in one namespace as well.
    #[test]
    fn the_operator_holds_what_it_hands_to_agents() {
        let handed = |rule: &Value| rule["resources"] == json!(["pods/status"]) && rule["verbs"] == json!(["patch"]);
        assert!(serving_rules().iter().any(handed));
    }

    /// Nothing waits on somebody's PodDisruptionBudget: pods that must go are deleted by UID, and whoever drains a node asks for himself.
    #[test]
    fn fault_a7_no_right_to_evict() {
        let asked = cluster_role()["rules"].to_string();
        assert!(!asked.contains("eviction") && asked.contains("poddisruptionbudgets"), "{asked}");
    }

    /// An operator of one namespace gets a Role, which cannot name what belongs to the whole cluster, and needs nothing of that.
    #[test]
    fn nodes_are_the_only_right_beyond_a_namespace() {
        let all = cluster_role()["rules"].as_array().unwrap().clone();
        let beyond: Vec<&Value> = all.iter().filter(|rule| !serving_rules().contains(rule)).collect();
        let of_nodes = |rule: &&Value| rule["resources"][0].as_str().is_some_and(|name| name.starts_with("nodes"));
        assert!(beyond.len() == 2 && beyond.iter().all(of_nodes), "{beyond:?}");
    }
}
