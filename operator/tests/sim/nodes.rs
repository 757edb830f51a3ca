//! The nodes: objects with the labels and conditions that operators write on them, and the scheduler, which puts a pod where its
//! affinity and its GPU allow.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use super::{
    agent::Agent,
    kube::{object::Object, store::Store},
    world::{GPU, NODES, PLAIN, Pod, World, target, text},
};

/// The label that names a node's failure domain.
const ZONE: &str = "topology.kubernetes.io/zone";

/// The failure domain of a node: each has half of them.
pub fn zone(node: &str) -> &'static str {
    let number = node.rsplit('-').next().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
    if number < NODES / 2 { "zone-a" } else { "zone-b" }
}

/// What the cluster consists of before anybody acts: each node is ready and has one GPU.
pub fn join(store: &mut Store) {
    for name in names() {
        let at = target("nodes", "", &name, PLAIN);
        let labels = json!({"kubernetes.io/hostname": name, ZONE: zone(&name)});
        store.create(&at, json!({"metadata": {"name": name, "labels": labels}, "spec": {}})).expect("a new node");
        let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""});
        let boot = json!({"bootID": "boot-0"});
        let status = json!({"status": {"allocatable": {GPU: "1"}, "conditions": [ready], "nodeInfo": boot}});
        store.merge(&at.status(), &status).expect("a node's status");
    }
}

fn names() -> impl Iterator<Item = String> {
    (0..NODES).map(|n| format!("node-{n}"))
}

impl World {
    /// The node comes back with another boot and a GPU that is well, and no process outlasts that.
    pub fn reboot(&mut self, store: &mut Store, node: usize, now_ms: u64) {
        let name = format!("node-{node}");
        let status = json!({"status": {"nodeInfo": {"bootID": format!("boot-{now_ms}")}}});
        store.merge(&target("nodes", "", &name, PLAIN).status(), &status).expect("a node's status");
        self.lost_gpus.remove(&name);
        self.orphans.iter_mut().filter(|orphan| orphan.node == name).for_each(|orphan| orphan.dead_ms = now_ms);
        for pod in self.pods.values_mut().filter(|pod| pod.node == name) {
            pod.agent.fault = None;
            pod.agent.crash(now_ms);
        }
    }

    /// A node that the pod's affinity allows, the emptiest first.
    pub fn schedule(&mut self, store: &mut Store) {
        let pending =
            |value: &Object| value["spec"]["nodeName"].is_null() && value["metadata"]["deletionTimestamp"].is_null();
        let all: Vec<Arc<Object>> =
            store.of("pods").filter(|(_, e)| pending(&e.value)).map(|(_, e)| e.value.clone()).collect();
        for pod in all {
            let gpu = wants_gpu(&pod);
            let open = store.of("nodes").filter(|(_, e)| e.value["spec"]["unschedulable"] != true);
            let labels: BTreeMap<String, Value> =
                open.map(|(key, e)| (key.2.clone(), e.value["metadata"]["labels"].clone())).collect();
            // the scheduler knows the API's pods, not the processes
            let load = |node: &String| store.of("pods").filter(|(_, e)| e.value["spec"]["nodeName"] == **node).count();
            let free = |node: &String| {
                !gpu || !store.of("pods").any(|(_, e)| e.value["spec"]["nodeName"] == **node && wants_gpu(&e.value))
            };
            let nodes = labels.iter().filter(|(node, labels)| !keeps_away(&pod, node, labels) && free(node));
            let nodes = nodes.map(|(node, _)| node.clone());
            let found = nodes.min_by_key(|node| (load(node), node.clone()));
            tell(store, &pod, found.is_some());
            let Some(node) = found else { continue };
            let (namespace, name, uid) = (text(&pod, "namespace"), text(&pod, "name"), text(&pod, "uid"));
            let at = target("pods", &namespace, &name, "kube-scheduler");
            let _ = store.merge(&at, json!({"spec": {"nodeName": node}}));
            let agent = Agent::new(&pod, store.now_ms + self.rng.range(1500, 4000));
            let bad = pod["spec"]["containers"][0]["image"] == super::changes::BAD_IMAGE;
            self.pods.insert(
                uid.clone(),
                Pod { namespace, name, uid, node, agent, bad, gpu, served: false, gone_at_ms: None },
            );
        }
    }
}

/// `PodScheduled`, which is there only once a place was looked for in vain.
fn tell(store: &mut Store, pod: &Object, found: bool) {
    let mut conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let known = conditions.iter().position(|c| c["type"] == "PodScheduled");
    let (word, reason) = if found { ("True", "") } else { ("False", "Unschedulable") };
    let new = json!({"type": "PodScheduled", "status": word, "reason": reason, "lastTransitionTime": store.now()});
    match known {
        Some(at) if conditions[at]["status"] == word => return,
        Some(at) => conditions[at] = new,
        None if found => return,
        None => conditions.push(new),
    }
    let at = target("pods", &text(pod, "namespace"), &text(pod, "name"), "kube-scheduler").status();
    let _ = store.merge(&at, json!({"status": {"conditions": conditions}}));
}

/// Does the pod's affinity forbid this node, by its name or by a label that it must not have?
fn keeps_away(pod: &Object, node: &str, labels: &Value) -> bool {
    let required = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = required["nodeSelectorTerms"].as_array().into_iter().flatten();
    let mut rules = terms.flat_map(|term| {
        ["matchExpressions", "matchFields"].into_iter().flat_map(|list| term[list].as_array().into_iter().flatten())
    });
    rules.any(|rule| match rule["operator"].as_str() {
        Some("DoesNotExist") => rule["key"].as_str().is_some_and(|key| !labels[key].is_null()),
        Some("NotIn") => rule["values"].as_array().is_some_and(|values| values.iter().any(|value| value == node)),
        _ => false,
    })
}

pub fn wants_gpu(pod: &Object) -> bool {
    !pod["spec"]["containers"][0]["resources"]["limits"][GPU].is_null()
}
