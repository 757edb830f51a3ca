//! The engine's output goes on to ours and into a log file of bounded size. Nobody waits for either: where nobody reads ours, or the disk is
//! full or hangs, what does not fit is dropped and counted. That is no reason for an engine to stand still (D9, D10).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::capped_log::CappedLog;
use crate::onward::Onward;

const READ_BYTES: usize = 16 << 10;

/// The log, written by a thread of its own; for all that the engines of one launcher say.
#[derive(Debug, Clone)]
pub struct Log(Arc<Mutex<Onward>>);

impl Log {
    /// Starts the thread.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(log: CappedLog) -> io::Result<Self> {
        Onward::start("the engine's log", Box::new(log)).map(|log| Self(Arc::new(Mutex::new(log))))
    }

    fn send(&self, chunk: &[u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).send(chunk);
    }

    /// Is everything written that was taken?
    pub fn is_empty(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

/// Starts a thread that copies `from` to `on` and to the log until the last writer has closed it. It waits for neither: the engine's pipe is
/// always emptied.
///
/// # Errors
/// When the thread cannot be started.
pub fn tee(from: OwnedFd, on: Box<dyn Write + Send>, log: Log) -> io::Result<()> {
    let mut onward = Onward::start("the engine's output", on)?;
    let copy = move || {
        let mut from = File::from(from);
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(n) = read(&mut from, &mut buffer) {
            if n == 0 {
                break;
            }
            log.send(&buffer[..n]);
            onward.send(&buffer[..n]);
        }
    };
    std::thread::Builder::new().name("engine-log".to_owned()).spawn(copy).map(drop)
}

fn read(from: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::time::Duration;

    const SOON: Duration = Duration::from_secs(30);
    const FLOOD_BYTES: usize = 8 << 20;

    /// An engine that prints a flood and ends; true where it came to its end.
    fn prints_on(log: Log) -> bool {
        let (from, mut engine) = io::pipe().unwrap();
        tee(from.into(), Box::new(io::sink()), log).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(engine.write_all(&vec![b'x'; FLOOD_BYTES]).is_ok()));
        told.recv_timeout(SOON) == Ok(true)
    }

    #[test]
    fn d10_a_disk_that_hangs_holds_no_engine() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        // a pipe that is never read takes a little, and then nothing for ever
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        let _reader = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&path).unwrap();
        let log = Log::start(CappedLog::open(&path, u64::MAX).unwrap()).unwrap();
        assert!(prints_on(log.clone()), "the engine waits for its log");
        assert!(!log.is_empty());
    }

    #[test]
    fn d10_a_disk_that_is_full_holds_no_engine() {
        let log = Log::start(CappedLog::open(Path::new("/dev/full"), 1 << 30).unwrap()).unwrap();
        assert!(prints_on(log));
    }
}
