//! Figures of the device, `name value unit goal` a line: what the memory gives, and what decode and prefill make of it.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use engine::backend::cuda::Matrix;
use engine::backend::cuda::open::{self, DeviceChoice};
use engine::backend::{Backend, StepStart};
use engine::model::{Model, RandomShape, StepTerms};

use crate::hold::{ALLOWED, OF_1B, OF_8B, SEQS_MAX, model, step};

/// Values of the matrix that is copied: 1 GiB.
const COPIED: usize = 256 << 20;
/// Steps of one kind before any is timed, and how long a graph of them is waited for beyond that.
const WARM_STEPS: usize = 20;
const WARM_MAX: Duration = Duration::from_secs(2);
/// Runs of one figure; the median is told, and how far the others are from it.
const RUNS: usize = 5;
/// Tokens of a prompt.
const PROMPT: usize = 512;

/// The model whose sizes are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sizes {
    #[value(name = "1b")]
    Of1B,
    #[value(name = "8b")]
    Of8B,
}

impl Sizes {
    /// Its name and sizes.
    pub fn shape(self) -> (&'static str, RandomShape) {
        match self {
            Self::Of1B => ("1b", OF_1B),
            Self::Of8B => ("8b", OF_8B),
        }
    }
}

/// A figure and its spread over the runs, in percent of it.
struct Rate {
    per_second: f64,
    spread: f64,
}

/// All figures of one model, whose steps run by graphs, or launch by launch. A process does one of both: a device's memory is its own until it
/// ends.
pub fn run(device: &DeviceChoice, (sizes, eager): (Sizes, bool), seconds: u64) -> Result<()> {
    let ((name, shape), budget) = (sizes.shape(), Duration::from_secs(seconds));
    let weights = (shape.layer_weights() + shape.vocab * shape.hidden) as f64 * 2.0;
    let way = if eager { "eager" } else { "graphs" };
    let began = Instant::now();
    let mut model = model(device, shape, eager)?;
    println!("{name}.{way}.made {:.1} s -", began.elapsed().as_secs_f64());
    for seqs in [1, 8, 32, 128, SEQS_MAX] {
        let rate = rate_of(model.as_mut(), (seqs, 1), budget)?;
        tell(&format!("{name}.decode.{way}.batch{seqs}"), &rate, seqs);
        if seqs == 1 {
            println!(
                "{name}.decode.{way}.weights_read {:.0} GB/s >=60% of copy.bandwidth",
                rate.per_second * weights / 1e9
            );
        }
    }
    for seqs in [1, 4] {
        let rate = rate_of(model.as_mut(), (seqs, PROMPT), budget)?;
        tell(&format!("{name}.prefill.{way}.{}", seqs * PROMPT), &rate, seqs * PROMPT);
    }
    if !eager {
        let graphs = model.programs().map_or(0, |counts| counts.graphs.load(Relaxed));
        println!("{name}.graphs_run {graphs} steps >0");
        tax(name, model.as_mut(), budget)?;
    }
    Ok(())
}

fn tell(name: &str, rate: &Rate, tokens: usize) {
    println!("{name} {:.1} tok/s - (runs differ by {:.1} %)", rate.per_second * tokens as f64, rate.spread);
}

/// What a deadline on every wait costs (E1): runs with and without one take turns.
fn tax(name: &str, model: &mut dyn Model, budget: Duration) -> Result<()> {
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        for (allowed, rates) in [(Some(ALLOWED), &mut with), (None, &mut without)] {
            model.terms(&StepTerms { allowed, ..StepTerms::default() });
            rates.push(once(model, (1, 1), budget / RUNS as u32)?);
        }
    }
    model.terms(&StepTerms { allowed: Some(ALLOWED), ..StepTerms::default() });
    let (with, without) = (median(with), median(without));
    println!("{name}.deadlines_cost {:.2} % <=0.5", (without.per_second / with.per_second - 1.0) * 100.0);
    Ok(())
}

/// Bytes that a copy on the device moves in a second, read and written.
pub fn copy(device: &DeviceChoice, seconds: u64) -> Result<()> {
    let budget = Duration::from_secs(seconds);
    let backend = open::open(device, &mut |_, _| {})?;
    let step = StepStart { shape: 0, allowed: Some(ALLOWED) };
    backend.begin_step(&step);
    let (from, mut to) = (backend.upload(1, COPIED, vec![1.0; COPIED]), Matrix::default());
    backend.copy(&from, &mut to);
    backend.end_step().context("the first copy")?;
    let (began, mut copies) = (Instant::now(), 0u32);
    while began.elapsed() < budget / 2 {
        (0..10).for_each(|_| backend.copy(&from, &mut to));
        backend.end_step().context("a copy")?;
        copies += 10;
    }
    let rate = f64::from(copies) * (COPIED * 8) as f64 / began.elapsed().as_secs_f64();
    println!("copy.bandwidth {:.0} GB/s -", rate / 1e9);
    Ok(())
}

fn rate_of(model: &mut dyn Model, shape: (usize, usize), budget: Duration) -> Result<Rate> {
    let graphs = |model: &dyn Model| model.programs().map(|counts| counts.graphs.load(Relaxed));
    let (before, began) = (graphs(model), Instant::now());
    for index in 0.. {
        let waits = before.is_some() && graphs(model) == before && began.elapsed() < WARM_MAX;
        if index >= WARM_STEPS && !waits {
            break;
        }
        model.forward(&step(shape.0, shape.1, position(shape, index)))?;
    }
    let rates: Result<Vec<f64>> = (0..RUNS).map(|_| once(model, shape, budget / RUNS as u32)).collect();
    Ok(median(rates?))
}

/// Steps in a second.
fn once(model: &mut dyn Model, shape: (usize, usize), budget: Duration) -> Result<f64> {
    let (began, mut steps) = (Instant::now(), 0usize);
    while steps == 0 || began.elapsed() < budget {
        model.forward(&step(shape.0, shape.1, position(shape, steps)))?;
        steps += 1;
    }
    Ok(steps as f64 / began.elapsed().as_secs_f64())
}

/// Decodes go on from a context of 512; prompts begin anew.
fn position((_, tokens): (usize, usize), index: usize) -> usize {
    if tokens == 1 { 512 + index % 256 } else { 0 }
}

fn median(mut rates: Vec<f64>) -> Rate {
    rates.sort_by(f64::total_cmp);
    let (per_second, least, most) = (rates[rates.len() / 2], rates[0], rates[rates.len() - 1]);
    Rate { per_second, spread: (most - least) / per_second * 100.0 }
}
