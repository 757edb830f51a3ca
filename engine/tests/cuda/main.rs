//! The CUDA backend against the CPU oracle, without a GPU: the very kernels, compiled for this processor (`kernels/shim`), launched by the
//! very host code. With the feature `cuda` the same tests exist for a real device; they are ignored unless asked for (`make test-gpu`).
//! And the host's logic against a driver whose events stick.
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests: a surprise must fail the test"
)]

/// The engine's own source of chance: it is no part of what the library offers.
#[path = "../../src/splitmix.rs"]
#[allow(dead_code, reason = "not all of it is wanted here")]
mod splitmix;

/// A test of a backend, for each: `name::host` on the shim, `name::device` on a GPU.
macro_rules! test_backend {
    ($name:ident, $check:expr) => {
        mod $name {
            #[test]
            fn host() {
                let check: fn(&dyn Fn(super::CudaOptions) -> super::OnHost) = |make| $check(make);
                check(&crate::host::backend);
            }

            #[cfg(feature = "cuda")]
            #[test]
            #[ignore = "needs a GPU: make test-gpu"]
            fn device() {
                let check: fn(&dyn Fn(super::CudaOptions) -> crate::OnDevice) = |make| $check(make);
                check(&crate::on_device);
            }
        }
    };
}

mod host;
mod models;
mod ops;
mod paged;
mod products;
mod ranks;
mod rounded;
mod sampled;
mod stuck;
mod stuck_driver;
mod wire;

#[cfg(feature = "cuda")]
pub type OnDevice = engine::backend::cuda::CudaBackend<engine::backend::cuda::open::Nvidia>;

/// The first device, with kernels from the folder that TRUEBEAT_KERNELS names.
#[cfg(feature = "cuda")]
pub fn on_device(options: engine::backend::cuda::CudaOptions) -> OnDevice {
    use engine::backend::cuda::{CudaBackend, image, open::Nvidia};
    let folder = std::env::var_os("TRUEBEAT_KERNELS").expect("TRUEBEAT_KERNELS names the folder of the kernels");
    let driver = Nvidia::open(0, &image::read(&[folder.into()]).unwrap()).unwrap();
    CudaBackend::new(driver, host::BUDGET_BYTES, options).unwrap()
}
