//! From a device's number to a backend on it: kernels read, driver opened, budget taken.

use std::path::PathBuf;

use thiserror::Error;

#[cfg(not(feature = "cuda"))]
pub use super::absent::Nvidia;
use super::driver::{Driver, DriverError};
use super::image::{self, ImageError};
#[cfg(feature = "cuda")]
pub use super::nvidia::Nvidia;
use super::{CudaBackend, CudaOptions};

/// Of the memory that is free on the device, what the engine takes when nobody says.
const SHARE_PERCENT: u64 = 90;
/// Kept for the matrices of steps.
const STEP_BYTES: u64 = 1 << 30;

/// Which device, and how much of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceChoice {
    /// Counted as the driver does, from 0.
    pub ordinal: u32,
    /// Folder of the kernels' image; `None`: the program's own.
    pub kernels: Option<PathBuf>,
    /// `None`: nine tenths of what is free.
    pub budget_bytes: Option<u64>,
}

/// Why a device cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    #[error("the device's kernels: {0}")]
    Image(#[from] ImageError),
    #[error("device {ordinal}: {source}")]
    Driver { ordinal: u32, source: DriverError },
    #[error("device {ordinal}: {wanted} bytes are wanted and {free} are free")]
    TooLittle { ordinal: u32, wanted: u64, free: u64 },
}

/// The backend on the chosen device.
///
/// # Errors
/// [`OpenError`].
pub fn open(choice: &DeviceChoice) -> Result<CudaBackend<Nvidia>, OpenError> {
    let ordinal = choice.ordinal;
    let refused = |source| OpenError::Driver { ordinal, source };
    let dirs: Vec<PathBuf> = choice.kernels.clone().or_else(image::beside_program).into_iter().collect();
    let driver = Nvidia::open(ordinal, &image::read(&dirs)?).map_err(refused)?;
    let (free, _) = driver.memory_bytes().map_err(refused)?;
    let wanted = choice.budget_bytes.unwrap_or(free / 100 * SHARE_PERCENT);
    if wanted > free || wanted == 0 {
        return Err(OpenError::TooLittle { ordinal, wanted, free });
    }
    let options = CudaOptions { step_bytes: STEP_BYTES.min(wanted / 8), ..CudaOptions::default() };
    CudaBackend::new(driver, wanted, options).map_err(refused)
}
