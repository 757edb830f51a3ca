//! Connections that do not wait for their client for ever: one that takes nothing, or next to nothing, for too long is closed, which cancels
//! the request whose answer it is; and one whose next head does not come.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use role::patience::Patience;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::time::sleep;

/// For a head, from the connection's beginning or from the last answer on. Longer than the 60 s for which a load balancer keeps idle
/// connections: who closes last does not close on a request that is under way.
const HEAD_WAIT_MAX: Duration = Duration::from_secs(75);
/// What the kernel holds of an answer unsent.
const UNSENT_BYTES: u32 = 64 << 10;
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
        // Tokens are small packets; Nagle's algorithm would hold them back.
        drop(socket.set_nodelay(true));
        // what a client takes is seen as it takes it, and not by the megabytes that a kernel takes in its stead
        drop(SockRef::from(&socket).set_tcp_notsent_lowat(UNSENT_BYTES));
        let patient = TokioIo::new(Patient { socket, patience: Patience::of(patience) });
        let connection = open.watch(http.serve_connection(patient, TowerToHyperService::new(router.clone())));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended");
            }
        });
    }
    drop(listener);
    open.shutdown().await;
}

/// A connection that fails where its writes wait for longer than its patience.
pub struct Patient<S> {
    socket: S,
    patience: Patience,
}

impl<S: AsyncWrite + Unpin> Patient<S> {
    fn bounded(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            self.patience.rewarded(*written.as_ref().unwrap_or(&0));
            return Poll::Ready(written);
        }
        ready!(self.patience.poll_spent(cx));
        tracing::info!(patience_ms = self.patience.max().as_millis(), "a client that reads next to nothing is let go");
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.bounded(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.bounded(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, into)
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::net::TcpStream;
    use tokio::sync::oneshot;

    use super::*;
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    const PATIENCE: Duration = Duration::from_secs(30);

    /// Reads `bytes` at a time, so often, and then nothing more.
    async fn reads<S: AsyncRead + Unpin>(mut reader: S, bytes: usize, times: usize) -> S {
        let mut taken = vec![0; bytes];
        for _ in 0..times {
            sleep(PATIENCE * 9 / 10).await;
            reader.read_exact(&mut taken).await.unwrap();
        }
        reader
    }

    /// What earns all of the patience anew.
    const PLENTY: usize = 15_000;

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_let_go_and_a_slow_one_is_not() {
        let (socket, reader) = duplex(PLENTY);
        let mut patient = Patient { socket, patience: Patience::of(PATIENCE) };
        let slow = tokio::spawn(reads(reader, PLENTY, 4));
        patient.write_all(&[7; 5 * PLENTY]).await.expect("it takes enough in time, again and again");
        let _reader = slow.await.unwrap();
        let began = tokio::time::Instant::now();
        let error = patient.write_all(&[7; 9]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= PATIENCE && began.elapsed() < PATIENCE * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_a_trickle_is_let_go_too() {
        let (socket, reader) = duplex(PLENTY);
        let mut patient = Patient { socket, patience: Patience::of(PATIENCE) };
        let trickle = tokio::spawn(reads(reader, 8, usize::MAX));
        let began = tokio::time::Instant::now();
        let error = patient.write_all(&[7; 2 * PLENTY]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= PATIENCE && began.elapsed() < PATIENCE * 2);
        trickle.abort();
    }

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
