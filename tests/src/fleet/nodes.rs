//! Nodes that are objects alone. Without heartbeats the controller manager gives them up after `--node-monitor-grace-period`.

use std::time::Duration;

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::{coordination::v1::Lease, core::v1::Node};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Flag of the controller manager with which nodes that never say a word stay.
pub const SILENT_NODES_STAY: &str = "--node-monitor-grace-period=1h";
/// As a kubelet does.
const BEAT_EVERY: Duration = Duration::from_secs(10);
/// Requests at the same time.
const AT_ONCE: usize = 16;

/// Makes `count` nodes `sim-0000` …, ten failure domains among them, ready and without a taint.
///
/// # Errors
/// In the API server's words.
pub async fn create(client: &Client, count: usize, annotations: &Value) -> Result<()> {
    let api: Api<Node> = Api::all(client.clone());
    let one = |n: usize| {
        let api = api.clone();
        async move {
            let node = serde_json::from_value(node(n, annotations)).context("a node of the harness")?;
            api.create(&Default::default(), &node).await.context("create a node")?;
            // admission taints every new node until the controller manager has seen that it is ready
            anyhow::Ok(())
        }
    };
    stream::iter((0..count).map(one)).buffer_unordered(AT_ONCE).try_collect().await
}

/// Renews the Lease of the node `name` as its kubelet would, until what is returned is dropped.
pub fn heartbeats(client: &Client, name: &'static str) -> JoinSet<()> {
    let api: Api<Lease> = Api::namespaced(client.clone(), "kube-node-lease");
    let mut beats = JoinSet::new();
    beats.spawn(async move {
        loop {
            let now = k8s_openapi::jiff::Timestamp::now();
            let spec =
                json!({"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": format!("{now:.6}")});
            let lease = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec});
            if let Err(error) = api.patch(name, &PatchParams::apply("kubelet").force(), &Patch::Apply(lease)).await {
                println!("      the heartbeat of {name}: {error}");
            }
            tokio::time::sleep(BEAT_EVERY).await;
        }
    });
    beats
}

fn node(n: usize, annotations: &Value) -> Value {
    let name = format!("sim-{n:04}");
    let size = json!({"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "110"});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": annotations, "labels": {
            "kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "topology.kubernetes.io/zone": format!("zone-{}", n % 10),
        }},
        "status": {
            "capacity": size, "allocatable": size,
            "nodeInfo": {
                "architecture": "amd64", "operatingSystem": "linux", "kubeletVersion": "v1.36.3", "bootID": "", "containerRuntimeVersion": "",
                "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "osImage": "", "systemUUID": "",
            },
            "conditions": [{"type": "Ready", "status": "True", "reason": "Simulated", "message": "an object alone"}],
        },
    })
}
