//! Attention over K and V in bf16, on tensor cores: within what rounding of queries and shares may do of the oracle, and the same bits whatever
//! splits, chunks, neighbours, blocks and order of threads there are, and whatever lies where nothing is seen.

use engine::backend::cuda::driver::Driver;
use engine::backend::cuda::{CudaOptions, KvFormat};
use engine::backend::{AttentionSeq, Backend, HeadShape, KvSize};

use crate::host;
pub use crate::ops::OnHost;
use crate::ops::{EXACT, Make, Numbers, oracle};
use crate::paged::Case;

const ROUNDED: CudaOptions = CudaOptions { kv: KvFormat::Bf16, ..EXACT };
/// The most that rounding to bf16 takes from a value or gives to it, of one.
const ROUNDING: f32 = 1.0 / 512.0;

/// Groups of 1, 2, 3, 4, 8 and 16 heads; heads of all three forms, full and filled up.
fn cases() -> Vec<Case> {
    let case = |heads, kv_heads, head_dim, len, block_size, window| Case {
        heads: HeadShape { heads, kv_heads, head_dim },
        len,
        block_size,
        window,
        since: len % 3,
    };
    vec![
        case(4, 1, 64, 150, 16, None),
        case(8, 1, 128, 91, 32, Some(50)),
        case(16, 1, 24, 80, 5, None),
        case(3, 1, 80, 140, 16, Some(70)),
        case(2, 2, 256, 101, 16, Some(33)),
        case(3, 3, 6, 70, 7, Some(1)),
        case(2, 1, 100, 75, 16, None),
        case(1, 1, 7, 66, 16, None),
    ]
}

fn cut(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect()
}

/// By how much each value may differ from the oracle's, a bound for each row and head. A score differs by no more than `ROUNDING` of the sum of
/// its products' sizes, say by d: then shares differ by a factor of at most exp(2d), and by one of 1 + `ROUNDING` for themselves. Shares that
/// weigh 1 together move the result by so much of how far values are from it, which is twice the greatest at most.
fn bounds(case: &Case, [q, k, v]: &[Vec<f32>; 3]) -> Vec<f32> {
    let HeadShape { heads, kv_heads, head_dim } = case.heads;
    let group = heads / kv_heads;
    let head = |values: &[f32], row: usize, count: usize, head: usize| -> Vec<f32> {
        values[(row * count + head) * head_dim..][..head_dim].to_vec()
    };
    let scale = 1.0 / (head_dim as f32).sqrt();
    let bound = |row: usize, of: usize| {
        let query = head(q, row, heads, of);
        let windowed = case.window.map_or(0, |window| (row + 1).saturating_sub(window));
        let (mut size, mut greatest) = (0.0f32, 0.0f32);
        for pos in windowed.max(case.since).min(row)..=row {
            let key = head(k, pos, kv_heads, of / group);
            size = size.max(query.iter().zip(&key).map(|(q, k)| (q * k).abs()).sum::<f32>() * scale);
            greatest = head(v, pos, kv_heads, of / group).iter().fold(greatest, |most, v| most.max(v.abs()));
        }
        ((2.0 * size * ROUNDING).exp_m1() + 1.01 * ROUNDING) * 2.0 * greatest + 1e-4 * greatest
    };
    (0..case.len * heads).map(|at| bound(at / heads, at % heads)).collect()
}

fn all<D: Driver>(make: Make<'_, D>) {
    for (index, case) in cases().iter().enumerate() {
        let [q, k, v] = case.inputs(index as u64);
        let inputs = [q, cut(&k), cut(&v)];
        let b = make(ROUNDED);
        let got = case.run(&b, &inputs, case.len, false);
        let want = case.run(&oracle(), &inputs, case.len, false);
        let bounds = bounds(case, &inputs);
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let bound = bounds[at / case.heads.head_dim];
            assert!(
                (got - want).abs() <= bound,
                "case {index}: value {at} is {got} and not {want}, by {bound} at most"
            );
        }
        let chunks = [(1, false), (29, true), (67, false)];
        case.assert_alike((&b, &inputs, &got), &chunks, 45, &format!("case {index}"));
    }
}
test_backend!(attention_on_tensor_cores_matches, super::all);

/// Contexts of nine splits, gone through by one block and by one each.
fn long<D: Driver>(make: Make<'_, D>) {
    for (window, head_dim) in [(None, 16), (Some(300), 72)] {
        let heads = HeadShape { heads: 4, kv_heads: 1, head_dim };
        let case = Case { heads, len: 530, block_size: 16, window, since: 1 };
        let (inputs, b) = (case.inputs(3), make(ROUNDED));
        let whole = case.run(&b, &inputs, case.len, false);
        for (chunk, neighbour) in [(60, false), (31, true)] {
            assert!(case.run(&b, &inputs, chunk, neighbour) == whole, "window {window:?}, chunks of {chunk}");
        }
    }
}
test_backend!(splits_on_tensor_cores_change_no_bit, super::long);

#[test]
fn the_order_of_threads_changes_no_bit_of_attention_on_tensor_cores() {
    for head_dim in [64, 128, 256] {
        let heads = HeadShape { heads: 8, kv_heads: 2, head_dim };
        let case = Case { heads, len: 135, block_size: 16, window: None, since: 0 };
        let inputs = case.inputs(5);
        let run = |order: u32| [65, 34].map(|chunk| case.run(&host::ordered(ROUNDED, order), &inputs, chunk, false));
        let plain = run(0);
        assert!(plain[0] == plain[1] && (1..5).all(|order| run(order) == plain), "heads of {head_dim}");
    }
}

/// Decodes and prompts whose cache is full of what is no number wherever they see nothing: behind their end, and where blocks before the window
/// are others' by now.
fn unseen<D: Driver>(make: Make<'_, D>) {
    for (heads, kv_heads, head_dim, rows) in
        [(4, 1, 64, 1), (4, 1, 64, 70), (8, 2, 128, 3), (2, 1, 256, 70), (3, 1, 20, 2)]
    {
        let heads = HeadShape { heads, kv_heads, head_dim };
        let answers = [0.0, f32::NAN, f32::INFINITY].map(|garbage| seen_beside(&make(ROUNDED), garbage, heads, rows));
        assert!(answers[0].iter().all(|value| value.is_finite()), "{heads:?}, {rows} rows");
        assert!(answers[1] == answers[0] && answers[2] == answers[0], "{heads:?}, {rows} rows");
    }
}
test_backend!(what_is_not_seen_is_not_multiplied, super::unseen);

/// The last `rows` of 230 positions with a window of 90, in a cache that holds `garbage` in all other slots.
fn seen_beside<B: Backend>(b: &B, garbage: f32, heads: HeadShape, rows: usize) -> Vec<f32> {
    const BLOCK: usize = 16;
    let (len, window, kv_width) = (230, 90, heads.kv_heads * heads.head_dim);
    let (count, first) = (15, (len - rows + 1).saturating_sub(window));
    let mut kv = b.kv_cache(KvSize { layers: 1, num_blocks: count + 1, block_size: BLOCK }, heads).unwrap();
    let slots: Vec<usize> = (0..(count + 1) * BLOCK).collect();
    let waste = b.upload(slots.len(), kv_width, vec![garbage; slots.len() * kv_width]);
    b.store_kv(&mut kv, 0, &waste, &waste, &slots);
    // what the first row no longer sees is in the last block, which is another's
    let blocks: Vec<u32> = (0..count).map(|at| if (at + 1) * BLOCK <= first { count } else { at } as u32).collect();
    let real: Vec<usize> = (first..len).collect();
    let [k, v] = [1, 2].map(|seed| b.upload(real.len(), kv_width, Numbers(seed).values(real.len() * kv_width)));
    b.store_kv(&mut kv, 0, &k, &v, &real);
    let q = b.upload(rows, heads.heads * heads.head_dim, Numbers(3).values(rows * heads.heads * heads.head_dim));
    let seq = AttentionSeq { rows, start_pos: len - rows, since: 0, blocks: &blocks };
    let out = b.rows(&b.attention(&q, (&kv, 0), &[seq], heads, Some(window))).concat();
    b.end_step().unwrap();
    out
}
