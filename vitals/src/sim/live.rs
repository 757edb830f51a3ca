//! The requests that an engine, or its front end, holds, and what they come to. Most steps are equal decode steps in which nobody comes,
//! goes or ends: what they come to is then carried on instead of counted anew, which is what makes the simulation quick.

use std::ops::Deref;

use super::book::{At, Request};
use super::profile::{EngineKind, Us};

/// What the requests come to.
#[derive(Debug, Clone, Copy)]
pub struct Census {
    pub running: u32,
    pub waiting: u32,
    pub decoding: u32,
    /// KV tokens in use, and those that running requests hold room for.
    pub kv: u64,
    pub reserved: u64,
    /// Room for the whole answers of those who run (TGI holds it from the start, and preempts nobody).
    pub whole: u64,
    /// The fewest tokens that are still to come to one who decodes.
    pub left: u32,
    /// When the front end hands over the next, or the next grammar is compiled; [`Us::MAX`]: there is none.
    pub front: Us,
    /// Of those that wait, those whose grammar is compiled.
    pub compiling: u32,
    /// Somebody has left whom the scheduler has not yet dropped.
    pub gone: bool,
    /// Who waits was looked at, and there was no room. Room comes with a change alone.
    pub blocked: bool,
}

impl Census {
    fn of(requests: &[Request]) -> Self {
        let mut all = Self {
            running: 0,
            waiting: 0,
            decoding: 0,
            kv: 0,
            reserved: 0,
            whole: 0,
            left: u32::MAX,
            front: Us::MAX,
            compiling: 0,
            gone: false,
            blocked: false,
        };
        for request in requests {
            all.gone |= request.gone;
            all.front = all.front.min(request.comes_at().unwrap_or(Us::MAX));
            match request.at {
                At::Prefill | At::Decode => {
                    all.running += 1;
                    all.kv += u64::from(request.context.min(request.prefilled) + request.generated);
                    all.reserved += u64::from(request.context + request.generated);
                    all.whole += u64::from(request.context + request.out);
                    if request.at == At::Decode {
                        all.decoding += 1;
                        all.left = all.left.min(request.out - request.generated);
                    }
                }
                At::Waiting => {
                    all.waiting += 1;
                    all.compiling += u32::from(request.compiled_at > 0);
                }
                At::Front(_) | At::Held => {}
            }
        }
        all
    }

    /// Room that is taken, as the scheduler of such an engine counts it.
    pub(super) fn held_by(&self, kind: EngineKind) -> u64 {
        if kind == EngineKind::Tgi { self.whole } else { self.reserved }
    }

    /// Is there nothing to take in at this time?
    pub fn settled(&self, now: Us, front_dead: bool) -> bool {
        !self.gone && (front_dead || self.front > now) && (self.waiting == 0 || self.blocked)
    }
}

impl Request {
    /// The room that the scheduler of such an engine asks for it.
    pub(super) fn need_of(&self, kind: EngineKind) -> u64 {
        let answer = if kind == EngineKind::Tgi { self.out } else { 0 };
        u64::from(self.context) + u64::from(answer)
    }
}

/// The requests; read like a slice.
#[derive(Debug, Clone, Default)]
pub struct Live {
    requests: Vec<Request>,
    known: Option<Census>,
}

impl Deref for Live {
    type Target = [Request];

    fn deref(&self) -> &[Request] {
        &self.requests
    }
}

impl Live {
    /// To change them in any way.
    pub fn change(&mut self) -> &mut Vec<Request> {
        self.known = None;
        &mut self.requests
    }

    /// What they come to.
    pub fn census(&self) -> Census {
        self.known.unwrap_or_else(|| Census::of(&self.requests))
    }

    /// The same, kept until the next change.
    pub fn count(&mut self) -> Census {
        *self.known.get_or_insert_with(|| Census::of(&self.requests))
    }

    /// There is no room for who waits.
    pub fn block(&mut self) {
        self.count();
        if let Some(known) = &mut self.known {
            known.blocked = true;
        }
    }

    /// Everybody who decodes, about to get so many tokens each.
    pub fn decoding(&mut self, tokens: u32) -> impl Iterator<Item = &mut Request> {
        self.known = self.known.filter(|known| known.left >= tokens).map(|known| {
            let more = u64::from(known.decoding) * u64::from(tokens);
            Census { kv: known.kv + more, reserved: known.reserved + more, left: known.left - tokens, ..known }
        });
        self.requests.iter_mut().filter(|request| request.at == At::Decode)
    }
}
