//! `x · weightᵀ` for repacked weights and many rows of inputs, by tiles of bytes (AMX): a panel is unpacked once to signed bytes and f32
//! scales, then all rows go by, sixteen at a time. Sums of a block are whole numbers and the rest is in the order of `quant`, so every
//! bit is the one that a row alone gets (EP4).

use super::output::Output;
use super::panels::{self, LANES, PanelKind, Panels};
use super::pool::Pool;
use super::quantised::quantise;
use super::{Isa, Matrix};
use crate::raw::amx::{Amx, Rows, Sums, Tiles};
use crate::raw::{Line, Op, Simd};

/// Fewer rows are as fast by vectors or faster: those need no unpacking, and ask for weights ahead of their arithmetic.
pub const ROWS_MIN: usize = 33;
/// Panels that go by the inputs together: outputs are written in longer runs.
const GROUP: usize = 4;
/// Rows of a tile.
const TILE: usize = 16;
/// Inputs of a block.
const BLOCK: usize = super::panels::BLOCK;

/// Input rows as bytes, sixteen side by side; what is beyond the last is zero.
#[derive(Debug, Default)]
pub struct TileInputs {
    rows: usize,
    blocks_per_row: usize,
    blocks: Vec<TileBlock>,
}

/// 32 inputs of sixteen rows.
#[derive(Debug, Clone, Copy)]
struct TileBlock {
    bytes: Rows,
    scales: [f32; TILE],
    /// Minus scale times sum: what an offset of the weights is multiplied with.
    offsets: [f32; TILE],
}

impl TileInputs {
    /// Takes in other rows.
    pub fn take(&mut self, (isa, pool): (Isa, &Pool), x: &Matrix) {
        (self.rows, self.blocks_per_row) = (x.rows, x.cols / BLOCK);
        let empty = TileBlock { bytes: Rows([[0; BLOCK]; TILE]), scales: [0.0; TILE], offsets: [0.0; TILE] };
        self.blocks.clear();
        self.blocks.resize(x.rows.div_ceil(TILE) * self.blocks_per_row, empty);
        pool.each_chunk(&mut self.blocks, self.blocks_per_row, x.values.len() * 8, |tile, blocks| {
            isa.run(FillOp { x, first: tile * TILE, blocks });
        });
    }

    fn tile(&self, tile: usize) -> &[TileBlock] {
        &self.blocks[tile * self.blocks_per_row..(tile + 1) * self.blocks_per_row]
    }
}

/// Quantises rows from `first` on into one tile.
struct FillOp<'a> {
    x: &'a Matrix,
    first: usize,
    blocks: &'a mut [TileBlock],
}

impl Op for FillOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for row in 0..TILE.min(self.x.rows - self.first) {
            let values = self.x.row(self.first + row).as_chunks::<BLOCK>().0;
            for (block, values) in self.blocks.iter_mut().zip(values) {
                let mine = quantise(s, values);
                for (place, group) in block.bytes.0[row].as_chunks_mut().0.iter_mut().zip(mine.bytes.groups) {
                    *place = group.to_le_bytes();
                }
                block.scales[row] = mine.scale;
                block.offsets[row] = mine.offset;
            }
        }
    }
}

/// Some panels of a multiplication, for all inputs.
pub struct TileOp<'a> {
    pub amx: Amx,
    pub x: &'a TileInputs,
    pub weight: &'a Panels,
    pub panels: std::ops::Range<usize>,
    pub out: &'a Output,
}

impl Op for TileOp<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weight.kind {
            PanelKind::Q8 => self.panels::<S, 8, false>(s, unpack_q8),
            PanelKind::Q4K => self.panels::<S, 8, true>(s, unpack_q4_k),
            PanelKind::Q6K => self.panels::<S, 4, false>(s, unpack_q6_k),
        }
    }
}

impl TileOp<'_> {
    /// `G` lines of weights have one scale; `O`: they have offsets too.
    #[inline(always)]
    fn panels<S: Simd, const G: usize, const O: bool>(
        &self,
        s: S,
        unpack: impl Fn(S, &[panels::Line], &[u8], &mut Unpacked),
    ) {
        let mut group: [_; GROUP] = std::array::from_fn(|_| Unpacked::new(self.x.blocks_per_row * 8 / G, G));
        let tiles = self.amx.tiles::<TILE, G>();
        for start in self.panels.clone().step_by(GROUP) {
            let count = GROUP.min(self.panels.end - start);
            for (at, panel) in group[..count].iter_mut().enumerate() {
                let (lines, scales) = self.weight.panel(start + at);
                unpack(s, lines, scales, panel);
            }
            let columns = (count * LANES).min(self.weight.rows - start * LANES);
            for first in (0..self.x.rows).step_by(TILE) {
                let mut values = [[0.0; GROUP * LANES]; TILE];
                for (at, panel) in group[..count].iter().enumerate() {
                    let sums = panel.dots::<S, G, O>(s, &tiles, self.x.tile(first / TILE));
                    for (values, sums) in values.iter_mut().zip(sums) {
                        s.store(sums, &mut values.as_chunks_mut().0[at]);
                    }
                }
                for (row, values) in values.iter().enumerate().take(self.x.rows - first) {
                    self.out.set_run(s, (first + row, start * LANES), &values[..columns]);
                }
            }
        }
    }
}

/// A panel as signed bytes, with what they are multiplied by.
struct Unpacked {
    lines: Vec<Line>,
    scales: Vec<[f32; LANES]>,
    offsets: Vec<[f32; LANES]>,
}

impl Unpacked {
    fn new(steps: usize, lines_per_step: usize) -> Self {
        let (scales, offsets) = (vec![[0.0; LANES]; steps], vec![[0.0; LANES]; steps]);
        Self { lines: vec![Line([0; 64]); steps * lines_per_step], scales, offsets }
    }

    /// Products of the next step are under way while those of the last are scaled and added.
    #[inline(always)]
    fn dots<S: Simd, const G: usize, const O: bool>(
        &self,
        s: S,
        tiles: &Tiles<TILE, G>,
        x: &[TileBlock],
    ) -> [S::V; TILE] {
        let (lines, parts) = (self.lines.as_chunks::<G>().0, 8 / G);
        let (mut even, mut odd) = (Sums([[0; LANES]; TILE]), Sums([[0; LANES]; TILE]));
        let mut acc = [s.splat(0.0); TILE];
        tiles.products_even(&x[0].bytes, 0, &lines[0], &mut even);
        for step in (0..lines.len()).step_by(2) {
            if let Some(lines) = lines.get(step + 1) {
                tiles.products_odd(&x[(step + 1) / parts].bytes, (step + 1) % parts, lines, &mut odd);
            }
            self.add::<S, O>(s, &mut acc, &even, (step, &x[step / parts]));
            if let Some(lines) = lines.get(step + 2) {
                tiles.products_even(&x[(step + 2) / parts].bytes, (step + 2) % parts, lines, &mut even);
            }
            if step + 1 < lines.len() {
                self.add::<S, O>(s, &mut acc, &odd, (step + 1, &x[(step + 1) / parts]));
            }
        }
        acc
    }

    #[inline(always)]
    fn add<S: Simd, const O: bool>(&self, s: S, acc: &mut [S::V; TILE], sums: &Sums, (step, x): (usize, &TileBlock)) {
        let scale = s.load(&self.scales[step]);
        let offset = if O { s.load(&self.offsets[step]) } else { scale };
        for (row, acc) in acc.iter_mut().enumerate() {
            let sum = s.to_f32(s.load_i32(&sums.0[row]));
            *acc = s.fma(sum, s.mul(scale, s.splat(x.scales[row])), *acc);
            if O {
                *acc = s.fma(offset, s.splat(x.offsets[row]), *acc);
            }
        }
    }
}

#[inline(always)]
fn unpack_q8<S: Simd>(s: S, lines: &[panels::Line], scales: &[u8], to: &mut Unpacked) {
    for (to, line) in to.lines.iter_mut().zip(lines) {
        for (to, byte) in to.0.iter_mut().zip(line) {
            *to = byte ^ 0x80;
        }
    }
    for (to, halves) in to.scales.iter_mut().zip(scales.as_chunks().0) {
        s.store(s.load_f16(halves), to);
    }
}

#[inline(always)]
fn unpack_q4_k<S: Simd>(s: S, lines: &[panels::Line], scales: &[u8], to: &mut Unpacked) {
    for (to, lines) in to.lines.as_chunks_mut::<8>().0.iter_mut().zip(lines.as_chunks::<4>().0) {
        for (group, line) in lines.iter().enumerate() {
            for (i, byte) in line.iter().enumerate() {
                to[group].0[i] = byte & 15;
                to[group + 4].0[i] = byte >> 4;
            }
        }
    }
    let places = to.scales.as_chunks_mut::<8>().0.iter_mut().zip(to.offsets.as_chunks_mut::<8>().0);
    for ((to_scales, to_offsets), scales) in places.zip(scales.as_chunks::<320>().0) {
        let (halves, per_block) = (scales.as_chunks::<32>().0, scales[64..].as_chunks::<16>().0);
        let (d, d_offset) = (s.load_f16(&halves[0]), s.load_f16(&halves[1]));
        for (block, pair) in per_block.as_chunks::<2>().0.iter().enumerate() {
            s.store(s.mul(d, s.load_u8(&pair[0])), &mut to_scales[block]);
            s.store(s.mul(d_offset, s.load_u8(&pair[1])), &mut to_offsets[block]);
        }
    }
}

#[inline(always)]
fn unpack_q6_k<S: Simd>(s: S, lines: &[panels::Line], scales: &[u8], to: &mut Unpacked) {
    for (to, lines) in to.lines.as_chunks_mut::<8>().0.iter_mut().zip(lines.as_chunks::<6>().0) {
        for (group, to) in to.iter_mut().enumerate() {
            let (half, at) = (group / 4, group % 4);
            for (i, to) in to.0.iter_mut().enumerate() {
                let bits = lines[at][i] >> (4 * half) & 15 | (lines[4 + half][i] >> (2 * at) & 3) << 4;
                *to = bits.wrapping_sub(32);
            }
        }
    }
    for (to, scales) in to.scales.as_chunks_mut::<16>().0.iter_mut().zip(scales.as_chunks::<288>().0) {
        let d = s.load_f16(&scales.as_chunks::<32>().0[0]);
        for (to, scale) in to.iter_mut().zip(scales[32..].as_chunks::<16>().0) {
            s.store(s.mul(d, s.load_i8(scale)), to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::quant::by_blocks;
    use super::super::quantised::QuantInputs;
    use super::super::tests::{QUANTISED, matrix, random_weight};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

        /// Every bit is that of the vector instructions, whatever the shape.
        #[test]
        fn tiles_agree_with_vectors(rows in 1usize..36, outputs in 1usize..40, units in 1usize..4, seed in any::<u64>()) {
            let isa = Isa::best();
            let Some(amx) = isa.tiles() else { return Ok(()) };
            for kind in QUANTISED {
                let cols = units * kind.block().0;
                let (x, pool) = (matrix(rows, cols, seed), Pool::new(1));
                let weight = Panels::pack(&random_weight(kind, outputs, cols, seed), &pool, &mut || ()).unwrap();
                let [by_tiles, by_vectors] = [(); 2].map(|()| Output::over(Matrix::default(), rows, outputs));
                let panels = 0..outputs.div_ceil(LANES);
                let (mut inputs, mut quantised) = (TileInputs::default(), QuantInputs::default());
                inputs.take((isa, &pool), &x);
                isa.run(TileOp { amx, x: &inputs, weight: &weight, panels: panels.clone(), out: &by_tiles });
                quantised.take((isa, &pool), &x);
                by_blocks((isa, seed % 2 == 0), &quantised, (&weight, panels), &by_vectors);
                prop_assert_eq!(by_tiles.into_matrix(), by_vectors.into_matrix());
            }
        }
    }
}
