//! How bodies come in: of a bounded length, in bounded time, in bounded memory for all of them together, and only so many of them are
//! parsed and tokenized at once. What is refused before its body is read costs no more than its head.

mod weight;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::http::HeaderMap;
use futures::StreamExt;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use crate::server::error::ApiError;
use crate::server::generate::Deadline;
use crate::server::room::{FIRST_PARTS_BYTES_MAX, Room, Rooms};
use crate::server::{AppState, wire};
pub use weight::Weight;

/// Largest body of a request.
const BODY_BYTES_MAX: usize = 32 << 20;
/// What all bodies that are being read or parsed may hold together, each beyond its first part.
const BODIES_BYTES_MAX: usize = 256 << 20;
/// What all bodies that are being read by a parser may become together, and a single one of them at most.
const PARSED_BYTES_MAX: usize = 512 << 20;
/// What becomes little waits for nobody: there are no more of these at once than parsers.
const PARSED_FREE_BYTES: usize = 1 << 20;
/// Bodies that are parsed and tokenized at once, where there are fewer cores than this.
const PARSERS_MIN: usize = 2;
/// Requests whose grammar is compiled at once, or waits for its place there.
const COMPILERS_MAX: usize = 16;
/// A client that is refused while it still sends reads the answer only if it is heard out: for so long, and for so many bytes.
const HEARD_OUT_MAX: Duration = Duration::from_secs(2);
const HEARD_OUT_BYTES_MAX: usize = 2 * BODY_BYTES_MAX;

/// What bounds the bodies under way.
#[derive(Debug)]
pub struct Intake {
    bodies: Rooms,
    parsed: Arc<Semaphore>,
    parsers: Arc<Semaphore>,
    compilers: Arc<Semaphore>,
}

impl Default for Intake {
    fn default() -> Self {
        let parsers = available_parallelism().map_or(PARSERS_MIN, NonZeroUsize::get).max(PARSERS_MIN);
        let of = |places| Arc::new(Semaphore::new(places));
        Self {
            bodies: Rooms::of(FIRST_PARTS_BYTES_MAX, BODIES_BYTES_MAX),
            parsed: of(PARSED_BYTES_MAX),
            parsers: of(parsers),
            compilers: of(COMPILERS_MAX),
        }
    }
}

/// A body that is here, and its part of what bodies may hold.
pub struct Received {
    data: Vec<u8>,
    weight: Weight,
    room: Room,
}

impl Intake {
    /// Reads a body. It must come without a pause longer than `patience`, and be here by the deadline.
    ///
    /// # Errors
    /// It is too large, too slow, broken off, or too many are read at once.
    pub async fn receive(&self, body: Body, patience: Duration, deadline: Deadline) -> Result<Received, ApiError> {
        let mut chunks = body.into_data_stream();
        let mut received = Received { data: Vec::new(), weight: Weight::default(), room: Room::default() };
        let until = deadline.at();
        loop {
            let Ok(next) = timeout_at(until.min(Instant::now() + patience), chunks.next()).await else {
                // it may only have paused
                hear_out(chunks);
                return Err(ApiError::body_late(deadline.arrived.elapsed().as_millis(), received.data.len()));
            };
            let Some(chunk) = next else { return Ok(received) };
            let chunk = chunk.map_err(|e| ApiError::malformed(format!("the body broke off: {e}")))?;
            if let Err(error) = self.add(&mut received, &chunk) {
                hear_out(chunks);
                return Err(error);
            }
        }
    }

    fn add(&self, received: &mut Received, chunk: &[u8]) -> Result<(), ApiError> {
        if received.data.len() + chunk.len() > BODY_BYTES_MAX {
            return Err(ApiError::body_too_large(BODY_BYTES_MAX));
        }
        received.weight.add(chunk);
        if received.weight.bytes() > PARSED_BYTES_MAX {
            return Err(ApiError::body_too_rich(received.weight.bytes(), PARSED_BYTES_MAX));
        }
        self.bodies.widen(&mut received.room, chunk.len()).ok_or_else(ApiError::bodies_busy)?;
        received.data.extend_from_slice(chunk);
        Ok(())
    }

    /// Waits until there is room for what a body becomes, and until a parser is free; both stay taken while the answer is there.
    async fn turn(&self, weight: Weight) -> [Option<OwnedSemaphorePermit>; 2] {
        let becomes =
            Some(weight.bytes()).filter(|bytes| *bytes > PARSED_FREE_BYTES).and_then(|b| u32::try_from(b).ok());
        // neither is ever closed
        let room = match becomes {
            Some(bytes) => self.parsed.clone().acquire_many_owned(bytes).await.ok(),
            None => None,
        };
        [room, self.parsers.clone().acquire_owned().await.ok()]
    }
}

/// Looks at a request's head: its deadline, and whether its body is worth reading.
///
/// # Errors
/// What `check` says, or the head is wrong; the body is not read then.
pub fn head<T>(
    app: &AppState,
    headers: &HeaderMap,
    body: Body,
    check: impl FnOnce() -> Result<T, ApiError>,
) -> Result<(Deadline, T, Body), ApiError> {
    let checked = wire::check_json(headers).and_then(|()| Ok((app.deadline(headers)?, check()?)));
    match checked {
        Ok((deadline, checked)) => Ok((deadline, checked, body)),
        Err(error) => {
            hear_out(body.into_data_stream());
            Err(error)
        }
    }
}

/// Lets a client that was refused finish sending, so that it reads why: a connection that is closed on unread bytes is reset, and what was
/// answered lost. Nothing of it is kept.
pub fn hear_out(mut chunks: BodyDataStream) {
    let drain = async move {
        let mut bytes = 0;
        while let Some(Ok(chunk)) = chunks.next().await {
            bytes += chunk.len();
            if bytes > HEARD_OUT_BYTES_MAX {
                break;
            }
        }
    };
    tokio::spawn(timeout(HEARD_OUT_MAX, drain));
}

/// Tells the thread that parses when nobody waits for it any more.
struct Waits(Arc<AtomicBool>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads a request on a thread that may take its time: a long prompt is tokenized for a while; other requests' streams do not wait for
/// that. One whose client has gone is not begun. What is made of the body comes with its room, for who lets it wait for something else.
///
/// # Errors
/// The body is not what it must be, or its turn did not come by the deadline.
pub async fn read<T: Send + 'static>(
    app: &AppState,
    deadline: Deadline,
    body: Body,
    parse: impl FnOnce(&Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Room), ApiError> {
    let Received { data, weight, room } = app.intake.receive(body, app.client_patience, deadline).await?;
    let turn = timeout_at(deadline.at(), app.intake.turn(weight)).await;
    let Ok(turn) = turn else { return Err(app.deadline_error(deadline.timeout)) };
    apart(app, deadline, turn, |gone| parsed(data, gone, parse).map(|made| (made, room))).await
}

/// Compiles what a request asks for, which may take seconds: those that only have a prompt to be read do not wait for that. A body's `room`
/// stays taken until it is done: any number may wait for their turn, and each holds its form and its prompts.
///
/// # Errors
/// What `work` says, or its turn did not come by the deadline.
pub async fn compile<T: Send + 'static>(
    app: &AppState,
    deadline: Deadline,
    room: Room,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = timeout_at(deadline.at(), app.intake.compilers.clone().acquire_owned()).await;
    let Ok(turn) = turn else { return Err(app.deadline_error(deadline.timeout)) };
    apart(app, deadline, (turn, room), |gone| still_wanted(gone).and_then(|()| work())).await
}

/// Runs `work` on a thread of its own, while `held` is taken, and tells it when nobody waits for it any more.
async fn apart<T: Send + 'static>(
    app: &AppState,
    deadline: Deadline,
    held: impl Send + 'static,
    work: impl FnOnce(&AtomicBool) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let gone = Arc::new(AtomicBool::new(false));
    let _waits = Waits(gone.clone());
    let working = tokio::task::spawn_blocking(move || {
        // it stays taken until the work is done, whether or not somebody still waits for it
        let _held = held;
        work(&gone)
    });
    match timeout_at(deadline.at(), working).await {
        Ok(joined) => joined.map_err(|e| ApiError::internal(format!("the request could not be read: {e}")))?,
        Err(_elapsed) => Err(app.deadline_error(deadline.timeout)),
    }
}

fn still_wanted(gone: &AtomicBool) -> Result<(), ApiError> {
    if gone.load(Ordering::Relaxed) { Err(ApiError::internal("nobody waits")) } else { Ok(()) }
}

fn parsed<T>(
    data: Vec<u8>,
    gone: &AtomicBool,
    parse: impl FnOnce(&Value) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    still_wanted(gone)?;
    let value: Value =
        serde_json::from_slice(&data).map_err(|e| ApiError::malformed(format!("the body is no JSON: {e}")))?;
    drop(data);
    still_wanted(gone)?;
    parse(&value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::{EngineHandle, Shared};
    use crate::metrics::Metrics;
    use crate::server::room::FIRST_BYTES;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn deadline() -> Deadline {
        Deadline { arrived: Instant::now().into_std(), timeout: 10 * PATIENCE }
    }

    fn body(first: usize, more: usize) -> Body {
        Body::from(vec![b' '; first + more])
    }

    #[tokio::test]
    async fn long_bodies_share_what_there_is_and_give_it_back() {
        let intake = Intake { bodies: Rooms::of(FIRST_PARTS_BYTES_MAX, 10), ..Intake::default() };
        let receive = |more| intake.receive(body(FIRST_BYTES, more), PATIENCE, deadline());
        let first = receive(7).await.unwrap();
        let error = receive(4).await.err().unwrap();
        assert_eq!((error.status.as_u16(), error.code, error.retry_after_s), (429, Some("bodies_busy"), Some(1)));
        assert!(receive(0).await.is_ok(), "a short one is read all the same");
        drop(first);
        assert_eq!(receive(4).await.unwrap().data.len(), FIRST_BYTES + 4);
        assert_eq!(intake.bodies.free(), [FIRST_PARTS_BYTES_MAX, 10]);
    }

    #[tokio::test]
    async fn short_bodies_are_bounded_too() {
        let intake = Intake { bodies: Rooms::of(10, BODIES_BYTES_MAX), ..Intake::default() };
        let _first = intake.receive(body(7, 0), PATIENCE, deadline()).await.unwrap();
        assert!(intake.receive(body(4, 0), PATIENCE, deadline()).await.is_err());
    }

    #[tokio::test]
    async fn a_body_that_would_become_too_much_is_refused_and_a_long_text_is_not() {
        let intake = Intake::default();
        let receive = |piece: &str| {
            let list = piece.repeat((16 << 20) / piece.len());
            intake.receive(Body::from(format!("{{\"prompt\": [{list}0]}}")), PATIENCE, deadline())
        };
        for rich in [r#"{"":0},"#, "[0],", "[],", "0,"] {
            let error = receive(rich).await.err().unwrap();
            assert_eq!((error.status.as_u16(), error.refusal), (413, Some("too_large")), "{rich}");
        }
        assert!(receive("12345, ").await.is_ok(), "two million token ids");
        let text = format!("{:?},", r#"{"":0},[0,0,0,[]]"#.repeat(1 << 19));
        assert!(receive(&text).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_becomes_much_waits_for_its_like_and_little_does_not() {
        let intake = Intake { parsed: Arc::new(Semaphore::new(3 * PARSED_FREE_BYTES)), ..Intake::default() };
        let weigh = |lists: usize| {
            let mut weight = Weight::default();
            weight.add("[".repeat(lists).as_bytes());
            weight
        };
        let much = weigh(2 * PARSED_FREE_BYTES / weigh(1).bytes());
        let first = intake.turn(much).await;
        assert!(timeout(PATIENCE, intake.turn(weigh(1))).await.is_ok());
        assert!(timeout(PATIENCE, intake.turn(much)).await.is_err());
        drop(first);
        assert!(timeout(PATIENCE, intake.turn(much)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_pauses_is_given_up_and_a_slow_one_only_at_the_deadline() {
        let intake = Intake::default();
        let drops = |every: Duration| {
            Body::from_stream(futures::stream::unfold((), move |()| async move {
                tokio::time::sleep(every).await;
                Some((Ok::<_, std::convert::Infallible>("x"), ()))
            }))
        };
        for (every, waited) in [(2 * PATIENCE, PATIENCE), (PATIENCE / 2, 10 * PATIENCE)] {
            let began = Instant::now();
            let error = intake.receive(drops(every), PATIENCE, deadline()).await.err().unwrap();
            assert_eq!((error.status.as_u16(), error.code), (408, Some("body_timeout")));
            assert_eq!(began.elapsed().as_secs(), waited.as_secs());
        }
    }

    fn app() -> AppState {
        let shared = Arc::new(Shared::new(Arc::new(Metrics::new("m").unwrap()), 1));
        let (inbox, _outbox) = std::sync::mpsc::sync_channel(1);
        AppState::new(EngineHandle::new(shared, inbox, 1), "m", false, PATIENCE)
    }

    #[tokio::test]
    async fn what_waits_to_be_compiled_keeps_the_room_of_its_body() {
        let app = app();
        let left = || FIRST_PARTS_BYTES_MAX - app.intake.bodies.free()[0];
        let (made, room) = read(&app, deadline(), Body::from(vec![b'1'; 9]), |value| Ok(value.clone())).await.unwrap();
        assert_eq!((made.as_u64(), left()), (Some(111_111_111), 9));
        let all = u32::try_from(COMPILERS_MAX).unwrap();
        let others = app.intake.compilers.clone().try_acquire_many_owned(all).unwrap();
        let bodies = app.intake.bodies.clone();
        let work = move || Ok(FIRST_PARTS_BYTES_MAX - bodies.free()[0]);
        let mut compiled = Box::pin(compile(&app, deadline(), room, work));
        assert!(futures::poll!(&mut compiled).is_pending());
        assert_eq!(left(), 9, "it waits for its turn");
        drop(others);
        assert_eq!((compiled.await, left()), (Ok(9), 0), "and until it is compiled");
    }

    /// A grammar may take seconds: prompts of others are read meanwhile.
    #[tokio::test]
    async fn who_compiles_takes_no_parser() {
        let app = app();
        let parsers = app.intake.parsers.clone();
        let _busy = parsers.try_acquire_many(u32::try_from(parsers.available_permits()).unwrap()).unwrap();
        let compiled =
            timeout(PATIENCE, compile(&app, deadline(), Room::default(), || Ok(7))).await.expect("it waits for nobody");
        assert_eq!(compiled, Ok(7));
    }

    #[test]
    fn nothing_is_done_for_those_who_have_gone() {
        let parse = |gone: bool| parsed(b"{}".to_vec(), &AtomicBool::new(gone), |_| Ok(()));
        assert!(parse(false).is_ok() && parse(true).is_err());
        let leaves = AtomicBool::new(true);
        assert!(parsed(Vec::new(), &leaves, |_| -> Result<(), ApiError> { unreachable!("not begun") }).is_err());
    }
}
