//! The same lanes in plain Rust, for any CPU; the reference that the fast ones are compared with.

use half::{bf16, f16};

use super::{Op, Simd};

/// Plain Rust.
#[derive(Debug, Clone, Copy)]
pub struct Portable;

/// Rounds to nearest, ties to even; a NaN stays one. Without a branch, so that a loop of it becomes vector instructions.
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (quiet, rounded) = (bits | 0x40_0000, bits.wrapping_add(0x7FFF + (bits >> 16 & 1)));
    ((if value.is_nan() { quiet } else { rounded }) >> 16) as u16
}

/// Two numbers as bf16, the first in the low half.
#[inline(always)]
pub fn pair_of(first: f32, second: f32) -> i32 {
    (u32::from(to_bf16(first)) | u32::from(to_bf16(second)) << 16) as i32
}

#[inline(always)]
fn each<T: Copy>(f: impl Fn(usize) -> T) -> [T; 16] {
    std::array::from_fn(f)
}

impl Simd for Portable {
    type V = [f32; 16];
    type I = [i32; 16];
    type B = [u8; 64];
    const WIDE: bool = false;

    fn run<O: Op>(self, op: O) -> O::Out {
        op.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> [f32; 16] {
        *x
    }
    #[inline(always)]
    fn load_f32(self, x: &[u8; 64]) -> [f32; 16] {
        each(|i| f32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]))
    }
    #[inline(always)]
    fn store(self, x: [f32; 16], out: &mut [f32; 16]) {
        *out = x;
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> [f32; 16] {
        each(|i| bf16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    fn load_bf16_of_pairs(self, x: &[u8; 64], second: bool) -> [f32; 16] {
        let at = 2 * usize::from(second);
        each(|i| bf16::from_le_bytes([x[4 * i + at], x[4 * i + at + 1]]).to_f32())
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> [f32; 16] {
        each(|i| f16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32())
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8; 16]) -> [f32; 16] {
        each(|i| f32::from(x[i]))
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> [f32; 16] {
        each(|i| f32::from(x[i] as i8))
    }
    #[inline(always)]
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn shift_exponent(self, x: [f32; 16], bits: i32) -> [f32; 16] {
        each(|i| f32::from_bits(x[i].to_bits().wrapping_add_signed(bits)))
    }
    #[inline(always)]
    fn fold(self, mut x: [f32; 16]) -> f32 {
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                x[lane] += x[lane + half];
            }
        }
        x[0]
    }
    #[inline(always)]
    fn dot_bf16(self, acc: [f32; 16], a: &[u8; 64], b: &[u8; 64]) -> [f32; 16] {
        let at = |x: &[u8; 64], i: usize| bf16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32();
        each(|i| acc[i] + at(a, 2 * i + 1) * at(b, 2 * i + 1) + at(a, 2 * i) * at(b, 2 * i))
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [i32; 16] {
        [x; 16]
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32; 16]) -> [i32; 16] {
        *x
    }
    #[inline(always)]
    fn to_f32(self, x: [i32; 16]) -> [f32; 16] {
        each(|i| x[i] as f32)
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> [u8; 64] {
        *x
    }
    #[inline(always)]
    fn dot_u8_i8(self, acc: [i32; 16], w: [u8; 64], x: i32) -> [i32; 16] {
        let x = x.to_le_bytes();
        each(|i| acc[i] + (0..4).map(|j| i32::from(w[4 * i + j]) * i32::from(x[j] as i8)).sum::<i32>())
    }
    #[inline(always)]
    fn load_u8_pairs(self, first: &[u8; 16], second: &[u8; 16]) -> [i32; 16] {
        each(|i| i32::from(first[i]) | i32::from(second[i]) << 16)
    }
    #[inline(always)]
    fn dot_i16(self, acc: [i32; 16], w: [i32; 16], x: i32) -> [i32; 16] {
        let half = |pair: i32, second: bool| i32::from((pair >> (16 * i32::from(second))) as i16);
        each(|i| acc[i] + half(w[i], false) * half(x, false) + half(w[i], true) * half(x, true))
    }
    #[inline(always)]
    fn low(self, x: [u8; 64]) -> [u8; 64] {
        x.map(|x| x & 15)
    }
    #[inline(always)]
    fn high(self, x: [u8; 64]) -> [u8; 64] {
        x.map(|x| x >> 4)
    }
    #[inline(always)]
    fn with_two_bits(self, nibbles: [u8; 64], hi: [u8; 64], pair: usize) -> [u8; 64] {
        std::array::from_fn(|i| nibbles[i] | (hi[i] >> (2 * pair) & 3) << 4)
    }
}
