//! Products of rows with weights: which kernels make them, for how many rows. Weights in bf16 go through tensor cores (`kernels/mma.cu`), all
//! others through plain kernels (`kernels/matmul.cu`). Which of a family's kernels it is depends on the rows of the step, and changes no bit
//! of any row (EP4); which family, on the weight alone. Many rows go by warpgroups where the device has them (`warpgroups`).

use super::device::Device;
use super::driver::{Address, Driver, Launch};
use super::format::{Format, Weight};
use super::launches::{Done, args, blocks, groups, values};
use super::memory::{Matrix, Slice};
use super::warpgroups;
use crate::backend::DeviceFault;

/// Rows that go through a weight together in the plain kernels.
const PLAIN_ROWS: usize = 8;
/// Threads of a block of the tensor cores' kernels.
const THREADS: u32 = 256;
/// Spans that a sum is made of.
const SPANS: usize = 8;
/// Outputs of a tensor core's product, and rows.
const TALL: usize = 16;
const WIDE: usize = 8;
/// Outputs of a tile, and its rows, where there are many and where there are fewer.
const TILE: usize = 128;
const TILE_ROWS: [usize; 2] = [128, 64];
/// So many blocks keep a device busy: about as many as the largest have multiprocessors.
pub(super) const BLOCKS_MIN: usize = 128;

impl<D: Driver> Device<D> {
    /// `out = x · weightᵀ + bias`; `same`: x is that of the product before.
    pub(super) fn matmul(
        &mut self,
        (x, same): (&Matrix, bool),
        weight: &Weight,
        bias: Option<&Matrix>,
        out: &mut Matrix,
    ) -> Done {
        let (rows, cols, outputs) = (x.rows, weight.cols, weight.rows);
        self.workplace.fresh &= same;
        self.shape(out, rows, outputs)?;
        let Some(place) = &weight.place else { return Ok(()) };
        if rows == 0 || outputs == 0 {
            return Ok(());
        }
        let bias = bias.map_or(Address::default(), Matrix::at);
        if weight.format == Format::Bf16 && cols.is_multiple_of(WIDE) {
            return self.tensor_product(x, (place, outputs), bias, out);
        }
        let [one, eight] = weight.format.matmul();
        let (kernel, together) = if rows == 1 { (one, 1) } else { (eight, PLAIN_ROWS) };
        let mut geometry = groups(outputs, 0);
        geometry.0[1] = blocks(rows, together);
        self.launch(Launch::new(kernel, geometry, args![&*out, x, place, bias, rows, cols, outputs]))
    }

    fn tensor_product(&mut self, x: &Matrix, (weight, outputs): (&Slice, usize), bias: Address, out: &Matrix) -> Done {
        let (rows, cols) = (x.rows, x.cols);
        if let Some(few) = Few::of(rows) {
            let args = args![out, x, weight, bias, rows, cols, outputs];
            return self.launch(Launch::new(few.kernel, few.geometry(rows, outputs), args));
        }
        if self.has_warpgroups() {
            let (packed, variant) = (self.packed(x)?, self.variant(rows, cols, outputs));
            let args = args![out, packed, weight, bias, rows, cols, outputs];
            return self.launch(Launch::new(variant.kernel, variant.geometry(rows, &[outputs]), args));
        }
        let rounded = self.rounded(x)?;
        let tiles = |tile_rows: usize| rows.div_ceil(tile_rows) * outputs.div_ceil(TILE);
        let [many, fewer] = TILE_ROWS;
        // a tile of more rows than there are multiplies zeros
        let fits = |tile_rows: usize| tiles(tile_rows) >= BLOCKS_MIN && (tile_rows == fewer || rows > fewer);
        let whole = [("mma_tile", many), ("mma_tile_64", fewer)].into_iter().find(|(_, rows)| fits(*rows));
        if let Some((kernel, tile_rows)) = whole {
            let args = args![out, rounded, weight, bias, rows, cols, outputs];
            return self.launch(Launch::new(kernel, tiled(rows, outputs, tile_rows, 1), args));
        }
        let parts = self.parts((SPANS * rows * outputs * 4) as u64)?;
        let args = args![parts, rounded, weight, rows, cols, outputs];
        self.launch(Launch::new("mma_part", tiled(rows, outputs, fewer, SPANS), args))?;
        let geometry = ([blocks(outputs, THREADS as usize), blocks(rows, 1), 1], THREADS, 0);
        self.launch(Launch::new("mma_join", geometry, args![out, parts, bias, rows, outputs]))
    }

    /// `x` in bf16.
    fn rounded(&mut self, x: &Matrix) -> Result<Address, DeviceFault> {
        let at = self.rounded_room((x.len() * 2) as u64)?;
        if !self.workplace.fresh {
            self.launch(Launch::new("round_bf16", values(x.len().div_ceil(WIDE)), args![at, x, x.len()]))?;
        }
        self.workplace.fresh = true;
        Ok(at)
    }

    /// `x` in bf16, as warpgroups read it.
    fn packed(&mut self, x: &Matrix) -> Result<Address, DeviceFault> {
        let (bytes, threads) = warpgroups::packed(x.rows, x.cols);
        let at = self.packed_room(bytes, self.workplace.fresh)?;
        if !self.workplace.fresh {
            self.launch(Launch::new("pack_rows", values(threads), args![at, x, x.rows, x.cols]))?;
        }
        self.workplace.fresh = true;
        Ok(at)
    }
}

/// The kernels for so few rows that each goes through all of a weight.
pub(super) struct Few {
    pub kernel: &'static str,
    /// For three products of the same rows, and for the product of two.
    pub three: &'static str,
    pub pair: &'static str,
    /// Rows of a block.
    rows: usize,
    /// Outputs of a block, in sixteens.
    sixteens: usize,
}

const FEW: [Few; 3] = [
    Few { kernel: "mma_few_8", three: "mma_three_few_8", pair: "mma_pair_few_8", rows: 8, sixteens: 1 },
    Few { kernel: "mma_few_16", three: "mma_three_few_16", pair: "mma_pair_few_16", rows: 16, sixteens: 2 },
    Few { kernel: "mma_few_32", three: "mma_three_few_32", pair: "mma_pair_few_32", rows: 32, sixteens: 2 },
];

impl Few {
    /// Outputs of one product of tensor cores.
    pub const TALL: usize = TALL;

    /// Those for so many rows; `None`: there are too many.
    fn of(rows: usize) -> Option<&'static Self> {
        FEW.iter().find(|few| rows <= few.rows)
    }

    /// Those that this kernel is one of.
    pub fn named(kernel: &str) -> Option<&'static Self> {
        FEW.iter().find(|few| few.kernel == kernel)
    }

    /// Blocks for so many outputs.
    pub fn blocks(&self, outputs: usize) -> usize {
        outputs.div_ceil(self.sixteens * TALL)
    }

    fn geometry(&self, rows: usize, outputs: usize) -> ([u32; 3], u32, u32) {
        let grid = [blocks(self.blocks(outputs), 1), blocks(rows, self.rows), 1];
        (grid, THREADS, self.shared_bytes(self.sixteens))
    }

    /// A line of `sixteens` outputs and four words for each row of each span.
    pub fn shared_bytes(&self, sixteens: usize) -> u32 {
        (SPANS * self.rows * (sixteens * TALL + 4) * 4) as u32
    }
}

/// Tiles of `tile_rows` rows, and shared memory for three stages of 32 columns of a tile's lines.
fn tiled(rows: usize, outputs: usize, tile_rows: usize, spans: usize) -> ([u32; 3], u32, u32) {
    let grid = [blocks(rows, tile_rows), blocks(outputs, TILE), blocks(spans, 1)];
    (grid, THREADS, ((TILE + tile_rows) * 3 * 32 * 2) as u32)
}
