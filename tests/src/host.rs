//! The processes of a pod as the machine sees them: found by the pod's uid in `/proc/<pid>/cgroup`, so that a story can freeze or
//! kill one from outside, without anything inside the pod knowing. Reads /proc and sends signals, nothing else.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use k8s_openapi::api::core::v1::Pod;
use nix::sys::signal::Signal;

use crate::cluster::Identity;
use crate::wait::until;

/// One process of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodProcess {
    /// Number (on the machine, not in the pod) and start time.
    pub identity: Identity,
    /// Its parent's number.
    pub parent: i32,
    /// The container's id, as in `status.containerStatuses[].containerID` without the scheme.
    pub container: String,
    /// Command line, words joined by a space.
    pub command: String,
}

/// Every process of the pod with this uid.
pub fn processes(pod_uid: &str) -> Vec<PodProcess> {
    let pids = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found: Vec<_> = pids.filter_map(|pid| describe(pid, pod_uid)).collect();
    found.sort_by_key(|process| process.identity.start_ticks);
    found
}

fn describe(pid: i32, pod_uid: &str) -> Option<PodProcess> {
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let container = container_of(&cgroups, pod_uid)?;
    let identity = Identity::of(pid)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
    let command =
        String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).ok()?).replace('\0', " ").trim().to_owned();
    Some(PodProcess { identity, parent, container, command })
}

/// The container id in a `/proc/<pid>/cgroup` text: the path element behind the pod's.
fn container_of(cgroups: &str, pod_uid: &str) -> Option<String> {
    let pod = format!("/pod{pod_uid}/");
    cgroups.lines().find_map(|line| Some(line.split_once(&pod)?.1.split('/').next()?.to_owned()))
}

/// The id of container `name` (init containers included), once it has one.
pub fn container_id(pod: &Pod, name: &str) -> Option<String> {
    let status = pod.status.as_ref()?;
    let all = status.container_statuses.iter().flatten().chain(status.init_container_statuses.iter().flatten());
    let id = all.filter(|container| container.name == name).find_map(|container| container.container_id.clone())?;
    Some(id.split_once("://").map_or(id.clone(), |(_, id)| id.to_owned()))
}

/// The root process of container `name`: the one whose parent is not in the same container.
///
/// # Errors
/// When the container has no process on this machine within `bound`.
pub fn root_process(pod: &Pod, name: &str, bound: Duration) -> Result<PodProcess> {
    let uid = pod.metadata.uid.clone().context("a pod without a uid (was it read from the API?)")?;
    let id = container_id(pod, name).with_context(|| format!("container {name} has no id yet"))?;
    until(&format!("a process of container {name}"), bound, || {
        let mine: Vec<_> = processes(&uid).into_iter().filter(|process| process.container == id).collect();
        Ok(mine.iter().find(|process| !mine.iter().any(|other| other.identity.pid == process.parent)).cloned())
    })
}

/// The one process of the pod whose command line contains `words`.
///
/// # Errors
/// When there is none, or more than one, within `bound`.
pub fn find(pod_uid: &str, words: &str, bound: Duration) -> Result<PodProcess> {
    until(&format!("one process `{words}` in pod {pod_uid}"), bound, || {
        let mut matching: Vec<_> =
            processes(pod_uid).into_iter().filter(|process| process.command.contains(words)).collect();
        match matching.len() {
            0 => Ok(None),
            1 => Ok(matching.pop()),
            n => Err(anyhow!("{n} processes match: {matching:?}")),
        }
    })
}

/// Sends `signal` to a process of a pod.
pub fn signal(process: &PodProcess, signal: Signal) {
    process.identity.signal(signal);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_container_is_behind_the_pod_in_both_hierarchies() {
        let uid = "7b7a-11";
        for text in ["12:memory:/e2e/kubepods/burstable/pod7b7a-11/abc\n", "0::/e2e/kubepods/pod7b7a-11/abc/inner\n"] {
            assert_eq!(container_of(text, uid).as_deref(), Some("abc"));
        }
        assert_eq!(container_of("0::/user.slice\n", uid), None);
        assert_eq!(container_of("0::/kubepods/pod7b7a-111/abc\n", uid), None);
    }
}
