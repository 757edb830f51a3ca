//! One turn of the engine: plan, run, sample, deliver, beat.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use heartbeat::monotonic_ns;
use heartbeat::page::StepOutcome;
use tokio::sync::mpsc::error::TrySendError;

use crate::beat::{Heart, StepShape, Tally};
use crate::core::alone;
use crate::core::sample::{Miss, Next, Rows, sample_row};
use crate::fault::Faults;
use crate::grammar::MASK_TIME_MAX_ALONE;
use crate::handle::{End, Shared, Submission, TokenEvent};
use crate::model::{LogitsWanted, Model, SeqInput, Sign, StepTerms};
use crate::panics::guarded;
use crate::programs::ProgramCounts;
use crate::sampling::{Sampler, TokenLogprob};
use crate::scheduler::{Finish, Limits, Outcome, PlanRow, Refusal, ReqId, Scheduler, SeqResult, StepPlan};
use crate::speculation::Speculation;
use crate::stuck::Stuck;

/// A step may be silent for its lease, and for this long at least: a loaded machine runs its threads late.
const STEP_SILENCE_MIN: Duration = Duration::from_millis(600);
/// A step that tells of each layer need not be silent for the lease of all of them: for this part of it at most, which still is several
/// times what a whole step of its size took before.
const SIGNS_SHARE: u32 = 4;

/// While every sequence waits for its mask the loop looks around at least this often.
const MASKS_LOOK: Duration = Duration::from_millis(20);

/// A request in the engine, and what the step under way has for it.
pub(super) struct Live {
    pub submission: Submission,
    pub sampler: Sampler,
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// Of the tokens that the step brings, in order.
    pub logprobs: Vec<Option<TokenLogprob>>,
    pub failure: Option<String>,
}

/// Everything the engine thread owns once the model is loaded.
pub(super) struct Core {
    pub(super) model: Box<dyn Model>,
    pub(super) scheduler: Scheduler,
    pub(super) live: HashMap<ReqId, Live>,
    pub(super) speculation: Option<Speculation>,
    pub(super) shared: Arc<Shared>,
    pub(super) heart: Heart,
    /// What became of step programs.
    programs: Option<Arc<ProgramCounts>>,
    /// Steps have deadlines (E1).
    guards: bool,
    /// Whose masks were late, where the last step brought nothing but that.
    late: Vec<ReqId>,
    tokens_delivered: u64,
    requests_finished: u64,
    /// See [`CoreConfig`](crate::core::CoreConfig).
    pub mask_wait: Duration,
    /// The model shows that a step goes on before it ends.
    pub gives_signs: bool,
}

impl Core {
    pub fn new(model: Box<dyn Model>, limits: Limits, shared: Arc<Shared>, heart: Heart, guards: bool) -> Self {
        Self {
            programs: model.programs(),
            model,
            scheduler: Scheduler::new(limits),
            live: HashMap::new(),
            speculation: None,
            shared,
            heart,
            guards,
            late: Vec::new(),
            tokens_delivered: 0,
            requests_finished: 0,
            mask_wait: Duration::ZERO,
            gives_signs: false,
        }
    }

    /// The same, with guesses.
    pub fn speculating(mut self, speculation: Option<Speculation>) -> Self {
        self.speculation = speculation;
        self
    }

    /// Takes one step. False: there is nothing to run.
    ///
    /// # Errors
    /// A step that did not end in time (E1): there will be no other.
    pub fn step(&mut self, faults: &Faults) -> Result<bool, Stuck> {
        self.drop_cancelled();
        if self.waits_for_masks() {
            self.heart.between_steps(&self.tally());
            return Ok(true);
        }
        let mut plan = self.scheduler.plan(monotonic_ns());
        plan.late.iter().for_each(|(id, refusal)| self.end(*id, end_of_refused(refusal)));
        if plan.is_empty() {
            return Ok(false);
        }
        // before the step too: one that hangs is to show whom it owes
        self.shared.metrics.gauges(&self.scheduler);
        self.late.clear();
        let shape = shape_of(plan.rows.iter().map(|row| row.decode).zip(&plan.batch.seqs));
        self.heart.step_begins(&shape, &self.tally());
        let livelock = faults.at_step(self.heart.steps_completed(), &shape);
        let terms = self.terms(faults, shape);
        self.model.terms(&terms);
        if self.model.draws() {
            self.let_draw(&mut plan);
        }
        let mut tell = |sign| shows(&mut self.heart, sign);
        let rows = alone::run(self.model.as_mut(), &plan.batch, &mut tell).inspect_err(|_| self.exceeded(&shape))?;
        if let Some(counts) = &self.programs {
            self.heart.ran_by(counts.last_key.load(Relaxed));
            self.shared.metrics.programs(counts);
        }
        let results = if livelock { Vec::new() } else { self.sample(&plan, &rows) };
        let outcomes = self.scheduler.apply(results);
        if !outcomes.is_empty() {
            self.heart.moved();
        }
        let failed = outcomes.iter().any(|outcome| outcome.finish == Some(Finish::Failed));
        // Counted before it is delivered: who has an answer finds it in the metrics.
        self.shared.metrics.step(&plan, &outcomes, &self.scheduler);
        if let Some(speculation) = &mut self.speculation {
            speculation.note(&plan, &outcomes);
            self.shared.metrics.speculation(speculation.counts(), speculation.is_on());
        }
        outcomes.into_iter().for_each(|outcome| self.deliver(outcome));
        self.speculation.iter_mut().for_each(|speculation| speculation.terms(&terms));
        let guessing_ns = self.guess_ahead().inspect_err(|_| self.exceeded(&shape))?;
        let outcome = if failed { StepOutcome::Failed } else { StepOutcome::Ok };
        let took_ns = self.heart.step_ends(&shape, &self.tally(), outcome);
        self.scheduler.learn(&plan, took_ns.saturating_sub(guessing_ns));
        if let Some(speculation) = &mut self.speculation {
            speculation.timed(took_ns, guessing_ns);
        }
        Ok(true)
    }

    /// Tokens that need nothing but their row are drawn where the row is: a row is half a megabyte. All of a step, or none: where one row must
    /// come, all do, and a step with a row here and there has a shape that does not come again.
    fn let_draw(&self, plan: &mut StepPlan) {
        let wanted = |(row, seq): (&PlanRow, &SeqInput)| match seq.logits {
            LogitsWanted::None => Some(LogitsWanted::None),
            LogitsWanted::Last => self.live.get(&row.id)?.sampler.draw().map(LogitsWanted::Drawn),
            LogitsWanted::All | LogitsWanted::Drawn(_) => None,
        };
        let all: Option<Vec<_>> = plan.rows.iter().zip(&plan.batch.seqs).map(wanted).collect();
        if let Some(all) = all {
            plan.batch.seqs.iter_mut().zip(all).for_each(|(seq, logits)| seq.logits = logits);
        }
    }

    /// The step under way did not end in time.
    fn exceeded(&mut self, shape: &StepShape) {
        self.heart.step_ends(shape, &self.tally(), StepOutcome::DeadlineExceeded);
    }

    fn terms(&self, faults: &Faults, shape: StepShape) -> StepTerms {
        let share = if self.gives_signs { SIGNS_SHARE } else { 1 };
        let allowed = self.guards.then(|| (self.heart.lease() / share).max(STEP_SILENCE_MIN));
        let steps_completed = self.heart.steps_completed();
        StepTerms { allowed, tally: self.tally(), shape, warms: false, armed: faults.armed_bits(), steps_completed }
    }

    /// Says that there is nothing to run.
    pub fn rest(&mut self, faults: &Faults) {
        faults.at_rest(self.heart.steps_completed());
        self.heart.resting(&self.tally(), self.shared.draining.load(Relaxed));
        self.shared.metrics.gauges(&self.scheduler);
    }

    /// Takes in a request. The front end has checked it; what the scheduler refuses all the same ends as failed. One whose reader has left
    /// by now costs nothing.
    pub fn submit(&mut self, mut new: Submission) {
        if new.ticket.cancelled.load(Relaxed) {
            let end = new.ticket.end_of_reader();
            return self.close(&new, end);
        }
        let id = new.seq.id;
        // a step may have something else to do now
        self.late.clear();
        // what is long in it is shared, not copied
        let admitted = self.scheduler.submit(new.seq.clone(), monotonic_ns());
        let entropy = RandomState::new().hash_one(id);
        let constraint = new.request.constraint.take();
        let sampler = Sampler::new(new.request.sampling.clone(), entropy);
        let sampler = sampler.after(&new.request.prompt, new.seq.stop_token_ids.clone(), constraint);
        let live = Live { submission: new, sampler, prompt_logprobs: Vec::new(), logprobs: Vec::new(), failure: None };
        self.live.insert(id, live);
        if let Err(refusal) = admitted {
            self.end(id, end_of_refused(&refusal));
        }
    }

    /// Ends the requests whose streams were dropped; their blocks return before the next plan.
    fn drop_cancelled(&mut self) {
        let gone = self.live.iter().filter(|(_, l)| l.submission.ticket.cancelled.load(Relaxed));
        let gone: Vec<_> = gone.map(|(id, l)| (*id, l.submission.ticket.end_of_reader())).collect();
        for (id, end) in gone {
            self.scheduler.cancel(id);
            self.end(id, end);
        }
    }

    /// Would the next step be the last one again, in vain? Steps that turn and deliver nothing are what a livelock looks like, and they take
    /// the processor from those who make the masks. Waits for the masks for a moment.
    fn waits_for_masks(&mut self) -> bool {
        if self.late.is_empty() {
            return false;
        }
        let (live, until) = (&mut self.live, Instant::now() + MASKS_LOOK);
        let waits = |id| {
            live.get_mut(id).is_some_and(|live| matches!(live.sampler.is_ready(until, MASK_TIME_MAX_ALONE), Ok(false)))
        };
        self.late.iter().all(waits)
    }

    fn sample(&mut self, plan: &StepPlan, rows: &[Rows]) -> Vec<SeqResult> {
        let inputs = plan.rows.iter().zip(&plan.batch.seqs).zip(rows);
        // For all grammars of the step together: neighbours that follow none wait no longer than this.
        let masks_until = Instant::now() + self.mask_wait;
        let late = &mut self.late;
        // one row that never ends is no life
        let heart = &mut self.heart;
        let mut alive = || heart.row_is_done();
        let results = inputs.filter_map(|((row, input), logits)| {
            let live = self.live.get_mut(&row.id)?;
            let sampled = guarded(|| Ok(sample_row(live, row, input, logits, (masks_until, &mut alive))));
            Some(match sampled.unwrap_or_else(|panic| Err(Miss::Failed(panic))) {
                Ok(Next::Tokens(tokens)) => SeqResult::Advanced { id: row.id, tokens },
                Ok(Next::Later) => {
                    self.shared.metrics.masks_late.inc();
                    late.push(row.id);
                    return None;
                }
                Err(Miss::Failed(message)) => {
                    live.failure = Some(message);
                    SeqResult::Failed { id: row.id }
                }
                Err(Miss::Barred(message)) => {
                    live.failure = Some(message);
                    SeqResult::Barred { id: row.id }
                }
            })
        });
        let results: Vec<_> = results.collect();
        if !results.is_empty() {
            self.late.clear();
        }
        results
    }

    /// Hands over what a step brought to one request; never waits for its reader (E7).
    fn deliver(&mut self, outcome: Outcome) {
        let Some(live) = self.live.get_mut(&outcome.id) else { return };
        let prompt = std::mem::take(&mut live.prompt_logprobs);
        let logprobs = std::mem::take(&mut live.logprobs);
        let events = &live.submission.events;
        let prompt = (!prompt.is_empty()).then_some(TokenEvent::Prompt(prompt));
        let (count, stopped) = (outcome.tokens.len(), outcome.finish == Some(Finish::Stop));
        let tokens = outcome
            .tokens
            .into_iter()
            .zip(logprobs)
            .enumerate()
            .map(|(place, (id, logprob))| TokenEvent::Token { id, logprob, stop: stopped && place + 1 == count });
        let sent = prompt.into_iter().chain(tokens).try_for_each(|event| events.try_send(event));
        let end = match (sent, outcome.finish) {
            (Err(TrySendError::Full(_)), _) => Some(End::Cut),
            (Err(TrySendError::Closed(_)), _) => Some(live.submission.ticket.end_of_reader()),
            (Ok(()), finish) => {
                self.tokens_delivered += count as u64;
                finish.map(|f| end_of(f, live.failure.take()))
            }
        };
        if let Some(end) = end {
            self.scheduler.cancel(outcome.id);
            self.end(outcome.id, end);
        }
    }

    /// The one place where a request ends: once, by the ticket's type (EP2).
    fn end(&mut self, id: ReqId, end: End) {
        if let Some(live) = self.live.remove(&id) {
            self.close(&live.submission, end);
        }
    }

    fn close(&mut self, submission: &Submission, end: End) {
        self.requests_finished += 1;
        self.shared.metrics.ended(&end);
        // Set before the sender is dropped with its submission: a reader that sees the stream's end finds the reason.
        drop(submission.ticket.end.set(end));
    }

    fn tally(&self) -> Tally {
        let owed = self.scheduler.owed();
        Tally {
            tokens_delivered: self.tokens_delivered,
            requests_finished: self.requests_finished,
            running: owed.running,
            waiting: owed.waiting,
            prompt_tokens_owed: owed.prompt_tokens,
        }
    }
}

impl Drop for Core {
    /// The thread ends: whoever is still here is told so.
    fn drop(&mut self) {
        let ids: Vec<ReqId> = self.live.keys().copied().collect();
        ids.into_iter().for_each(|id| self.end(id, End::Shutdown));
    }
}

/// What the step under way shows before its end. A layer that is done leaves the lease as it is, which was given for all of them.
pub(super) fn shows(heart: &mut Heart, sign: Sign) {
    match sign {
        Sign::Layer => (),
        Sign::HeldUp(time) => heart.held_up(time),
    }
}

/// What a step is made of; `rows` tell of each sequence whether its output is under way.
pub fn shape_of<'a>(rows: impl IntoIterator<Item = (bool, &'a SeqInput)>) -> StepShape {
    let mut shape = StepShape::default();
    for (decodes, input) in rows {
        let tokens = input.tokens.len();
        shape.requests += 1;
        if decodes {
            shape.decode_tokens += tokens;
        } else {
            shape.prefill_tokens += tokens;
            // tokens, weighed by the context that they attend to
            shape.prefill_units += tokens as u64 * (256 + input.start_pos as u64 + tokens as u64 / 2);
        }
    }
    shape
}

/// How a request ends that the scheduler does not go on with.
fn end_of_refused(refusal: &Refusal) -> End {
    match refusal {
        Refusal::TooLate { .. } => End::Late(refusal.to_string()),
        Refusal::Expired => End::Expired,
        _ => End::Failed(refusal.to_string()),
    }
}

fn end_of(finish: Finish, failure: Option<String>) -> End {
    match finish {
        Finish::Stop => End::Stop,
        Finish::Length => End::Length,
        Finish::Failed => End::Failed(failure.unwrap_or_else(|| "the step failed".into())),
        Finish::Barred => End::Barred(failure.unwrap_or_else(|| "no token is allowed".into())),
    }
}
