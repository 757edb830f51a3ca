//! Where a pod may run, pure: every pod refuses a node that carries its InferenceDeployment's label of avoidance. The rule
//! stands in the template from the beginning and never changes, so that avoiding a node rolls nothing out: only the label
//! on the node comes and goes, and a running pod stays where it is.

use serde_json::{Value, json};

/// Adds the rule to a pod's `spec`, to each alternative where somebody asked for nodes of his own.
pub fn keep_away(spec: &mut Value, label: &str) {
    let rule = json!({"key": label, "operator": "DoesNotExist"});
    let required = &mut spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = &mut required["nodeSelectorTerms"];
    if terms.as_array().is_none_or(Vec::is_empty) {
        *terms = json!([{}]);
    }
    for term in terms.as_array_mut().into_iter().flatten() {
        match term["matchExpressions"].as_array_mut() {
            Some(rules) => rules.push(rule.clone()),
            None => term["matchExpressions"] = json!([rule]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alternative_gets_the_rule() {
        let mut plain = json!({"containers": []});
        keep_away(&mut plain, "avoid.truebeat.io/chat-1");
        insta::assert_json_snapshot!(plain);
        let mut own = json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]},
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
        ]}}}});
        keep_away(&mut own, "avoid.truebeat.io/chat-1");
        insta::assert_json_snapshot!(own["affinity"]);
    }
}
