//! A client's connection. One that does not take what is written to it is given up, however long its answer would still be: it holds a descriptor,
//! and the memory of what it does not take.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::patience::Patience;

/// What the kernel holds of answers unsent.
const UNSENT_BYTES: u32 = 64 << 10;

/// A client that says nothing for so long is asked whether it is there, so often and at such intervals: one whose machine or network is gone
/// would otherwise hold its connection, and what it waits for, until something is written to it.
const ASKED_AFTER: Duration = Duration::from_secs(15);
const ASKED_EVERY: Duration = Duration::from_secs(5);
const ASKED_TIMES: u32 = 3;

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

/// An accepted connection is made one on which an answer is seen to be taken as its client takes it, token by token.
pub fn prepare(stream: &TcpStream) {
    // tokens are small packets, which Nagle's algorithm would hold back
    let _ = stream.set_nodelay(true);
    // a kernel takes megabytes in its client's stead
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT_BYTES);
    let asked = TcpKeepalive::new().with_time(ASKED_AFTER).with_interval(ASKED_EVERY).with_retries(ASKED_TIMES);
    let _ = SockRef::from(stream).set_tcp_keepalive(&asked);
}

impl<S> Wire<S> {
    /// A connection whose client may take nothing for so long.
    pub fn of(stream: S, takes_nothing_max: Duration) -> Self {
        Self { stream, patience: Patience::of(takes_nothing_max), sent: Sent::default() }
    }

    /// The connection itself, when nothing more is to be written.
    pub fn into_stream(self) -> S {
        self.stream
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::sleep;

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

    #[tokio::test]
    async fn a_client_that_says_nothing_is_asked_whether_it_is_there() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (_client, (stream, _)) = (client.unwrap(), accepted.unwrap());
        prepare(&stream);
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        let every = (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap());
        assert_eq!((every, socket.tcp_keepalive_retries().unwrap()), ((ASKED_AFTER, ASKED_EVERY), ASKED_TIMES));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_let_go_and_a_slow_one_is_not() {
        let (socket, reader) = duplex(PLENTY);
        let mut wire = Wire::of(socket, PATIENCE);
        let sent = wire.sent();
        let slow = tokio::spawn(reads(reader, PLENTY, 4));
        wire.write_all(&[7; 5 * PLENTY]).await.expect("it takes enough in time, again and again");
        let _reader = slow.await.unwrap();
        assert_eq!(sent.bytes(), 5 * PLENTY as u64);
        let began = tokio::time::Instant::now();
        let error = wire.write_all(&[7; 9]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() >= PATIENCE && began.elapsed() < PATIENCE * 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_a_trickle_is_let_go_too() {
        let (socket, reader) = duplex(PLENTY);
        let mut wire = Wire::of(socket, PATIENCE);
        let trickle = tokio::spawn(reads(reader, 8, usize::MAX));
        let began = tokio::time::Instant::now();
        let error = wire.write_all(&[7; 2 * PLENTY]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(began.elapsed() >= PATIENCE && began.elapsed() < PATIENCE * 2);
        trickle.abort();
    }
}
