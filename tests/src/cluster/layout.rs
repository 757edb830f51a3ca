//! Where a cluster of the harness keeps its things, and what they are called. Pure names; creates nothing.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Address of the node and of its bridge inside the network namespace.
pub const NODE_IP: &str = "10.244.0.1";
/// Name of the one node.
pub const NODE: &str = "node1";

/// Names and paths of one cluster. Everything a cluster owns carries its name, so that nothing else is ever touched.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Short name, e.g. `e2e`.
    pub name: String,
    /// Folder of all state, removed at the end but for `log/`.
    pub root: PathBuf,
}

impl Layout {
    /// The layout of cluster `name` below the cache folder.
    ///
    /// # Errors
    /// When neither `TRUEBEAT_CACHE` nor `HOME` is set.
    pub fn new(name: &str) -> Result<Self> {
        Ok(Self { name: name.to_owned(), root: cache_dir()?.join("run").join(name) })
    }

    /// Network namespace (`ip netns`).
    pub fn netns(&self) -> String {
        format!("truebeat-{}", self.name)
    }

    /// The file that `nsenter --net` and `setns` open.
    pub fn netns_file(&self) -> PathBuf {
        Path::new("/var/run/netns").join(self.netns())
    }

    /// Cgroup below which the kubelet puts every pod (no leading slash).
    pub fn cgroup(&self) -> String {
        format!("truebeat-{}", self.name)
    }

    /// A file or folder of the state.
    pub fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// [`Layout::path`] as text, for configuration files and arguments.
    pub fn text(&self, relative: &str) -> String {
        self.path(relative).display().to_string()
    }

    /// Log of one process.
    pub fn log(&self, process: &str) -> PathBuf {
        self.root.join("log").join(format!("{process}.log"))
    }

    /// Record of one process: pid, start time, arguments.
    pub fn record(&self, process: &str) -> PathBuf {
        self.root.join("proc").join(format!("{process}.json"))
    }

    /// containerd's socket.
    pub fn containerd_socket(&self) -> String {
        self.text("containerd/containerd.sock")
    }

    /// Kubeconfig of `admin`, `kcm`, `sched` or `node1`.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.root.join("pki").join(format!("{user}.kubeconfig"))
    }
}

/// The folder that outlives clones: tools, archives, state of running clusters.
///
/// # Errors
/// When neither `TRUEBEAT_CACHE` nor `HOME` is set.
pub fn cache_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("TRUEBEAT_CACHE") {
        return Ok(PathBuf::from(dir));
    }
    let home = std::env::var_os("HOME")
        .context("neither TRUEBEAT_CACHE nor HOME is set: nowhere to keep the cluster's state")?;
    Ok(PathBuf::from(home).join(".cache").join("truebeat"))
}
