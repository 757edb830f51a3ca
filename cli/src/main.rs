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
mod sse;
mod stage;
mod top;
mod why;

use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse_from(args::words(std::env::args_os()));
    if let Some(code) = cli.command.small_role() {
        return code;
    }
    if cli.command.is_sidecar() {
        // a full pipe drops lines instead of holding the processes that watch
        role::start_logging(&cli.log_filter, agent::stderr::writer);
    } else if matches!(cli.command, Command::Engine(_)) {
        role::start_logging(&cli.log_filter, engine::log_file::writer());
    } else {
        role::start_logging(&cli.log_filter, std::io::stderr);
    }
    if let Command::Operator(args) = &cli.command {
        args.confine();
    }
    let runtime = cli.command.worker_threads().map_or_else(agent::cli::runtime, role::workers);
    role::play(runtime, exit_code, dispatch(cli.command, cli.log_filter))
}

/// An engine that gave up a step says so by its status.
fn exit_code(error: &anyhow::Error) -> u8 {
    error.downcast_ref::<engine::cli::EngineError>().map_or(role::FAILED, engine::cli::EngineError::exit_code)
}

async fn dispatch(command: Command, log_filter: String) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => Ok(agent::cli::run_supervised(args, log_filter).await?),
        Command::Agent(args) => Ok(agent::cli::run_agent(args, log_filter).await?),
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
            // the trace is whole, also where nobody reads any more
            let _ = writeln!(std::io::stderr(), "{report}");
            Ok(ExitCode::SUCCESS)
        }
        Command::Top(args) => top::run(args).await,
        Command::Why(args) => why::run(args).await,
        Command::Bundle(args) => bundle::run(&args),
        Command::Kubectl(args) => cluster::run(args).await,
    }
}
