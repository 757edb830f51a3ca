//! A backend whose weights are shared by ranks: each operation is the inner backend's on this rank's part, and a product of a weight that
//! was cut is then summed or gathered. The decoder above does not know.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::Team;
use crate::backend::{
    AttentionSeq, AttentionUnit, Backend, DeviceFault, HeadShape, KvSize, OutOfMemory, Part, Peers, Preparer, QkvRows,
    StepStart, WeightShape,
};
use crate::waits::Tids;
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

impl<B: Backend> RankBackend<B> {
    pub fn new(inner: B, team: Arc<Team>) -> Self {
        let untold = team.helped_by(inner.helpers());
        if untold > 0 {
            tracing::warn!(
                rank = team.rank(),
                untold,
                "more threads than other ranks can be told of: a step that waits for these is not forgiven"
            );
        }
        Self { inner, team }
    }

    /// Sums `out` over the ranks: on the devices where they have a link, else through the ranks' memory.
    fn sum(&self, out: &mut B::Matrix, outputs: usize) {
        if self.spoils() || self.inner.sum_over_ranks(out) {
            return;
        }
        let mut values = self.inner.download(std::mem::take(out));
        if !self.spoils() {
            self.team.all_reduce(&mut values);
        }
        *out = self.inner.upload(values.len() / outputs.max(1), outputs, values);
    }

    fn gather(&self, out: &mut B::Matrix, widths: &[usize]) {
        if self.spoils() || self.inner.gather_over_ranks(out, widths) {
            return;
        }
        let mine = self.inner.download(std::mem::take(out));
        let cols = widths.iter().sum::<usize>();
        let all = if self.spoils() { Vec::new() } else { self.team.all_gather(&mine, widths) };
        *out = self.inner.upload(all.len() / cols.max(1), cols, all);
    }

    /// Whether this rank's device failed in this step; the others have been told then.
    fn spoils(&self) -> bool {
        self.inner.failed().map(|fault| self.team.tell_of(fault)).is_some()
    }
}

impl Team {
    /// A device that failed brings nothing that others may add up: they need not wait for it, in this step (EP5) or any more. (With waits for
    /// ever no step is agreed on that could be spoilt alone.)
    fn tell_of(&self, fault: DeviceFault) {
        match fault {
            DeviceFault::OutOfMemory(_) if self.allowed().is_none() => (),
            DeviceFault::OutOfMemory(error) => self.spoil(&error.to_string()),
            DeviceFault::Stuck(stuck) => drop(self.fail(stuck)),
        }
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
            Part::Inputs(_) => self.sum(out, weight.outputs),
            Part::Gathered { widths, .. } => self.gather(out, widths),
        }
    }

    fn embed_into(&self, table: &Self::Weight, tokens: &mut dyn Iterator<Item = u32>, out: &mut B::Matrix) {
        self.inner.embed_into(&table.weight, tokens, out);
    }

    // the rest is this rank's own

    fn helpers(&self) -> Tids {
        self.inner.helpers()
    }

    fn waits(&self) -> bool {
        self.inner.waits()
    }

    fn hang(&self) -> bool {
        self.inner.hang()
    }

    fn failed(&self) -> Option<DeviceFault> {
        self.inner.failed()
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
        // all ranks have loaded, and none is started anew any more
        let peers: Arc<dyn Peers> = self.team.clone();
        self.inner.join(&peers);
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

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
mod tests {
    use super::*;
    use crate::stuck::{Stuck, StuckKind};
    use std::time::Duration;

    #[test]
    fn others_go_on_without_a_device_that_lacked_memory_and_give_up_on_one_that_hangs() {
        let (first, file) = Team::create(2).unwrap();
        let second = Team::join(&file, 1, 2).unwrap();
        let agree = |step| {
            let (first, second) = (&first, &second);
            std::thread::scope(|scope| {
                let other = scope.spawn(move || second.agree(step, 7));
                let mine = first.agree(step, 7);
                mine.and(other.join().unwrap())
            })
        };
        for team in [&first, &second] {
            team.allow(Some(Duration::from_secs(60)));
        }
        agree(1).unwrap();
        second.tell_of(OutOfMemory { needed_bytes: 9, reason: "8 are free".into() }.into());
        first.all_reduce(&mut [1.0]);
        let why = "9 bytes are wanted at once: 8 are free".to_owned();
        assert_eq!((first.fault(), first.spoiled()), (None, Some((1, why))));
        agree(2).unwrap();
        second.allow(None);
        second.tell_of(OutOfMemory { needed_bytes: 9, reason: "8 are free".into() }.into());
        assert_eq!(first.spoiled(), None, "the next step is another, and nobody hears of it where waits have no end");
        let (kind, waited) = (StuckKind::DeviceWait, Duration::ZERO);
        second.tell_of(Stuck { kind, text: "its event did not come".into(), waited }.into());
        first.all_reduce(&mut [1.0]);
        let stuck = first.fault().unwrap();
        assert_eq!(stuck.kind, StuckKind::RankSilent { ranks: vec![1] });
        assert_eq!(stuck.text, "rank 1 gave up: its event did not come");
    }
}
