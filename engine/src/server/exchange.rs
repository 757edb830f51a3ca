//! Requests that are being answered, from their head to the last byte of their answer. The engine knows only those between: a drain must not
//! end while a body is still coming or an answer still leaving.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use axum::Error;
use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use http_body::{Frame, SizeHint};

/// How many there are.
#[derive(Debug, Clone, Default)]
pub struct Exchanges(Arc<AtomicUsize>);

impl Exchanges {
    /// A request has come; it counts until its answer's body was handed over, or dropped with its connection.
    pub async fn counted(&self, answer: impl Future<Output = Response>) -> Response {
        self.0.fetch_add(1, Ordering::Relaxed);
        let one = One(self.0.clone());
        answer.await.map(|body| Body::new(Leaving { body, _one: one }))
    }

    pub fn open(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One of them; counted until it is dropped.
struct One(Arc<AtomicUsize>);

impl Drop for One {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer's body on its way out.
struct Leaving {
    body: Body,
    _one: One,
}

impl HttpBody for Leaving {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
