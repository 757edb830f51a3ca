//! From one sequence's logits of a step to its next tokens and to the logprobs of its prompt.

use std::time::Instant;

use crate::core::step::Live;
use crate::grammar::{ConstraintError, MASK_TIME_MAX};
use crate::model::{LogitsWanted, SeqInput};
use crate::sampling::SampleError;
use crate::scheduler::PlanRow;
use crate::speculation::verify;

/// What a step gave one sequence, or why it gave nothing.
pub(super) type Rows = Result<SeqLogits, String>;

/// One sequence's rows of logits; the token where the model drew it, and then no row.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct SeqLogits {
    pub rows: Vec<Vec<f32>>,
    pub drawn: Option<u32>,
}

/// Why a sequence has no next token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Miss {
    /// Something is wrong with its part of the step.
    Failed(String),
    /// Nothing is; its own rules allow none.
    Barred(String),
}

impl From<SampleError> for Miss {
    fn from(error: SampleError) -> Self {
        let words = error.to_string();
        match error {
            SampleError::NothingAllowed | SampleError::Constraint(ConstraintError::Failed(_)) => Self::Barred(words),
            _ => Self::Failed(words),
        }
    }
}

/// What comes after a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// The step counts; the row's tokens, if it was to have any (more than one where guesses are accepted).
    Tokens(Vec<u32>),
    /// The request's grammar is not ready yet: the sequence does not move, and has the same step again.
    Later,
}

/// Samples the row's tokens, if it is to have any, and notes their logprobs. Masks are waited for until then; `alive` is called with each row
/// of logits that is gone through.
///
/// # Errors
/// What is wrong with this sequence's logits or its rules; the sequence ends, its neighbours do not (EP5).
pub(super) fn sample_row(
    live: &mut Live,
    row: &PlanRow,
    input: &SeqInput,
    rows: &Rows,
    (masks_until, alive): (Instant, &mut dyn FnMut()),
) -> Result<Next, Miss> {
    let SeqLogits { rows, drawn } = rows.as_ref().map_err(|error| Miss::Failed(error.clone()))?;
    if matches!(input.logits, LogitsWanted::Drawn(_)) && rows.is_empty() {
        alive();
        live.logprobs = vec![None];
        return Ok(Next::Tokens(vec![live.sampler.drawn(*drawn)?.token]));
    }
    let wanted = match input.logits {
        LogitsWanted::None => 0,
        LogitsWanted::Last | LogitsWanted::Drawn(_) => 1,
        LogitsWanted::All => input.tokens.len(),
    };
    if rows.len() != wanted {
        return Err(Miss::Failed(format!("{} rows of logits came where {wanted} were asked for", rows.len())));
    }
    if row.samples && !live.sampler.is_ready(masks_until, MASK_TIME_MAX)? {
        return Ok(Next::Later);
    }
    for position in row.report.clone() {
        let told = live.submission.request.prompt.get(position + 1);
        if let (Some(logits), Some(token)) = (rows.get(position - input.start_pos), told) {
            live.prompt_logprobs.push(live.sampler.logprob_of(logits, *token));
            alive();
        }
    }
    if !row.samples {
        return Ok(Next::Tokens(Vec::new()));
    }
    let (drafts, first) = (&input.tokens[input.tokens.len() - row.drafts..], rows.len().saturating_sub(row.drafts + 1));
    // behind an accepted guess the grammar's next mask may be late: the yield ends there, and nothing is lost
    let draw = |at: usize| {
        alive();
        match live.sampler.is_ready(masks_until, MASK_TIME_MAX) {
            Ok(true) => live.sampler.sample(&rows[first + at]).map_err(Miss::from),
            Ok(false) => Err(Miss::Failed("the grammar's mask is late".to_owned())),
            Err(error) => Err(error.into()),
        }
    };
    let sampled = verify(drafts, |sampled| sampled.token, draw)?;
    let (tokens, logprobs) = sampled.into_iter().map(|sampled| (sampled.token, sampled.logprob)).unzip();
    live.logprobs = logprobs;
    Ok(Next::Tokens(tokens))
}
