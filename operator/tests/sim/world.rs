//! Everything that is not the operator: the Deployment controller, scheduler, kubelet and garbage collector in small, and
//! the pods with their engines and agents. It acts on the store directly, in ticks of virtual time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::{Value, json};

use super::{
    agent::{Agent, Around, Engine},
    cluster::State,
    drains::{self, Drain},
    invariants::Counted,
    kube::{
        kinds,
        object::Object,
        store::{Key, Store, wall},
        verbs::Target,
    },
    paused,
    rng::Rng,
    story::FleetTerms,
};

pub const PLAIN: &str = "kube-controller-manager";
pub const NODES: usize = 4;
/// The Deployment controller looks again even if nothing has changed.
const LOOK_MS: u64 = 5_000;
/// What a pod asks for if it wants a GPU; each node has one.
pub const GPU: &str = "nvidia.com/gpu";

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
    pub gpu: bool,
    /// It has been up: it is a replica, and not the wish for one.
    pub served: bool,
    /// When the container is gone after a delete.
    pub gone_at_ms: Option<u64>,
}

/// A process whose pod is no object any more, which the API knows nothing of.
#[derive(Debug)]
pub struct Orphan {
    pub node: String,
    pub name: String,
    pub dead_ms: u64,
}

/// The world.
#[derive(Debug)]
pub struct World {
    pub pods: BTreeMap<String, Pod>,
    /// Nodes whose engines freeze again and again.
    pub sick_nodes: BTreeSet<String>,
    /// Nodes whose kubelets are not heard.
    pub lost_nodes: BTreeSet<String>,
    /// Nodes whose GPU serves nobody any more.
    pub lost_gpus: BTreeSet<String>,
    /// No more pods than this.
    pub quota: Option<usize>,
    /// No fewer replicas than this serve at any time.
    pub least_serving: usize,
    /// What the agents said at some time.
    pub overheard: Vec<(Key, Value)>,
    /// Processes on GPUs that outlived their pod's object.
    pub orphans: Vec<Orphan>,
    pub drains: Vec<Drain>,
    /// What the operators are told of the whole fleet, and what is seen of it (P15).
    pub fleet: FleetTerms,
    pub counted: Counted,
    /// How long what lost its owner stays at least, and until when what was seen last does.
    pub garbage_ms: u64,
    garbage_until_ms: Option<u64>,
    counter: u64,
    /// Hashes of templates, by UID and generation of their Deployment.
    hashes: BTreeMap<(String, u64), u32>,
    pub rng: Rng,
    /// The store's changes and removals when the controllers looked last: they act on changes alone.
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
            lost_nodes: BTreeSet::new(),
            lost_gpus: BTreeSet::new(),
            quota: None,
            least_serving: 0,
            overheard: Vec::new(),
            orphans: Vec::new(),
            drains: Vec::new(),
            fleet: FleetTerms::default(),
            counted: Counted::default(),
            garbage_ms: 0,
            garbage_until_ms: None,
            counter: 0,
            hashes: BTreeMap::new(),
            rng: Rng::new(seed ^ 0x77),
            seen: (0, 0),
            woken_ms: 0,
        }
    }

    /// When the next step can change anything by itself.
    pub fn due_ms(&self, now_ms: u64) -> u64 {
        let pods = self.pods.values().map(|pod| {
            let agent = pod.agent.due_ms(now_ms, pod.bad || self.sick_nodes.contains(&pod.node));
            pod.gone_at_ms.map_or(agent, |at| agent.min(at))
        });
        pods.chain(self.drains.iter().map(Drain::due_ms)).fold(self.woken_ms + LOOK_MS, u64::min)
    }

    /// One step of everything. `reachable`: can kubelets and agents talk to the API server now?
    pub fn tick(&mut self, state: &mut State, now_ms: u64, reachable: bool) {
        if reachable {
            self.evict(state, now_ms);
        }
        let changed = state.store.stirred != self.seen.0 || now_ms >= self.woken_ms + LOOK_MS;
        if reachable && changed {
            // (one may be born when its owner is gone already)
            let turnover = state.store.turnover();
            self.seen.0 = state.store.stirred;
            if turnover != self.seen.1 && now_ms >= *self.garbage_until_ms.get_or_insert(now_ms + self.garbage_ms) {
                collect_garbage(&mut state.store); // what it removes has dependents of its own: again next time
                (self.seen.1, self.garbage_until_ms) = (turnover, None);
            }
            self.deployments(&mut state.store);
            self.schedule(&mut state.store);
            drains::keep_budgets(&mut state.store);
        }
        if changed {
            self.woken_ms = now_ms;
        }
        self.kubelet(state, now_ms, reachable);
        for pod in self.pods.values_mut() {
            let sick = pod.bad || self.sick_nodes.contains(&pod.node);
            let reachable = reachable && !self.lost_nodes.contains(&pod.node);
            let around = Around { now_ms, reachable, sick, gpu_lost: self.lost_gpus.contains(&pod.node) };
            pod.agent.tick(&mut state.store, &mut state.log, (&pod.namespace, &pod.name, &pod.uid), around);
            pod.served |= pod.agent.serves();
        }
        self.enough_serve(state, now_ms);
        if changed {
            self.budget_holds(state, now_ms);
            self.alone_on_its_gpu(state, now_ms);
        }
    }

    fn deployments(&mut self, store: &mut Store) {
        let all: Vec<Arc<Object>> = store.of("deployments").map(|(_, entry)| entry.value.clone()).collect();
        for deployment in all.iter().filter(|d| d["metadata"]["deletionTimestamp"].is_null()) {
            self.deployment(store, deployment);
        }
    }

    fn deployment(&mut self, store: &mut Store, deployment: &Object) {
        let (namespace, name) = (text(deployment, "namespace"), text(deployment, "name"));
        let template = &deployment["spec"]["template"];
        let set = self.set_name(deployment);
        let paused = deployment["spec"]["paused"] == true;
        let set_uid = if paused { String::new() } else { self.replica_set(store, deployment, &set) };
        let wanted = deployment["spec"]["replicas"].as_u64().unwrap_or(1) as usize;
        let owned = |pod: &Object| owner(pod).rsplit_once('-').is_some_and(|(d, _)| d == name);
        let here = |store: &Store| -> Vec<Arc<Object>> {
            let stays = |pod: &Object| owned(pod) && pod["metadata"]["deletionTimestamp"].is_null();
            let all = store.of("pods").filter(|(key, entry)| key.1 == namespace && stays(&entry.value));
            all.map(|(_, entry)| entry.value.clone()).collect()
        };
        let pods = here(store);
        let (fresh, old): (Vec<_>, Vec<_>) = pods.iter().partition(|pod| owner(pod) == set);
        let ready = pods.iter().filter(|pod| is_ready(pod)).count();
        let soak_s = deployment["spec"]["minReadySeconds"].as_i64().unwrap_or(0);
        let available = pods.iter().filter(|pod| is_available(pod, soak_s, store.now_ms)).count();
        let rolling = &deployment["spec"]["strategy"]["rollingUpdate"];
        let (surge, away) = (
            rolling["maxSurge"].as_u64().unwrap_or(1) as usize,
            rolling["maxUnavailable"].as_u64().unwrap_or(0) as usize,
        );
        // Ready or not, no old one goes while more than may be away would be missing without it (`reconcileOldReplicaSets`).
        let coming = fresh.iter().filter(|pod| !is_available(pod, soak_s, store.now_ms)).count();
        let may_go = pods.len() > wanted.saturating_sub(away) + coming;
        if paused {
            self.stand_still(store, deployment, &set, &pods);
        } else if fresh.len() < wanted && pods.len() < wanted + if old.is_empty() { 0 } else { surge } {
            self.create_pod(store, &namespace, &set, &set_uid, template);
        } else if may_go && let Some(victim) = old.iter().min_by_key(|pod| (is_ready(pod), text(pod, "name"))) {
            if !is_ready(victim) || available > wanted.saturating_sub(away) {
                delete_pod(store, victim);
            }
        } else if fresh.len() > wanted
            && let Some(victim) = fresh.iter().min_by_key(|pod| goes_first(pod))
        {
            delete_pod(store, victim);
        }
        if !paused {
            paused::note_sizes(store, deployment, &here(store));
        }
        let short = pods.len() < wanted || (!old.is_empty() && fresh.len() < wanted);
        let refused = short && self.quota.is_some_and(|most| store.of("pods").count() >= most);
        let status = json!({"status": {
            "observedGeneration": deployment["metadata"]["generation"], "replicas": pods.len(),
            "updatedReplicas": fresh.len(), "readyReplicas": ready, "availableReplicas": available,
            "conditions": if refused { replica_failure() } else { Value::Null },
        }});
        if deployment["status"] != status["status"] {
            let _ = store.merge(&target("deployments", &namespace, &name, PLAIN).status(), &status);
        }
    }

    /// The ReplicaSet of the template, by its hash.
    fn set_name(&mut self, deployment: &Object) -> String {
        let key = (text(deployment, "uid"), deployment["metadata"]["generation"].as_u64().unwrap_or(0));
        let template = || deployment["spec"]["template"].to_string();
        let hash = self.hashes.entry(key).or_insert_with(|| hash(&template()) as u32);
        format!("{}-{hash:08x}", text(deployment, "name"))
    }

    fn replica_set(&mut self, store: &mut Store, deployment: &Object, name: &str) -> String {
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

    pub fn create_pod(&mut self, store: &mut Store, namespace: &str, set: &str, set_uid: &str, template: &Value) {
        if self.quota.is_some_and(|most| store.of("pods").count() >= most) {
            return;
        }
        self.counter += 1;
        let owner =
            json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": set_uid, "controller": true});
        let mut labels = template["metadata"]["labels"].clone();
        labels["pod-template-hash"] = json!(set.rsplit('-').next());
        let metadata = json!({
            "name": format!("{set}-{:04}", self.counter), "labels": labels,
            "annotations": template["metadata"]["annotations"], "ownerReferences": [owner],
        });
        let at = target("pods", namespace, "", PLAIN);
        if let Ok((_, pod)) = store.create(&at, json!({"metadata": metadata, "spec": template["spec"]})) {
            let at = target("pods", namespace, &text(&pod, "name"), PLAIN).status();
            let _ = store.merge(&at, json!({"status": {"phase": "Pending"}}));
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
                let at = *pod.gone_at_ms.get_or_insert(now_ms + pod.agent.exit_ms);
                if now_ms >= at && reachable && !self.lost_nodes.contains(&pod.node) {
                    pod.agent.engine = Engine::Gone;
                    state.store.remove(&key);
                    gone.push(uid.clone());
                }
                continue;
            }
            if reachable {
                pod.agent.heed(&live);
                let heard = !self.lost_nodes.contains(&pod.node);
                report_readiness(&mut state.store, pod, &live, (pod.agent.serves() && heard, now_ms));
                if heard {
                    report_restarts(&mut state.store, pod, &live);
                }
            }
        }
        for uid in gone {
            if let Some(pod) = self.pods.remove(&uid) {
                state.log.line(now_ms, format_args!("pod {}/{} is gone", pod.namespace, pod.name));
                let dead_ms = pod.gone_at_ms.unwrap_or(now_ms + pod.agent.exit_ms);
                if pod.gpu && dead_ms > now_ms {
                    self.orphans.push(Orphan { node: pod.node, name: pod.name, dead_ms });
                }
            }
        }
    }
}

/// What the ReplicaSet controller says of a pod that it may not make, as the Deployment repeats it.
fn replica_failure() -> Value {
    let message = "pods \"chat\" is forbidden: exceeded quota: pods";
    json!([{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}])
}

fn report_readiness(store: &mut Store, pod: &Pod, live: &Object, (ready, now_ms): (bool, u64)) {
    let word = if ready { "True" } else { "False" };
    let conditions = live["status"]["conditions"].as_array();
    let known = conditions.and_then(|list| list.iter().position(|c| c["type"] == "Ready"));
    let mut conditions = match (conditions, known) {
        (Some(list), Some(at)) if list[at]["status"] == word => return,
        (list, _) => list.cloned().unwrap_or_default(),
    };
    let since = wall(now_ms).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let new = json!({"type": "Ready", "status": word, "lastTransitionTime": since});
    match known {
        Some(at) => conditions[at] = new,
        None => conditions.push(new),
    }
    let at = target("pods", &pod.namespace, &pod.name, "kubelet").status();
    let _ = store.merge(&at, json!({"status": {"phase": "Running", "conditions": conditions}}));
}

fn report_restarts(store: &mut Store, pod: &Pod, live: &Object) {
    let (known, restarts) = (&live["status"]["containerStatuses"][0]["restartCount"], pod.agent.restarts);
    if known.as_u64().unwrap_or(0) != u64::from(restarts) {
        let engine = json!({"name": "engine", "image": "", "imageID": "", "ready": false, "restartCount": restarts});
        let at = target("pods", &pod.namespace, &pod.name, "kubelet").status();
        let _ = store.merge(&at, json!({"status": {"containerStatuses": [engine]}}));
    }
}

fn collect_garbage(store: &mut Store) {
    let uids: BTreeSet<&str> = store.objects.values().filter_map(|e| e.value["metadata"]["uid"].as_str()).collect();
    let orphan = |value: &Object| {
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

pub fn delete_pod(store: &mut Store, pod: &Object) {
    let _ = store.delete(&target("pods", &text(pod, "namespace"), &text(pod, "name"), PLAIN), &Value::Null);
}

pub fn is_ready(pod: &Object) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|c| c["type"] == "Ready" && c["status"] == "True")
}

/// Ready without a break for so long?
fn is_available(pod: &Object, soak_s: i64, now_ms: u64) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    let ready = conditions.into_iter().flatten().find(|c| c["type"] == "Ready" && c["status"] == "True");
    let since = ready.and_then(|c| c["lastTransitionTime"].as_str()?.parse::<jiff::Timestamp>().ok());
    since.is_some_and(|since| super::kube::store::wall(now_ms).as_second() - since.as_second() >= soak_s)
}

/// Whom a ReplicaSet deletes first: who has no node, who does not run, who is not ready, who costs least, who is youngest. (Of those who cost the
/// same it asks for crowded nodes, the time since they are ready, and restarts as well: nothing here depends on them.)
pub fn goes_first(pod: &Object) -> (bool, bool, bool, i64, std::cmp::Reverse<String>) {
    let (placed, runs) = (pod["spec"]["nodeName"].is_string(), pod["status"]["phase"] == "Running");
    let text_of_cost = pod["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"].as_str();
    let cost = text_of_cost.and_then(|text| text.parse().ok()).unwrap_or(0);
    (placed, runs, is_ready(pod), cost, std::cmp::Reverse(text(pod, "name")))
}

/// Name of the ReplicaSet that made a pod.
pub fn owner(pod: &Object) -> String {
    pod["metadata"]["ownerReferences"][0]["name"].as_str().unwrap_or_default().to_owned()
}

pub fn text(object: &Object, field: &str) -> String {
    object["metadata"][field].as_str().unwrap_or_default().to_owned()
}

fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}
