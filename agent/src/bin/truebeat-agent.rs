//! The agent alone, with the very words of `truebeat`: `truebeat-agent agent …`, `truebeat-agent run …`. For images that hold one
//! role, and for tests with real processes.

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
    role::start_logging(&cli.log_filter, agent::stderr::writer);
    role::play(agent::cli::runtime(), |_| role::FAILED, async {
        match cli.command {
            Command::Run(args) => agent::cli::run_supervised(args, cli.log_filter).await,
            Command::Agent(args) => agent::cli::run_agent(args, cli.log_filter).await,
        }
    })
}
