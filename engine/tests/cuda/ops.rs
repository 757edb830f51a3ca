//! Operation by operation: the same values as the CPU oracle within the rounding of sums, and the same bits whatever rows stand beside and
//! in whatever order threads run.

use engine::backend::cpu::{CpuBackend, Precision};
use engine::backend::cuda::driver::Driver;
use engine::backend::cuda::{CudaBackend, CudaOptions, KvFormat, Matrix};
use engine::backend::{Backend, HeadShape, KvSize};
use engine::weights::{RawWeight, WeightType};

use crate::host::{self, Host};
use crate::splitmix::SplitMix64;

pub type OnHost = CudaBackend<Host>;
/// Makes a backend of the kind under test.
pub type Make<'a, D> = &'a dyn Fn(CudaOptions) -> CudaBackend<D>;

pub const EXACT: CudaOptions =
    CudaOptions { kv: KvFormat::F32, weights_in_e4m3: false, step_bytes: 0, many_rows: None, stays_alone: false };
pub const ALL: [WeightType; 6] =
    [WeightType::F32, WeightType::F16, WeightType::Bf16, WeightType::Q8_0, WeightType::Q4K, WeightType::Q6K];

/// Small repeatable numbers about 0 (the sum of four uniform ones).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn bits(&mut self) -> u64 {
        let mut random = SplitMix64(self.0);
        let bits = random.next();
        self.0 = random.0;
        bits
    }

    pub fn unit(&mut self) -> f64 {
        let mut random = SplitMix64(self.0);
        let unit = random.unit();
        self.0 = random.0;
        unit
    }

    pub fn value(&mut self) -> f32 {
        ((0..4).map(|_| self.unit()).sum::<f64>() - 2.0) as f32
    }

    pub fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }
}

pub fn oracle() -> CpuBackend {
    CpuBackend::new(1).with_precision(Precision::Exact)
}

/// Random bits with sane scales where the type has scales.
pub fn random_weight(kind: WeightType, rows: usize, cols: usize, seed: u64) -> RawWeight {
    let mut random = Numbers(seed);
    let (block, block_bytes) = kind.block();
    let scale = |random: &mut Numbers| half::f16::from_f32(0.002 + 0.01 * random.value().abs()).to_le_bytes();
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / block {
        let start = bytes.len();
        bytes.extend(std::iter::repeat_with(|| (random.bits() >> 40) as u8).take(block_bytes));
        let place = &mut bytes[start..];
        match kind {
            WeightType::F32 => place.copy_from_slice(&random.value().to_le_bytes()),
            WeightType::F16 => place.copy_from_slice(&half::f16::from_f32(random.value()).to_le_bytes()),
            WeightType::Bf16 => place.copy_from_slice(&half::bf16::from_f32(random.value()).to_le_bytes()),
            WeightType::Q8_0 => place[..2].copy_from_slice(&scale(&mut random)),
            WeightType::Q4K => {
                place[..2].copy_from_slice(&scale(&mut random));
                place[2..4].copy_from_slice(&scale(&mut random));
            }
            WeightType::Q6K => place[208..].copy_from_slice(&scale(&mut random)),
        }
    }
    RawWeight::new(rows, cols, kind, bytes.into()).unwrap()
}

/// `got` is `want` but for rounding, measured by the size of the values.
#[track_caller]
pub fn assert_close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let size = (want.iter().map(|v| v * v).sum::<f32>() / want.len().max(1) as f32).sqrt() + 1e-6;
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance * size, "{what}: value {at} is {got} and not {want} (size {size})");
    }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Both backends' answer to the same call on the same matrices.
pub fn both<D: Driver>(
    b: &CudaBackend<D>,
    inputs: &[(usize, usize, Vec<f32>)],
    on_device: impl Fn(Vec<Matrix>) -> Matrix,
    on_oracle: impl Fn(&CpuBackend, Vec<engine::backend::cpu::Matrix>) -> engine::backend::cpu::Matrix,
) -> (Vec<f32>, Vec<f32>) {
    let o = oracle();
    let mine = inputs.iter().map(|(rows, cols, values)| b.upload(*rows, *cols, values.clone())).collect();
    let its = inputs.iter().map(|(rows, cols, values)| o.upload(*rows, *cols, values.clone())).collect();
    let got = b.download(on_device(mine));
    b.end_step().unwrap();
    (got, o.download(on_oracle(&o, its)))
}

fn embeddings<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    for kind in ALL {
        let raw = random_weight(kind, 20, 256, 3);
        let got = b.download(b.embed(&b.weight(raw.clone()), &[17, 0, 17]));
        let all = raw.to_f32();
        let want = [&all[17 * 256..18 * 256], &all[..256], &all[17 * 256..18 * 256]].concat();
        assert_close(&got, &want, 1e-6, &format!("{kind:?}"));
    }
    b.end_step().unwrap();
}
test_backend!(embeddings_match, super::embeddings);

fn norms<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    for (rows, cols, width) in [(1, 8, 8), (3, 300, 300), (5, 4 * 96, 96), (2, 6, 2), (2, 1030, 1030), (3, 8192, 8192)]
    {
        let mut random = Numbers(8);
        let inputs = [(rows, cols, random.values(rows * cols)), (1, width, random.values(width))];
        let (got, want) = both(&b, &inputs, |m| b.rms_norm(&m[0], &m[1], 1e-6), |o, m| o.rms_norm(&m[0], &m[1], 1e-6));
        assert_close(&got, &want, 1e-5, "into another matrix");
        let over = |mut m: Vec<Matrix>| {
            let (weight, mut x) = (m.remove(1), m.remove(0));
            b.rms_norm_over(&mut x, &weight, 1e-6);
            x
        };
        let (got, _) = both(&b, &inputs, over, |o, m| o.rms_norm(&m[0], &m[1], 1e-6));
        assert_close(&got, &want, 1e-5, "in place");
    }
}
test_backend!(norms_match, super::norms);

fn plain_ones<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    let mut random = Numbers(9);
    let (rows, cols) = (7, 130);
    let inputs = [
        (rows, cols, random.values(rows * cols).iter().map(|v| v * 20.0).collect()),
        (rows, cols, random.values(rows * cols)),
    ];
    let (got, want) = both(
        &b,
        &inputs,
        |mut m| {
            let y = m.remove(1);
            b.silu_mul(&mut m[0], &y);
            m.remove(0)
        },
        |o, mut m| {
            let y = m.remove(1);
            o.silu_mul(&mut m[0], &y);
            m.remove(0)
        },
    );
    assert_close(&got, &want, 1e-5, "silu_mul");
    let (got, want) = both(
        &b,
        &inputs,
        |mut m| {
            let y = m.remove(1);
            b.add(&mut m[0], &y);
            m.remove(0)
        },
        |o, mut m| {
            let y = m.remove(1);
            o.add(&mut m[0], &y);
            m.remove(0)
        },
    );
    assert_eq!(bits(&got), bits(&want), "add");
    let (got, want) = both(&b, &inputs, |m| b.gather_rows(&m[0], &[6, 0, 0]), |o, m| o.gather_rows(&m[0], &[6, 0, 0]));
    assert_eq!(bits(&got), bits(&want), "gather_rows");
    let (at, shares) = ([1, 3, 1, 0, 6, 2, 5], [1.0, 0.5, 2.0, -1.0, 0.25, 3.0, 1.5]);
    let (got, want) = both(
        &b,
        &inputs,
        |mut m| {
            let y = m.remove(1);
            b.scatter_add(&mut m[0], &at, &y, &shares);
            m.remove(0)
        },
        |o, mut m| {
            let y = m.remove(1);
            o.scatter_add(&mut m[0], &at, &y, &shares);
            m.remove(0)
        },
    );
    assert_close(&got, &want, 1e-6, "scatter_add");
    let (got, want) = both(
        &b,
        &inputs,
        |m| {
            let mut out = Matrix::default();
            b.copy(&m[0], &mut out);
            out
        },
        |o, m| {
            let mut out = engine::backend::cpu::Matrix::default();
            o.copy(&m[0], &mut out);
            out
        },
    );
    assert_eq!(bits(&got), bits(&want), "copy");
    b.spin(1, true);
    b.end_step().unwrap();
}
test_backend!(plain_ones_match, super::plain_ones);

/// Rotation and norms of heads fused with the write to the cache, seen through attention, against the oracle's separate calls.
fn placing<D: Driver>(make: Make<'_, D>) {
    for (head_dim, with_norms) in [(8, true), (8, false), (64, true), (6, true), (96, false)] {
        let heads = HeadShape { heads: 6, kv_heads: 2, head_dim };
        let (rows, size) = (5, KvSize { layers: 2, num_blocks: 3, block_size: 4 });
        let mut random = Numbers(head_dim as u64);
        let widths = [6 * head_dim, 2 * head_dim, 2 * head_dim, head_dim / 2, head_dim / 2];
        let values = widths.map(|width| random.values(rows * width));
        let norms = [random.values(head_dim), random.values(head_dim)];
        let slots = [6, 4, 7, 2, 5];
        let want = placed(&oracle(), (heads, size), (&widths, &values), (&norms, with_norms), &slots);
        // K and V in bf16 keep eight bits
        for (kv, tolerance) in [(KvFormat::F32, 2e-5), (KvFormat::Bf16, 2e-2)] {
            let b = make(CudaOptions { kv, ..EXACT });
            let got = placed(&b, (heads, size), (&widths, &values), (&norms, with_norms), &slots);
            for (index, (got, want)) in got.iter().zip(&want).enumerate() {
                let what = format!("head_dim {head_dim}, norms {with_norms}, {kv:?}, part {index}");
                assert_close(got, want, tolerance, &what);
            }
        }
    }
}
test_backend!(placing_matches, super::placing);

/// Q after placing, and what attention then sees of the cache from each slot's own position.
fn placed<B: Backend>(
    b: &B,
    (heads, size): (HeadShape, KvSize),
    (widths, values): (&[usize; 5], &[Vec<f32>; 5]),
    (norms, with_norms): (&[Vec<f32>; 2], bool),
    slots: &[usize],
) -> Vec<Vec<f32>> {
    let rows = slots.len();
    let [mut q, mut k, v, cos, sin] = std::array::from_fn(|i| b.upload(rows, widths[i], values[i].clone()));
    let norms = [0, 1].map(|i| b.upload(1, heads.head_dim, norms[i].clone()));
    let mut kv = b.kv_cache(size, heads).unwrap();
    let norms = with_norms.then_some((&norms[0], &norms[1], 1e-5));
    b.place_qkv((&mut q, &mut k, &v), norms, (&cos, &sin), (&mut kv, 1), slots);
    let mut out = b.rows(&q);
    // slots 4 to 7 are all of block 1: there keys count
    let whole = [engine::backend::AttentionSeq { rows: 1, start_pos: 3, since: 0, blocks: &[1] }];
    out.extend(b.rows(&b.attention(&b.gather_rows(&q, &[1]), (&kv, 1), &whole, heads, None)));
    for slot in slots {
        // a window of one position sees one slot alone: its value, whatever the query
        let block = [(slot / size.block_size) as u32];
        let seq =
            engine::backend::AttentionSeq { rows: 1, start_pos: slot % size.block_size, since: 0, blocks: &block };
        out.extend(b.rows(&b.attention(&b.gather_rows(&q, &[0]), (&kv, 1), &[seq], heads, Some(1))));
    }
    b.end_step().unwrap();
    out
}

/// More than the pinned memory holds at once, both ways.
fn large<D: Driver>(make: Make<'_, D>) {
    let (b, (rows, cols)) = (make(EXACT), (3, 1 << 20));
    let values: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
    let mut back = Matrix::default();
    b.copy(&b.upload(rows, cols, values.clone()), &mut back);
    let got = b.rows(&back);
    b.end_step().unwrap();
    assert!(got.len() == rows && got.concat() == values);
}
test_backend!(what_is_larger_than_the_pinned_memory_comes_whole, super::large);

/// A race shows itself by bits that change with the order of threads.
#[test]
fn the_order_of_threads_changes_no_bit() {
    let run = |order: u32| {
        let b = host::ordered(EXACT, order);
        let mut random = Numbers(12);
        let weight = b.weight(random_weight(WeightType::Q4K, 37, 512, 1));
        let x = b.upload(9, 512, random.values(9 * 512));
        let mut y = b.linear(&x, &weight, None);
        b.rms_norm_over(&mut y, &b.upload(1, 37, random.values(37)), 1e-6);
        let heads = HeadShape { heads: 4, kv_heads: 2, head_dim: 8 };
        let mut kv = b.kv_cache(KvSize { layers: 1, num_blocks: 2, block_size: 8 }, heads).unwrap();
        let [mut q, mut k, v] = [32, 16, 16].map(|cols| b.upload(9, cols, random.values(9 * cols)));
        let [cos, sin] = [(); 2].map(|()| b.upload(9, 4, random.values(36)));
        let slots: Vec<usize> = (0..9).collect();
        b.place_qkv((&mut q, &mut k, &v), None, (&cos, &sin), (&mut kv, 0), &slots);
        let seqs = [engine::backend::AttentionSeq { rows: 9, start_pos: 0, since: 0, blocks: &[0, 1] }];
        let mixed = b.attention(&q, (&kv, 0), &seqs, heads, None);
        let out = [b.download(y), b.download(mixed)].concat();
        b.end_step().unwrap();
        bits(&out)
    };
    let plain = run(0);
    assert!((1..6).all(|order| run(order) == plain));
}

#[test]
fn what_does_not_fit_is_an_answer_and_a_smaller_step_goes_on() {
    let b = host::backend(CudaOptions { step_bytes: 1 << 20, ..EXACT });
    let heads = HeadShape { heads: 2, kv_heads: 2, head_dim: 64 };
    let size = |num_blocks| KvSize { layers: 2, num_blocks, block_size: 16 };
    let error = b.kv_cache(size(100_000), heads).unwrap_err().to_string();
    // 47 MiB for blocks of 32 KiB
    assert!(error.contains("at most 1504 blocks fit"), "{error}");
    let before = b.free_bytes();
    let kv = b.kv_cache(size(1504), heads).unwrap();
    assert_eq!(before - b.free_bytes(), (1504 * 32) << 10);
    drop(b.upload(1, 1 << 20, vec![0.0; 1 << 20]));
    assert!(b.end_step().unwrap_err().to_string().contains("bytes are free"));
    let small = b.upload(1, 3, vec![1.0, 2.0, 3.0]);
    assert_eq!((b.download(small), b.end_step().is_ok()), (vec![1.0, 2.0, 3.0], true), "it is not for good");
    drop(kv);
    assert_eq!(b.free_bytes(), before, "what is dropped comes back");
    let wide = HeadShape { head_dim: 512, ..heads };
    assert!(b.kv_cache(size(1), wide).is_err(), "heads that no kernel takes");
}
