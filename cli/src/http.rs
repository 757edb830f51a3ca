//! A small HTTP client for the commands that talk to an agent or an engine on this machine. Every call has a deadline.

use std::time::Duration;

use anyhow::{Context, anyhow};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// A pooled client; cheap to clone.
pub type HttpClient = Client<HttpConnector, Full<Bytes>>;

/// Makes a client that does not wait for a connection longer than two seconds.
pub fn client() -> HttpClient {
    let mut connector = HttpConnector::new();
    connector.set_connect_timeout(Some(Duration::from_secs(2)));
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).build(connector)
}

/// GET: status and body, within `deadline`.
///
/// # Errors
/// When nothing whole came back in time; the error names the URL.
pub async fn get(client: &HttpClient, url: &str, deadline: Duration) -> anyhow::Result<(u16, Bytes)> {
    let request = http::Request::get(url).body(Full::default()).with_context(|| format!("{url} is not a URL"))?;
    exchange(client, request, url, deadline).await
}

/// POST of a JSON document: status and body, within `deadline`.
///
/// # Errors
/// As [`get`].
pub async fn post_json(
    client: &HttpClient,
    url: &str,
    body: &serde_json::Value,
    deadline: Duration,
) -> anyhow::Result<(u16, Bytes)> {
    let request = http::Request::post(url)
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .with_context(|| format!("{url} is not a URL"))?;
    exchange(client, request, url, deadline).await
}

async fn exchange(
    client: &HttpClient,
    request: http::Request<Full<Bytes>>,
    url: &str,
    deadline: Duration,
) -> anyhow::Result<(u16, Bytes)> {
    let call = async {
        let response = client.request(request).await?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await?.to_bytes();
        anyhow::Ok((status, body))
    };
    tokio::time::timeout(deadline, call)
        .await
        .map_err(|_| anyhow!("no answer from {url} within {deadline:?}"))?
        .with_context(|| format!("no whole answer from {url}"))
}

/// GET of a JSON document, whatever its status.
///
/// # Errors
/// As [`get`], and when the body is no JSON.
pub async fn get_json(client: &HttpClient, url: &str, deadline: Duration) -> anyhow::Result<(u16, serde_json::Value)> {
    let (status, body) = get(client, url, deadline).await?;
    let value =
        serde_json::from_slice(&body).with_context(|| format!("{url} did not answer JSON (status {status})"))?;
    Ok((status, value))
}
