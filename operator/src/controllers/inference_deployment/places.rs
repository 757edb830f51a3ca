//! Budgets of places (I2), pure: how many granted recoveries a node and a failure domain may bear at once, fleet-wide, and
//! which places stall as a whole, so that restarting their engines one by one cures nothing.

use std::collections::{BTreeMap, BTreeSet};

use crds::Grant;

use super::{
    escalate::{common_cause, in_stall},
    grants::wants_slot,
    observed::PodView,
};
use crate::controllers::nodes::view::NodeView;

/// What may be granted where. The default knows no place and limits none.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// At most so many at once on one node; 0: no limit.
    node_max: usize,
    /// At most so many at once in one failure domain; 0: no limit.
    domain_max: usize,
    /// The failure domain of each node that is known; empty: it has none.
    domains: BTreeMap<String, String>,
    taken: BTreeMap<Place, usize>,
    held: BTreeMap<Place, String>,
}

/// A node, or a failure domain.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Node(String),
    Domain(String),
}

impl Places {
    /// The places of `nodes`, with the grants of other deployments (node and domain of each).
    pub fn new(nodes: &[NodeView], others: &[(String, String)], (node_max, domain_max): (usize, usize)) -> Self {
        let domain = |node: &NodeView| (node.name.clone(), node.domain.clone().unwrap_or_default());
        let domains = nodes.iter().map(domain).collect();
        let mut places = Places { node_max, domain_max, domains, ..Places::default() };
        others.iter().for_each(|(node, domain)| places.take(node, domain));
        places
    }

    /// Holds every place in which more than `percent` of these pods, and at least three, stall at once.
    pub fn hold(&mut self, pods: &[PodView], percent: usize) {
        let mut counts: BTreeMap<Place, (usize, usize)> = BTreeMap::new();
        for pod in pods.iter().filter(|pod| !pod.leaving) {
            for place in self.of(&pod.node, self.domain(&pod.node)) {
                let (stalled, all) = counts.entry(place).or_default();
                *all += 1;
                *stalled += usize::from(in_stall(pod));
            }
        }
        // Where all pods are in one place it is the deployment's own hold that speaks.
        let here = pods.iter().filter(|pod| !pod.leaving).count();
        for (place, (stalled, all)) in counts.into_iter().filter(|(_, (_, all))| *all < here) {
            if common_cause(stalled, all, percent) {
                let name = match &place {
                    Place::Node(name) => format!("node {name}"),
                    Place::Domain(name) => format!("failure domain {name}"),
                };
                self.held.insert(place, format!("{stalled} of {all} replicas in {name} stall at once"));
            }
        }
    }

    /// Why nothing is granted in the place of any of these pods, if that is so.
    pub fn why_held(&self, pods: &[PodView]) -> Option<String> {
        let waiting = pods.iter().filter(|pod| wants_slot(pod));
        let whys: BTreeSet<&String> = waiting
            .flat_map(|pod| self.of(&pod.node, self.domain(&pod.node)))
            .filter_map(|place| self.held.get(&place))
            .collect();
        (!whys.is_empty()).then(|| whys.into_iter().cloned().collect::<Vec<_>>().join(", "))
    }

    /// Is nothing granted on this node, because of a common cause there?
    pub fn holds(&self, node: &str) -> bool {
        self.of(node, self.domain(node)).iter().any(|place| self.held.contains_key(place))
    }

    /// The same where nothing is held: with budgets alone.
    pub fn unheld(self) -> Self {
        Places { held: BTreeMap::new(), ..self }
    }

    /// The failure domain of a node; empty if unknown.
    pub fn domain(&self, node: &str) -> &str {
        self.domains.get(node).map_or("", String::as_str)
    }

    /// Is there room for one more recovery on this node? Takes it if so. Where failure domains have a budget, a node of which nobody knows in
    /// which one it is may be in a full one.
    pub fn admit(&mut self, node: &str) -> bool {
        let domain = self.domain(node).to_owned();
        let places = self.of(node, &domain);
        let free = |place: &Place| {
            let most = match place {
                Place::Node(_) => self.node_max,
                Place::Domain(_) => self.domain_max,
            };
            !self.held.contains_key(place) && (most == 0 || self.taken.get(place).copied().unwrap_or(0) < most)
        };
        let known = self.domain_max == 0 || self.domains.contains_key(node);
        let admitted = known && places.iter().all(free);
        if admitted {
            self.take(node, &domain);
        }
        admitted
    }

    /// Counts the grants that stand.
    pub fn take_all(&mut self, grants: &[Grant]) {
        grants.iter().for_each(|grant| self.take(&grant.node, &grant.domain));
    }

    fn take(&mut self, node: &str, domain: &str) {
        for place in self.of(node, domain) {
            *self.taken.entry(place).or_default() += 1;
        }
    }

    fn of(&self, node: &str, domain: &str) -> Vec<Place> {
        let node = (!node.is_empty()).then(|| Place::Node(node.to_owned()));
        let domain = (!domain.is_empty()).then(|| Place::Domain(domain.to_owned()));
        node.into_iter().chain(domain).collect()
    }
}

#[cfg(test)]
#[path = "places_tests.rs"]
mod tests;
