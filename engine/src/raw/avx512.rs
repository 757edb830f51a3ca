//! AVX-512 behind [`Simd`]. A token is made only after the CPU was asked, which is the safety argument of every method here; pointers come
//! from arrays of exactly the size that is read or written.
#![allow(unsafe_code, reason = "intrinsics have no safe form outside a function that enables them")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one argument for all of them: the token proves the instructions, the array type the pointer"
)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::atomic::AtomicU32;

use super::avx2::{Avx2, fold8};
use super::{Op, Simd, dot_by_halves, pairs_by_loop, sixteen_times};

/// AVX-512 with VNNI, and with BF16 where `BF16` is true: Ice Lake has none, nor do machines that keep it from their guests.
#[derive(Debug, Clone, Copy)]
pub struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    /// The token, where the CPU has all of it.
    pub fn detect() -> Option<Self> {
        let base = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw");
        let more = is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("avx512dq");
        let dots = is_x86_feature_detected!("avx512vnni") && (!BF16 || is_x86_feature_detected!("avx512bf16"));
        (base && more && dots && Avx2::detect().is_some()).then_some(Self(()))
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
fn run_bf16<O: Op, S: Simd>(s: S, op: O) -> O::Out {
    op.run(s)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn run_vnni<O: Op, S: Simd>(s: S, op: O) -> O::Out {
    op.run(s)
}

/// One store for sixteen: each of their own takes a place in the queue of stores, and rows of outputs are far from one another, so that the
/// queue is full of them for a tenth of a prefill's time. Relaxed atomics are not joined by the compiler.
#[inline]
#[target_feature(enable = "avx512f")]
fn store_zmm(x: __m512, cells: &[AtomicU32; 16]) {
    // SAFETY: it does what sixteen relaxed stores do: the cells are aligned, and no store of four of its bytes is torn.
    unsafe {
        asm!("vmovups [{to}], {x}", to = in(reg) cells.as_ptr(), x = in(zmm_reg) x, options(nostack, preserves_flags))
    }
}

/// One store for four, as [`store_zmm`].
#[inline]
#[target_feature(enable = "avx512f")]
fn store_xmm(x: __m128, cells: &[AtomicU32; 4]) {
    // SAFETY: it does what four relaxed stores do: the cells are aligned, and no store of four of its bytes is torn.
    unsafe {
        asm!("vmovups [{to}], {x}", to = in(reg) cells.as_ptr(), x = in(xmm_reg) x, options(nostack, preserves_flags))
    }
}

impl<const BF16: bool> Simd for Avx512<BF16> {
    type V = __m512;
    type I = __m512i;
    type B = __m512i;
    const WIDE: bool = true;
    const PAIRS: bool = BF16;

    #[inline]
    fn run<O: Op>(self, op: O) -> O::Out {
        if BF16 { unsafe { run_bf16(self, op) } } else { unsafe { run_vnni(self, op) } }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> __m512 {
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }
    #[inline(always)]
    fn load_f32(self, x: &[u8; 64]) -> __m512 {
        unsafe { _mm512_loadu_ps(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn store(self, x: __m512, out: &mut [f32; 16]) {
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn store_cells(self, x: __m512, cells: &[AtomicU32; 16]) {
        unsafe { store_zmm(x, cells) }
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    fn load_bf16_of_pairs(self, x: &[u8; 64], second: bool) -> __m512 {
        unsafe {
            let pairs = _mm512_loadu_si512(x.as_ptr().cast());
            let moved = _mm512_sll_epi32(pairs, _mm_cvtsi32_si128(if second { 0 } else { 16 }));
            _mm512_castsi512_ps(_mm512_and_si512(moved, _mm512_set1_epi32(-0x1_0000)))
        }
    }
    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8; 16]) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn shift_exponent(self, x: __m512, bits: i32) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(bits))) }
    }
    #[inline(always)]
    fn fold(self, x: __m512) -> f32 {
        unsafe { fold8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x))) }
    }
    /// By halves like a single one, the halves of all four side by side: fourteen instructions for forty.
    #[inline(always)]
    fn fold_into(self, [a, b, c, d]: [__m512; 4], cells: &[AtomicU32; 4]) {
        unsafe {
            let ab = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xEE>(a, b));
            let cd = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(c, d), _mm512_shuffle_f32x4::<0xEE>(c, d));
            let fours = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xDD>(ab, cd));
            let twos = _mm512_add_ps(fours, _mm512_permute_ps::<0b11_10_11_10>(fours));
            let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b01_01_01_01>(twos));
            store_xmm(_mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, ones)), cells);
        }
    }
    #[inline(always)]
    fn to_pairs(self, x: __m512) -> [i32; 8] {
        if !BF16 {
            return pairs_by_loop(self, x);
        }
        unsafe { std::mem::transmute::<__m256bh, [i32; 8]>(_mm512_cvtneps_pbh(x)) }
    }
    #[inline(always)]
    fn dot_bf16(self, acc: __m512, a: &[u8; 64], b: &[u8; 64]) -> __m512 {
        if !BF16 {
            return dot_by_halves(self, acc, a, b);
        }
        unsafe {
            let (a, b) = (_mm512_loadu_si512(a.as_ptr().cast()), _mm512_loadu_si512(b.as_ptr().cast()));
            _mm512_dpbf16_ps(
                acc,
                std::mem::transmute::<__m512i, __m512bh>(a),
                std::mem::transmute::<__m512i, __m512bh>(b),
            )
        }
    }
    #[inline(always)]
    fn dot_bf16_pair(self, acc: __m512, a: &[u8; 64], pair: i32) -> __m512 {
        if !BF16 {
            return self.dot_bf16(acc, a, &sixteen_times(pair));
        }
        unsafe {
            let (a, pair) = (_mm512_loadu_si512(a.as_ptr().cast()), _mm512_set1_epi32(pair));
            let (a, pair) =
                (std::mem::transmute::<__m512i, __m512bh>(a), std::mem::transmute::<__m512i, __m512bh>(pair));
            _mm512_dpbf16_ps(acc, a, pair)
        }
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    fn load_i32(self, x: &[i32; 16]) -> __m512i {
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn to_f32(self, x: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    fn prefetch(self, x: &[u8], ahead: usize) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(x.as_ptr().wrapping_add(ahead).cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, x: &[u8], ahead: usize) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(x.as_ptr().wrapping_add(ahead).cast()) }
    }
    #[inline(always)]
    fn load_bytes(self, x: &[u8; 64]) -> __m512i {
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }
    #[inline(always)]
    fn dot_u8_i8(self, acc: __m512i, w: __m512i, x: i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    fn load_u8_pairs(self, first: &[u8; 16], second: &[u8; 16]) -> __m512i {
        unsafe {
            let first = _mm512_cvtepu8_epi32(_mm_loadu_si128(first.as_ptr().cast()));
            let second = _mm512_cvtepu8_epi32(_mm_loadu_si128(second.as_ptr().cast()));
            _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
        }
    }
    #[inline(always)]
    fn dot_i16(self, acc: __m512i, w: __m512i, x: i32) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    fn low(self, x: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(x, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn high(self, x: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn with_two_bits(self, nibbles: __m512i, hi: __m512i, pair: usize) -> __m512i {
        unsafe {
            let moved = match pair {
                0 => _mm512_slli_epi16::<4>(hi),
                1 => _mm512_slli_epi16::<2>(hi),
                2 => hi,
                _ => _mm512_srli_epi16::<2>(hi),
            };
            _mm512_or_si512(nibbles, _mm512_and_si512(moved, _mm512_set1_epi8(0x30)))
        }
    }
}
