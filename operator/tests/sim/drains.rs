//! Nodes that are drained, as people and autoscalers of nodes do it (cordon, evict, try again), and the controller that keeps
//! the disruption budgets by which an eviction is allowed.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::{Map, Value, json};

use super::{
    cluster::State,
    kube::{
        evict::covers,
        object::Object,
        store::{Key, Store, wall},
    },
    world::{PLAIN, World, is_ready, owner, target, text},
};

/// What cannot be evicted is tried again after this.
const AGAIN_MS: u64 = 5_000;
/// An eviction that no delete has followed for so long was none.
const UNCONFIRMED_MAX_S: i64 = 120;

/// A node on its way to be empty.
#[derive(Debug)]
pub struct Drain {
    node: String,
    next_ms: u64,
    /// When it is open again.
    until_ms: u64,
}

impl Drain {
    pub fn due_ms(&self) -> u64 {
        self.next_ms.min(self.until_ms)
    }
}

impl World {
    /// Cordons the node; the rest is done at the next steps.
    pub fn drain(&mut self, store: &mut Store, node: usize, (now_ms, until_ms): (u64, u64)) {
        let node = format!("node-{node}");
        cordon(store, &node, json!(true));
        self.drains.retain(|drain| drain.node != node);
        self.drains.push(Drain { node, next_ms: now_ms, until_ms });
    }

    /// Evicts whatever runs on nodes that are drained.
    pub fn evict(&mut self, state: &mut State, now_ms: u64) {
        for drain in &mut self.drains {
            if now_ms >= drain.until_ms {
                cordon(&mut state.store, &drain.node, Value::Null);
            } else if now_ms >= drain.next_ms {
                drain.next_ms = now_ms + AGAIN_MS;
                evict_all(state, &drain.node, now_ms);
            }
        }
        self.drains.retain(|drain| now_ms < drain.until_ms);
    }
}

fn cordon(store: &mut Store, node: &str, closed: Value) {
    let _ = store.merge(&target("nodes", "", node, "kubectl-cordon"), json!({"spec": {"unschedulable": closed}}));
}

fn evict_all(state: &mut State, node: &str, now_ms: u64) {
    let there = |pod: &Object| pod["spec"]["nodeName"] == node && pod["metadata"]["deletionTimestamp"].is_null();
    let pods: Vec<Key> = state.store.of("pods").filter(|(_, e)| there(&e.value)).map(|(key, _)| key.clone()).collect();
    for (_, namespace, name) in pods {
        let mut at = target("pods", &namespace, &name, "kubectl-drain");
        at.subresource = "eviction".to_owned();
        let answer = state.store.evict(&at, &json!({"metadata": {"name": name}}).into());
        let code = answer.map_or_else(|refusal| refusal.code, |(code, _)| code);
        state.log.line(now_ms, format_args!("drain of {node}: eviction of {namespace}/{name} {code}"));
    }
}

/// The disruption controller. (Percentages and conditions are left out: nobody here reads them.)
pub fn keep_budgets(store: &mut Store) {
    let budgets: Vec<(Key, Arc<Object>)> =
        store.of("poddisruptionbudgets").map(|(key, entry)| (key.clone(), entry.value.clone())).collect();
    for ((plural, namespace, name), budget) in budgets {
        let status = status_of(store, &namespace, &budget);
        if status.as_object().into_iter().flatten().any(|(field, value)| !same(&budget["status"][field], value)) {
            // (a merge would keep the pods that are to go from the map)
            let at = target(plural, &namespace, &name, PLAIN).status();
            let mut whole = Object::clone(&budget);
            whole["status"] = status;
            let _ = store.replace(&at, whole);
        }
    }
}

fn same(old: &Value, new: &Value) -> bool {
    old == new || (old.is_null() && new.as_object().is_some_and(Map::is_empty))
}

fn status_of(store: &Store, namespace: &str, budget: &Object) -> Value {
    let ours = |key: &Key, pod: &Object| key.1 == namespace && covers(budget, pod);
    let pods: Vec<&Object> = store.of("pods").filter(|(key, e)| ours(key, &e.value)).map(|(_, e)| &*e.value).collect();
    let here = |pod: &&&Object| pod["metadata"]["deletionTimestamp"].is_null();
    let young = |at: &Value| {
        let at = at.as_str().and_then(|at| at.parse::<jiff::Timestamp>().ok());
        at.is_some_and(|at| wall(store.now_ms).as_second() - at.as_second() < UNCONFIRMED_MAX_S)
    };
    let mut disrupted = budget["status"]["disruptedPods"].as_object().cloned().unwrap_or_default();
    disrupted.retain(|name, at| young(at) && pods.iter().filter(here).any(|pod| text(pod, "name") == *name));
    let healthy =
        pods.iter().filter(here).filter(|pod| is_ready(pod) && !disrupted.contains_key(&text(pod, "name"))).count();
    let (expected, desired) = match budget["spec"]["minAvailable"].as_u64() {
        Some(least) => (pods.len() as u64, least),
        None => {
            let expected = scale_of(store, namespace, &pods);
            (expected, expected.saturating_sub(budget["spec"]["maxUnavailable"].as_u64().unwrap_or(0)))
        }
    };
    let allowed = if expected == 0 { 0 } else { (healthy as u64).saturating_sub(desired) };
    json!({
        "observedGeneration": budget["metadata"]["generation"], "disruptionsAllowed": allowed,
        "currentHealthy": healthy, "desiredHealthy": desired, "expectedPods": expected, "disruptedPods": disrupted,
    })
}

/// How many pods the controllers of these want.
fn scale_of(store: &Store, namespace: &str, pods: &[&Object]) -> u64 {
    let names: BTreeSet<String> =
        pods.iter().filter_map(|pod| Some(owner(pod).rsplit_once('-')?.0.to_owned())).collect();
    let wanted = |name: String| {
        let live = store.get(&("deployments", namespace.to_owned(), name))?;
        live.value["spec"]["replicas"].as_u64()
    };
    names.into_iter().filter_map(wanted).sum()
}
