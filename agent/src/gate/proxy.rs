//! The way of one request through the gate: admitted, counted, forwarded, its answer passed on chunk by chunk.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, header};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::TokioTimer;
use nix::errno::Errno;
use tokio::sync::Semaphore;

use super::awaited::Endable;
use super::body::{AnswerBody, CountedBody, Flight};
use super::form::Form;
use super::ledger::{End, Held, Holding, Ledger};
use super::room::{BEGINNING_BYTES, Room, Share, in_room};
use super::scan::Scan;
use super::upload::{ClientBody, InTime, RequestBody, UploadError};
use super::work::{self, Asked};
use super::{ENGINE_BUFFER_BYTES, IN_FLIGHT_MAX, answers};
use crate::sources::get::OWN_HEADER;

/// A request body is read up to this size to count its prompt; a larger one streams through.
const COUNTED_BYTES_MAX: usize = 8 << 20;
/// A longer one takes milliseconds to be parsed and hashed: beside the thread on which everybody else waits, detector included.
const COUNTED_AT_ONCE_BYTES_MAX: usize = 256 << 10;
/// JSON answers of a known length up to this size are read whole, so that an engine's death is still a clean 502.
const WHOLE_ANSWER_BYTES_MAX: u64 = 8 << 20;
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(5);
/// For an engine that takes nothing of what waits to be written to it. Where nobody waits for its answer the connection ends at once ([`Endable`]).
/// A client that waits may be served by an engine that was frozen for as long as the detector bears with one (15 min), so this is more. What is
/// left is an engine that has answered, and neither reads the rest nor closes.
const TAKES_NOTHING_MAX: Duration = Duration::from_secs(1_200);
/// Shorter than any server's own (gunicorn closes after 2 s, uvicorn after 5): a connection that the engine is just closing would fail a
/// request. To open another takes a fraction of a millisecond.
const IDLE_CONNECTION_MAX: Duration = Duration::from_secs(1);
/// Where so many requests are in hand as may be, there is room for so many more that bring no work: one of them may be what ends the silence.
const SPARE: usize = 64;
/// Headers that belong to one connection and not to the message.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Forwards requests to one engine.
#[derive(Debug)]
pub struct Proxy {
    ledger: Arc<Ledger>,
    client: Client<HttpConnector, RequestBody>,
    scheme: Scheme,
    authority: Authority,
    room: Room,
    in_flight_max: usize,
    /// Long bodies are counted one by one: together they would take the processor from the thread that serves.
    counting: Arc<Semaphore>,
}

impl Proxy {
    /// `upstream` is the engine's base URL; its path is ignored. `None` where it names no host.
    pub fn new(ledger: Arc<Ledger>, upstream: &Uri) -> Option<Self> {
        Self::patient(ledger, upstream, TAKES_NOTHING_MAX)
    }

    fn patient(ledger: Arc<Ledger>, upstream: &Uri, takes_nothing_max: Duration) -> Option<Self> {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_WAIT_MAX));
        connector.set_nodelay(true);
        // (Linux counts the time of a closed window as well)
        connector.set_tcp_user_timeout(Some(takes_nothing_max));
        let client = Client::builder(Endable)
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_CONNECTION_MAX)
            .http1_max_buf_size(ENGINE_BUFFER_BYTES)
            .build(connector);
        let scheme = upstream.scheme().cloned().unwrap_or(Scheme::HTTP);
        Some(Self {
            ledger,
            client,
            scheme,
            authority: upstream.authority().cloned()?,
            room: Room::default(),
            in_flight_max: usize::try_from(IN_FLIGHT_MAX).unwrap_or(usize::MAX),
            counting: Arc::new(Semaphore::new(1)),
        })
    }

    /// The same, with so many requests in hand at once.
    pub fn with_at_most(self, in_flight: u32) -> Self {
        Self { in_flight_max: usize::try_from(in_flight).unwrap_or(usize::MAX), ..self }
    }

    /// A client's connection, in the books for as long as this is there.
    pub fn connected(&self) -> Holding {
        self.ledger.hold(Held::Connection)
    }

    /// Answers one request of so many that are in hand `together`; whatever goes wrong is an answer too.
    pub async fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
        together: usize,
    ) -> Result<Response<AnswerBody>, Infallible> {
        let mut response = self.answer(ClientBody::of(request), together).await;
        if self.ledger.leaving() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        Ok(response)
    }

    async fn answer(&self, request: Request<ClientBody>, together: usize) -> Response<AnswerBody> {
        if request.method() == Method::CONNECT {
            return answers::bad_request(StatusCode::METHOD_NOT_ALLOWED, "CONNECT is not served here");
        }
        if is_websocket(request.headers()) {
            // asked without its upgrade, an engine would say that there is no such path
            let text = "the gate passes on no WebSocket; where clients may reach the engine's own port, it can be opened there";
            return answers::bad_request(StatusCode::NOT_IMPLEMENTED, text);
        }
        if listed(request.headers(), header::TRANSFER_ENCODING).any(|coding| !coding.eq_ignore_ascii_case("chunked")) {
            // it belongs to this connection: passed on without, the engine would take what is packed for what was meant
            let text = "the gate takes a body in no transfer coding but chunked; a Content-Encoding is passed on";
            return answers::bad_request(StatusCode::NOT_IMPLEMENTED, text);
        }
        let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
        // what brings no work and may be what ends the silence goes through a fence
        let path = work::plain(request.uri().path());
        let (mends, is_work) = (work::mends(&path), work::is_work(request.method(), &path));
        if !reads
            && !mends
            && let Err(refusal) = self.ledger.admit()
        {
            return answers::refused(&refusal);
        }
        let spare = if reads || mends { SPARE } else { 0 };
        if together > self.in_flight_max.saturating_add(spare) {
            self.ledger.turns_away();
            return answers::crowded(self.in_flight_max);
        }
        if is_work {
            return self.forward_work(request).await;
        }
        let (parts, body) = request.into_parts();
        let passing = (!reads).then(|| self.ledger.hold(Held::Passing));
        match self.send(parts, RequestBody::unread(body)).await {
            Ok(response) => response.map(|body| AnswerBody::Through(body, passing)),
            Err(unsent) => unsent.response,
        }
    }

    async fn forward_work(&self, request: Request<ClientBody>) -> Response<AnswerBody> {
        let (mut parts, body) = request.into_parts();
        // packed, a stream that says nothing looks like one that speaks (V2), and no last event could be put behind it
        parts.headers.remove(header::ACCEPT_ENCODING);
        let form = Form::of(&parts.headers);
        let (mut body, mut asked) = match self.read_and_count(&work::plain(parts.uri.path()), form, body).await {
            Ok(counted) => counted,
            Err(response) => return *response,
        };
        // The agent's own question for first tokens is in flight at every stall of a start-up; refused, no replica could prove itself.
        asked.print = asked.print.filter(|_| !is_own(&parts.headers, self.ledger.own.as_deref()));
        // The detector may have shut the gate while the body came in.
        if let Err(refusal) = self.ledger.admit() {
            return answers::refused(&refusal);
        }
        if self.ledger.is_poison(asked.print) {
            return answers::poison(asked.print);
        }
        // what is still to come is no prompt that the engine has to get through, and no stream that it could begin
        let so_far = if body.rest.is_some() { Asked { prompt_tokens: 1, stream: false, ..asked } } else { asked };
        let mut flight = Flight::open(&self.ledger, so_far);
        let path = work::plain(parts.uri.path()).into_owned();
        body.upload = body.rest.is_some().then(|| flight.uploads(path.clone(), body.read_bytes()));
        match self.send(parts, body).await {
            Ok(response) => self.pass_on(response, &path, flight).await,
            Err(unsent) => {
                flight.end(unsent.end);
                unsent.response
            }
        }
    }

    /// The body's first part in memory, with what it asks for; what goes beyond the limit is left to stream.
    async fn read_and_count(
        &self,
        path: &str,
        form: Option<Form>,
        body: ClientBody,
    ) -> Result<(RequestBody, Asked), Box<Response<AnswerBody>>> {
        let mut body = InTime::new(body);
        let mut head = BytesMut::new();
        let mut share = Share::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| answers::cut(&error))?;
            let mut fits = true;
            if let Some(data) = frame.data_ref() {
                fits = share.grow(&self.room, head.len(), data.len());
                head.extend_from_slice(data);
            }
            // a short one that is all here is in memory in either case, and unread it could be poison, or a stream
            fits |= head.len() <= BEGINNING_BYTES && body.is_at_end();
            if !fits || head.len() > COUNTED_BYTES_MAX {
                // how long all of it is will be known when it is here
                let asked = work::asked_unread(path, head.len() as u64);
                return Ok((RequestBody::read(in_room(head.freeze(), share), Some(body)), asked));
            }
        }
        let head = head.freeze();
        let (asked, share) = self.count(path, form, head.clone(), share).await;
        Ok((RequestBody::read(in_room(head, share), None), asked))
    }

    /// What a whole body asks for. A client that leaves meanwhile leaves turn and share to the work that goes on.
    async fn count(&self, path: &str, form: Option<Form>, body: Bytes, share: Share) -> (Asked, Share) {
        let form = form.filter(|form| form.is_of(&body));
        let asked = move |path: &str, body: &[u8]| match &form {
            Some(form) => work::asked_in(form, path, body),
            None => work::asked(path, body),
        };
        if body.len() <= COUNTED_AT_ONCE_BYTES_MAX {
            return (asked(path, &body), share);
        }
        let unread = work::asked_unread(path, body.len() as u64);
        let path = path.to_owned();
        let turn = Arc::clone(&self.counting).acquire_owned().await;
        let counted = tokio::task::spawn_blocking(move || {
            let asked = asked(&path, &body);
            drop(turn);
            (asked, share)
        });
        counted.await.unwrap_or((unread, Share::default()))
    }

    async fn send(
        &self,
        mut parts: http::request::Parts,
        body: RequestBody,
    ) -> Result<Response<Incoming>, Box<Unanswered>> {
        let path = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let uri =
            Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone()).path_and_query(path).build();
        parts.uri = uri.map_err(|error| {
            let text = format!("the path is no path: {error}");
            Unanswered { end: End::Declined, response: answers::bad_request(StatusCode::BAD_REQUEST, &text) }
        })?;
        parts.version = http::Version::HTTP_11;
        let in_chunks = parts.headers.contains_key(header::TRANSFER_ENCODING) && body.size_hint().exact().is_none();
        strip_hop_by_hop(&mut parts.headers);
        if in_chunks {
            // the body of a request that reads is sent only where its head says so
            parts.headers.remove(header::CONTENT_LENGTH);
            parts.headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        // The gate has answered the client's `Expect` by reading its body.
        parts.headers.remove(header::EXPECT);
        // between the agent and its gate: an engine would write it in a log that others read
        parts.headers.remove(OWN_HEADER);
        let awaited = body.way.awaited();
        let answered = self.client.request(Request::from_parts(parts, body)).await;
        awaited.ends();
        let mut response = answered.map_err(|error| self.unanswered(&error))?;
        *response.version_mut() = http::Version::HTTP_11;
        let chunked = response.headers().contains_key(header::TRANSFER_ENCODING);
        if chunked {
            // of the two it was this one that the body was read by (RFC 9112, 6.3); the other would cut it
            response.headers_mut().remove(header::CONTENT_LENGTH);
        } else if response.body().size_hint().exact().is_none() {
            response.extensions_mut().insert(ToItsEnd);
        }
        strip_hop_by_hop(response.headers_mut());
        Ok(response)
    }

    /// Whose fault is it that there is no answer: the client's, our own, or the engine's?
    fn unanswered(&self, error: &Error) -> Unanswered {
        tracing::debug!(error = error as &dyn std::error::Error, "the engine did not answer");
        if let Some(upload) = UploadError::behind(error) {
            return Unanswered { end: End::Abandoned, response: answers::cut(upload) };
        }
        if error.is_connect() && is_exhaustion(error) {
            return Unanswered { end: End::Declined, response: answers::exhausted() };
        }
        match error.is_connect() {
            true => Unanswered { end: End::Failed, response: answers::absent() },
            false => Unanswered { end: End::Broken, response: self.broken("no answer") },
        }
    }

    /// The engine's answer becomes the client's.
    async fn pass_on(&self, response: Response<Incoming>, path: &str, mut flight: Flight) -> Response<AnswerBody> {
        let (mut parts, body) = response.into_parts();
        flight.answered(parts.status);
        let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let packed = parts.headers.get(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        let scan = Scan::of(content_type.filter(|_| !packed), path);
        let end = end_of(parts.status);
        let json = content_type.is_some_and(|kind| kind.starts_with("application/json"));
        let length = body.size_hint().exact();
        let whole = length.filter(|length| json && *length <= WHOLE_ANSWER_BYTES_MAX);
        if let Some(permit) = whole.and_then(|length| self.room.for_whole(length)) {
            return match read_whole(body, flight, end).await {
                Some(bytes) => Response::from_parts(parts, AnswerBody::whole(in_room(bytes, permit))),
                None => self.broken("its answer broke off"),
            };
        }
        if scan.is_events() {
            parts.headers.remove(header::CONTENT_LENGTH);
        }
        let framed = parts.extensions.remove::<ToItsEnd>().is_none();
        Response::from_parts(parts, AnswerBody::Counted(Box::new(CountedBody::new(body, flight, scan, end, framed))))
    }

    fn broken(&self, what: &str) -> Response<AnswerBody> {
        answers::broken(what, self.ledger.shut().as_ref())
    }
}

/// An answer that ends where its connection does.
#[derive(Debug, Clone, Copy)]
struct ToItsEnd;

/// A request that the engine gave no answer to: how it ended in the books, and what its client is told.
#[derive(Debug)]
struct Unanswered {
    end: End,
    response: Response<AnswerBody>,
}

/// Reads a JSON answer to its end, counting; nothing where the engine broke off.
async fn read_whole(mut body: Incoming, mut flight: Flight, end: End) -> Option<Bytes> {
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            flight.end(End::Broken);
            return None;
        };
        if let Some(data) = frame.data_ref() {
            flight.delivered(data.len());
            whole.extend_from_slice(data);
        }
    }
    flight.end(end);
    Some(whole.freeze())
}

/// What a whole answer with this status is in the books.
fn end_of(status: StatusCode) -> End {
    match status {
        StatusCode::INTERNAL_SERVER_ERROR => End::Broken,
        StatusCode::TOO_MANY_REQUESTS => End::Declined,
        other if other.is_server_error() => End::Failed,
        _ => End::Completed,
    }
}

/// Was it for want of a descriptor, this process's or the machine's?
fn is_exhaustion(error: &(dyn std::error::Error + 'static)) -> bool {
    let codes = std::iter::successors(Some(error), |error| (*error).source())
        .filter_map(|error| error.downcast_ref::<std::io::Error>()?.raw_os_error());
    codes.map(Errno::from_raw).any(|code| matches!(code, Errno::EMFILE | Errno::ENFILE))
}

/// Is it the agent's own question? What a client has written there is nothing.
fn is_own(headers: &HeaderMap, word: Option<&str>) -> bool {
    word.is_some_and(|word| headers.get(OWN_HEADER).is_some_and(|said| said.as_bytes() == word.as_bytes()))
}

fn is_websocket(headers: &HeaderMap) -> bool {
    listed(headers, header::UPGRADE).any(|protocol| protocol.eq_ignore_ascii_case("websocket"))
}

/// The members of all lists of this name.
fn listed(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let lists = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).map(str::trim)
}

fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = listed(headers, header::CONNECTION).filter_map(|name| name.parse().ok()).collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
#[path = "proxy_tests.rs"]
mod tests;
