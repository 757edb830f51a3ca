//! A request that cannot hang and cannot be flooded: one connection, one deadline over everything, a cap on the body, no redirects.
//!
//! The engine on the other side may be frozen, hostile or mad (I4). May open TCP connections to the given address; nothing else.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

/// Marks what the agent asks for itself, by a word that the gate told it: a client cannot know that.
pub const OWN_HEADER: &str = "x-truebeat-own";

/// What to ask for and how much to bear.
#[derive(Debug, Clone)]
pub struct Get {
    pub uri: Uri,
    pub accept: &'static str,
    /// From the first packet to the last byte.
    pub deadline: Duration,
    /// A longer body is an error.
    pub body_bytes_max: usize,
}

/// A status and, if asked for, a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum GetError {
    #[error("{uri} has no host to connect to; an engine URL looks like http://127.0.0.1:8000")]
    NoHost { uri: Uri },
    #[error("{authority} refused the connection")]
    Refused { authority: String },
    #[error("could not connect to {authority}")]
    Connect { authority: String, source: std::io::Error },
    #[error("{uri}: the exchange broke off")]
    Exchange { uri: Uri, source: hyper::Error },
    #[error("{uri}: no request can be made of it")]
    Request { uri: Uri, source: http::Error },
    #[error("{uri} did not answer in full within {deadline_ms} ms")]
    Deadline { uri: Uri, deadline_ms: u128 },
    #[error("{uri} sent more than {bytes_max} bytes")]
    TooLarge { uri: Uri, bytes_max: usize },
}

impl Get {
    /// Status and whole body.
    pub async fn fetch(&self) -> Result<Answer, GetError> {
        self.within_deadline(async {
            let (response, _connection) = self.send(None).await?;
            self.answer(response).await
        })
        .await
    }

    /// Status and whole body of a POST of `json`, marked as the agent's own by the gate's word.
    pub async fn post(&self, json: &serde_json::Value, own: &str) -> Result<Answer, GetError> {
        self.within_deadline(async {
            let (response, _connection) = self.send(Some((json.to_string().into(), own))).await?;
            self.answer(response).await
        })
        .await
    }

    async fn answer(&self, response: http::Response<Incoming>) -> Result<Answer, GetError> {
        let status = response.status();
        let body = self.collect(response.into_body()).await?;
        Ok(Answer { status, body })
    }

    /// The status alone: the head has come, the body is left unread.
    pub async fn status(&self) -> Result<StatusCode, GetError> {
        self.within_deadline(async {
            let (response, _connection) = self.send(None).await?;
            Ok(response.status())
        })
        .await
    }

    async fn within_deadline<T>(&self, work: impl Future<Output = Result<T, GetError>>) -> Result<T, GetError> {
        tokio::time::timeout(self.deadline, work).await.unwrap_or_else(|_| {
            Err(GetError::Deadline { uri: self.uri.clone(), deadline_ms: self.deadline.as_millis() })
        })
    }

    /// Sends the request, a POST where there is a JSON body; the connection lives as long as the returned handle.
    async fn send(
        &self,
        json: Option<(Bytes, &str)>,
    ) -> Result<(http::Response<Incoming>, AbortOnDropHandle<()>), GetError> {
        let exchange = |source| GetError::Exchange { uri: self.uri.clone(), source };
        let stream = self.connect().await?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(exchange)?;
        let driver = AbortOnDropHandle::new(tokio::spawn(async move {
            // its error reaches us through the response
            let _ = connection.await;
        }));
        let authority = self.uri.authority().map_or("", |authority| authority.as_str());
        let path = self.uri.path_and_query().map_or("/", |path| path.as_str());
        let request = match json {
            Some((_, own)) => {
                Request::post(path).header(header::CONTENT_TYPE, "application/json").header(OWN_HEADER, own)
            }
            None => Request::get(path),
        };
        let request = request
            .header(header::HOST, authority)
            .header(header::ACCEPT, self.accept)
            .header(header::CONNECTION, "close")
            .header(header::USER_AGENT, "truebeat-agent")
            .body(Full::new(json.map(|(body, _)| body).unwrap_or_default()))
            .map_err(|source| GetError::Request { uri: self.uri.clone(), source })?;
        let response = sender.send_request(request).await.map_err(exchange)?;
        Ok((response, driver))
    }

    async fn connect(&self) -> Result<TcpStream, GetError> {
        let Some(host) = self.uri.host() else { return Err(GetError::NoHost { uri: self.uri.clone() }) };
        let port = self.uri.port_u16().unwrap_or(80);
        let host = host.trim_matches(['[', ']']);
        let authority = format!("{host}:{port}");
        TcpStream::connect((host, port)).await.map_err(|source| match source.kind() {
            std::io::ErrorKind::ConnectionRefused => GetError::Refused { authority },
            _ => GetError::Connect { authority, source },
        })
    }

    async fn collect(&self, mut body: Incoming) -> Result<Bytes, GetError> {
        // All of it at once: a buffer that doubles holds what it has twice, and memory that is not written to costs nothing.
        let told = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
        let mut collected = BytesMut::with_capacity(told.unwrap_or(self.body_bytes_max).min(self.body_bytes_max));
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|source| GetError::Exchange { uri: self.uri.clone(), source })?;
            let Some(data) = frame.data_ref() else { continue };
            if collected.len() + data.len() > self.body_bytes_max {
                return Err(GetError::TooLarge { uri: self.uri.clone(), bytes_max: self.body_bytes_max });
            }
            collected.extend_from_slice(data);
        }
        Ok(collected.freeze())
    }
}

/// `base` with another path; `base`'s own path stays in front of it (an engine behind a prefix).
pub fn with_path(base: &Uri, path: &str) -> Uri {
    let prefix = base.path().trim_end_matches('/');
    let mut parts = base.clone().into_parts();
    parts.path_and_query = format!("{prefix}{path}").parse().ok();
    parts.scheme.get_or_insert(http::uri::Scheme::HTTP);
    Uri::from_parts(parts).unwrap_or_else(|_| base.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_put_behind_the_engines_own() {
        let at = |base: &str| with_path(&base.parse().unwrap(), "/metrics").to_string();
        assert_eq!(at("http://127.0.0.1:8000"), "http://127.0.0.1:8000/metrics");
        assert_eq!(at("http://127.0.0.1:8000/"), "http://127.0.0.1:8000/metrics");
        assert_eq!(at("http://127.0.0.1:8000/v2/"), "http://127.0.0.1:8000/v2/metrics");
        assert_eq!(at("127.0.0.1:8000"), "http://127.0.0.1:8000/metrics");
    }
}
