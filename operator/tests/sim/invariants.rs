//! What must hold at every step of the world, by what is true and not by what is said: the budget of restarts (P15), and
//! that nobody takes the GPU of a process that still lives (P16).

use std::collections::BTreeMap;

use super::{
    agent::Engine,
    cluster::State,
    kube::store::{Entry, wall},
    nodes::zone,
    world::{Pod, World, is_ready},
};

const OWNER: &str = "inference.truebeat.io/deployment";
/// A pod that should be gone for so long does not go.
const LINGERS_AFTER_S: i64 = 30;
/// Who was up so lately may have been counted when the last key was granted.
const UP_LATELY_MS: u64 = 60_000;

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
    pub fn budget_holds(&mut self, state: &mut State, now_ms: u64) {
        let away = self.away_by_grant(state, now_ms);
        let owner = |pod: &Away| {
            state
                .store
                .get(&("inferencedeployments", pod.namespace.clone(), pod.owner.clone()))
                .map(|e| e.value.clone())
        };
        let mut faults = Vec::new();
        let mut by_owner: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        let mut by_place: BTreeMap<&str, usize> = BTreeMap::new();
        let mut total = 0;
        for pod in &away {
            let Some(infd) = owner(pod) else { continue };
            total += 1;
            for place in [pod.node.as_str(), zone(&pod.node)] {
                *by_place.entry(place).or_default() += 1;
            }
            let count = by_owner.entry((&pod.namespace, &pod.owner)).or_default();
            *count += 1;
            let budget = infd["spec"]["recovery"]["maxUnavailable"].as_u64();
            if budget.is_some_and(|budget| *count as u64 > budget) {
                let whose = format!("{}/{}", pod.namespace, pod.owner);
                faults.push(format!("P15: {count} replicas of {whose} in a granted restart, budget {budget:?}"));
            }
        }
        let (node_max, domain_max) = self.fleet.place_max;
        for (place, count) in by_place {
            let most = if place.starts_with("node-") { node_max } else { domain_max };
            if most > 0 && count > most {
                faults.push(format!("P15: {count} granted recoveries in {place}, budget {most}"));
            }
        }
        let up = self.pods.values().filter(|pod| pod.served).count();
        if let Some(share) = self.counted.exceeded((total, up), self.fleet.restarts_percent, now_ms) {
            faults.push(format!("P15: {total} granted recoveries in the fleet, its share is {share}"));
        }
        faults.into_iter().for_each(|what| state.checks.broken(now_ms, what));
    }

    /// Who is away for a granted restart or replacement, or may be at any moment.
    fn away_by_grant(&self, state: &State, now_ms: u64) -> Vec<Away> {
        let mut away = Vec::new();
        for (key, entry) in state.store.of("pods") {
            let Some(pod) = self.pods.get(entry.value["metadata"]["uid"].as_str().unwrap_or_default()) else {
                continue;
            };
            let grant = entry.value["metadata"]["annotations"]["truebeat.io/restart-grant"].as_str();
            let owner = entry.value["metadata"]["labels"][OWNER].as_str().unwrap_or_default().to_owned();
            if lingers(entry, now_ms) && self.made_up(state, (&key.1, &owner)) {
                continue; // no replica is away for it
            }
            if pod.agent.restarting_by_grant(grant) || state.checks.replaced.contains(&pod.uid) {
                away.push(Away { namespace: key.1.clone(), owner, node: pod.node.clone() });
            }
        }
        away
    }
}

/// One replica that is away for a grant.
struct Away {
    namespace: String,
    owner: String,
    node: String,
}

/// The fleet as it was lately: how many replicas were up, and how many of them away by a grant.
#[derive(Debug, Default)]
pub struct Counted {
    up: Vec<(u64, usize)>,
    granted: usize,
}

impl Counted {
    /// The share of the fleet, if more are away now than that, and more than at the last look: a fleet that shrinks takes no key back. What
    /// has never been up is no replica, however many a spec asks for.
    fn exceeded(&mut self, (granted, up): (usize, usize), percent: usize, now_ms: u64) -> Option<usize> {
        self.up.retain(|(at_ms, _)| at_ms + UP_LATELY_MS > now_ms);
        if self.up.last().is_none_or(|(_, last)| *last != up) {
            self.up.push((now_ms, up));
        }
        let most = self.up.iter().map(|(_, up)| *up).chain([up]).max().unwrap_or(0);
        let share = (most * percent / 100).max(1);
        let more = granted > std::mem::replace(&mut self.granted, granted);
        (more && granted > share).then_some(share)
    }
}
