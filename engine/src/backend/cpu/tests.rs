//! The kernels of every instruction set against the plainest loops in f64, and the promise that threads, tiles and neighbours
//! change no bit.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use proptest::prelude::*;

use super::*;
use crate::splitmix::SplitMix64;

pub const QUANTISED: [WeightType; 3] = [WeightType::Q8_0, WeightType::Q4K, WeightType::Q6K];
const ALL: [WeightType; 6] =
    [WeightType::F32, WeightType::F16, WeightType::Bf16, WeightType::Q8_0, WeightType::Q4K, WeightType::Q6K];

/// Small repeatable numbers.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut random = SplitMix64(seed);
    (0..len).map(|_| random.bell()).collect()
}

pub fn matrix(rows: usize, cols: usize, seed: u64) -> Matrix {
    Matrix { rows, cols, values: numbers(rows * cols, seed) }
}

/// The same, each 32 of a row of another size: their steps differ within a unit.
pub fn uneven(rows: usize, cols: usize, seed: u64) -> Matrix {
    let mut x = matrix(rows, cols, seed);
    for (at, value) in x.values.iter_mut().enumerate() {
        *value *= 2f32.powi((at % cols / 32 * 5 + at / cols) as i32 % 9 - 4);
    }
    x
}

/// A weight of any type: random bits with sane scales where the type has scales.
pub fn random_weight(kind: WeightType, rows: usize, cols: usize, seed: u64) -> RawWeight {
    let mut random = SplitMix64(seed);
    let (block, block_bytes) = kind.block();
    let scale = |random: &mut SplitMix64| half::f16::from_f32(0.002 + 0.01 * random.bell().abs()).to_le_bytes();
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / block {
        let start = bytes.len();
        bytes.extend(std::iter::repeat_with(|| (random.next() >> 40) as u8).take(block_bytes));
        let place = &mut bytes[start..];
        match kind {
            WeightType::F32 => place.copy_from_slice(&random.bell().to_le_bytes()),
            WeightType::F16 => place.copy_from_slice(&half::f16::from_f32(random.bell()).to_le_bytes()),
            WeightType::Bf16 => place.copy_from_slice(&half::bf16::from_f32(random.bell()).to_le_bytes()),
            WeightType::Q8_0 | WeightType::Q4K | WeightType::Q6K => {
                scales_of(kind, place).for_each(|place| place.copy_from_slice(&scale(&mut random)));
            }
        }
    }
    RawWeight::new(rows, cols, kind, bytes.into()).unwrap()
}

/// Where a block of a quantised type has its f16 scales.
fn scales_of(kind: WeightType, block: &mut [u8]) -> std::slice::ChunksMut<'_, u8> {
    let places = match kind {
        WeightType::Q6K => 208..210,
        WeightType::Q4K => 0..4,
        _ => 0..2,
    };
    block[places].chunks_mut(2)
}

fn backend(isa: Isa, threads: usize, precision: Precision) -> CpuBackend {
    CpuBackend::new(threads).with_isa(isa).with_precision(precision)
}

/// `x · wᵀ` in f64, and for each output the size that its error is measured by.
fn plain_linear(x: &Matrix, w: &[f32], outputs: usize) -> Vec<(f64, f64)> {
    let mut out = Vec::new();
    for (t, o) in (0..x.rows).flat_map(|t| (0..outputs).map(move |o| (t, o))) {
        let products = x.row(t).iter().zip(&w[o * x.cols..]).map(|(x, w)| f64::from(*x) * f64::from(*w));
        let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p * p));
        out.push((sum, size.sqrt()));
    }
    out
}

fn check_linear(kind: WeightType, (tokens, inputs, outputs): (usize, usize, usize), seed: u64) {
    let (x, raw) = (matrix(tokens, inputs, seed), random_weight(kind, outputs, inputs, seed ^ 1));
    let want = plain_linear(&x, &raw.to_f32(), outputs);
    for isa in Isa::all() {
        for (precision, tolerance) in [(Precision::Exact, 1e-5), (Precision::Native, 0.05)] {
            let b = backend(isa, 1, precision);
            let got = b.linear(&x, &b.weight(raw.clone()), None);
            for (got, (want, size)) in got.values.iter().zip(&want) {
                let off = (f64::from(*got) - want).abs();
                let shape = (tokens, inputs, outputs);
                let name = isa.name();
                assert!(off <= tolerance * (size + 1e-3), "{name} {kind:?} {precision:?} {shape:?}: {got} {want}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn linear_matches_the_plain_loop_at_every_size(
        tokens in 1usize..11, inputs in 1usize..100, outputs in 1usize..40, seed in any::<u64>(),
    ) {
        for kind in ALL {
            let inputs = inputs.next_multiple_of(kind.block().0);
            check_linear(kind, (tokens, inputs, outputs), seed);
        }
    }

    /// AVX2 and AVX-512 agree in every bit where both round alike: all but bf16 times bf16.
    #[test]
    fn vector_instruction_sets_agree(tokens in 1usize..20, inputs in 1usize..600, seed in any::<u64>()) {
        let sets: Vec<Isa> = Isa::all().into_iter().filter(|isa| isa.name() != "portable").collect();
        for kind in ALL.into_iter().filter(|kind| *kind != WeightType::Bf16) {
            let inputs = inputs.next_multiple_of(kind.block().0);
            let (x, raw) = (uneven(tokens, inputs, seed), random_weight(kind, 19, inputs, seed));
            let run = |isa: &Isa| { let b = backend(*isa, 1, Precision::Native); b.linear(&x, &b.weight(raw.clone()), None) };
            prop_assert!(sets.iter().map(run).collect::<Vec<_>>().windows(2).all(|pair| pair[0] == pair[1]));
        }
    }
}

/// Tests that compare instruction sets compare nothing where the processor lacks one: that is on record with the stories that could not be
/// told (`target/not-run.jsonl`).
#[test]
fn what_this_processor_cannot_show_is_on_record() {
    let vectors = Isa::all().iter().filter(|isa| isa.name() != "portable").count();
    let mut missing = Vec::new();
    if vectors < 2 {
        missing.push(("vector_instruction_sets_agree", format!("{vectors} of the two sets of vector instructions")));
    }
    #[cfg(target_arch = "x86_64")]
    if Isa::best().tiles().is_none() {
        let tests = ["tiles_agree_with_vectors", "tiles_sum_the_products_of_signed_bytes"];
        missing.extend(tests.map(|test| (test, "no tiles (AMX)".to_owned())));
    }
    let target = concat!(env!("CARGO_MANIFEST_DIR"), "/../target");
    let record = format!("{target}/not-run.jsonl");
    for (test, has) in missing {
        std::fs::create_dir_all(target).unwrap();
        let line =
            serde_json::json!({"not_run": format!("engine::{test}"), "why": [format!("this processor has {has}")]});
        let mut file = std::fs::File::options().create(true).append(true).open(&record).unwrap();
        std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes()).unwrap();
    }
}

/// Where products gather in few bits: all weights and all inputs as large as they can be, of one sign and of the other.
#[test]
fn the_greatest_weights_and_inputs_fit_into_every_sum() {
    for (kind, fill) in QUANTISED.into_iter().flat_map(|kind| [0x00, 0x7F, 0x80, 0xFF].map(|fill| (kind, fill))) {
        let (block, block_bytes) = kind.block();
        let mut bytes = vec![fill; 19 * block_bytes];
        let scale = half::f16::from_f32(0.01).to_le_bytes();
        bytes
            .chunks_mut(block_bytes)
            .flat_map(|block| scales_of(kind, block))
            .for_each(|place| place.copy_from_slice(&scale));
        let raw = RawWeight::new(19, block, kind, bytes.into()).unwrap();
        for (isa, x) in Isa::all().into_iter().flat_map(|isa| [1.0, -1.0].map(|x| (isa, x))) {
            let x = Matrix { rows: 7, cols: block, values: vec![x; 7 * block] };
            let b = backend(isa, 1, Precision::Native);
            let got = b.linear(&x, &b.weight(raw.clone()), None);
            for (got, (want, _)) in got.values.iter().zip(plain_linear(&x, &raw.to_f32(), 19)) {
                let off = (f64::from(*got) - want).abs();
                assert!(off <= 1e-3 * want.abs() + 1e-6, "{} {kind:?} {fill:x}: {got} {want}", isa.name());
            }
        }
    }
}

/// Two rows more than vectors take.
const ROWS: usize = 35;

/// What matrices that are done with leave behind is never read.
#[test]
fn recycled_memory_changes_no_bit() {
    let (rows, inputs, outputs) = (ROWS, 512, 600);
    let run = |kind, precision, isa| {
        let b = backend(isa, 1, precision);
        let x = matrix(rows, inputs, 1);
        let y = b.linear(&x, &b.weight(random_weight(kind, outputs, inputs, 2)), None);
        let z = b.rms_norm(&b.gather_rows(&y, &(0..rows).rev().collect::<Vec<_>>()), &matrix(1, outputs, 3), 1e-6);
        [y.values.clone(), z.values.clone()].map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<_>>())
    };
    for isa in Isa::all() {
        for (kind, precision) in ALL.iter().flat_map(|kind| [(*kind, Precision::Exact), (*kind, Precision::Native)]) {
            let fresh = std::thread::scope(|scope| scope.spawn(|| run(kind, precision, isa)).join().unwrap());
            for _ in 0..12 {
                memory::give(vec![f32::NAN; 2 * rows * outputs]);
            }
            assert_eq!(run(kind, precision, isa), fresh, "{} {kind:?} {precision:?}", isa.name());
        }
    }
}

#[test]
fn threads_and_neighbours_change_no_bit() {
    for isa in Isa::all() {
        for (kind, precision) in ALL.iter().flat_map(|kind| [(*kind, Precision::Exact), (*kind, Precision::Native)]) {
            // enough rows for tiles, where there are some, and enough inputs for several threads in each operation; alone each row goes by vectors
            let (x, raw) = (uneven(ROWS, 1536, 1), random_weight(kind, 83, 1536, 2));
            let one = backend(isa, 1, precision);
            let weight = one.weight(raw);
            let whole = one.linear(&x, &weight, None);
            assert_eq!(whole, backend(isa, 3, precision).linear(&x, &weight, None), "{kind:?}");
            for row in 0..ROWS {
                let alone = one.linear(&one.gather_rows(&x, &[row]), &weight, None);
                assert_eq!(alone.values, whole.row(row), "{} {kind:?} {precision:?} row {row}", isa.name());
            }
            // few rows go in blocks of their own sizes
            for rows in [2, 3, 4, 5, 7, 8, 11, 16, 17] {
                let few = one.linear(&one.gather_rows(&x, &(0..rows).collect::<Vec<_>>()), &weight, None);
                assert_eq!(
                    few.values,
                    whole.values[..few.values.len()],
                    "{} {kind:?} {precision:?} {rows}",
                    isa.name()
                );
            }
        }
    }
}

/// Inputs that take several turns by the weights, rows of weights that end amid a step, and every block that a few inputs can go in.
#[test]
fn turns_and_ends_of_rows_change_no_bit() {
    let (rows, cols, outputs) = (263, 100, 7);
    let dense = ALL.into_iter().filter(|kind| !QUANTISED.contains(kind));
    for (kind, isa) in dense.flat_map(|kind| Isa::all().into_iter().map(move |isa| (kind, isa))) {
        for precision in [Precision::Exact, Precision::Native] {
            let (x, b) = (uneven(rows, cols, 8), backend(isa, 1, precision));
            let weight = b.weight(random_weight(kind, outputs, cols, 9));
            let whole = b.linear(&x, &weight, None);
            for row in 0..rows {
                let alone = b.linear(&b.gather_rows(&x, &[row]), &weight, None);
                assert_eq!(alone.values, whole.row(row), "{} {kind:?} {precision:?} row {row}", isa.name());
            }
            for few in (0..=20).chain([257]) {
                let got = b.linear(&b.gather_rows(&x, &(0..few).collect::<Vec<_>>()), &weight, None);
                assert_eq!(got.values, whole.values[..few * outputs], "{} {kind:?} {precision:?} {few}", isa.name());
            }
        }
    }
}

/// Inputs of bf16 weights keep their memory: what a wider matrix has left behind a row counts for nothing.
#[test]
fn forms_of_inputs_forget_wider_ones() {
    for isa in Isa::all() {
        let b = backend(isa, 1, Precision::Native);
        let mut forms = InputForms::default();
        for inputs in [96, 33, 1] {
            let (x, weight) = (matrix(3, inputs, 5), b.weight(random_weight(WeightType::Bf16, 19, inputs, 6)));
            let mut out = Matrix::default();
            b.linear_into((&x, false), &weight, None, (&mut out, &mut forms));
            assert_eq!(out, b.linear(&x, &weight, None), "{} {inputs}", isa.name());
        }
    }
}

#[test]
fn what_is_no_number_stays_so() {
    for kind in ALL {
        let mut x = matrix(2, 256, 1);
        x.values[300] = f32::NAN;
        let b = CpuBackend::new(1);
        let out = b.linear(&x, &b.weight(random_weight(kind, 5, 256, 2)), None);
        assert!(out.row(0).iter().all(|v| v.is_finite()) && out.row(1).iter().all(|v| v.is_nan()), "{kind:?}");
    }
}

#[test]
fn embedding_takes_rows_of_any_type() {
    for kind in ALL {
        let raw = random_weight(kind, 20, 256, 3);
        let b = CpuBackend::new(1);
        let got = b.embed(&b.weight(raw.clone()), &[17, 0]);
        assert_eq!(got.values, [decode_row(kind, raw.row(17)), decode_row(kind, raw.row(0))].concat());
    }
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

#[test]
fn the_exponential_and_silu_are_right_where_they_are_used() {
    for i in 0..20_000 {
        let x = -100.0 * i as f32 / 20_000.0;
        let (got, want) = (attention::exp(x), f64::from(x).exp());
        assert!((f64::from(got) - want).abs() <= 3e-7 * want + 2e-38, "{x}: {got} {want}");
        for x in [x, -x] {
            let want = f64::from(x) / (1.0 + f64::from(-x).exp());
            assert!((f64::from(silu(x)) - want).abs() <= 1e-6 * want.abs() + 1e-30, "silu {x}");
        }
    }
    assert_eq!((attention::exp(0.0), attention::exp(f32::NEG_INFINITY)), (1.0, 0.0));
    assert!(attention::exp(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
}

#[test]
fn scatter_add_adds_in_order() {
    let b = CpuBackend::new(1);
    let mut x = Matrix { rows: 2, cols: 1, values: vec![1.0, 2.0] };
    let y = Matrix { rows: 3, cols: 1, values: vec![10.0, 20.0, 30.0] };
    b.scatter_add(&mut x, &[1, 0, 1], &y, &[1.0, 0.5, 2.0]);
    assert_eq!(x.values, [11.0, 72.0]);
}

mod paged;

/// Sixteen values of each sort that a cache or an input may hold, as pairs of bf16.
struct PairsOp<'a>(&'a [f32; 16]);

impl Op for PairsOp<'_> {
    type Out = [i32; 8];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> [i32; 8] {
        s.to_pairs(s.load(self.0))
    }
}

/// The instruction that rounds to bf16, where there is one, rounds as the loop does.
#[test]
fn pairs_of_bf16_are_rounded_alike_by_all_sets() {
    let mut random = SplitMix64(7);
    let ties = [1.0 + 0.5f32.powi(8), 1.0 + 3.0 * 0.5f32.powi(8), f32::MAX, -f32::MAX, f32::INFINITY, 0.0, -0.0, 1e-30];
    for round in 0..200 {
        let values =
            std::array::from_fn(|i| if round == 0 { ties[i % 8] } else { random.bell() * 10f32.powi(round % 20) });
        let want: Vec<u16> = values.iter().map(|value: &f32| half::bf16::from_f32(*value).to_bits()).collect();
        for isa in Isa::all() {
            let got = isa.run(PairsOp(&values)).map(i32::to_le_bytes);
            let got: Vec<u16> =
                got.as_flattened().as_chunks().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
            assert_eq!(got, want, "{} {values:?}", isa.name());
        }
    }
    for isa in Isa::all() {
        let pairs = isa.run(PairsOp(&[f32::NAN; 16]));
        assert!(pairs.iter().all(|pair| half::bf16::from_bits(*pair as u16).is_nan()), "{}", isa.name());
    }
}
