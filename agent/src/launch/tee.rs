//! The engine's output goes on to ours and into a log file of bounded size. Nobody waits for either: where nobody reads ours, or the disk is
//! full or hangs, what does not fit is dropped and counted. That is no reason for an engine to stand still (D9, D10).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crate::onward::Onward;

const READ_BYTES: usize = 16 << 10;

/// A log that is begun anew when it is full; the one before it stays beside it as `<name>.1`. One that somebody else sets aside or removes
/// is begun anew as well.
#[derive(Debug)]
pub struct CappedLog {
    path: PathBuf,
    bytes_max: u64,
    file: File,
    /// Device and inode of a plain file. `None`: a device or a pipe, which is never full and never ours to rename (`/dev/null`).
    plain: Option<(u64, u64)>,
    /// The last chunk was lost.
    fails: bool,
}

impl CappedLog {
    /// Opens the log to append to it. A new one is nobody else's to read: what an engine prints may hold what its users wrote.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = File::options().create(true).append(true).mode(0o600).open(path)?;
        let meta = file.metadata()?;
        let plain = meta.is_file().then(|| (meta.dev(), meta.ino()));
        Ok(Self { path: path.to_owned(), bytes_max, file, plain, fails: false })
    }

    /// Appends; begins a new file first where this chunk would overfill the old one, or the path names another by now.
    fn append(&mut self, chunk: &[u8]) -> io::Result<()> {
        if let Some(ours) = self.plain {
            let named = std::fs::metadata(&self.path).ok().filter(|meta| (meta.dev(), meta.ino()) == ours);
            let bytes = named.as_ref().map(std::fs::Metadata::len);
            if bytes.is_some_and(|bytes| bytes > 0 && bytes.saturating_add(chunk.len() as u64) > self.bytes_max) {
                set_aside(&self.path)?;
                *self = Self::open(&self.path, self.bytes_max)?;
            } else if bytes.is_none() {
                *self = Self::open(&self.path, self.bytes_max)?;
            }
        }
        self.file.write_all(chunk)
    }
}

/// Keeps a full log as `<name>.1`. Where the path is a link, what it leads to: the link is somebody's own.
fn set_aside(path: &Path) -> io::Result<()> {
    let full = path.canonicalize()?;
    let mut kept = full.clone().into_os_string();
    kept.push(".1");
    std::fs::rename(full, kept)
}

impl Write for CappedLog {
    /// Takes every chunk: one that finds no room is lost, and the next is tried again. Said once, until one is written.
    fn write(&mut self, chunk: &[u8]) -> io::Result<usize> {
        let appended = self.append(chunk);
        if let Err(error) = &appended
            && !self.fails
        {
            tracing::warn!(%error, path = %self.path.display(), "the engine's log is not written");
        }
        self.fails = appended.is_err();
        Ok(chunk.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

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
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, Instant};

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
    fn d10_a_disk_that_is_full_holds_no_engine_and_is_written_again_when_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        let mut capped = CappedLog::open(&path, 1 << 30).unwrap();
        capped.file = File::options().write(true).open("/dev/full").unwrap();
        let log = Log::start(capped).unwrap();
        assert!(prints_on(log));
        let mut capped = CappedLog::open(&path, 10).unwrap();
        // the name under which the full one is kept is in the way
        std::fs::create_dir_all(dir.path().join("engine.log.1/x")).unwrap();
        capped.write_all(b"12345678\n").unwrap();
        capped.write_all(b"lost\n").unwrap();
        assert!(capped.fails);
        std::fs::remove_dir_all(dir.path().join("engine.log.1")).unwrap();
        capped.write_all(b"new\n").unwrap();
        assert_eq!((capped.fails, std::fs::read_to_string(&path).unwrap().as_str()), (false, "new\n"));
    }

    #[test]
    fn a_new_log_is_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        let log = Log::start(CappedLog::open(&path, 1 << 20).unwrap()).unwrap();
        assert!(prints_on(log.clone()));
        let began = Instant::now();
        // while a full log is set aside there is none for a moment
        let written = || std::fs::metadata(&path).ok().filter(|log| log.len() >= 1 << 10);
        let log = loop {
            if let Some(log) = written() {
                break log;
            }
            assert!(began.elapsed() < SOON, "nothing is written");
            std::thread::sleep(Duration::from_millis(5));
        };
        assert_eq!(log.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_log_that_is_no_plain_file_is_never_full_and_never_renamed() {
        let dir = tempfile::tempdir().unwrap();
        // as /dev/null, which the root of a container may well rename
        let path = dir.path().join("pipe");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        let _reader = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&path).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        for path in [&path, &link] {
            let before = std::fs::symlink_metadata(path).unwrap().ino();
            let mut log = CappedLog::open(path, 10).unwrap();
            (0..9).for_each(|_| log.append(b"12345678\n").unwrap());
            assert_eq!(std::fs::symlink_metadata(path).unwrap().ino(), before, "{path:?}");
        }
    }

    #[test]
    fn a_log_that_somebody_sets_aside_empties_or_removes_is_written_where_it_is_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let (path, aside, target) = ["engine.log", "aside.log", "target.log"].map(|name| dir.path().join(name)).into();
        let read = |path: &Path| std::fs::read_to_string(path).unwrap();
        let mut log = CappedLog::open(&path, 10).unwrap();
        log.append(b"one\n").unwrap();
        std::fs::rename(&path, &aside).unwrap();
        log.append(b"two\n").unwrap();
        assert_eq!((read(&aside).as_str(), read(&path).as_str()), ("one\n", "two\n"));
        File::create(&path).unwrap();
        log.append(b"1234567\n").unwrap();
        assert_eq!(read(&path), "1234567\n", "emptied in place, it is not full");
        std::fs::remove_file(&path).unwrap();
        log.append(b"three\n").unwrap();
        assert_eq!(read(&path), "three\n");
        // a link stays one, wherever it leads
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&target, &path).unwrap();
        for line in [b"12345678\n", b"abcdefgh\n"] {
            log.append(line).unwrap();
        }
        assert!(path.is_symlink());
        assert_eq!(read(&target), "abcdefgh\n");
        assert_eq!(read(&dir.path().join("target.log.1")), "12345678\n");
    }

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
