//! Attention over the paged cache against the oracle, for decode and prefill, and the promise that splits, chunks, neighbours and blocks change
//! no bit. K and V in f32; those in bf16 are in rounded.rs.

use engine::backend::cuda::CudaOptions;
use engine::backend::cuda::driver::Driver;
use engine::backend::{AttentionSeq, Backend, HeadShape, KvSize};

pub use crate::ops::OnHost;
use crate::ops::{EXACT, Make, Numbers, assert_close, oracle};

pub struct Case {
    pub heads: HeadShape,
    pub len: usize,
    pub block_size: usize,
    pub window: Option<usize>,
    /// Positions before this one are seen by themselves alone.
    pub since: usize,
}

impl Case {
    pub fn inputs(&self, seed: u64) -> [Vec<f32>; 3] {
        let HeadShape { heads, kv_heads, head_dim } = self.heads;
        [heads, kv_heads, kv_heads].map(|count| Numbers(seed + count as u64).values(self.len * count * head_dim))
    }

    /// Runs all rows, chunk after chunk, in blocks that lie backwards; a neighbour's rows first where one is wanted.
    pub fn run<B: Backend>(&self, b: &B, inputs: &[Vec<f32>; 3], chunk: usize, neighbour: bool) -> Vec<f32> {
        let HeadShape { heads, kv_heads, head_dim } = self.heads;
        let count = self.len.div_ceil(self.block_size) as u32;
        let (mine, other): (Vec<u32>, Vec<u32>) = ((0..count).rev().collect(), (count..2 * count).collect());
        let size = KvSize { layers: 1, num_blocks: 2 * count as usize, block_size: self.block_size };
        let mut kv = b.kv_cache(size, self.heads).unwrap();
        let widths = [heads, kv_heads, kv_heads].map(|count| count * head_dim);
        let [q, k, v] = [0, 1, 2].map(|i| b.upload(self.len, widths[i], inputs[i].clone()));
        let slot =
            |blocks: &[u32], p: usize| blocks[p / self.block_size] as usize * self.block_size + p % self.block_size;
        let mut values = Vec::new();
        for start in (0..self.len).step_by(chunk) {
            let own: Vec<usize> = (start..self.len.min(start + chunk)).collect();
            let mut rows = own.clone();
            let mut slots: Vec<usize> = own.iter().map(|p| slot(&mine, *p)).collect();
            let seq = |blocks| AttentionSeq { rows: own.len(), start_pos: start, since: self.since, blocks };
            let mut seqs = vec![seq(&mine)];
            if neighbour {
                rows = own.iter().map(|p| self.len - 1 - p).chain(rows).collect();
                slots = own.iter().map(|p| slot(&other, *p)).chain(slots).collect();
                seqs.insert(0, seq(&other));
            }
            b.store_kv(&mut kv, 0, &b.gather_rows(&k, &rows), &b.gather_rows(&v, &rows), &slots);
            let out = b.rows(&b.attention(&b.gather_rows(&q, &rows), (&kv, 0), &seqs, self.heads, self.window));
            values.extend(out[rows.len() - own.len()..].concat());
        }
        b.end_step().unwrap();
        values
    }

    /// Neither chunks of these lengths, with a neighbour or without, nor other blocks in chunks of `other` change a bit of `whole`.
    pub fn assert_alike<B: Backend>(
        &self,
        (b, inputs, whole): (&B, &[Vec<f32>; 3], &[f32]),
        chunks: &[(usize, bool)],
        other: usize,
        what: &str,
    ) {
        for (chunk, neighbour) in chunks {
            assert!(self.run(b, inputs, *chunk, *neighbour) == whole, "{what} in chunks of {chunk}");
        }
        let others = Self { block_size: self.block_size % 7 + 1, ..*self };
        assert!(others.run(b, inputs, other, false) == whole, "{what} in other blocks");
    }
}

fn cases() -> Vec<Case> {
    let shape = |heads, kv_heads, head_dim| HeadShape { heads, kv_heads, head_dim };
    let case = |heads, len, block_size, window| Case { heads, len, block_size, window, since: len % 3 };
    vec![
        case(shape(4, 2, 32), 70, 16, None),
        case(shape(4, 2, 32), 70, 16, Some(40)),
        case(shape(12, 1, 16), 33, 5, None),
        case(shape(3, 3, 6), 40, 7, Some(1)),
        case(shape(2, 1, 256), 35, 32, Some(33)),
    ]
}

fn all<D: Driver>(make: Make<'_, D>) {
    for (index, case) in cases().iter().enumerate() {
        let inputs = case.inputs(index as u64);
        let b = make(EXACT);
        let got = case.run(&b, &inputs, case.len, false);
        assert_close(&got, &case.run(&oracle(), &inputs, case.len, false), 1e-4, &format!("case {index}"));
        let chunks = [(1, false), (7, true), (20, false)];
        case.assert_alike((&b, &inputs, &got), &chunks, 9, &format!("case {index}"));
    }
}
test_backend!(attention_matches, super::all);

/// Contexts of several splits: rows that go through all of them (more than 64 at once) and rows whose splits are joined have the same bits.
fn long<D: Driver>(make: Make<'_, D>) {
    for window in [None, Some(300)] {
        let case = Case {
            heads: HeadShape { heads: 2, kv_heads: 1, head_dim: 8 },
            len: 560,
            block_size: 16,
            window,
            since: 1,
        };
        let (inputs, b) = (case.inputs(3), make(EXACT));
        let whole = case.run(&b, &inputs, case.len, false);
        assert_close(&whole, &case.run(&oracle(), &inputs, case.len, false), 1e-4, "a long context");
        for (chunk, neighbour) in [(60, false), (31, true)] {
            assert!(case.run(&b, &inputs, chunk, neighbour) == whole, "window {window:?}, chunks of {chunk}");
        }
    }
}
test_backend!(splits_change_no_bit, super::long);

/// What is no number in a later row of a chunk, or in a slot that nobody wrote, is seen by nobody else.
fn poisoned<D: Driver>(make: Make<'_, D>) {
    let case = &cases()[0];
    let [q, mut k, mut v] = case.inputs(2);
    let b = make(EXACT);
    let clean = case.run(&b, &[q.clone(), k.clone(), v.clone()], case.len, false);
    let (row, width, wide) = (41, 2 * 32, 4 * 32);
    k[row * width] = f32::NAN;
    v[row * width + 1] = f32::INFINITY;
    let got = case.run(&b, &[q, k, v], case.len, false);
    assert!(got[..row * wide] == clean[..row * wide], "rows before it");
    assert!(got[row * wide..].iter().any(|value| !value.is_finite()), "the row itself");
}
test_backend!(what_is_no_number_stays_where_it_is, super::poisoned);
