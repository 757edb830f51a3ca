//! Small files that processes of the agent leave for each other: written whole or not at all.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// So long after a write that failed the same is tried again: descriptors and disks have room again some day.
pub const WRITE_AGAIN: std::time::Duration = std::time::Duration::from_secs(1);
/// None of the agent's own files is longer, by far; what is longer was left there by somebody else.
const OWN_BYTES_MAX: u64 = 16 << 20;
/// Bytes of one of the blocks that the kernel counts files by.
const BLOCK_BYTES: u64 = 512;

/// Writes `value` as JSON beside `path` and renames it into place, so that no reader sees half of it. On a full disk it takes the room of what
/// lies there: what is to be told is often that an engine was started again, and no disk holds that up (I6).
///
/// # Errors
/// When the directory is not writable, or full and nothing of the same size lies there.
pub fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    write_text(path, serde_json::to_vec(value)?)
}

/// The same, of a text that is JSON.
///
/// # Errors
/// As [`write_json`].
pub fn write_text(path: &Path, text: Vec<u8>) -> io::Result<()> {
    let beside = path.with_extension("tmp");
    match std::fs::write(&beside, &text) {
        Ok(()) => std::fs::rename(&beside, path),
        Err(error) if is_full(&error) => write_over(path, text).map_err(|_| error),
        Err(error) => Err(error),
    }
}

/// Reads what one of the agent's processes left as JSON; `None` where there is nothing that can be read.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&read_regular(path, OWN_BYTES_MAX).ok()?).ok()
}

/// Opens a file of which nobody knows what it is for reading, with these flags beside: a FIFO is not waited for.
///
/// # Errors
/// Where it cannot be opened, or is no regular file.
pub fn open_regular(path: &Path, flags: OFlag) -> io::Result<File> {
    let file = File::options().read(true).custom_flags((flags | OFlag::O_NONBLOCK).bits()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no regular file"));
    }
    Ok(file)
}

/// Reads such a file whole; what has no end is not read to it. A disk may hang all the same.
///
/// # Errors
/// As [`open_regular`], and where it cannot be read or is longer than `bytes_max`.
pub fn read_regular(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open_regular(path, OFlag::empty())?;
    file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(bytes)
}

/// Keeps a directory and all below it from whoever clears away what is old, as long as this lives: `systemd-tmpfiles` passes by what is locked,
/// and a folder for temporary files is cleared every day. `None` where it cannot be locked; it is no worse off then.
pub fn keep_from_cleaning(dir: &Path) -> Option<File> {
    let lock = || {
        let held = File::open(dir)?;
        held.try_lock()?;
        Ok::<_, io::Error>(held)
    };
    lock()
        .inspect_err(|error| {
            tracing::info!(%error, path = %dir.display(), "what lies here may be cleared away when it is old");
        })
        .ok()
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Where it fits into the blocks that the file has, in one call: whoever reads just then finds the old text or the new one, blanks behind it,
/// or at worst nothing that is JSON, and looks again.
fn write_over(path: &Path, mut text: Vec<u8>) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(path)?;
    let meta = file.metadata()?;
    let length = meta.len().max(text.len() as u64);
    if !meta.is_file() || length > meta.blocks().saturating_mul(BLOCK_BYTES) {
        return Err(io::ErrorKind::StorageFull.into());
    }
    text.resize(usize::try_from(length).unwrap_or(text.len()), b' ');
    file.write_all_at(&text, 0)
}

/// Nanoseconds of `CLOCK_MONOTONIC`: differs between any two starts on one boot.
pub fn monotonic_ns() -> u64 {
    let Ok(time) = clock_gettime(ClockId::CLOCK_MONOTONIC) else { return 0 };
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec()).unwrap_or(0))
}

/// Another after every boot of the machine; empty where the kernel does not tell.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The wall clock as people and the API read it: RFC 3339, UTC, milliseconds.
pub fn wall_clock() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A FIFO would hold whoever opens it until somebody writes.
    #[test]
    fn what_is_no_regular_file_or_too_long_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, file) = (dir.path().join("fifo"), dir.path().join("file"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::write(&file, "\"12345\"").unwrap();
        let kind = |path: &Path, bytes_max| read_regular(path, bytes_max).map_err(|error| error.kind());
        assert_eq!(kind(&fifo, 7), Err(io::ErrorKind::InvalidInput));
        assert_eq!(kind(Path::new("/dev/zero"), 7), Err(io::ErrorKind::InvalidInput));
        assert_eq!(kind(&file, 6), Err(io::ErrorKind::FileTooLarge));
        assert_eq!(kind(&file, 7), Ok(b"\"12345\"".to_vec()));
        assert_eq!((read_json(&file), read_json::<String>(&fifo)), (Some("12345".to_owned()), None));
    }

    #[test]
    fn d10_on_a_full_disk_what_is_told_takes_the_room_of_what_was_told_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.json");
        write_json(&path, &"first, and much longer").unwrap();
        // whoever writes there finds no room
        std::os::unix::fs::symlink("/dev/full", dir.path().join("engine.tmp")).unwrap();
        let read = || serde_json::from_slice::<String>(&std::fs::read(&path).unwrap()).unwrap();
        for word in ["second", "the third one is longer than any of them before"] {
            write_json(&path, &word).unwrap();
            assert_eq!(read(), word);
        }
        assert!(write_json(&path, &"x".repeat(1 << 20)).is_err(), "no room for that");
        assert_eq!(read(), "the third one is longer than any of them before");
        std::fs::remove_file(&path).unwrap();
        assert!(write_json(&path, &"first of all").is_err_and(|error| is_full(&error)), "nothing lies there");
    }
}
