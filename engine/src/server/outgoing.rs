//! Whole answers on their way out. They are made at once and taken as slowly as their clients may, when nothing else of their requests is
//! left: what all of them hold is bounded, and given back when the last byte of an answer is on the wire.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};

use crate::server::error::ApiError;
use crate::server::room::{FIRST_BYTES, FIRST_PARTS_BYTES_MAX, Room, Rooms};

/// What all answers may hold together, each beyond its first part. One that is longer alone gets all of it.
const ANSWERS_BYTES_MAX: usize = 512 << 20;
/// An answer leaves in pieces: of a body in one piece hyper would see the end before anything of it is written.
const PIECE_BYTES: usize = 64 << 10;

/// What bounds them.
#[derive(Debug, Clone)]
pub struct Outgoing {
    bytes_max: usize,
    answers: Rooms,
}

impl Default for Outgoing {
    fn default() -> Self {
        Self::of(ANSWERS_BYTES_MAX, FIRST_PARTS_BYTES_MAX)
    }
}

impl Outgoing {
    fn of(bytes_max: usize, first_parts_max: usize) -> Self {
        Self { bytes_max, answers: Rooms::of(first_parts_max, bytes_max) }
    }

    /// An answer of JSON.
    ///
    /// # Errors
    /// Those that leave already fill the room.
    pub fn json(&self, text: impl Into<Vec<u8>>) -> Result<Response, ApiError> {
        let text = text.into();
        let (mut room, bytes) = (Room::default(), text.len().min(FIRST_BYTES + self.bytes_max));
        self.answers.widen(&mut room, bytes).ok_or_else(ApiError::answers_busy)?;
        // it has grown by doubling
        let text = text.into_boxed_slice();
        let body = Body::new(Pieces(Bytes::from_owner(Held { text, _room: room })));
        Ok(([(CONTENT_TYPE, "application/json")], body).into_response())
    }
}

/// An answer and its room, which lasts as long as any of its pieces: those that wait to be written are no longer the body's.
struct Held {
    text: Box<[u8]>,
    _room: Room,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

/// A body of known length, in pieces.
struct Pieces(Bytes);

impl HttpBody for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = self.0.len().min(PIECE_BYTES);
        Poll::Ready((bytes > 0).then(|| Ok(Frame::data(self.0.split_to(bytes)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use axum::Router;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpSocket, TcpStream};
    use tokio::time::{sleep, timeout};

    use super::*;
    use crate::server::socket;

    const PATIENCE: Duration = Duration::from_secs(60);
    /// More than sockets hold.
    const LONG: usize = 32 << 20;

    /// A server whose every answer is so long.
    async fn serving(outgoing: &Outgoing, bytes: usize) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, outgoing) = (listener.local_addr().unwrap(), outgoing.clone());
        let answer = move || async move { outgoing.json("x".repeat(bytes)).unwrap_or_else(ApiError::into_response) };
        let router = Router::new().route("/", get(answer));
        tokio::spawn(socket::serve(listener, router, PATIENCE, std::future::pending()));
        address
    }

    /// Asks, and reads no more than the status.
    async fn ask(address: SocketAddr) -> (TcpStream, String) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(65_536).unwrap();
        let mut stream = socket.connect(address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut said = [0; 12];
        stream.read_exact(&mut said).await.unwrap();
        (stream, String::from_utf8_lossy(&said[9..]).into_owned())
    }

    async fn rest_of(mut stream: TcpStream) -> String {
        let mut said = String::new();
        timeout(PATIENCE, stream.read_to_string(&mut said)).await.expect("an end in time").unwrap();
        said
    }

    async fn all_is_back(outgoing: &Outgoing, all: (usize, usize)) {
        let back = async {
            while outgoing.answers.free() != [all.1, all.0] {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, back).await.expect("its room back");
    }

    #[tokio::test]
    async fn an_answer_keeps_its_room_until_its_client_has_taken_it() {
        let all = (LONG, 4 * FIRST_BYTES);
        let outgoing = Outgoing::of(all.0, all.1);
        let address = serving(&outgoing, LONG).await;
        let (first, status) = ask(address).await;
        assert_eq!(status, "200");
        // whatever can be written is written meanwhile
        sleep(Duration::from_millis(300)).await;
        let (second, status) = ask(address).await;
        assert_eq!(status, "429", "the first one is not taken yet");
        let said = rest_of(second).await;
        assert!(said.contains("retry-after: 1") && said.contains("answers_busy"), "{said}");
        let said = rest_of(first).await;
        let (head, body) = said.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {LONG}")) && body.len() == LONG, "{head}");
        all_is_back(&outgoing, all).await;
        let (gone, status) = ask(address).await;
        assert_eq!(status, "200");
        drop(gone);
        all_is_back(&outgoing, all).await;
    }

    #[tokio::test]
    async fn short_answers_pass_long_ones_and_are_bounded_too() {
        let outgoing = Outgoing::of(9, FIRST_BYTES + 20);
        let _long = outgoing.json("x".repeat(FIRST_BYTES + 9)).unwrap();
        let _short = outgoing.json("x".repeat(15)).unwrap();
        let error = outgoing.json("x".repeat(6)).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code, error.retry_after_s), (429, Some("answers_busy"), Some(1)));
    }

    #[test]
    fn one_that_is_longer_than_all_the_room_gets_all_of_it() {
        let outgoing = Outgoing::of(9, 2 * FIRST_BYTES);
        let longer = || outgoing.json("x".repeat(FIRST_BYTES + 10));
        let first = longer().unwrap();
        assert!(longer().is_err());
        drop(first);
        assert!(longer().is_ok());
    }
}
