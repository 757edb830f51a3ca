//! Sampling on the device, for requests whose rules need nothing but the row: greedy, temperature, min-p, top-k, top-p. Their random number
//! comes from the request's own generator, so that the device draws what `crate::sampling` draws.

use super::CudaBackend;
use super::driver::Driver;
use super::memory::Matrix;

/// How one row is sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// 0: greedy.
    pub temperature: f32,
    /// In (0, 1]; 1: no limit.
    pub top_p: f32,
    /// 0: no limit.
    pub top_k: u32,
    /// 0: no limit.
    pub min_p: f32,
    /// A random number in [0, 1).
    pub unit: f64,
}

/// What the kernel says of a row without one finite logit.
const NO_TOKEN: u32 = u32::MAX;

impl Draw {
    /// As `Rules` of kernels/sampling.cu.
    fn bytes(&self) -> [u8; 32] {
        let greedy = self.temperature <= 0.0;
        let scale = if greedy { 0.0 } else { 1.0 / f64::from(self.temperature) };
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&scale.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.unit.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.top_p.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.min_p.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.top_k.to_le_bytes());
        bytes[28..].copy_from_slice(&u32::from(greedy).to_le_bytes());
        bytes
    }
}

impl<D: Driver> CudaBackend<D> {
    /// A token for each row of `logits` (`rows × vocabulary`); `None` for one that has no finite value, and for all where the device
    /// failed, which the end of the step tells.
    pub fn sample(&self, logits: &Matrix, draws: &[Draw]) -> Vec<Option<u32>> {
        let rules: Vec<u8> = draws.iter().flat_map(Draw::bytes).collect();
        let tokens = if draws.len() == logits.rows && logits.place.is_some() {
            self.run(|device| device.sample(logits, &rules))
        } else {
            None
        };
        let tokens = tokens.unwrap_or_else(|| vec![NO_TOKEN; logits.rows]);
        tokens.into_iter().map(|token| (token != NO_TOKEN).then_some(token)).collect()
    }
}
