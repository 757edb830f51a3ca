//! Sampling on the device against the sampler of requests: the same tokens from the same random numbers.

use std::time::Duration;

use engine::backend::cuda::CudaOptions;
use engine::backend::cuda::driver::Driver;
use engine::backend::{Backend, StepStart};
use engine::sampling::{Draw, Sampler, SamplingParams};

pub use crate::ops::OnHost;
use crate::ops::{EXACT, Make, Numbers};

const ROWS: usize = 12;

/// The first random number of a request that is seeded so (splitmix64, 53 bits).
fn unit_of(seed: u64) -> f64 {
    Numbers(seed).unit()
}

fn oracle(logits: &[f32], draw: &Draw, seed: u64) -> Option<u32> {
    let Draw { temperature, top_p, top_k, min_p, .. } = *draw;
    let params = SamplingParams {
        temperature,
        top_p,
        top_k: top_k as usize,
        min_p,
        seed: Some(seed),
        ..SamplingParams::default()
    };
    Sampler::new(params, 0).sample(logits).ok().map(|sampled| sampled.token)
}

fn tokens<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    // under a sanitizer a draw takes seconds
    b.begin_step(&StepStart { allowed: Some(Duration::from_secs(300)), ..StepStart::default() });
    for (vocab, spread) in [(1000, 3.0), (257, 0.5), (7, 1.0)] {
        let mut random = Numbers(vocab as u64);
        let mut logits: Vec<Vec<f32>> =
            (0..ROWS).map(|_| random.values(vocab).iter().map(|v| v * spread).collect()).collect();
        logits[1][3] = f32::NEG_INFINITY;
        logits[2][0] = f32::NAN;
        logits[3] = vec![0.25; vocab]; // ties
        logits[4] = vec![f32::NEG_INFINITY; vocab]; // nothing to choose
        for (temperature, top_p, top_k, min_p) in [
            (0.0, 1.0, 0, 0.0),
            (1.0, 1.0, 0, 0.0),
            (0.7, 1.0, 0, 0.05),
            (1.3, 0.9, 0, 0.0),
            (1.0, 1.0, 5, 0.0),
            (0.8, 0.5, 40, 0.01),
            (1.0, 0.9, 5, 0.0),
            (1.2, 0.6, 3, 0.0),
            (1.0, 0.01, 0, 0.0),
        ] {
            let draw = |row: usize| Draw { temperature, top_p, top_k, min_p, unit: unit_of(row as u64) };
            let draws: Vec<Draw> = (0..ROWS).map(draw).collect();
            let got = b.sample(&b.upload(ROWS, vocab, logits.concat()), &draws);
            for (row, got) in got.iter().enumerate() {
                let want = oracle(&logits[row], &draws[row], row as u64);
                assert_eq!(*got, want, "row {row} of {vocab}: {:?}", draws[row]);
            }
        }
    }
    b.end_step().unwrap();
    assert_eq!(b.sample(&b.upload(2, 3, vec![0.0; 6]), &[]), [None, None], "a draw for each row, or none");
}
test_backend!(tokens_are_those_of_the_sampler, super::tokens);
