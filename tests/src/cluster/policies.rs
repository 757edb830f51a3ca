//! What enforces NetworkPolicies: kube-router's firewall, and nothing else of it. Without it they are objects that nobody reads.

use std::path::Path;

use anyhow::Result;

use super::command::run;
use super::layout::{Layout, NODE};
use super::process::{self, Identity};

/// Starts it on the node.
///
/// # Errors
/// When the kernel does not let a bridge's packets be filtered, or the program cannot be started.
pub fn enforce(layout: &Layout, bin: &Path) -> Result<Identity> {
    // all pods are on one bridge: what passes between two of them is seen by no filter otherwise
    let netns = format!("--net={}", layout.netns_file().display());
    run("nsenter", &[&netns, "sh", "-c", "echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables"])?;
    let kubeconfig = layout.kubeconfig("admin").display().to_string();
    let words = "kube-router --run-router=false --run-service-proxy=false --run-firewall=true --enable-ipv6=false --health-port=0
                 --service-cluster-ip-range=10.96.0.0/24 --iptables-sync-period=10s --v=1";
    let argv = words.split_whitespace().map(str::to_owned);
    let own = [format!("--hostname-override={NODE}"), format!("--kubeconfig={kubeconfig}")];
    process::start(layout, "kube-router", bin, argv.chain(own).collect())
}
