//! Our own children by pid, so that orphans that come to us (we are their subreaper, or pid 1) are reaped and ours are not touched.

use std::collections::HashSet;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::signal::unix::Signal;

use super::guests::Guests;
use crate::sources::EngineProcess;
use crate::sources::procs::{ProcRoot, Stat};

/// Orphans reaped at one go at most: a fork bomb below us must not hold the supervisor.
const REAPED_MAX: usize = 256;
/// Between two goes while children have ended that others await, or more than one go takes.
const REAP_AGAIN: Duration = Duration::from_millis(200);
/// Should a signal ever be missed.
const REAP_SELDOM: Duration = Duration::from_secs(30);

/// The children whose end somebody awaits.
#[derive(Debug)]
pub struct Registry {
    pids: Mutex<HashSet<i32>>,
    /// Children that were there before us: whoever became this program had started them. They are nobody's to kill.
    before: Vec<EngineProcess>,
    guests: Guests,
}

impl Default for Registry {
    fn default() -> Self {
        let before = children().iter().map(EngineProcess::from).collect();
        Self { pids: Mutex::default(), before, guests: Guests::default() }
    }
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

    /// Live children of this process that nobody started here, and that came by no other door: orphans of the engine's tree.
    pub fn adopted(&self) -> Vec<EngineProcess> {
        let nobodys = {
            let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
            let theirs =
                |child: &Stat| !pids.contains(&child.pid) && !self.before.contains(&EngineProcess::from(child));
            children().into_iter().filter(theirs).collect()
        };
        self.guests.leave_out(nobodys)
    }

    /// Reaps orphans for ever: whenever the kernel says that a child has ended.
    pub async fn reap_orphans(&self, mut ended: Signal) {
        loop {
            let again = if self.reap() { REAP_SELDOM } else { REAP_AGAIN };
            let _ = tokio::time::timeout(again, ended.recv()).await;
        }
    }

    /// True when no child is left that has ended.
    fn reap(&self) -> bool {
        let pids = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..REAPED_MAX {
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let pid = match waitid(Id::All, flags) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, _, _)) => pid,
                _ => return true,
            };
            // One of ours at the head of the line: its keeper takes it, and we come back.
            if pids.contains(&pid.as_raw()) {
                return false;
            }
            let _ = waitpid(Pid::from_raw(pid.as_raw()), Some(WaitPidFlag::WNOHANG));
        }
        false
    }
}

/// The live children of this process.
fn children() -> Vec<Stat> {
    let me = i32::try_from(std::process::id()).unwrap_or(-1);
    ProcRoot::live().all().into_iter().filter(|stat| stat.ppid == me && !stat.ended()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_that_were_there_before_us_are_no_orphans() {
        let sleeper = || std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = |child: &std::process::Child| i32::try_from(child.id()).unwrap();
        let mut before = sleeper();
        let registry = Registry::default();
        let mut after = sleeper();
        let adopted: Vec<i32> = registry.adopted().into_iter().map(|orphan| orphan.pid).collect();
        assert!(adopted.contains(&pid(&after)) && !adopted.contains(&pid(&before)), "{adopted:?}");
        for child in [&mut before, &mut after] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
