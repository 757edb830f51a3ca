//! Taking a cluster away: everything it started, by recorded identity or by its own cgroup, its mounts, its cgroups, its namespace,
//! its state. Idempotent, and it needs nothing but the state folder: the next run uses it on what a killed run left behind.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use super::layout::Layout;
use super::process::Identity;
use super::{cgroup, net, process};

const BOUND: Duration = Duration::from_secs(10);

/// Ends and removes everything; the logs stay.
///
/// # Errors
/// Naming all that could not be removed.
pub fn run(layout: &Layout) -> Result<()> {
    if !layout.root.exists() && !layout.netns_file().exists() {
        return Ok(());
    }
    let mut left = Vec::new();
    end_recorded(layout, &mut left)?;
    end_pods(layout, &mut left)?;
    unmount_below(&layout.root)?;
    if let Err(error) = net::remove(layout) {
        left.push(format!("{error:#}"));
    }
    if crate::wait::until("the cgroups' end", BOUND, || Ok(cgroup::remove(&layout.cgroup())?.then_some(()))).is_err() {
        left.push(format!("cgroup /{}", layout.cgroup()));
    }
    remove_state(layout)?;
    if !left.is_empty() {
        bail!("cluster {} left behind: {}", layout.name, left.join(", "));
    }
    Ok(())
}

/// Everything with a record. The state is thrown away, so nobody is asked to write it down first: SIGKILL, all at once.
fn end_recorded(layout: &Layout, left: &mut Vec<String>) -> Result<()> {
    let mut ending = Vec::new();
    for entry in fs::read_dir(layout.path("proc")).into_iter().flatten().flatten() {
        let Some(name) = entry.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()) else { continue };
        if let Some(identity) = process::recorded(layout, &name)? {
            identity.signal(Signal::SIGKILL);
            ending.push((name, identity));
        }
    }
    left.extend(ending.iter().filter(|(_, identity)| !identity.gone_within(BOUND)).map(|(name, _)| name.clone()));
    Ok(())
}

/// The pods' processes are exactly those in our cgroup; their shims are known by our socket on their command line.
fn end_pods(layout: &Layout, left: &mut Vec<String>) -> Result<()> {
    let shims = shims(&layout.containerd_socket());
    let mut ending = cgroup::processes(&layout.cgroup())?;
    ending.extend(shims.iter().copied());
    for identity in &ending {
        identity.signal(Signal::SIGKILL);
    }
    left.extend(
        ending
            .iter()
            .filter(|identity| !identity.gone_within(BOUND))
            .map(|identity| format!("process {}", identity.pid)),
    );
    Ok(())
}

fn shims(socket: &str) -> Vec<Identity> {
    let ours = |pid: i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
        words.first().is_some_and(|program| program.ends_with("containerd-shim-runc-v2"))
            && words.iter().any(|word| word == socket)
    };
    let pids = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| ours(pid)).filter_map(Identity::of).collect()
}

fn unmount_below(root: &Path) -> Result<()> {
    for point in mounts_below(root)? {
        umount2(point.as_str(), MntFlags::MNT_DETACH).with_context(|| format!("cannot unmount {point}"))?;
    }
    Ok(())
}

fn mounts_below(root: &Path) -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    // later mounts lie on earlier ones, so the last goes first; the table writes a space as \040
    let points = table.lines().rev().filter_map(|line| Some(line.split(' ').nth(1)?.replace("\\040", " ")));
    Ok(points.filter(|point| Path::new(point).starts_with(root)).collect())
}

fn remove_state(layout: &Layout) -> Result<()> {
    for entry in fs::read_dir(&layout.root).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.ends_with("log") {
            continue;
        }
        let removed = if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        removed.with_context(|| format!("cannot remove {}", path.display()))?;
    }
    remove_fixed_places(layout);
    Ok(())
}

/// What kubelet, shims and CNI put at places that cannot be configured; only what is dead or empty goes.
fn remove_fixed_places(layout: &Layout) {
    for file in cni_results(layout) {
        let _ = fs::remove_file(file);
    }
    for socket in fs::read_dir("/run/containerd/s").into_iter().flatten().flatten() {
        if UnixStream::connect(socket.path()).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            let _ = fs::remove_file(socket.path());
        }
    }
    for file in ["kubelet.sock", "kubelet_internal_checkpoint"] {
        let _ = fs::remove_file(Path::new("/var/lib/kubelet/device-plugins").join(file));
    }
    let folders = [
        "/var/lib/kubelet/device-plugins",
        "/var/lib/kubelet",
        "/run/containerd/s",
        "/run/containerd",
        "/var/lib/cni/results",
        "/var/lib/cni",
    ];
    for folder in folders {
        let _ = fs::remove_dir(folder); // not empty: somebody else's
    }
}

/// CNI's cache, of our pods: `<network>-<id>-eth0`, and `cni-loopback-<id>-lo` with the same id.
fn cni_results(layout: &Layout) -> Vec<PathBuf> {
    let folder = Path::new("/var/lib/cni/results");
    let prefix = format!("{}-", layout.netns());
    let ours = |name: String| {
        let id = name.strip_prefix(&prefix)?.strip_suffix("-eth0")?;
        (!id.contains('-')).then(|| [folder.join(&name), folder.join(format!("cni-loopback-{id}-lo"))])
    };
    let names = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(ours).flatten().filter(|file| file.exists()).collect()
}

/// What a cluster left on the machine: processes, mounts, cgroups, namespaces, state. Empty after [`run`].
///
/// # Errors
/// When the machine cannot be asked.
pub fn leftovers(layout: &Layout) -> Result<Vec<String>> {
    let mut left: Vec<_> = cgroup::processes(&layout.cgroup())?
        .iter()
        .map(|identity| format!("process {} in a pod", identity.pid))
        .collect();
    left.extend(shims(&layout.containerd_socket()).iter().map(|identity| format!("shim {}", identity.pid)));
    left.extend(mounts_below(&layout.root)?.into_iter().map(|point| format!("mount {point}")));
    left.extend(cgroup::folders(&layout.cgroup())?.iter().map(|folder| format!("cgroup {}", folder.display())));
    if layout.netns_file().exists() {
        left.push(format!("network namespace {}", layout.netns()));
    }
    left.extend(cni_results(layout).iter().map(|file| format!("file {}", file.display())));
    let entries = fs::read_dir(&layout.root).into_iter().flatten().flatten();
    left.extend(
        entries.filter(|entry| entry.file_name() != "log").map(|entry| format!("state {}", entry.path().display())),
    );
    Ok(left)
}
