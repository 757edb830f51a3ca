//! One turn of the engine: plan, run, sample, deliver, beat.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Arc, atomic::Ordering::Relaxed},
};

use tokio::sync::mpsc::error::TrySendError;

use crate::beat::{Heart, StepShape, Tally};
use crate::core::sample::{Rows, sample_row};
use crate::fault::{Faults, Place};
use crate::handle::{End, Shared, Submission, TokenEvent};
use crate::model::{Model, SeqInput, StepBatch};
use crate::sampling::{Sampler, TokenLogprob};
use crate::scheduler::{Finish, Limits, Outcome, ReqId, Scheduler, SeqResult, StepPlan};

/// A request in the engine, and what the step under way has for it.
pub(super) struct Live {
    pub submission: Submission,
    pub sampler: Sampler,
    pub prompt_logprobs: Vec<TokenLogprob>,
    pub logprob: Option<TokenLogprob>,
    pub failure: Option<String>,
}

/// Everything the engine thread owns once the model is loaded.
pub(super) struct Core {
    model: Box<dyn Model>,
    scheduler: Scheduler,
    live: HashMap<ReqId, Live>,
    shared: Arc<Shared>,
    heart: Heart,
    tokens_delivered: u64,
    requests_finished: u64,
}

impl Core {
    pub fn new(model: Box<dyn Model>, limits: Limits, shared: Arc<Shared>, heart: Heart) -> Self {
        let scheduler = Scheduler::new(limits);
        Self { model, scheduler, live: HashMap::new(), shared, heart, tokens_delivered: 0, requests_finished: 0 }
    }

    /// Takes one step. False: there is nothing to run.
    pub fn step(&mut self, faults: &Faults) -> bool {
        self.drop_cancelled();
        let plan = self.scheduler.plan();
        if plan.is_empty() {
            return false;
        }
        let shape = shape_of(&plan);
        self.heart.step_begins(&shape, &self.tally());
        let livelock = faults.at(Place::Step, self.heart.steps_completed());
        let rows = self.forward(&plan.batch);
        let results = if livelock { Vec::new() } else { self.sample(&plan, &rows) };
        let failed = results.iter().any(|r| matches!(r, SeqResult::Failed { .. }));
        let outcomes = self.scheduler.apply(&results);
        // Counted before it is delivered: who has an answer finds it in the metrics.
        self.shared.metrics.step(&plan, &results, &self.scheduler);
        outcomes.into_iter().for_each(|outcome| self.deliver(outcome));
        self.heart.step_ends(&shape, &self.tally(), !failed);
        true
    }

    /// Says that there is nothing to run.
    pub fn rest(&mut self, faults: &Faults) {
        faults.at(Place::Idle, self.heart.steps_completed());
        self.heart.resting(&self.tally(), self.shared.draining.load(Relaxed));
        self.shared.metrics.gauges(&self.scheduler);
    }

    /// Takes in a request. The front end has checked it; what the scheduler refuses all the same ends as failed.
    pub fn submit(&mut self, new: Submission) {
        let id = new.seq.id;
        let admitted = self.scheduler.submit(new.seq.clone());
        let entropy = RandomState::new().hash_one(id);
        let sampler = Sampler::new(new.request.sampling.clone(), entropy);
        let live = Live { submission: new, sampler, prompt_logprobs: Vec::new(), logprob: None, failure: None };
        self.live.insert(id, live);
        if let Err(refusal) = admitted {
            self.end(id, End::Failed(refusal.to_string()));
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

    /// Runs the batch. When the model refuses it, each sequence runs alone, so that the poisoned one fails alone (EP5).
    fn forward(&mut self, batch: &StepBatch) -> Vec<Rows> {
        let count = batch.seqs.len();
        match self.model.forward(batch) {
            Ok(logits) if logits.rows.len() == count => return logits.rows.into_iter().map(Ok).collect(),
            Ok(logits) => {
                return vec![Err(format!("{} rows of logits for {count} sequences", logits.rows.len())); count];
            }
            Err(error) => tracing::error!(%error, requests = count, "a step failed; its sequences run one by one"),
        }
        let alone = batch.seqs.iter().map(|seq| {
            let logits = self.model.forward(&StepBatch { seqs: vec![seq.clone()] });
            logits.map_err(|e| e.to_string()).and_then(|l| l.rows.into_iter().next().ok_or("no logits".into()))
        });
        alone.collect()
    }

    fn sample(&mut self, plan: &StepPlan, rows: &[Rows]) -> Vec<SeqResult> {
        let inputs = plan.rows.iter().zip(&plan.batch.seqs).zip(rows);
        let results = inputs.filter_map(|((row, input), logits)| {
            let live = self.live.get_mut(&row.id)?;
            Some(match sample_row(live, row, input, logits) {
                Ok(token) => SeqResult::Advanced { id: row.id, token },
                Err(message) => {
                    live.failure = Some(message);
                    SeqResult::Failed { id: row.id }
                }
            })
        });
        results.collect()
    }

    /// Hands over what a step brought to one request; never waits for its reader (E7).
    fn deliver(&mut self, outcome: Outcome) {
        let Some(live) = self.live.get_mut(&outcome.id) else { return };
        let stop = outcome.finish == Some(Finish::Stop);
        let prompt = std::mem::take(&mut live.prompt_logprobs);
        let logprob = live.logprob.take();
        let events = &live.submission.events;
        let prompt = (!prompt.is_empty()).then_some(TokenEvent::Prompt(prompt));
        let token = outcome.token.map(|id| TokenEvent::Token { id, logprob, stop });
        let sent = prompt.into_iter().chain(token).try_for_each(|event| events.try_send(event));
        let end = match (sent, outcome.finish) {
            (Err(TrySendError::Full(_)), _) => Some(End::Cut),
            (Err(TrySendError::Closed(_)), _) => Some(live.submission.ticket.end_of_reader()),
            (Ok(()), finish) => {
                self.tokens_delivered += u64::from(outcome.token.is_some());
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
        let Some(live) = self.live.remove(&id) else { return };
        self.requests_finished += 1;
        self.shared.metrics.ended(&end);
        // Set before the sender is dropped with `live`: a reader that sees the stream's end finds the reason.
        drop(live.submission.ticket.end.set(end));
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

/// Work of a prefill chunk: tokens, weighed by the context that they attend to.
pub(super) fn prefill_units(input: &SeqInput) -> u64 {
    let tokens = input.tokens.len() as u64;
    tokens * (256 + input.start_pos as u64 + tokens / 2)
}

fn shape_of(plan: &StepPlan) -> StepShape {
    let prefills = plan.rows.iter().zip(&plan.batch.seqs).filter(|(row, _)| !row.decode);
    StepShape {
        requests: plan.rows.len(),
        prefill_tokens: plan.prefill_tokens,
        decode_tokens: plan.decode_tokens,
        prefill_units: prefills.map(|(_, input)| prefill_units(input)).sum(),
    }
}

fn end_of(finish: Finish, failure: Option<String>) -> End {
    match finish {
        Finish::Stop => End::Stop,
        Finish::Length => End::Length,
        Finish::Failed => End::Failed(failure.unwrap_or_else(|| "the step failed".into())),
    }
}
