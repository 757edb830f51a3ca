//! The engine's output goes on to ours and into a log file of bounded size. Where nobody reads ours, what does not fit is dropped and
//! counted: a log's reader that has gone to sleep is no reason for an engine to stand still (D9).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::onward::Onward;

const READ_BYTES: usize = 16 << 10;

/// A log that is begun anew when it is full; the one before it stays beside it as `<name>.1`.
#[derive(Debug)]
pub struct CappedLog {
    path: PathBuf,
    bytes_max: u64,
    file: File,
    bytes: u64,
}

impl CappedLog {
    /// Opens the log to append to it.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), bytes_max, file, bytes })
    }

    /// Appends; begins a new file first where this chunk would overfill the old one.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub fn append(&mut self, chunk: &[u8]) -> io::Result<()> {
        if self.bytes > 0 && self.bytes + chunk.len() as u64 > self.bytes_max {
            let mut kept = self.path.clone().into_os_string();
            kept.push(".1");
            std::fs::rename(&self.path, &kept)?;
            *self = Self::open(&self.path, self.bytes_max)?;
        }
        self.file.write_all(chunk)?;
        self.bytes += chunk.len() as u64;
        Ok(())
    }
}

/// Starts a thread that copies `from` to `on` and to the log until the last writer has closed it. Errors of either target stop
/// that target alone: the engine's pipe is always emptied.
///
/// # Errors
/// When the thread cannot be started.
pub fn tee(from: OwnedFd, on: Box<dyn Write + Send>, log: Arc<Mutex<CappedLog>>) -> io::Result<()> {
    let mut onward = Onward::start("the engine's output", on)?;
    let copy = move || {
        let mut from = File::from(from);
        let mut buffer = vec![0; READ_BYTES];
        let mut logs = true;
        while let Ok(n) = read(&mut from, &mut buffer) {
            if n == 0 {
                break;
            }
            if logs && let Err(error) = log.lock().unwrap_or_else(PoisonError::into_inner).append(&buffer[..n]) {
                tracing::warn!(%error, "the engine's log is no longer written");
                logs = false;
            }
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

    #[test]
    fn a_full_log_is_begun_anew_and_its_forerunner_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        let mut log = CappedLog::open(&path, 10).unwrap();
        for chunk in ["12345678\n", "abc\n", "def\n"] {
            log.append(chunk.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "abc\ndef\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("engine.log.1")).unwrap(), "12345678\n");
        let mut again = CappedLog::open(&path, 10).unwrap();
        again.append(b"ghi\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "ghi\n");
    }
}
