//! What only a machine with a GPU can tell (docs/cuda.md): does a spinning kernel end a step in time, what does NVML show of a device that is
//! idle, at work or hung, and how fast are prefill and decode. Carried there by `make test-gpu` and `make bench-gpu`.

mod bench;
mod hold;
mod signature;
mod spin;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use hold::Work;

#[derive(Parser)]
struct Args {
    /// The device, as the driver counts
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Folder of the kernels' image
    #[arg(long, value_name = "DIR")]
    kernels: Option<PathBuf>,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Speed of prefill and decode of a 1B-shape model, one line a figure
    Bench {
        /// Seconds for each figure
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// NVML's view of the device while it is idle, prefills, decodes and spins; and how long each of NVML's calls takes
    Signature {
        /// Where the trace goes, a JSON object a line
        #[arg(long)]
        out: PathBuf,
        /// Seconds of each phase
        #[arg(long, default_value_t = 20)]
        seconds: u64,
    },
    /// Starts `spin` and says whether it ended in time, by itself, with evidence
    SpinCheck,
    /// Launches a kernel that never ends and waits for it as a step does; ends with status 85
    Spin,
    /// Occupies the device until it is killed
    Hold { work: Work },
}

fn main() -> ExitCode {
    let args = Args::parse();
    match run(args) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("gpu: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> Result<ExitCode> {
    let device = hold::choice(args.device, args.kernels);
    match args.what {
        What::Bench { seconds } => bench::run(&device, seconds).map(|()| ExitCode::SUCCESS),
        What::Signature { out, seconds } => signature::run(&device, &out, seconds).map(|()| ExitCode::SUCCESS),
        What::SpinCheck => spin::check(&device),
        What::Spin => spin::spin(&device),
        What::Hold { work } => hold::hold(&device, work).map(|()| ExitCode::SUCCESS),
    }
}
