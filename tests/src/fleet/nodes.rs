//! Nodes that are objects alone. Without heartbeats the controller manager gives them up after `--node-monitor-grace-period`.

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use serde_json::{Value, json};

/// Flag of the controller manager with which nodes that never say a word stay.
pub const SILENT_NODES_STAY: &str = "--node-monitor-grace-period=1h";
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
