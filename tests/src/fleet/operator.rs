//! The real operator as a process of the cluster's network, with the token of its ServiceAccount and nothing else: its rights are those
//! that the manifests give.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::identity;
use crate::cluster::{Cluster, Identity};
use crate::wait::until_async;

/// Where it lives, and its account.
pub const NAMESPACE: &str = "truebeat-system";
pub const ACCOUNT: &str = "truebeat-operator";
/// Its name in RBAC and in the audit log.
pub const USER: &str = "system:serviceaccount:truebeat-system:truebeat-operator";
const BOUND: Duration = Duration::from_secs(120);

/// How to start one.
#[derive(Debug, Clone)]
pub struct Candidate<'a> {
    pub binary: &'a Path,
    /// Its name in the election, and of its log.
    pub name: &'a str,
    /// Of loopback, for its HTTP.
    pub port: u16,
    /// Namespace and name of the ServiceAccount whose token it gets.
    pub account: (&'a str, &'a str),
    /// Further arguments.
    pub args: &'a [&'a str],
}

impl Candidate<'_> {
    /// Starts it as the first process of a PID namespace, as in a container: so it may take its own lease back after a crash.
    ///
    /// # Errors
    /// When there is no token for it, or it cannot be started.
    pub async fn start(&self, cluster: &Cluster, client: &Client) -> Result<Operator> {
        self.start_as(cluster, client, None).await
    }

    /// The same for one that reaches the API server at `server`, which is somebody in between.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_through(&self, cluster: &Cluster, client: &Client, server: SocketAddr) -> Result<Operator> {
        self.start_by(cluster, client, None, &server.to_string()).await
    }

    /// The same with a token that is bound to `pod`, as in a pod; it is read from [`Self::token_file`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_as(&self, cluster: &Cluster, client: &Client, pod: Option<&Pod>) -> Result<Operator> {
        self.start_by(cluster, client, pod, identity::SERVER).await
    }

    async fn start_by(&self, cluster: &Cluster, client: &Client, pod: Option<&Pod>, server: &str) -> Result<Operator> {
        let Candidate { name, .. } = *self;
        let token = identity::token(client, self.account.0, self.account.1, pod, None).await?;
        let (file, kubeconfig) = (self.token_file(cluster), cluster.layout().path(&format!("{name}.kubeconfig")));
        let text = identity::kubeconfig_of(cluster.layout(), server, &json!({"tokenFile": file.display().to_string()}));
        for (path, text) in [(&file, token), (&kubeconfig, text)] {
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        let environment = format!("KUBECONFIG={}", kubeconfig.display());
        let (binary, listen, uid) = (self.binary.display().to_string(), address.to_string(), format!("uid-of-{name}"));
        let container = ["unshare", "--pid", "--fork", "--kill-child", "env", &environment];
        let own = [&binary, "operator", "--listen", &listen, "--identity", name, "--pod-uid", &uid];
        let argv = container.iter().chain(&own).chain(self.args).map(|word| (*word).to_owned()).collect();
        let shell = cluster.spawn(name, argv)?;
        let process = until_async("the operator's process", BOUND, || async { Ok(child_of(shell)) }).await?;
        Ok(Operator { process, address })
    }

    /// Where it reads its token, and reads it anew.
    pub fn token_file(&self, cluster: &Cluster) -> PathBuf {
        cluster.layout().path(&format!("{}.token", self.name))
    }
}

/// A running one; it ends with the cluster, or when its process is signalled.
#[derive(Debug)]
pub struct Operator {
    /// The operator itself, to be signalled and measured.
    pub process: Identity,
    /// Where it serves /readyz and /metrics.
    pub address: SocketAddr,
}

impl Operator {
    /// Waits until it is in step with the API server.
    ///
    /// # Errors
    /// When that does not come in time, with what it says.
    pub async fn ready(&self) -> Result<()> {
        until_async("the operator's /readyz", BOUND, || async {
            let (code, body) = http(self.address, "GET", "/readyz", "").await?;
            anyhow::ensure!(code == 200, "{body}");
            Ok(Some(()))
        })
        .await
    }

    /// A counter or gauge of its /metrics, all label sets that contain `labels` added up.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn metric(&self, name: &str, labels: &str) -> Result<f64> {
        let (_, text) = http(self.address, "GET", "/metrics", "").await?;
        let line = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            let (metric, of) = series.split_once('{').unwrap_or((series, ""));
            (metric == name && of.contains(labels)).then(|| value.parse::<f64>().ok()).flatten()
        };
        Ok(text.lines().filter_map(line).sum())
    }
}

/// `unshare` itself stays outside the namespace; its one child is the operator.
fn child_of(shell: Identity) -> Option<Identity> {
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", shell.pid)).ok()?;
    Identity::of(children.split_whitespace().next()?.parse().ok()?)
}

/// One request, one answer: status and body.
///
/// # Errors
/// When there is no connection, or no HTTP in the answer.
pub async fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("connect to {address}"))?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no HTTP status")?;
    Ok((code, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned())))
}
