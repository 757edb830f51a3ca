//! One request's way through its grammar. The engine thread holds it; the work is done by others.

use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use llguidance::toktrie::SimpleVob;
use llguidance::{CancellationHandle, Matcher};

use crate::grammar::compile::Place;
use crate::grammar::workers::{Pace, Workers};
use crate::grammar::{ConstraintError, GrammarError};

/// A mask that takes longer is given up; the library's fuel ends nearly all of them far earlier.
pub const MASK_TIME_MAX: Duration = Duration::from_secs(2);
/// The same where every sequence waits for a mask: then no step begins, and whoever watches takes 600 ms of that for a stall.
pub const MASK_TIME_MAX_ALONE: Duration = Duration::from_millis(500);
/// Most masks take well under a millisecond; a grammar whose last one took longer than this computes the next among its like.
const QUICK_MAX: Duration = Duration::from_millis(5);

/// Which tokens may come next.
pub struct Mask(SimpleVob);

impl Mask {
    pub fn allows(&self, token: u32) -> bool {
        // ids beyond the vocabulary are padding of the model's last layer
        (token as usize) < self.0.len() && self.0.is_allowed(token)
    }
}

/// A compiled grammar where every request that asks for it begins.
pub(super) struct Start {
    matcher: Matcher,
    mask: Arc<Mask>,
}

impl Start {
    /// # Errors
    /// What is wrong with the grammar.
    pub fn new(matcher: Matcher) -> Result<Self, String> {
        let mut matcher = matcher.into_cancellable();
        match matcher.compute_mask_or_eos() {
            Ok(mask) => Ok(Self { matcher, mask: Arc::new(Mask(mask)) }),
            Err(error) => Err(brief(&error.to_string())),
        }
    }
}

/// What a worker gives back.
struct Turn {
    matcher: Box<Matcher>,
    mask: Result<SimpleVob, String>,
    took: Duration,
}

/// A request's place in its grammar.
pub struct Constraint {
    start: Arc<Start>,
    place: Place,
    workers: Workers,
    pace: Pace,
    now: Now,
}

enum Now {
    Here {
        matcher: Box<Matcher>,
        mask: Arc<Mask>,
    },
    /// `since`: when a worker took it up; those who wait for a worker are not slow.
    Computing {
        turn: Receiver<Turn>,
        cancel: Option<CancellationHandle>,
        since: Arc<OnceLock<Instant>>,
    },
    Failed(ConstraintError),
}

impl Constraint {
    pub(super) fn new(start: Arc<Start>, place: Place, workers: Workers) -> Self {
        let matcher = Box::new(start.matcher.deep_clone());
        let now = Now::Here { matcher, mask: start.mask.clone() };
        Self { start, place, workers, pace: Pace::Quick, now }
    }

    /// One more, for another output of the same request; it stands where this one began.
    ///
    /// # Errors
    /// Too many requests follow a grammar.
    pub fn another(&self) -> Result<Self, GrammarError> {
        Ok(Self::new(self.start.clone(), self.place.another()?, self.workers.clone()))
    }

    /// The tokens that may come next.
    ///
    /// # Errors
    /// The grammar failed, or the mask is still being computed, which [`is_ready`](Self::is_ready) tells.
    pub fn mask(&self) -> Result<&Mask, ConstraintError> {
        match &self.now {
            Now::Here { mask, .. } => Ok(mask),
            Now::Failed(error) => Err(error.clone()),
            Now::Computing { .. } => Err(ConstraintError::TooSlow(0)),
        }
    }

    /// Is the mask there? Waits for it until `until` at most, and gives up one that is computed for longer than `time_max`.
    ///
    /// # Errors
    /// The grammar failed, or its time is up.
    pub fn is_ready(&mut self, until: Instant, time_max: Duration) -> Result<bool, ConstraintError> {
        let Now::Computing { turn, cancel, since } = &self.now else { return self.mask().map(|_| true) };
        let slow = || since.get().is_some_and(|since| since.elapsed() >= time_max);
        self.now = match turn.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(Turn { matcher, mask: Ok(mask), took }) => {
                self.pace = if took <= QUICK_MAX { Pace::Quick } else { Pace::Slow };
                Now::Here { matcher, mask: Arc::new(Mask(mask)) }
            }
            Ok(Turn { mask: Err(error), .. }) => Now::Failed(ConstraintError::Failed(brief(&error))),
            Err(RecvTimeoutError::Timeout) if !slow() => return Ok(false),
            Err(RecvTimeoutError::Timeout) => {
                cancel.iter().for_each(CancellationHandle::cancel);
                Now::Failed(ConstraintError::TooSlow(time_max.as_millis()))
            }
            Err(RecvTimeoutError::Disconnected) => Now::Failed(ConstraintError::Gone),
        };
        self.mask().map(|_| true)
    }

    /// The output goes on with this token; the next mask is computed while the caller does something else.
    ///
    /// # Errors
    /// The grammar failed before, or nobody computes any more.
    pub fn advance(&mut self, token: u32) -> Result<(), ConstraintError> {
        let (reply, turn) = sync_channel(1);
        // what stands here if the job cannot be handed over
        let before = std::mem::replace(&mut self.now, Now::Failed(ConstraintError::Gone));
        let Now::Here { mut matcher, .. } = before else {
            self.now = before;
            return self.mask().map(|_| ());
        };
        let cancel = matcher.cancellation_handle();
        let since = Arc::new(OnceLock::new());
        let begun = since.clone();
        let job = move || {
            #[allow(clippy::disallowed_methods, reason = "it asks the clock")]
            let began = *begun.get_or_init(Instant::now);
            let mask = matcher.consume_token(token).and_then(|()| matcher.compute_mask_or_eos());
            let mask = mask.map_err(|error| error.to_string());
            // The request may have ended meanwhile.
            drop(reply.try_send(Turn { matcher, mask, took: began.elapsed() }));
        };
        if !self.workers.submit(self.pace, Box::new(job)) {
            return Err(ConstraintError::Gone);
        }
        self.now = Now::Computing { turn, cancel, since };
        Ok(())
    }
}

#[cfg(test)]
impl Constraint {
    /// A worker has its next mask since then, and does not come to an end.
    pub fn computing(mut self, since: Instant) -> Self {
        let (forever, turn) = sync_channel(1);
        std::mem::forget(forever);
        self.now = Now::Computing { turn, cancel: None, since: Arc::new(since.into()) };
        self
    }
}

impl Drop for Constraint {
    fn drop(&mut self) {
        if let Now::Computing { cancel: Some(cancel), .. } = &self.now {
            cancel.cancel();
        }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let now = match &self.now {
            Now::Here { .. } => "ready".to_owned(),
            Now::Computing { .. } => "computing".to_owned(),
            Now::Failed(error) => error.to_string(),
        };
        write!(f, "Constraint({now})")
    }
}

/// The library's message without its trailer, and not longer than a client wants to read.
fn brief(message: &str) -> String {
    let message = message.trim_end().trim_end_matches("<non-verbose/>").trim_end();
    match message.char_indices().nth(500) {
        Some((cut, _)) => format!("{}…", &message[..cut]),
        None => message.to_owned(),
    }
}
