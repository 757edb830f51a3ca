//! The engine's log once more, into the file that an agent beside it follows (`TRUEBEAT_LOG_FILE`): in a pod it reads no container's output.
//!
//! Lines are appended whole, by each rank's process. The agent takes out what it has read; where none does, whoever finds the file too large
//! empties it. A line that finds no room is lost: an error of this file is nobody's.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use nix::libc::O_NONBLOCK;
use role::stderr::Stderr;

const VARIABLE: &str = "TRUEBEAT_LOG_FILE";
const BYTES_MAX: u64 = 8 << 20;

/// Standard error, and the file where the environment names one: for `role::start_logging`.
pub fn writer() -> impl Fn() -> Both + Send + Sync + 'static {
    let file = std::env::var_os(VARIABLE).filter(|path| !path.is_empty());
    let file = file.and_then(|path| open(Path::new(&path)).ok()).map(Arc::new);
    // nobody who reads our words holds the loop, the front end or the guard (E1)
    move || Both { file: file.clone(), stderr: Stderr::by(|| ()) }
}

/// What goes to both.
#[derive(Debug)]
pub struct Both {
    file: Option<Arc<File>>,
    stderr: Stderr,
}

/// A new one is nobody else's to read: a log may hold what users wrote.
fn open(path: &Path) -> io::Result<File> {
    // what lies there may be anything: no wait on a FIFO
    let file = File::options().create(true).append(true).mode(0o600).custom_flags(O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

fn append(mut file: &File, line: &[u8]) -> io::Result<()> {
    file.write_all(line)?;
    // (what an agent has taken out counts no more)
    if 512 * file.metadata()?.blocks() > BYTES_MAX { file.set_len(0) } else { Ok(()) }
}

impl Write for Both {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(file) = &self.file {
            let _ = append(file, line);
        }
        self.stderr.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stderr.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_and_a_file_that_nobody_empties_begins_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.log");
        std::fs::write(&path, "before\n").unwrap();
        let mut both = Both { file: Some(Arc::new(open(&path).unwrap())), stderr: Stderr::by(|| ()) };
        both.write_all(b"a line of the engine's test\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "before\na line of the engine's test\n");
        let file = both.file.as_ref().unwrap();
        append(file, &vec![b'x'; 9 << 20]).unwrap();
        append(file, b"anew\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "anew\n");
    }

    #[test]
    fn no_error_of_the_file_reaches_who_logs() {
        let dir = tempfile::tempdir().unwrap();
        assert!(open(&dir.path().join("away/engine.log")).is_err());
        assert!(open(dir.path()).is_err() && open(Path::new("/dev/full")).is_err());
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert!(append(&full, b"lost\n").is_err());
        assert_eq!(
            Both { file: Some(Arc::new(full)), stderr: Stderr::by(|| ()) }
                .write(b"a line of the engine's test\n")
                .unwrap(),
            28
        );
    }
}
