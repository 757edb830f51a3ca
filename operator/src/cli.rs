//! The `operator` subcommand: arguments, and the run from start to SIGTERM. The only place that wires things together.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use clap::{Args, Subcommand};
use role::pulse::Pulse;
use thiserror::Error;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    client::{Calls, FleetPolicy},
    confine,
    connect::{self, ConnectError},
    controllers::driver,
    health::Health,
    http,
    leader::{Leadership, elector::Elector, lease},
    manifests,
    metrics::Metrics,
};

/// So long the operator's own work may be stuck in one call after a probe has asked it, before `/livez` tells of it; the kubelet asks three times.
const STUCK_MAX: Duration = Duration::from_secs(10);

/// Runs the operator, or prints what a cluster needs for it.
#[derive(Debug, Clone, Args)]
pub struct OperatorArgs {
    #[command(subcommand)]
    pub command: Option<OperatorCommand>,
    /// Where to serve /livez, /readyz and /metrics. 0.0.0.0: all addresses, IPv6 ones as well.
    #[arg(long, env = "TRUEBEAT_OPERATOR_LISTEN", default_value = "0.0.0.0:9500")]
    pub listen: SocketAddr,
    /// Namespace of the leader election's Lease.
    #[arg(long, env = "POD_NAMESPACE", default_value = manifests::NAMESPACE)]
    pub namespace: String,
    /// Look after this namespace alone; all of them if absent.
    #[arg(long, env = "TRUEBEAT_WATCH_NAMESPACE")]
    pub watch_namespace: Option<String>,
    /// At most so many percent of all replicas, but always one, in a granted recovery at the same time.
    #[arg(long, env = "TRUEBEAT_FLEET_RESTARTS_PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub fleet_restarts_percent: u8,
    /// Grant nothing while more than so many percent of all replicas (and at least five) stall at once; 100: always grant.
    #[arg(long, env = "TRUEBEAT_FLEET_HOLD_PERCENT", default_value_t = 30, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub fleet_hold_percent: u8,
    /// At most so many granted recoveries at the same time on one node; 0: no limit.
    #[arg(long, env = "TRUEBEAT_NODE_RESTARTS_MAX", default_value_t = 2)]
    pub node_restarts_max: u16,
    /// At most so many granted recoveries at the same time in one failure domain; 0: no limit.
    #[arg(long, env = "TRUEBEAT_DOMAIN_RESTARTS_MAX", default_value_t = 0)]
    pub domain_restarts_max: u16,
    /// The node label that names a failure domain.
    #[arg(long, env = "TRUEBEAT_DOMAIN_TOPOLOGY_KEY", default_value = "topology.kubernetes.io/zone")]
    pub domain_topology_key: String,
    /// Name of this candidate in the leader election; made unique by process id and start time.
    #[arg(long, env = "POD_NAME", default_value = "truebeat-operator")]
    pub identity: String,
    /// UID of the pod that this is the first process of: a restarted container takes its own lease back at once.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,
    /// Do not confine this process: without it, it can start no program, write no file and make no system call that an operator never needs.
    #[arg(long, env = "TRUEBEAT_NO_CONFINE", value_parser = clap::builder::FalseyValueParser::new())]
    pub no_confine: bool,
}

impl OperatorArgs {
    /// Confines the process that is to be an operator, unless it was told not to. To be called before it has threads: one that runs already
    /// keeps the files that it may open.
    pub fn confine(&self) {
        match (&self.command, self.no_confine) {
            (Some(_), _) => {}
            (None, true) => tracing::info!("not confined: --no-confine"),
            (None, false) => confine::confine(),
        }
    }
}

/// What else the operator can do.
#[derive(Debug, Clone, Subcommand)]
pub enum OperatorCommand {
    /// Asks a running operator whether it is in step with the API server; what `helm test` runs.
    Check {
        /// Host and port of the operator's HTTP.
        #[arg(long, default_value = "127.0.0.1:9500")]
        address: String,
        /// How long to go on asking.
        #[arg(long, default_value_t = 30)]
        patience_s: u64,
    },
    /// Prints the CustomResourceDefinitions as YAML, for `kubectl apply -f -`.
    Crds,
    /// Prints namespace, rights, admission policy and Deployment of the operator as YAML, for `kubectl apply -f -`.
    Manifests {
        /// Image of the operator.
        #[arg(long, default_value = manifests::IMAGE)]
        image: String,
        /// When the kubelet pulls it: Always, IfNotPresent or Never.
        #[arg(long, default_value = "IfNotPresent", value_parser = ["Always", "IfNotPresent", "Never"])]
        image_pull_policy: String,
    },
}

/// The operator could not start or had to stop.
#[derive(Debug, Error)]
pub enum OperatorError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("listen on {address}: {source}")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("serve HTTP: {0}")]
    Serve(std::io::Error),
    #[error("set up metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("listen for signals: {0}")]
    Signals(std::io::Error),
    #[error("print manifests: {0}")]
    Manifests(#[from] crds::yaml::YamlError),
    #[error("check: {0}")]
    Check(#[from] crate::check::CheckError),
    #[error("print manifests: {0}")]
    Print(#[from] std::io::Error),
}

/// Runs until SIGTERM or SIGINT; the lease is given back on the way out.
pub async fn run(args: OperatorArgs) -> Result<(), OperatorError> {
    // First of all: two TLS providers in the tree would leave the choice open, and rustls panics on an open choice.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match &args.command {
        Some(OperatorCommand::Crds) => {
            let texts: Vec<String> = crds::yaml::crdgen()?.into_iter().map(|(_, text)| text).collect();
            print(&texts.join("---\n"))
        }
        Some(OperatorCommand::Manifests { image, image_pull_policy }) => {
            print(&manifests::install(image, image_pull_policy)?)
        }
        Some(OperatorCommand::Check { address, patience_s }) => {
            crate::check::check(address, Duration::from_secs(*patience_s)).await?;
            print(&format!("the operator at {address} is in step with the API server\n"))
        }
        None => operate(args).await,
    }
}

fn print(text: &str) -> Result<(), OperatorError> {
    use std::io::Write;
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

async fn operate(args: OperatorArgs) -> Result<(), OperatorError> {
    let metrics = Arc::new(Metrics::new()?);
    let leadership = Arc::new(Leadership::default());
    let health = Arc::new(Health::new(leadership.clone(), metrics.clone()));
    let listen = |source| OperatorError::Listen { address: args.listen, source };
    let listener = http::bind(args.listen).map_err(listen)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(OperatorError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(OperatorError::Signals)?;
    let client = connect::connect().await?;
    let place = lease::container(&args.identity, args.pod_uid.as_deref(), std::process::id());
    let identity = unique(&args.identity, place.as_deref());
    tracing::info!(identity, listen = %args.listen, "operator starts");
    let mut elector =
        Elector::new(client.clone(), &args.namespace, &identity, leadership.clone()).with_forerunners(place);
    let mut calls = Calls::new(client, leadership.clone(), metrics.clone());
    calls.fleet = Arc::new(FleetPolicy {
        namespace: args.watch_namespace.clone(),
        restarts_percent: args.fleet_restarts_percent.into(),
        hold_percent: args.fleet_hold_percent.into(),
        node_restarts_max: args.node_restarts_max.into(),
        domain_restarts_max: args.domain_restarts_max.into(),
        domain_key: args.domain_topology_key,
        ..FleetPolicy::default()
    });
    let context = driver::Context { calls, health: health.clone(), namespace: args.watch_namespace };
    let pulse = Arc::new(Pulse::new(STUCK_MAX));
    let told = http::Told { health, metrics, pulse: pulse.clone() };
    let mut served = http::serve(listener, told).map_err(OperatorError::Serve)?;
    let outcome = tokio::select! {
        () = elector.run() => Ok(()),
        () = driver::lead(Arc::new(context), &leadership) => Ok(()),
        () = pulse.beat() => Ok(()),
        ended = &mut served => Err(OperatorError::Serve(ended.unwrap_or_else(std::io::Error::other))),
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    // The controllers are dropped by now, so nothing is written after the lease is free (P14).
    elector.release().await;
    tracing::info!("operator stops");
    outcome
}

/// A restarted container keeps its pod's name, and must not take its own old lease for a current one.
fn unique(identity: &str, place: Option<&str>) -> String {
    let started = jiff::Timestamp::now().as_millisecond();
    match place {
        Some(place) => format!("{place}{started}"),
        None => format!("{identity}_{}-{started}", std::process::id()),
    }
}
