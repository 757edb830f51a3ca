//! Products of every type of weights against the CPU oracle, and the promise that neither neighbours nor the number of rows change a bit.

use engine::backend::Backend;
use engine::backend::cuda::driver::Driver;
use engine::backend::cuda::proof::prove_warpgroups;
use engine::backend::cuda::{CudaOptions, Matrix, of_e4m3, to_e4m3};
use engine::weights::{RawWeight, WeightType};

use crate::host;
pub use crate::ops::OnHost;
use crate::ops::{ALL, EXACT, Make, Numbers, assert_close, bits, both, random_weight};

/// The weight that the bytes of [`to_e4m3`] mean.
fn meant_by_e4m3(raw: &RawWeight) -> RawWeight {
    let (padded, bytes) = (raw.cols.next_multiple_of(4), to_e4m3(raw));
    let row = |row: &[u8]| {
        let scale = f32::from_le_bytes(row[padded..padded + 4].try_into().unwrap());
        row[..raw.cols].iter().flat_map(|byte| (of_e4m3(*byte) * scale).to_le_bytes()).collect::<Vec<_>>()
    };
    let bytes: Vec<u8> = bytes.chunks_exact(padded + 4).flat_map(row).collect();
    RawWeight::new(raw.rows, raw.cols, WeightType::F32, bytes.into()).unwrap()
}

fn products<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    for kind in ALL {
        for (rows, cols, outputs) in [
            (1, 256, 5),
            (3, 512, 33),
            (8, 768, 17),
            (19, 256, 40),
            (2, 7, 3),
            (1, 300, 9),
            (33, 264, 130),
            (130, 264, 20),
        ] {
            let cols = cols_of(kind, cols);
            let raw = random_weight(kind, outputs, cols, cols as u64);
            let mut random = Numbers(rows as u64);
            let (values, bias) = (random.values(rows * cols), random.values(outputs));
            // tensor cores round their inputs; the oracle does not
            let tensor = kind == WeightType::Bf16 && cols.is_multiple_of(8);
            let rounded = |values: &[f32]| values.iter().map(|v| half::bf16::from_f32(*v).to_f32()).collect::<Vec<_>>();
            let inputs = [(rows, cols, if tensor { rounded(&values) } else { values.clone() }), (1, outputs, bias)];
            let (got, want) = both(
                &b,
                &inputs,
                |m| b.linear(&m[0], &b.weight(raw.clone()), Some(&m[1])),
                |o, m| o.linear(&m[0], &o.weight(raw.clone()), Some(&m[1])),
            );
            assert_close(&got, &want, 2e-5, &format!("{kind:?} {rows} x {cols} x {outputs}"));
            if tensor {
                let unrounded = b.linear(
                    &b.upload(rows, cols, values),
                    &b.weight(raw.clone()),
                    Some(&b.upload(1, outputs, inputs[1].2.clone())),
                );
                assert!(bits(&b.download(unrounded)) == bits(&got), "{rows} x {cols} x {outputs} unrounded");
            }
        }
    }
}
test_backend!(products_match, super::products);

fn cols_of(kind: WeightType, cols: usize) -> usize {
    cols.next_multiple_of(kind.block().0)
}

fn products_in_e4m3<D: Driver>(make: Make<'_, D>) {
    let b = make(CudaOptions { weights_in_e4m3: true, ..EXACT });
    for (rows, cols, outputs) in [(1, 256, 5), (9, 510, 13), (2, 3, 2)] {
        let raw = random_weight(WeightType::Bf16, outputs, cols, 3);
        let inputs = [(rows, cols, Numbers(4).values(rows * cols))];
        let meant = meant_by_e4m3(&raw);
        let (got, want) = both(
            &b,
            &inputs,
            |m| b.linear(&m[0], &b.weight(raw.clone()), None),
            |o, m| o.linear(&m[0], &o.weight(meant.clone()), None),
        );
        assert_close(&got, &want, 2e-5, &format!("e4m3 {rows} x {cols} x {outputs}"));
        let near = raw.to_f32().iter().zip(meant.to_f32()).all(|(a, b)| (a - b).abs() <= a.abs() / 16.0 + 0.01);
        assert!(near, "e4m3 keeps three bits of each value");
        let (got, want) = (b.embed(&b.weight(raw.clone()), &[1, 0]), &meant.to_f32()[..2 * cols]);
        assert_close(&b.download(got), &[&want[cols..], &want[..cols]].concat(), 1e-6, "e4m3 rows");
    }
}
test_backend!(products_in_e4m3_match, super::products_in_e4m3);

/// EP4: alone, or beside seven others, a row has the same bits.
fn neighbours<D: Driver>(make: Make<'_, D>) {
    for (kind, options) in ALL
        .into_iter()
        .map(|kind| (kind, EXACT))
        .chain([(WeightType::Bf16, CudaOptions { weights_in_e4m3: true, ..EXACT })])
    {
        let b = make(options);
        let (rows, cols) = (11, cols_of(kind, 520));
        let weight = b.weight(random_weight(kind, 21, cols, 5));
        let x = b.upload(rows, cols, Numbers(6).values(rows * cols));
        let whole = b.rows(&b.linear(&x, &weight, None));
        for (row, together) in whole.iter().enumerate() {
            let alone = b.download(b.linear(&b.gather_rows(&x, &[row]), &weight, None));
            assert_eq!(bits(&alone), bits(together), "{kind:?} row {row}");
        }
        b.end_step().unwrap();
    }
}
test_backend!(neighbours_change_no_bit, super::neighbours);

/// The same for the tensor cores' kernels, of which each is for another number of rows: few, parts of sums, tiles of 64 rows and of 128.
fn crowds<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    for (rows, cols, outputs) in
        [(9, 520, 40), (31, 520, 40), (40, 520, 40), (130, 1000, 24), (70, 2048, 300), (130, 64, 5504), (130, 64, 8190)]
    {
        let weight = b.weight(random_weight(WeightType::Bf16, outputs, cols, 5));
        let x = b.upload(rows, cols, Numbers(6).values(rows * cols));
        let whole = b.rows(&b.linear(&x, &weight, None));
        for row in [0, rows / 2, rows - 1] {
            let alone = b.download(b.linear(&b.gather_rows(&x, &[row]), &weight, None));
            assert!(bits(&alone) == bits(&whole[row]), "row {row} of {rows} x {cols} x {outputs}");
        }
        b.end_step().unwrap();
    }
}
test_backend!(crowds_change_no_bit, super::crowds);

/// Devices without warpgroups have tiles and parts of sums by each warp alone.
#[test]
fn products_without_warpgroups_match_and_crowds_change_no_bit() {
    products(&host::without_warpgroups);
    crowds(&host::without_warpgroups);
}

/// A device is asked, for each kernel, before its warpgroups are used, and where they would change a bit they are not.
fn proven<D: Driver>(make: Make<'_, D>) {
    let b = make(EXACT);
    let there = b.has_warpgroups();
    assert!(prove_warpgroups(&b).unwrap() == there && b.has_warpgroups() == there);
}
test_backend!(warpgroups_have_the_bits_of_warps, super::proven);

#[test]
fn warpgroups_that_would_change_a_bit_are_not_used() {
    let b = host::made(EXACT, 0, host::Warpgroups::OffByABit);
    assert!(b.has_warpgroups() && !prove_warpgroups(&b).unwrap() && !b.has_warpgroups());
    crowds(&|options| {
        let b = host::made(options, 0, host::Warpgroups::OffByABit);
        prove_warpgroups(&b).unwrap();
        b
    });
}

/// What is rounded for one product is not taken for the input of the next, even where a product of another kind comes between.
fn rounding<D: Driver>(make: Make<'_, D>) {
    let (b, (rows, cols)) = (make(EXACT), (40, 256));
    let [bf16, q8] = [WeightType::Bf16, WeightType::Q8_0].map(|kind| b.weight(random_weight(kind, 8, cols, 5)));
    let [x, y] = [1, 2].map(|seed| b.upload(rows, cols, Numbers(seed).values(rows * cols)));
    let want = b.rows(&b.linear(&y, &bf16, None));
    let product = |x: &Matrix, same, weight| {
        let mut out = Matrix::default();
        b.linear_into((x, same), weight, None, (&mut out, &mut ()));
        b.rows(&out)
    };
    product(&x, false, &bf16);
    product(&y, false, &q8);
    assert!(product(&y, true, &bf16) == want, "rounded anew");
    assert!(product(&y, true, &bf16) == want, "and once");
    b.end_step().unwrap();
}
test_backend!(inputs_are_rounded_for_each_product_that_has_another, super::rounding);
