//! P9: what a write of an operator changed that is somebody else's, leaf by leaf, as `managedFields` tells leaves apart. Of what it applies
//! those are its own that it has applied before, and those that nobody had. On what belongs to others it has some by name.

use std::sync::LazyLock;

use operator::{client::FIELD_MANAGER, controllers::inference_deployment::build};
use serde_json::Value;

use super::kube::{
    fields::{Path, leaves_but},
    kinds,
    object::Object,
    store::Entry,
    wire::Call,
};

const COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// The kinds that an InferenceDeployment owns, as the operator itself names them.
pub static CHILDREN: LazyLock<Vec<&str>> =
    LazyLock::new(|| build::kinds().iter().map(|resource| kinds::of(&resource.plural).plural).collect());

/// What is wrong with the write `call`, which made `new` of what there was `before`.
pub fn foreign(call: &Call, before: Option<&Entry>, new: &Object) -> Vec<String> {
    let plural = call.target.kind.plural;
    let mut faults = Vec::new();
    if let Some(before) = before {
        let changed = changed(plural, &before.value, new);
        let ours = |path: &Path, was: Option<&Value>| match plural {
            "pods" | "nodes" | "inferencedeployments" => by_name(plural, path),
            _ => applied(before, path) || was.is_none(),
        };
        let theirs = changed.into_iter().filter(|(path, was)| !ours(path, *was));
        faults.extend(theirs.map(|(path, _)| format!("{} of somebody else changed", path.join("/"))));
        faults.extend(cost_of_somebody_else(&before.value, new));
        let owners = before.value["metadata"]["ownerReferences"].as_array();
        let owned = owners.into_iter().flatten().any(|owner| owner["kind"] == "InferenceDeployment");
        if CHILDREN.contains(&plural) && !owned {
            faults.push("it belongs to somebody else".to_owned());
        }
    }
    if plural == "deployments" {
        faults.extend(weakened(new));
    }
    faults
}

/// The leaves that differ, each with what it was. (Of an InferenceDeployment the status is the operator's as a whole, and large.)
fn changed<'a>(plural: &str, old: &'a Object, new: &'a Object) -> Vec<(Path, Option<&'a Value>)> {
    let own = |name: &str| name == "status" && plural == "inferencedeployments";
    let part = |of: &'a Object| leaves_but(of, |name| own(name) || old.agrees(new, name));
    let (before, after) = (part(old), part(new));
    let gone = before.iter().filter(|(path, was)| after.get(*path) != Some(*was));
    let gone: Vec<_> = gone.map(|(path, was)| (path.clone(), Some(*was))).collect();
    let come = after.into_keys().filter(|path| !before.contains_key(path)).map(|path| (path, None));
    gone.into_iter().chain(come).collect()
}

/// Has the operator applied this leaf?
fn applied(before: &Entry, path: &Path) -> bool {
    let ours = before.managers.iter().filter(|(manager, _)| manager.apply && manager.name == FIELD_MANAGER);
    ours.into_iter().any(|(_, owned)| owned.contains(path))
}

/// What operators may write on what belongs to others. (The status of an InferenceDeployment is not asked for, [`changed`].)
fn by_name(plural: &str, path: &Path) -> bool {
    let path: Vec<&str> = path.iter().map(|element| &**element).collect();
    match (plural, path.as_slice()) {
        ("pods", ["f:metadata", "f:annotations", key]) => key.starts_with("f:truebeat.io/") || &key[2..] == COST,
        ("nodes", ["f:metadata", "f:labels", key]) => key.contains("truebeat.io/"),
        ("nodes", ["f:status", "f:conditions", item, ..]) => item.starts_with(r#"k:{"type":"truebeat.io/"#),
        _ => false,
    }
}

/// Who says what a pod costs has said so for good, but for one that is frozen.
fn cost_of_somebody_else(old: &Object, new: &Object) -> Option<String> {
    let cost = |pod: &Object| pod["metadata"]["annotations"][COST].as_str().map(str::to_owned);
    let theirs = cost(old).filter(|cost| !matches!(cost.as_str(), "-1000" | "0"))?;
    let kept = cost(new).is_some_and(|cost| cost == theirs || cost == "-1000");
    (!kept).then(|| "a deletion cost of somebody else changed".to_owned())
}

/// No security field is ever weaker than the pod contract says.
fn weakened(deployment: &Object) -> Option<String> {
    let spec = &deployment["spec"]["template"]["spec"];
    let containers =
        ["initContainers", "containers"].iter().flat_map(|list| spec[*list].as_array().into_iter().flatten());
    let bad = containers.into_iter().find(|container| {
        let security = &container["securityContext"];
        security["allowPrivilegeEscalation"] != false
            || security["readOnlyRootFilesystem"] != true
            || security["capabilities"]["drop"][0] != "ALL"
    });
    let weak = spec["securityContext"]["runAsNonRoot"] != true
        || spec["securityContext"]["seccompProfile"]["type"] != "RuntimeDefault"
        || spec["automountServiceAccountToken"] != false
        || bad.is_some();
    weak.then(|| "the pod template's security is weaker than the contract".to_owned())
}
