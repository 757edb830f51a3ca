//! One running engine, and its end: told first, reaped afterwards.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Instant;

use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::process::Child;

use super::EngineFile;
use crate::sources::ExitWatch;

/// The engine that runs now.
pub struct Running {
    pub child: Child,
    pub file: EngineFile,
    pub started: Instant,
    /// Hears its end; `None` where that cannot be told apart from its reaping.
    exit: Option<ExitWatch>,
}

impl Running {
    /// Since now. Needs a runtime.
    pub fn new(child: Child, file: EngineFile) -> Self {
        Self { child, exit: ExitWatch::of(&file.process()).ok(), file, started: Instant::now() }
    }

    /// Returns when the engine has ended, with its status where that can be had. It is not reaped: the kernel clears away what `/proc` held
    /// of it then, and may spin for milliseconds on whoever else does, while nobody is told (1a).
    pub async fn noticed(&mut self) -> Option<ExitStatus> {
        if let Some(exit) = &self.exit {
            exit.ended().await;
            let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
            let status = waitid(Id::Pid(Pid::from_raw(self.file.pid)), flags).ok().and_then(raw_status);
            if status.is_some() {
                return status.map(ExitStatus::from_raw);
            }
        }
        self.child.wait().await.ok()
    }

    /// After [`Self::noticed`].
    pub fn reap(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            tracing::warn!(pid = self.file.pid, "the engine has ended and could not be awaited");
        }
    }
}

/// As `waitpid` would tell it.
fn raw_status(status: WaitStatus) -> Option<i32> {
    match status {
        WaitStatus::Exited(_, code) => Some((code & 0xff) << 8),
        WaitStatus::Signaled(_, signal, dumped) => Some(signal as i32 | if dumped { 0x80 } else { 0 }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::EngineProcess;
    use crate::sources::procs::ProcRoot;
    use std::process::Stdio;
    use tokio::io::AsyncWriteExt;
    use tokio::process::Command;

    fn running(script: &str) -> Running {
        let child = Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let pid = child.id().unwrap().cast_signed();
        let EngineProcess { start_ticks, .. } = EngineProcess::of(pid).unwrap();
        let file = EngineFile {
            pid,
            start_ticks,
            boot_id: String::new(),
            nonce: 1,
            output: Vec::new(),
            starts: 1,
            command: Vec::new(),
            last_exit: None,
        };
        Running::new(child, file)
    }

    /// Its status, once it was told: still to be reaped then, and gone after that.
    async fn end_of(mut engine: Running) -> ExitStatus {
        let status = engine.noticed().await.unwrap();
        let stat = || ProcRoot::live().stat(engine.file.pid);
        assert!(stat().is_some_and(|stat| stat.ended()), "nobody has reaped it");
        engine.child.try_wait().unwrap().unwrap();
        assert!(stat().is_none());
        engine.reap();
        status
    }

    #[tokio::test]
    async fn an_end_is_told_with_its_status_before_it_is_reaped() {
        let mut leaves = running("read word; exit 7");
        leaves.child.stdin.take().unwrap().write_all(b"now\n").await.unwrap();
        assert_eq!(end_of(leaves).await.code(), Some(7));
        for (signal, word) in [("KILL", "signal: 9 (SIGKILL)"), ("TERM", "signal: 15 (SIGTERM)")] {
            let mut dies = running(&format!("read word; kill -{signal} $$"));
            dies.child.stdin.take().unwrap().write_all(b"now\n").await.unwrap();
            assert_eq!(end_of(dies).await.to_string(), word);
        }
    }

    #[tokio::test]
    async fn where_the_kernel_does_not_tell_of_an_end_the_reaping_does() {
        let mut engine = Running { exit: None, ..running("exit 3") };
        assert_eq!(engine.noticed().await.unwrap().code(), Some(3));
        engine.reap();
    }
}
