//! The command line as a value. Each role's own options live with the role; this file only gathers them.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum};

use crate::bench::STALLS;

/// Makes a replica's health mean progress: a hung LLM engine is fenced in seconds, explained, and restarted.
#[derive(Debug, Parser)]
#[command(name = "truebeat", version, about, propagate_version = true)]
pub struct Cli {
    /// What to log, e.g. `info` or `agent=debug,info`.
    #[arg(long, global = true, env = "TRUEBEAT_LOG", default_value = "warn")]
    pub log_filter: String,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Supervise any engine on this machine: truebeat run -- vllm serve …
    Run(agent::cli::RunArgs),
    /// The whole story on this machine: a real model, real hangs, caught, explained, recovered.
    Demo(DemoArgs),
    /// Measure detection on this machine: injected stalls, or hours without a fault.
    Bench(BenchArgs),
    /// Write a tiny random model with a trained tokenizer, in Hugging Face's folder format.
    DemoModel(engine::demo_model::DemoModelArgs),
    /// Run the detector, and everybody else's rules, over recorded traces: offline, in virtual time.
    Replay(crate::replay::ReplayArgs),
    /// Record what a detector sees of a live engine, for `truebeat replay`.
    Record(agent::record::RecordArgs),
    /// The verdicts of one or more agents, live.
    Top(crate::top::TopArgs),
    /// Why is this engine fenced, or was it restarted? The answer in one screen.
    Why(WhyArgs),
    /// Read an evidence bundle.
    Bundle(BundleArgs),
    /// Ask a cluster: why, incidents, bundle; take a pod out of traffic and back: fence, unfence; bear its silence: maintenance; restart one that stalls. Also as `kubectl truebeat`, by a link to this
    /// program named `kubectl-truebeat`.
    Kubectl(crate::cluster::ClusterArgs),
    /// Serve a model with Truebeat's own engine.
    Engine(engine::cli::EngineArgs),
    /// The sidecar's roles.
    Agent(agent::cli::AgentArgs),
    /// The Kubernetes operator.
    Operator(operator::cli::OperatorArgs),
}

/// The words of the command line; a link named `kubectl-truebeat` says `kubectl` by its name.
pub fn words(given: impl IntoIterator<Item = std::ffi::OsString>) -> Vec<std::ffi::OsString> {
    let mut words: Vec<_> = given.into_iter().collect();
    let name = words.first().and_then(|word| std::path::Path::new(word).file_name());
    if name.is_some_and(|name| name == "kubectl-truebeat") {
        // what is told of its use names a command that there is
        words.splice(..1, ["truebeat".into(), "kubectl".into()]);
    }
    words
}

impl Command {
    /// Roles that must stay tiny and killable run without runtime and logging.
    pub fn small_role(&self) -> Option<ExitCode> {
        match self {
            Self::Agent(args) => agent::cli::small_role(args),
            _ => None,
        }
    }

    /// The agent's own processes, which nothing may hold.
    pub fn is_sidecar(&self) -> bool {
        matches!(self, Self::Agent(_) | Self::Run(_))
    }

    /// Worker threads of the async runtime; `None`: the sidecar's own runtime of one thread, for it shares the engine's CPUs.
    pub fn worker_threads(&self) -> Option<usize> {
        match self {
            Self::Agent(_) | Self::Run(_) => None,
            Self::Replay(_)
            | Self::Record(_)
            | Self::Top(_)
            | Self::Why(_)
            | Self::Bundle(_)
            | Self::DemoModel(_)
            | Self::Kubectl(_) => Some(2),
            Self::Demo(_) | Self::Bench(_) | Self::Engine(_) | Self::Operator(_) => Some(4),
        }
    }
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs; one object a line.
    Json,
}

#[derive(Debug, Clone, clap::Args)]
pub struct DemoArgs {
    /// Where model, logs, bundles and report.json go.
    #[arg(long, default_value = "target/demo")]
    pub out: PathBuf,
    /// Clients that stream through the gate all the time.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub clients: u16,
    /// How long the engine without a fault runs; any alarm in it fails the demo.
    #[arg(long, default_value_t = 60)]
    pub healthy_seconds: u64,
    /// Also run this Python program, a stranger's OpenAI-like server that freezes on SIGUSR2 (no code of ours inside it).
    #[arg(long, value_name = "SERVER.py")]
    pub stranger: Option<PathBuf>,
    /// Run only these scenarios (`healthy`, `step-stall`, `device-wait`, `livelock`, `stranger`).
    #[arg(long, value_delimiter = ',')]
    pub only: Vec<String>,
    /// Print the report as JSON instead of the timeline.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Debug, clap::Args)]
pub struct WhyArgs {
    /// The agent to ask: its HTTP address, as `--agent-listen` gave it.
    #[arg(long, default_value = "127.0.0.1:9400")]
    pub agent: String,
    #[arg(long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Debug, clap::Args)]
pub struct BundleArgs {
    /// The bundle (`*.tar.zst`).
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print one entry whole (by its name in the list).
    #[arg(long, value_name = "NAME")]
    pub show: Option<String>,
    #[arg(long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub what: BenchKind,
    /// Where model, logs and bundles go.
    #[arg(long, default_value = "target/bench", global = true)]
    pub out: PathBuf,
}

#[derive(Debug, Subcommand)]
pub enum BenchKind {
    /// Inject stalls of four kinds one after the other into our engine under load; print p50, p99 and max from injection to fence.
    Stalls {
        #[arg(long, default_value_t = 200)]
        count: u32,
        /// Only this kind, and whichever else is named so.
        #[arg(long = "fault", value_name = "KIND", value_parser = PossibleValuesParser::new(STALLS))]
        faults: Vec<String>,
    },
    /// Kill engines; print how soon that is noticed.
    Exit {
        #[arg(long, default_value_t = 100)]
        count: u32,
    },
    /// Freeze a stranger's server in warm decode; print the time to the fence, and from there to the confirmation.
    Foreign {
        #[arg(long, default_value_t = 10)]
        count: u32,
        /// The stranger: a Python server that freezes on SIGUSR2.
        #[arg(long, default_value = "tests/stranger/server.py", value_name = "SERVER.py")]
        server: PathBuf,
    },
    /// The agent's memory and CPU time beside our engine, and the engine's throughput with and without the agent, in pairs.
    Cost {
        /// How long the agent is measured at rest, and as long under load: up to 200, before it gives memory back for the third time.
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=200))]
        seconds: u32,
        /// Pairs of the same work, with the agent and without: half a second each on a fast machine, two on a slow one.
        #[arg(long, default_value_t = 300)]
        pairs: u32,
        /// The program that has the agent's roles, e.g. the small one that pods have (target/agent/truebeat-agent). Default: this one.
        #[arg(long, value_name = "PROGRAM")]
        agent: Option<PathBuf>,
    },
    /// What healthy engines do and what looks like a hang (B1 to B9), in real processes on a loaded machine; a confirmed stall is a false
    /// eviction and a failure, fences are counted beside it.
    Benign {
        #[arg(long, default_value_t = 1000)]
        runs: u32,
        /// Runs at a time.
        #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u16).range(1..=64))]
        lanes: u16,
        /// Threads that burn CPU beside them.
        #[arg(long, default_value_t = 4)]
        burners: u16,
        /// Kinds, e.g. `B2,B6`. Default: all.
        #[arg(long, value_delimiter = ',')]
        only: Vec<String>,
        /// The stranger that acts most of them.
        #[arg(long, default_value = "tests/stranger/server.py", value_name = "SERVER.py")]
        server: PathBuf,
    },
    /// Idle, bursts, very long prompts, disconnecting clients, on a loaded machine and without a fault: every alarm is a failure.
    Healthy {
        #[arg(long, default_value_t = 30)]
        minutes: u64,
        /// Threads that burn CPU beside the engine.
        #[arg(long, default_value_t = 4)]
        burners: u16,
    },
    /// Mixed traffic of real clients with disconnects, deadlines, wrong requests and faults: one true end each, the same bytes as alone,
    /// flat memory.
    Traffic {
        #[arg(long, default_value_t = 1800, value_parser = clap::value_parser!(u64).range(20..))]
        seconds: u64,
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_kubectl_truebeat_says_kubectl() {
        let parse = |given: &[&str]| Cli::try_parse_from(words(given.iter().map(Into::into)));
        for given in
            [["/usr/bin/kubectl-truebeat", "why", "pod-1"].as_slice(), &["truebeat", "kubectl", "why", "pod-1"]]
        {
            assert!(matches!(parse(given).unwrap().command, Command::Kubectl(_)), "{given:?}");
            let refused = parse(&[given, &["--no-such-flag"]].concat()).unwrap_err().to_string();
            assert!(refused.contains("Usage: truebeat kubectl why"), "{refused}");
        }
        assert!(matches!(parse(&["truebeat", "why"]).unwrap().command, Command::Why(_)));
    }
}
