//! Requests as clients and gate see them, and the gate's books (the same counts as `agent/src/gate/ledger.rs` keeps).

use super::profile::{SECOND, Us};
use super::waits::Wait;
use crate::observation::{GateObs, Ms};

/// Where a request is in the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// In the front end, which hands it over at this time.
    Front(Us),
    Waiting,
    Prefill,
    Decode,
    /// Done in the engine; the front end has not answered.
    Held,
}

/// One request.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    pub at: At,
    pub prompt: u32,
    /// Tokens to prefill (a preempted one prefills what it had generated as well), and how many are.
    pub context: u32,
    pub prefilled: u32,
    pub out: u32,
    pub generated: u32,
    pub stream: bool,
    pub forwarded: Us,
    pub answered: bool,
    /// The client gives up then.
    pub leaves: Us,
    /// It has left: the engine drops it at its next step.
    pub gone: bool,
    /// The client does not read before then: the gate holds a chunk.
    pub unread_until: Us,
    /// When its last byte was read.
    pub read_at: Us,
    pub wait: Wait,
    /// Its grammar is compiled then; 0: there is none.
    pub compiled_at: Us,
}

/// The gate's counters.
#[derive(Debug, Clone, Default)]
pub struct Book {
    pub epoch: u64,
    pub in_flight: u32,
    pub awaiting: u32,
    pub prompt_owed: u64,
    pub prompt_taken: u64,
    pub chunks: u64,
    pub done: u64,
    pub abandoned: u64,
    pub last_delivery: Option<Us>,
    /// A saturated event loop hands chunks out in lumps this far apart.
    pub lump: Us,
    held_chunks: u64,
    held_last: Us,
    lump_at: Us,
}

impl Book {
    /// The first gate's books.
    pub fn first() -> Self {
        Self { epoch: 1, ..Self::default() }
    }

    pub fn admit(&mut self, request: &Request) {
        self.in_flight += 1;
        self.awaiting += 1;
        self.prompt_owed += u64::from(request.prompt);
        self.prompt_taken += u64::from(request.prompt);
    }

    /// Chunks of an answer were read from the engine.
    pub fn deliver(&mut self, request: &mut Request, chunks: u64, at: Us) {
        self.answer(request);
        request.read_at = at;
        if self.lump > 0 {
            self.held_chunks += chunks;
            self.held_last = at;
            return;
        }
        self.chunks += chunks;
        self.last_delivery = Some(self.last_delivery.map_or(at, |last| last.max(at)));
    }

    fn answer(&mut self, request: &mut Request) {
        if !request.answered {
            request.answered = true;
            self.awaiting = self.awaiting.saturating_sub(1);
            self.prompt_owed = self.prompt_owed.saturating_sub(u64::from(request.prompt));
        }
    }

    /// It ended, by whatever end.
    pub fn close(&mut self, request: &Request) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.done += 1;
        if !request.answered {
            self.awaiting = self.awaiting.saturating_sub(1);
            self.prompt_owed = self.prompt_owed.saturating_sub(u64::from(request.prompt));
        }
    }

    /// Its client left.
    pub fn abandon(&mut self, request: &Request) {
        self.close(request);
        self.abandoned += 1;
    }

    /// Lets out what the event loop held, when its time has come.
    pub fn pass_lumps(&mut self, now: Us) {
        if self.held_chunks > 0 && (self.lump == 0 || now >= self.lump_at) {
            self.chunks += std::mem::take(&mut self.held_chunks);
            self.last_delivery = Some(now.min(self.held_last.max(self.lump_at)).max(self.last_delivery.unwrap_or(0)));
            self.lump_at = now + self.lump;
        }
    }

    /// A new gate: its counters begin anew and its connections are gone.
    pub fn restart(&mut self) {
        *self = Self { epoch: self.epoch + 1, ..Self::default() };
    }

    /// What the detector gets.
    pub fn observe(&self, live: &[Request], now: Us, into: &mut GateObs) {
        let (mut blocked, mut unstreamed, mut longest, mut oldest, mut quietest) = (0, 0, 0, Us::MAX, Us::MAX);
        for request in live.iter().filter(|request| !request.gone) {
            oldest = oldest.min(request.forwarded);
            if !request.answered {
                unstreamed += u32::from(!request.stream);
                longest = longest.max(request.prompt);
            } else if request.unread_until <= now {
                quietest = quietest.min(request.read_at);
            } else if request.unread_until > now + SECOND {
                blocked += 1;
            }
        }
        let ms = |at: Us| -> Option<Ms> { (at < Us::MAX).then_some(at / 1_000) };
        *into = GateObs {
            epoch: self.epoch,
            in_flight: self.in_flight,
            awaiting_first_byte: self.awaiting,
            prompt_tokens_owed: self.prompt_owed,
            prompt_tokens_taken: self.prompt_taken,
            chunks_delivered: self.chunks,
            bytes_delivered: self.chunks * 180,
            requests_done: self.done,
            requests_abandoned: self.abandoned,
            client_blocked: blocked,
            oldest_in_flight_ms: ms(oldest),
            unstreamed: Some(unstreamed),
            longest_prompt_owed: Some(longest.into()),
            quietest_begun_ms: ms(quietest),
            last_delivery_ms: self.last_delivery.map(|at| -> Ms { at / 1_000 }),
        };
    }
}
