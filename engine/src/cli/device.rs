//! `--device`: what computes.

use std::str::FromStr;

use clap::ValueEnum;
use thiserror::Error;

use super::EngineArgs;
use crate::backend::cuda::open::DeviceChoice;

/// What computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSpec {
    Cpu,
    /// By the driver's numbers: the first rank's device, and the next ones for the other ranks; or one for each rank.
    Cuda(Vec<u32>),
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(vec![0])),
            Some(("cuda", numbers)) => {
                let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no number of a device"));
                numbers.split(',').map(number).collect::<Result<_, _>>().map(Self::Cuda)
            }
            _ => Err("neither cpu nor cuda nor cuda:N nor cuda:N,N,…".to_owned()),
        }
    }
}

/// By which way values of ranks go whose devices could be joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Collectives {
    /// By NCCL where every rank has it and a device of its own, else by the machine's memory.
    Auto,
    /// By the machine's memory.
    Memory,
}

/// The arguments name devices that their ranks cannot have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DeviceError {
    #[error(
        "--device names {named} devices for {ranks} ranks of --tensor-parallel: name the first one, or one for each rank"
    )]
    Count { named: usize, ranks: u32 },
    #[error(
        "--device gives device {0} to several ranks: say with --device-memory-mib how much of it each of them takes"
    )]
    Shared(u32),
}

/// The device that the arguments ask for, for one of its ranks; `None`: the processor.
///
/// # Errors
/// [`DeviceError`].
pub(super) fn device_choice(args: &EngineArgs, rank: usize) -> Result<Option<DeviceChoice>, DeviceError> {
    let DeviceSpec::Cuda(named) = &args.device else { return Ok(None) };
    let ranks = args.tensor_parallel;
    let ordinals: Vec<u32> = match named.as_slice() {
        [first] => (0..ranks).map(|rank| first.saturating_add(rank)).collect(),
        all if all.len() == ranks as usize => all.to_vec(),
        all => return Err(DeviceError::Count { named: all.len(), ranks }),
    };
    let budget_bytes = args.device_memory_mib.map(|mib| u64::from(mib) << 20);
    let shared = ordinals.iter().enumerate().find(|(at, ordinal)| ordinals[..*at].contains(ordinal));
    if let (Some((_, ordinal)), None) = (shared, budget_bytes) {
        return Err(DeviceError::Shared(*ordinal));
    }
    let Some(ordinal) = ordinals.get(rank).copied() else { return Ok(None) };
    // two ranks of one device cannot be joined by NCCL
    let stays_alone = shared.is_some() || args.collectives == Collectives::Memory;
    Ok(Some(DeviceChoice { ordinal, kernels: args.device_kernels.clone(), budget_bytes, stays_alone }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        engine: EngineArgs,
    }

    fn chosen(words: &str, rank: usize) -> Result<Option<DeviceChoice>, DeviceError> {
        let words = format!("engine --model m {words}");
        device_choice(&Line::parse_from(words.split(' ')).engine, rank)
    }

    #[test]
    fn a_device_is_named_and_anything_else_is_told() {
        let cuda = |numbers: &[u32]| Ok(DeviceSpec::Cuda(numbers.to_vec()));
        assert_eq!("cpu".parse(), Ok(DeviceSpec::Cpu));
        assert_eq!(("cuda".parse(), "cuda:3".parse(), "cuda:0,2".parse()), (cuda(&[0]), cuda(&[3]), cuda(&[0, 2])));
        for bad in ["gpu", "cuda:", "cuda:x", "cuda:1,", "cpu:0", ""] {
            assert!(bad.parse::<DeviceSpec>().is_err(), "{bad}");
        }
    }

    #[test]
    fn each_rank_has_a_device_of_its_own_unless_one_is_shared_in_so_many_words() {
        assert_eq!(chosen("--tensor-parallel 2", 1), Ok(None));
        let device = |words, rank| {
            let chosen = chosen(words, rank).unwrap().unwrap();
            (chosen.ordinal, chosen.stays_alone)
        };
        assert_eq!([0, 1].map(|rank| device("--device cuda:2 --tensor-parallel 2", rank)), [(2, false), (3, false)]);
        assert_eq!([0, 1].map(|rank| device("--device cuda:5,1 --tensor-parallel 2", rank)), [(5, false), (1, false)]);
        assert_eq!(device("--device cuda --tensor-parallel 2 --collectives memory", 1), (1, true));
        assert_eq!(device("--device cuda:0,0 --tensor-parallel 2 --device-memory-mib 999", 1), (0, true));
        assert_eq!(chosen("--device cuda:0,0 --tensor-parallel 2", 0), Err(DeviceError::Shared(0)));
        assert_eq!(chosen("--device cuda:0,1", 0), Err(DeviceError::Count { named: 2, ranks: 1 }));
    }
}
