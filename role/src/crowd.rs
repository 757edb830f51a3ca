//! Serves HTTP to a bounded crowd: a head that does not come in time ends its connection, and where there is no room the one that has been
//! idle for longest makes some. Whoever holds a thousand idle sockets must not make probes fail, nor take the descriptors that other work needs.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;

/// For a head, from the connection's beginning or from the last answer on. A kubelet sends it at once; whoever keeps a connection for longer
/// finds it closed and opens another.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(10);
/// A kubelet, a scraper and some people are a handful.
const CONNECTIONS_MAX: usize = 128;
/// What is buffered for one of them.
const BUFFER_BYTES: usize = 64 << 10;
/// After a connection that could not be taken.
const PAUSE: Duration = Duration::from_millis(20);

/// Serves for ever.
pub async fn serve(listener: TcpListener, router: Router) {
    let mut crowd = Crowd::default();
    let mut told = false;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                told = false;
                crowd.make_room();
                crowd.take(stream, router.clone());
                // who came with a request is heard before the next one is let in
                tokio::task::yield_now().await;
            }
            Err(error) => {
                // Out of descriptors, most likely: one of ours is as good as any.
                if !std::mem::replace(&mut told, true) {
                    tracing::warn!(%error, "this program's HTTP does not accept a connection");
                }
                crowd.send_away();
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// One connection.
#[derive(Debug)]
struct Guest {
    task: AbortHandle,
    /// Requests that are being answered.
    asks: Arc<AtomicU32>,
}

/// All of them, in the order in which they came.
#[derive(Debug, Default)]
struct Crowd(VecDeque<Guest>);

impl Crowd {
    fn take(&mut self, stream: TcpStream, router: Router) {
        let asks = Arc::new(AtomicU32::new(0));
        let task = tokio::spawn(serve_one(stream, router, Arc::clone(&asks))).abort_handle();
        self.0.push_back(Guest { task, asks });
    }

    fn make_room(&mut self) {
        self.0.retain(|guest| !guest.task.is_finished());
        while self.0.len() >= CONNECTIONS_MAX {
            self.send_away();
        }
    }

    /// The oldest of those that ask for nothing; where all do (a drain is waited for), the oldest: a probe is over in a moment.
    fn send_away(&mut self) {
        let idle = self.0.iter().position(|guest| guest.asks.load(Ordering::Acquire) == 0).unwrap_or(0);
        if let Some(guest) = self.0.remove(idle) {
            guest.task.abort();
        }
    }
}

async fn serve_one(stream: TcpStream, router: Router, asks: Arc<AtomicU32>) {
    let _ = stream.set_nodelay(true);
    let routes = TowerToHyperService::new(router);
    let service = service_fn(|request| {
        let answer = routes.call(request);
        let asks = Arc::clone(&asks);
        async move {
            asks.fetch_add(1, Ordering::AcqRel);
            let answer = answer.await;
            asks.fetch_sub(1, Ordering::AcqRel);
            answer
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_WAIT_MAX)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a connection to this program's HTTP ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const SOON: Duration = Duration::from_secs(30);

    async fn served() -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let slow = get(std::future::pending::<&'static str>);
        let router = Router::new().route("/livez", get(|| async { "ok" })).route("/slow", slow);
        tokio::spawn(serve(listener, router));
        address
    }

    async fn asked(address: std::net::SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        stream
    }

    /// What comes of it, to its end or the first 15 bytes.
    async fn heard(stream: &mut TcpStream) -> String {
        let mut answer = [0; 15];
        let n = tokio::time::timeout(SOON, stream.read(&mut answer)).await.expect("neither answer nor end");
        String::from_utf8_lossy(&answer[..n.unwrap_or(0)]).into_owned()
    }

    #[tokio::test]
    async fn a_crowd_of_idle_connections_makes_room_for_a_probe_and_spares_who_waits_for_an_answer() {
        let address = served().await;
        let mut drains = asked(address, "/slow").await;
        let mut idle = Vec::new();
        for _ in 0..3 * CONNECTIONS_MAX {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        assert_eq!(heard(&mut asked(address, "/livez").await).await, "HTTP/1.1 200 OK");
        assert_eq!(heard(&mut idle[0]).await, "", "the first of them made room");
        let kept = tokio::time::timeout(Duration::from_millis(200), drains.read_u8()).await;
        assert!(kept.is_err(), "an answer that is waited for: {kept:?}");
    }

    #[tokio::test]
    async fn where_everybody_waits_for_an_answer_a_probe_has_one_all_the_same() {
        let address = served().await;
        let mut waiting = Vec::new();
        for _ in 0..2 * CONNECTIONS_MAX {
            waiting.push(asked(address, "/slow").await);
        }
        assert_eq!(heard(&mut asked(address, "/livez").await).await, "HTTP/1.1 200 OK");
    }

    #[tokio::test]
    async fn a_head_that_does_not_come_ends_its_connection() {
        let address = served().await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        let mut half = TcpStream::connect(address).await.unwrap();
        half.write_all(b"GET /livez HTTP/1.1\r\n").await.unwrap();
        let mut kept = asked(address, "/livez").await;
        assert_eq!(heard(&mut kept).await, "HTTP/1.1 200 OK");
        // nobody has anything to do: the clock runs to the next deadline
        tokio::time::pause();
        let began = tokio::time::Instant::now();
        for stream in [&mut idle, &mut half, &mut kept] {
            let mut rest = Vec::new();
            let end = tokio::time::timeout(HEAD_WAIT_MAX * 3, stream.read_to_end(&mut rest)).await;
            assert!(end.is_ok(), "it is held open");
        }
        assert!(began.elapsed() < HEAD_WAIT_MAX * 3);
    }
}
