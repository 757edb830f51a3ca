//! A weight as its file holds it: a type, a shape, and bytes that are mapped, not copied. Pure.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use crate::raw::FileMap;
use crate::raw::large::LargeBytes;

/// How the values of a weight are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    F32,
    F16,
    Bf16,
    /// 32 values: a scale (f16) and 32 signed bytes.
    Q8_0,
    /// 256 values: scale and offset of scales (f16), 8 scales and 8 offsets of 6 bits, 256 × 4 bits.
    Q4K,
    /// 256 values: 256 × 4 low bits, 256 × 2 high bits, 16 signed scales, the scale of scales (f16).
    Q6K,
}

impl WeightType {
    /// Values and bytes of one block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q6K => (256, 210),
        }
    }

    /// Bytes of `values` values; `None` where they are no whole number of blocks or beyond counting.
    pub fn len_bytes(self, values: usize) -> Option<usize> {
        let (block, bytes) = self.block();
        if values.is_multiple_of(block) { (values / block).checked_mul(bytes) } else { None }
    }
}

#[derive(Debug)]
enum Source {
    Mapped(FileMap),
    Owned(Vec<u8>),
    Large(LargeBytes),
}

/// A range of a mapped file or of memory; cheap to clone.
#[derive(Debug, Clone)]
pub struct Bytes {
    source: Arc<Source>,
    range: Range<usize>,
}

impl Bytes {
    /// All of a mapped file.
    pub fn of_map(map: FileMap) -> Self {
        let range = 0..map.bytes().len();
        Self { source: Arc::new(Source::Mapped(map)), range }
    }

    /// `len` bytes that begin on a cache line, zeros at first, then as `fill` leaves them. `None` where the system refuses.
    pub fn on_a_cache_line(len: usize, fill: impl FnOnce(&mut [u8])) -> Option<Self> {
        let mut all = LargeBytes::zeroed(len)?;
        fill(&mut all);
        Some(Self { source: Arc::new(Source::Large(all)), range: 0..len })
    }

    /// Bytes at `range`, counted from the start of these; `None` where there are not as many.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        let (start, end) = (self.range.start.checked_add(range.start)?, self.range.start.checked_add(range.end)?);
        (start <= end && end <= self.range.end).then(|| Self { source: self.source.clone(), range: start..end })
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { source: Arc::new(Source::Owned(bytes)), range }
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all = match &*self.source {
            Source::Mapped(map) => map.bytes(),
            Source::Owned(bytes) => bytes,
            Source::Large(bytes) => bytes,
        };
        &all[self.range.clone()]
    }
}

/// A matrix of `rows × cols` values (`outputs × inputs`), row after row; its bytes are exactly as many as that takes.
#[derive(Debug, Clone)]
pub struct RawWeight {
    pub rows: usize,
    pub cols: usize,
    pub kind: WeightType,
    bytes: Bytes,
}

impl RawWeight {
    /// `None` where a row is no whole number of blocks, or `bytes` are not those of the shape.
    pub fn new(rows: usize, cols: usize, kind: WeightType, bytes: Bytes) -> Option<Self> {
        let fits = kind.len_bytes(cols)?.checked_mul(rows)? == bytes.len();
        fits.then_some(Self { rows, cols, kind, bytes })
    }

    /// A weight of no rows.
    pub fn empty() -> Self {
        Self { rows: 0, cols: 0, kind: WeightType::F32, bytes: Bytes::from(Vec::new()) }
    }

    /// Its bytes, as in the file.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Bytes of one row.
    pub fn row(&self, row: usize) -> &[u8] {
        let len = self.bytes.len() / self.rows.max(1);
        &self.bytes[row * len..(row + 1) * len]
    }

    /// Rows `range` as a weight of their own.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        let len = self.kind.len_bytes(self.cols)?;
        let bytes = self.bytes.part(range.start.checked_mul(len)?..range.end.checked_mul(len)?)?;
        Self::new(range.len(), self.cols, self.kind, bytes)
    }

    /// Columns `range` as a weight of their own, copied; `None` where blocks would be cut through.
    pub fn columns(&self, range: Range<usize>) -> Option<Self> {
        let (start, end) = (self.kind.len_bytes(range.start)?, self.kind.len_bytes(range.end)?);
        if range.start > range.end || range.end > self.cols {
            return None;
        }
        let bytes: Vec<u8> = (0..self.rows).flat_map(|row| self.row(row)[start..end].iter().copied()).collect();
        Self::new(self.rows, range.len(), self.kind, bytes.into())
    }

    /// The same rows in another order: row `i` is the old row `old_row(i)`. The one operation that copies.
    pub fn permuted(&self, old_row: impl Fn(usize) -> usize) -> Option<Self> {
        let bytes: Vec<u8> = (0..self.rows).flat_map(|row| self.row(old_row(row)).iter().copied()).collect();
        Self::new(self.rows, self.cols, self.kind, bytes.into())
    }

    /// The rows of each head with the first half of the pairs before the second, where they were interleaved; a vector is one row
    /// that is so ordered itself.
    pub fn halves_apart(&self, heads: usize) -> Option<Self> {
        let count = if self.rows == 1 { self.cols } else { self.rows };
        let head = count.checked_div(heads).filter(|head| head * heads == count && head.is_multiple_of(2))?;
        let old = |i: usize| i / head * head + i % head % (head / 2) * 2 + i % head / (head / 2);
        if self.rows > 1 {
            return self.permuted(old);
        }
        let column = Self::new(self.cols, 1, self.kind, self.bytes.clone())?.permuted(old)?;
        Self::new(1, self.cols, self.kind, column.bytes)
    }

    /// The same values in f32.
    pub fn decoded(&self) -> Self {
        let bytes: Vec<u8> = self.to_f32().into_iter().flat_map(f32::to_le_bytes).collect();
        Self { rows: self.rows, cols: self.cols, kind: WeightType::F32, bytes: bytes.into() }
    }

    /// All values as f32; the meaning of every format, written as plainly as can be.
    pub fn to_f32(&self) -> Vec<f32> {
        (0..self.rows).flat_map(|row| decode_row(self.kind, self.row(row))).collect()
    }
}

/// The values of one row (a whole number of blocks).
pub fn decode_row(kind: WeightType, row: &[u8]) -> Vec<f32> {
    let halves = row.as_chunks::<2>().0;
    match kind {
        WeightType::F32 => row.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        WeightType::F16 => halves.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        WeightType::Bf16 => halves.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        WeightType::Q8_0 => row.as_chunks::<34>().0.iter().flat_map(decode_q8_0).collect(),
        WeightType::Q4K => row.as_chunks::<144>().0.iter().flat_map(decode_q4_k).collect(),
        WeightType::Q6K => row.as_chunks::<210>().0.iter().flat_map(decode_q6_k).collect(),
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn decode_q8_0(block: &[u8; 34]) -> [f32; 32] {
    let scale = half_at(block, 0);
    std::array::from_fn(|i| scale * f32::from(block[2 + i] as i8))
}

/// Scale and offset (6 bits each) of group `group` of 32 in a Q4_K block.
pub fn q4_k_scales(block: &[u8; 144], group: usize) -> (u8, u8) {
    let packed = &block[4..16];
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4;
    let offset = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    (scale, offset)
}

/// The four bits of value `i` (0..256) of a Q4_K block.
pub fn q4_k_bits(block: &[u8; 144], i: usize) -> u8 {
    // 64 values share 32 bytes: the first 32 in the low halves, the next in the high
    let byte = block[16 + i / 64 * 32 + i % 32];
    if i % 64 < 32 { byte & 15 } else { byte >> 4 }
}

fn decode_q4_k(block: &[u8; 144]) -> [f32; 256] {
    let (d, d_offset) = (half_at(block, 0), half_at(block, 2));
    std::array::from_fn(|i| {
        let (scale, offset) = q4_k_scales(block, i / 32);
        d * f32::from(scale) * f32::from(q4_k_bits(block, i)) - d_offset * f32::from(offset)
    })
}

/// The six bits of value `i` (0..256) of a Q6_K block, not yet centred: 0..64 for -32..32.
pub fn q6_k_bits(block: &[u8; 210], i: usize) -> u8 {
    // 128 values share 64 bytes of low bits and 32 bytes of high bits
    let (half, within) = (i / 128, i % 128);
    let low = block[half * 64 + within % 64] >> (within / 64 * 4) & 15;
    let high = block[128 + half * 32 + within % 32] >> (within / 32 * 2) & 3;
    low | high << 4
}

fn decode_q6_k(block: &[u8; 210]) -> [f32; 256] {
    let d = half_at(block, 208);
    std::array::from_fn(|i| {
        let scale = f32::from(block[192 + i / 16] as i8);
        d * scale * f32::from(q6_k_bits(block, i) as i8 - 32)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_needs_exactly_its_bytes() {
        let bytes = |len| Bytes::from(vec![0; len]);
        assert!(RawWeight::new(2, 32, WeightType::Q8_0, bytes(68)).is_some());
        for (rows, cols, len) in [(2, 31, 68), (2, 32, 67), (usize::MAX, 64, 68), (2, usize::MAX / 32 * 32, 68)] {
            assert!(RawWeight::new(rows, cols, WeightType::Q8_0, bytes(len)).is_none());
        }
        let whole = Bytes::from((0..10).collect::<Vec<u8>>());
        let part = whole.part(2..8).unwrap();
        assert_eq!((&part.part(1..3).unwrap()[..], part.part(1..7).is_none()), (&[3, 4][..], true));
        assert!(part.part(usize::MAX - 1..usize::MAX).is_none());
    }

    #[test]
    fn rows_can_be_cut_and_put_in_order() {
        let values: Vec<u8> = (0..6u8).flat_map(|v| f32::from(v).to_le_bytes()).collect();
        let weight = RawWeight::new(3, 2, WeightType::F32, values.into()).unwrap();
        assert_eq!(weight.part(1..3).unwrap().to_f32(), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(weight.columns(1..2).unwrap().to_f32(), [1.0, 3.0, 5.0]);
        assert!(weight.columns(1..3).is_none());
        let blocks = RawWeight::new(1, 64, WeightType::Q8_0, vec![0; 68].into()).unwrap();
        assert!(blocks.columns(0..32).is_some() && blocks.columns(0..16).is_none());
        assert_eq!(weight.permuted(|row| 2 - row).unwrap().to_f32(), [4.0, 5.0, 2.0, 3.0, 0.0, 1.0]);
    }
}
