//! Attention's two products by tiles of bf16 (AMX): queries with K, and their weights with V, for up to sixteen queries of a KV head. K and V
//! are read where the cache holds them, in pairs along what is summed. Sums have an order of their own, which depends on the dimensions of
//! a head and on the sixteen positions of a group alone.
#![allow(unsafe_code, reason = "tiles have no safe form: they are state of the thread, reached by assembly")]

use std::arch::asm;
use std::marker::PhantomData;

use super::{AmxPairs, PAIR_STEP, configure};

/// Queries of one call, at most.
pub const QUERIES: usize = 16;
/// Positions that lie in one piece.
pub const GROUP: usize = 16;
/// Groups of one call, at most.
pub const GROUPS: usize = 4;

/// Scores or weights of sixteen queries for the positions of four groups.
pub type Scores = [[f32; GROUPS * GROUP]; QUERIES];
/// The same as bits of bf16.
pub type Weights = [[u16; GROUPS * GROUP]; QUERIES];

/// Tiles set up on this thread for so many queries; given back when it is dropped.
#[derive(Debug)]
pub struct AttentionTiles {
    queries: usize,
    thread: PhantomData<*const ()>,
}

impl AmxPairs {
    /// Sets tiles up for so many queries, at most [`QUERIES`].
    pub fn attention(self, queries: usize) -> AttentionTiles {
        let queries = queries.clamp(1, QUERIES);
        let sums = (queries, 4 * GROUP);
        configure([
            sums,
            sums,
            sums,
            sums,
            (queries, 2 * PAIR_STEP),
            (PAIR_STEP / 2, 64),
            (queries, 2 * GROUP),
            (8, 64),
        ]);
        AttentionTiles { queries, thread: PhantomData }
    }
}

impl AttentionTiles {
    /// `scores[query][position]`: products of queries, `dims` bf16 each and one after the other, with K of four groups: a line of sixteen pairs
    /// for each two dimensions, `key_line` bytes from one to the next. False, and nothing done, where the lengths do not fit together.
    #[must_use]
    #[inline(always)]
    pub fn scores(
        &self,
        (queries, dims): (&[u8], usize),
        (keys, key_line): ([&[u8]; GROUPS], usize),
        scores: &mut Scores,
    ) -> bool {
        let steps = dims / PAIR_STEP;
        let key_bytes = (dims / 2).saturating_sub(1) * key_line + 64;
        if !dims.is_multiple_of(PAIR_STEP)
            || steps == 0
            || queries.len() < self.queries * 2 * dims
            || keys.iter().any(|keys| keys.len() < key_bytes)
        {
            return false;
        }
        let [k0, k1, k2, k3] = keys.map(<[u8]>::as_ptr);
        // SAFETY: `self` says that tiles are set up on this thread. In each of `steps` steps 64 bytes of each query are read, and of each group
        // 64 bytes of sixteen lines: within them, as was checked. Four tiles of at most sixteen rows of 64 bytes are written to `scores`.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{q} + {q_line}]",
                "tileloadd tmm5, [{k0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm5, [{k1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm5",
                "tileloadd tmm5, [{k2} + {line}]",
                "tdpbf16ps tmm2, tmm4, tmm5",
                "tileloadd tmm5, [{k3} + {line}]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                "add {q}, 64",
                "add {k0}, {step}", "add {k1}, {step}", "add {k2}, {step}", "add {k3}, {step}",
                "dec {steps}",
                "jnz 2b",
                "tilestored [{scores} + {scores_line}], tmm0",
                "tilestored [{scores} + {scores_line} + 64], tmm1",
                "tilestored [{scores} + {scores_line} + 128], tmm2",
                "tilestored [{scores} + {scores_line} + 192], tmm3",
                q = inout(reg) queries.as_ptr() => _,
                q_line = in(reg) 2 * dims,
                k0 = inout(reg) k0 => _,
                k1 = inout(reg) k1 => _,
                k2 = inout(reg) k2 => _,
                k3 = inout(reg) k3 => _,
                line = in(reg) key_line,
                step = in(reg) PAIR_STEP / 2 * key_line,
                steps = inout(reg) steps => _,
                scores = in(reg) scores.as_mut_ptr(),
                scores_line = in(reg) size_of_val(&scores[0]),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
        true
    }

    /// `mixed[query]`, `dims` values each, gains the products of its weights with V of one to four groups: a line of `dims` pairs for each two
    /// positions. False, and nothing done, where the lengths do not fit together.
    #[must_use]
    #[inline(always)]
    pub fn mix(&self, weights: &Weights, values: &[&[u8]], (mixed, dims): (&mut [f32], usize)) -> bool {
        let line = 4 * dims;
        if !dims.is_multiple_of(PAIR_STEP)
            || !(1..=GROUPS).contains(&values.len())
            || mixed.len() < self.queries * dims
            || values.iter().any(|values| values.len() < GROUP / 2 * line)
        {
            return false;
        }
        let mut places = [std::ptr::null(); GROUPS];
        places.iter_mut().zip(values).for_each(|(place, values)| *place = values.as_ptr());
        let mut at = 0;
        while at + 4 * GROUP <= dims {
            self.mix_four((weights, &places[..values.len()]), (mixed, line), 4 * at);
            at += 4 * GROUP;
        }
        if at < dims {
            self.mix_two((weights, &places[..values.len()]), (mixed, line), 4 * at);
        }
        true
    }
}

/// Some columns of sixteen dimensions, from byte `at` of each line on.
macro_rules! mix {
    ($name:ident, [$($sums:literal: $byte:literal),*]) => {
        impl AttentionTiles {
            #[inline(always)]
            fn $name(&self, (weights, values): (&Weights, &[*const u8]), (mixed, line): (&mut [f32], usize), at: usize) {
                // SAFETY: `self` says that tiles are set up on this thread, and `mix` has checked that each of `values` has eight lines, and
                // `mixed` a line for each query. From each line the columns at `at` are read, which end within it, and of `mixed` written;
                // from each query's weights 32 bytes for each of `values`, which are four at most.
                unsafe {
                    asm!(
                        $(concat!("tileloadd tmm", $sums, ", [{mixed} + {line} + ", $byte, "]"),)*
                        "2:",
                        "mov {v}, [{values}]",
                        "add {v}, {at}",
                        "tileloadd tmm6, [{weights} + {weights_line}]",
                        $(
                            concat!("tileloadd tmm7, [{v} + {line} + ", $byte, "]"),
                            concat!("tdpbf16ps tmm", $sums, ", tmm6, tmm7"),
                        )*
                        "add {values}, 8",
                        "add {weights}, 32",
                        "dec {count}",
                        "jnz 2b",
                        $(concat!("tilestored [{mixed} + {line} + ", $byte, "], tmm", $sums),)*
                        v = out(reg) _,
                        values = inout(reg) values.as_ptr() => _,
                        count = inout(reg) values.len() => _,
                        at = in(reg) at,
                        weights = inout(reg) weights.as_ptr() => _,
                        weights_line = in(reg) size_of_val(&weights[0]),
                        mixed = in(reg) mixed.as_mut_ptr().cast::<u8>().add(at),
                        line = in(reg) line,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack)
                    );
                }
            }
        }
    };
}

mix!(mix_four, ["0": "0", "1": "64", "2": "128", "3": "192"]);
mix!(mix_two, ["0": "0", "1": "64"]);

impl Drop for AttentionTiles {
    fn drop(&mut self) {
        // SAFETY: tiles were set up by whoever made this value.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::Amx;
    use super::*;

    fn value(i: usize) -> half::bf16 {
        half::bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0)
    }

    fn bytes(values: impl Iterator<Item = half::bf16>) -> Vec<u8> {
        values.flat_map(half::bf16::to_le_bytes).collect()
    }

    /// Lines of pairs: `value` of what is summed over and of the column.
    fn pairs(summed: usize, columns: usize, value: impl Fn(usize, usize) -> half::bf16) -> Vec<u8> {
        let places =
            (0..summed / 2).flat_map(|pair| (0..columns).flat_map(move |c| [(2 * pair, c), (2 * pair + 1, c)]));
        bytes(places.map(|(summed, column)| value(summed, column)))
    }

    #[test]
    fn scores_and_mixtures_are_sums_of_products_and_a_query_alone_gets_the_same_bits() {
        let Some(amx) = Amx::detect().and_then(Amx::pairs) else { return };
        for dims in [32, 64, 96, 128] {
            let queries = bytes((0..QUERIES * dims).map(value));
            let key = |group: usize| move |d: usize, position: usize| value(7 + group * 31 + d * 3 + position);
            let keys: [Vec<u8>; GROUPS] = std::array::from_fn(|group| pairs(dims, GROUP, key(group)));
            let lent: [&[u8]; GROUPS] = std::array::from_fn(|group| &keys[group][..]);
            let mut scores = [[7.0; 64]; QUERIES];
            assert!(amx.attention(QUERIES).scores((&queries, dims), (lent, 64), &mut scores));
            for (query, row) in scores.iter().enumerate() {
                for (at, got) in row.iter().enumerate() {
                    let product = |d: usize| value(query * dims + d).to_f64() * key(at / GROUP)(d, at % GROUP).to_f64();
                    let want: f64 = (0..dims).map(product).sum();
                    assert!((f64::from(*got) - want).abs() < 1e-3, "{dims} {query} {at}: {got} {want}");
                }
            }
            let mut alone = [[7.0; 64]; QUERIES];
            assert!(amx.attention(1).scores((&queries[5 * 2 * dims..6 * 2 * dims], dims), (lent, 64), &mut alone));
            assert_eq!((alone[0].map(f32::to_bits), alone[1]), (scores[5].map(f32::to_bits), [7.0; 64]));
            mixtures(amx, dims);
        }
    }

    fn mixtures(amx: AmxPairs, dims: usize) {
        let weight = |query: usize, at: usize| value(3 + query * 5 + at);
        let weights: Weights = std::array::from_fn(|query| std::array::from_fn(|at| weight(query, at).to_bits()));
        let v = |group: usize| move |position: usize, d: usize| value(group * 13 + position * 7 + d);
        for groups in 1..=GROUPS {
            let values: Vec<Vec<u8>> = (0..groups).map(|group| pairs(GROUP, dims, v(group))).collect();
            let lent: Vec<&[u8]> = values.iter().map(|values| &values[..]).collect();
            let mut mixed = vec![0.5; QUERIES * dims];
            assert!(amx.attention(QUERIES).mix(&weights, &lent, (&mut mixed, dims)));
            for (place, got) in mixed.iter().enumerate() {
                let (query, d) = (place / dims, place % dims);
                let product = |at: usize| weight(query, at).to_f64() * v(at / GROUP)(at % GROUP, d).to_f64();
                let want = 0.5 + (0..groups * GROUP).map(product).sum::<f64>();
                assert!((f64::from(*got) - want).abs() < 1e-3, "{dims} {groups} {query} {d}: {got} {want}");
            }
            let mut first = vec![0.5; dims];
            assert!(amx.attention(1).mix(&weights, &lent, (&mut first, dims)));
            assert_eq!(first, mixed[..dims]);
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let Some(amx) = Amx::detect().and_then(Amx::pairs) else { return };
        let tiles = amx.attention(2);
        let (queries, keys, values) = (vec![0; 2 * 64], vec![0; 16 * 64], vec![0; 8 * 128]);
        let (mut scores, mut mixed, weights) = ([[0.0; 64]; QUERIES], vec![0.0; 64], [[0; 64]; QUERIES]);
        assert!(tiles.scores((&queries, 32), ([&keys; GROUPS], 64), &mut scores));
        assert!(!tiles.scores((&queries[1..], 32), ([&keys; GROUPS], 64), &mut scores));
        assert!(!tiles.scores((&queries, 32), ([&keys, &keys, &keys, &keys[1..]], 64), &mut scores));
        assert!(!tiles.scores((&queries, 24), ([&keys; GROUPS], 64), &mut scores));
        assert!(tiles.mix(&weights, &[&values], (&mut mixed, 32)));
        assert!(!tiles.mix(&weights, &[&values[1..]], (&mut mixed, 32)));
        assert!(!tiles.mix(&weights, &[], (&mut mixed, 32)));
        assert!(!tiles.mix(&weights, &[&values], (&mut mixed[1..], 32)));
    }
}
