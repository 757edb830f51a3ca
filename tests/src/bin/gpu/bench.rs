//! Figures of the device, `name value unit goal` a line: what the memory gives, and what decode and prefill make of it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use engine::backend::cuda::Matrix;
use engine::backend::cuda::open::{self, DeviceChoice};
use engine::backend::{Backend, StepStart};
use engine::model::Model;

use crate::hold::{ALLOWED, SHAPE, model, step};

/// Values of the matrix that is copied: 1 GiB.
const COPIED: usize = 256 << 20;
const WARM_STEPS: usize = 20;

/// All figures.
pub fn run(device: &DeviceChoice, seconds: u64) -> Result<()> {
    let budget = Duration::from_secs(seconds);
    let bandwidth = copy_bandwidth(device, budget)?;
    println!("copy.bandwidth {:.0} GB/s -", bandwidth / 1e9);
    let weights = (SHAPE.layer_weights() + SHAPE.vocab * SHAPE.hidden) as f64 * 2.0;
    let mut rates = Vec::new();
    for eager in [true, false] {
        let way = if eager { "eager" } else { "graphs" };
        let mut model = model(device, eager)?;
        for seqs in [1, 8, 32] {
            let rate = steps_per_second(model.as_mut(), (seqs, 1), budget)?;
            println!("decode.{way}.batch{seqs} {:.1} tok/s -", rate * seqs as f64);
            if seqs == 1 {
                let share = rate * weights / bandwidth * 100.0;
                println!("decode.{way}.bandwidth {share:.1} % >=60");
                rates.push(rate);
            }
        }
        let rate = steps_per_second(model.as_mut(), (1, 512), budget)?;
        println!("prefill.{way}.512 {:.0} tok/s -", rate * 512.0);
    }
    if let [eager, graphs] = rates[..] {
        println!("decode.graphs_over_eager {:.2} x >=1.5", graphs / eager);
    }
    Ok(())
}

/// Bytes that a copy on the device moves in a second, read and written.
fn copy_bandwidth(device: &DeviceChoice, budget: Duration) -> Result<f64> {
    let backend = open::open(device, &mut |_, _| {})?;
    let step = StepStart { shape: 0, allowed: Some(ALLOWED) };
    backend.begin_step(&step);
    let (from, mut to) = (backend.upload(1, COPIED, vec![1.0; COPIED]), Matrix::default());
    backend.copy(&from, &mut to);
    backend.end_step().context("the first copy")?;
    let (began, mut copies) = (Instant::now(), 0u32);
    while began.elapsed() < budget {
        (0..10).for_each(|_| backend.copy(&from, &mut to));
        backend.end_step().context("a copy")?;
        copies += 10;
    }
    Ok(f64::from(copies) * (COPIED * 8) as f64 / began.elapsed().as_secs_f64())
}

fn steps_per_second(model: &mut dyn Model, (seqs, tokens): (usize, usize), budget: Duration) -> Result<f64> {
    // decodes go on from a context of 512; prompts begin anew
    let pos = |index: usize| if tokens == 1 { 512 + index % 256 } else { 0 };
    for index in 0..WARM_STEPS {
        model.forward(&step(seqs, tokens, pos(index)))?;
    }
    let (began, mut steps) = (Instant::now(), 0usize);
    while began.elapsed() < budget {
        model.forward(&step(seqs, tokens, pos(steps)))?;
        steps += 1;
    }
    Ok(steps as f64 / began.elapsed().as_secs_f64())
}
