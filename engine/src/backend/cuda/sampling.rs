//! Sampling on the device, for requests whose rules need nothing but the row: greedy, temperature, min-p, top-k, top-p. Their random number
//! comes from the request's own generator, so that the device draws what `crate::sampling` draws.

use super::CudaBackend;
use super::device::Device;
use super::driver::{Driver, Launch};
use super::launches::{args, blocks, groups};
use super::memory::{Matrix, Slice};
use crate::backend::DeviceFault;
use crate::sampling::Draw;

/// What the kernel says of a row without one finite logit.
const NO_TOKEN: u32 = u32::MAX;
/// Threads of a block that has a row, and of one that has a part of it.
const ROW_THREADS: u32 = 1024;
const PART_THREADS: u32 = 256;
/// Logits of a part: few enough that one row keeps a hundred blocks busy.
const PART: usize = 1024;

impl<D: Driver> CudaBackend<D> {
    /// A token for each row of `logits` (`rows × vocabulary`); `None` for one that has no finite value, and for all where the device
    /// failed, which the end of the step tells.
    pub fn sample(&self, logits: &Matrix, draws: &[Draw]) -> Vec<Option<u32>> {
        let tokens = if draws.len() == logits.rows && logits.place.is_some() {
            self.run(|device| device.sample(logits, draws))
        } else {
            None
        };
        let tokens = tokens.unwrap_or_else(|| vec![NO_TOKEN; logits.rows]);
        tokens.into_iter().map(|token| (token != NO_TOKEN).then_some(token)).collect()
    }
}

impl<D: Driver> Device<D> {
    fn sample(&mut self, logits: &Matrix, draws: &[Draw]) -> Result<Vec<u32>, DeviceFault> {
        let rows = logits.rows;
        let out = self.take((rows * 4).max(4) as u64)?;
        if draws.iter().all(|draw| draw.temperature <= 0.0) {
            self.best(logits, &out)?;
        } else {
            let rules: Vec<u8> = draws.iter().flat_map(rules).collect();
            let rules = self.put_new(&rules)?;
            // a word for each thread's part of the row, and one besides
            let geometry = ([blocks(rows, 1), 1, 1], ROW_THREADS, (ROW_THREADS + 1) * 8);
            self.launch(Launch::new("sample_rows", geometry, args![&out, logits, &rules, logits.cols]))?;
        }
        let mut tokens = vec![0; rows];
        self.get(out.at(), rows * 4, std::iter::once(bytemuck::cast_slice_mut(&mut tokens)))?;
        Ok(tokens)
    }

    /// The likeliest of each row: of its parts, and then of these.
    fn best(&mut self, logits: &Matrix, out: &Slice) -> Result<(), DeviceFault> {
        let (rows, parts) = (logits.rows, logits.cols.div_ceil(PART).max(1));
        let found = self.parts((rows * parts * 8) as u64)?;
        let geometry = ([blocks(parts, 1), blocks(rows, 1), 1], PART_THREADS, (PART_THREADS + 1) * 8);
        self.launch(Launch::new("best_part", geometry, args![found, logits, logits.cols]))?;
        self.launch(Launch::new("best_join", groups(rows, 0), args![out, found, rows, parts]))
    }
}

/// As `Rules` of kernels/sampling.cu.
fn rules(draw: &Draw) -> [u8; 32] {
    let greedy = draw.temperature <= 0.0;
    let scale = if greedy { 0.0 } else { 1.0 / f64::from(draw.temperature) };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&scale.to_le_bytes());
    bytes[8..16].copy_from_slice(&draw.unit.to_le_bytes());
    bytes[16..20].copy_from_slice(&draw.top_p.to_le_bytes());
    bytes[20..24].copy_from_slice(&draw.min_p.to_le_bytes());
    bytes[24..28].copy_from_slice(&draw.top_k.to_le_bytes());
    bytes[28..].copy_from_slice(&u32::from(greedy).to_le_bytes());
    bytes
}
