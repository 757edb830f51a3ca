//! A client's connection. One that does not take what is written to it is given up, however long its answer would still be: it holds a descriptor,
//! and the memory of what it does not take.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use role::patience::Patience;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// For a client that takes nothing: what Envoy gives a stream in which nothing moves. Its request is long done in the engine.
pub const TAKES_NOTHING_MAX: Duration = Duration::from_secs(300);

/// The connection.
#[derive(Debug)]
pub struct Wire<S = TcpStream> {
    stream: S,
    patience: Patience,
    sent: Sent,
}

/// How many bytes of answers its client's connection has taken.
#[derive(Debug, Clone, Default)]
pub struct Sent(Arc<AtomicU64>);

impl Sent {
    /// So many until now.
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl<S> Wire<S> {
    /// Of an accepted connection.
    pub fn of(stream: S) -> Self {
        Self { stream, patience: Patience::of(TAKES_NOTHING_MAX), sent: Sent::default() }
    }

    /// To look at while it is written to.
    pub fn sent(&self) -> Sent {
        self.sent.clone()
    }

    fn timed(&mut self, written: Poll<io::Result<usize>>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Pending => {
                let spent = self.patience.poll_spent(cx);
                return spent.map(|()| {
                    Err(io::Error::new(ErrorKind::TimedOut, "the client takes next to nothing of its answer"))
                });
            }
            Poll::Ready(Ok(bytes)) => {
                self.patience.rewarded(*bytes);
                self.sent.0.fetch_add(*bytes as u64, Ordering::Relaxed);
            }
            Poll::Ready(Err(_)) => {}
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Wire<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Wire<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.timed(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.timed(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::{Instant, sleep, timeout};

    #[tokio::test(start_paused = true)]
    async fn who_takes_nothing_is_given_up_and_who_takes_slowly_is_not() {
        let (gate, mut client) = tokio::io::duplex(1_000);
        let mut wire = Wire::of(gate);
        let sent = wire.sent();
        let writing = tokio::spawn(async move { wire.write_all(&[7; 1_000_000]).await });
        let mut taken = vec![0; 500_000];
        for part in taken.chunks_mut(50_000) {
            sleep(TAKES_NOTHING_MAX.mul_f64(0.3)).await;
            client.read_exact(part).await.unwrap();
        }
        assert!(!writing.is_finished() && sent.bytes() >= 500_000, "{}", sent.bytes());
        let began = Instant::now();
        let end = timeout(10 * TAKES_NOTHING_MAX, writing).await.expect("never given up").unwrap().unwrap_err();
        assert_eq!((end.kind(), began.elapsed() >= TAKES_NOTHING_MAX.mul_f64(0.9)), (ErrorKind::TimedOut, true));
    }
}
