//! Choosing tokens: distributions, cuts, seeds, and the rules of a request.

use proptest::prelude::*;

use super::*;

fn sampler(temperature: f32, top_p: f32, top_k: usize) -> Sampler {
    let params = SamplingParams { temperature, top_p, top_k, seed: Some(7), logprobs: Some(2), ..Default::default() };
    Sampler::new(params, 0)
}

#[test]
fn greedy_takes_the_largest_and_the_lower_id_of_equals() {
    assert_eq!(sampler(0.0, 1.0, 0).sample(&[0.0, 3.0, 3.0, f32::NAN]).unwrap().token, 1);
}

#[test]
fn rows_without_a_finite_value_are_errors() {
    assert_eq!(sampler(1.0, 1.0, 0).sample(&[]), Err(SampleError::Empty));
    assert_eq!(sampler(1.0, 1.0, 0).sample(&[f32::NAN, f32::NEG_INFINITY]), Err(SampleError::NotFinite));
}

#[test]
fn draws_follow_the_distribution() {
    let mut s = sampler(1.0, 1.0, 0);
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let mut counts = [0usize; 3];
    for _ in 0..20_000 {
        counts[s.sample(&logits).unwrap().token as usize] += 1;
    }
    for (count, p) in counts.iter().zip([0.5, 0.3, 0.2]) {
        assert!((*count as f64 / 20_000.0 - p).abs() < 0.02, "{counts:?}");
    }
}

#[test]
fn a_token_that_is_drawn_elsewhere_leaves_the_sampler_as_its_own_would() {
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    for temperature in [0.0, 0.9] {
        let params = SamplingParams { temperature, top_p: 0.9, seed: Some(3), ..Default::default() };
        let (mut here, mut elsewhere) = (Sampler::new(params.clone(), 0), Sampler::new(params.clone(), 0));
        for _ in 0..50 {
            let draw = elsewhere.draw().unwrap();
            assert_eq!(Some(draw), here.draw(), "asking for it moves nothing");
            assert_eq!((draw.temperature, draw.top_p, draw.top_k), (temperature, 0.9, 0));
            let token = here.sample(&logits).unwrap().token;
            assert_eq!(elsewhere.drawn(Some(token)), Ok(Sampled { token, logprob: None }));
        }
        assert_eq!(here.rng.0, elsewhere.rng.0);
        assert_eq!(here.drawn(None), Err(SampleError::NotFinite));
    }
}

#[test]
fn whoever_needs_more_than_its_row_is_not_drawn_elsewhere() {
    let drawn = |rules: LogitRules, logprobs: Option<usize>| {
        let params = SamplingParams { rules: Arc::new(rules), logprobs, ..Default::default() };
        Sampler::new(params, 0).after(&[1], [9].into(), None).draw().is_some()
    };
    let plain = LogitRules::default;
    assert!(drawn(plain(), None));
    assert!(!drawn(plain(), Some(0)));
    assert!(!drawn(LogitRules { bias: vec![(1, 1.0)], ..plain() }, None));
    assert!(!drawn(LogitRules { allowed: vec![1], ..plain() }, None));
    assert!(!drawn(LogitRules { presence_penalty: 0.1, ..plain() }, None), "also before there is an output");
    assert!(!drawn(LogitRules { frequency_penalty: 0.1, ..plain() }, None));
    assert!(!drawn(LogitRules { repetition_penalty: 1.1, ..plain() }, None));
    let params = SamplingParams { rules: Arc::new(LogitRules { min_tokens: 1, ..plain() }), ..Default::default() };
    let mut held_open = Sampler::new(params, 0).after(&[1], [9].into(), None);
    assert_eq!(held_open.draw(), None);
    held_open.sample(&[0.0; 12]).unwrap();
    assert!(held_open.draw().is_some(), "enough has come");
}

#[test]
fn top_p_and_top_k_cut_the_tail() {
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let seen = |mut s: Sampler| {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..500 {
            seen.insert(s.sample(&logits).unwrap().token);
        }
        seen.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(seen(sampler(1.0, 0.4, 0)), [0]);
    assert_eq!(seen(sampler(1.0, 0.7, 0)), [0, 1]);
    assert_eq!(seen(sampler(1.0, 1.0, 2)), [0, 1]);
    assert_eq!(seen(sampler(1.0, 0.0, 0)), [0], "never empty");
    // of the 0.5 and 0.3 that are left the first is 0.625: enough for 0.6, which is more than its 0.5 of the whole
    assert_eq!(seen(sampler(1.0, 0.6, 2)), [0]);
    assert_eq!(seen(sampler(1.0, 0.6, 0)), [0, 1]);
    assert_eq!(seen(sampler(1.0, 0.7, 2)), [0, 1]);
}

#[test]
fn the_seed_alone_decides() {
    let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.7).sin()).collect();
    let run = |entropy| {
        let mut s = Sampler::new(SamplingParams { seed: Some(42), ..Default::default() }, entropy);
        (0..32).map(|_| s.sample(&logits).unwrap().token).collect::<Vec<_>>()
    };
    assert_eq!(run(1), run(2));
}

#[test]
fn logprobs_are_normalised_and_sorted() {
    let l = sampler(0.0, 1.0, 0).sample(&[0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()]).unwrap().logprob.unwrap();
    assert!((l.logprob - 0.5f32.ln()).abs() < 1e-5);
    assert_eq!(l.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2]);
}

fn greedy(rules: LogitRules) -> Sampler {
    Sampler::new(SamplingParams { temperature: 0.0, logprobs: Some(0), rules: rules.into(), ..Default::default() }, 0)
}

fn run(mut sampler: Sampler, row: &[f32], count: usize) -> Vec<u32> {
    (0..count).map(|_| sampler.sample(row).unwrap().token).collect()
}

#[test]
fn min_p_cuts_what_is_much_less_likely_than_the_best() {
    let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
    let seen = |min_p: f32| {
        let params = SamplingParams { min_p, seed: Some(3), ..Default::default() };
        run(Sampler::new(params, 0), &logits, 500).into_iter().collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(seen(0.3).len(), 3);
    assert_eq!(seen(0.5).into_iter().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(seen(1.0).into_iter().collect::<Vec<_>>(), [0]);
}

#[test]
fn presence_counts_once_and_frequency_each_time() {
    let row = [2.0, 1.0, 0.5];
    let presence = LogitRules { presence_penalty: 1.25, ..Default::default() };
    // after one of each: 0.75, −0.25 and 0.5, which stays
    assert_eq!(run(greedy(presence), &row, 5), [0, 1, 0, 0, 0]);
    let frequency = LogitRules { frequency_penalty: 0.6, ..Default::default() };
    assert_eq!(run(greedy(frequency), &row, 5), [0, 0, 1, 0, 2]);
    let reward = LogitRules { frequency_penalty: -2.0, ..Default::default() };
    assert_eq!(run(greedy(reward), &row, 3), [0, 0, 0]);
}

#[test]
fn repetition_counts_the_prompt_too() {
    let rules = LogitRules { repetition_penalty: 2.0, ..Default::default() };
    let mut sampler = greedy(rules).after(&[0], [].into(), None);
    // 3.0 / 2 for the prompt's token, then 2.0 / 2 for the one that came
    assert_eq!((0..3).map(|_| sampler.sample(&[3.0, 2.0, -0.1]).unwrap().token).collect::<Vec<_>>(), [1, 0, 0]);
    let negative = LogitRules { repetition_penalty: 2.0, ..Default::default() };
    assert_eq!(run(greedy(negative).after(&[1], [].into(), None), &[-1.0, -0.9], 1), [0]);
}

#[test]
fn bias_moves_a_token_and_only_allowed_ones_come() {
    let bias = LogitRules { bias: vec![(2, 100.0), (9, 5.0)], ..Default::default() };
    assert_eq!(run(greedy(bias), &[3.0, 2.0, 1.0], 2), [2, 2]);
    let allowed = LogitRules { allowed: vec![1, 2], ..Default::default() };
    assert_eq!(run(greedy(allowed), &[3.0, 2.0, 1.0], 2), [1, 1]);
    let none = LogitRules { allowed: vec![7], ..Default::default() };
    assert_eq!(greedy(none.clone()).sample(&[3.0, 2.0, 1.0]), Err(SampleError::NothingAllowed));
    assert_eq!(greedy(none).sample(&[f32::NAN]), Err(SampleError::NotFinite));
}

#[test]
fn stop_tokens_wait_for_min_tokens() {
    let rules = LogitRules { min_tokens: 2, ..Default::default() };
    assert_eq!(run(greedy(rules).after(&[5], [0].into(), None), &[3.0, 2.0], 3), [1, 1, 0]);
}

#[test]
fn logprobs_are_the_models_own_whatever_the_rules() {
    let plain = greedy(LogitRules::default()).sample(&[3.0, 2.0]).unwrap().logprob.unwrap();
    let biased = LogitRules { bias: vec![(0, -1.0), (1, -0.1)], ..Default::default() };
    assert_eq!(greedy(biased).sample(&[3.0, 2.0]).unwrap().logprob.unwrap(), plain);
}

/// [`nucleus`] in few words: everything is sorted, and cut.
fn plain_nucleus(candidates: &[(u32, f64)], params: &SamplingParams) -> Vec<(u32, f64)> {
    let mut sorted = candidates.to_vec();
    sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let sum = |candidates: &[(u32, f64)]| candidates.iter().map(|(_, w)| w).sum::<f64>();
    let mut total = sum(candidates);
    if params.top_k > 0 {
        sorted.truncate(params.top_k);
        total = sum(&sorted);
    }
    let wanted = f64::from(params.top_p) * total;
    let keep = (1..sorted.len()).find(|keep| sum(&sorted[..*keep]) >= wanted).unwrap_or(sorted.len());
    sorted.truncate(keep);
    sorted
}

proptest! {
    /// Few values, so that many weights are equal; more than are sorted at first.
    #[test]
    fn ep4_the_likeliest_are_the_same_to_the_bit_as_if_all_were_sorted(
        weights in prop::collection::vec(prop_oneof![0.0f64..=1.0, (1u32..4).prop_map(|n| 1.0 / f64::from(n))], 1..1000),
        top_p in prop_oneof![Just(0.0f32), Just(1.0f32), 0.0f32..=1.0],
        top_k in prop_oneof![Just(0usize), 1usize..1200],
    ) {
        let candidates: Vec<(u32, f64)> = (0u32..).zip(weights).collect();
        let params = SamplingParams { top_p, top_k, ..SamplingParams::default() };
        prop_assert_eq!(nucleus(candidates.clone(), &params), plain_nucleus(&candidates, &params));
    }
}
