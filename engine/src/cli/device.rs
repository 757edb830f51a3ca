//! `--device`: what computes.

use std::str::FromStr;

use super::EngineArgs;
use crate::backend::cuda::open::DeviceChoice;

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceSpec {
    Cpu,
    /// By the driver's number.
    Cuda(u32),
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) => match number.parse() {
                Ok(number) => Ok(Self::Cuda(number)),
                Err(_) => Err(format!("`{number}` is no number of a device")),
            },
            _ => Err("neither cpu nor cuda nor cuda:N".to_owned()),
        }
    }
}

/// The device that the arguments ask for; `None`: the processor.
pub(super) fn device_choice(args: &EngineArgs) -> Option<DeviceChoice> {
    let DeviceSpec::Cuda(ordinal) = args.device else { return None };
    let budget_bytes = args.device_memory_mib.map(|mib| u64::from(mib) << 20);
    Some(DeviceChoice { ordinal, kernels: args.device_kernels.clone(), budget_bytes })
}

#[test]
fn a_device_is_named_and_anything_else_is_told() {
    assert_eq!("cpu".parse(), Ok(DeviceSpec::Cpu));
    assert_eq!(("cuda".parse(), "cuda:3".parse()), (Ok(DeviceSpec::Cuda(0)), Ok(DeviceSpec::Cuda(3))));
    for bad in ["gpu", "cuda:", "cuda:x", "cpu:0", ""] {
        assert!(bad.parse::<DeviceSpec>().is_err(), "{bad}");
    }
}
