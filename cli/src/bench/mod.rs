//! `truebeat bench`: the figures that a detector stands on, measured with real processes: how soon an exit is noticed and a stall
//! fenced, how often a healthy engine is suspected, and what all of it costs. Lines are `name value unit goal`, so that runs can be
//! joined into one table.

mod benign;
mod cost;
mod exit;
mod figures;
mod foreign;
mod healthy;
mod run_log;
mod stalls;
mod traffic;

pub use stalls::FAULTS as STALLS;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;

use crate::args::{BenchArgs, BenchKind};

pub async fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    let model = make_model(&args.out)?;
    let good = match args.what {
        BenchKind::Stalls { count, faults } => stalls::run(&args.out, &model, count, &faults).await?,
        BenchKind::Exit { count } => exit::run(&args.out, &model, count).await?,
        BenchKind::Foreign { count, server } => foreign::run(&args.out, &server, count).await?,
        BenchKind::Cost { seconds, pairs, agent } => {
            cost::run(&args.out, &model, agent.as_deref(), (seconds, pairs)).await?
        }
        BenchKind::Traffic { seconds, seed } => {
            traffic::run(&args.out, &model, Duration::from_secs(seconds), seed).await?
        }
        BenchKind::Benign { runs, lanes, burners, only, server } => {
            benign::run(&args.out, &model, benign::Plan { runs, lanes, burners, only, server }).await?
        }
        BenchKind::Healthy { minutes, burners } => healthy::run(&args.out, &model, minutes, burners).await?,
    };
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn make_model(out: &Path) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(out).with_context(|| format!("could not make {}", out.display()))?;
    let model = out.canonicalize()?.join("model");
    engine::demo_model::write_demo_model(&model, engine::demo_model::DemoArch::Llama, 1)
        .context("could not make the model")?;
    Ok(model)
}
