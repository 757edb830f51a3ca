//! What must hold at every step of the world, by what is true and not by what is said: the budget of restarts (P15), and
//! that nobody takes the GPU of a process that still lives (P16).

use std::collections::BTreeMap;

use super::{
    agent::Engine,
    cluster::State,
    kube::store::{Entry, wall},
    world::{Pod, World, is_ready},
};

const OWNER: &str = "inference.truebeat.io/deployment";
/// A pod that should be gone for so long does not go.
const LINGERS_AFTER_S: i64 = 30;

/// Is this pod long past its grace?
fn lingers(pod: &Entry, now_ms: u64) -> bool {
    let ends = pod.value["metadata"]["deletionTimestamp"].as_str().and_then(|at| at.parse::<jiff::Timestamp>().ok());
    ends.is_some_and(|ends| wall(now_ms).as_second() - ends.as_second() >= LINGERS_AFTER_S)
}

impl World {
    /// P16: nobody is Ready on a GPU that an older process may still own.
    pub fn alone_on_its_gpu(&mut self, state: &mut State, now_ms: u64) {
        self.orphans.retain(|orphan| orphan.dead_ms > now_ms);
        for orphan in &self.orphans {
            for pod in self.pods.values().filter(|pod| pod.gpu && pod.node == orphan.node) {
                let live = state.store.get(&("pods", pod.namespace.clone(), pod.name.clone()));
                if live.is_some_and(|entry| is_ready(&entry.value)) {
                    let what = format!("P16: {} is Ready on the GPU of {}, whose process lives", pod.name, orphan.name);
                    state.checks.broken(now_ms, what);
                }
            }
        }
    }

    /// P4, of stories that ask for it: clients find so many replicas. One on its way out takes no request.
    pub fn enough_serve(&self, state: &mut State, now_ms: u64) {
        let serves = |pod: &&Pod| {
            pod.gone_at_ms.is_none() && pod.agent.serves() && matches!(pod.agent.engine, Engine::Serving { .. })
        };
        let serving = self.pods.values().filter(serves).count();
        if serving < self.least_serving {
            state.checks.broken(now_ms, format!("P4: {serving} replicas serve, and {} should", self.least_serving));
        }
    }

    /// Are as many replicas up as should be, those that stall by themselves among them?
    fn made_up(&self, state: &State, (namespace, owner): (&str, &str)) -> bool {
        let infd = state.store.get(&("inferencedeployments", namespace.to_owned(), owner.to_owned()));
        let wanted = infd.and_then(|entry| entry.value["spec"]["replicas"].as_u64()).unwrap_or(0);
        let ours =
            state.store.of("pods").map(|(_, entry)| &entry.value).filter(|pod| {
                pod["metadata"]["labels"][OWNER] == owner && pod["metadata"]["deletionTimestamp"].is_null()
            });
        let up = ours.filter_map(|pod| self.pods.get(pod["metadata"]["uid"].as_str().unwrap_or_default()));
        up.filter(|pod| pod.agent.serves() || pod.agent.open()).count() as u64 >= wanted
    }

    /// P15, by what is true and not by what is said.
    pub fn budget_holds(&self, state: &mut State, now_ms: u64) {
        let mut by_owner: BTreeMap<(String, String), usize> = BTreeMap::new();
        for (key, entry) in state.store.of("pods") {
            let Some(pod) = self.pods.get(entry.value["metadata"]["uid"].as_str().unwrap_or_default()) else {
                continue;
            };
            let grant = entry.value["metadata"]["annotations"]["truebeat.io/restart-grant"].as_str();
            let owner = entry.value["metadata"]["labels"][OWNER].as_str().unwrap_or_default();
            if lingers(entry, now_ms) && self.made_up(state, (&key.1, owner)) {
                continue; // no replica is away for it
            }
            if pod.agent.restarting_by_grant(grant) || state.checks.replaced.contains(&pod.uid) {
                *by_owner.entry((key.1.clone(), owner.to_owned())).or_default() += 1;
            }
        }
        let known = |(namespace, owner): &(String, String)| {
            state.store.get(&("inferencedeployments", namespace.clone(), owner.clone())).is_some()
        };
        let total: usize = by_owner.iter().filter(|(key, _)| known(key)).map(|(_, count)| count).sum();
        let replicas = |entry: &Entry| entry.value["spec"]["replicas"].as_u64().unwrap_or(0) as usize;
        let share = (state.store.of("inferencedeployments").map(|(_, e)| replicas(e)).sum::<usize>() / 10).max(1);
        if total > share {
            state.checks.broken(now_ms, format!("P15: {total} granted recoveries in the fleet, its share is {share}"));
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
}
