//! What attention of a token reads, counted: no more of the cache than it must, at any depth.

use std::cell::Cell;

use super::super::super::attention::{AttentionOp, PairsOp};
use super::super::super::output::Output;
use super::*;
use crate::backend::attention_units;
use crate::raw::Portable;

const LINE: usize = 64;

thread_local! {
    static LINES: Cell<usize> = const { Cell::new(0) };
    static PRODUCTS: Cell<usize> = const { Cell::new(0) };
}

/// The plain lanes, as wide as the widest, which count what they load of a cache in bf16 and what they multiply.
#[derive(Clone, Copy)]
struct Counting;

type V = [f32; 16];
type I = [i32; 16];
type B = [u8; 64];

macro_rules! as_portable {
    ($(fn $name:ident($($arg:ident: $kind:ty),*) -> $out:ty;)*) => {
        $(fn $name(self, $($arg: $kind),*) -> $out { Portable.$name($($arg),*) })*
    };
}

impl Simd for Counting {
    type V = V;
    type I = I;
    type B = B;
    const WIDE: bool = true;

    fn run<O: Op>(self, op: O) -> O::Out {
        op.run(self)
    }

    fn store(self, x: V, out: &mut V) {
        *out = x;
    }

    fn load_bf16_of_pairs(self, x: &[u8; 64], second: bool) -> V {
        LINES.set(LINES.get() + usize::from(!second));
        Portable.load_bf16_of_pairs(x, second)
    }

    fn dot_bf16_pair(self, acc: V, a: &[u8; 64], pair: i32) -> V {
        PRODUCTS.set(PRODUCTS.get() + 2);
        Portable.dot_bf16_pair(acc, a, pair)
    }

    fn fma(self, a: V, b: V, c: V) -> V {
        PRODUCTS.set(PRODUCTS.get() + 1);
        Portable.fma(a, b, c)
    }

    as_portable! {
        fn splat(x: f32) -> V;
        fn load(x: &V) -> V;
        fn load_f32(x: &[u8; 64]) -> V;
        fn load_bf16(x: &[u8; 32]) -> V;
        fn load_f16(x: &[u8; 32]) -> V;
        fn load_u8(x: &[u8; 16]) -> V;
        fn load_i8(x: &[u8; 16]) -> V;
        fn add(a: V, b: V) -> V;
        fn mul(a: V, b: V) -> V;
        fn max(a: V, b: V) -> V;
        fn shift_exponent(x: V, bits: i32) -> V;
        fn fold(x: V) -> f32;
        fn splat_i32(x: i32) -> I;
        fn load_i32(x: &I) -> I;
        fn to_f32(x: I) -> V;
        fn load_bytes(x: &B) -> B;
        fn dot_u8_i8(acc: I, w: B, x: i32) -> I;
        fn load_u8_pairs(first: &[u8; 16], second: &[u8; 16]) -> I;
        fn dot_i16(acc: I, w: I, x: i32) -> I;
        fn low(x: B) -> B;
        fn high(x: B) -> B;
        fn with_two_bits(nibbles: B, hi: B, pair: usize) -> B;
    }
}

/// Lines of the cache that are loaded and products of sixteen lanes that are made for one token at this depth; all lines that the cache has.
struct Counts {
    loaded: usize,
    products: usize,
    cached: usize,
}

fn counts(heads: HeadShape, depth: usize, pairs: bool) -> Counts {
    let b = backend(Isa::Portable(Portable), 1, Precision::Native);
    let size = KvSize { layers: 1, num_blocks: depth / 16, block_size: 16 };
    let kv = b.kv_cache(size, heads).unwrap();
    let blocks: Vec<u32> = (0..size.num_blocks as u32).collect();
    let seq = AttentionSeq { rows: 1, start_pos: depth - 1, since: 0, blocks: &blocks };
    let q = matrix(1, heads.heads * heads.head_dim, 1);
    let out = Output::over(Matrix::default(), q.rows, q.cols);
    LINES.set(0);
    PRODUCTS.set(0);
    for unit in attention_units([1].into_iter(), heads) {
        let (q, layer, layout) = (&q, &kv.layers[0], kv.layout);
        let op = AttentionOp { q, layer, layout, heads, window: None, unit, seq: &seq, out: &out };
        if pairs { Counting.run(PairsOp(op)) } else { Counting.run(op) }
    }
    let cached = (b.kv_bytes(size, heads).unwrap() as usize).div_euclid(LINE);
    Counts { loaded: LINES.get(), products: PRODUCTS.get(), cached }
}

/// Twice the depth is twice the bytes, twice the products, and nothing that grows faster: what makes a token at depth dear is the cache alone.
#[test]
fn a_token_reads_each_line_of_the_cache_once_and_multiplies_it_once_a_head() {
    for heads in [HeadShape { heads: 4, kv_heads: 2, head_dim: 64 }, HeadShape { heads: 4, kv_heads: 1, head_dim: 128 }]
    {
        for depth in [64, 512, 2048, 8192] {
            let Counts { loaded, products, cached } = counts(heads, depth, false);
            let per_kv = heads.heads / heads.kv_heads;
            assert_eq!(loaded, cached, "at {depth}");
            // a line is two vectors
            assert_eq!(products, 2 * cached * per_kv, "at {depth}");
            assert_eq!(counts(heads, depth, true).products, products, "in pairs, at {depth}");
        }
    }
}
