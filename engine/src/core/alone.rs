//! EP5: what goes wrong in one request's part of a step ends that request alone. A model that refuses a batch, or panics in it, is asked
//! again for ever smaller parts of it; what panics for one sequence is an error of that sequence.

use crate::core::sample::{Rows, SeqLogits};
use crate::model::{Model, ModelError, SeqInput, StepBatch, StepLogits, Tell};
use crate::panics::guarded;
use crate::stuck::Stuck;

/// Runs the batch; where that fails, its halves, and theirs, down to single sequences. One entry a sequence. Halving finds one poisoned
/// sequence of many in a dozen forwards, well within the step's lease; one by one it would be as many as there are sequences.
///
/// # Errors
/// A step that did not end in time (E1): the model is lost, for every sequence.
pub(super) fn run(model: &mut dyn Model, batch: &StepBatch, tell: Tell<'_>) -> Result<Vec<Rows>, Stuck> {
    match forward(model, batch, tell)? {
        Ok(parts) => return Ok(parts.into_iter().map(Ok).collect()),
        Err(error) => tracing::error!(error, requests = batch.seqs.len(), "a step failed; its sequences run apart"),
    }
    apart(model, &batch.seqs, tell)
}

/// The two halves of a batch that failed; a single sequence once more.
fn apart(model: &mut dyn Model, seqs: &[SeqInput], tell: Tell<'_>) -> Result<Vec<Rows>, Stuck> {
    let mut all = Vec::with_capacity(seqs.len());
    for half in seqs.chunks(seqs.len().div_ceil(2).max(1)) {
        match forward(model, &StepBatch::of(half.to_vec()), tell)? {
            Ok(parts) => all.extend(parts.into_iter().map(Ok)),
            Err(error) if half.len() == 1 => all.push(Err(error)),
            Err(_) => all.extend(apart(model, half, tell)?),
        }
    }
    Ok(all)
}

/// What each sequence gets, or what is wrong with the batch: the next one may go well.
type Answer = Result<Vec<SeqLogits>, String>;

/// An error of this is the model's end.
fn forward(model: &mut dyn Model, batch: &StepBatch, tell: Tell<'_>) -> Result<Answer, Stuck> {
    let count = batch.seqs.len();
    let told = |logits: StepLogits| match logits.rows.len() {
        rows if rows == count => {
            let drawn = logits.drawn.into_iter().chain(std::iter::repeat(None));
            Ok(logits.rows.into_iter().zip(drawn).map(|(rows, drawn)| SeqLogits { rows, drawn }).collect())
        }
        rows => Err(format!("{rows} rows of logits for {count} sequences")),
    };
    Ok(asked(|| model.forward_telling(batch, tell))?.and_then(told))
}

/// What a model answers, or its error or panic in words.
///
/// # Errors
/// A wait that was given up is no answer: the model is lost.
pub(super) fn asked<T>(ask: impl FnOnce() -> Result<T, ModelError>) -> Result<Result<T, String>, Stuck> {
    Ok(match guarded(|| Ok(ask())) {
        Err(panic) => Err(panic),
        Ok(Err(ModelError::Stuck(stuck))) => return Err(stuck),
        Ok(answer) => answer.map_err(|error| error.to_string()),
    })
}
