//! Can this machine hold a cluster? Each thing that is missing is named with what it is needed for; a story that cannot run for such
//! a reason is *not run*, which is neither passed nor failed, and is counted.

use std::fmt;
use std::fs;
use std::os::unix::net::UnixStream;

use nix::sys::statfs::statfs;
use nix::unistd::geteuid;

use super::cgroup;
use super::command::{exists, run};
use super::layout::Layout;

/// Why stories that need a cluster are not run here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotRun {
    /// One sentence for each thing that is missing.
    pub why: Vec<String>,
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no cluster on this machine: {}", self.why.join("; "))
    }
}

/// Looks at everything a cluster (and, if wanted, a node) needs.
///
/// # Errors
/// All that is missing at once, not the first alone.
pub fn check(layout: &Layout, node: bool) -> Result<(), NotRun> {
    let mut why = Vec::new();
    for (program, needed_for) in
        [("ip", "the network namespace"), ("nsenter", "entering it"), ("openssl", "the cluster's keys")]
    {
        if !exists(program) {
            why.push(format!("`{program}` is missing ({needed_for})"));
        }
    }
    if geteuid().is_root() {
        if let Err(error) = run("unshare", &["--net", "--mount", "true"]) {
            why.push(format!("no right to make network and mount namespaces ({error})"));
        }
    } else {
        why.push("not root (namespaces, cgroups and mounts need it)".to_owned());
    }
    if node {
        why.extend(node_faults(layout));
    }
    if why.is_empty() { Ok(()) } else { Err(NotRun { why }) }
}

fn node_faults(layout: &Layout) -> Vec<String> {
    let mut why = Vec::new();
    if !exists("nft") {
        why.push("`nft` is missing (kube-proxy; package nftables)".to_owned());
    }
    for program in ["iptables", "ipset"] {
        if !exists(program) {
            why.push(format!("`{program}` is missing (kube-router; package {program})"));
        }
    }
    if !exists("cc") {
        why.push("`cc` is missing (the pause program)".to_owned());
    }
    if let Err(error) = cgroup::version() {
        why.push(format!("{error}"));
    }
    if !fs::read_to_string("/proc/filesystems").is_ok_and(|list| list.contains("overlay")) {
        why.push("the kernel has no overlay file system (container images)".to_owned());
    }
    // an overlay cannot be the upper layer of another one: a container's own root is no place for containerd's state
    let base = layout.root.ancestors().find(|dir| dir.is_dir());
    if base
        .and_then(|dir| statfs(dir).ok())
        .is_some_and(|fs| fs.filesystem_type() == nix::sys::statfs::OVERLAYFS_SUPER_MAGIC)
    {
        why.push(format!(
            "{} lies on an overlay (set TRUEBEAT_CACHE to a folder on a real disk)",
            layout.root.display()
        ));
    }
    // the device-plugin socket has a fixed place: two kubelets on one machine would take it from each other
    if UnixStream::connect("/var/lib/kubelet/device-plugins/kubelet.sock").is_ok() {
        why.push("another kubelet runs on this machine".to_owned());
    }
    why
}
