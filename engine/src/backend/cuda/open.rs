//! From a device's number to a backend on it: kernels read, driver opened, budget taken.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use thiserror::Error;

#[cfg(not(feature = "cuda"))]
pub use super::absent::Nvidia;
use super::driver::{Driver, DriverError};
use super::image::{self, ImageError};
#[cfg(feature = "cuda")]
pub use super::nvidia::Nvidia;
use super::proof::prove_warpgroups;
use super::{CudaBackend, CudaOptions};
use crate::backend::DeviceFault;
use crate::model::LoadProgress;

/// Of the memory that is free on the device, what the engine takes when nobody says.
const SHARE_PERCENT: u64 = 90;
/// So much of a device is free, in percent of all, where nobody else is on it: a context and its kernels take some.
const ALONE_PERCENT: u64 = 75;
/// The memory of a process that ends is free within this; what is held for longer is taken for somebody's who shares the device.
const HELD_MAX: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Kept for the matrices of steps.
const STEP_BYTES: u64 = 2 << 30;

/// Which device, and how much of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceChoice {
    /// Counted as the driver does, from 0.
    pub ordinal: u32,
    /// Folder of the kernels' image; `None`: the program's own.
    pub kernels: Option<PathBuf>,
    /// `None`: nine tenths of what is free.
    pub budget_bytes: Option<u64>,
    /// Not to be joined with other ranks' devices.
    pub stays_alone: bool,
}

/// Why a device cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    #[error("the device's kernels: {0}")]
    Image(#[from] ImageError),
    #[error("device {ordinal}: {source}")]
    Driver { ordinal: u32, source: DriverError },
    #[error("device {ordinal}, in its first product: {source}")]
    Proof { ordinal: u32, source: DeviceFault },
    #[error("device {ordinal}: {wanted} bytes are wanted and {free} are free")]
    TooLittle { ordinal: u32, wanted: u64, free: u64 },
}

/// The backend on the chosen device. `progress` is called while a process that was there before still holds memory.
///
/// # Errors
/// [`OpenError`].
pub fn open(choice: &DeviceChoice, progress: LoadProgress<'_>) -> Result<CudaBackend<Nvidia>, OpenError> {
    let ordinal = choice.ordinal;
    let refused = |source| OpenError::Driver { ordinal, source };
    let dirs: Vec<PathBuf> = choice.kernels.clone().or_else(image::beside_program).into_iter().collect();
    let driver = Nvidia::open(ordinal, &image::read(&dirs)?).map_err(refused)?;
    let pause = |time| {
        progress(0, 0);
        thread::sleep(time);
    };
    let free = awaited(|| driver.memory_bytes(), choice.budget_bytes, pause).map_err(refused)?;
    let wanted = choice.budget_bytes.unwrap_or(free / 100 * SHARE_PERCENT);
    if wanted > free || wanted == 0 {
        return Err(OpenError::TooLittle { ordinal, wanted, free });
    }
    let (step_bytes, stays_alone) = (STEP_BYTES.min(wanted / 8), choice.stays_alone);
    let options = CudaOptions { step_bytes, stays_alone, ..CudaOptions::default() };
    let backend = CudaBackend::new(driver, wanted, options).map_err(refused)?;
    prove_warpgroups(&backend).map_err(|source| OpenError::Proof { ordinal, source })?;
    Ok(backend)
}

/// What is free of a device once that is enough, or after a while: a process whose container is gone may still hold its memory, and whoever
/// takes nine tenths of the rest would serve with a fraction of its cache from then on (F6).
fn awaited(
    look: impl Fn() -> Result<(u64, u64), DriverError>,
    budget_bytes: Option<u64>,
    mut pause: impl FnMut(Duration),
) -> Result<u64, DriverError> {
    let mut waited = Duration::ZERO;
    loop {
        let (free, all) = look()?;
        let enough = match budget_bytes {
            Some(wanted) => free >= wanted,
            None => free >= all / 100 * ALONE_PERCENT,
        };
        if enough {
            return Ok(free);
        }
        if waited >= HELD_MAX {
            tracing::warn!(free, all, "somebody else holds memory of the device; its share is what is free");
            return Ok(free);
        }
        pause(LOOK_EVERY);
        waited += LOOK_EVERY;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// What is free in the end of a device of 80 GiB, and how long that was waited for, where `held` GiB of it are free again after `after`.
    fn waited(budget: Option<u64>, held: u64, after: Duration) -> (u64, Duration) {
        let passed = Cell::new(Duration::ZERO);
        let look =
            || Ok((if passed.get() < after { 79 - held } else { 79 }, 80)).map(|(free, all)| (free * GIB, all * GIB));
        let free = awaited(look, budget.map(|gib| gib * GIB), |time| passed.set(passed.get() + time)).unwrap();
        (free / GIB, passed.get())
    }

    #[test]
    fn fault_f6_memory_that_a_process_still_holds_is_waited_for() {
        let (s, never) = (Duration::from_secs, Duration::MAX);
        assert_eq!(waited(None, 0, never), (79, s(0)), "nobody is there");
        assert_eq!(waited(None, 70, s(12)), (79, s(12)), "it is all there when the process has ended");
        assert_eq!(waited(None, 70, never), (9, HELD_MAX), "somebody shares the device");
        assert_eq!(waited(Some(8), 70, never), (9, s(0)), "what was asked for fits beside it");
        assert_eq!(waited(Some(40), 70, s(3)), (79, s(3)));
        assert_eq!(waited(Some(40), 70, never), (9, HELD_MAX), "too little, which is said by its name");
    }
}
