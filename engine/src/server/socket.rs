//! Connections that do not wait for their reader for ever: one that takes nothing for too long is closed, which cancels the request whose
//! answer it is.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Sleep, sleep};

/// Listens for connections whose readers have so much time.
pub struct PatientListener {
    pub inner: TcpListener,
    pub patience: Duration,
}

impl Listener for PatientListener {
    type Io = Patient<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (socket, addr) = Listener::accept(&mut self.inner).await;
        // Tokens are small packets; Nagle's algorithm would hold them back.
        drop(socket.set_nodelay(true));
        (Patient { socket, patience: self.patience, blocked: None }, addr)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }
}

/// A connection that fails where a write waits for longer than its patience.
pub struct Patient<S> {
    socket: S,
    patience: Duration,
    /// Runs while the reader takes nothing.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<S: AsyncWrite + Unpin> Patient<S> {
    fn bounded(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.blocked = None;
            return written;
        }
        let patience = self.patience;
        let blocked = self.blocked.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(blocked.as_mut().poll(cx));
        tracing::info!(patience_ms = patience.as_millis(), "a client that reads nothing is let go");
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_let_go_and_a_slow_one_is_not() {
        let (socket, mut reader) = duplex(8);
        let mut patient = Patient { socket, patience: PATIENCE, blocked: None };
        let slow = tokio::spawn(async move {
            let mut taken = [0; 8];
            for _ in 0..4 {
                tokio::time::sleep(PATIENCE * 9 / 10).await;
                reader.read_exact(&mut taken).await.unwrap();
            }
            reader
        });
        patient.write_all(&[7; 40]).await.expect("it takes a little in time, again and again");
        let _reader = slow.await.unwrap();
        let began = tokio::time::Instant::now();
        let error = patient.write_all(&[7; 9]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= PATIENCE && began.elapsed() < PATIENCE * 2);
    }
}
