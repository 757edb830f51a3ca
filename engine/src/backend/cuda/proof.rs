//! What is seen on a device before it is counted on: that products by warpgroups have the bits of those by single warps (EP4). Nobody promises
//! it of a generation; where it is not so, many rows go by tiles of single warps.

use super::CudaBackend;
use super::driver::Driver;
use super::warpgroups::VARIANTS;
use crate::backend::{Backend, DeviceFault};
use crate::splitmix::SplitMix64;
use crate::weights::{RawWeight, WeightType};

/// Rows of the product: more than a tile. Its columns end in the middle of a stage, and its outputs in that of a tile.
const ROWS: usize = 136;
const COLS: usize = 1064;
const OUTPUTS: usize = 136;
/// Rows that single warps take at once.
const FEW: usize = 8;

/// Compares each of the kernels with them, and lets go of warpgroups where one bit differs. Says whether they are used.
///
/// # Errors
/// What goes wrong on the device.
pub fn prove_warpgroups<D: Driver>(backend: &CudaBackend<D>) -> Result<bool, DeviceFault> {
    if !backend.has_warpgroups() {
        return Ok(false);
    }
    let same = have_the_bits_of_warps(backend);
    backend.set_many_rows(backend.options.many_rows);
    backend.end_step()?;
    if !same {
        tracing::warn!("products by warpgroups have other bits on this device than those by warps: they are not used");
        backend.forgo_warpgroups();
    }
    Ok(same)
}

/// Of each kernel; false as well where nothing could be compared.
fn have_the_bits_of_warps<D: Driver>(backend: &CudaBackend<D>) -> bool {
    let mut random = SplitMix64(0);
    // signs, exponents over a range of 2^32, and all bits of the fraction: what sums round differs from one to the next
    let mut wild = || {
        let bits = random.next();
        let exponent = 111 + (bits >> 40) % 32;
        f32::from_bits((bits as u32 & 0x807f_ffff) | (exponent as u32) << 23)
    };
    let mut bytes = Vec::with_capacity(COLS * OUTPUTS * 2);
    (0..COLS * OUTPUTS).for_each(|_| bytes.extend(half::bf16::from_f32(wild()).to_le_bytes()));
    let Some(raw) = RawWeight::new(OUTPUTS, COLS, WeightType::Bf16, bytes.into()) else { return false };
    let weight = backend.weight(raw);
    let x = backend.upload(ROWS, COLS, (0..ROWS * COLS).map(|_| wild()).collect());
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits);
    let mut apart = Vec::with_capacity(ROWS * OUTPUTS);
    for first in (0..ROWS).step_by(FEW) {
        let few = backend.gather_rows(&x, &(first..first + FEW).collect::<Vec<_>>());
        apart.extend(bits(backend.download(backend.linear(&few, &weight, None))));
    }
    !apart.is_empty()
        && VARIANTS.iter().all(|variant| {
            backend.set_many_rows(Some(variant));
            bits(backend.download(backend.linear(&x, &weight, None))).eq(apart.iter().copied())
        })
}
