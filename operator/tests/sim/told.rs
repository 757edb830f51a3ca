//! P13 in mid-run: whatever has been true for a while, with an operator at work and nothing in its way, stands in the status. Where requests
//! fail by chance or by rule nobody can say how long it may take: there the end is asked alone ([`super::end`]).

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    act::Act,
    agent::Engine,
    cluster::State,
    kube::store::Key,
    story::Story,
    world::{World, is_ready},
};

/// A pass follows an event within a second, one that failed is repeated within ten.
const BOUND_MS: u64 = 15_000;

/// What is true of the replicas of one InferenceDeployment.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Truth {
    uid: String,
    /// Whose successor is there already is another world, of as many replicas as before.
    pods: Vec<String>,
    /// As the kubelets say.
    ready: u64,
    /// They deliver, and nothing is open of them.
    healthy: u64,
    frozen: u64,
}

/// What has been true, and since when.
#[derive(Debug, Default)]
pub struct Told {
    /// Is it asked for in this run?
    asked: bool,
    truths: BTreeMap<Key, (Truth, u64)>,
    led_since_ms: Option<u64>,
}

impl Told {
    pub fn of(story: &Story) -> Self {
        // whoever writes what agents say, or whose pods they are, or sets all back, makes another truth than the world's
        let moot = |act: &Act| {
            use Act::{Newer, PatchOwners, PatchPods, Replay, Restore};
            matches!(act, Newer { .. } | PatchOwners { .. } | PatchPods { .. } | Replay | Restore)
        };
        let asked = story.faults.never() && story.scope.is_none() && !story.acts.iter().any(|(_, act)| moot(act));
        Told { asked, ..Told::default() }
    }

    /// One look. `led`: is the process alive and running that the Lease names?
    pub fn look(&mut self, state: &mut State, world: &World, (led, now_ms): (bool, u64)) {
        if !self.asked {
            return;
        }
        let since = self.led_since_ms.filter(|_| led);
        self.led_since_ms = since.or_else(|| led.then_some(now_ms));
        let mut faults = Vec::new();
        let mut truths = BTreeMap::new();
        for (key, entry) in state.store.of("inferencedeployments") {
            if entry.value["metadata"]["deletionTimestamp"].is_string() {
                continue;
            }
            let truth = truth(state, world, key, &entry.value["metadata"]["uid"]);
            let before = self.truths.remove(key).filter(|(before, _)| *before == truth);
            let since = before.map_or(now_ms, |(_, since)| since);
            let due_ms = since.max(self.led_since_ms.unwrap_or(now_ms)) + BOUND_MS;
            if now_ms >= due_ms {
                let wrong = lies(&truth, &entry.value["status"]);
                faults.extend(wrong.map(|what| format!("P13: {}/{}: {what}, since {since} ms", key.1, key.2)));
            }
            truths.insert(key.clone(), (truth, since));
        }
        self.truths = truths;
        faults.into_iter().for_each(|what| state.checks.broken(now_ms, what));
    }
}

fn truth(state: &State, world: &World, infd: &Key, uid: &Value) -> Truth {
    let uid = uid.as_str().unwrap_or_default().to_owned();
    let mut truth = Truth { uid, pods: Vec::new(), ready: 0, healthy: 0, frozen: 0 };
    for (_, entry) in state.store.of("pods").filter(|(key, _)| key.1 == infd.1) {
        let metadata = &entry.value["metadata"];
        if metadata["labels"][crds::LABEL_DEPLOYMENT] != infd.2.as_str() || metadata["deletionTimestamp"].is_string() {
            continue;
        }
        let uid = metadata["uid"].as_str().unwrap_or_default();
        truth.pods.push(uid.to_owned());
        truth.ready += u64::from(is_ready(&entry.value));
        let Some(pod) = world.pods.get(uid).filter(|pod| !world.lost_nodes.contains(&pod.node)) else { continue };
        truth.healthy += u64::from(pod.agent.healthy());
        truth.frozen += u64::from(matches!(pod.agent.engine, Engine::Frozen { .. }));
    }
    truth
}

/// What the status says that is not so.
fn lies(truth: &Truth, status: &Value) -> Option<String> {
    let said = |field: &str| status[field].as_u64().unwrap_or(u64::MAX);
    let replicas = truth.pods.len() as u64;
    let counts = [("replicas", replicas), ("readyReplicas", truth.ready), ("progressingReplicas", truth.healthy)];
    let wrong = counts.into_iter().find(|(field, truth)| said(field) != *truth);
    let wrong = wrong.map(|(field, truth)| format!("status.{field} is {}, the truth is {truth}", status[field]));
    let stalled = said("stalledReplicas");
    // one whose engine starts again, or serves and has still to show it, may count as stalled
    let most = replicas - truth.healthy;
    let range = (truth.frozen..=most).contains(&stalled);
    wrong.or_else(|| {
        (!range).then(|| format!("status.stalledReplicas is {stalled}, the truth is {} to {most}", truth.frozen))
    })
}
