//! A small HTTP client for the commands that talk to an agent or an engine on this machine. Every call has a deadline.

use std::io::ErrorKind;
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

/// The URL of an agent that is named `host:port`, or as a URL.
pub fn base_of(agent: &str) -> String {
    format!("http://{}", agent.trim_start_matches("http://").trim_end_matches('/'))
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

fn nobody_there(error: anyhow::Error, base: &str) -> anyhow::Error {
    let refused = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    };
    if error.chain().any(refused) {
        return error.context(format!(
            "no agent listens at {base}: does `truebeat run` run? its --agent-listen is what --agent wants"
        ));
    }
    error
}

/// What an agent answers at this path: a verdict or its incidents. Whoever else answers JSON there (a gate, an engine) is named as no agent.
///
/// # Errors
/// As [`get_json`], and where it is no agent.
pub async fn of_agent(
    client: &HttpClient,
    base: &str,
    path: &str,
    deadline: Duration,
) -> anyhow::Result<serde_json::Value> {
    let url = format!("{base}/{path}");
    let (status, value) = get_json(client, &url, deadline).await.map_err(|error| nobody_there(error, base))?;
    let fits = if path == "verdict" { value["verdict"].is_string() } else { value.is_array() };
    anyhow::ensure!(
        status == 200 && fits,
        "{base} is no agent: {url} answered with status {status}; an agent's own port is 9400, or what --agent-listen says"
    );
    Ok(value)
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// Somebody who answers everything so.
    async fn somebody(status: &'static str, body: &'static str) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 4096]).await;
                let answer =
                    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        base
    }

    #[tokio::test]
    async fn an_engine_or_a_gate_is_taken_for_no_agent() {
        let ask = async |base: String, path| of_agent(&client(), &base, path, Duration::from_secs(30)).await;
        let engine = somebody("404 Not Found", r#"{"detail":"Not Found"}"#).await;
        for path in ["verdict", "incidents"] {
            let error = ask(engine.clone(), path).await.unwrap_err().to_string();
            assert!(error.contains("is no agent") && error.contains("404"), "{error}");
        }
        let other = somebody("200 OK", "{}").await;
        assert!(ask(other.clone(), "verdict").await.is_err() && ask(other, "incidents").await.is_err());
        assert!(ask(somebody("200 OK", r#"{"verdict":"Idle"}"#).await, "verdict").await.is_ok());
        assert!(ask(somebody("200 OK", "[]").await, "incidents").await.is_ok());
    }
}
