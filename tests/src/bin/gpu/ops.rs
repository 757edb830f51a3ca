//! How long each operation of a decoder takes by itself, `name value us` a line: where a step's time goes. Launched one by one, so that
//! no figure is less than what a launch costs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use engine::backend::cuda::open::{self, DeviceChoice, Nvidia};
use engine::backend::cuda::{CudaBackend, Matrix, Weight};
use engine::backend::{AttentionSeq, Backend, HeadShape, KvSize, StepStart};
use engine::model::RandomShape;
use engine::sampling::Draw;
use engine::weights::{RawWeight, WeightType};

use crate::hold::{ALLOWED, BLOCK, ROOM};

/// Calls of one figure: as many as a device queues without making its caller wait.
const CALLS: u32 = 200;
const CONTEXT: usize = 640;

/// All operations of one layer, the head and the draw, for each number of sequences.
pub fn run(device: &DeviceChoice, (name, shape): (&'static str, RandomShape), batches: &[usize]) -> Result<()> {
    let backend = open::open(device, &mut |_, _| {})?;
    backend.begin_step(&StepStart { shape: 0, allowed: Some(ALLOWED) });
    let bench = Bench { b: &backend, name, shape };
    let (hidden, inter) = (shape.hidden, shape.intermediate);
    let (q, kv) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let sizes = [
        ("q", hidden, q),
        ("k", hidden, kv),
        ("o", q, hidden),
        ("up", hidden, inter),
        ("down", inter, hidden),
        ("head", hidden, shape.vocab),
    ];
    let weights: Vec<_> =
        sizes.iter().map(|(_, cols, outputs)| bench.weight(*cols, *outputs)).collect::<Result<_>>()?;
    for rows in batches.iter().copied() {
        for ((what, cols, outputs), weight) in sizes.iter().zip(&weights) {
            bench.product(what, (rows, *cols, *outputs), weight)?;
        }
        bench.others(rows)?;
        bench.attention(rows)?;
    }
    Ok(())
}

struct Bench<'a> {
    b: &'a CudaBackend<Nvidia>,
    name: &'static str,
    shape: RandomShape,
}

impl Bench<'_> {
    fn weight(&self, cols: usize, outputs: usize) -> Result<Weight> {
        let bytes: Vec<u8> =
            (0..cols * outputs * 2).map(|i| if i % 2 == 0 { (i / 2 % 251) as u8 } else { 0x3c }).collect();
        Ok(self.b.weight(RawWeight::new(outputs, cols, WeightType::Bf16, bytes.into()).context("its bytes")?))
    }

    fn rows(&self, rows: usize, cols: usize) -> Matrix {
        self.b.upload(rows, cols, (0..rows * cols).map(|i| (i % 97) as f32 * 0.01).collect())
    }

    /// The mean of calls in a row.
    fn time(&self, what: &str, mut call: impl FnMut()) -> Result<Duration> {
        (0..3).for_each(|_| call());
        self.b.end_step().context("warming")?;
        let began = Instant::now();
        (0..CALLS).for_each(|_| call());
        self.b.end_step().with_context(|| what.to_owned())?;
        Ok(began.elapsed() / CALLS)
    }

    fn tell(&self, what: &str, rows: usize, call: impl FnMut()) -> Result<()> {
        let took = self.time(what, call)?;
        println!("{}.{what}.{rows} {:.1} us", self.name, took.as_secs_f64() * 1e6);
        Ok(())
    }

    fn product(&self, what: &str, (rows, cols, outputs): (usize, usize, usize), weight: &Weight) -> Result<()> {
        let (x, mut out) = (self.rows(rows, cols), Matrix::default());
        let took = self.time(what, || self.b.linear_into((&x, false), weight, None, (&mut out, &mut ())))?;
        let (bytes, flops) = ((cols * outputs * 2) as f64, (2 * rows * cols * outputs) as f64);
        let (name, seconds) = (self.name, took.as_secs_f64());
        println!(
            "{name}.{what}.{rows} {:.1} us {:.0} GB/s of weights, {:.0} TFLOP/s",
            seconds * 1e6,
            bytes / seconds / 1e9,
            flops / seconds / 1e12
        );
        Ok(())
    }

    fn others(&self, rows: usize) -> Result<()> {
        let (b, shape) = (self.b, &self.shape);
        let (mut x, y, one) =
            (self.rows(rows, shape.hidden), self.rows(rows, shape.hidden), self.rows(1, shape.hidden));
        let (mut gate, up) = (self.rows(rows, shape.intermediate), self.rows(rows, shape.intermediate));
        self.tell("norm", rows, || b.rms_norm_over(&mut x, &one, 1e-6))?;
        self.tell("add", rows, || b.add(&mut x, &y))?;
        self.tell("silu_mul", rows, || b.silu_mul(&mut gate, &up))?;
        let logits = self.rows(rows, shape.vocab);
        for (what, temperature) in [("draw_greedy", 0.0), ("draw", 0.8)] {
            let draws = vec![Draw { temperature, top_p: 0.9, top_k: 0, min_p: 0.0, unit: 0.5 }; rows];
            let began = Instant::now();
            (0..10).for_each(|_| drop(b.sample(&logits, &draws)));
            println!("{}.{what}.{rows} {:.1} us", self.name, began.elapsed().as_secs_f64() * 1e5);
        }
        Ok(())
    }

    fn attention(&self, rows: usize) -> Result<()> {
        let RandomShape { heads, kv_heads, head_dim, .. } = self.shape;
        let heads = HeadShape { heads, kv_heads, head_dim };
        let (b, blocks) = (self.b, ROOM / BLOCK);
        let mut kv = b.kv_cache(KvSize { layers: 1, num_blocks: rows * blocks, block_size: BLOCK }, heads)?;
        let [mut q, mut k, v] = [heads.heads, kv_heads, kv_heads].map(|count| self.rows(rows, count * head_dim));
        let [cos, sin] = [(); 2].map(|()| self.rows(rows, head_dim / 2));
        let slots: Vec<usize> = (0..rows).map(|row| row * ROOM + CONTEXT - 1).collect();
        let norm = self.rows(1, head_dim);
        self.tell("place", rows, || {
            b.place_qkv((&mut q, &mut k, &v), Some((&norm, &norm, 1e-6)), (&cos, &sin), (&mut kv, 0), &slots);
        })?;
        let tables: Vec<Vec<u32>> =
            (0..rows).map(|row| ((row * blocks) as u32..((row + 1) * blocks) as u32).collect()).collect();
        let seqs: Vec<_> =
            tables.iter().map(|blocks| AttentionSeq { rows: 1, start_pos: CONTEXT - 1, since: 0, blocks }).collect();
        let units = engine::backend::attention_units(seqs.iter().map(|seq| seq.rows), heads);
        let mut out = Matrix::default();
        self.tell("attention", rows, || b.attention_into(&q, (&kv, 0), (&seqs, &units), (heads, None), &mut out))?;
        let prompt = [AttentionSeq { rows: rows.max(64), start_pos: 0, since: 0, blocks: &tables[0] }];
        let units = engine::backend::attention_units(prompt.iter().map(|seq| seq.rows), heads);
        let q = self.rows(rows.max(64), heads.heads * head_dim);
        self.tell("attention_of_a_prompt", rows.max(64), || {
            b.attention_into(&q, (&kv, 0), (&prompt, &units), (heads, None), &mut out);
        })
    }
}
