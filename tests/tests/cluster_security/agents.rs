//! S6, S7: who is let in, and for whom a token speaks.

use anyhow::{Context, Result, ensure};
use crds::episode::CONDITION_PROGRESSING;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use truebeat_tests::fleet::identity;
use truebeat_tests::fleet::operator::{NAMESPACE, http};
use truebeat_tests::fleet::replica;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World};

/// The agent's own way of speaking: server-side apply of conditions to a pod's status. `None`: taken; else the HTTP status of the refusal.
pub async fn speak(client: &Client, pod: &Pod, word: &str) -> Result<Option<u16>> {
    let condition = json!({"type": CONDITION_PROGRESSING, "status": "True", "reason": word, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let body = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name_any()}, "status": {"conditions": [condition]}});
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let params = PatchParams::apply("truebeat-agent").force();
    refused(api.patch_status(&pod.name_any(), &params, &Patch::Apply(body)).await)
}

/// The status of a refusal; anything else that went wrong is an error of the test.
pub fn refused<T>(answer: kube::Result<T>) -> Result<Option<u16>> {
    match answer {
        Ok(_) => Ok(None),
        Err(kube::Error::Api(status)) => Ok(Some(status.code)),
        Err(error) => Err(error.into()),
    }
}

/// Every token for every pod: two deployments of two replicas in each of two namespaces.
pub async fn ownership(world: &World<'_>) -> Result<()> {
    let mut pods = Vec::new();
    for namespace in ["own-a", "own-b"] {
        world.tenant(namespace)?;
        for name in ["chat", "code"] {
            pods.extend(world.deploy(namespace, name, json!({})).await?);
        }
    }
    let mut tried = 0;
    for owner in &pods {
        let token = identity::token_of(&world.client, owner).await?;
        let client = identity::client(world.cluster.layout(), &token).await?;
        for pod in &pods {
            let answer = speak(&client, pod, "Matrix").await?;
            let own = owner.uid() == pod.uid();
            ensure!(
                answer == if own { None } else { Some(403) },
                "{} for {}: {answer:?}",
                owner.name_any(),
                pod.name_any()
            );
            tried += 1;
        }
    }
    ensure!(tried == 64, "{tried} tried");
    for namespace in ["own-a", "own-b"] {
        world.leave(namespace).await?;
    }
    Ok(())
}

/// Whoever has no name, a name for another place, or the name of somebody who is gone.
pub async fn strangers(world: &World<'_>) -> Result<()> {
    world.tenant("strangers")?;
    let pods = world.deploy("strangers", "chat", json!({})).await?;
    let (pod, other) = (pods.first().context("a pod")?, pods.get(1).context("a second pod")?);
    let account = "chat-truebeat-agent";
    let gone = identity::token_of(&world.client, other).await?;
    replica::bury(&world.client, other).await?;
    let tokens = [
        ("no token", String::new(), &[401, 403][..]),
        ("a forged token", forged(&gone), &[401]),
        (
            "another audience",
            identity::token(&world.client, "strangers", account, Some(pod), Some("vault")).await?,
            &[401],
        ),
        ("a pod that is gone", gone, &[401]),
        ("bound to no pod", identity::token(&world.client, "strangers", account, None, None).await?, &[403]),
        ("another account", identity::token(&world.client, "strangers", "default", None, None).await?, &[403]),
        ("another namespace", identity::token(&world.client, NAMESPACE, "default", None, None).await?, &[403]),
    ];
    for (who, token, wanted) in tokens {
        let client = identity::client(world.cluster.layout(), &token).await?;
        let what = format!("{who} to be refused with one of {wanted:?}");
        until_async(&what, BOUND, || async {
            // the API server forgets a pod's tokens within seconds
            let answer = speak(&client, pod, "Stranger").await?;
            ensure!(answer.is_some_and(|code| wanted.contains(&code)), "{answer:?}");
            Ok(Some(()))
        })
        .await?;
    }
    let now: Value = serde_json::to_value(world.now(pod).await?.context("the pod is gone")?)?;
    ensure!(!now["status"].to_string().contains("Stranger"), "a stranger spoke");
    operators_port(world).await?;
    world.leave("strangers").await
}

/// The token with another signature.
fn forged(token: &str) -> String {
    let (signed, signature) = token.rsplit_once('.').unwrap_or((token, ""));
    format!("{signed}.{}", signature.chars().rev().collect::<String>())
}

/// The operator's port tells and does nothing: three things to read, and no word that is not GET.
async fn operators_port(world: &World<'_>) -> Result<()> {
    let address = world.operator.address;
    for (path, wanted) in
        [("/livez", 200), ("/readyz", 200), ("/metrics", 200), ("/", 404), ("/grants", 404), ("/debug/pprof", 404)]
    {
        let (code, _) = http(address, "GET", path, "").await?;
        ensure!(code == wanted, "GET {path}: {code}");
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            let (code, said) = http(address, method, path, "{\"grant\": \"all\"}").await?;
            ensure!(matches!(code, 404 | 405) && said.is_empty(), "{method} {path}: {code} {said}");
        }
    }
    Ok(())
}
