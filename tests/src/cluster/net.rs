//! The network namespace of a cluster: loopback and one bridge, no way out, so no packet can leave and no port can clash.
//!
//! The API server listens inside it. A test reaches it by taking its own **thread** into the namespace ([`enter`]) before it builds
//! its runtime: threads inherit the namespace of the thread that starts them, so neither a second process nor a veth is needed, and
//! the other threads of the test binary stay outside.

use std::fs::File;

use anyhow::{Context, Result};
use nix::sched::{CloneFlags, setns};

use super::command::run;
use super::layout::{Layout, NODE_IP};

const BRIDGE: &str = "tb0";

/// Makes the namespace with its bridge; what is already there stays.
///
/// # Errors
/// When `ip` refuses.
pub fn create(layout: &Layout) -> Result<()> {
    let ns = layout.netns();
    if !layout.netns_file().exists() {
        run("ip", &["netns", "add", &ns])?;
    }
    let address = format!("{NODE_IP}/24");
    run("ip", &["-n", &ns, "link", "set", "lo", "up"])?;
    run("ip", &["-n", &ns, "link", "add", BRIDGE, "type", "bridge"])?;
    run("ip", &["-n", &ns, "addr", "add", &address, "dev", BRIDGE])?;
    run("ip", &["-n", &ns, "link", "set", BRIDGE, "up"])?;
    // without a route a connect to a Service's address fails before kube-proxy's rules can see it
    run("ip", &["-n", &ns, "route", "add", "10.96.0.0/24", "dev", BRIDGE])?;
    let file = format!("--net={}", layout.netns_file().display());
    run("nsenter", &[&file, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]).map(drop)
}

/// Removes the namespace with all that lives in it (bridge, veths, kube-proxy's rules).
///
/// # Errors
/// When `ip` refuses.
pub fn remove(layout: &Layout) -> Result<()> {
    if !layout.netns_file().exists() {
        return Ok(());
    }
    run("ip", &["netns", "del", &layout.netns()]).map(drop)
}

/// Takes the calling thread, and every thread it starts from now on, into the cluster's network.
///
/// # Errors
/// When the namespace is gone or the thread has no right to enter it.
pub fn enter(layout: &Layout) -> Result<()> {
    let file = layout.netns_file();
    let handle = File::open(&file).with_context(|| format!("cannot open {}", file.display()))?;
    setns(handle, CloneFlags::CLONE_NEWNET).with_context(|| format!("cannot enter {}", file.display()))
}

/// The CNI configuration: the same bridge for pods and node.
pub fn cni_config(layout: &Layout) -> String {
    format!(
        r#"{{"cniVersion":"1.0.0","name":"{}","plugins":[{{"type":"bridge","bridge":"{BRIDGE}","isGateway":true,"ipMasq":false,"hairpinMode":true,
"ipam":{{"type":"host-local","dataDir":"{}","ranges":[[{{"subnet":"10.244.0.0/24","rangeStart":"10.244.0.10"}}]],"routes":[{{"dst":"0.0.0.0/0"}}]}}}}]}}
"#,
        layout.netns(),
        layout.text("cni-data")
    )
}
