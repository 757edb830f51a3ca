//! The kernels against the plainest loops in f64, and the promise that threads and neighbours change no bit.

use super::*;

/// Small repeatable numbers in -1..1.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn matrix(rows: usize, cols: usize, seed: u64) -> Matrix {
    Matrix { rows, cols, values: numbers(rows * cols, seed) }
}

#[test]
fn linear_matches_the_plain_loop() {
    for (tokens, inputs, outputs) in [(1, 7, 5), (3, 16, 1), (40, 33, 9)] {
        let (x, w, b) = (matrix(tokens, inputs, 1), matrix(outputs, inputs, 2), matrix(1, outputs, 3));
        let got = CpuBackend::new(1).linear(&x, &w, Some(&b));
        for (t, o) in (0..tokens).flat_map(|t| (0..outputs).map(move |o| (t, o))) {
            let sum: f64 = x.row(t).iter().zip(w.row(o)).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let want = sum + f64::from(b.values[o]);
            assert!((f64::from(got.row(t)[o]) - want).abs() < 1e-5, "{tokens}x{inputs}x{outputs} at {t},{o}");
        }
    }
}

#[test]
fn threads_and_neighbours_change_no_bit() {
    let (x, w) = (matrix(37, 300, 1), matrix(900, 300, 2));
    let one = CpuBackend::new(1).linear(&x, &w, None);
    assert_eq!(one, CpuBackend::new(5).linear(&x, &w, None));
    let alone = CpuBackend::new(1).linear(&CpuBackend::new(1).gather_rows(&x, &[30]), &w, None);
    assert_eq!(alone.values, one.row(30));
}

#[test]
fn rms_norm_works_on_rows_and_on_heads() {
    let (x, weight) = (matrix(2, 8, 1), matrix(1, 4, 2));
    let got = CpuBackend::new(1).rms_norm(&x, &weight, 1e-6);
    for (group, got) in x.values.chunks(4).zip(got.values.chunks(4)) {
        let mean = group.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 4.0;
        for i in 0..4 {
            let want = f64::from(weight.values[i]) * f64::from(group[i]) / (mean + 1e-6).sqrt();
            assert!((f64::from(got[i]) - want).abs() < 1e-5);
        }
    }
}

/// Plain causal attention over contiguous K and V, in f64.
fn plain_attention(q: &[f32], k: &Matrix, v: &Matrix, pos: usize, heads: HeadShape) -> Vec<f64> {
    let d = heads.head_dim;
    let mut out = Vec::new();
    for head in 0..heads.heads {
        let at = head / (heads.heads / heads.kv_heads) * d;
        let score = |p: usize| {
            let dot: f64 = (0..d).map(|i| f64::from(q[head * d + i]) * f64::from(k.row(p)[at + i])).sum();
            (dot / (d as f64).sqrt()).exp()
        };
        let weights: Vec<f64> = (0..=pos).map(score).collect();
        let total: f64 = weights.iter().sum();
        out.extend(
            (0..d)
                .map(|i| weights.iter().enumerate().map(|(p, w)| w * f64::from(v.row(p)[at + i])).sum::<f64>() / total),
        );
    }
    out
}

#[test]
fn paged_attention_matches_the_plain_loop_for_any_block_size() {
    let heads = HeadShape { heads: 4, kv_heads: 2, head_dim: 6 };
    let (len, width) = (11, 12);
    let (q, k, v) = (matrix(len, 24, 1), matrix(len, width, 2), matrix(len, width, 3));
    let backend = CpuBackend::new(1);
    let mut previous: Option<Matrix> = None;
    for block_size in [1, 4, 16] {
        let count = len.div_ceil(block_size);
        let blocks: Vec<u32> = (0..count as u32).rev().map(|block| block + 1).collect();
        let slots: Vec<usize> =
            (0..len).map(|pos| blocks[pos / block_size] as usize * block_size + pos % block_size).collect();
        let mut kv = backend.kv_cache(1, (count + 1) * block_size, width).unwrap();
        backend.store_kv(&mut kv, 0, &k, &v, &slots);
        let seq = AttentionSeq { rows: len, start_pos: 0, blocks: &blocks };
        let got = backend.attention(&q, (&kv, 0), &[seq], heads, block_size);
        for pos in 0..len {
            let want = plain_attention(q.row(pos), &k, &v, pos, heads);
            assert!(got.row(pos).iter().zip(&want).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-5));
        }
        assert!(previous.replace(got.clone()).is_none_or(|before| before == got), "block size {block_size}");
    }
}

#[test]
fn a_cache_beyond_the_machine_is_an_error() {
    let error = CpuBackend::new(1).kv_cache(1, usize::MAX / 2, 64).unwrap_err();
    assert!(error.to_string().contains("bytes"), "{error}");
    assert!(CpuBackend::new(1).kv_cache(1, 1 << 50, 64).is_err());
}
