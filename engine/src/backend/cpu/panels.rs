//! Quantised weights, repacked once at load: sixteen output rows side by side, four inputs of each in a lane, so that one
//! load feeds one dot-product instruction of all sixteen and nothing is summed across lanes.
//!
//! Bytes a weight are those of the file but for the scales of Q4_K and Q6_K, which are unpacked to whole bytes.

use half::f16;

use super::pool::Pool;

use crate::weights::{Bytes, RawWeight, WeightType, q4_k_bits, q4_k_scales, q6_k_bits};

/// Rows of a panel.
pub const LANES: usize = 16;
/// What is packed between two signs of life: of a file that comes slowly no more than a second or two.
const TURN_BYTES: usize = 8 << 20;
/// Blocks that share a unit of scales, where types have units.
pub const BLOCKS_PER_UNIT: usize = 8;
/// Inputs of a block: they have one step.
pub const BLOCK: usize = 32;

/// One cache line, wherever it lies.
pub type Line = [u8; 64];

/// A repacked matrix, in one piece: made at load, or mapped from where an earlier start left it. It begins on a cache line.
///
/// A block of a panel has `lines_per_block` lines: line `g` of Q8_0 holds inputs `4g..4g+4` of each row as bytes + 128;
/// the four lines of Q4_K hold groups `g` and `g + 4` in low and high halves; Q6_K has two lines more, with the two high bits
/// of groups `4h..4h + 4`.
#[derive(Debug)]
pub struct Panels {
    pub rows: usize,
    pub cols: usize,
    pub kind: PanelKind,
    /// All lines, then for each panel and unit of `kind` its [`PanelKind::scale_bytes`].
    bytes: Bytes,
    line_bytes: usize,
}

/// The quantised types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PanelKind {
    Q8,
    Q4K,
    Q6K,
}

impl PanelKind {
    pub fn of(kind: WeightType) -> Option<Self> {
        match kind {
            WeightType::Q8_0 => Some(Self::Q8),
            WeightType::Q4K => Some(Self::Q4K),
            WeightType::Q6K => Some(Self::Q6K),
            WeightType::F32 | WeightType::F16 | WeightType::Bf16 => None,
        }
    }

    pub fn lines_per_block(self) -> usize {
        match self {
            Self::Q8 => 8,
            Self::Q4K => 4,
            Self::Q6K => 6,
        }
    }

    /// Bytes of all lines and of all scales of a matrix; `None` where it is no whole number of units or beyond counting.
    fn sizes(self, rows: usize, cols: usize) -> Option<(usize, usize)> {
        let unit = BLOCK * self.blocks_per_unit();
        let units = rows.div_ceil(LANES).checked_mul(cols / unit).filter(|_| cols.is_multiple_of(unit))?;
        let lines = units.checked_mul(self.blocks_per_unit() * self.lines_per_block() * 64)?;
        Some((lines, units.checked_mul(self.scale_bytes())?))
    }

    /// Blocks that share a unit of scales.
    pub fn blocks_per_unit(self) -> usize {
        match self {
            Self::Q8 => 1,
            Self::Q4K | Self::Q6K => BLOCKS_PER_UNIT,
        }
    }

    /// Bytes of scales a panel and unit. Q8: 16 f16. Q4K: 16 f16 scales, 16 f16 offsets, then 16 + 16 bytes a block. Q6K: 16 f16, then
    /// 2 × 16 signed bytes a block.
    pub fn scale_bytes(self) -> usize {
        match self {
            Self::Q8 => 32,
            Self::Q4K => 64 + 8 * 32,
            Self::Q6K => 32 + 8 * 32,
        }
    }
}

impl Panels {
    /// Repacks a quantised weight; `None` for the types that stay as they are, and where there is no memory for it. `alive` is called
    /// after every eight megabytes.
    pub fn pack(weight: &RawWeight, pool: &Pool, alive: &mut dyn FnMut()) -> Option<Self> {
        let kind = PanelKind::of(weight.kind)?;
        let (line_bytes, scale_bytes) = kind.sizes(weight.rows, weight.cols)?;
        let bytes = Bytes::on_a_cache_line(line_bytes + scale_bytes, |bytes| {
            let (lines, scales) = bytes.split_at_mut(line_bytes);
            let panels = weight.rows.div_ceil(LANES).max(1);
            let lines = lines.as_chunks_mut::<64>().0.chunks_mut((line_bytes / 64 / panels).max(1));
            let mut places = lines.zip(scales.chunks_mut((scale_bytes / panels).max(1))).enumerate();
            let a_turn = (TURN_BYTES / ((line_bytes + scale_bytes) / panels).max(1)).max(1);
            for from in (0..panels).step_by(a_turn) {
                let count = a_turn.min(panels - from);
                pool.each(places.by_ref().take(count), count * LANES * weight.cols, |(panel, place)| {
                    pack_panel(kind, weight, panel, place);
                });
                alive();
            }
        })?;
        Self::new((weight.rows, weight.cols), kind, bytes)
    }

    /// What [`Self::pack`] made, from its bytes; `None` where they are not as many as the shape takes.
    pub fn new((rows, cols): (usize, usize), kind: PanelKind, bytes: Bytes) -> Option<Self> {
        let (line_bytes, scale_bytes) = kind.sizes(rows, cols)?;
        let fits = line_bytes.checked_add(scale_bytes)? == bytes.len();
        fits.then_some(Self { rows, cols, kind, bytes, line_bytes })
    }

    /// All of it, for [`Self::new`].
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }

    /// Lines and scales of one panel.
    pub fn panel(&self, panel: usize) -> (&[Line], &[u8]) {
        let blocks = self.cols / BLOCK;
        let lines = blocks * self.kind.lines_per_block();
        let scales = blocks / self.kind.blocks_per_unit() * self.kind.scale_bytes();
        let (all_lines, all_scales) = self.bytes.split_at(self.line_bytes);
        let all_lines = all_lines.as_chunks().0;
        (&all_lines[panel * lines..(panel + 1) * lines], &all_scales[panel * scales..(panel + 1) * scales])
    }

    /// The values of one row, into `place`.
    pub fn read_row(&self, row: usize, place: &mut [f32]) {
        let (lines, scales) = self.panel(row / LANES);
        let lane = row % LANES;
        place.iter_mut().enumerate().for_each(|(col, place)| *place = value(self.kind, lines, scales, lane, col));
    }

    /// Bytes in memory.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }
}

fn pack_panel(kind: PanelKind, weight: &RawWeight, panel: usize, (lines, scales): (&mut [Line], &mut [u8])) {
    for lane in 0..LANES.min(weight.rows - panel * LANES) {
        let row = weight.row(panel * LANES + lane);
        match kind {
            PanelKind::Q8 => pack_q8(row, lane, lines, scales),
            PanelKind::Q4K => pack_q4_k(row, lane, lines, scales),
            PanelKind::Q6K => pack_q6_k(row, lane, lines, scales),
        }
    }
}

fn pack_q8(row: &[u8], lane: usize, lines: &mut [Line], scales: &mut [u8]) {
    for (block, bytes) in row.as_chunks::<34>().0.iter().enumerate() {
        scales[block * 32 + 2 * lane..][..2].copy_from_slice(&bytes[..2]);
        for (i, quant) in bytes[2..].iter().enumerate() {
            lines[block * 8 + i / 4][lane * 4 + i % 4] = quant ^ 0x80;
        }
    }
}

fn pack_q4_k(row: &[u8], lane: usize, lines: &mut [Line], scales: &mut [u8]) {
    let units = scales.chunks_exact_mut(PanelKind::Q4K.scale_bytes());
    for (unit, (bytes, scales)) in row.as_chunks::<144>().0.iter().zip(units).enumerate() {
        scales[2 * lane..][..2].copy_from_slice(&bytes[..2]);
        scales[32 + 2 * lane..][..2].copy_from_slice(&bytes[2..4]);
        for block in 0..8 {
            let (scale, offset) = q4_k_scales(bytes, block);
            scales[64 + block * 32 + lane] = scale;
            scales[64 + block * 32 + 16 + lane] = offset;
            for i in 0..BLOCK {
                let line = &mut lines[(unit * 8 + block) * 4 + i % 16 / 4][lane * 4 + i % 4];
                *line |= q4_k_bits(bytes, block * BLOCK + i) << (i / 16 * 4);
            }
        }
    }
}

fn pack_q6_k(row: &[u8], lane: usize, lines: &mut [Line], scales: &mut [u8]) {
    let units = scales.chunks_exact_mut(PanelKind::Q6K.scale_bytes());
    for (unit, (bytes, scales)) in row.as_chunks::<210>().0.iter().zip(units).enumerate() {
        scales[2 * lane..][..2].copy_from_slice(&bytes[208..210]);
        for block in 0..8 {
            let lines = &mut lines[(unit * 8 + block) * 6..][..6];
            for half in 0..2 {
                scales[32 + block * 32 + half * 16 + lane] = bytes[192 + block * 2 + half];
            }
            for i in 0..BLOCK {
                let bits = q6_k_bits(bytes, block * BLOCK + i);
                lines[i % 16 / 4][lane * 4 + i % 4] |= (bits & 15) << (i / 16 * 4);
                lines[4 + i / 16][lane * 4 + i % 4] |= bits >> 4 << (i % 16 / 4 * 2);
            }
        }
    }
}

fn value(kind: PanelKind, lines: &[Line], scales: &[u8], lane: usize, col: usize) -> f32 {
    let (block, i) = (col / BLOCK, col % BLOCK);
    let lines = &lines[block * kind.lines_per_block()..];
    let scales = &scales[block / kind.blocks_per_unit() * kind.scale_bytes()..];
    let half = |at: usize| f16::from_le_bytes([scales[at + 2 * lane], scales[at + 2 * lane + 1]]).to_f32();
    let byte = |line: usize| lines[line][lane * 4 + i % 4];
    let nibble = || byte(i % 16 / 4) >> (i / 16 * 4) & 15;
    match kind {
        PanelKind::Q8 => half(0) * f32::from((byte(i / 4) ^ 0x80) as i8),
        PanelKind::Q4K => {
            let (scale, offset) = (scales[64 + block % 8 * 32 + lane], scales[64 + block % 8 * 32 + 16 + lane]);
            half(0) * f32::from(scale) * f32::from(nibble()) - half(32) * f32::from(offset)
        }
        PanelKind::Q6K => {
            let high = byte(4 + i / 16) >> (i % 16 / 4 * 2) & 3;
            let scale = scales[32 + block % 8 * 32 + i / 16 * 16 + lane] as i8;
            half(0) * f32::from(scale) * f32::from((nibble() | high << 4) as i8 - 32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{QUANTISED, random_weight};
    use super::*;
    use crate::weights::decode_row;
    use proptest::prelude::*;

    proptest! {
        /// Any bytes of any shape come out of a panel as the values they went in as.
        #[test]
        fn a_panel_holds_the_values_of_the_file(rows in 1usize..40, units in 1usize..3, seed in any::<u64>()) {
            for kind in QUANTISED {
                let weight = random_weight(kind, rows, units * 256, seed);
                let panels = Panels::pack(&weight, &Pool::new(2), &mut || ()).unwrap();
                for row in 0..rows {
                    let mut values = vec![f32::NAN; weight.cols];
                    panels.read_row(row, &mut values);
                    prop_assert_eq!(values, decode_row(kind, weight.row(row)));
                }
            }
        }
    }

    #[test]
    fn threads_pack_what_one_packs_and_give_signs_of_life() {
        for kind in QUANTISED {
            // more than two turns
            let weight = random_weight(kind, 20_000, 1024, 3);
            let (mut signs, mut ignored) = (0, || ());
            let one = Panels::pack(&weight, &Pool::new(1), &mut ignored).unwrap();
            let three = Panels::pack(&weight, &Pool::new(3), &mut || signs += 1).unwrap();
            assert_eq!(
                signs,
                weight.rows.div_ceil(LANES).div_ceil(TURN_BYTES / (three.len_bytes() / 1250)),
                "{kind:?}"
            );
            assert!(signs > 1 && *one.into_bytes() == *three.into_bytes(), "{kind:?}");
        }
    }

    #[test]
    fn a_panel_takes_little_more_memory_than_the_file() {
        for (kind, most) in [(WeightType::Q8_0, 1.001), (WeightType::Q4K, 1.12), (WeightType::Q6K, 1.07)] {
            let weight = random_weight(kind, 32, 512, 1);
            let ratio = Panels::pack(&weight, &Pool::new(2), &mut || ()).unwrap().len_bytes() as f64
                / weight.bytes().len() as f64;
            assert!(ratio <= most, "{kind:?}: {ratio}");
        }
    }
}
