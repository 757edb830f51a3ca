//! From one sequence's logits of a step to its next tokens and to the logprobs of its prompt.

use crate::core::step::Live;
use crate::model::{LogitsWanted, SeqInput};
use crate::scheduler::PlanRow;
use crate::speculation::verify;

/// One sequence's rows of logits, or why it has none.
pub(super) type Rows = Result<Vec<Vec<f32>>, String>;

/// Samples the row's tokens, if it is to have any (more than one where guesses are accepted), and notes their logprobs.
///
/// # Errors
/// What is wrong with this sequence's logits; the sequence fails, its neighbours do not (EP5).
pub(super) fn sample_row(live: &mut Live, row: &PlanRow, input: &SeqInput, rows: &Rows) -> Result<Vec<u32>, String> {
    let rows = rows.as_ref().map_err(Clone::clone)?;
    let wanted = match input.logits {
        LogitsWanted::None => 0,
        LogitsWanted::Last => 1,
        LogitsWanted::All => input.tokens.len(),
    };
    if rows.len() != wanted {
        return Err(format!("{} rows of logits came where {wanted} were asked for", rows.len()));
    }
    for position in row.report.clone() {
        let told = live.submission.request.prompt.get(position + 1);
        if let (Some(logits), Some(token)) = (rows.get(position - input.start_pos), told) {
            live.prompt_logprobs.push(live.sampler.logprob_of(logits, *token));
        }
    }
    if !row.samples {
        return Ok(Vec::new());
    }
    let (drafts, first) = (&input.tokens[input.tokens.len() - row.drafts..], rows.len().saturating_sub(row.drafts + 1));
    let draw = |at: usize| live.sampler.sample(&rows[first + at]).map_err(|e| e.to_string());
    let sampled = verify(drafts, |sampled| sampled.token, draw)?;
    let (tokens, logprobs) = sampled.into_iter().map(|sampled| (sampled.token, sampled.logprob)).unzip();
    live.logprobs = logprobs;
    Ok(tokens)
}
