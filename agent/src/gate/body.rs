//! Answers that pass through the gate, counted while they pass, unbuffered; and the books of the requests that they answer.
//! Reads the clock for the ledger's sake.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;

use super::events::WholeEvents;
use super::ledger::{End, Holding, Ledger};
use super::scan::Scan;
use super::upload::Upload;
use super::work::Asked;
use crate::sources::clock::monotonic_ms;

/// One request that was forwarded. Dropped without an end, it was abandoned by its client.
#[derive(Debug)]
pub struct Flight {
    ledger: Arc<Ledger>,
    id: u64,
    /// Is its answer one that can deliver? An error's body, however long, is not (V2).
    delivers: bool,
    ended: bool,
}

impl Flight {
    /// Opens the books for one request.
    pub fn open(ledger: &Arc<Ledger>, asked: Asked) -> Self {
        Self { id: ledger.open(monotonic_ms(), asked), ledger: Arc::clone(ledger), delivers: true, ended: false }
    }

    /// A chunk that means something came from the engine.
    pub fn delivered(&self, bytes: usize) {
        if !self.delivers {
            return;
        }
        self.ledger.delivered(self.id, monotonic_ms(), bytes as u64);
    }

    /// The answer's status is known: only a 2xx delivers.
    pub fn answered(&mut self, status: StatusCode) {
        self.delivers = status.is_success();
    }

    /// Closes the books, once.
    pub fn end(&mut self, end: End) {
        if !std::mem::replace(&mut self.ended, true) {
            self.ledger.close(self.id, monotonic_ms(), end);
        }
    }

    /// Its client has not sent all of it yet: until it has, the engine owes nothing.
    pub fn uploads(&self, path: String, read_bytes: u64) -> Upload {
        Upload::of(&self.ledger, self.id, path, read_bytes)
    }

    fn handed(&self, now: bool) {
        self.ledger.handed(self.id, now.then(monotonic_ms));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.end(End::Abandoned);
    }
}

/// An answer's body.
#[derive(Debug)]
pub enum AnswerBody {
    /// Made by the gate, or read whole.
    Whole(Full<Bytes>),
    /// Passed through without counting; a change of the engine's is told of for as long as it goes on.
    Through(Incoming, Option<Holding>),
    /// Passed through and counted.
    Counted(Box<CountedBody>),
}

impl AnswerBody {
    /// A body that the gate has in its hands.
    pub fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Full::new(bytes.into()))
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Whole(body) => Pin::new(body).poll_frame(cx).map_err(|never| match never {}),
            Self::Through(body, passing) => {
                let frame = ready!(Pin::new(body).poll_frame(cx));
                if frame.is_none() {
                    *passing = None;
                }
                Poll::Ready(frame)
            }
            Self::Counted(body) => Pin::new(body.as_mut()).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_end_stream(),
            Self::Through(body, _) => body.is_end_stream(),
            Self::Counted(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => body.size_hint(),
            Self::Through(body, _) => body.size_hint(),
            Self::Counted(body) => body.size_hint(),
        }
    }
}

/// The end of a whole answer follows its last event sooner, whoever has shut the gate meanwhile.
const SILENT_MS: u64 = 500;

/// A streamed answer whose chunks are counted as they are read from the engine; one of events goes on in whole ones.
#[derive(Debug)]
pub struct CountedBody {
    inner: Incoming,
    flight: Flight,
    scan: Scan,
    events: WholeEvents,
    /// Trailers, behind what was held back.
    trailers: Option<Frame<Bytes>>,
    /// How it counts when the whole body was read.
    end: End,
    /// The engine's answer says where it ends. One that goes to the end of its connection ends in the same way when the engine dies.
    framed: bool,
    /// When the engine said anything last.
    heard_ms: u64,
    over: bool,
}

impl CountedBody {
    /// `end`: what an answer with this status is, read whole; `framed`: it says where it ends.
    pub fn new(inner: Incoming, flight: Flight, scan: Scan, end: End, framed: bool) -> Self {
        let (events, trailers) = (WholeEvents::default(), None);
        Self { inner, flight, scan, events, trailers, end, framed, heard_ms: monotonic_ms(), over: false }
    }

    /// Counts what came and gives what goes on now, which may be nothing.
    fn pass(&mut self, data: Bytes) -> Bytes {
        self.heard_ms = monotonic_ms();
        if self.scan.feed(&data) {
            self.flight.delivered(data.len());
        }
        if self.scan.is_events() { self.events.feed(data) } else { data }
    }

    /// All of the answer was read.
    fn finish(&mut self) {
        self.flight.end(if self.scan.told_of_an_error() { End::Broken } else { self.end });
    }

    /// The engine's body is at its end: the last bytes for its client, if there are any.
    fn at_end(&mut self) -> Option<Bytes> {
        self.over = true;
        // servers write whole events: of an engine that is ended for its silence nothing else tells that there was more
        let silent = monotonic_ms().saturating_sub(self.heard_ms) >= SILENT_MS && self.flight.ledger.shut().is_some();
        let cut = self.scan.is_events() && (self.events.holds() || silent);
        if cut && !self.framed && !self.scan.is_done() {
            return Some(self.broken());
        }
        self.finish();
        Some(self.events.rest()).filter(|rest| !rest.is_empty())
    }

    /// The engine's connection broke. Clients of an event stream are told so in the stream; others see theirs break, since their status line
    /// is gone.
    fn broke_off(&mut self, error: hyper::Error) -> Option<Result<Frame<Bytes>, hyper::Error>> {
        if self.scan.is_done() {
            return self.at_end().map(|last| Ok(Frame::data(last)));
        }
        let event = self.broken();
        Some(if self.scan.is_events() { Ok(Frame::data(event)) } else { Err(error) })
    }

    /// The books of an answer that is not whole, and the event that says so in a stream of them.
    fn broken(&mut self) -> Bytes {
        self.over = true;
        self.flight.end(End::Broken);
        let text = "the engine died in the middle of this answer; send the request again";
        super::answers::error_event(text, "engine_died", self.scan.names_events()).into()
    }
}

impl Body for CountedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if self.over {
            return Poll::Ready(None);
        }
        // Being asked for the next chunk means that the client's socket took the last one.
        self.flight.handed(false);
        let data = loop {
            if let Some(trailers) = self.trailers.take() {
                return Poll::Ready(Some(Ok(trailers)));
            }
            let data = match ready!(Pin::new(&mut self.inner).poll_frame(cx)) {
                None => return Poll::Ready(self.at_end().map(|last| Ok(Frame::data(last)))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.pass(data),
                    Err(trailers) => {
                        // whoever takes them does not ask again
                        self.finish();
                        self.trailers = Some(trailers);
                        self.events.rest()
                    }
                },
                Some(Err(error)) => return Poll::Ready(self.broke_off(error)),
            };
            if !data.is_empty() {
                break data;
            }
        };
        self.flight.handed(true);
        Poll::Ready(Some(Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        self.over || (self.inner.is_end_stream() && !self.events.holds() && self.trailers.is_none())
    }

    fn size_hint(&self) -> SizeHint {
        // An event stream may get a last event of ours, so its length is not the engine's to promise.
        if self.scan.is_events() { SizeHint::default() } else { self.inner.size_hint() }
    }
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        // With a known length the connection stops asking once it has all of it, and a client does that has heard `[DONE]`.
        if !self.over && (self.inner.is_end_stream() || self.scan.is_done()) {
            self.finish();
        }
    }
}
