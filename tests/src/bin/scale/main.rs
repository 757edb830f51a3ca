//! The operator before a large fleet, measured: `make bench-scale PODS=N` prints one line `name value unit goal` for each figure, and a last one
//! that names the goals that were missed. Ends with 0 where none was, with 1 where one was, and with 2 where nothing could be measured.
//!
//! Real are API server, etcd, controllers, scheduler and operator; nodes and pods are objects that kwok keeps alive, and agents are what
//! this program writes. The clock of each figure is this machine's, and everything shares its cores. `docs/scale.md` tells how to read it.

mod bursts;
mod cost;
mod fleet;
mod report;
mod takeover;
mod usage;
mod watch;

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use truebeat_tests::cluster::tools;
use truebeat_tests::fleet::nodes::SILENT_NODES_STAY;
use truebeat_tests::{Cluster, Options, product};

use crate::fleet::Fleet;
use crate::report::Report;

/// The exit status where no figure can be told.
const UNMEASURED: u8 = 2;

/// Measures the operator before a fleet of simulated nodes.
#[derive(Debug, Parser)]
struct Args {
    /// Engine pods; ten on each node, a hundred in each InferenceDeployment.
    #[arg(long, default_value_t = 1000)]
    pods: usize,
    /// Per cent of the nodes that fail at once.
    #[arg(long, default_value_t = 15)]
    failing_percent: usize,
    /// How often each burst is repeated.
    #[arg(long, default_value_t = 3, value_parser = at_least_once)]
    repeat: usize,
    /// How long the fleet is left alone to see that nothing is written, in seconds.
    #[arg(long, default_value_t = 60)]
    quiet_s: u64,
}

/// No burst would be no figure, and no goal missed.
fn at_least_once(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|times| *times > 0).ok_or_else(|| format!("{text:?} is not a number of times, 1 or more"))
}

fn main() -> ExitCode {
    match measure(&Args::parse()) {
        Ok(report) => {
            println!("{}{}", report.text(), report.closing());
            ExitCode::from(u8::from(!report.missed().is_empty()))
        }
        Err(error) => {
            eprintln!("scale: {error:#}");
            ExitCode::from(UNMEASURED)
        }
    }
}

fn measure(args: &Args) -> Result<Report> {
    if args.pods < fleet::PODS_EACH || !args.pods.is_multiple_of(fleet::PODS_EACH) {
        bail!("--pods {}: a multiple of {} is needed", args.pods, fleet::PODS_EACH);
    }
    let programs = product::Programs::find()?;
    let bin = tools::with_kwok()?;
    let fast = ["--kube-api-qps=2000", "--kube-api-burst=4000"].map(str::to_owned);
    let workers = ["deployment", "replicaset", "service-endpoint"].map(|kind| format!("--concurrent-{kind}-syncs=20"));
    let kcm_extra = [vec![SILENT_NODES_STAY.to_owned()], fast.to_vec(), workers.to_vec()].concat();
    let options = Options { node: false, kcm_extra, scheduler_extra: fast.to_vec(), ..Options::default() };
    let cluster = match Cluster::up("scale", &options)? {
        Ok(cluster) => cluster,
        Err(not_run) => bail!("{not_run}"),
    };
    cluster.run(async |client| {
        let mut report = Report::default();
        let fleet = Fleet::start(client, &cluster, &programs, &bin.join("kwok"), args.pods, &mut report).await?;
        usage::at_rest(&fleet, args.quiet_s, &mut report).await?;
        for _ in 0..args.repeat {
            bursts::nodes_fail(&fleet, args.failing_percent, &mut report).await?;
        }
        bursts::one_by_one(&fleet, &mut report).await?;
        takeover::crash(&fleet, args.repeat, &mut report).await?;
        takeover::release(&fleet, args.repeat, &mut report).await?;
        usage::at_the_end(&fleet, &mut report).await?;
        Ok(report)
    })
}
