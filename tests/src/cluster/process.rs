//! Processes of a cluster: started inside its network namespace, recorded by pid **and start time** together with their arguments,
//! so that a later run can end exactly what an earlier one left, and a story can end one and start it again as it was.

use std::fs::{self, File, OpenOptions};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::layout::Layout;

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Process number.
    pub pid: i32,
    /// Start time in clock ticks since boot (`/proc/<pid>/stat`, field 22).
    pub start_ticks: u64,
}

impl Identity {
    /// The process that has this number now; `None` when there is none or it is a zombie.
    pub fn of(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // the command name is in parentheses and may hold anything, also parentheses and spaces
        let mut fields = stat.get(stat.rfind(')')? + 2..)?.split(' ');
        let state = fields.next()?;
        let start_ticks = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(Self { pid, start_ticks })
    }

    /// Does this very process still run?
    pub fn alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Sends a signal, unless the number belongs to somebody else by now.
    pub fn signal(self, signal: Signal) {
        if self.alive() {
            // the race that remains (it dies and the number is reused in this microsecond) cannot be closed without a pidfd
            let _ = kill(Pid::from_raw(self.pid), signal);
        }
    }

    /// SIGTERM, `grace`, SIGKILL; true when it is gone at the end.
    pub fn end(self, grace: Duration) -> bool {
        self.signal(Signal::SIGTERM);
        if !self.gone_within(grace) {
            self.signal(Signal::SIGKILL);
        }
        self.gone_within(Duration::from_secs(5))
    }

    /// Waits at most `bound` until nothing of it is left. One whose first thread has ended is a zombie while others still hold its sockets: who
    /// starts it again at once finds its port taken. (Of somebody else's child a zombie may be left.)
    pub fn left_nothing_within(self, bound: Duration) -> bool {
        self.is_over_within(bound, |reaped| reaped != Ok(WaitStatus::StillAlive))
    }

    /// Waits at most `bound` for its end.
    pub fn gone_within(self, bound: Duration) -> bool {
        self.is_over_within(bound, |_| true)
    }

    /// `also`: what must be so as well, by what came of reaping it.
    fn is_over_within(self, bound: Duration, also: impl Fn(nix::Result<WaitStatus>) -> bool) -> bool {
        let started = Instant::now();
        loop {
            // reaps it when it is our own child; somebody else's child answers ECHILD
            let reaped = waitpid(Pid::from_raw(self.pid), Some(WaitPidFlag::WNOHANG));
            if !self.alive() && also(reaped) {
                return true;
            }
            if started.elapsed() >= bound {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    identity: Identity,
    argv: Vec<String>,
    path: String,
}

/// Starts `argv` in the cluster's network namespace with `bin` first in PATH; output goes (appended) to `log/<name>.log`.
///
/// `nsenter`, not `ip netns exec`: the latter mounts /sys anew and hides the cgroups from kubelet and containerd.
///
/// # Errors
/// When the log cannot be opened or the program cannot be started.
pub fn start(layout: &Layout, name: &str, bin: &Path, argv: Vec<String>) -> Result<Identity> {
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    launch(layout, name, argv, path)
}

/// Starts `name` again with the arguments it had.
///
/// # Errors
/// When it was never started, or cannot be started now.
pub fn start_again(layout: &Layout, name: &str) -> Result<Identity> {
    let record = read(layout, name)?.with_context(|| format!("{name} was never started in cluster {}", layout.name))?;
    launch(layout, name, record.argv, record.path)
}

fn launch(layout: &Layout, name: &str, argv: Vec<String>, path: String) -> Result<Identity> {
    let log = open_log(&layout.log(name))?;
    let child = Command::new("nsenter")
        .arg(format!("--net={}", layout.netns_file().display()))
        .args(&argv)
        .env("PATH", &path)
        .env_remove("KUBECONFIG")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot share the log's descriptor")?)
        .stderr(log)
        .process_group(0) // a Ctrl-C at the terminal is the harness's to handle
        .spawn()
        .with_context(|| format!("cannot start {name}: nsenter {}", argv.first().map_or("", String::as_str)))?;
    let pid = i32::try_from(child.id()).context("a process number beyond 31 bits")?;
    let Some(identity) = Identity::of(pid) else { bail!("{name} ended at once; see {}", layout.log(name).display()) };
    let record = Record { identity, argv, path };
    let file = layout.record(name);
    fs::write(&file, serde_json::to_vec_pretty(&record)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(identity)
}

/// The recorded process, alive or not; `None` when it was never started.
///
/// # Errors
/// When the record cannot be read.
pub fn recorded(layout: &Layout, name: &str) -> Result<Option<Identity>> {
    Ok(read(layout, name)?.map(|record| record.identity))
}

fn read(layout: &Layout, name: &str) -> Result<Option<Record>> {
    let file = layout.record(name);
    if !file.exists() {
        return Ok(None);
    }
    let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(Some(serde_json::from_slice(&text).with_context(|| format!("{} is no process record", file.display()))?))
}

fn open_log(file: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(file)
        .with_context(|| format!("cannot open the log {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_tells_a_process_from_its_number() {
        let me = Identity::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(me.alive());
        assert!(!Identity { start_ticks: me.start_ticks + 1, ..me }.alive());
    }

    #[test]
    fn end_ends_and_reaps_a_child() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let identity = Identity::of(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(identity.end(Duration::from_secs(5)));
        assert!(!identity.alive());
        assert!(child.wait().is_err(), "it is reaped already");
    }
}
