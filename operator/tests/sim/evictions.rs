//! What the comparison with the real server asks of evictions: one pod, up to two budgets whose status the sequence itself
//! writes (no disruption controller runs there), and evictions in between.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    differential::{JSON, Known, MERGE, Seen, Step},
    rng::Rng,
};

const PODS: &str = "/api/v1/namespaces/default/pods";
const BUDGETS: &str = "/apis/policy/v1/namespaces/default/poddisruptionbudgets";

/// Does a step concern pods and their budgets?
pub fn concerns(path: &str) -> bool {
    path.starts_with(PODS) || path.starts_with(BUDGETS)
}

/// What was answered, without the many defaults that the real server puts into a pod.
pub fn seen(step: &Step, code: u16, answer: &Value, known: &mut Known) -> Seen {
    let causes = answer["details"]["causes"].as_array().into_iter().flatten();
    let causes: String = causes.filter(|_| code == 429).map(|cause| format!(" {cause}")).collect();
    let reason = format!("{}{causes}", answer["reason"].as_str().filter(|_| code >= 300).unwrap_or_default());
    let none = step.method == "DELETE" || answer["kind"] == "Status";
    let (metadata, status) = (&answer["metadata"], &answer["status"]);
    let object = if none {
        Value::Null
    } else if step.path.starts_with(PODS) {
        metadata["uid"].as_str().unwrap_or_default().clone_into(&mut known.uid);
        let phase = status["phase"].as_str().unwrap_or("Pending"); // which the real server writes itself
        let types = status["conditions"].as_array().into_iter().flatten().map(|c| json!([c["type"], c["status"]]));
        let types: Vec<Value> = types.collect();
        json!({"leaving": metadata["deletionTimestamp"].is_string(), "phase": phase, "conditions": types})
    } else {
        let disrupted: Vec<&String> =
            status["disruptedPods"].as_object().into_iter().flat_map(|map| map.keys()).collect();
        let allowed = status["disruptionsAllowed"].as_i64().unwrap_or(0);
        json!({"generation": metadata["generation"], "allowed": allowed, "disrupted": disrupted})
    };
    Seen { code, reason, moved: false, object, owners: BTreeMap::new() }
}

/// A sequence of requests on one pod and its budgets.
pub fn sequence(seed: u64) -> Vec<Step> {
    let mut rng = Rng::new(seed ^ 0xe71c);
    let name = format!("d{seed}");
    let mut steps = vec![post(PODS.to_owned(), pod(&mut rng, &name)), running(&name)];
    steps.extend((0..rng.range(8, 18)).map(|_| step(&mut rng, &name)));
    let delete = |path: String, body| Step { method: "DELETE", path, query: String::new(), content_type: JSON, body };
    let now = json!({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0});
    steps.push(delete(format!("{PODS}/{name}"), now));
    steps.extend((0..2).map(|nth| delete(format!("{BUDGETS}/{name}-{nth}"), Value::Null)));
    steps
}

fn post(path: String, body: Value) -> Step {
    Step { method: "POST", path, query: String::new(), content_type: JSON, body }
}

fn patch(path: String, body: Value) -> Step {
    Step { method: "PATCH", path, query: String::new(), content_type: MERGE, body }
}

fn pod(rng: &mut Rng, name: &str) -> Value {
    let mut spec = json!({"automountServiceAccountToken": false, "containers": [{"name": "c", "image": "i"}]});
    if rng.permille(900) {
        spec["nodeName"] = json!("n");
    }
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec})
}

fn running(name: &str) -> Step {
    let ready = json!([{"type": "Ready", "status": "True"}]);
    patch(format!("{PODS}/{name}/status"), json!({"status": {"phase": "Running", "conditions": ready}}))
}

fn step(rng: &mut Rng, name: &str) -> Step {
    let nth = u64::from(rng.permille(150));
    let budget = format!("{BUDGETS}/{name}-{nth}");
    match rng.range(0, 16) {
        0 => post(PODS.to_owned(), pod(rng, name)),
        1 => running(name),
        2 => {
            let phase = *rng.pick(&["Running", "Running", "Pending", "Succeeded", "Failed"]);
            let ready = json!([{"type": "Ready", "status": rng.pick(&["True", "False"])}]);
            patch(format!("{PODS}/{name}/status"), json!({"status": {"phase": phase, "conditions": ready}}))
        }
        3..=4 => {
            let mut spec = json!({"maxUnavailable": rng.range(0, 3), "selector": {"matchLabels": {"app": name}}});
            if let Some(policy) = *rng.pick(&[None, Some("AlwaysAllow"), Some("IfHealthyBudget")]) {
                spec["unhealthyPodEvictionPolicy"] = json!(policy);
            }
            let metadata = json!({"name": format!("{name}-{nth}")});
            let body =
                json!({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec});
            post(BUDGETS.to_owned(), body)
        }
        5..=8 => {
            let status = json!({
                "disruptionsAllowed": rng.range(0, 3), "currentHealthy": rng.range(0, 3), "desiredHealthy": rng.range(0, 3),
                "expectedPods": 1, "observedGeneration": rng.range(1, 4),
            });
            patch(format!("{budget}/status"), json!({"status": status}))
        }
        9 => patch(budget, json!({"spec": {"maxUnavailable": rng.range(0, 5)}})),
        10 => Step { method: "GET", path: budget, query: String::new(), content_type: JSON, body: Value::Null },
        11 => {
            let path = format!("{PODS}/{name}");
            Step { method: "GET", path, query: String::new(), content_type: JSON, body: Value::Null }
        }
        _ => eviction(rng, name),
    }
}

fn eviction(rng: &mut Rng, name: &str) -> Step {
    let named = if rng.permille(50) { "another" } else { name };
    let mut body =
        json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": named, "namespace": "default"}});
    if rng.permille(300) {
        // (a wrong one is asked about for ten seconds where no budget is asked)
        let uid = if rng.permille(900) { "$UID" } else { "00000000-0000-0000-0000-000000000000" };
        body["deleteOptions"] = json!({"preconditions": {"uid": uid}});
    }
    post(format!("{PODS}/{name}/eviction"), body)
}
