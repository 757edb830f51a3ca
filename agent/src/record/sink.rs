//! The file of a recording: gzip, written under another name until it is whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::Value;

use super::RecordError;

/// Lines between two flushes: a recorder that is killed leaves the most of what it saw.
const FLUSH_LINES: u64 = 100;

/// Counts what reaches the file.
#[derive(Debug)]
struct Counted {
    file: File,
    bytes: u64,
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A trace being written.
#[derive(Debug)]
pub struct Sink {
    path: PathBuf,
    part: PathBuf,
    gzip: GzEncoder<Counted>,
    lines: u64,
    text_bytes: u64,
}

impl Sink {
    /// Makes `<path>.part`, which is nobody else's to read: lines of the engine's log are in it as they were written, and may hold what its users
    /// wrote.
    ///
    /// # Errors
    /// When either file exists or it cannot be made.
    pub fn create(path: &Path) -> Result<Self, RecordError> {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        // (a link to nothing has the name as well)
        if path.symlink_metadata().is_ok() {
            return Err(RecordError::Exists { path: path.to_owned() });
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part).map_err(|source| {
            match source.kind() {
                io::ErrorKind::AlreadyExists => RecordError::Exists { path: part.clone() },
                _ => RecordError::Create { path: part.clone(), source },
            }
        })?;
        let gzip = GzEncoder::new(Counted { file, bytes: 0 }, Compression::default());
        Ok(Self { path: path.to_owned(), part, gzip, lines: 0, text_bytes: 0 })
    }

    /// Bytes that have reached the file.
    pub fn bytes(&self) -> u64 {
        self.gzip.get_ref().bytes
    }

    /// Bytes of all lines, before they are packed.
    pub fn text_bytes(&self) -> u64 {
        self.text_bytes
    }

    /// Adds one line.
    ///
    /// # Errors
    /// When the disk is full, for one.
    pub fn write(&mut self, line: &Value) -> Result<(), RecordError> {
        let line = format!("{line}\n");
        (self.lines, self.text_bytes) = (self.lines + 1, self.text_bytes + line.len() as u64);
        let flush = self.lines.is_multiple_of(FLUSH_LINES);
        let written =
            self.gzip.write_all(line.as_bytes()).and_then(|()| if flush { self.gzip.flush() } else { Ok(()) });
        written.map_err(|source| RecordError::Write { path: self.part.clone(), source })
    }

    /// Ends the file and gives it its name. Returns its size.
    ///
    /// # Errors
    /// When its end cannot be written, or somebody else has made a file of its name meanwhile.
    pub fn finish(self) -> Result<u64, RecordError> {
        let failed = |source| RecordError::Write { path: self.part.clone(), source };
        let file = self.gzip.finish().map_err(failed)?;
        file.file.sync_all().map_err(failed)?;
        match name_anew(&self.part, &self.path) {
            Err(Errno::EXIST) => Err(RecordError::Meanwhile { path: self.path, part: self.part }),
            named => named.map(|()| file.bytes).map_err(|errno| failed(errno.into())),
        }
    }

    /// Leaves nothing behind.
    pub fn discard(self) {
        let _ = std::fs::remove_file(&self.part);
    }
}

/// Gives a file a name that nobody else has; where the file system cannot ask for that in one step, in two.
fn name_anew(from: &Path, to: &Path) -> Result<(), Errno> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) if to.symlink_metadata().is_ok() => Err(Errno::EXIST),
        Err(Errno::INVAL | Errno::NOSYS) => renameat_with(CWD, from, CWD, to, RenameFlags::empty()),
        named => named,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_trace_has_its_name_when_it_is_whole_and_is_never_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl.gz");
        let mut sink = Sink::create(&path).unwrap();
        assert!(!path.exists());
        assert!(matches!(Sink::create(&path), Err(RecordError::Exists { .. })), "two recorders");
        sink.write(&serde_json::json!({"t": 1.5})).unwrap();
        assert_eq!(sink.text_bytes(), 10);
        let bytes = sink.finish().unwrap();
        let made = std::fs::metadata(&path).unwrap();
        assert_eq!((made.len(), made.permissions().mode() & 0o777), (bytes, 0o600));
        let mut text = String::new();
        flate2::read::GzDecoder::new(File::open(&path).unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "{\"t\":1.5}\n");
        let again = Sink::create(&path).unwrap_err().to_string();
        assert!(again.contains("never overwritten"), "{again}");
    }

    #[test]
    fn what_has_its_name_by_the_time_that_it_is_whole_stays_and_so_does_the_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl.gz");
        let mut sink = Sink::create(&path).unwrap();
        sink.write(&serde_json::json!({})).unwrap();
        std::fs::write(&path, "somebody's").unwrap();
        let refused = sink.finish().unwrap_err();
        assert!(matches!(&refused, RecordError::Meanwhile { part, .. } if part.exists()), "{refused}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody's");
    }
}
