//! A command in the container of a pod's agent, by way of the API server, as `kubectl exec` does it: what it says, within a bound and in time.

use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::AttachParams;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::timeout;

use crate::bundle::on_one_line;

const CONTAINER: &str = "agent";
const COMPLAINT_BYTES_MAX: u64 = 4 << 10;

/// What `words` say on standard output: `bytes_max` at most, within `deadline` (a disk may hang, a node be cut off).
///
/// # Errors
/// No right, no such container, a command that fails (in its own words), more than `bytes_max`, nothing in time.
pub async fn output(
    pods: &Api<Pod>,
    pod: &str,
    words: &[&str],
    bytes_max: u64,
    deadline: Duration,
) -> anyhow::Result<Vec<u8>> {
    let said = timeout(deadline, run(pods, pod, words, bytes_max)).await;
    said.with_context(|| format!("the agent of pod {pod} did not answer within {} s", deadline.as_secs()))?
}

async fn run(pods: &Api<Pod>, pod: &str, words: &[&str], bytes_max: u64) -> anyhow::Result<Vec<u8>> {
    let params = AttachParams::default().container(CONTAINER).stdin(false).stdout(true).stderr(true);
    let mut process = pods
        .exec(pod, words.iter().copied(), &params)
        .await
        .with_context(|| format!("could not start a command in pod {pod} (may you get and create pods/exec there?)"))?;
    let (stdout, stderr, status) = (process.stdout(), process.stderr(), process.take_status());
    let (bytes, complaint) = tokio::try_join!(all_of(stdout, bytes_max), head_of(stderr))
        .with_context(|| format!("the answer of the agent of pod {pod} broke off"))?;
    let status = match status {
        Some(status) => status.await,
        None => None,
    };
    let status = status.with_context(|| format!("the connection to pod {pod} broke before the answer was complete"))?;
    if status.status.as_deref() == Some("Success") {
        return Ok(bytes);
    }
    // a pod may say anything, and this goes to a terminal
    let plain = |text: &str| on_one_line(text.trim()).collect::<String>();
    let said = plain(&String::from_utf8_lossy(&complaint));
    let message = plain(&status.message.unwrap_or_default());
    let absent = ["no such file", "not found"].iter().any(|words| message.contains(words));
    if absent && words.first().is_some_and(|program| message.contains(program)) {
        bail!("the agent of pod {pod} is of a version before evidence could be fetched ({message})");
    }
    bail!("the agent of pod {pod} refuses: {}", if said.is_empty() { message } else { said })
}

/// Everything until its end. More than the bound is an error at once: a stream that nobody reads on would hold up the others.
async fn all_of(stream: Option<impl AsyncRead + Unpin>, bytes_max: u64) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(bytes_max + 1).read_to_end(&mut bytes).await?;
    }
    if bytes.len() as u64 > bytes_max {
        return Err(std::io::Error::other(format!("it says more than {bytes_max} bytes")));
    }
    Ok(bytes)
}

/// The beginning of what is said; the rest is read and dropped.
async fn head_of(stream: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    if let Some(mut stream) = stream {
        (&mut stream).take(COMPLAINT_BYTES_MAX).read_to_end(&mut head).await?;
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    }
    Ok(head)
}
