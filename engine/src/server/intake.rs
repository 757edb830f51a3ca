//! How bodies come in: of a bounded length, in bounded time, in bounded memory for all of them together, and only so many of them are
//! parsed and tokenized at once. What is refused before its body is read costs no more than its head.

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
use crate::server::{AppState, wire};

/// Largest body of a request.
const BODY_BYTES_MAX: usize = 32 << 20;
/// What all bodies that are being read or parsed may hold together.
const BODIES_BYTES_MAX: usize = 256 << 20;
/// Bodies that are parsed and tokenized at once, where there are fewer cores than this.
const PARSERS_MIN: usize = 2;
/// A client that is refused while it still sends reads the answer only if it is heard out: for so long, and for so many bytes.
const HEARD_OUT_MAX: Duration = Duration::from_secs(2);
const HEARD_OUT_BYTES_MAX: usize = 2 * BODY_BYTES_MAX;

/// What bounds the bodies under way.
#[derive(Debug)]
pub struct Intake {
    bytes: Arc<Semaphore>,
    parsers: Arc<Semaphore>,
}

impl Default for Intake {
    fn default() -> Self {
        let parsers = available_parallelism().map_or(PARSERS_MIN, NonZeroUsize::get).max(PARSERS_MIN);
        let bytes = Arc::new(Semaphore::new(BODIES_BYTES_MAX));
        Self { bytes, parsers: Arc::new(Semaphore::new(parsers)) }
    }
}

/// A body that is here, and its part of what bodies may hold.
pub struct Received {
    data: Vec<u8>,
    held: Option<OwnedSemaphorePermit>,
}

impl Intake {
    /// Reads a body. It must come without a pause longer than `patience`, and be here by the deadline.
    ///
    /// # Errors
    /// It is too large, too slow, broken off, or too many are read at once.
    pub async fn receive(&self, body: Body, patience: Duration, deadline: Deadline) -> Result<Received, ApiError> {
        let mut chunks = body.into_data_stream();
        let mut received = Received { data: Vec::new(), held: None };
        let until = deadline.at();
        loop {
            let next = timeout_at(until.min(Instant::now() + patience), chunks.next()).await;
            let late = |_| ApiError::body_late(deadline.arrived.elapsed().as_millis(), received.data.len());
            let Some(chunk) = next.map_err(late)? else { return Ok(received) };
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
        let room = u32::try_from(chunk.len()).ok().and_then(|n| self.bytes.clone().try_acquire_many_owned(n).ok());
        let room = room.ok_or_else(|| ApiError::bodies_busy(BODIES_BYTES_MAX))?;
        match &mut received.held {
            Some(held) => held.merge(room),
            None => received.held = Some(room),
        }
        received.data.extend_from_slice(chunk);
        Ok(())
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
fn hear_out(mut chunks: BodyDataStream) {
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

/// Reads a request on a thread that may take its time: a long prompt is tokenized for a while, a grammar compiled; other requests'
/// streams do not wait for that. One whose client has gone is not begun.
///
/// # Errors
/// The body is not what it must be, or its turn did not come by the deadline.
pub async fn read<T: Send + 'static>(
    app: &AppState,
    deadline: Deadline,
    body: Body,
    parse: impl FnOnce(&Value) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let received = app.intake.receive(body, app.client_patience, deadline).await?;
    let until = deadline.at();
    let turn = timeout_at(until, app.intake.parsers.clone().acquire_owned()).await;
    let Ok(turn) = turn else { return Err(app.deadline_error(deadline.timeout)) };
    let gone = Arc::new(AtomicBool::new(false));
    let _waits = Waits(gone.clone());
    let parsing = tokio::task::spawn_blocking(move || {
        // both stay taken until the work is done, whether or not somebody still waits for it
        let (_turn, Received { data, held: _held }) = (turn, received);
        parsed(data, &gone, parse)
    });
    match timeout_at(until, parsing).await {
        Ok(joined) => joined.map_err(|e| ApiError::internal(format!("the request could not be read: {e}")))?,
        Err(_elapsed) => Err(app.deadline_error(deadline.timeout)),
    }
}

fn parsed<T>(
    data: Vec<u8>,
    gone: &AtomicBool,
    parse: impl FnOnce(&Value) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let waited_for = || if gone.load(Ordering::Relaxed) { Err(ApiError::internal("nobody waits")) } else { Ok(()) };
    waited_for()?;
    let value: Value =
        serde_json::from_slice(&data).map_err(|e| ApiError::malformed(format!("the body is no JSON: {e}")))?;
    drop(data);
    waited_for()?;
    parse(&value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn deadline() -> Deadline {
        Deadline { arrived: Instant::now().into_std(), timeout: 10 * PATIENCE }
    }

    #[tokio::test]
    async fn bodies_share_what_there_is_and_give_it_back() {
        let intake = Intake { bytes: Arc::new(Semaphore::new(10)), ..Intake::default() };
        let receive = |body: &'static str| intake.receive(Body::from(body), PATIENCE, deadline());
        let first = receive("seven b").await.unwrap();
        let error = receive("four").await.err().unwrap();
        assert_eq!((error.status.as_u16(), error.code, error.retry_after_s), (429, Some("bodies_busy"), Some(1)));
        drop(first);
        assert_eq!(receive("four").await.unwrap().data, b"four");
        assert_eq!(intake.bytes.available_permits(), 10);
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

    #[test]
    fn nothing_is_done_for_those_who_have_gone() {
        let parse = |gone: bool| parsed(b"{}".to_vec(), &AtomicBool::new(gone), |_| Ok(()));
        assert!(parse(false).is_ok() && parse(true).is_err());
        let leaves = AtomicBool::new(true);
        assert!(parsed(Vec::new(), &leaves, |_| -> Result<(), ApiError> { unreachable!("not begun") }).is_err());
    }
}
