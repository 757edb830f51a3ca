//! How the operator comes to a client: whom it believes to be the API server, and who it says it is. Both are read anew while it runs, for both are
//! rotated (A20): tokens and authorities once a minute, by kube. A connection that stands is not cut for it.

use std::{path::PathBuf, time::Duration};

use kube::{Client, config::Kubeconfig};
use thiserror::Error;

/// A client from the pod's service account or the kubeconfig, with kube's own retries off and its TLS on ring.
pub async fn connect() -> Result<Client, ConnectError> {
    let config = kube::Config::infer().await.map_err(|e| ConnectError::Config(Box::new(e)))?;
    client_of(config, Kubeconfig::read().ok().as_ref())
}

/// A client by this configuration, and by the kubeconfig that it may have come from.
///
/// # Errors
/// When no TLS can be made of it.
pub fn client_of(mut config: kube::Config, from: Option<&Kubeconfig>) -> Result<Client, ConnectError> {
    // kube reads a service account's authorities once a minute, and those of a kubeconfig once: they are rotated as well (A20)
    config.root_cert_file = config.root_cert_file.or_else(|| from.and_then(authority_file));
    config.default_retry = false;
    config.connect_timeout = Some(Duration::from_secs(4));
    config.write_timeout = Some(Duration::from_secs(10));
    // No read_timeout: it would cut watches; plain requests have the deadlines above, watches an idle limit of their own.
    Client::try_from(config).map_err(|e| ConnectError::Client(Box::new(e)))
}

/// The file of the authorities that the current cluster of a kubeconfig names, if it has them in a file of their own.
fn authority_file(kubeconfig: &Kubeconfig) -> Option<PathBuf> {
    let named = |name: &String| kubeconfig.contexts.iter().find(|context| context.name == *name);
    let context = kubeconfig.current_context.as_ref().and_then(named)?.context.as_ref()?;
    let cluster = kubeconfig.clusters.iter().find(|cluster| cluster.name == context.cluster)?.cluster.as_ref()?;
    let inline = cluster.certificate_authority_data.is_some();
    cluster.certificate_authority.as_ref().filter(|_| !inline).map(PathBuf::from)
}

/// The operator cannot reach any API server.
#[derive(Debug, Error)]
pub enum ConnectError {
    #[error("find the API server (KUBECONFIG, ~/.kube/config or a pod's service account): {0}")]
    Config(Box<kube::config::InferConfigError>),
    #[error("build the API client: {0}")]
    Client(Box<kube::Error>),
}
