//! Our own children by pid, so that orphans that come to us (we are their subreaper, or pid 1) are reaped and ours are not touched.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

use crate::sources::procs::ProcRoot;

/// Orphans reaped at one go at most: a fork bomb below us must not hold the supervisor.
const REAPED_MAX: usize = 256;
const REAP_EVERY: Duration = Duration::from_millis(200);

/// The children whose end somebody awaits.
#[derive(Debug, Default)]
pub struct Registry {
    pids: Mutex<HashSet<i32>>,
}

impl Registry {
    /// Starts a child and knows it before its end could be taken for an orphan's.
    ///
    /// # Errors
    /// As [`Command::spawn`].
    pub fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        let mut pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
        let child = command.spawn()?;
        pids.extend(child.id().and_then(|pid| i32::try_from(pid).ok()));
        Ok(child)
    }

    /// The child's end was awaited.
    pub fn forget(&self, pid: i32) {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
    }

    /// Live children of this process that nobody started here: orphans of the engine's tree.
    pub fn adopted(&self) -> Vec<i32> {
        let me = i32::try_from(std::process::id()).unwrap_or(-1);
        let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
        let all = ProcRoot::live().all();
        all.iter()
            .filter(|stat| stat.ppid == me && !stat.ended() && !pids.contains(&stat.pid))
            .map(|stat| stat.pid)
            .collect()
    }

    /// Reaps orphans for ever.
    pub async fn reap_orphans(&self) {
        loop {
            self.reap();
            tokio::time::sleep(REAP_EVERY).await;
        }
    }

    fn reap(&self) {
        let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..REAPED_MAX {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let pid = match waitid(Id::All, flags) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, _, _)) => pid,
                _ => return,
            };
            // One of ours at the head of the line: its keeper takes it, and we come back.
            if pids.contains(&pid.as_raw()) {
                return;
            }
            let _ = waitpid(Pid::from_raw(pid.as_raw()), Some(WaitPidFlag::WNOHANG));
        }
    }
}
