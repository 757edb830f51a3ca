//! `truebeat`: one binary for every role. This file is wiring: it parses, installs what a process needs once, and hands over.
//! Whatever a subcommand does lives in the library of its program (agent, engine, operator) or in a module beside this one.

mod args;
mod bench;
mod bundle;
mod clients;
mod cluster;
mod demo;
mod http;
mod replay;
mod stage;
mod top;
mod why;

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse_from(args::words(std::env::args_os()));
    if let Some(code) = cli.command.small_role() {
        return code;
    }
    start_logging(&cli.log_filter);
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("truebeat: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(cli.command.worker_threads())
        .build()
        .context("could not start the async runtime")?;
    let code = runtime.block_on(dispatch(cli.command))?;
    // Background probes may sit in a blocking read; a role that has ended must not wait for them (E1).
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(code)
}

async fn dispatch(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => Ok(agent::cli::run_supervised(args).await?),
        Command::Agent(args) => Ok(agent::cli::run_agent(args).await?),
        Command::Engine(args) => engine::cli::run(args).await.map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Command::Operator(args) => operator::cli::run(args).await.map(|()| ExitCode::SUCCESS).map_err(Into::into),
        Command::Demo(args) => stage::until_interrupted(demo::run(args)).await,
        Command::Bench(args) => stage::until_interrupted(bench::run(args)).await,
        Command::DemoModel(args) => {
            let report = engine::demo_model::run(&args)?;
            println!("{report}");
            Ok(ExitCode::SUCCESS)
        }
        Command::Replay(args) => replay::run(&args),
        Command::Record(args) => {
            let report = agent::record::run(args).await?;
            eprintln!("{report}");
            Ok(ExitCode::SUCCESS)
        }
        Command::Top(args) => top::run(args).await,
        Command::Why(args) => why::run(args).await,
        Command::Bundle(args) => bundle::run(&args),
        Command::Kubectl(args) => cluster::run(args).await,
    }
}

/// Logs go to stderr, so that stdout stays for results. `TRUEBEAT_LOG` takes the filter syntax of `tracing-subscriber`.
fn start_logging(filter: &str) {
    let filter = tracing_subscriber::EnvFilter::try_new(filter).unwrap_or_else(|error| {
        eprintln!("truebeat: --log-filter {filter:?} is not a filter ({error}); logging at info");
        tracing_subscriber::EnvFilter::new("info")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // they go to stderr with `eprintln!`, which panics where stderr is a closed pipe
        .log_internal_errors(false)
        .init();
}
