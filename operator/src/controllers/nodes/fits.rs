//! On which nodes a pod could run at all, as far as nodes tell: what Kubernetes' scheduler asks of a node's state, devices, labels and taints
//! (`NodeUnschedulable`, `NodeAffinity`, `TaintToleration`; k8s.io/docs/concepts/scheduling-eviction). Pure. Whether there is room is
//! not asked: a place that is taken today is a place all the same.
//!
//! The spec does not say all: webhooks, quotas and a cloud's own rules add tolerations when a pod is made. So pods that run are believed: where
//! one stands another could, and what taints there are on its node are tolerated.

use std::collections::{BTreeMap, BTreeSet};

use crds::inference_deployment::InferenceDeploymentSpec;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Taint, Toleration};
use serde::Deserialize;
use serde_json::Value;

use super::view::NodeView;
use crate::controllers::inference_deployment::{build::overlay::said, observed::PodView, validate::devices};

/// What the pods of an InferenceDeployment ask of a node.
#[derive(Debug, Default)]
pub struct Needs {
    /// Nodes on which some of them stand.
    here: BTreeSet<String>,
    /// Taints of those nodes.
    borne: Vec<Taint>,
    devices: Vec<String>,
    node_selector: BTreeMap<String, String>,
    affinity: Option<NodeSelector>,
    tolerations: Vec<Toleration>,
}

impl Needs {
    /// Of the pods of this `spec`. What of its overlay cannot be read asks for nothing; that it cannot is told elsewhere.
    pub fn of(spec: &InferenceDeploymentSpec) -> Self {
        let overlay = spec.pod_overlay.as_ref().map(|overlay| said(&overlay.spec)).unwrap_or_default();
        let field = |name: &str| overlay.get(name);
        let required = "/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
        Needs {
            devices: devices(spec),
            node_selector: field("nodeSelector").and_then(read).unwrap_or_default(),
            affinity: field("affinity").and_then(|affinity| read(affinity.pointer(required)?)),
            tolerations: field("tolerations").and_then(read).unwrap_or_default(),
            ..Needs::default()
        }
    }

    /// The same with what its own pods show by where they stand.
    pub fn shown_by(mut self, pods: &[PodView], nodes: &[NodeView]) -> Self {
        self.here = pods.iter().map(|pod| pod.node.clone()).filter(|node| !node.is_empty()).collect();
        let stood_on = nodes.iter().filter(|node| self.here.contains(&node.name));
        self.borne = stood_on.flat_map(|node| node.taints.clone()).collect();
        self
    }

    /// Could a pod that asks for this run on `node`?
    pub fn fit(&self, node: &NodeView) -> bool {
        node.usable && (self.here.contains(&node.name) || self.suits(node))
    }

    /// An affinity without terms, or a term without rules, gets the operator's own rule (`build::place`), and asks for nothing else.
    fn suits(&self, node: &NodeView) -> bool {
        let mut terms = self.affinity.iter().flat_map(|wanted| &wanted.node_selector_terms).peekable();
        let chosen = terms.peek().is_none() || terms.any(|term| meets(node, term));
        chosen
            && self.devices.iter().all(|device| node.devices.contains(device))
            && self.node_selector.iter().all(|(key, value)| node.labels.get(key) == Some(value))
            && node.taints.iter().all(|taint| self.tolerates(taint))
    }

    /// A taint that is named like a device keeps away only who does not ask for it, where the admission plugin `ExtendedResourceToleration` is
    /// on.
    fn tolerates(&self, taint: &Taint) -> bool {
        let of_device = taint.effect == "NoSchedule" && self.devices.contains(&taint.key);
        let same =
            |other: &Taint| (&other.key, &other.value, &other.effect) == (&taint.key, &taint.value, &taint.effect);
        of_device || self.borne.iter().any(same) || self.tolerations.iter().any(|by| tolerates(by, taint))
    }
}

fn read<'a, T: Deserialize<'a>>(value: &'a Value) -> Option<T> {
    T::deserialize(value).ok()
}

fn meets(node: &NodeView, term: &NodeSelectorTerm) -> bool {
    let (mut by_label, mut by_field) = (term.match_expressions.iter().flatten(), term.match_fields.iter().flatten());
    by_label.all(|rule| holds(rule, node.labels.get(&rule.key)))
        && by_field.all(|rule| holds(rule, Some(&node.name).filter(|_| rule.key == "metadata.name")))
}

fn holds(rule: &NodeSelectorRequirement, value: Option<&String>) -> bool {
    let values = rule.values.as_deref().unwrap_or_default();
    let number = |text: &String| text.parse::<i64>().ok();
    let ordered = |by: fn(&i64, &i64) -> bool| match (value.and_then(number), values.first().and_then(number)) {
        (Some(value), Some(bound)) => by(&value, &bound),
        _ => false,
    };
    match rule.operator.as_str() {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => ordered(i64::gt),
        "Lt" => ordered(i64::lt),
        _ => false,
    }
}

/// No effect, no key: each stands for all.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
    let effect = given(&toleration.effect).is_none_or(|effect| effect == taint.effect);
    let key = given(&toleration.key);
    let exists = toleration.operator.as_deref() == Some("Exists");
    let named = key.as_ref().map_or(exists, |key| *key == taint.key);
    effect && named && (exists || given(&toleration.value) == given(&taint.value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{healthy, infd, infd_vllm};
    use serde_json::json;

    fn node(labels: &[(&str, &str)], taints: Value) -> NodeView {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let taints = serde_json::from_value(taints).unwrap();
        NodeView { name: "n1".to_owned(), usable: true, labels, taints, ..NodeView::default() }
    }

    fn fits(overlay: Value, node: &NodeView) -> bool {
        let mut object = infd("chat");
        object.spec.pod_overlay.get_or_insert_default().spec = serde_json::from_value(overlay).unwrap();
        Needs::of(&object.spec).fit(node)
    }

    #[test]
    fn a_node_must_be_open_and_have_the_devices() {
        let mut open = node(&[], json!([]));
        assert!(fits(json!({}), &open));
        assert!(!Needs::of(&infd_vllm("llama").spec).fit(&open), "it asks for a GPU");
        open.devices = devices(&infd_vllm("llama").spec).into_iter().collect();
        assert!(Needs::of(&infd_vllm("llama").spec).fit(&open));
        open.usable = false;
        assert!(!fits(json!({}), &open));
    }

    #[test]
    fn every_label_of_the_selector_must_be_there() {
        let h100 = node(&[("gpu", "h100"), ("zone", "a")], json!([]));
        for (selector, wanted) in [
            (json!({"gpu": "h100"}), true),
            (json!({"gpu": "h100", "zone": "b"}), false),
            (json!({"disk": "ssd"}), false),
            (json!({"gpu": "h100", "zone": null}), true), // somebody else's template, and not said
            (json!({"gpu": "a100", "zone": null}), false),
            (json!(7), true), // refused elsewhere
        ] {
            assert_eq!(fits(json!({"nodeSelector": selector}), &h100), wanted, "{selector}");
        }
    }

    #[test]
    fn one_term_of_the_affinity_must_be_met_in_all_its_rules() {
        let here = node(&[("gpu", "h100"), ("cores", "64")], json!([]));
        let rule =
            |key: &str, operator: &str, values: &[&str]| json!({"key": key, "operator": operator, "values": values});
        let met = |terms: Value| {
            let required = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
            fits(json!({"affinity": {"nodeAffinity": required}}), &here)
        };
        for (rule, wanted) in [
            (rule("gpu", "In", &["a100", "h100"]), true),
            (rule("gpu", "In", &["a100"]), false),
            (rule("gpu", "NotIn", &["a100"]), true),
            (rule("gpu", "NotIn", &["h100"]), false),
            (rule("disk", "NotIn", &["hdd"]), true),
            (rule("gpu", "Exists", &[]), true),
            (rule("disk", "Exists", &[]), false),
            (rule("disk", "DoesNotExist", &[]), true),
            (rule("gpu", "DoesNotExist", &[]), false),
            (rule("cores", "Gt", &["63"]), true),
            (rule("cores", "Gt", &["64"]), false),
            (rule("cores", "Lt", &["65"]), true),
            (rule("gpu", "Lt", &["65"]), false),
            (rule("gpu", "Near", &["h100"]), false),
        ] {
            assert_eq!(met(json!([{"matchExpressions": [rule]}])), wanted, "{rule}");
        }
        let (yes, no) = (rule("gpu", "Exists", &[]), rule("disk", "Exists", &[]));
        assert!(met(json!([{"matchExpressions": [no]}, {"matchExpressions": [yes]}])), "one of the terms");
        assert!(!met(json!([{"matchExpressions": [yes, no]}])), "all of its rules");
        assert!(met(json!([])) && met(Value::Null) && met(json!([{}])), "as the pods that are built from it");
        let named = |name: &str| json!([{"matchFields": [rule("metadata.name", "In", &[name])]}]);
        assert!(met(named("n1")) && !met(named("n2")));
    }

    #[test]
    fn every_taint_must_be_tolerated() {
        let taint = json!([{"key": "team", "value": "a", "effect": "NoSchedule"}]);
        let tainted = node(&[], taint);
        for (toleration, wanted) in [
            (json!({"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"}), true),
            (json!({"key": "team", "value": "a"}), true),
            (json!({"key": "team", "value": "b"}), false),
            (json!({"key": "team", "operator": "Exists"}), true),
            (json!({"key": "team", "operator": "Exists", "effect": "NoExecute"}), false),
            (json!({"key": "gpu", "operator": "Exists"}), false),
            (json!({"operator": "Exists"}), true),
            (json!({"value": "a"}), false),
        ] {
            assert_eq!(fits(json!({"tolerations": [toleration]}), &tainted), wanted, "{toleration}");
        }
        assert!(!fits(json!({}), &tainted));
        let mut gpus = node(&[], json!([{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]));
        gpus.devices = devices(&infd_vllm("llama").spec).into_iter().collect();
        assert!(gpus.devices.contains("nvidia.com/gpu"), "{:?}", gpus.devices);
        assert!(Needs::of(&infd_vllm("llama").spec).fit(&gpus) && !fits(json!({}), &gpus));
        gpus.taints[0].effect = "NoExecute".to_owned();
        assert!(!Needs::of(&infd_vllm("llama").spec).fit(&gpus), "the plugin adds no toleration of that");
    }

    /// Its toleration was added by a webhook.
    #[test]
    fn where_a_pod_of_its_own_stands_another_could() {
        let taints = json!([{"key": "team", "value": "a", "effect": "NoSchedule"}]);
        let named = |name: &str, taints: Value| NodeView { name: name.to_owned(), ..node(&[], taints) };
        let others = json!([{"key": "team", "value": "b", "effect": "NoSchedule"}]);
        let nodes = [named("n1", taints.clone()), named("n2", taints), named("n3", others), named("n4", json!([]))];
        let pods = [PodView { node: "n1".to_owned(), ..healthy("a") }, PodView { node: String::new(), ..healthy("b") }];
        let fit = |needs: &Needs| nodes.iter().map(|node| needs.fit(node)).collect::<Vec<_>>();
        assert_eq!(fit(&Needs::of(&infd("chat").spec)), [false, false, false, true]);
        assert_eq!(fit(&Needs::of(&infd("chat").spec).shown_by(&pods, &nodes)), [true, true, false, true]);
        let closed = NodeView { usable: false, ..nodes[0].clone() };
        assert!(!Needs::of(&infd("chat").spec).shown_by(&pods, &nodes).fit(&closed), "a node that takes nobody now");
    }
}
