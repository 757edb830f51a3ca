//! A request's body on its way to the engine: what was read to count it, then the rest as its client sends it. A client that stalls is cut,
//! and while it sends, the silence is its own and not the engine's (V5).
//!
//! Reads the clock for the ledger's sake.

use std::error::Error;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use role::patience::Patience;
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::awaited::Way;
use super::ledger::Ledger;
use super::work;
use crate::sources::clock::monotonic_ms;

/// A client that sends nothing of its body for so long is cut (E7), and one that sends next to nothing in the end.
const FRAME_WAIT_MAX: Duration = Duration::from_secs(60);

/// So much of what nobody wants is read, and for so long, that its client hears why.
const UNHEARD_BYTES_MAX: usize = 64 << 20;
const UNHEARD_MAX: Duration = Duration::from_secs(10);

/// Why a request's body did not reach the engine whole. Either is its client's doing.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    #[error("the request body came too slowly, or not at all for {} s", FRAME_WAIT_MAX.as_secs())]
    Stalled,
    #[error("the request body broke off: {0}")]
    Broken(#[source] hyper::Error),
}

impl UploadError {
    /// What a failed exchange with the engine was caused by, where that was the client's body.
    pub fn behind<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        std::iter::successors(Some(error), |error| (*error).source()).find_map(|error| error.downcast_ref())
    }
}

/// What a client sends. A connection that is closed while more of it comes is reset, and whoever sends sees a broken pipe where an answer was: a
/// load balancer makes a 502 of that. So what is not read when this is dropped is read beside the answer.
#[derive(Debug)]
pub struct ClientBody {
    body: Option<Incoming>,
    /// For a `100 Continue`, that comes with the first look; until then nothing is sent.
    waits: bool,
}

impl ClientBody {
    /// The request's.
    pub fn of(request: Request<Incoming>) -> Request<Self> {
        let waits = request.headers().contains_key(header::EXPECT);
        request.map(|body| Self { body: Some(body), waits })
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.waits = false;
        self.body.as_mut().map_or(Poll::Ready(None), |body| Pin::new(body).poll_frame(cx))
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

impl Drop for ClientBody {
    fn drop(&mut self) {
        let unread = self.body.take().filter(|body| !self.waits && !body.is_end_stream());
        // without a runtime the connection is at its end, too
        if let (Some(body), Ok(runtime)) = (unread, Handle::try_current()) {
            runtime.spawn(timeout(UNHEARD_MAX, throw_away(body)));
        }
    }
}

async fn throw_away(mut body: Incoming) {
    let mut bytes: usize = 0;
    while let Some(Ok(frame)) = body.frame().await {
        bytes += frame.data_ref().map_or(0, Bytes::len);
        if bytes > UNHEARD_BYTES_MAX {
            return;
        }
    }
}

/// What is still to come of a body, each frame in its time.
#[derive(Debug)]
pub struct InTime<B = ClientBody> {
    rest: B,
    /// Spent while a frame is waited for.
    patience: Patience,
}

impl<B> InTime<B> {
    /// From the next frame on.
    pub fn new(rest: B) -> Self {
        Self { rest, patience: Patience::of(FRAME_WAIT_MAX) }
    }
}

impl<B: Body<Data = Bytes, Error = hyper::Error> + Unpin> InTime<B> {
    /// Is all of it here? What comes in chunks is said to be only when its end was read.
    pub fn is_at_end(&self) -> bool {
        self.rest.is_end_stream()
    }

    /// The next frame.
    pub async fn frame(&mut self) -> Option<Result<Frame<Bytes>, UploadError>> {
        poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.rest).poll_frame(cx) else {
            ready!(self.patience.poll_spent(cx));
            return Poll::Ready(Some(Err(UploadError::Stalled)));
        };
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        self.patience.rewarded(data.map_or(0, Bytes::len));
        Poll::Ready(frame.map(|frame| frame.map_err(UploadError::Broken)))
    }
}

/// A request in the books whose client is still sending. While the engine's connection has taken all that came, the client is who is waited
/// for; while it has not, the engine is. Dropped, nothing is left to send.
#[derive(Debug)]
pub struct Upload {
    ledger: Arc<Ledger>,
    id: u64,
    begun_ms: u64,
    /// Where it goes, and what came of it so far: how large a prompt it is can be known at its end, for its client need not say it before.
    path: String,
    bytes: u64,
}

impl Upload {
    /// Since now, when so many bytes are here.
    pub fn of(ledger: &Arc<Ledger>, id: u64, path: String, bytes: u64) -> Self {
        Self { ledger: Arc::clone(ledger), id, begun_ms: monotonic_ms(), path, bytes }
    }

    /// Since the beginning, however many frames came meanwhile: nobody can answer half a request, and a byte a second is no better than none.
    fn awaits_client(&self) {
        self.ledger.handed(self.id, Some(self.begun_ms));
    }

    fn awaits_engine(&self) {
        self.ledger.handed(self.id, None);
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.awaits_engine();
        self.ledger.uploaded(self.id, &work::asked_unread(&self.path, self.bytes));
    }
}

/// A request's body.
#[derive(Debug)]
pub struct RequestBody<B = ClientBody> {
    head: Option<Bytes>,
    pub rest: Option<InTime<B>>,
    /// Where it is work in the books, and not yet here as a whole.
    pub upload: Option<Upload>,
    /// Where it goes.
    pub way: Way,
}

impl<B> RequestBody<B> {
    /// One of which nothing was read.
    pub fn unread(body: B) -> Self {
        Self { head: None, rest: Some(InTime::new(body)), upload: None, way: Way::default() }
    }

    /// One of which this was read; all of it where there is no rest.
    pub fn read(head: Bytes, rest: Option<InTime<B>>) -> Self {
        Self { head: Some(head), rest, upload: None, way: Way::default() }
    }

    /// What was read of it to count it.
    pub fn read_bytes(&self) -> u64 {
        self.head.as_ref().map_or(0, |head| head.len() as u64)
    }
}

impl<B: Body<Data = Bytes, Error = hyper::Error> + Unpin> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = UploadError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UploadError>>> {
        let body = &mut *self;
        body.way.found();
        if let Some(head) = body.head.take().filter(|head| !head.is_empty()) {
            return Poll::Ready(Some(Ok(Frame::data(head))));
        }
        let Some(rest) = &mut body.rest else { return Poll::Ready(None) };
        // Being asked for the next frame means that the engine's connection took the last one.
        body.upload.iter().for_each(Upload::awaits_client);
        let frame = ready!(rest.poll(cx));
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        if let (Some(upload), Some(data)) = (&mut body.upload, data) {
            upload.bytes = upload.bytes.saturating_add(data.len() as u64);
        }
        match &frame {
            Some(Ok(_)) if !rest.rest.is_end_stream() => body.upload.iter().for_each(Upload::awaits_engine),
            _ => body.upload = None,
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.head.as_ref().is_none_or(Bytes::is_empty)
            && self.rest.as_ref().is_none_or(|rest| rest.rest.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let head = self.read_bytes();
        match &self.rest {
            None => SizeHint::with_exact(head),
            Some(InTime { rest, .. }) => {
                let rest = rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(rest.lower().saturating_add(head));
                if let Some(upper) = rest.upper() {
                    hint.set_upper(upper.saturating_add(head));
                }
                hint
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::ledger::Control;
    use std::collections::VecDeque;

    /// A client that has sent these frames, and no end.
    struct Client(VecDeque<Bytes>);

    impl Body for Client {
        type Data = Bytes;
        type Error = hyper::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
            self.0.pop_front().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
        }
    }

    fn client(frames: usize) -> Client {
        Client((0..frames).map(|_| Bytes::from_static(b"more")).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stalls_is_cut_and_one_that_sends_slowly_is_not() {
        let mut body = InTime::new(client(0));
        for _ in 0..5 {
            let waited = tokio::time::timeout(FRAME_WAIT_MAX.mul_f64(0.9), body.frame()).await;
            assert!(waited.is_err(), "in its time");
            body.rest.0.push_back(Bytes::from_static(&[b'x'; 30_000]));
            assert!(matches!(body.frame().await, Some(Ok(_))));
        }
        let began = tokio::time::Instant::now();
        let cut = tokio::time::timeout(FRAME_WAIT_MAX * 9, body.frame()).await;
        assert!(matches!(cut, Ok(Some(Err(UploadError::Stalled)))) && began.elapsed() >= FRAME_WAIT_MAX, "{cut:?}");
    }

    #[tokio::test]
    async fn who_sends_is_waited_for_until_the_engine_has_something_to_take() {
        let ledger = Arc::new(Ledger::new(1, Control::default()));
        let id = ledger.open(monotonic_ms(), work::asked_unread("/v1/completions", 9));
        // long ago: a byte a moment ago does not begin it anew
        let mut upload = Upload::of(&ledger, id, "/v1/completions".to_owned(), 4);
        upload.begun_ms = 0;
        let mut body =
            RequestBody { upload: Some(upload), head: Some("head".into()), ..RequestBody::unread(client(1)) };
        let blocked = || ledger.reply(monotonic_ms()).obs.client_blocked;
        let mut poll = async || {
            let once = |cx: &mut Context<'_>| Poll::Ready(Pin::new(&mut body).poll_frame(cx).is_ready());
            (poll_fn(once).await, blocked())
        };
        assert_eq!(poll().await, (true, 0), "the engine takes the head or does not");
        assert_eq!(poll().await, (true, 0), "nor is the client at fault while the engine does not take a frame");
        assert_eq!(poll().await, (false, 1), "it took it");
        drop(body);
        assert_eq!(blocked(), 0);
    }

    #[test]
    fn a_broken_body_is_found_however_deep_it_lies() {
        #[derive(Debug, thiserror::Error)]
        #[error("outside")]
        struct Outside(#[source] Box<dyn Error>);
        let deep = Outside(Box::new(Outside(Box::new(UploadError::Stalled))));
        assert!(matches!(UploadError::behind(&deep), Some(UploadError::Stalled)));
        assert!(UploadError::behind(&Outside("an engine that died".into())).is_none());
    }
}
