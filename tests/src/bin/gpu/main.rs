//! What only a machine with a GPU can tell (docs/cuda.md): does a spinning kernel end a step in time, what does NVML show of a device that is
//! idle, at work or hung, and how fast are prefill and decode. Carried there by `make test-gpu` and `make bench-gpu`.

mod bench;
mod hold;
mod ops;
mod ranks;
mod serve;
mod signature;
mod spin;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use bench::Sizes;
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
    /// Speed of prefill and decode, one line a figure
    Bench {
        /// The model's sizes
        #[arg(long, value_enum, default_value = "1b")]
        sizes: Sizes,
        /// Without graphs
        #[arg(long)]
        eager: bool,
        /// Seconds for each figure
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// What a copy on the device moves
    Copy {
        #[arg(long, default_value_t = 2)]
        seconds: u64,
    },
    /// How long each operation takes by itself
    Ops {
        #[arg(long, value_enum, default_value = "1b")]
        sizes: Sizes,
        /// Sequences of a step
        #[arg(long, value_delimiter = ',', default_value = "1,8,32,128,256,512")]
        rows: Vec<usize>,
    },
    /// The program itself on the device: serves over HTTP; a kernel that hangs ends it with status 85, and without guards the agent fences it
    Serve(Tried),
    /// Two ranks on the one device: their answers, and how each hang and death of a worker ends the engine
    Ranks(Tried),
    /// NVML's view of the device while it is idle, prefills, decodes and spins; and how long each of NVML's calls takes
    Signature {
        /// Where the trace goes, a JSON object a line
        #[arg(long)]
        out: PathBuf,
        /// Seconds of each phase
        #[arg(long, default_value_t = 20)]
        seconds: u64,
    },
    /// How long the engine takes to start with a model
    Ready {
        /// The program `truebeat`, built with the feature engine/cuda
        #[arg(long)]
        program: PathBuf,
        #[arg(long)]
        model: PathBuf,
    },
    /// Starts `spin` and says whether it ended in time, by itself, with evidence
    SpinCheck,
    /// Launches a kernel that never ends and waits for it as a step does; ends with status 85
    Spin,
    /// Occupies the device until it is killed
    Hold { work: Work },
}

/// The whole program on a device.
#[derive(clap::Args)]
struct Tried {
    /// The program `truebeat`, built with the feature engine/cuda
    #[arg(long)]
    program: PathBuf,
    #[arg(long)]
    model: PathBuf,
    /// Folder for logs and what the agent said
    #[arg(long)]
    out: PathBuf,
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
        What::Bench { sizes, eager, seconds } => {
            bench::run(&device, (sizes, eager), seconds).map(|()| ExitCode::SUCCESS)
        }
        What::Copy { seconds } => bench::copy(&device, seconds).map(|()| ExitCode::SUCCESS),
        What::Ops { sizes, rows } => ops::run(&device, sizes.shape(), &rows).map(|()| ExitCode::SUCCESS),
        What::Serve(tried) => serve::check(&device, &tried),
        What::Ranks(tried) => ranks::check(&device, &tried),
        What::Signature { out, seconds } => signature::run(&device, &out, seconds).map(|()| ExitCode::SUCCESS),
        What::Ready { program, model } => serve::ready(&device, &program, &model).map(|()| ExitCode::SUCCESS),
        What::SpinCheck => spin::check(&device),
        What::Spin => spin::spin(&device),
        What::Hold { work } => hold::hold(&device, work).map(|()| ExitCode::SUCCESS),
    }
}
