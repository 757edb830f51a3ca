//! Tokens of service accounts, as pods have them, and clients that hold nothing else.

use anyhow::{Context, Result};
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Pod, ServiceAccount};
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use crate::cluster::Layout;

/// A token of `account`, bound to `pod` (as its projected volume would hold) or to nothing, for `audience` or for the API server.
///
/// # Errors
/// In the API server's words.
pub async fn token(
    client: &Client,
    namespace: &str,
    account: &str,
    pod: Option<&Pod>,
    audience: Option<&str>,
) -> Result<String> {
    let bound_object_ref = pod.map(|pod| BoundObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name_any()),
        uid: pod.uid(),
    });
    let audiences = audience.map(|audience| vec![audience.to_owned()]);
    let spec = TokenRequestSpec { audiences, bound_object_ref, expiration_seconds: Some(7200) };
    let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let answer = accounts.create_token_request(account, &PostParams::default(), &request).await;
    let status = answer.with_context(|| format!("a token of {account}"))?.status;
    status.and_then(|status| status.token).context("a token request without a token")
}

/// The token that the agent of `pod` would have.
///
/// # Errors
/// As [`token`].
pub async fn token_of(client: &Client, pod: &Pod) -> Result<String> {
    let account =
        pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()).context("a pod without an account")?;
    token(client, &pod.namespace().unwrap_or_default(), &account, Some(pod), None).await
}

/// Where the API server of every cluster listens, inside its network.
pub const SERVER: &str = "127.0.0.1:6443";

/// A kubeconfig with this token alone.
pub fn kubeconfig(layout: &Layout, token: &str) -> String {
    kubeconfig_of(layout, SERVER, &json!({"token": token}))
}

/// A kubeconfig of this user, by whom the API server is asked at this address.
pub fn kubeconfig_of(layout: &Layout, server: &str, user: &Value) -> String {
    let cluster = json!({"server": format!("https://{server}"), "certificate-authority": layout.text("pki/ca.crt")});
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    })
    .to_string()
}

/// A client with this token alone, whose requests are never repeated.
///
/// # Errors
/// When the kubeconfig is not taken.
pub async fn client(layout: &Layout, token: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::from_yaml(&kubeconfig(layout, token))?;
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}
