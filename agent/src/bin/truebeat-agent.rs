//! The agent alone, with the very words of `truebeat`: `truebeat-agent agent …`, `truebeat-agent run …`. For images that hold one
//! role, and for tests with real processes.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "truebeat-agent", version, about = "Truebeat's agent without the other roles")]
struct Cli {
    /// What to log, e.g. `info` or `agent=debug,info`.
    #[arg(long, global = true, env = "TRUEBEAT_LOG", default_value = "warn")]
    log_filter: String,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Supervise any engine on this machine.
    Run(agent::cli::RunArgs),
    /// The sidecar's roles.
    Agent(agent::cli::AgentArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Command::Agent(args) = &cli.command
        && let Some(code) = agent::cli::small_role(args)
    {
        return code;
    }
    let filter = tracing_subscriber::EnvFilter::try_new(&cli.log_filter).unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // they go to stderr with `eprintln!`, which panics where stderr is a closed pipe
        .log_internal_errors(false)
        .init();
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("truebeat: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build()?;
    let code = runtime.block_on(async {
        match command {
            Command::Run(args) => agent::cli::run_supervised(args).await,
            Command::Agent(args) => agent::cli::run_agent(args).await,
        }
    })?;
    // A background probe may sit in a blocking read; a role that has ended does not wait for it (E1).
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    Ok(code)
}
