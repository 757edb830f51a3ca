//! A log file of bounded size (D10).

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

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
    /// It could not be set aside when it was last full.
    stays: bool,
}

impl CappedLog {
    /// Opens the log to append to it. A new one is nobody else's to read: what an engine prints may hold what its users wrote.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        // a pipe that nobody reads would hold the open for ever; what is written to one that is read may wait again
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().create(true).append(true).mode(0o600).custom_flags(nonblocking).open(path)?;
        fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
        let meta = file.metadata()?;
        let plain = meta.is_file().then(|| (meta.dev(), meta.ino()));
        Ok(Self { path: path.to_owned(), bytes_max, file, plain, fails: false, stays: false })
    }

    /// Appends; begins a new file first where this chunk would overfill the old one, or the path names another by now.
    fn append(&mut self, chunk: &[u8]) -> io::Result<()> {
        if let Some(ours) = self.plain {
            let named = std::fs::metadata(&self.path).ok().filter(|meta| (meta.dev(), meta.ino()) == ours);
            let bytes = named.as_ref().map(std::fs::Metadata::len);
            if bytes.is_some_and(|bytes| bytes > 0 && bytes.saturating_add(chunk.len() as u64) > self.bytes_max) {
                match set_aside(&self.path) {
                    Ok(()) => *self = Self::open(&self.path, self.bytes_max)?,
                    Err(error) => self.begin_in_place(&error)?,
                }
            } else if bytes.is_none() {
                *self = Self::open(&self.path, self.bytes_max)?;
            }
        }
        self.file.write_all(chunk)
    }

    /// Without a forerunner then: the newest lines are worth more than the oldest. Said once.
    fn begin_in_place(&mut self, error: &io::Error) -> io::Result<()> {
        if !std::mem::replace(&mut self.stays, true) {
            let path = self.path.display();
            tracing::warn!(%error, %path, "the engine's log cannot be renamed when it is full, and is emptied instead");
        }
        self.file.set_len(0)
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn d10_a_full_disk_costs_what_is_written_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        let mut log = CappedLog::open(&path, 1 << 30).unwrap();
        let file = std::mem::replace(&mut log.file, File::options().write(true).open("/dev/full").unwrap());
        log.write_all(b"lost\n").unwrap();
        assert!(log.fails);
        log.file = file;
        log.write_all(b"new\n").unwrap();
        assert_eq!((log.fails, std::fs::read_to_string(&path).unwrap().as_str()), (false, "new\n"));
    }

    /// A mount of the file alone, or a folder that is somebody else's.
    #[test]
    fn a_full_log_that_cannot_be_renamed_is_begun_anew_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        // the name under which the full one is kept is in the way
        std::fs::create_dir_all(dir.path().join("engine.log.1/x")).unwrap();
        let mut log = CappedLog::open(&path, 10).unwrap();
        for line in ["12345678\n", "abcdefgh\n", "a\n", "b\n"] {
            log.append(line.as_bytes()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\nb\n");
        std::fs::remove_dir_all(dir.path().join("engine.log.1")).unwrap();
        log.append(b"12345678\n").unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("engine.log.1")).unwrap(), "a\nb\n");
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_refused_and_one_that_is_read_may_be_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        assert_eq!(CappedLog::open(&path, 1).unwrap_err().raw_os_error(), Some(nix::libc::ENXIO));
        let _reader = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(&path).unwrap();
        let log = CappedLog::open(&path, 1).unwrap();
        assert!(!fcntl_getfl(&log.file).unwrap().contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_new_log_is_nobody_elses() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        CappedLog::open(&path, 1 << 20).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
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
