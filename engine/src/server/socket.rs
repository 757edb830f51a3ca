//! Connections that do not wait for their client for ever: one that takes nothing, or next to nothing, for too long is closed, which cancels
//! the request whose answer it is; and one whose next head does not come.

use std::error::Error;
use std::io;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use role::wire::{Wire, prepare};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// For a head, from the connection's beginning or from the last answer on. Longer than the 60 s for which a load balancer keeps idle
/// connections: who closes last does not close on a request that is under way.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(75);
/// After a connection that could not be taken: out of descriptors, most likely.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Serves connections whose readers have `patience`, until `close`; then what is under way is finished, and idle connections end.
pub async fn serve(listener: TcpListener, router: Router, patience: Duration, close: impl Future<Output = ()>) {
    if let Err(error) = role::take_all_descriptors() {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WAIT_MAX);
    let (open, mut close) = (GracefulShutdown::new(), pin!(close));
    loop {
        let accepted = tokio::select! {
            biased;
            () = &mut close => break,
            accepted = listener.accept() => accepted,
        };
        let socket = match accepted {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "a connection was not accepted");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        prepare(&socket);
        let patient = TokioIo::new(Wire::of(socket, patience));
        let connection = open.watch(http.serve_connection(patient, TowerToHyperService::new(router.clone())));
        tokio::spawn(async move {
            match connection.await {
                Err(error) if is_timed_out(&error) => {
                    tracing::info!(patience_ms = patience.as_millis(), "a client that reads next to nothing is let go");
                }
                Err(error) => tracing::debug!(%error, "a connection ended"),
                Ok(()) => (),
            }
        });
    }
    drop(listener);
    open.shutdown().await;
}

/// Has its client taken nothing for too long?
fn is_timed_out(error: &hyper::Error) -> bool {
    let io = error.source().and_then(|source| source.downcast_ref::<io::Error>());
    io.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_head_that_does_not_come_ends_its_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (close, closing) = oneshot::channel::<()>();
        // as it is for nearly everybody: lower than it may be
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, hard - 1, hard).unwrap();
        let router = Router::new().route("/", get(|| async { "ok" }));
        let server = tokio::spawn(serve(listener, router, PATIENCE, async { drop(closing.await) }));
        let mut streams = Vec::new();
        for head in ["", "GET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\nhost: x\r\n\r\n"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(head.as_bytes()).await.unwrap();
            streams.push(stream);
        }
        let mut answer = [0; 15];
        streams[2].read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200 OK");
        assert_eq!(
            getrlimit(Resource::RLIMIT_NOFILE).unwrap(),
            (hard, hard),
            "it may have as many connections as its owner lets it"
        );
        // nobody has anything to do: the clock runs to the next deadline
        tokio::time::pause();
        let began = tokio::time::Instant::now();
        for stream in &mut streams {
            let end = tokio::time::timeout(HEAD_WAIT_MAX * 3, stream.read_to_end(&mut Vec::new())).await;
            assert!(end.is_ok(), "it is held open");
        }
        assert!(began.elapsed() < HEAD_WAIT_MAX * 3);
        drop(close);
        server.await.unwrap();
    }
}
