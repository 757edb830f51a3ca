//! What users and fate can do to the world.

use std::sync::Arc;

use crds::poison::{ANNOTATION_POISON, read};
use serde_json::{Value, json};

use super::{
    broken::Fault,
    clocks::Clock,
    cluster::State,
    kube::{
        kinds,
        object::Object,
        store::{Key, Store},
    },
    story::NAMESPACE,
    world::{World, target},
};

/// One act.
#[derive(Debug, Clone)]
pub enum Act {
    Create {
        name: &'static str,
        spec: Value,
    },
    /// A merge patch of an InferenceDeployment by its user.
    Edit {
        name: &'static str,
        patch: Value,
    },
    /// The user's file is applied anew: the whole spec.
    Replace {
        name: &'static str,
        spec: Value,
    },
    Delete {
        name: &'static str,
    },
    /// Engines by their place in the order of names; they heal by themselves after so many milliseconds, if at all.
    Freeze {
        nth: usize,
        heals_ms: Option<u64>,
    },
    /// The first engine of this image.
    FreezeOf {
        image: &'static str,
    },
    /// A client sends a request that freezes whoever answers it; a gate that was told of it refuses.
    Poison {
        nth: usize,
        request: &'static str,
    },
    Crash {
        nth: usize,
    },
    /// The processes of all engines take so long to die from now on, whoever kills them.
    Unkillable {
        exit_ms: u64,
    },
    DeletePod {
        nth: usize,
    },
    /// A node on which engines freeze again and again, or no more.
    Sick {
        node: usize,
        sick: bool,
    },
    /// The GPU of a node breaks: the engines there freeze, or die, and the driver says why.
    GpuFault {
        node: usize,
        fault: Fault,
        dies: bool,
    },
    /// Somebody writes labels and annotations of their own on our children, and changes a field that is ours.
    Meddle,
    /// Somebody patches a child.
    PatchChild {
        plural: &'static str,
        patch: Value,
    },
    /// What somebody wrote on a child must be there now as they wrote it.
    ExpectKept {
        plural: &'static str,
        patch: Value,
    },
    /// Somebody deletes a child.
    DeleteChild {
        plural: &'static str,
    },
    /// An object of somebody else that has the name of a child, and its removal.
    Squat {
        plural: &'static str,
    },
    Unsquat {
        plural: &'static str,
    },
    /// Somebody patches all pods there are, through the status if the patch has one.
    PatchPods {
        patch: Value,
    },
    /// The InferenceDeployment must have this condition in this status now, or not at all.
    Expect {
        condition: &'static str,
        status: Option<&'static str>,
    },
    /// So many engines must serve now.
    ExpectServing {
        count: usize,
    },
    /// From now on at least so many engines must serve at every step.
    LeastServing {
        count: usize,
    },
    /// No engine may run on this node now.
    ExpectFree {
        node: usize,
    },
    /// So many pods must run this image of the engine now, whatever they do.
    ExpectOf {
        image: &'static str,
        count: usize,
    },
    /// Somebody leaves so many conditions on all pods and InferenceDeployments.
    Crowd {
        conditions: usize,
    },
    /// The owner references of all pods say that their owner is of this kind.
    PatchOwners {
        kind: &'static str,
    },
    /// Nothing is heard of the node any more, so that the API calls its pods not ready; what runs there runs on, and no pod of it ends.
    NodeLost {
        node: usize,
        lost: bool,
    },
    /// It is started anew, which mends its GPU; whatever runs on it begins anew.
    Reboot {
        node: usize,
    },
    /// The node must bear the mark of suspicion now, and the condition that tells other tools of it, or neither.
    ExpectMarked {
        node: usize,
        marked: bool,
    },
    /// The node is cordoned for so long, and everything on it evicted, again and again until it is gone.
    Drain {
        node: usize,
        ms: u64,
    },
    /// No more pods than this.
    Quota {
        pods: Option<usize>,
    },
    /// Lists come in pages of this size, and versions are no numbers, from now on.
    Pages {
        size: usize,
    },
    OpaqueVersions,
    /// A backup is taken; everything becomes as it was then.
    Backup,
    Restore,
    /// A pass is repeated over a frozen copy of the world (P12).
    PassAgain,
    /// An operator process (0: the one that leads) dies; is frozen for a time; the Lease is deleted by hand.
    Kill {
        operator: usize,
    },
    Pause {
        operator: usize,
        ms: u64,
    },
    /// SIGTERM; its successor comes much later.
    Terminate {
        operator: usize,
    },
    DeleteLease,
    /// The clocks of an operator's machine are wrong from now on.
    Clock {
        operator: usize,
        clock: Clock,
    },
    /// The clock of an agent's node is so far ahead, or behind.
    AgentClock {
        nth: usize,
        ms: i64,
    },
    /// A newer version of the operator stored this, which the schema of this one does not know.
    Newer {
        name: &'static str,
        pointer: &'static str,
        value: Value,
    },
    /// An older version of the operator wanted this of a child as well.
    Older {
        plural: &'static str,
        patch: Value,
    },
    /// A child of this kind must have no such field now.
    ExpectNo {
        plural: &'static str,
        pointer: &'static str,
    },
    /// What the agents say now is kept, and said once more by somebody else.
    Overhear,
    Replay,
}

/// Namespace and name of an InferenceDeployment: `elsewhere/chat`, or a name alone.
pub fn place(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or((NAMESPACE, name))
}

/// Does one act to the world; the acts on operators are the runner's.
pub fn perform(act: &Act, world: &mut World, state: &mut State, now_ms: u64) {
    let user = |name: &str| {
        let (namespace, name) = place(name);
        target("inferencedeployments", namespace, name, "user")
    };
    match act {
        Act::Create { name, spec } => {
            let body = json!({"metadata": {"name": place(name).1, "labels": {"team": "a"}}, "spec": spec});
            drop(state.store.create(&user(name), body));
        }
        Act::Edit { name, patch } => drop(state.store.merge(&user(name), patch)),
        Act::Replace { name, spec } => {
            if let Ok((_, live)) = state.store.read(&user(name)) {
                let mut body = Object::clone(&live);
                body["spec"] = spec.clone();
                drop(state.store.replace(&user(name), body));
            }
        }
        Act::Delete { name } => drop(state.store.delete(&user(name), &Value::Null)),
        Act::Freeze { .. }
        | Act::Crash { .. }
        | Act::AgentClock { .. }
        | Act::Unkillable { .. }
        | Act::Sick { .. }
        | Act::NodeLost { .. }
        | Act::GpuFault { .. } => {
            on_engines(act, world, now_ms);
        }
        Act::FreezeOf { .. } | Act::Poison { .. } => on_some_engine(act, world, state, now_ms),
        Act::Reboot { node } => world.reboot(&mut state.store, *node, now_ms),
        Act::Drain { node, ms } => world.drain(&mut state.store, *node, (now_ms, now_ms + ms)),
        Act::Quota { pods } => world.quota = *pods,
        Act::LeastServing { count } => world.least_serving = *count,
        Act::Pages { size } => state.store.page = *size,
        Act::OpaqueVersions => state.store.opaque = true,
        Act::DeletePod { nth } => {
            if let Some(pod) = nth_pod(world, *nth).and_then(|uid| world.pods.get(&uid)) {
                drop(state.store.delete(&target("pods", &pod.namespace, &pod.name, "user"), &Value::Null));
            }
        }
        Act::Expect { .. }
        | Act::ExpectServing { .. }
        | Act::ExpectOf { .. }
        | Act::ExpectFree { .. }
        | Act::ExpectMarked { .. }
        | Act::ExpectKept { .. }
        | Act::ExpectNo { .. } => super::expect::expect(act, world, state, now_ms),
        Act::DeleteLease => {
            drop(state.store.delete(&target("leases", "truebeat-system", "truebeat-operator", "user"), &Value::Null));
        }
        Act::Backup => state.backup = Some(state.store.backup()),
        Act::Restore => state.backup.take().into_iter().for_each(|backup| state.store.restore(backup)),
        Act::Overhear => world.overheard = said(state),
        Act::Replay => std::mem::take(&mut world.overheard).into_iter().for_each(|(key, conditions)| {
            let at = target("pods", &key.1, &key.2, "user").status();
            drop(state.store.merge(&at, json!({"status": {"conditions": conditions}})));
        }),
        Act::PassAgain | Act::Kill { .. } | Act::Pause { .. } | Act::Terminate { .. } | Act::Clock { .. } => {}
        _ => on_children(act, state),
    }
}

/// The conditions of all pods.
fn said(state: &State) -> Vec<(Key, Value)> {
    let pods = state.store.of("pods");
    pods.map(|(key, entry)| (key.clone(), entry.value["status"]["conditions"].clone())).collect()
}

fn on_engines(act: &Act, world: &mut World, now_ms: u64) {
    match act {
        Act::Sick { node, sick } => {
            let node = format!("node-{node}");
            let _ = if *sick { world.sick_nodes.insert(node) } else { world.sick_nodes.remove(&node) };
        }
        Act::NodeLost { node, lost } => {
            let node = format!("node-{node}");
            let _ = if *lost { world.lost_nodes.insert(node) } else { world.lost_nodes.remove(&node) };
        }
        Act::GpuFault { node, fault, dies } => {
            let node = format!("node-{node}");
            let there = world.pods.values_mut().filter(|pod| pod.node == node);
            there.for_each(|pod| pod.agent.gpu_fault(now_ms, *fault, *dies));
            world.lost_gpus.extend(fault.lasts().then_some(node));
        }
        Act::Unkillable { exit_ms } => world.pods.values_mut().for_each(|pod| pod.agent.exit_ms = *exit_ms),
        Act::Freeze { nth, .. } | Act::Crash { nth } | Act::AgentClock { nth, .. } => {
            let Some(pod) = nth_pod(world, *nth).and_then(|uid| world.pods.get_mut(&uid)) else { return };
            match act {
                Act::Freeze { heals_ms, .. } => pod.agent.freeze(now_ms, heals_ms.map(|ms| now_ms + ms)),
                Act::AgentClock { ms, .. } => pod.agent.clock_ms = *ms,
                _ => pod.agent.crash(now_ms),
            }
        }
        _ => {}
    }
}

/// On an engine that is found by what the API says of its pod.
fn on_some_engine(act: &Act, world: &mut World, state: &State, now_ms: u64) {
    let live = |name: &str| state.store.get(&("pods", NAMESPACE.to_owned(), name.to_owned()));
    match act {
        Act::FreezeOf { image } => {
            let found = first_pod_of(world, &state.store, image).and_then(|uid| world.pods.get_mut(&uid));
            found.into_iter().for_each(|pod| pod.agent.freeze(now_ms, None));
        }
        Act::Poison { nth, request } => {
            let Some(pod) = nth_pod(world, *nth).and_then(|uid| world.pods.get_mut(&uid)) else { return };
            let told = live(&pod.name).map(|entry| &entry.value["metadata"]["annotations"][ANNOTATION_POISON]);
            let refused = read(told.and_then(Value::as_str).unwrap_or_default());
            if !refused.iter().any(|one| one.request == *request) {
                pod.agent.freeze_by(now_ms, request);
            }
        }
        _ => {}
    }
}

fn on_children(act: &Act, state: &mut State) {
    let store = &mut state.store;
    let user = |plural: &str, name: &str| target(plural, NAMESPACE, name, "user");
    match act {
        Act::Meddle => {
            let note = super::strangers::note();
            for plural in ["services", "deployments"] {
                drop(store.merge(&user(plural, "chat"), &note));
            }
            drop(store.merge(&user("deployments", "chat"), json!({"spec": {"replicas": 7}})));
        }
        Act::PatchChild { plural, patch } => drop(store.merge(&user(plural, child(plural)), patch)),
        Act::DeleteChild { plural } | Act::Unsquat { plural } => {
            drop(store.delete(&user(plural, child(plural)), &Value::Null));
        }
        Act::Squat { plural } => {
            drop(store.create(&user(plural, ""), json!({"metadata": {"name": child(plural)}, "spec": {}})));
        }
        Act::PatchOwners { kind } => {
            let pods: Vec<(Key, Arc<Object>)> =
                store.of("pods").map(|(key, e)| (key.clone(), e.value.clone())).collect();
            for ((_, namespace, name), pod) in pods {
                let mut wrong = pod["metadata"]["ownerReferences"][0].clone();
                wrong["kind"] = json!(kind);
                let patch = json!({"metadata": {"ownerReferences": [wrong]}});
                drop(store.merge(&target("pods", &namespace, &name, "user"), &patch));
            }
        }
        Act::Newer { name, pointer, value } => {
            let key = ("inferencedeployments", NAMESPACE.to_owned(), (*name).to_owned());
            let Some(entry) = store.get(&key).cloned() else { return };
            let mut newer = entry.value.json();
            newer.pointer_mut(pointer).into_iter().for_each(|field| field.clone_from(value));
            store.put(kinds::of("inferencedeployments"), key, newer.into(), entry.managers);
        }
        Act::Crowd { conditions } => super::refused::crowd(store, *conditions),
        Act::Older { plural, patch } => super::changes::older(store, plural, patch),
        Act::PatchPods { patch } => {
            let keys: Vec<Key> = store.of("pods").map(|(key, _)| key.clone()).collect();
            for (_, namespace, name) in keys {
                let at = target("pods", &namespace, &name, "user");
                let at = if patch["status"].is_null() { at } else { at.status() };
                drop(store.merge(&at, patch));
            }
        }
        _ => {}
    }
}

/// Name of the child of a kind of the InferenceDeployment `chat`.
pub fn child(plural: &str) -> &'static str {
    if matches!(plural, "services" | "deployments" | "poddisruptionbudgets") { "chat" } else { "chat-truebeat-agent" }
}

pub fn nth_pod(world: &World, nth: usize) -> Option<String> {
    let mut pods: Vec<(&String, &String)> = world.pods.values().map(|pod| (&pod.name, &pod.uid)).collect();
    pods.sort();
    (!pods.is_empty()).then(|| pods[nth % pods.len()].1.clone())
}

/// The first pod, by name, that the API says runs this image.
pub fn first_pod_of(world: &World, store: &Store, image: &str) -> Option<String> {
    let live = |name: &str| store.get(&("pods", NAMESPACE.to_owned(), name.to_owned()));
    let runs = |name: &str| live(name).is_some_and(|e| e.value["spec"]["containers"][0]["image"] == image);
    let found = world.pods.values().filter(|pod| runs(&pod.name)).min_by_key(|pod| pod.name.clone());
    found.map(|pod| pod.uid.clone())
}
