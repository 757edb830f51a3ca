//! The engine alone, with the very words of `truebeat`: `truebeat-engine engine …`. For images that hold one role.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const WORKER_THREADS: usize = 4;

#[derive(Debug, Parser)]
#[command(name = "truebeat-engine", version, about = "Truebeat's engine without the other roles")]
struct Cli {
    /// What to log, e.g. `info` or `engine=debug,info`.
    #[arg(long, global = true, env = "TRUEBEAT_LOG", default_value = "info")]
    log_filter: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model with Truebeat's own engine.
    Engine(engine::cli::EngineArgs),
}

fn main() -> ExitCode {
    let Cli { log_filter, command: Command::Engine(args) } = Cli::parse();
    let work = async { engine::cli::run(args).await.map(|()| ExitCode::SUCCESS) };
    role::start_logging(&log_filter, engine::log_file::writer());
    role::play(role::workers(WORKER_THREADS), engine::cli::EngineError::exit_code, work)
}
