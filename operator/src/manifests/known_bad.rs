//! The warning of engine flags that upstream knows to be bad (`crds::known_bad`), given by the API server to whoever applies them. It refuses
//! nothing: its binding only warns, and where an expression fails, or costs too much, nobody hears of it.

use crds::known_bad::{ENTRIES, KnownBad, cel_variables};
use crds::{GROUP, VERSION};
use serde_json::{Value, json};

use super::labels;

pub const POLICY: &str = "truebeat-known-bad";

/// The policy.
pub fn policy() -> Value {
    let variable = |(name, expression): (&str, String)| json!({"name": name, "expression": expression});
    let validation = |entry: &KnownBad| json!({"expression": entry.cel(), "message": entry.words()});
    json!({
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": POLICY, "labels": labels()},
        "spec": {
            "failurePolicy": "Ignore",
            // the object alone: what the operator writes, and what an autoscaler does, are subresources
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [GROUP], "apiVersions": [VERSION], "operations": ["CREATE", "UPDATE"], "resources": ["inferencedeployments"],
                "scope": "*",
            }]},
            "variables": cel_variables().into_iter().map(variable).collect::<Vec<_>>(),
            "validations": ENTRIES.iter().map(validation).collect::<Vec<_>>(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifests::{IMAGE, install};

    /// Of the policy and its binding as they are installed, whatever else is there.
    #[test]
    fn it_only_warns_of_what_people_apply() {
        let policy = policy();
        assert_eq!(policy["spec"]["failurePolicy"], "Ignore");
        let rules = &policy["spec"]["matchConstraints"]["resourceRules"];
        assert_eq!(rules[0]["resources"], json!(["inferencedeployments"]));
        let installed = install(IMAGE, "IfNotPresent").unwrap();
        let binding = format!("policyName: {POLICY}\n  validationActions:\n  - Warn\n");
        assert!(installed.contains(&binding) && installed.matches(&format!("policyName: {POLICY}")).count() == 1);
    }
}
