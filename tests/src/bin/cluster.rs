//! The tests' cluster for people: `cluster up`, then `cluster kubectl get pods`, then `cluster down`.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use truebeat_tests::{Cluster, Options, story};

/// A real Kubernetes on this machine, in a network namespace of its own.
#[derive(Debug, Parser)]
struct Args {
    /// Which cluster; the stories use `e2e`.
    #[arg(long, default_value = story::NAME)]
    name: String,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start it (builds what is missing) and leave it running.
    Up {
        /// Control plane alone, without the node.
        #[arg(long)]
        no_node: bool,
        /// The kubelet's longest restart back-off, in seconds (its own default: 300).
        #[arg(long)]
        restart_period_max_s: Option<u32>,
        /// Archives (see `images`) to import.
        #[arg(long = "import")]
        archives: Vec<std::path::PathBuf>,
    },
    /// End it and remove its state; the logs stay.
    Down,
    /// kubectl, as admin.
    #[command(disable_help_flag = true)]
    Kubectl {
        /// kubectl's own arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    match args.verb {
        Verb::Up { no_node, restart_period_max_s, archives } => {
            let options = Options { node: !no_node, restart_period_max_s, ..Options::default() };
            let cluster = match Cluster::up(&args.name, &options)? {
                Ok(cluster) => cluster,
                Err(not_run) => bail!("{not_run}"),
            };
            archives.iter().try_for_each(|archive| cluster.import(archive))?;
            println!("up; try `cluster kubectl get pods -A`, end it with `cluster down`");
            println!("logs: {}", cluster.layout().path("log").display());
            cluster.leave();
        }
        Verb::Down => Cluster::down(&args.name)?,
        Verb::Kubectl { args: words } => return kubectl(&args.name, &words),
    }
    Ok(ExitCode::SUCCESS)
}

/// Becomes kubectl, so that `exec -it`, `logs -f` and the exit status work as they do anywhere.
fn kubectl(name: &str, words: &[String]) -> Result<ExitCode> {
    let cluster =
        Cluster::attach(name)?.with_context(|| format!("cluster {name} is not up: `cluster up` starts it"))?;
    let error = Command::new("nsenter")
        .arg(format!("--net={}", cluster.layout().netns_file().display()))
        .arg(cluster.bin().join("kubectl"))
        .arg("--kubeconfig")
        .arg(cluster.layout().kubeconfig("admin"))
        .args(words)
        .exec();
    Err(error).context("cannot become kubectl")
}
