//! AVX2 behind [`Simd`]. A token is made only after the CPU was asked, which is the safety argument of every method here; pointers come from
//! arrays of exactly the size that is read or written.
#![allow(unsafe_code, reason = "intrinsics have no safe form outside a function that enables them")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all of them: the token proves the instructions, the array type the pointer"
)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::atomic::AtomicU32;

use super::{Op, Simd};

/// AVX2 with FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The token, where the CPU has all of it.
    pub fn detect() -> Option<Self> {
        let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        (fma && is_x86_feature_detected!("f16c")).then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run_avx2<O: Op>(s: Avx2, op: O) -> O::Out {
    op.run(s)
}

/// Two stores for sixteen (see `avx512.rs`).
#[inline]
#[target_feature(enable = "avx")]
fn store_ymm([low, high]: [__m256; 2], cells: &[AtomicU32; 16]) {
    // SAFETY: it does what sixteen relaxed stores do: the cells are aligned, and no store of four of its bytes is torn.
    unsafe {
        asm!("vmovups [{to}], {low}", "vmovups [{to} + 32], {high}", to = in(reg) cells.as_ptr(), low = in(ymm_reg) low,
            high = in(ymm_reg) high, options(nostack, preserves_flags));
    }
}

/// Sum of eight lanes, by halves.
#[inline(always)]
pub(super) unsafe fn fold8(x: __m256) -> f32 {
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
    }
}

/// Does the same to both halves.
macro_rules! both {
    ($f:ident, $($x:expr),+) => { both!(@ $f, 0, 1, $($x),+) };
    (@ $f:ident, $a:tt, $b:tt, $($x:expr),+) => { [$f($($x[$a]),+), $f($($x[$b]),+)] };
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    type I = [__m256i; 2];
    type B = [__m256i; 2];
    const WIDE: bool = false;

    #[inline]
    fn run<O: Op>(self, op: O) -> O::Out {
        unsafe { run_avx2(self, op) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> [__m256; 2] {
        unsafe { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }
    #[inline(always)]
    fn load_f32(self, x: &[u8; 64]) -> [__m256; 2] {
        unsafe { [_mm256_loadu_ps(x.as_ptr().cast()), _mm256_loadu_ps(x.as_ptr().add(32).cast())] }
    }
    #[inline(always)]
    fn store(self, x: [__m256; 2], out: &mut [f32; 16]) {
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        }
    }
    #[inline(always)]
    fn store_cells(self, x: [__m256; 2], cells: &[AtomicU32; 16]) {
        unsafe { store_ymm(x, cells) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> [__m256; 2] {
        let half = |at: usize| unsafe {
            let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().add(at).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
        };
        [half(0), half(16)]
    }
    #[inline(always)]
    fn load_bf16_of_pairs(self, x: &[u8; 64], second: bool) -> [__m256; 2] {
        let half = |at: usize| unsafe {
            let pairs = _mm256_loadu_si256(x.as_ptr().add(at).cast());
            let moved = _mm256_sll_epi32(pairs, _mm_cvtsi32_si128(if second { 0 } else { 16 }));
            _mm256_castsi256_ps(_mm256_and_si256(moved, _mm256_set1_epi32(-0x1_0000)))
        };
        [half(0), half(32)]
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> [__m256; 2] {
        let half = |at: usize| unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().add(at).cast())) };
        [half(0), half(16)]
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8; 16]) -> [__m256; 2] {
        let half =
            |at: usize| unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(x.as_ptr().add(at).cast()))) };
        [half(0), half(8)]
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> [__m256; 2] {
        let half =
            |at: usize| unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().add(at).cast()))) };
        [half(0), half(8)]
    }
    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { both!(_mm256_add_ps, a, b) }
    }
    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { both!(_mm256_mul_ps, a, b) }
    }
    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        unsafe { both!(_mm256_max_ps, a, b) }
    }
    #[inline(always)]
    fn fma(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        unsafe { both!(_mm256_fmadd_ps, a, b, c) }
    }
    #[inline(always)]
    fn shift_exponent(self, x: [__m256; 2], bits: i32) -> [__m256; 2] {
        x.map(|x| unsafe { _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(bits))) })
    }
    #[inline(always)]
    fn fold(self, x: [__m256; 2]) -> f32 {
        unsafe { fold8(_mm256_add_ps(x[0], x[1])) }
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> [__m256i; 2] {
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32; 16]) -> [__m256i; 2] {
        unsafe { [_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(8).cast())] }
    }
    #[inline(always)]
    fn to_f32(self, x: [__m256i; 2]) -> [__m256; 2] {
        unsafe { both!(_mm256_cvtepi32_ps, x) }
    }
    #[inline(always)]
    fn prefetch(self, x: &[u8], ahead: usize) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().wrapping_add(ahead).cast()) }
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> [__m256i; 2] {
        unsafe { [_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x.as_ptr().add(32).cast())] }
    }
    /// By 16-bit products: `maddubs` would saturate.
    #[inline(always)]
    fn dot_u8_i8(self, acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        unsafe {
            let x = _mm256_set1_epi32(x);
            let (even, odd) = (_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x));
            let half = |acc: __m256i, w: __m256i| {
                let low = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even);
                let high = _mm256_madd_epi16(_mm256_srli_epi16::<8>(w), odd);
                _mm256_add_epi32(acc, _mm256_add_epi32(low, high))
            };
            [half(acc[0], w[0]), half(acc[1], w[1])]
        }
    }
    #[inline(always)]
    fn begin_high(self, _too_high: i32) -> [__m256i; 2] {
        self.splat_i32(0)
    }
    /// The sign goes over to the input: 128 · 127 · 2 fits into sixteen bits.
    #[inline(always)]
    fn dot_high(self, acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        unsafe {
            let (x, ones) = (_mm256_set1_epi32(x), _mm256_set1_epi16(1));
            let half = |acc: __m256i, w: __m256i| {
                let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
                _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, ones))
            };
            [half(acc[0], w[0]), half(acc[1], w[1])]
        }
    }
    #[inline(always)]
    fn begin_few(self, _sums: [__m256i; 2]) -> [__m256i; 2] {
        self.splat_i32(0)
    }
    /// 15 · 127 · 2 fits eight times into sixteen bits, 63 · 127 · 2 twice.
    #[inline(always)]
    fn dot_few(self, few: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        unsafe {
            let x = _mm256_set1_epi32(x);
            let half = |few: __m256i, w: __m256i| _mm256_add_epi16(few, _mm256_maddubs_epi16(w, x));
            [half(few[0], w[0]), half(few[1], w[1])]
        }
    }
    #[inline(always)]
    fn end_few(self, sums: [__m256i; 2], few: [__m256i; 2]) -> [__m256i; 2] {
        let half = |sums: __m256i, few: __m256i| unsafe {
            _mm256_add_epi32(sums, _mm256_madd_epi16(few, _mm256_set1_epi16(1)))
        };
        [half(sums[0], few[0]), half(sums[1], few[1])]
    }
    #[inline(always)]
    fn load_u8_pairs(self, first: &[u8; 16], second: &[u8; 16]) -> [__m256i; 2] {
        let half = |at: usize| unsafe {
            let first = _mm256_cvtepu8_epi32(_mm_loadl_epi64(first.as_ptr().add(at).cast()));
            let second = _mm256_cvtepu8_epi32(_mm_loadl_epi64(second.as_ptr().add(at).cast()));
            _mm256_or_si256(first, _mm256_slli_epi32::<16>(second))
        };
        [half(0), half(8)]
    }
    #[inline(always)]
    fn dot_i16(self, acc: [__m256i; 2], w: [__m256i; 2], x: i32) -> [__m256i; 2] {
        let half = |acc, w| unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(w, _mm256_set1_epi32(x))) };
        [half(acc[0], w[0]), half(acc[1], w[1])]
    }
    #[inline(always)]
    fn low(self, x: [__m256i; 2]) -> [__m256i; 2] {
        x.map(|x| unsafe { _mm256_and_si256(x, _mm256_set1_epi8(15)) })
    }
    #[inline(always)]
    fn high(self, x: [__m256i; 2]) -> [__m256i; 2] {
        x.map(|x| unsafe { _mm256_and_si256(_mm256_srli_epi16::<4>(x), _mm256_set1_epi8(15)) })
    }
    #[inline(always)]
    fn with_two_bits(self, nibbles: [__m256i; 2], hi: [__m256i; 2], pair: usize) -> [__m256i; 2] {
        let half = |nibbles: __m256i, hi: __m256i| unsafe {
            let moved = match pair {
                0 => _mm256_slli_epi16::<4>(hi),
                1 => _mm256_slli_epi16::<2>(hi),
                2 => hi,
                _ => _mm256_srli_epi16::<2>(hi),
            };
            _mm256_or_si256(nibbles, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)))
        };
        [half(nibbles[0], hi[0]), half(nibbles[1], hi[1])]
    }
}
