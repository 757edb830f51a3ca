//! What people may do with InferenceDeployments and incidents: two ClusterRoles that Kubernetes adds to its own `view`, `edit` and
//! `admin`, so that whoever holds one of these in a namespace needs no role of ours. Bound to nobody.

use crds::GROUP;
use serde_json::{Value, json};

use super::{labels, rule};

const INFDS: &str = "inferencedeployments";
const INCIDENTS: &str = "engineincidents";

/// Reads both, and so does whoever may write.
pub fn view() -> Value {
    let kinds =
        [INFDS, "inferencedeployments/status", "inferencedeployments/scale", INCIDENTS, "engineincidents/status"];
    role("truebeat-view", &["view", "edit", "admin"], &[rule(GROUP, &kinds, &["get", "list", "watch"])])
}

/// Writes what a person asks for. Incidents are the operator's, and restarts are counted by them.
pub fn edit() -> Value {
    let write = ["create", "patch", "update", "delete", "deletecollection"];
    let rules = [rule(GROUP, &[INFDS], &write), rule(GROUP, &["inferencedeployments/scale"], &["patch", "update"])];
    role("truebeat-edit", &["edit", "admin"], &rules)
}

fn role(name: &str, into: &[&str], rules: &[Value]) -> Value {
    let mut labels = labels();
    for role in into {
        labels[format!("rbac.authorization.k8s.io/aggregate-to-{role}")] = json!("true");
    }
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name, "labels": labels},
        "rules": rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_may_view_changes_nothing_and_whoever_may_edit_writes_no_status_and_no_incident() {
        let read = json!(["get", "list", "watch"]);
        assert!(view()["rules"].as_array().unwrap().iter().all(|rule| rule["verbs"] == read));
        let written = edit()["rules"].to_string();
        assert!(written.contains(INFDS) && !written.contains("status") && !written.contains(INCIDENTS), "{written}");
        for rule in view()["rules"].as_array().unwrap().iter().chain(edit()["rules"].as_array().unwrap()) {
            assert_eq!(rule["apiGroups"], json!([GROUP]));
        }
    }
}
