//! An engine that is held from outside, in the ways that are no fault of its own: by a debugger, by a CPU quota, by the freezer, or with
//! the whole machine. Groups are made below the root of the hierarchy and taken away again; who may not make them has the debugger and the
//! pause alone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use agent::sources::procs::ProcRoot;
use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;

use crate::bench::cost::roles::Roles;
use crate::stage::Stage;

/// Longer than any deadline that was learned of the engine.
const HELD: Duration = Duration::from_secs(6);
/// The part of a core that a quota leaves: five milliseconds of a hundred.
const QUOTA_US: &str = "5000";
const GROUPS: &str = "/sys/fs/cgroup";

/// Holds the engine for a while, in the way whose turn it is in this round.
///
/// # Errors
/// When it cannot be held, or a file of a group not be written.
pub async fn hold(stage: &Stage, round: usize, debugger: &Path) -> anyhow::Result<()> {
    let pid = stage.engine_pid()?;
    let name = format!("truebeat-benign-{pid}");
    match (round % 4, may_group()) {
        (0, true) => in_group(&Group::new("cpu", &name, pid)?, "cpu.cfs_quota_us", [QUOTA_US, "-1"]).await,
        (1, true) => in_group(&Group::new("freezer", &name, pid)?, "freezer.state", ["FROZEN", "THAWED"]).await,
        (2, _) => pause_all(pid).await,
        _ => debug(pid, debugger).await,
    }
}

/// Version 1 with the controllers mounted, and the right to make groups.
fn may_group() -> bool {
    let may = |controller: &str| {
        nix::unistd::access(&Path::new(GROUPS).join(controller).join("tasks"), nix::unistd::AccessFlags::W_OK)
    };
    ["cpu", "freezer"].into_iter().all(|controller| may(controller).is_ok())
}

/// A group of its own for one process, which goes back where it was and the group away when this is dropped.
struct Group {
    folder: PathBuf,
    before: PathBuf,
    pid: i32,
}

impl Group {
    fn new(controller: &str, name: &str, pid: i32) -> anyhow::Result<Self> {
        let root = Path::new(GROUPS).join(controller);
        let groups = ProcRoot::live().cgroup(pid).context("could not read the engine's groups")?;
        let of = |line: &str| {
            let (_, rest) = line.split_once(':')?;
            let (names, path) = rest.split_once(':')?;
            names.split(',').any(|name| name == controller).then(|| path.trim_start_matches('/').to_owned())
        };
        let before = root.join(groups.lines().find_map(of).unwrap_or_default());
        let group = Self { folder: root.join(name), before, pid };
        std::fs::create_dir(&group.folder).with_context(|| format!("could not make {}", group.folder.display()))?;
        group.set("cgroup.procs", &pid.to_string())?;
        Ok(group)
    }

    fn set(&self, file: &str, value: &str) -> anyhow::Result<()> {
        let path = self.folder.join(file);
        std::fs::write(&path, value).with_context(|| format!("could not write {value} to {}", path.display()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // nothing can be done about a group that stays, and it holds nothing
        let _ = std::fs::write(self.before.join("cgroup.procs"), self.pid.to_string());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

async fn in_group(group: &Group, file: &str, [held, free]: [&str; 2]) -> anyhow::Result<()> {
    group.set(file, held)?;
    tokio::time::sleep(HELD).await;
    group.set(file, free)
}

/// As a virtual machine that is moved: engine and agent stand still together, and go on however this ends.
async fn pause_all(engine: i32) -> anyhow::Result<()> {
    let roles = Roles::beside(engine)?;
    let _agent = roles.pause();
    let _engine = Stopped::new(engine)?;
    tokio::time::sleep(HELD).await;
    Ok(())
}

/// A process that is stopped until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: i32) -> anyhow::Result<Self> {
        let pid = Pid::from_raw(pid);
        kill(pid, Signal::SIGSTOP).with_context(|| format!("could not stop the engine, pid {pid}"))?;
        Ok(Self(pid))
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // one that has ended since is none to hold
        let _ = kill(self.0, Signal::SIGCONT);
    }
}

async fn debug(pid: i32, script: &Path) -> anyhow::Result<()> {
    let status = Command::new("python3").arg(script).args([pid.to_string(), HELD.as_secs().to_string()]).status().await;
    let status = status.with_context(|| format!("could not run {}", script.display()))?;
    ensure!(status.success(), "{} ended with {status}", script.display());
    Ok(())
}
