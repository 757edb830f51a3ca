//! A small file of the agent's own that always has the newest text: written beside whoever puts it, and tried again where that failed (I4).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::latest::{Latest, Written};
use crate::files::{WRITE_AGAIN, write_text};

/// Written by a thread of its own: a disk that hangs holds that one.
#[derive(Debug)]
pub struct KeptFile {
    writer: Latest,
    /// The last write failed …
    failed: Arc<AtomicBool>,
    /// … that was asked for then.
    put: Instant,
}

impl KeptFile {
    /// `what` it is, for the log and the thread's name.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(what: &'static str, path: PathBuf) -> io::Result<Self> {
        let failed = Arc::<AtomicBool>::default();
        let fails = Arc::clone(&failed);
        let write = move |text: Vec<u8>| {
            let done = write_text(&path, text);
            fails.store(done.is_err(), Ordering::Release);
            if let Err(error) = done {
                tracing::warn!(%error, what, path = %path.display(), "what the detector keeps was not written; it is tried again");
            }
        };
        Ok(Self { writer: Latest::start(what, write)?, failed, put: Instant::now() })
    }

    /// Could the text that was put last not be written, and is it time to put it again?
    pub fn wants_it_again(&self) -> bool {
        self.failed.load(Ordering::Acquire) && self.put.elapsed() >= WRITE_AGAIN
    }

    /// Replaces what waits to be written.
    pub fn put(&mut self, text: Vec<u8>) {
        self.put = Instant::now();
        self.writer.put(text);
    }

    /// How far the writing is.
    pub fn written(&self) -> &Written {
        self.writer.written()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_could_not_be_written_is_wanted_again_until_it_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("not/there.json");
        let mut file = KeptFile::start("test", path.clone()).unwrap();
        let begun = Instant::now();
        let until = |wanted: &dyn Fn() -> bool| {
            while !wanted() {
                assert!(begun.elapsed() < Duration::from_secs(40), "never");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        assert!(!file.wants_it_again());
        file.put(b"1".to_vec());
        until(&|| file.wants_it_again());
        std::fs::create_dir(dir.path().join("not")).unwrap();
        file.put(b"2".to_vec());
        until(&|| std::fs::read(&path).is_ok_and(|text| text == b"2"));
        until(&|| !file.failed.load(Ordering::Acquire));
    }
}
