//! Speculation keeps the distribution: exactly, draw for draw, and by a chi-square test that a wrong rule fails.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use super::*;
use crate::sampling::{Sampler, SamplingParams};
use crate::splitmix::SplitMix64;

const VOCAB: usize = 8;
const TRIALS: usize = 40_000;
/// 99.99 % of honest runs stay below this, with 63 degrees of freedom.
const CHI_SQUARE_MAX: f64 = 112.0;

/// Logits after a context of one token: a different, uneven distribution each.
fn logits(context: u32) -> Vec<f32> {
    (0..VOCAB as u32).map(|token| ((context * 5 + token * 3) % 7) as f32 * 0.4).collect()
}

/// What a worse model thinks.
fn draft_logits(context: u32) -> Vec<f32> {
    (0..VOCAB as u32).map(|token| ((context * 5 + token * 4) % 7) as f32 * 0.5).collect()
}

fn sampler(seed: u64) -> Sampler {
    Sampler::new(SamplingParams { seed: Some(seed), ..SamplingParams::default() }, 0)
}

/// Two tokens of output after token 0, at least, by guesses from `guess`.
fn speculated(sampler: &mut Sampler, guess: &mut dyn FnMut(&Sampler) -> Vec<u32>) -> Vec<u32> {
    let mut out = vec![0];
    while out.len() < 3 {
        let drafts = guess(sampler);
        let context: Vec<u32> = out.last().into_iter().chain(&drafts).copied().collect();
        let yielded = verify(&drafts, |token| *token, |row| sampler.sample(&logits(context[row])).map(|s| s.token));
        out.extend(yielded.unwrap());
    }
    out[1..3].to_vec()
}

fn chi_square(mut pair: impl FnMut(u64) -> Vec<u32>) -> f64 {
    let mut counts = [[0f64; VOCAB]; VOCAB];
    (0..TRIALS).for_each(|trial| {
        let pair = pair(trial as u64);
        counts[pair[0] as usize][pair[1] as usize] += 1.0;
    });
    let share = |context: u32, token: usize| {
        let weights: Vec<f64> = logits(context).iter().map(|l| f64::from(*l).exp()).collect();
        weights[token] / weights.iter().sum::<f64>()
    };
    let cells = (0..VOCAB).flat_map(|a| (0..VOCAB).map(move |b| (a, b)));
    cells
        .map(|(a, b)| {
            let expected = share(0, a) * share(a as u32, b) * TRIALS as f64;
            (counts[a][b] - expected).powi(2) / expected
        })
        .sum()
}

/// A draft model that draws its tokens with the request's own next random numbers.
fn draft_model(sampler: &Sampler) -> Vec<u32> {
    let mut shadow = sampler.shadow();
    let first = shadow.sample(&draft_logits(0)).unwrap().token;
    vec![first, shadow.sample(&draft_logits(first)).unwrap().token]
}

#[test]
fn the_output_has_the_models_distribution_whatever_is_guessed() {
    let plain = chi_square(|seed| speculated(&mut sampler(seed), &mut |_| Vec::new()));
    assert!(plain < CHI_SQUARE_MAX, "the test itself: {plain}");
    for fixed in 0..VOCAB as u32 {
        let found = chi_square(|seed| speculated(&mut sampler(seed), &mut |_| vec![fixed, fixed]));
        assert!(found < CHI_SQUARE_MAX, "always guessing {fixed}: {found}");
    }
    let found = chi_square(|seed| speculated(&mut sampler(seed), &mut draft_model));
    assert!(found < CHI_SQUARE_MAX, "a draft model: {found}");
    let mut chance = SplitMix64(9);
    let mut any = |_: &Sampler| vec![(chance.next() % VOCAB as u64) as u32];
    let found = chi_square(|seed| speculated(&mut sampler(seed), &mut any));
    assert!(found < CHI_SQUARE_MAX, "random guesses: {found}");
}

#[test]
fn a_rule_that_is_kinder_to_guesses_fails_the_same_test() {
    // Takes a guess that the model finds likely without drawing: a favourite shortcut, and a wrong one.
    let found = chi_square(|seed| {
        let mut sampler = sampler(seed);
        let guess = draft_model(&sampler)[0];
        let row = logits(0);
        let likely = row[guess as usize] >= 1.6;
        let first = if likely { guess } else { sampler.sample(&row).unwrap().token };
        vec![first, sampler.sample(&logits(first)).unwrap().token]
    });
    assert!(found > 5.0 * CHI_SQUARE_MAX, "{found}");
}

#[test]
fn the_same_seed_says_the_same_with_and_without_guesses() {
    for seed in 0..500 {
        let plain = speculated(&mut sampler(seed), &mut |_| Vec::new());
        assert_eq!(speculated(&mut sampler(seed), &mut draft_model), plain);
        assert_eq!(speculated(&mut sampler(seed), &mut |_| vec![3, 1]), plain);
    }
}

#[test]
fn guesses_are_accepted_up_to_the_first_wrong_one_and_one_token_comes_on_top() {
    let said = [4, 5, 6, 7];
    let run = |drafts: &[u32]| verify::<u32, ()>(drafts, |t| *t, |row| Ok(said[row])).unwrap();
    assert_eq!(run(&[]), [4]);
    assert_eq!(run(&[4, 5, 6]), said);
    assert_eq!(run(&[4, 9, 6]), [4, 5]);
    assert_eq!(run(&[9, 5, 6]), [4]);
}

#[test]
fn only_the_first_row_can_fail() {
    let draw = |bad: usize| move |row: usize| if row == bad { Err("no number") } else { Ok(1u32) };
    assert_eq!(verify(&[1, 1], |t| *t, draw(0)), Err("no number"));
    assert_eq!(verify(&[1, 1], |t| *t, draw(1)), Ok(vec![1]));
}
