//! The one cgroup below which everything of the node's pods lives: created for the kubelet, and at the end the list of who is left.
//! Both hierarchies: version 1 (a tree for each controller) and version 2 (one tree).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::process::Identity;

const MOUNT: &str = "/sys/fs/cgroup";
/// Version 2 without controllers beside the trees of version 1: nothing to make there, but the runtime leaves groups in it.
const UNIFIED: &str = "unified";
/// The pods' share of the processor beside whatever else this machine does: four times that of a group of its own. A node's machine does
/// nothing else; here tests of the crates run beside it, and without this a healthy engine stood for seconds.
const SHARES: [(&str, &str); 2] = [("cpu.shares", "4096"), ("cpu.weight", "400")]; // of version 1, of version 2

/// Which cgroup hierarchy this machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One tree for each controller.
    V1,
    /// One tree.
    V2,
}

/// Looks at `/sys/fs/cgroup`.
///
/// # Errors
/// When neither hierarchy is mounted there.
pub fn version() -> Result<Version> {
    if Path::new(MOUNT).join("cgroup.controllers").exists() {
        return Ok(Version::V2);
    }
    if ["memory", "cpu", "pids"].iter().all(|controller| Path::new(MOUNT).join(controller).is_dir()) {
        return Ok(Version::V1);
    }
    bail!("neither cgroup v2 nor the memory, cpu and pids trees of v1 are mounted at {MOUNT}")
}

/// Makes `/<name>` in every tree, usable for children.
///
/// # Errors
/// When a tree cannot be written.
pub fn create(name: &str) -> Result<()> {
    if version()? == Version::V2 {
        // each controller by itself: one that this machine lacks must not cost the others; the kubelet names what it misses
        for controller in ["cpu", "cpuset", "memory", "pids", "io", "hugetlb"] {
            let _ = fs::write(Path::new(MOUNT).join("cgroup.subtree_control"), format!("+{controller}"));
        }
    }
    for tree in trees()?.iter().filter(|tree| !tree.ends_with(UNIFIED)) {
        let group = tree.join(name);
        fs::create_dir_all(&group).with_context(|| format!("cannot make the cgroup {}", group.display()))?;
        // in v1 a new cpuset is empty and no process can enter it
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if let (Ok(all), true) = (fs::read_to_string(tree.join(file)), group.join(file).exists()) {
                let _ = fs::write(group.join(file), all.trim());
            }
        }
        for (file, share) in SHARES.iter().filter(|(file, _)| group.join(file).exists()) {
            fs::write(group.join(file), share)
                .with_context(|| format!("cannot write {}", group.join(file).display()))?;
        }
    }
    Ok(())
}

/// Every process below `/<name>`, in any tree.
///
/// # Errors
/// When no hierarchy is mounted.
pub fn processes(name: &str) -> Result<Vec<Identity>> {
    let mut found: Vec<Identity> = Vec::new();
    for group in folders(name)? {
        let pids = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        for identity in pids.lines().filter_map(|pid| pid.parse().ok()).filter_map(Identity::of) {
            if !found.contains(&identity) {
                found.push(identity);
            }
        }
    }
    Ok(found)
}

/// Removes `/<name>` and all below it; true when nothing is left.
///
/// # Errors
/// When no hierarchy is mounted.
pub fn remove(name: &str) -> Result<bool> {
    let mut clean = true;
    for group in folders(name)?.iter().rev() {
        clean &= fs::remove_dir(group).is_ok();
    }
    Ok(clean)
}

/// Every group `/<name>` and below that exists, in any tree, parents first.
///
/// # Errors
/// When no hierarchy is mounted.
pub fn folders(name: &str) -> Result<Vec<PathBuf>> {
    Ok(trees()?.iter().flat_map(|tree| below(&tree.join(name))).collect())
}

fn trees() -> Result<Vec<PathBuf>> {
    if version()? == Version::V2 {
        return Ok(vec![PathBuf::from(MOUNT)]);
    }
    let entries = fs::read_dir(MOUNT).with_context(|| format!("cannot list {MOUNT}"))?;
    // symbolic links (`cpu -> cpu,cpuacct`) would name a tree twice
    let trees =
        entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path());
    Ok(trees.filter(|tree| tree.join("cgroup.procs").exists()).collect())
}

/// `group` and every group below it, parents first.
fn below(group: &Path) -> Vec<PathBuf> {
    if !group.is_dir() {
        return Vec::new();
    }
    let children = fs::read_dir(group).into_iter().flatten().flatten();
    let dirs = children.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    std::iter::once(group.to_owned()).chain(dirs.flat_map(|entry| below(&entry.path()))).collect()
}
