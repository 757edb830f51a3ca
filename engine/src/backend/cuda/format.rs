//! Weights on the device: their bytes as in the file, a type that names the kernels which read them, and e4m3, which is made here.

use half::f16;

use super::memory::Slice;
use crate::weights::{RawWeight, WeightType, decode_row};

/// How a weight's rows are written on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4K,
    Q6K,
    /// A byte a value, and a scale (f32) on the next multiple of four.
    E4m3,
}

impl Format {
    /// That of a weight as it comes in a file.
    pub fn of(kind: WeightType) -> Self {
        match kind {
            WeightType::F32 => Self::F32,
            WeightType::F16 => Self::F16,
            WeightType::Bf16 => Self::Bf16,
            WeightType::Q8_0 => Self::Q8_0,
            WeightType::Q4K => Self::Q4K,
            WeightType::Q6K => Self::Q6K,
        }
    }

    /// The kernel that takes rows by token.
    pub fn embed(self) -> &'static str {
        match self {
            Self::F32 => "embed_f32",
            Self::F16 => "embed_f16",
            Self::Bf16 => "embed_bf16",
            Self::Q8_0 => "embed_q8_0",
            Self::Q4K => "embed_q4_k",
            Self::Q6K => "embed_q6_k",
            Self::E4m3 => "embed_e4m3",
        }
    }

    /// The kernel for one row, and the one for eight at a time: the same sums.
    pub fn matmul(self) -> [&'static str; 2] {
        match self {
            Self::F32 => ["matmul_f32_1", "matmul_f32_8"],
            Self::F16 => ["matmul_f16_1", "matmul_f16_8"],
            Self::Bf16 => ["matmul_bf16_1", "matmul_bf16_8"],
            Self::Q8_0 => ["matmul_q8_0_1", "matmul_q8_0_8"],
            Self::Q4K => ["matmul_q4_k_1", "matmul_q4_k_8"],
            Self::Q6K => ["matmul_q6_k_1", "matmul_q6_k_8"],
            Self::E4m3 => ["matmul_e4m3_1", "matmul_e4m3_8"],
        }
    }
}

/// A weight (`rows` outputs × `cols` inputs) on the device; without a place where it could not be brought there.
#[derive(Debug)]
pub struct Weight {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) format: Format,
    pub(super) place: Option<Slice>,
}

/// The greatest finite value of e4m3.
const E4M3_MAX: f32 = 448.0;

/// A weight in e4m3, row after row, each with the scale that makes its greatest value the format's.
pub fn to_e4m3(raw: &RawWeight) -> Vec<u8> {
    let padded = raw.cols.next_multiple_of(4);
    let mut bytes = Vec::with_capacity(raw.rows * (padded + 4));
    for row in 0..raw.rows {
        let values = decode_row(raw.kind, raw.row(row));
        let most = values.iter().fold(0f32, |most, value| most.max(value.abs()));
        let scale = if most > 0.0 { most / E4M3_MAX } else { 1.0 };
        bytes.extend(values.iter().map(|value| e4m3(value / scale)));
        bytes.extend(std::iter::repeat_n(0, padded - raw.cols));
        bytes.extend(scale.to_le_bytes());
    }
    bytes
}

/// The value that a byte of e4m3 means.
pub fn of_e4m3(byte: u8) -> f32 {
    if byte & 0x7f == 0x7f {
        return f32::NAN;
    }
    // the bits of e4m3 are those of an f16 with another bias: 256 times too small
    f16::from_bits(u16::from(byte & 0x80) << 8 | u16::from(byte & 0x7f) << 7).to_f32() * 256.0
}

/// To the nearest, ties to even; what is too large is the greatest, what is no number stays none.
fn e4m3(value: f32) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    let size = value.abs().min(E4M3_MAX);
    // the bytes are in the order of their values
    let above = (0u8..0x7e).find(|byte| of_e4m3(byte + 1) > size).unwrap_or(0x7e);
    let (low, high) = (of_e4m3(above), of_e4m3((above + 1).min(0x7e)));
    let up = size - low > high - size || (size - low == high - size && above & 1 == 1);
    sign | if up && size > low { (above + 1).min(0x7e) } else { above }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::Bytes;

    #[test]
    fn every_byte_is_its_own_nearest_and_between_two_the_even_one_wins() {
        for byte in (0..=0x7eu8).chain(0x80..=0xfe) {
            assert_eq!(e4m3(of_e4m3(byte)), byte, "{byte:#x}");
        }
        assert_eq!((of_e4m3(0x7e), of_e4m3(1), of_e4m3(0x38)), (448.0, 1.0 / 512.0, 1.0));
        for byte in 0..0x7eu8 {
            let (low, high) = (of_e4m3(byte), of_e4m3(byte + 1));
            assert_eq!(e4m3((low + high) / 2.0), byte + byte % 2, "between {low} and {high}");
            assert_eq!((e4m3(low + (high - low) * 0.4), e4m3(low + (high - low) * 0.6)), (byte, byte + 1));
        }
        assert_eq!((e4m3(1e9), e4m3(-1e9), e4m3(f32::NAN) & 0x7f), (0x7e, 0xfe, 0x7f));
        assert!(of_e4m3(0x7f).is_nan() && of_e4m3(0xff).is_nan());
    }

    #[test]
    fn a_row_ends_with_its_scale() {
        let values: Vec<u8> = [2.0f32, -4.0, 1.0, 0.0, 0.0, 0.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let raw = RawWeight::new(2, 3, WeightType::F32, Bytes::from(values)).unwrap();
        let bytes = to_e4m3(&raw);
        let scale = 4.0f32 / 448.0;
        assert_eq!(bytes[..4], [e4m3(2.0 / scale), 0xfe, e4m3(1.0 / scale), 0]);
        assert_eq!(
            (&bytes[4..8], &bytes[8..12], &bytes[12..]),
            (&scale.to_le_bytes()[..], &[0; 4][..], &1f32.to_le_bytes()[..])
        );
    }
}
