//! Attention over the paged cache: right for every shape, and the same bits whatever blocks, chunks, neighbours and threads.

use super::*;
use reference::{Rounds, plain, rounded};

mod deep;
mod reference;
mod touched;

struct Case {
    heads: HeadShape,
    len: usize,
    block_size: usize,
    window: Option<usize>,
    /// Positions before this one are seen by themselves alone.
    since: usize,
}

impl Case {
    fn inputs(&self, seed: u64) -> [Matrix; 3] {
        let HeadShape { heads, kv_heads, head_dim } = self.heads;
        let widths = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim];
        std::array::from_fn(|i| matrix(self.len, widths[i], seed + i as u64))
    }

    /// Runs rows `chunk` after chunk, a neighbour's rows before ours, in blocks that lie backwards.
    fn run(&self, b: &CpuBackend, [q, k, v]: &[Matrix; 3], chunk: usize, neighbour: bool) -> Matrix {
        let count = self.len.div_ceil(self.block_size) as u32;
        let (mine, other): (Vec<u32>, Vec<u32>) = ((0..count).rev().collect(), (count..2 * count).collect());
        let size = KvSize { layers: 1, num_blocks: 2 * count as usize, block_size: self.block_size };
        let mut kv = b.kv_cache(size, self.heads).unwrap();
        leave_no_numbers(b, &mut kv, size, self.heads);
        let mut values = Vec::new();
        for start in (0..self.len).step_by(chunk) {
            let rows: Vec<usize> = (start..self.len.min(start + chunk)).collect();
            let slot =
                |blocks: &[u32], p: usize| blocks[p / self.block_size] as usize * self.block_size + p % self.block_size;
            let mut all: Vec<usize> = rows.clone();
            let mut slots: Vec<usize> = rows.iter().map(|p| slot(&mine, *p)).collect();
            let seq = |blocks| AttentionSeq { rows: rows.len(), start_pos: start, since: self.since, blocks };
            let mut seqs = vec![seq(&mine)];
            if neighbour {
                all = rows.iter().map(|p| self.len - 1 - p).chain(all).collect();
                slots = rows.iter().map(|p| slot(&other, *p)).chain(slots).collect();
                seqs.insert(0, seq(&other));
            }
            b.store_kv(&mut kv, 0, &b.gather_rows(k, &all), &b.gather_rows(v, &all), &slots);
            let out = b.attention(&b.gather_rows(q, &all), (&kv, 0), &seqs, self.heads, self.window);
            values.extend_from_slice(&out.values[out.values.len() - rows.len() * q.cols..]);
        }
        Matrix { rows: self.len, cols: q.cols, values }
    }

    fn check(&self, seed: u64) {
        let inputs = self.inputs(seed);
        let [q, k, v] = &inputs;
        for (isa, precision) in
            Isa::all().into_iter().flat_map(|isa| [(isa, Precision::Exact), (isa, Precision::Native)])
        {
            let rounds = Rounds::of(isa, precision);
            let cached = (&rounded(k, rounds.cache), &rounded(v, rounds.cache));
            let got = self.run(&backend(isa, 1, precision), &inputs, self.len, false);
            for pos in 0..self.len {
                let first = self.window.map_or(0, |window| (pos + 1).saturating_sub(window)).max(self.since).min(pos);
                let wants = plain(q.row(pos), cached, first..pos + 1, self.heads, rounds);
                let met = got.row(pos).iter().zip(&wants).all(|(got, want)| want.is_met_by(f64::from(*got)));
                assert!(met, "{} {precision:?} at {pos}", isa.name());
            }
            for (threads, chunk, neighbour) in [(1, 1, false), (3, 7, true), (1, 20, true)] {
                let again = self.run(&backend(isa, threads, precision), &inputs, chunk, neighbour);
                assert!(again == got, "{} {precision:?} in chunks of {chunk}", isa.name());
            }
            let other = Self { block_size: self.block_size % 7 + 1, ..*self };
            assert!(other.run(&backend(isa, 1, precision), &inputs, 9, false) == got, "another block size");
        }
    }
}

/// What the requests before have left in the cache: none of it may reach a row.
fn leave_no_numbers(b: &CpuBackend, kv: &mut Kv, size: KvSize, heads: HeadShape) {
    let slots: Vec<usize> = (0..size.num_blocks * size.block_size).collect();
    let cols = heads.kv_heads * heads.head_dim;
    let broken = Matrix { rows: slots.len(), cols, values: vec![f32::NAN; slots.len() * cols] };
    b.store_kv(kv, 0, &broken, &broken, &slots);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, ..ProptestConfig::default() })]

    #[test]
    fn attention_is_right_and_its_own_for_any_shape(
        kv_heads in 1usize..3, group in 1usize..6, half_dim in 1usize..20, len in 1usize..100,
        block_size in prop_oneof![Just(16usize), Just(32), 1usize..20],
        window in prop_oneof![Just(None), (1usize..80).prop_map(Some)], since in 0usize..5, seed in any::<u32>(),
    ) {
        let heads = HeadShape { heads: kv_heads * group, kv_heads, head_dim: 2 * half_dim };
        Case { heads, len, block_size, window, since }.check(u64::from(seed));
    }
}

#[test]
fn long_sequences_cross_many_tiles() {
    for (per_kv, head_dim, window) in [(2, 32, None), (2, 32, Some(100)), (3, 64, None), (1, 96, Some(70))] {
        let heads = HeadShape { heads: 2 * per_kv, kv_heads: 2, head_dim };
        Case { heads, len: 140, block_size: 16, window, since: 0 }.check(5);
    }
}

#[test]
fn a_cache_beyond_the_machine_is_an_error() {
    let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 64 };
    let size = |num_blocks| KvSize { layers: 1, num_blocks, block_size: 16 };
    let error = CpuBackend::new(1).kv_cache(size(usize::MAX / 2), heads).unwrap_err();
    assert!(error.to_string().contains("bytes"), "{error}");
    assert!(CpuBackend::new(1).kv_cache(size(1 << 46), heads).is_err());
}
