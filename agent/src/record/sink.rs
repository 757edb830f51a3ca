//! The file of a recording: gzip, written under another name until it is whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
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
        if path.exists() {
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
    /// When its end cannot be written.
    pub fn finish(self) -> Result<u64, RecordError> {
        let failed = |source| RecordError::Write { path: self.part.clone(), source };
        let file = self.gzip.finish().map_err(failed)?;
        file.file.sync_all().map_err(failed)?;
        std::fs::rename(&self.part, &self.path).map_err(failed)?;
        Ok(file.bytes)
    }

    /// Leaves nothing behind.
    pub fn discard(self) {
        let _ = std::fs::remove_file(&self.part);
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
}
