//! What a burst costs: requests and read bytes at the API server by verb and kind, and processor time of every process, for one replica.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use kube::api::ListParams;
use kube::core::Request;
use truebeat_tests::cluster::Identity;

use crate::fleet::Fleet;
use crate::report::{Goal, Report};
use crate::usage::cpu_s;

/// Processes of the cluster whose time is told; the operator and this program are told as well.
const PROCESSES: [&str; 5] = ["apiserver", "etcd", "kcm", "sched", "kwok"];
/// Kinds that a recovery reads or writes; others (leases, nodes' heartbeats) go on at any time.
const KINDS: [&str; 11] = [
    "deployments",
    "endpointslices",
    "engineincidents",
    "events",
    "inferencedeployments",
    "nodes",
    "pods",
    "replicasets",
    "roles",
    "serviceaccounts",
    "services",
];
/// Less than this for one replica is not told: it is noise of what goes on at any time.
const LEAST: f64 = 0.05;

/// Counters at one moment.
#[derive(Debug, Default)]
pub struct Reading {
    /// By `verb_kind` or `verb_kind_subresource`.
    requests: BTreeMap<String, f64>,
    /// KiB of answers to reads, likewise.
    read_kib: BTreeMap<String, f64>,
    /// Milliseconds of processor time, by process.
    cpu_ms: BTreeMap<String, f64>,
}

impl Reading {
    /// All counters now.
    pub async fn now(fleet: &Fleet<'_>) -> Result<Self> {
        let request = Request::new("/metrics").list(&ListParams::default())?;
        let text = fleet.client.request_text(request).await.context("the API server's metrics")?;
        let mut cpu_ms = BTreeMap::new();
        for name in PROCESSES {
            let process = fleet.cluster.process(name)?.with_context(|| format!("no process {name}"))?;
            cpu_ms.insert(name.to_owned(), cpu_s(process)? * 1e3);
        }
        cpu_ms.insert("operator".to_owned(), cpu_s(fleet.operator.lock().await.process)? * 1e3);
        let own = Identity::of(i32::try_from(std::process::id())?).context("no process of this program")?;
        cpu_ms.insert("this_program".to_owned(), cpu_s(own)? * 1e3);
        let read_kib = counters(&text, "apiserver_response_sizes_sum").into_iter().map(|(k, v)| (k, v / 1024.0));
        Ok(Self { requests: counters(&text, "apiserver_request_total"), read_kib: read_kib.collect(), cpu_ms })
    }

    /// Tells of what was added since `before`, for each of so many replicas.
    pub fn tell(&self, before: &Self, phase: &str, replicas: usize, report: &mut Report) {
        let tables = [
            ("requests", &self.requests, &before.requests, "1/replica"),
            ("read", &self.read_kib, &before.read_kib, "KiB/replica"),
            ("cpu", &self.cpu_ms, &before.cpu_ms, "ms/replica"),
        ];
        for (what, now, before, unit) in tables {
            for (name, value) in now {
                let each = (value - before.get(name).unwrap_or(&0.0)) / replicas as f64;
                if each >= LEAST {
                    report.add(&format!("{phase}_{what}_{name}"), each, unit, Goal::None);
                }
            }
        }
    }
}

/// The sums of one metric of the API server by verb and kind.
fn counters(text: &str, metric: &str) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    for line in text.lines().filter_map(|line| line.strip_prefix(metric)?.strip_prefix('{')) {
        let Some((labels, value)) = line.rsplit_once("} ") else { continue };
        let label = |name: &str| {
            let at = labels.split(',').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            at.unwrap_or_default().trim_matches('"')
        };
        let (verb, kind, part) = (label("verb"), label("resource"), label("subresource"));
        if KINDS.contains(&kind) && !matches!(verb, "WATCH" | "CONNECT") {
            let dash = if part.is_empty() { "" } else { "_" };
            *sums.entry(format!("{verb}_{kind}{dash}{part}")).or_default() += value.parse().unwrap_or(0.0);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_added_up_by_verb_and_kind() {
        let text = "# HELP x y\n\
            apiserver_request_total{code=\"200\",resource=\"pods\",subresource=\"\",verb=\"LIST\"} 3\n\
            apiserver_request_total{code=\"500\",resource=\"pods\",subresource=\"\",verb=\"LIST\"} 1\n\
            apiserver_request_total{code=\"200\",resource=\"pods\",subresource=\"status\",verb=\"PATCH\"} 2\n\
            apiserver_request_total{code=\"200\",resource=\"leases\",subresource=\"\",verb=\"PUT\"} 9\n";
        let sums = counters(text, "apiserver_request_total");
        assert_eq!(sums, [("LIST_pods".to_owned(), 4.0), ("PATCH_pods_status".to_owned(), 2.0)].into());
    }
}
