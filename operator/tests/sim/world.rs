//! Everything that is not the operator: the Deployment controller, scheduler, kubelet and garbage collector in small, and
//! the pods with their engines and agents. It acts on the store directly, in ticks of virtual time.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::{
    agent::{Agent, Around, Engine},
    cluster::State,
    kube::{kinds, store::Store, verbs::Target},
    rng::Rng,
};

const PLAIN: &str = "kube-controller-manager";
pub const NODES: usize = 4;

/// One pod as it really is, whatever the API says of it.
#[derive(Debug)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub node: String,
    pub agent: Agent,
    /// Its engine is of a kind that freezes.
    pub bad: bool,
    /// When the container is gone after a delete.
    pub gone_at_ms: Option<u64>,
}

/// The world.
#[derive(Debug)]
pub struct World {
    pub pods: BTreeMap<String, Pod>,
    /// Nodes whose engines freeze again and again.
    pub sick_nodes: BTreeSet<String>,
    counter: u64,
    rng: Rng,
    /// The store's version and removals when the controllers looked last: they act on changes alone.
    seen: (u64, u64),
    woken_ms: u64,
}

pub fn target(plural: &str, namespace: &str, name: &str, manager: &str) -> Target {
    Target::new(kinds::of(plural), namespace, name, manager)
}

impl World {
    pub fn new(seed: u64) -> Self {
        World {
            pods: BTreeMap::new(),
            sick_nodes: BTreeSet::new(),
            counter: 0,
            rng: Rng::new(seed ^ 0x77),
            seen: (0, 0),
            woken_ms: 0,
        }
    }

    /// One step of everything. `reachable`: can kubelets and agents talk to the API server now?
    pub fn tick(&mut self, state: &mut State, now_ms: u64, reachable: bool) {
        let changed =
            state.store.version != self.seen.0 || state.store.removed != self.seen.1 || now_ms >= self.woken_ms + 5_000;
        if reachable && changed {
            self.woken_ms = now_ms;
            let removed = state.store.removed;
            if removed != self.seen.1 {
                collect_garbage(&mut state.store); // what it removes has dependents of its own: again next time
            }
            self.seen = (state.store.version, removed);
            self.deployments(&mut state.store);
            self.schedule(&mut state.store);
        }
        self.kubelet(state, now_ms, reachable);
        for pod in self.pods.values_mut() {
            let sick = pod.bad || self.sick_nodes.contains(&pod.node);
            let around = Around { now_ms, reachable, sick };
            pod.agent.tick(&mut state.store, &mut state.log, (&pod.namespace, &pod.name, &pod.uid), around);
        }
        if changed {
            self.invariants(state, now_ms);
        }
    }

    /// P15 and P16, by what is true and not by what is said.
    fn invariants(&self, state: &mut State, now_ms: u64) {
        let mut by_owner: BTreeMap<(String, String), usize> = BTreeMap::new();
        for (key, entry) in state.store.of("pods") {
            let Some(pod) = self.pods.get(entry.value["metadata"]["uid"].as_str().unwrap_or_default()) else {
                continue;
            };
            let grant = entry.value["metadata"]["annotations"]["truebeat.io/restart-grant"].as_str();
            let owner =
                entry.value["metadata"]["labels"]["inference.truebeat.io/deployment"].as_str().unwrap_or_default();
            if pod.agent.restarting_by_grant(grant) {
                *by_owner.entry((key.1.clone(), owner.to_owned())).or_default() += 1;
            }
        }
        let known = |(namespace, owner): &(String, String)| {
            state.store.get(&("inferencedeployments", namespace.clone(), owner.clone())).is_some()
        };
        let total: usize = by_owner.iter().filter(|(key, _)| known(key)).map(|(_, count)| count).sum();
        if total > 1 {
            // fewer than twenty replicas: a tenth of them is one
            state.checks.broken(now_ms, format!("P15: {total} granted recoveries in the fleet, its share is 1"));
        }
        for ((namespace, owner), count) in by_owner {
            let infd = state.store.get(&("inferencedeployments", namespace.clone(), owner.clone()));
            let budget = infd.and_then(|e| e.value["spec"]["recovery"]["maxUnavailable"].as_u64());
            if let Some(budget) = budget
                && count as u64 > budget
            {
                let what =
                    format!("P15: {count} replicas of {namespace}/{owner} in a granted restart, budget {budget}");
                state.checks.broken(now_ms, what);
            }
        }
    }

    fn deployments(&mut self, store: &mut Store) {
        let all: Vec<Value> = store.of("deployments").map(|(_, entry)| (*entry.value).clone()).collect();
        for deployment in all.iter().filter(|d| d["metadata"]["deletionTimestamp"].is_null()) {
            self.deployment(store, deployment);
        }
    }

    fn deployment(&mut self, store: &mut Store, deployment: &Value) {
        let (namespace, name) = (text(deployment, "namespace"), text(deployment, "name"));
        let template = &deployment["spec"]["template"];
        let set = format!("{name}-{:08x}", hash(&template.to_string()) as u32);
        let set_uid = self.replica_set(store, deployment, &set);
        let wanted = deployment["spec"]["replicas"].as_u64().unwrap_or(1) as usize;
        let owned = |pod: &Value| {
            pod["metadata"]["ownerReferences"][0]["name"]
                .as_str()
                .is_some_and(|rs| rs.rsplit_once('-').is_some_and(|(d, _)| d == name))
        };
        let pods: Vec<Value> = store
            .of("pods")
            .filter(|(key, entry)| {
                key.1 == namespace && owned(&entry.value) && entry.value["metadata"]["deletionTimestamp"].is_null()
            })
            .map(|(_, entry)| (*entry.value).clone())
            .collect();
        let (fresh, old): (Vec<_>, Vec<_>) =
            pods.iter().partition(|pod| pod["metadata"]["ownerReferences"][0]["name"] == set);
        let ready = pods.iter().filter(|pod| is_ready(pod)).count();
        let soak_s = deployment["spec"]["minReadySeconds"].as_i64().unwrap_or(0);
        let available = pods.iter().filter(|pod| is_available(pod, soak_s, store.now_ms)).count();
        let rolling = &deployment["spec"]["strategy"]["rollingUpdate"];
        let (surge, away) = (
            rolling["maxSurge"].as_u64().unwrap_or(1) as usize,
            rolling["maxUnavailable"].as_u64().unwrap_or(0) as usize,
        );
        if fresh.len() < wanted && pods.len() < wanted + if old.is_empty() { 0 } else { surge } {
            self.create_pod(store, &namespace, &set, &set_uid, template);
        } else if let Some(victim) = old.iter().min_by_key(|pod| (is_ready(pod), text(pod, "name"))) {
            if !is_ready(victim) || available > wanted.saturating_sub(away) {
                delete_pod(store, victim);
            }
        } else if fresh.len() > wanted
            && let Some(victim) =
                fresh.iter().min_by_key(|pod| (is_ready(pod), cost(pod), std::cmp::Reverse(text(pod, "name"))))
        {
            delete_pod(store, victim);
        }
        let status = json!({"status": {
            "observedGeneration": deployment["metadata"]["generation"], "replicas": pods.len(),
            "updatedReplicas": fresh.len(), "readyReplicas": ready, "availableReplicas": available,
        }});
        if deployment["status"] != status["status"] {
            let _ = store.merge(&target("deployments", &namespace, &name, PLAIN).status(), &status);
        }
    }

    fn replica_set(&mut self, store: &mut Store, deployment: &Value, name: &str) -> String {
        let namespace = text(deployment, "namespace");
        let at = target("replicasets", &namespace, name, PLAIN);
        if let Ok((_, set)) = store.read(&at) {
            return text(&set, "uid");
        }
        let owner = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "controller": true,
            "name": text(deployment, "name"), "uid": text(deployment, "uid"),
        });
        let template = &deployment["spec"]["template"];
        let metadata = json!({"name": name, "labels": template["metadata"]["labels"], "ownerReferences": [owner]});
        let body = json!({"metadata": metadata, "spec": {"template": template}});
        store.create(&at, body).map(|(_, set)| text(&set, "uid")).unwrap_or_default()
    }

    fn create_pod(&mut self, store: &mut Store, namespace: &str, set: &str, set_uid: &str, template: &Value) {
        self.counter += 1;
        let owner =
            json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set_uid, "controller": true});
        let metadata = json!({
            "name": format!("{set}-{:04}", self.counter), "labels": template["metadata"]["labels"],
            "annotations": template["metadata"]["annotations"], "ownerReferences": [owner],
        });
        let body = json!({"metadata": metadata, "spec": template["spec"]});
        let at = target("pods", namespace, "", PLAIN);
        if let Ok((_, pod)) = store.create(&at, body) {
            let at = target("pods", namespace, &text(&pod, "name"), PLAIN).status();
            let _ = store.merge(&at, &json!({"status": {"phase": "Pending"}}));
        }
    }

    /// A node that the pod's affinity allows, the emptiest first.
    fn schedule(&mut self, store: &mut Store) {
        let pending =
            |value: &Value| value["spec"]["nodeName"].is_null() && value["metadata"]["deletionTimestamp"].is_null();
        let all: Vec<Value> =
            store.of("pods").filter(|(_, e)| pending(&e.value)).map(|(_, e)| (*e.value).clone()).collect();
        for pod in all {
            let avoided = avoided(&pod);
            let load = |node: &String| self.pods.values().filter(|other| other.node == *node).count();
            let nodes = (0..NODES).map(|n| format!("node-{n}")).filter(|node| !avoided.contains(node));
            let Some(node) = nodes.min_by_key(|node| (load(node), node.clone())) else { continue };
            let (namespace, name, uid) = (text(&pod, "namespace"), text(&pod, "name"), text(&pod, "uid"));
            let _ =
                store.merge(&target("pods", &namespace, &name, "kube-scheduler"), &json!({"spec": {"nodeName": node}}));
            let agent = Agent::new(&pod, store.now_ms + self.rng.range(1500, 4000));
            let bad = pod["spec"]["containers"][0]["image"] == super::changes::BAD_IMAGE;
            self.pods.insert(uid.clone(), Pod { namespace, name, uid, node, agent, bad, gone_at_ms: None });
        }
    }

    fn kubelet(&mut self, state: &mut State, now_ms: u64, reachable: bool) {
        let mut gone = Vec::new();
        for (uid, pod) in &mut self.pods {
            let key = ("pods", pod.namespace.clone(), pod.name.clone());
            let live =
                state.store.get(&key).filter(|e| e.value["metadata"]["uid"] == uid.as_str()).map(|e| e.value.clone());
            let Some(live) = live else {
                gone.push(uid.clone());
                continue;
            };
            if live["metadata"]["deletionTimestamp"].is_string() {
                let at = *pod.gone_at_ms.get_or_insert(now_ms + 1500);
                if now_ms >= at && reachable {
                    pod.agent.engine = Engine::Gone;
                    state.store.remove(&key);
                    gone.push(uid.clone());
                }
                continue;
            }
            if reachable {
                report_readiness(&mut state.store, pod, &live, now_ms);
            }
        }
        for uid in gone {
            if let Some(pod) = self.pods.remove(&uid) {
                state.log.line(now_ms, format_args!("pod {}/{} is gone", pod.namespace, pod.name));
            }
        }
    }
}

fn report_readiness(store: &mut Store, pod: &Pod, live: &Value, now_ms: u64) {
    let word = if pod.agent.serves() { "True" } else { "False" };
    let mut conditions = live["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let known = conditions.iter_mut().find(|c| c["type"] == "Ready");
    let since = super::cluster::wall(now_ms).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let new = json!({"type": "Ready", "status": word, "lastTransitionTime": since});
    match known {
        Some(known) if known["status"] == word => return,
        Some(known) => *known = new,
        None => conditions.push(new),
    }
    let at = target("pods", &pod.namespace, &pod.name, "kubelet").status();
    let _ = store.merge(&at, &json!({"status": {"phase": "Running", "conditions": conditions}}));
}

fn collect_garbage(store: &mut Store) {
    let uids: BTreeSet<&str> = store.objects.values().filter_map(|e| e.value["metadata"]["uid"].as_str()).collect();
    let orphan = |value: &Value| {
        let owners = value["metadata"]["ownerReferences"].as_array();
        owners.is_some_and(|list| {
            !list.is_empty() && list.iter().all(|o| !uids.contains(o["uid"].as_str().unwrap_or_default()))
        })
    };
    let keys: Vec<_> = store
        .objects
        .iter()
        .filter(|(_, e)| orphan(&e.value) && e.value["metadata"]["deletionTimestamp"].is_null())
        .map(|(key, _)| key.clone())
        .collect();
    for (plural, namespace, name) in keys {
        let _ = store.delete(&target(plural, &namespace, &name, PLAIN), &Value::Null);
    }
}

fn delete_pod(store: &mut Store, pod: &Value) {
    let _ = store.delete(&target("pods", &text(pod, "namespace"), &text(pod, "name"), PLAIN), &Value::Null);
}

fn avoided(pod: &Value) -> BTreeSet<String> {
    let terms =
        &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    let mut out = BTreeSet::new();
    for term in terms.as_array().into_iter().flatten() {
        let rules =
            ["matchExpressions", "matchFields"].iter().flat_map(|list| term[*list].as_array().into_iter().flatten());
        for rule in rules.filter(|rule| rule["operator"] == "NotIn") {
            out.extend(rule["values"].as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)));
        }
    }
    out
}

pub fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Ready without a break for so long?
fn is_available(pod: &Value, soak_s: i64, now_ms: u64) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let ready = conditions.into_iter().flatten().find(|c| c["type"] == "Ready" && c["status"] == "True");
    let since = ready.and_then(|c| c["lastTransitionTime"].as_str()?.parse::<jiff::Timestamp>().ok());
    since.is_some_and(|since| super::cluster::wall(now_ms).as_second() - since.as_second() >= soak_s)
}

fn cost(pod: &Value) -> i64 {
    let text = pod["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"].as_str();
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

pub fn text(object: &Value, field: &str) -> String {
    object["metadata"][field].as_str().unwrap_or_default().to_owned()
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
