//! The end of a process at the moment when it comes: a pidfd, which the kernel makes readable then (1a). No wait, no signal, no child.

use std::io;

use futures::FutureExt;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::net::unix::pipe::Receiver;

use super::tree::EngineProcess;

/// Watches one process, whoever's child it is.
#[derive(Debug)]
pub struct ExitWatch {
    /// No pipe: the runtime's one safe form of a descriptor that it asks about readiness alone. Nothing is ever read from it.
    pidfd: Receiver,
}

impl ExitWatch {
    /// Watches this very process. Needs a runtime.
    ///
    /// # Errors
    /// When it has gone already, or the kernel has no pidfds.
    pub fn of(process: &EngineProcess) -> io::Result<Self> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let pid = Pid::from_raw(process.pid).ok_or_else(gone)?;
        let fd = pidfd_open(pid, PidfdFlags::empty())?;
        // its number may have been given away since somebody told us
        if EngineProcess::of(process.pid).as_ref() != Some(process) {
            return Err(gone());
        }
        Ok(Self { pidfd: Receiver::from_owned_fd_unchecked(fd)? })
    }

    /// Returns when the process has ended (all of its threads; whether or not anybody has awaited it).
    pub async fn ended(&self) {
        // an error is the end of the runtime: nobody waits any more
        if self.pidfd.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Has it, as far as the runtime has heard? Asks the kernel nothing.
    pub fn has_ended(&self) -> bool {
        self.pidfd.readable().now_or_never().is_some_and(|ready| ready.is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn the_end_of_a_process_is_heard_and_stays_heard() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let process = EngineProcess::of(child.id().cast_signed()).unwrap();
        let watch = ExitWatch::of(&process).unwrap();
        assert!(!watch.has_ended());
        child.kill().unwrap();
        tokio::time::timeout(Duration::from_secs(60), watch.ended()).await.unwrap();
        assert!(watch.has_ended(), "a zombie has ended");
        child.wait().unwrap();
        assert!(ExitWatch::of(&process).is_err(), "nobody has its number");
        let other = EngineProcess { start_ticks: 1, ..EngineProcess::of(std::process::id().cast_signed()).unwrap() };
        assert!(ExitWatch::of(&other).is_err(), "another process has its number");
    }
}
