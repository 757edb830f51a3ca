//! The gate's books: what was forwarded, what came back, what was refused. No I/O, no clock: time comes as an argument.
//!
//! The counts are what the detector trusts most (V2), so they are kept by one rule each and checked below.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use heartbeat::counts::CountsWriter;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use vitals::observation::{GateObs, Ms};

use super::print::Print;
use super::suspects::{Memory, Poison, Suspect};
use super::work::Asked;
use super::{counts, owed};

/// A chunk that has waited longer than this for the client's socket makes the client "blocked" (V5).
const CLIENT_BLOCKED_MS: Ms = 1_000;

/// What the detector wants of the gate. Level-triggered: it is told anew at least every second, and at each change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Control {
    /// Refuse everything that is new.
    pub fenced: bool,
    /// What refused clients are told to wait, in seconds.
    pub retry_after_s: u32,
    /// Why, in words a client may read.
    pub reason: String,
    /// Refuse what is new, because this replica is about to leave.
    pub draining: bool,
    /// It is about to leave and still serves: every answer asks its client to close the connection, so that the next request goes to
    /// another replica.
    #[serde(default)]
    pub leaving: bool,
    /// Requests that are refused whatever else is (I7).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub poison: Vec<Poison>,
}

/// What the gate answers: its counters, and how requests ended (for people; the detector needs only `obs`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GateReply {
    #[serde(flatten)]
    pub obs: GateObs,
    /// Ended well: the whole answer was read from the engine.
    pub requests_completed: u64,
    /// Ended by the engine's fault: it died, broke off, was not there, or answered 5xx.
    pub requests_failed: u64,
    /// Not served, and nobody failed: the engine was full (429), the gate short of descriptors, or the request not to be forwarded.
    #[serde(default)]
    pub requests_declined: u64,
    /// Turned away by the gate, fenced or draining.
    pub requests_refused: u64,
    /// Turned away because there were as many in hand as may be.
    #[serde(default)]
    pub requests_crowded: u64,
    /// Refused because such requests were in flight at two stalls.
    #[serde(default)]
    pub requests_poisonous: u64,
    /// Requests on their way that are no work by any rule of ours, and no reading either: who leaves waits for them as well.
    #[serde(default)]
    pub passing: u32,
    /// Clients' connections. One that leaves has them end with what they wait for: when none is left, all that was answered is sent.
    #[serde(default)]
    pub connections: u32,
    /// Is the gate shut now?
    pub shut: bool,
    /// Is it shut because this replica is about to leave?
    #[serde(default)]
    pub draining: bool,
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Completed,
    /// The engine said that it cannot, or nobody listened.
    Failed,
    /// The engine was full, or the request never left the gate.
    Declined,
    /// The engine broke off, or failed over this very request: by an error in the middle of its answer, or by a 500. A front end that outlives
    /// its engine says so for everybody who was in the step that killed it.
    Broken,
    Abandoned,
}

/// What a gate has in its hands beside the work in its books.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// [`GateReply::passing`]
    Passing,
    /// [`GateReply::connections`]
    Connection,
}

impl GateReply {
    fn held(&mut self, what: Held) -> &mut u32 {
        match what {
            Held::Passing => &mut self.passing,
            Held::Connection => &mut self.connections,
        }
    }
}

/// One of those. Dropped, it is over.
#[derive(Debug)]
pub struct Holding(Arc<Ledger>, Held);

impl Drop for Holding {
    fn drop(&mut self) {
        let books = &mut *self.0.lock();
        let count = books.sums.held(self.1);
        *count = count.saturating_sub(1);
    }
}

/// Why a new request is turned away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub retry_after_s: u32,
    pub reason: String,
}

/// The books, shared by all connections. Locked for a few instructions at a time, never across an await.
#[derive(Debug)]
pub struct Ledger {
    books: Mutex<Books>,
    /// How often work came where none was.
    begun: watch::Sender<u64>,
    /// The word by which the agent's own question is known, which nobody else can guess; `None`: it is not.
    pub(super) own: Option<String>,
    /// Does the gate refuse because it is about to leave?
    pub(super) drains: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct Books {
    control: Control,
    next_id: u64,
    open: BTreeMap<u64, Open>,
    /// Counters of requests that ended, and the sums over all; kept at each entry, but for what only a look at each request tells.
    sums: GateReply,
    memory: Memory,
    /// Where the detector reads the sums without asking.
    counts: Option<CountsWriter>,
}

#[derive(Debug)]
struct Open {
    forwarded_ms: Ms,
    asked: Asked,
    answered: bool,
    /// When the last chunk of its answer was read from the engine.
    read_ms: Ms,
    /// Since when its client is waited for: it has not taken a chunk of the answer, or not sent all of the request.
    handed_ms: Option<Ms>,
}

impl Ledger {
    /// Empty books. `epoch` must differ from every earlier gate's; `control` is what the gate before this one was told last.
    pub fn new(epoch: u64, control: Control) -> Self {
        let obs = GateObs { epoch, unstreamed: Some(0), longest_prompt_owed: Some(0), ..GateObs::default() };
        let sums = GateReply { obs, ..GateReply::default() };
        let drains = watch::Sender::new(control.draining);
        let books = Mutex::new(Books { control, sums, ..Books::default() });
        Self { books, begun: watch::Sender::new(0), own: None, drains }
    }

    /// From now on the sums are also told here, at each entry.
    #[must_use]
    pub fn telling(self, counts: Option<CountsWriter>) -> Self {
        self.lock().counts = counts;
        self.lock().tell();
        self
    }

    /// Where whoever has our rights can read the sums.
    pub fn counts_path(&self) -> Option<PathBuf> {
        let fd = self.lock().counts.as_ref()?.file().as_raw_fd();
        Some(PathBuf::from(format!("/proc/{}/fd/{fd}", std::process::id())))
    }

    /// Tells when work comes to a gate that owed none.
    pub fn beginnings(&self) -> watch::Receiver<u64> {
        self.begun.subscribe()
    }

    /// May a new request pass? A refusal is counted.
    pub fn admit(&self) -> Result<(), Refusal> {
        let mut books = self.lock();
        let Some(refusal) = refusal(&books.control) else { return Ok(()) };
        books.sums.requests_refused += 1;
        Err(refusal)
    }

    /// A new request found as many in hand as may be.
    pub fn turns_away(&self) {
        self.lock().sums.requests_crowded += 1;
    }

    /// What a new request would be told, where the gate is shut.
    pub fn shut(&self) -> Option<Refusal> {
        refusal(&self.lock().control)
    }

    /// Is such a request refused (I7)? Counted where it is.
    pub fn is_poison(&self, print: Option<Print>) -> bool {
        let mut books = self.lock();
        let poison = print.is_some_and(|print| books.memory.refuses(print, &books.control.poison));
        books.sums.requests_poisonous += u64::from(poison);
        poison
    }

    /// Which requests could have stalled the engine, as of `now_ms`.
    pub fn suspects(&self, now_ms: Ms) -> Vec<Suspect> {
        let books = self.lock();
        let newest_first = books.open.values().rev().filter_map(|open| open.asked.print);
        books.memory.suspects(newest_first, books.sums.obs.last_delivery_ms, now_ms)
    }

    /// Shall clients close their connections after the next answer?
    pub fn leaving(&self) -> bool {
        self.lock().control.leaving
    }

    /// A request that is work goes to the engine now. Ends with exactly one [`Ledger::close`].
    pub fn open(&self, now_ms: Ms, asked: Asked) -> u64 {
        let mut books = self.lock();
        books.next_id += 1;
        let id = books.next_id;
        owed::begins(&mut books.sums.obs, &asked);
        books.open.insert(id, Open { forwarded_ms: now_ms, asked, answered: false, read_ms: now_ms, handed_ms: None });
        books.tell();
        if books.open.len() == 1 {
            self.begun.send_modify(|times| *times += 1);
        }
        id
    }

    /// A chunk of the answer that means something was read from the engine.
    pub fn delivered(&self, id: u64, now_ms: Ms, bytes: u64) {
        let mut guard = self.lock();
        let books = &mut *guard;
        if let Some(open) = books.open.get_mut(&id) {
            open.read_ms = now_ms;
            if !std::mem::replace(&mut open.answered, true) {
                let asked = open.asked;
                books.awaits_no_more(&asked);
            }
        }
        books.sums.obs.chunks_delivered += 1;
        books.sums.obs.bytes_delivered += bytes;
        books.sums.obs.last_delivery_ms = Some(now_ms);
        books.tell();
    }

    /// Its client is waited for since (`Some`): a chunk was given to its connection, or more of its body is to come; or is not (`None`).
    pub fn handed(&self, id: u64, at_ms: Option<Ms>) {
        if let Some(open) = self.lock().open.get_mut(&id) {
            open.handed_ms = at_ms;
        }
    }

    /// One more of these, until what is given back is dropped.
    pub fn hold(self: &Arc<Self>, what: Held) -> Holding {
        let books = &mut *self.lock();
        let count = books.sums.held(what);
        *count = count.saturating_add(1);
        Holding(Arc::clone(self), what)
    }

    /// All of its body has come: this is what it asks for.
    pub fn uploaded(&self, id: u64, whole: &Asked) {
        let mut guard = self.lock();
        let books = &mut *guard;
        let Some(open) = books.open.get_mut(&id).filter(|open| !open.answered) else { return };
        owed::grows(&mut books.sums.obs, &mut open.asked, whole);
        books.tell();
    }

    /// The request ended. A second close of the same request is ignored.
    pub fn close(&self, id: u64, now_ms: Ms, end: End) {
        let mut books = self.lock();
        let Some(open) = books.open.remove(&id) else { return };
        books.sums.obs.requests_done += 1;
        if !open.answered {
            books.awaits_no_more(&open.asked);
        }
        match end {
            End::Completed => books.sums.requests_completed += 1,
            End::Failed | End::Broken => books.sums.requests_failed += 1,
            End::Declined => books.sums.requests_declined += 1,
            End::Abandoned => books.sums.obs.requests_abandoned += 1,
        }
        books.tell();
        // A stream that ends with its connection ends so when the engine is killed, too: behind a fence no end is a success.
        let proves = open.answered && !books.control.fenced;
        let delivered_ms = books.sums.obs.last_delivery_ms;
        match (open.asked.print, end) {
            (Some(print), End::Completed) if proves => books.memory.answered(print, now_ms),
            (Some(print), End::Abandoned) => books.memory.broke(print, now_ms),
            (print, End::Broken) => books.memory.broke_off(print, open.forwarded_ms, delivered_ms, now_ms),
            _ => {}
        }
    }

    /// Takes the detector's will.
    pub fn set_control(&self, control: Control) {
        let mut books = self.lock();
        self.drains.send_if_modified(|drains| std::mem::replace(drains, control.draining) != control.draining);
        books.control = control;
    }

    /// The counters as of `now_ms`.
    pub fn reply(&self, now_ms: Ms) -> GateReply {
        let books = self.lock();
        let mut reply = books.sums.clone();
        let blocked = |open: &&Open| open.handed_ms.is_some_and(|at| now_ms.saturating_sub(at) > CLIENT_BLOCKED_MS);
        reply.obs.client_blocked = count(books.open.values().filter(blocked).count());
        let begun = books.open.values().filter(|open| open.answered && !blocked(open));
        reply.obs.quietest_begun_ms = begun.map(|open| open.read_ms).min();
        reply.shut = books.control.fenced || books.control.draining;
        reply.draining = books.control.draining;
        reply
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        // Books are valid after every statement, so a panic elsewhere does not spoil them.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Books {
    /// A request, which is not among those that await theirs any more, had its first byte or ended without one.
    fn awaits_no_more(&mut self, asked: &Asked) {
        let others = self.open.values().filter(|open| !open.answered).map(|open| &open.asked);
        owed::awaits_no_more(&mut self.sums.obs, asked, others);
    }

    /// To be called at the end of each entry.
    fn tell(&mut self) {
        self.sums.obs.in_flight = count(self.open.len());
        // numbers and times of requests grow together
        self.sums.obs.oldest_in_flight_ms = self.open.first_key_value().map(|(_, open)| open.forwarded_ms);
        if let Some(counts) = &mut self.counts {
            counts.store(&counts::words(&self.sums.obs));
        }
    }
}

/// What is said at a gate that is shut.
fn refusal(control: &Control) -> Option<Refusal> {
    let reason = match (control.fenced, control.draining) {
        (false, false) => return None,
        _ if !control.reason.is_empty() => control.reason.clone(),
        (true, _) => "this replica makes no progress and takes no new requests".to_owned(),
        (false, true) => "this replica is draining".to_owned(),
    };
    Some(Refusal { retry_after_s: control.retry_after_s.max(1), reason })
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
