//! What must be true when everything has calmed down (P4, P13), by comparison of what is said with what is, and the end
//! state for the differential properties (P1, P5, P6).

use std::collections::BTreeMap;

use operator::controllers::inference_deployment::plan::ANNOTATION_APPLIED;
use serde_json::{Map, Value, json};

use super::{
    cluster::State,
    kube::object::Object,
    world::{World, is_ready, text},
};

const OWNER: &str = "inference.truebeat.io/deployment";

/// Everything that is not as it should be; empty: all is well.
pub fn in_order(state: &State, world: &World) -> Vec<String> {
    let mut faults = Vec::new();
    for (key, entry) in state.store.of("inferencedeployments") {
        let infd = &entry.value;
        if infd["metadata"]["deletionTimestamp"].is_null() {
            one(state, world, (&key.1, &key.2), infd, &mut faults);
        }
    }
    if !world.drains.is_empty() {
        faults.push(format!("P4: a drain is still going on: {:?}", world.drains));
    }
    let names: Vec<(&str, &str)> =
        state.store.of("inferencedeployments").map(|(key, _)| (key.1.as_str(), key.2.as_str())).collect();
    let left = state.store.objects.iter().filter(|(_, e)| {
        let owner = e.value["metadata"]["labels"][OWNER].as_str();
        owner.is_some_and(|owner| {
            !names.contains(&(e.value["metadata"]["namespace"].as_str().unwrap_or_default(), owner))
        })
    });
    faults.extend(left.map(|(key, _)| format!("P4: {key:?} is left of an InferenceDeployment that is gone")));
    faults
}

fn one(state: &State, world: &World, (namespace, name): (&str, &str), infd: &Object, faults: &mut Vec<String>) {
    let mut wrong = |what: String| faults.push(format!("{namespace}/{name}: {what}"));
    let wanted = infd["spec"]["replicas"].as_u64().unwrap_or(0);
    let status = &infd["status"];
    let condition = |type_: &str| condition(infd, type_);
    let pods: Vec<&Object> = state
        .store
        .of("pods")
        .map(|(_, e)| &*e.value)
        .filter(|pod| pod["metadata"]["labels"][OWNER] == name && text(pod, "namespace") == namespace)
        .collect();
    let healthy = world
        .pods
        .values()
        .filter(|pod| {
            pod.namespace == namespace && pods.iter().any(|p| text(p, "uid") == pod.uid) && pod.agent.healthy()
        })
        .count() as u64;
    // a new replica stalled: its revision was taken back, or is held with the old ones, and this spec waits for its author
    let held = held(state, (namespace, name), infd, &pods);
    let back = held || rolled_back(state, (namespace, name), status);
    let most = wanted + if held { surge(state, (namespace, name)) } else { 0 };
    if !(wanted..=most).contains(&(pods.len() as u64)) || healthy != pods.len() as u64 {
        wrong(format!("P4: {wanted} replicas wanted, {} pods, {healthy} healthy", pods.len()));
    }
    let trial = &status["recovery"]["hold"]["trial"];
    if trial["outcome"] == "Pending" {
        wrong(format!("P4: nobody knows what has come of the trial of {}", trial["pod"]));
    }
    for (field, truth) in [
        ("observedGeneration", infd["metadata"]["generation"].as_u64().unwrap_or(0)),
        ("replicas", pods.len() as u64),
        ("readyReplicas", pods.iter().filter(|pod| is_ready(pod)).count() as u64),
        ("progressingReplicas", healthy),
        ("fencedReplicas", 0),
        ("fencedByPerson", 0),
        ("stalledReplicas", 0),
        ("openIncidents", 0),
    ] {
        if status[field].as_u64().unwrap_or(u64::MAX) != truth {
            wrong(format!("P13: status.{field} is {}, the truth is {truth}", status[field]));
        }
    }
    match condition("Ready") {
        Some((word, _)) if (word == "True") != back => {}
        other => wrong(format!("P13: all is well and Ready is {other:?}, rolled back or held: {back}")),
    }
    if condition("Stalled").is_some() != back {
        wrong(format!("P13: all is well, rolled back or held: {back}, and Stalled is {:?}", condition("Stalled")));
    }
    for type_ in ["Reconciling", "HealthLies", "ObjectsDoubted"] {
        if let Some((word, why)) = condition(type_) {
            wrong(format!("P13: all is well and {type_} is {word}: {why}"));
        }
    }
    let marked =
        pods.iter().filter(|pod| !pod["metadata"]["annotations"][super::story::LAST_SERVING].is_null()).count();
    let recovery = &infd["spec"]["recovery"];
    let alone = wanted == 1 && recovery["mode"] != "Observe" && recovery["lastReplica"] != "Fence";
    if marked != usize::from(alone) {
        wrong(format!("I3: {marked} of {wanted} pods are marked as the last that serves"));
    }
    if status["recovery"]["grants"].as_array().is_some_and(|list| !list.is_empty()) {
        wrong(format!("P15: the budget is still in use: {}", status["recovery"]["grants"]));
    }
    for (key, incident) in
        state.store.of("engineincidents").filter(|(key, e)| key.1 == namespace && e.value["spec"]["deployment"] == name)
    {
        if incident.value["status"]["outcome"].is_null() {
            wrong(format!("P13: incident {} is still open", key.2));
        }
    }
    for (plural, child) in [("services", name), ("deployments", name)] {
        let live = state.store.get(&(plural_of(plural), namespace.to_owned(), child.to_owned()));
        match live {
            None => wrong(format!("P4: there is no {plural} {child}")),
            Some(live) if plural == "deployments" && live.value["spec"]["replicas"] != wanted => {
                wrong(format!("P4: the Deployment wants {}", live.value["spec"]["replicas"]));
            }
            Some(_) => {}
        }
    }
}

/// How often each object may still be written by time alone: places are avoided and told of, and common causes remembered, for so long and no
/// longer.
pub fn ends_by_time(state: &State) -> BTreeMap<String, u64> {
    let mut ends = BTreeMap::<String, u64>::new();
    for ((_, namespace, name), entry) in state.store.of("inferencedeployments") {
        let recovery = &entry.value["status"]["recovery"];
        let places =
            || ["avoid", "broken"].into_iter().flat_map(|list| recovery[list].as_array().into_iter().flatten());
        let own = format!("/namespaces/{namespace}/inferencedeployments/{name}");
        ends.insert(own, places().count() as u64 + u64::from(recovery["hold"].is_object()));
        places().for_each(|place| {
            *ends.entry(format!("/nodes/{}", place["node"].as_str().unwrap_or_default())).or_default() += 1
        });
    }
    ends
}

/// Does the last good revision stand in the place of one that is remembered as failed?
fn rolled_back(state: &State, (namespace, name): (&str, &str), status: &Value) -> bool {
    let key = (plural_of("deployments"), namespace.to_owned(), name.to_owned());
    let Some(live) = state.store.get(&key) else { return false };
    let standing = &live.value["spec"]["template"]["metadata"]["labels"][crds::LABEL_REVISION];
    let rollout = &status["rollout"];
    let reasons = status["conditions"].as_array().into_iter().flatten().filter(|c| c["type"] == "Stalled");
    reasons.into_iter().any(|c| c["reason"] == "RolledBack")
        && *standing == rollout["stable"]
        && *standing == rollout["target"]
        && rollout["failed"].as_array().is_some_and(|failed| failed.iter().all(|f| f["revision"] != *standing))
}

/// Is a revision held where it stands, as its spec asks for: remembered as failed, told, its Deployment paused, and some replica not brought
/// to it? Where all run it the pause keeps nothing back: that is no end, for it is a good one once each has delivered for its time.
fn held(state: &State, (namespace, name): (&str, &str), infd: &Object, pods: &[&Object]) -> bool {
    let key = (plural_of("deployments"), namespace.to_owned(), name.to_owned());
    let Some(live) = state.store.get(&key).filter(|live| live.value["spec"]["paused"] == true) else { return false };
    let standing = &live.value["spec"]["template"]["metadata"]["labels"][crds::LABEL_REVISION];
    let mut failed = infd["status"]["rollout"]["failed"].as_array().into_iter().flatten();
    let told = infd["status"]["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == "Stalled");
    infd["spec"]["rollout"]["onFailure"] == "Hold"
        && told.is_some_and(|c| c["reason"] == "RolloutFailed")
        && pods.iter().any(|pod| pod["metadata"]["labels"][crds::LABEL_REVISION] != *standing)
        && failed.any(|failure| failure["revision"] == *standing)
}

/// How many more pods than wanted may stand in a rollout.
fn surge(state: &State, (namespace, name): (&str, &str)) -> u64 {
    let live = state.store.get(&(plural_of("deployments"), namespace.to_owned(), name.to_owned()));
    live.and_then(|live| live.value["spec"]["strategy"]["rollingUpdate"]["maxSurge"].as_u64()).unwrap_or(0)
}

/// Status and message of a condition.
pub fn condition(infd: &Object, type_: &str) -> Option<(String, String)> {
    let found = infd["status"]["conditions"].as_array().into_iter().flatten().find(|c| c["type"] == type_)?;
    Some((found["status"].as_str().unwrap_or_default().to_owned(), found["message"].to_string()))
}

fn plural_of(name: &str) -> &'static str {
    super::kube::kinds::of(name).plural
}

/// The objects that the operator answers for, without versions, UIDs, times and names made by chance.
pub fn state(state: &State) -> Value {
    let mut out = Map::new();
    for (key, entry) in &state.store.objects {
        if matches!(key.0, "leases" | "events" | "replicasets" | "pods" | "nodes") {
            continue;
        }
        let value = &entry.value;
        let name = if key.0 == "engineincidents" { incident(value) } else { key.2.clone() };
        let mut status = value["status"].clone();
        if key.0 == "inferencedeployments" {
            let strip = |c: &Value| json!([c["type"], c["status"], c["reason"]]);
            status["conditions"] = status["conditions"].as_array().into_iter().flatten().map(strip).collect();
            status["observedGeneration"] = Value::Null;
            status["recovery"]["recent"] = Value::Null; // times and UIDs
            let hold = &status["recovery"]["hold"]; // the same, and what is counted: none is repeated or forgotten
            status["recovery"]["hold"] = json!([hold["failed"], hold["trial"]["outcome"], hold["overAt"].is_string()]);
            let revision = |failed: &Value| json!([failed["revision"], failed["reason"]]);
            let failed = status["rollout"]["failed"].as_array().into_iter().flatten().map(revision).collect();
            status["rollout"]["failed"] = failed;
        }
        if key.0 == "poddisruptionbudgets" {
            status = json!({"disruptionsAllowed": status["disruptionsAllowed"]}); // names of pods, and generations
        }
        if matches!(key.0, "engineincidents" | "deployments") {
            // (the last stage that an operator saw before the pod was gone depends on when it looked)
            status = json!({"outcome": status["outcome"], "replicas": status["replicas"]});
        }
        let (labels, mut notes) = (value["metadata"]["labels"].clone(), value["metadata"]["annotations"].clone());
        if let Some(notes) = notes.as_object_mut() {
            notes.remove(ANNOTATION_APPLIED); // a hash that UIDs go into
        }
        let spec = if key.0 == "engineincidents" { Value::Null } else { value["spec"].clone() };
        out.insert(
            format!("{}/{}/{name}", key.0, key.1),
            json!({"labels": labels, "annotations": notes, "spec": spec, "status": status}),
        );
    }
    let mut keys: Vec<(String, Value)> = out.into_iter().collect();
    keys.sort_by(|a, b| a.0.cmp(&b.0));
    keys.into_iter().collect::<Map<_, _>>().into()
}

fn incident(value: &Object) -> String {
    format!(
        "{}-{}-{}",
        value["spec"]["deployment"].as_str().unwrap_or_default(),
        value["spec"]["class"].as_str().unwrap_or_default(),
        text(value, "uid")
    )
    .rsplit_once('-')
    .map(|(head, _)| head.to_owned())
    .unwrap_or_default()
}
