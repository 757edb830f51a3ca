//! The fleet: nodes, kwok that plays their kubelets, InferenceDeployments of a hundred replicas, the operator, and the watches.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crds::{InferenceDeployment, LABEL_DEPLOYMENT};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use truebeat_tests::Cluster;
use truebeat_tests::fleet::nodes;
use truebeat_tests::fleet::operator::{ACCOUNT, Candidate, NAMESPACE, Operator};
use truebeat_tests::product::{self, Programs};
use truebeat_tests::wait::until_async;

use crate::report::{Goal, Report};
use crate::watch::Seen;

/// Replicas of one InferenceDeployment.
pub const PODS_EACH: usize = 100;
const PODS_PER_NODE: usize = 10;
const DEPLOYMENTS_PER_NAMESPACE: usize = 10;
const STAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tools/kwok/stages.yaml");
/// Whatever is wanted is granted: the budgets are measured elsewhere.
const NO_LIMITS: [&str; 6] =
    ["--fleet-restarts-percent", "100", "--fleet-hold-percent", "100", "--node-restarts-max", "0"];
pub const BOUND: Duration = Duration::from_secs(1800);

/// The running fleet.
pub struct Fleet<'a> {
    pub client: Client,
    pub cluster: &'a Cluster,
    pub seen: Seen,
    /// Who leads now; the takeovers put another here.
    pub operator: tokio::sync::Mutex<Operator>,
    pub binary: PathBuf,
    pub size: usize,
}

impl<'a> Fleet<'a> {
    /// Makes it and waits until every replica is ready and every InferenceDeployment says so.
    pub async fn start(
        client: Client,
        cluster: &'a Cluster,
        programs: &Programs,
        kwok: &Path,
        size: usize,
        report: &mut Report,
    ) -> Result<Self> {
        let count = size.div_ceil(PODS_PER_NODE);
        nodes::create(&client, count, &json!({"kwok.x-k8s.io/node": "fake"})).await?;
        start_kwok(cluster, kwok)?;
        programs.install(cluster)?;
        cluster.kubectl(&["-n", NAMESPACE, "scale", "deployment/truebeat-operator", "--replicas=0"])?;
        let binary = programs.operator.clone();
        let operator = candidate(&binary, "operator-1", 9501).start(cluster, &client).await?;
        operator.ready().await?;
        let started = Instant::now();
        let deployments = size / PODS_EACH;
        for group in 0..deployments.div_ceil(DEPLOYMENTS_PER_NAMESPACE) {
            let range = group * DEPLOYMENTS_PER_NAMESPACE..deployments.min((group + 1) * DEPLOYMENTS_PER_NAMESPACE);
            let infds = range.map(|n| infd(&format!("fleet-{group}"), n));
            let objects: Vec<Value> = std::iter::once(namespace(group)).chain(infds).collect();
            product::apply(cluster, &json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string())?;
        }
        let seen = Seen::watch(&client);
        let operator = tokio::sync::Mutex::new(operator);
        let fleet = Self { client, cluster, seen, operator, binary, size };
        fleet.whole("every replica to be ready").await?;
        report.add("pods", size as f64, "count", Goal::None);
        report.add("nodes", count as f64, "count", Goal::None);
        report.add("first_rollout", started.elapsed().as_secs_f64(), "s", Goal::None);
        Ok(fleet)
    }

    /// Waits until every InferenceDeployment is whole: all replicas ready, nothing granted.
    pub async fn whole(&self, what: &str) -> Result<()> {
        let api: Api<InferenceDeployment> = Api::all(self.client.clone());
        until_async(what, BOUND, || async {
            // not too often: this asks the very API server that is measured
            tokio::time::sleep(Duration::from_millis(500)).await;
            let all = api.list(&ListParams::default()).await?.items;
            let whole = |infd: &&InferenceDeployment| {
                infd.status.as_ref().is_some_and(|status| {
                    status.ready_replicas == infd.spec.replicas
                        && status.recovery.grants.is_empty()
                        && status.open_incidents == 0
                })
            };
            let count = all.iter().filter(whole).count();
            ensure!(count == self.size / PODS_EACH, "{count} of {} are", self.size / PODS_EACH);
            Ok(Some(()))
        })
        .await
    }

    /// All replicas by their node.
    pub async fn by_node(&self) -> Result<BTreeMap<String, Vec<Pod>>> {
        let mut nodes: BTreeMap<String, Vec<Pod>> = BTreeMap::new();
        let api: Api<Pod> = Api::all(self.client.clone());
        let mut params = ListParams::default().labels(LABEL_DEPLOYMENT).limit(500);
        loop {
            let page = api.list(&params).await?;
            for pod in page.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()) {
                let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("a pod without a node")?;
                nodes.entry(node).or_default().push(pod);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => return Ok(nodes),
            }
        }
    }
}

/// One operator of this fleet.
pub fn candidate<'a>(binary: &'a Path, name: &'a str, port: u16) -> Candidate<'a> {
    Candidate { binary, name, port, account: (NAMESPACE, ACCOUNT), args: &NO_LIMITS }
}

/// Names of pods.
pub fn names(pods: &[Pod]) -> Vec<String> {
    pods.iter().map(ResourceExt::name_any).collect()
}

fn start_kwok(cluster: &Cluster, kwok: &Path) -> Result<()> {
    let kubeconfig = cluster.layout().kubeconfig("admin").display().to_string();
    let flags = format!(
        "--kubeconfig {kubeconfig} --config {STAGES} --manage-nodes-with-annotation-selector kwok.x-k8s.io/node=fake
         --cidr 10.128.0.0/16 --node-lease-duration-seconds 40"
    );
    let argv = std::iter::once(kwok.display().to_string()).chain(flags.split_whitespace().map(str::to_owned)).collect();
    cluster.spawn("kwok", argv).map(drop)
}

fn namespace(group: usize) -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": format!("fleet-{group}")}})
}

fn infd(namespace: &str, n: usize) -> Value {
    json!({
        "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "InferenceDeployment",
        "metadata": {"name": format!("d{n:03}"), "namespace": namespace},
        "spec": {
            "replicas": PODS_EACH,
            "model": {"source": {"file": {"path": "/models/demo"}}},
            "engine": {"kind": "Truebeat", "image": "simulated"},
            "agent": {"image": "simulated"},
            "rollout": {"soakSeconds": 0},
            // no pause between two recoveries of one pod either: the second burst is of the same replicas, a few seconds after the first
            "recovery": {
                "maxUnavailable": PODS_EACH, "holdPercent": 100, "restartsBeforeReplace": 1,
                "restartBackoff": "0s", "restartBackoffMax": "0s",
            },
        },
    })
}
