//! The engine alone, with the very words of `truebeat`: `truebeat-engine engine …`. For images that hold one role.

use std::error::Error;
use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_new(&cli.log_filter).unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let Command::Engine(args) = cli.command;
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("truebeat: {}", chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(args: engine::cli::EngineArgs) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(engine::cli::run(args))?;
    // A background task may sit in a blocking call; a role that has ended does not wait for it (E1).
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(())
}

/// The error and everything beneath it, in one line.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
