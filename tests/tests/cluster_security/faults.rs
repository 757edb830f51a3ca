//! Rows of the catalogue of faults (`docs/faults-catalogue.md`) whose other side must be a real API server: its quota, its tokens.

use anyhow::{Context, Result, ensure};
use crds::InferenceDeployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use truebeat_tests::fleet::identity;
use truebeat_tests::fleet::operator::{ACCOUNT, Candidate, NAMESPACE, http};
use truebeat_tests::product;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World, infd};

const QUOTA: &str =
    "{apiVersion: v1, kind: ResourceQuota, metadata: {name: two, namespace: quota}, spec: {hard: {pods: 2}}}";

/// A18: where no pod can be made, the status says why in the server's words, and whoever would be replaced is restarted where it is.
pub async fn quota(world: &World<'_>) -> Result<()> {
    world.tenant("quota")?;
    product::apply(world.cluster, QUOTA)?;
    until_async("the quota to count", BOUND, || async {
        let quota = world.json(&["-n", "quota", "resourcequota", "two"])?;
        Ok((quota["status"]["hard"]["pods"] == "2").then_some(()))
    })
    .await?;
    let recovery = json!({"restartsBeforeReplace": 1, "restartBackoff": "0s", "restartBackoffMax": "0s"});
    let pods = world.deploy("quota", "chat", json!({"recovery": recovery})).await?;
    let pod = pods.first().context("a pod")?;
    let engine = json!({"kind": "Truebeat", "image": "simulated:2"});
    let next = infd("quota", "chat", json!({"recovery": recovery, "engine": engine}));
    product::apply(world.cluster, &next.to_string())?;
    let told = |infd: &InferenceDeployment| refusal(infd).is_some_and(|why| why.contains("exceeded quota: two"));
    let status = world.status("quota", "chat", "the quota's words in the status", told).await?;
    println!("      {}", refusal(&status).unwrap_or_default());

    for id in ["quota-1", "quota-2"] {
        world.stall_until_granted(pod, id).await?;
        world.recover(pod, id).await?;
    }
    ensure!(world.now(pod).await?.is_some(), "a pod was deleted whose successor nobody may make");
    world.leave("quota").await
}

/// The message of `Reconciling` for that reason.
fn refusal(infd: &InferenceDeployment) -> Option<String> {
    let conditions = &infd.status.as_ref()?.conditions;
    let found = conditions.iter().find(|c| c.type_ == "Reconciling" && c.reason == "PodsRefused")?;
    Some(found.message.clone())
}

/// A20: a token that is not taken any more is read anew, by a process that goes on.
pub async fn token(world: &World<'_>) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NAMESPACE);
    let pod = pods.create(&PostParams::default(), &serde_json::from_value(holder())?).await?;
    let candidate = Candidate {
        binary: &world.programs.operator,
        name: "operator-rotated",
        port: 9502,
        account: (NAMESPACE, ACCOUNT),
        args: &[],
    };
    let operator = candidate.start_as(world.cluster, &world.client, Some(&pod)).await?;
    let said = async |code: u16, what: &str| {
        until_async(what, BOUND, || async {
            let (now, body) = http(operator.address, "GET", "/readyz", "").await?;
            ensure!(now == code, "{now}: {body}");
            Ok(Some(()))
        })
        .await
    };
    let story = async {
        said(200, "a candidate that sees the Lease").await?;
        // its token is bound to the pod, and nobody's when that is gone
        pods.delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await?;
        said(503, "the candidate to be refused").await?;
        let new = identity::token(&world.client, NAMESPACE, ACCOUNT, None, None).await?;
        std::fs::write(candidate.token_file(world.cluster), new)?;
        said(200, "the same process to go on with the new token").await?;
        ensure!(operator.process.alive(), "it is another process");
        Ok(())
    };
    let result = story.await;
    operator.process.end(BOUND);
    result
}

/// A pod of the operator's account that nobody runs.
fn holder() -> Value {
    let security = json!({
        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": true, "runAsUser": 1,
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    json!({"metadata": {"name": "holder"}, "spec": {
        "serviceAccountName": ACCOUNT, "nodeSelector": {"there-is": "none"},
        "containers": [{"name": "none", "image": "none", "securityContext": security}],
    }})
}
