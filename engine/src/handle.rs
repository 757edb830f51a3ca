//! The way in and out of the engine thread. Nobody waits here for that thread: requests are handed over without blocking,
//! results come through bounded queues that the thread never waits for (E7), and dropping a stream cancels its request.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    mpsc::{SyncSender, TrySendError},
};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::sync::{mpsc, watch};

use crate::beat::{BeatBoard, Health, judge};
use crate::codec::TextCodec;
use crate::grammar::{Constraint, Grammars};
use crate::metrics::Metrics;
use crate::model::{ModelInfo, Pulse};
use crate::sampling::{SamplingParams, TokenLogprob};
use crate::scheduler::{Limits, NewSeq, Refusal, ReqId, check_fit};
use crate::stuck::Stuck;

/// One request for output.
#[derive(Debug, Default)]
pub struct GenerateRequest {
    pub prompt: Arc<[u32]>,
    /// 0: evaluate the prompt only.
    pub max_new_tokens: usize,
    pub ignore_eos: bool,
    pub stop_token_ids: Arc<[u32]>,
    pub sampling: SamplingParams,
    /// The output follows this grammar.
    pub constraint: Option<Constraint>,
    /// Logprobs of the prompt's own tokens are wanted.
    pub prompt_logprobs: bool,
    /// Lower goes first.
    pub priority: i32,
    /// Nobody waits after this, on the monotonic clock.
    pub deadline_ns: Option<u64>,
}

/// What a request's stream carries, before its end.
#[derive(Debug, Clone, PartialEq)]
pub enum TokenEvent {
    /// Logprobs of prompt tokens, in order, from the second token on.
    Prompt(Vec<TokenLogprob>),
    /// A new token. `stop`: it is a stop token, which ends the output and is no part of its text, unless that is asked for.
    Token { id: u32, logprob: Option<TokenLogprob>, stop: bool },
}

/// How an accepted request ended: each has exactly one of these (EP2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    Stop,
    Length,
    /// Its stream was dropped.
    Cancelled,
    /// Its reader was too slow and its queue full.
    Cut,
    /// This request failed, alone (EP5).
    Failed(String),
    /// By what it asked for itself no token was allowed to come.
    Barred(String),
    /// Its deadline could not be met; it was turned away with this reason before it cost anybody a step.
    Late(String),
    /// Its deadline passed while it ran.
    Expired,
    /// The engine stopped before it was done.
    Shutdown,
}

/// Why a request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SubmitError {
    #[error("the engine is not ready")]
    NotReady,
    #[error("{0} requests are in the engine already")]
    Busy(usize),
    #[error("{asked} outputs are asked for at once; this engine takes {most}, running and waiting")]
    TooMany { asked: usize, most: usize },
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the engine has stopped")]
    Stopped,
}

/// What is known once the engine is ready.
#[derive(Clone)]
pub struct Ready {
    pub info: ModelInfo,
    pub limits: Limits,
    pub codec: Arc<dyn TextCodec>,
    /// What compiles grammars for this model.
    pub grammars: Arc<Grammars>,
}

/// State that the engine thread and its front end share; atomics and write-once cells alone, so no side can block the other.
pub struct Shared {
    pub board: Arc<BeatBoard>,
    pub ready: OnceLock<Ready>,
    pub metrics: Arc<Metrics>,
    /// No new requests; the engine says so on its page.
    pub draining: AtomicBool,
    /// The engine thread ends at its next turn.
    pub stop: AtomicBool,
    /// When this was made, on the monotonic clock.
    pub started_ns: u64,
    /// The engine thread, as `/proc` knows it; 0 before it runs.
    pub loop_tid: AtomicU64,
    /// Moves while the engine thread waits for its device and looks whether it is done.
    pub pulse: OnceLock<Pulse>,
    stuck: watch::Sender<Option<Arc<Stuck>>>,
    given_up_at: OnceLock<Instant>,
    slots: Arc<AtomicUsize>,
    slots_max: usize,
    next_id: AtomicU64,
}

impl Shared {
    /// `slots_max`: requests that may be in the engine at once, running and waiting.
    pub fn new(metrics: Arc<Metrics>, slots_max: usize) -> Self {
        Self {
            board: Arc::default(),
            ready: OnceLock::new(),
            metrics,
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            started_ns: heartbeat::monotonic_ns(),
            loop_tid: AtomicU64::new(0),
            pulse: OnceLock::new(),
            given_up_at: OnceLock::new(),
            stuck: watch::Sender::new(None),
            slots: Arc::default(),
            slots_max,
            next_id: AtomicU64::new(1),
        }
    }

    /// The engine gives up: every request is answered, and the server ends. The first reason stays.
    pub fn give_up(&self, stuck: Stuck) {
        #[allow(clippy::disallowed_methods, reason = "it asks the clock")]
        self.given_up_at.get_or_init(Instant::now);
        self.stuck.send_if_modified(|place| {
            let first = place.is_none();
            if first {
                *place = Some(Arc::new(stuck));
            }
            first
        });
    }

    /// Why the engine gave up, as soon as it does.
    pub fn given_up(&self) -> impl Future<Output = Arc<Stuck>> + Send + use<> {
        let mut told = self.stuck.subscribe();
        async move {
            loop {
                if let Some(stuck) = told.borrow_and_update().clone() {
                    return stuck;
                }
                if told.changed().await.is_err() {
                    // nobody is left who could give up
                    std::future::pending::<()>().await;
                }
            }
        }
    }

    /// How long ago it gave up, if it has.
    pub fn since_given_up(&self) -> Option<Duration> {
        self.given_up_at.get().map(Instant::elapsed)
    }

    /// What the last beat says (E6); does not need the engine thread.
    pub fn health(&self) -> Health {
        if let Some(stuck) = &*self.stuck.borrow() {
            return Health::Stalled(stuck.to_string());
        }
        judge(self.board.load().as_ref(), heartbeat::monotonic_ns())
    }

    /// Requests that are in the engine, running and waiting.
    pub fn in_flight(&self) -> usize {
        self.slots.load(Ordering::Relaxed)
    }
}

/// A place in the engine; given back when dropped.
#[derive(Debug)]
pub struct Slot(Arc<AtomicUsize>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the two ends of a request share.
#[derive(Debug, Default)]
pub struct Ticket {
    /// The reader is gone.
    pub cancelled: AtomicBool,
    /// The reader has all it wants (a stop string came): its leaving is no abort.
    pub satisfied: AtomicBool,
    pub end: OnceLock<End>,
}

impl Ticket {
    /// How a request ends whose reader left.
    pub fn end_of_reader(&self) -> End {
        if self.satisfied.load(Ordering::Relaxed) { End::Stop } else { End::Cancelled }
    }
}

/// A request on its way to the engine thread.
pub struct Submission {
    pub seq: NewSeq,
    pub request: GenerateRequest,
    pub events: mpsc::Sender<TokenEvent>,
    pub ticket: Arc<Ticket>,
    pub slot: Slot,
}

/// The front end's handle on the engine.
#[derive(Clone)]
pub struct EngineHandle {
    pub shared: Arc<Shared>,
    inbox: SyncSender<Submission>,
    client_queue: usize,
}

impl EngineHandle {
    /// `client_queue`: events that a request may have unread before it is cut.
    pub fn new(shared: Arc<Shared>, inbox: SyncSender<Submission>, client_queue: usize) -> Self {
        Self { shared, inbox, client_queue: client_queue.max(1) }
    }

    /// Hands requests to the engine: all of them or none. Never blocks.
    ///
    /// # Errors
    /// [`SubmitError`]: not ready, too many requests in the engine, or some that can never fit.
    pub fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Vec<RequestStream>, SubmitError> {
        let ready = self.shared.ready.get().ok_or(SubmitError::NotReady)?;
        let mut stops = Stops::new(&ready.info.eos_token_ids);
        let seqs: Vec<_> = requests.iter().map(|r| self.sequence(r, &mut stops)).collect();
        seqs.iter().try_for_each(|seq| check_fit(seq, &ready.limits))?;
        if requests.len() > self.shared.slots_max {
            return Err(SubmitError::TooMany { asked: requests.len(), most: self.shared.slots_max });
        }
        let slots = requests.iter().map(|_| self.slot()).collect::<Result<Vec<_>, _>>()?;
        let with_seq = requests.into_iter().zip(seqs);
        with_seq.zip(slots).map(|((request, seq), slot)| self.hand_over(request, seq, slot)).collect()
    }

    /// Is there a place for a request at all? Asked before anything is done for it.
    ///
    /// # Errors
    /// [`SubmitError::Busy`].
    pub fn check_room(&self) -> Result<(), SubmitError> {
        let taken = self.shared.in_flight();
        if taken < self.shared.slots_max { Ok(()) } else { Err(SubmitError::Busy(taken)) }
    }

    fn sequence(&self, request: &GenerateRequest, stops: &mut Stops<'_>) -> NewSeq {
        let id: ReqId = self.shared.next_id.fetch_add(1, Ordering::Relaxed);
        let mut seq = NewSeq::new(id, request.prompt.clone(), request.max_new_tokens);
        seq.prompt_rows = request.prompt_logprobs;
        (seq.priority, seq.deadline_ns) = (request.priority, request.deadline_ns);
        seq.stop_token_ids = stops.of(request);
        seq
    }

    fn slot(&self) -> Result<Slot, SubmitError> {
        let max = self.shared.slots_max;
        let taken =
            self.shared.slots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < max).then_some(n + 1));
        taken.map(|_| Slot(self.shared.slots.clone())).map_err(SubmitError::Busy)
    }

    fn hand_over(&self, request: GenerateRequest, seq: NewSeq, slot: Slot) -> Result<RequestStream, SubmitError> {
        let (events, receiver) = mpsc::channel(self.client_queue);
        let ticket = Arc::new(Ticket::default());
        let submission = Submission { seq, request, events, ticket: ticket.clone(), slot };
        match self.inbox.try_send(submission) {
            Ok(()) => Ok(RequestStream { receiver, ticket, given_up: self.shared.stuck.subscribe() }),
            // The inbox has a place for every slot; a full one means slots were lost, which `Busy` describes well enough.
            Err(TrySendError::Full(_)) => Err(SubmitError::Busy(self.shared.in_flight())),
            Err(TrySendError::Disconnected(_)) => Err(SubmitError::Stopped),
        }
    }
}

type Ids = Arc<[u32]>;

/// What ends the outputs of one request: made once for those that have the same.
struct Stops<'a> {
    eos: &'a [u32],
    /// A request's own ids, and these with the model's.
    last: Option<(Ids, Ids)>,
}

impl<'a> Stops<'a> {
    fn new(eos: &'a [u32]) -> Self {
        Self { eos, last: None }
    }

    fn of(&mut self, request: &GenerateRequest) -> Ids {
        let own = &request.stop_token_ids;
        if request.ignore_eos {
            return own.clone();
        }
        match &self.last {
            Some((same, all)) if Arc::ptr_eq(same, own) => all.clone(),
            _ => {
                let all: Ids = own.iter().chain(self.eos).copied().collect();
                self.last = Some((own.clone(), all.clone()));
                all
            }
        }
    }
}

/// One request's results. Dropping it cancels the request; its blocks return at the engine's next turn.
#[derive(Debug)]
pub struct RequestStream {
    receiver: mpsc::Receiver<TokenEvent>,
    ticket: Arc<Ticket>,
    given_up: watch::Receiver<Option<Arc<Stuck>>>,
}

impl RequestStream {
    /// The reader has all it wants; the request ends as stopped, not as cancelled.
    pub fn satisfied(&self) {
        self.ticket.satisfied.store(true, Ordering::Relaxed);
        self.ticket.cancelled.store(true, Ordering::Relaxed);
    }

    /// The next event, or how the request ended. The caller brings the deadline.
    pub async fn next(&mut self) -> Result<TokenEvent, End> {
        let event = tokio::select! {
            biased;
            event = self.receiver.recv() => event,
            // the thread itself may be stuck, and this stream in its hands
            () = async { drop(self.given_up.wait_for(Option::is_some).await) } => None,
        };
        // The thread writes the end before it drops its sender; without one it died, or gave up.
        event.ok_or_else(|| self.ticket.end.get().cloned().unwrap_or(End::Shutdown))
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        self.ticket.cancelled.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_ids_of_one_request_are_put_together_once() {
        let own: Arc<[u32]> = [9].into();
        let request = |own: &Arc<[u32]>, ignore_eos| GenerateRequest {
            stop_token_ids: own.clone(),
            ignore_eos,
            ..GenerateRequest::default()
        };
        let mut stops = Stops::new(&[1, 2]);
        let (first, second) = (stops.of(&request(&own, false)), stops.of(&request(&own, false)));
        assert!(*first == [9, 1, 2] && Arc::ptr_eq(&first, &second));
        assert!(Arc::ptr_eq(&stops.of(&request(&own, true)), &own));
        assert_eq!(*stops.of(&request(&[3].into(), false)), [3, 1, 2]);
    }
}
