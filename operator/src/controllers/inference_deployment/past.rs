//! The record of the recoveries that were granted, pure: what escalation, pauses, trials and suspicion of nodes count from. It is bounded.

use std::collections::{BTreeMap, BTreeSet};

use crds::{Grant, PastGrant};
use jiff::SignedDuration;

use super::{
    escalate::{Terms, young},
    observed::{Ground, PodView},
    trials,
};
use crate::controllers::nodes::boot;

/// So many recoveries on one node within the window put it under suspicion.
pub const NODE_COUNT_MIN: usize = 3;
/// So many of one pod are kept, and so many of all: what escalation asks of a pod is less (`restartsBeforeReplace` is at most 10), and a
/// burst of many pods must not make it forget any of them.
const RECENT_OF_POD_MAX: usize = 16;
const RECENT_MAX: usize = 1000;

/// The record of the grants, with the new ones of this look. It is tidied only when something is added: time alone writes nothing (P7). A key
/// that nobody used counts as well: that stall was confirmed, and an engine that wakes each time before its kill must come to a replacement,
/// and its agent must wait between two keys.
pub fn recent(terms: &Terms<'_>, ground: Ground<'_>, granted: &[&Grant], now: &str) -> Vec<PastGrant> {
    let Ground { pods, nodes, .. } = ground;
    if granted.is_empty() {
        return terms.recent.to_vec();
    }
    let counts = |past: &&PastGrant| young(past, terms.window * 2, now) || trials::in_run(past, terms.run_since);
    let mut recent: Vec<PastGrant> = terms.recent.iter().filter(counts).cloned().collect();
    recent.extend(granted.iter().map(|grant| {
        let node = pods.iter().find(|pod| pod.uid == grant.pod_uid).map(|pod| pod.node.clone()).unwrap_or_default();
        let boot_id = boot::of(nodes, &node).to_owned();
        let (pod_uid, granted_at) = (grant.pod_uid.clone(), grant.granted_at.clone());
        PastGrant { pod_uid, node, granted_at, action: grant.action, boot_id }
    }));
    bounded(recent, pods)
}

/// The same without what nobody needs, oldest first: more of one pod than counts, and of a record that is too long those of pods that are
/// gone before any other.
fn bounded(recent: Vec<PastGrant>, pods: &[PodView]) -> Vec<PastGrant> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut counts_still = |past: &PastGrant| {
        let count = counts.entry(past.pod_uid.clone()).or_default();
        *count += 1;
        *count <= RECENT_OF_POD_MAX
    };
    let mut kept: Vec<PastGrant> = recent.into_iter().rev().filter(|past| counts_still(past)).collect();
    kept.reverse();
    let here: BTreeSet<&str> = pods.iter().map(|pod| pod.uid.as_str()).collect();
    let mut over = kept.len().saturating_sub(RECENT_MAX);
    kept.retain(|past| {
        let goes = over > 0 && !here.contains(past.pod_uid.as_str());
        over -= usize::from(goes);
        !goes
    });
    kept.drain(..over);
    kept
}

/// Nodes that came under suspicion by the newest entry of `recent`: other tools act on the event that says so.
pub fn suspect_node(recent: &[PastGrant], window: SignedDuration, now: &str) -> Option<String> {
    let newest = recent.last().filter(|past| !past.node.is_empty())?;
    let node = &newest.node;
    let of_this_boot = |past: &PastGrant| past.node == *node && !boot::is_another(&past.boot_id, &newest.boot_id);
    let count = recent.iter().filter(|past| of_this_boot(past) && young(past, window, now)).count();
    (count >= NODE_COUNT_MIN).then(|| node.clone())
}

#[cfg(test)]
#[path = "past_tests.rs"]
mod tests;
