//! A token far behind the beginning, by every way that this machine has and by products of pairs on any machine: averages over thousands of
//! positions are small, so what a kernel may be off is measured by what is added up, and is less than any one tile makes.

use std::ops::Range;

use super::super::super::attention::{AttentionOp, PairsOp};
use super::super::super::output::Output;
use super::reference::{Rounds, Want, plain, rounded};
use super::*;
use crate::backend::attention_units;

/// Positions that are taken together, wherever they begin.
const TILE: usize = 64;
/// The last position says it louder: alone in its tile it would be lost among thousands.
const LOUD: f32 = 64.0;

struct Deep {
    heads: HeadShape,
    block_size: usize,
    len: usize,
    /// The last of them, which are asked for.
    rows: usize,
}

/// How it is computed.
#[derive(Clone, Copy)]
enum Way {
    Backend(Isa, Precision),
    /// Products of pairs, by whatever the set has for it.
    Pairs(Isa),
}

impl Way {
    /// All that this machine has.
    fn all() -> Vec<Self> {
        let ways = |isa| {
            let natives = [Precision::Exact, Precision::Native].map(|precision| Self::Backend(isa, precision));
            natives.into_iter().chain([Self::Pairs(isa)])
        };
        Isa::all().into_iter().flat_map(ways).collect()
    }

    fn rounds(self) -> Rounds {
        match self {
            Self::Backend(isa, precision) => Rounds::of(isa, precision),
            Self::Pairs(_) => Rounds { cache: true, inputs: true },
        }
    }

    fn name(self) -> String {
        match self {
            Self::Backend(isa, precision) => format!("{} {precision:?}", isa.name()),
            Self::Pairs(isa) => format!("{} in pairs", isa.name()),
        }
    }
}

impl Deep {
    fn inputs(&self) -> [Matrix; 3] {
        let HeadShape { heads, kv_heads, head_dim } = self.heads;
        // of seeds of their own: a query that is the first key would see that one alone
        let (q, k) = (matrix(self.rows, heads * head_dim, 3), matrix(self.len, kv_heads * head_dim, 5));
        let mut v = matrix(self.len, kv_heads * head_dim, 4);
        let cols = v.cols;
        for (at, value) in v.values.iter_mut().enumerate() {
            // each tile has a word of its own in every column, which no other's average hides
            *value +=
                if SplitMix64((at / cols / TILE * cols + at % cols) as u64).next() >> 63 == 0 { 1.0 } else { -1.0 };
            *value *= if at / cols + 1 == self.len { LOUD } else { 1.0 };
        }
        [q, k, v]
    }

    fn run(&self, way: Way, [q, k, v]: &[Matrix; 3]) -> Matrix {
        let (isa, precision) = match way {
            Way::Backend(isa, precision) => (isa, precision),
            Way::Pairs(isa) => (isa, Precision::Native),
        };
        let b = backend(isa, 1, precision);
        let count = self.len.div_ceil(self.block_size);
        let blocks: Vec<u32> = (0..count as u32).rev().collect();
        let size = KvSize { layers: 1, num_blocks: count, block_size: self.block_size };
        let mut kv = b.kv_cache(size, self.heads).unwrap();
        leave_no_numbers(&b, &mut kv, size, self.heads);
        let slot = |p: usize| blocks[p / self.block_size] as usize * self.block_size + p % self.block_size;
        b.store_kv(&mut kv, 0, k, v, &(0..self.len).map(slot).collect::<Vec<_>>());
        let seq = AttentionSeq { rows: self.rows, start_pos: self.len - self.rows, since: 0, blocks: &blocks };
        if let Way::Backend(..) = way {
            return b.attention(q, (&kv, 0), &[seq], self.heads, None);
        }
        let out = Output::over(Matrix::default(), q.rows, q.cols);
        for unit in attention_units([self.rows].into_iter(), self.heads) {
            let (layer, layout, heads) = (&kv.layers[0], kv.layout, self.heads);
            isa.run(PairsOp(AttentionOp { q, layer, layout, heads, window: None, unit, seq: &seq, out: &out }));
        }
        out.into_matrix()
    }

    /// What is wanted of row `row`, where the positions `lost` are left out.
    fn wanted(&self, row: usize, rounds: Rounds, [q, k, v]: &[Matrix; 3], lost: &Range<usize>) -> Vec<Want> {
        let seen = (0..self.len - self.rows + row + 1).filter(|p| !lost.contains(p));
        plain(q.row(row), (k, v), seen, self.heads, rounds)
    }

    fn check(&self) {
        let inputs = self.inputs();
        let mut references = Vec::new();
        for (cache, inputs_too) in [(false, false), (true, false), (true, true)] {
            let rounds = Rounds { cache, inputs: inputs_too };
            let [q, k, v] = &inputs;
            let cached = [q.clone(), rounded(k, cache), rounded(v, cache)];
            let rows: Vec<_> = (0..self.rows).map(|row| self.wanted(row, rounds, &cached, &(0..0))).collect();
            self.every_tile_counts(rounds, &cached, &rows);
            references.push(rows);
        }
        for way in Way::all() {
            let rounds = way.rounds();
            let got = self.run(way, &inputs);
            for (row, wants) in references[usize::from(rounds.cache) + usize::from(rounds.inputs)].iter().enumerate() {
                for (i, (got, want)) in got.row(row).iter().zip(wants).enumerate() {
                    let (len, value, off_max) = (self.len, want.value, want.off_max);
                    let name = way.name();
                    assert!(
                        want.is_met_by(f64::from(*got)),
                        "{name}: {got} at {i} of row {row} of {len}, not {value} by {off_max}"
                    );
                }
            }
        }
    }

    /// A kernel that left out the first, the last or one tile between would not pass: each head of the last row would be off.
    fn every_tile_counts(&self, rounds: Rounds, cached: &[Matrix; 3], rows: &[Vec<Want>]) {
        let (last, row) = ((self.len - 1) / TILE, self.rows - 1);
        for tile in [0, last / 2, last].into_iter().filter(|_| last > 0) {
            let without = self.wanted(row, rounds, cached, &(tile * TILE..(tile + 1) * TILE));
            let d = self.heads.head_dim;
            for (head, (without, whole)) in without.chunks(d).zip(rows[row].chunks(d)).enumerate() {
                let off = without.iter().zip(whole).any(|(without, want)| !want.is_met_by(without.value));
                assert!(off, "tile {tile} of {last} is nothing to head {head}, {rounds:?}");
            }
        }
    }
}

const SHAPES: [HeadShape; 3] = [
    HeadShape { heads: 4, kv_heads: 2, head_dim: 64 },
    HeadShape { heads: 3, kv_heads: 1, head_dim: 128 },
    // more than share a load: what is read is decoded first
    HeadShape { heads: 8, kv_heads: 1, head_dim: 32 },
];

#[test]
fn a_token_at_any_depth_is_the_average_of_all_before_it() {
    for len in [1, 2, 15, 16, 63, 64, 65, 127, 129, 1000, 2047, 4095, 4096, 4097] {
        for heads in SHAPES {
            Deep { heads, block_size: 16, len, rows: 1 }.check();
        }
    }
}

#[test]
fn rows_that_go_together_and_blocks_of_any_size_see_all_before_them() {
    for (heads, block_size, len, rows) in
        [(SHAPES[0], 24, 4097, 1), (SHAPES[1], 7, 1025, 3), (SHAPES[2], 32, 2050, 5), (SHAPES[0], 16, 4096, 8)]
    {
        Deep { heads, block_size, len, rows }.check();
    }
}
