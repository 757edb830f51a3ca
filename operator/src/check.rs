//! `operator check`: does an operator answer, and is it in step with the API server? What `helm test` runs, and an on-call too.
//! One HTTP/1.1 request over a plain socket: it needs no rights and no client.

use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout_at};

/// The answer of `/readyz` is a line or two.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;
const PAUSE: Duration = Duration::from_millis(500);

/// Why the operator does not pass.
#[derive(Debug, Error)]
pub enum CheckError {
    #[error("ask {address}: {source}; is the operator's Service right, and may this pod reach it?")]
    Ask { address: String, source: std::io::Error },
    #[error("ask {address}: no whole answer before the deadline")]
    Deadline { address: String },
    #[error("{address} does not speak HTTP: {answer:?}")]
    Answer { address: String, answer: String },
    #[error("the operator at {address} is not ready: {body}")]
    NotReady { address: String, body: String },
}

/// Asks `/readyz` of `address` (`host:port`) until it is 200; gives the last failure after `patience`.
///
/// # Errors
/// See [`CheckError`].
pub async fn check(address: &str, patience: Duration) -> Result<(), CheckError> {
    let deadline = Instant::now() + patience;
    loop {
        let answer = timeout_at(deadline, ask(address)).await;
        let failure = match answer {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(failure)) => failure,
            Err(_) => return Err(CheckError::Deadline { address: address.to_owned() }),
        };
        if Instant::now() + PAUSE >= deadline {
            return Err(failure);
        }
        sleep(PAUSE).await;
    }
}

async fn ask(address: &str) -> Result<(), CheckError> {
    let failed = |source| CheckError::Ask { address: address.to_owned(), source };
    let mut socket = TcpStream::connect(address).await.map_err(failed)?;
    let request = format!("GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    socket.write_all(request.as_bytes()).await.map_err(failed)?;
    let mut answer = Vec::new();
    socket.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).await.map_err(failed)?;
    judge(address, &String::from_utf8_lossy(&answer))
}

fn judge(address: &str, answer: &str) -> Result<(), CheckError> {
    let address = address.to_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((answer, ""));
    match head.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)) {
        Some("200") => Ok(()),
        Some(_) => Err(CheckError::NotReady { address, body: body.trim().to_owned() }),
        None => Err(CheckError::Answer { address, answer: answer.chars().take(80).collect() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_200_passes_and_the_reason_is_told() {
        assert!(judge("a:1", "HTTP/1.1 200 OK\r\n\r\nok").is_ok());
        let failure =
            judge("a:1", "HTTP/1.1 503 Service Unavailable\r\nX: y\r\n\r\nwatch Pod is behind\n").unwrap_err();
        assert_eq!(failure.to_string(), "the operator at a:1 is not ready: watch Pod is behind");
        assert!(matches!(judge("a:1", "SSH-2.0"), Err(CheckError::Answer { .. })));
    }

    #[tokio::test]
    async fn a_port_that_takes_and_never_answers_is_a_deadline() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let failure = check(&address, Duration::from_millis(300)).await.unwrap_err();
        assert!(matches!(failure, CheckError::Deadline { .. }), "{failure}");
    }

    /// In a cluster of IPv6 the kubelet tells a Service's address without brackets, and `helm test` puts the port behind it.
    #[tokio::test]
    async fn an_address_of_ipv6_needs_no_brackets() {
        let Ok(listener) = tokio::net::TcpListener::bind("[::1]:0").await else {
            return crate::not_run::not_run("there is no IPv6 here");
        };
        let address = format!("::1:{}", listener.local_addr().unwrap().port());
        let answers = tokio::spawn(async move {
            let (mut peer, _) = listener.accept().await.unwrap();
            let mut request = [0; 512];
            assert!(peer.read(&mut request).await.unwrap() > 0);
            peer.write_all(b"HTTP/1.1 200 OK\r\n\r\nok").await.unwrap();
        });
        check(&address, Duration::from_secs(30)).await.unwrap();
        answers.await.unwrap();
    }

    #[tokio::test]
    async fn an_operator_that_comes_late_passes() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        drop(socket); // refused at first
        let late = tokio::spawn(async move {
            sleep(Duration::from_millis(200)).await;
            let listener = tokio::net::TcpListener::bind(address).await.unwrap();
            let (mut peer, _) = listener.accept().await.unwrap();
            let mut request = [0; 512]; // a peer that leaves bytes unread resets the connection
            assert!(peer.read(&mut request).await.unwrap() > 0);
            peer.write_all(b"HTTP/1.1 200 OK\r\n\r\nok").await.unwrap();
        });
        check(&address.to_string(), Duration::from_secs(30)).await.unwrap();
        late.await.unwrap();
    }
}
