//! The model's own logprobs of a place: before the request's rules and temperature, so that they mean the same for everybody.

/// The logprob of a token and of the likeliest alternatives at its place (natural logarithm).
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprob {
    pub token: u32,
    pub logprob: f32,
    /// Likeliest first.
    pub top: Vec<(u32, f32)>,
}

/// The logprob of `token`, and the `top` likeliest tokens of the row.
pub(super) fn logprob_of(logits: &[f32], token: u32, top: usize) -> TokenLogprob {
    let peak = logits.iter().copied().filter(|l| l.is_finite()).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().filter(|l| !l.is_nan()).map(|l| f64::from(l - peak).exp()).sum();
    let norm = f64::from(peak) + sum.ln();
    let logprob = |logit: f32| (f64::from(logit) - norm) as f32;
    let own = logits.get(token as usize).map_or(f32::NEG_INFINITY, |l| logprob(*l));
    TokenLogprob { token, logprob: own, top: top_of(logits, top).into_iter().map(|(id, l)| (id, logprob(l))).collect() }
}

/// The `count` largest logits, largest first.
fn top_of(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    let mut all: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).filter(|(_, l)| !l.is_nan()).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count < all.len() {
        all.select_nth_unstable_by(count, order);
        all.truncate(count);
    }
    all.sort_unstable_by(order);
    all
}
