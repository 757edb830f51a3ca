//! A backend whose weights are shared by ranks: each operation is the inner backend's on this rank's part, and a product of a weight that
//! was cut is then summed or gathered. The decoder above does not know.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::Team;
use crate::backend::{
    AttentionSeq, AttentionUnit, Backend, DeviceFault, HeadShape, KvSize, OutOfMemory, Part, Preparer, QkvRows,
    StepStart, WeightShape,
};
use crate::weights::{Bytes, RawWeight};

/// This rank's share of a device.
pub struct RankBackend<B> {
    inner: B,
    team: Arc<Team>,
}

/// A rank's part of a weight.
pub struct RankWeight<W> {
    weight: W,
    part: Part,
    outputs: usize,
}

impl<B> RankBackend<B> {
    pub fn new(inner: B, team: Arc<Team>) -> Self {
        Self { inner, team }
    }
}

impl<B: Backend> Backend for RankBackend<B> {
    type Matrix = B::Matrix;
    type Weight = RankWeight<B::Weight>;
    type Kv = B::Kv;
    type Scratch = B::Scratch;

    fn weight(&self, raw: RawWeight) -> Self::Weight {
        self.weight_part(raw, &Part::Whole)
    }

    fn weight_part(&self, raw: RawWeight, part: &Part) -> Self::Weight {
        let outputs = raw.rows;
        RankWeight { weight: self.inner.weight(raw), part: part.clone(), outputs }
    }

    fn preparer(&self) -> Option<&dyn Preparer> {
        self.inner.preparer()
    }

    fn prepared(&self, shape: WeightShape, bytes: Bytes, part: &Part) -> Option<Self::Weight> {
        let weight = self.inner.prepared(shape, bytes, part)?;
        Some(RankWeight { weight, part: part.clone(), outputs: shape.rows })
    }

    fn linear_into(
        &self,
        input: (&B::Matrix, bool),
        weight: &Self::Weight,
        bias: Option<&B::Matrix>,
        (out, scratch): (&mut B::Matrix, &mut B::Scratch),
    ) {
        // a sum over the ranks has its bias once
        let summed = matches!(weight.part, Part::Inputs(_));
        let bias = bias.filter(|_| !summed || self.team.rank() == 0);
        self.inner.linear_into(input, &weight.weight, bias, (out, scratch));
        match &weight.part {
            Part::Whole | Part::Outputs(_) => (),
            Part::Inputs(_) => {
                let mut values = self.inner.download(std::mem::take(out));
                self.team.all_reduce(&mut values);
                *out = self.inner.upload(values.len() / weight.outputs.max(1), weight.outputs, values);
            }
            Part::Gathered { widths, .. } => {
                let all = self.team.all_gather(&self.inner.download(std::mem::take(out)), widths);
                let cols = widths.iter().sum::<usize>();
                *out = self.inner.upload(all.len() / cols.max(1), cols, all);
            }
        }
    }

    fn embed_into(&self, table: &Self::Weight, tokens: &mut dyn Iterator<Item = u32>, out: &mut B::Matrix) {
        self.inner.embed_into(&table.weight, tokens, out);
    }

    // the rest is this rank's own

    fn waits(&self) -> bool {
        self.inner.waits()
    }

    fn begin_step(&self, step: &StepStart) {
        self.inner.begin_step(step);
    }

    fn end_layer(&self, pulse: &Arc<AtomicU64>) {
        self.inner.end_layer(pulse);
    }

    fn end_step(&self) -> Result<(), DeviceFault> {
        self.inner.end_step()
    }

    fn place_qkv(
        &self,
        qkv: QkvRows<'_, B::Matrix>,
        norms: Option<(&B::Matrix, &B::Matrix, f32)>,
        angles: (&B::Matrix, &B::Matrix),
        kv: (&mut B::Kv, usize),
        slots: &[usize],
    ) {
        self.inner.place_qkv(qkv, norms, angles, kv, slots);
    }

    fn upload(&self, rows: usize, cols: usize, values: Vec<f32>) -> B::Matrix {
        self.inner.upload(rows, cols, values)
    }

    fn download(&self, x: B::Matrix) -> Vec<f32> {
        self.inner.download(x)
    }

    fn kv_bytes(&self, size: KvSize, heads: HeadShape) -> Option<u64> {
        self.inner.kv_bytes(size, heads)
    }

    fn kv_cache(&self, size: KvSize, heads: HeadShape) -> Result<B::Kv, OutOfMemory> {
        self.inner.kv_cache(size, heads)
    }

    fn rope(&self, x: &mut B::Matrix, cos: &B::Matrix, sin: &B::Matrix) {
        self.inner.rope(x, cos, sin);
    }

    fn store_kv(&self, kv: &mut B::Kv, layer: usize, k: &B::Matrix, v: &B::Matrix, slots: &[usize]) {
        self.inner.store_kv(kv, layer, k, v, slots);
    }

    fn rows(&self, x: &B::Matrix) -> Vec<Vec<f32>> {
        self.inner.rows(x)
    }

    fn copy(&self, x: &B::Matrix, out: &mut B::Matrix) {
        self.inner.copy(x, out);
    }

    fn rms_norm_over(&self, x: &mut B::Matrix, weight: &B::Matrix, eps: f32) {
        self.inner.rms_norm_over(x, weight, eps);
    }

    fn attention_into(
        &self,
        q: &B::Matrix,
        kv: (&B::Kv, usize),
        seqs: (&[AttentionSeq<'_>], &[AttentionUnit]),
        heads: (HeadShape, Option<usize>),
        out: &mut B::Matrix,
    ) {
        self.inner.attention_into(q, kv, seqs, heads, out);
    }

    fn gather_into(&self, x: &B::Matrix, rows: &[usize], out: &mut B::Matrix) {
        self.inner.gather_into(x, rows, out);
    }

    fn silu_mul(&self, gate: &mut B::Matrix, up: &B::Matrix) {
        self.inner.silu_mul(gate, up);
    }

    fn add(&self, x: &mut B::Matrix, y: &B::Matrix) {
        self.inner.add(x, y);
    }

    fn scatter_add(&self, x: &mut B::Matrix, rows: &[usize], y: &B::Matrix, weights: &[f32]) {
        self.inner.scatter_add(x, rows, y, weights);
    }
}
