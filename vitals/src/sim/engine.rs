//! The engine in virtual time: one step after another, batches of equal decode steps in one go.
//!
//! Physical consistency is the point: a frozen step freezes what only the step loop writes and nothing else; aborts are taken in
//! between two steps; gauges show the end of the last step.

use super::book::{At, Book, Request};
use super::chance::Chance;
use super::counters::{Counters, LeaseModel, Shown};
use super::live::Live;
use super::outputs::hand_out;
use super::profile::{EngineKind, Profile, SECOND, Us};
use super::step::{Luck, Mood, Step, Watch};

/// No healthy step is longer.
pub(super) const STEP_MAX: Us = 150 * SECOND;
/// Newer SGLang writes its gauges this often while it is idle; older ones leave them as the last step set them.
const IDLE_REFRESH: Us = 30 * SECOND;

/// One engine process with the requests that it, or its front end, holds.
#[derive(Debug, Clone)]
pub struct Engine {
    pub profile: Profile,
    pub live: Live,
    pub step: Option<Step>,
    /// No step begins before.
    pub free_at: Us,
    /// When the loop was last stopped from outside; until [`Self::free_at`] it says nothing.
    pub held_since: Us,
    pub(super) held_until: Us,
    pub mood: Mood,
    pub counters: Counters,
    pub shown: Shown,
    pub book: Book,
    pub lease: LeaseModel,
    /// Time spent in steps that have ended.
    pub busy_us: Us,
    pub now: Us,
    pub watch: Watch,
    luck: Luck,
    steps_ever: u64,
}

impl Engine {
    pub fn new(profile: Profile, now: Us, chance: Chance) -> Self {
        Self {
            live: Live::default(),
            step: None,
            free_at: now,
            held_since: now,
            held_until: now,
            mood: Mood::default(),
            counters: Counters::default(),
            shown: Shown::default(),
            book: Book::first(),
            lease: LeaseModel::warm(&profile),
            busy_us: 0,
            now,
            watch: Watch::new(profile.step_us, now),
            luck: Luck::new(chance),
            steps_ever: 0,
            profile,
        }
    }

    /// A new process of the same engine; the gate's books live on, its requests do not.
    pub fn restart(&mut self, ready_at: Us) {
        for request in std::mem::take(self.live.change()).iter().filter(|request| !request.gone) {
            self.book.close(request);
        }
        self.step = None;
        self.free_at = ready_at;
        self.held_until = 0;
        self.mood = Mood::default();
        self.counters = Counters::default();
        self.shown = Shown::default();
        self.lease = LeaseModel::warm(&self.profile);
        self.busy_us = 0;
    }

    /// Takes a request in through the gate.
    pub fn submit(&mut self, request: Request) {
        self.book.admit(&request);
        self.live.change().push(request);
    }

    /// Nothing runs from now until then: the step under way is longer by that. How much that adds to what held it already.
    pub fn hold(&mut self, now: Us, until: Us) -> Us {
        if now >= self.free_at {
            self.held_since = now;
        }
        // two holds at once last as long as their union
        let by = until.saturating_sub(now.max(self.held_until));
        self.held_until = self.held_until.max(until);
        if let Some(step) = &mut self.step {
            step.end = step.end.saturating_add(by);
        }
        self.free_at = self.free_at.max(until);
        for request in self.live.change() {
            if let At::Front(at) = request.at {
                request.at = At::Front(at.saturating_add(by));
            }
            if request.compiled_at > 0 {
                request.compiled_at = request.compiled_at.saturating_add(by);
            }
        }
        by
    }

    /// Freezes it for ever: in the step under way, or else in the next.
    pub fn doom(&mut self) {
        match &mut self.step {
            Some(step) => step.end = Us::MAX,
            None => self.mood.doomed = true,
        }
    }

    /// Runs until `until`; stops early where a long step begins or ends, or a silence ends, and says when it stopped.
    pub fn advance(&mut self, until: Us) -> Us {
        while self.now < until {
            match self.step {
                Some(step) if step.end <= until => {
                    self.now = self.now.max(step.end);
                    let long = self.watch.is_long(&step);
                    self.end_step(step);
                    if self.watch.hears(self.book.chunks + self.book.done, self.now) || long {
                        return self.now;
                    }
                }
                Some(_) => self.now = until,
                None => {
                    if !self.begin_step(until) {
                        continue;
                    }
                    if self.step.as_ref().is_some_and(|step| self.watch.is_long(step)) {
                        return self.now;
                    }
                }
            }
        }
        until
    }

    /// Begins a step, or jumps to the next moment at which one may begin. True where one has begun.
    fn begin_step(&mut self, until: Us) -> bool {
        if self.now < self.free_at {
            self.now = self.free_at.min(until);
            return false;
        }
        self.take_in();
        let plan = self.plan();
        let Some(step) = plan else {
            let next = self.live.iter().filter_map(Request::comes_at).filter(|at| *at > self.now).min();
            let refresh =
                if self.profile.idle_refresh { self.shown.refreshed.max(self.now - 1) + IDLE_REFRESH } else { until };
            self.now = next.unwrap_or(until).min(refresh).clamp(self.now + 1, until);
            return false;
        };
        if step.prefill == 0 && !self.mood.mute && step.end < Us::MAX && self.many(step, until) {
            return false;
        }
        self.step = Some(step);
        true
    }

    /// Aborts, arrivals, admission: the scheduler's work between two steps.
    fn take_in(&mut self) {
        if self.live.count().settled(self.now, self.mood.front_dead) {
            self.refresh(self.now >= self.shown.refreshed + IDLE_REFRESH && self.profile.idle_refresh);
            return;
        }
        let live = self.live.change();
        let before = live.len();
        live.retain(|request| !request.gone);
        if live.len() < before {
            // vLLM steps once more to tell of an abort, without work
            self.refresh(matches!(self.profile.kind, EngineKind::Vllm | EngineKind::Native));
        } else if self.now >= self.shown.refreshed + IDLE_REFRESH && self.profile.idle_refresh {
            self.refresh(true);
        }
        let now = self.now;
        for request in self.live.change() {
            if matches!(request.at, At::Front(at) if at <= now) && !self.mood.front_dead {
                request.at = At::Waiting;
                request.begins_to_compile(now);
            }
            request.compiled_at = Some(request.compiled_at).filter(|at| *at > now).unwrap_or(0);
        }
        // a loop that turns for nobody but those whose grammar is compiled says that they wait
        self.refresh(self.live.census().compiling > 0);
        if !self.mood.shut {
            self.admit();
        }
        self.live.block();
    }

    /// Those who wait begin, in their order, as far as there is room.
    fn admit(&mut self) {
        let census = self.live.census();
        let kind = self.profile.kind;
        let (mut running, mut kv) = (census.running, census.held_by(kind));
        let ready = |request: &&mut Request| request.at == At::Waiting && request.compiled_at == 0;
        for request in self.live.change().iter_mut().filter(ready) {
            let need = request.need_of(kind) + 64;
            if running >= self.profile.seqs_max || (running > 0 && kv + need > self.profile.kv_tokens) {
                break;
            }
            request.at = At::Prefill;
            self.counters.admitted += u64::from(request.context == request.prompt);
            running += 1;
            kv += need;
        }
    }

    /// The next step's content and length; `None` where there is nothing to do.
    fn plan(&mut self) -> Option<Step> {
        let census = self.live.count();
        let (prefill, prefill_us, units) =
            if census.running > census.decoding { self.plan_prefill() } else { (0, 0, 0) };
        let mut decoding = census.decoding;
        if self.profile.chunk.is_none() && prefill > 0 {
            decoding = 0;
        }
        if prefill == 0 && decoding == 0 {
            return None;
        }
        let launched = self.profile.step_us + self.profile.seq_us * u64::from(decoding);
        let (device, host) = if self.profile.on_gpu { (prefill_us, launched) } else { (0, launched + prefill_us) };
        let base = device + host.saturating_mul(self.mood.host_milli) / 1_000;
        // a silence longer than every rival's patience is outside of what anybody could call healthy
        let paced = (base.saturating_mul(self.mood.pace_milli) / 1_000).min(STEP_MAX);
        let length = self.luck.length(self.steps_ever, paced);
        let end =
            if std::mem::take(&mut self.mood.doomed) { Us::MAX } else { self.now.saturating_add(length.max(500)) };
        let lease_ms = self.lease.lease_ms(decoding, units);
        Some(Step { start: self.now, end, prefill, decoding, lease_ms, prefill_units: units })
    }

    /// Prompt tokens of the next step, their time, and their weight in the lease.
    fn plan_prefill(&self) -> (u32, Us, u64) {
        let mut budget = self.profile.chunk.unwrap_or(16_384);
        let (mut prefill, mut prefill_us, mut units) = (0, 0, 0);
        for request in self.live.iter().filter(|request| request.at == At::Prefill) {
            if budget == 0 {
                break;
            }
            let left = request.context - request.prefilled;
            // without chunks a prompt is one step, also where it is longer than the budget
            let tokens = if self.profile.chunk.is_some() { left.min(budget) } else { left };
            if self.profile.chunk.is_none() && prefill > 0 && left > budget {
                break;
            }
            prefill += tokens;
            budget = budget.saturating_sub(tokens);
            prefill_us += self.profile.prefill_us(tokens, request.prefilled);
            units += u64::from(tokens) * (u64::from(request.prefilled) + 512);
        }
        (prefill, prefill_us, units)
    }

    /// Runs several equal decode steps at once, where nothing can happen in between. False where it must be one by one.
    fn many(&mut self, step: Step, until: Us) -> bool {
        let length = step.end - step.start;
        if self.watch.is_long(&step) {
            return false;
        }
        let census = self.live.count();
        let ends = u64::from(census.left).saturating_sub(1);
        let mut steps = ((until - self.now) / length.max(1)).min(ends);
        if census.front < Us::MAX {
            steps = steps.min(census.front.saturating_sub(self.now) / length.max(1));
        }
        // all of a batch share one luck, and no late step hides in it
        steps = steps.min(self.luck.alike(self.steps_ever));
        let fits = census.kv + steps * u64::from(step.decoding) <= self.profile.kv_tokens;
        if steps < 2 || !fits || (census.waiting > 0 && self.mood.thrash) {
            return false;
        }
        let last = Step { start: step.end - length + (steps - 1) * length, end: self.now + steps * length, ..step };
        self.now = last.end;
        // nobody ends in between, and the cache has room
        self.hand_out_all(steps as u32, last.end);
        self.busy_us += (steps - 1) * length;
        self.finish_step(last, steps);
        self.watch.hears(self.book.chunks + self.book.done, self.now);
        true
    }

    fn end_step(&mut self, step: Step) {
        self.step = None;
        // decode first: who ends prefill in this step has its first token from it, not two
        if step.decoding > 0 {
            self.decode(step.end);
        }
        if step.prefill > 0 {
            self.prefill(step.end);
        }
        self.finish_step(step, 1);
    }

    /// The same walk over the requests as [`Self::plan`], now with effect.
    fn prefill(&mut self, at: Us) {
        let mut budget = self.profile.chunk.unwrap_or(16_384);
        let chunked = self.profile.chunk.is_some();
        let mut taken = 0;
        let lives = !self.mood.front_dead;
        for request in self.live.change() {
            if request.at != At::Prefill || budget == 0 {
                continue;
            }
            let left = request.context - request.prefilled;
            let tokens = if chunked { left.min(budget) } else { left };
            if !chunked && taken > 0 && left > budget {
                break;
            }
            taken += tokens;
            budget = budget.saturating_sub(tokens);
            request.prefilled += tokens;
            if request.prefilled < request.context {
                continue;
            }
            self.counters.prompt += u64::from(request.context);
            if self.mood.thrash {
                request.prefilled = 0;
                continue;
            }
            request.at = At::Decode;
            if !self.mood.mute {
                hand_out(request, 1, at, &mut self.counters, Some(&mut self.book).filter(|_| lives));
            }
        }
        self.drop_finished(at);
    }

    fn decode(&mut self, at: Us) {
        self.preempt();
        if self.mood.mute {
            return;
        }
        self.hand_out_all(1, at);
        self.drop_finished(at);
    }

    /// No room for the next tokens: the youngest starts over (recompute), as vLLM and SGLang do.
    fn preempt(&mut self) {
        let mut used = self.live.count().kv;
        while used + 64 > self.profile.kv_tokens {
            let live = self.live.change();
            let decoding = live.iter().filter(|request| request.at == At::Decode).count();
            let youngest = live.iter_mut().filter(|r| r.at == At::Decode).max_by_key(|request| request.forwarded);
            let Some(request) = youngest.filter(|_| decoding > 1) else { return };
            used -= u64::from(request.context + request.generated);
            request.at = At::Waiting;
            request.context = request.prompt + request.generated;
            request.prefilled = 0;
            self.counters.preempted += 1;
        }
    }

    fn finish_step(&mut self, step: Step, steps: u64) {
        self.counters.steps += steps;
        self.steps_ever += steps;
        self.busy_us += step.end - step.start;
        self.watch.ended(steps, step.end - step.start);
        self.lease.learn(step.decoding, step.prefill_units, step.end - step.start);
        let census = self.live.count();
        self.counters.after_step(self.profile.kind, step.prefill > 0, steps, &mut self.shown);
        self.shown.gauges(
            self.profile.kind,
            &self.counters,
            step.prefill > 0,
            (census.running, census.waiting, census.kv),
        );
    }

    /// Writes the gauges outside a step.
    fn refresh(&mut self, does: bool) {
        if does {
            let census = self.live.census();
            (self.shown.running, self.shown.waiting, self.shown.kv) = (census.running, census.waiting, census.kv);
            self.shown.refreshed = self.now;
        }
    }

    /// Running and waiting, as the scheduler has them.
    pub fn queue(&self) -> (u32, u32) {
        let census = self.live.census();
        (census.running, census.waiting)
    }

    /// Time in steps up to now, the one under way included.
    pub fn busy_until(&self, now: Us) -> Us {
        self.busy_us + self.step.map_or(0, |step| now.saturating_sub(step.start))
    }

    /// Is it a native engine?
    pub fn native(&self) -> bool {
        self.profile.kind == EngineKind::Native
    }
}
