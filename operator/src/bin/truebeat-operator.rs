//! The operator alone, with the very words of `truebeat`: `truebeat-operator operator …`. For an image that holds one role.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

const WORKER_THREADS: usize = 4;

#[derive(Debug, Parser)]
#[command(name = "truebeat-operator", version, about = "Truebeat's operator without the other roles")]
struct Cli {
    /// What to log, e.g. `info` or `operator=debug,info`.
    #[arg(long, global = true, env = "TRUEBEAT_LOG", default_value = "info")]
    log_filter: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The Kubernetes operator.
    Operator(operator::cli::OperatorArgs),
}

fn main() -> ExitCode {
    let Cli { log_filter, command: Command::Operator(args) } = Cli::parse();
    role::start_logging(&log_filter, std::io::stderr);
    args.confine();
    role::play(role::workers(WORKER_THREADS), |_| role::FAILED, async {
        operator::cli::run(args).await.map(|()| ExitCode::SUCCESS)
    })
}
