//! Verification: the model has computed a row of logits for every guess and one more; how many tokens do they yield?
//!
//! Each row's token is drawn by the request's own sampler, exactly as if nothing had been guessed; as long as it is the guessed one, the
//! next row stands after the right tokens and counts too. That is rejection sampling against a proposal that names one token: a guess
//! is accepted with the probability that the model gives it, and a rejection yields the model's distribution without it. So the output
//! has the model's distribution, whatever was guessed; greedy output is the same with and without guesses; and so is sampled output of
//! the same seed, because the sampler draws the same numbers in the same order. Pure.

/// Draws from row after row until one disagrees with its guess; `draw(i)` draws from row `i`, of which there is one more than guesses.
///
/// # Errors
/// What `draw` says of the first row. A later row that cannot be drawn from ends the yield: it belongs to a token that comes next
/// step, and fails there as it would have without guesses.
pub fn verify<T, E>(
    drafts: &[u32],
    token_of: impl Fn(&T) -> u32,
    mut draw: impl FnMut(usize) -> Result<T, E>,
) -> Result<Vec<T>, E> {
    let mut drawn = vec![draw(0)?];
    for (row, draft) in drafts.iter().enumerate() {
        if drawn.last().map(&token_of) != Some(*draft) {
            break;
        }
        match draw(row + 1) {
            Ok(next) => drawn.push(next),
            Err(_) => break,
        }
    }
    Ok(drawn)
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
