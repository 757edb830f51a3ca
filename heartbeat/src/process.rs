//! Who a process is (H2): pid, start ticks and boot id out of `/proc`, and the clock that all pages share.
//!
//! Reads `/proc` below a root that the caller may choose (tests, other mounts), and `CLOCK_MONOTONIC`.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use nix::time::{ClockId, clock_gettime};

use crate::page::Identity;
use crate::unknown::{Stale, Unknown};

/// Where the kernel's process file system normally is.
pub const PROC_ROOT: &str = "/proc";
/// What one read takes.
const READ_BYTES: usize = 1_024;

/// What could not be learned about a process or this boot.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    #[error("cannot read {path}: {source}; is procfs mounted there?")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} does not read as expected: {text:?}")]
    Parse { path: PathBuf, text: String },
}

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of every time in a page.
pub fn monotonic_ns() -> u64 {
    // The clock cannot fail on Linux; 0 would read as "long ago", which no reader takes for progress.
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(|t| (t.tv_sec() as u64).saturating_mul(1_000_000_000).saturating_add(t.tv_nsec() as u64))
        .unwrap_or(0)
}

impl Identity {
    /// The identity of the calling process, without GPUs (set `gpu_uuids` afterwards). `nonce`: `TRUEBEAT_NONCE`, or 0.
    ///
    /// # Errors
    /// When `/proc/self/stat` or the boot id cannot be read.
    pub fn of_this_process(rank: u32, world_size: u32, nonce: u64) -> Result<Self, ProcError> {
        let root = Path::new(PROC_ROOT);
        let stat = stat_at(&root.join("self/stat"))?;
        let pid = std::process::id();
        let boot_id = boot_id(root)?;
        let pid_start_ticks = stat.start_ticks;
        Ok(Self { pid, pid_start_ticks, boot_id, nonce, rank, world_size, engines: 0, gpu_uuids: Vec::new() })
    }
}

/// Whether the process that the page names is alive here and is still the same one (H2).
pub fn is_live(identity: &Identity, proc_root: &Path) -> bool {
    check_live(identity, identity.pid, proc_root).is_ok()
}

/// As [`is_live`], with the reason. `pid` is the process's number in the reader's own PID namespace.
///
/// # Errors
/// `Stale` when the process is not the live one; `Io` when `/proc` does not say.
pub fn check_live(identity: &Identity, pid: u32, proc_root: &Path) -> Result<(), Unknown> {
    if boot_id(proc_root).map_err(io_unknown)? != identity.boot_id {
        return Err(Unknown::Stale(Stale::OtherBoot));
    }
    check_still_live(identity, pid, proc_root)
}

/// As [`check_live`], of a page whose boot has been compared before: nobody who compared it outlives it.
///
/// # Errors
/// As [`check_live`], without another boot.
pub fn check_still_live(identity: &Identity, pid: u32, proc_root: &Path) -> Result<(), Unknown> {
    let stat = match stat_at(&proc_root.join(format!("{pid}/stat"))) {
        Ok(stat) => stat,
        // ESRCH: the process went away between open and read.
        Err(ProcError::Read { source, .. }) if source.kind() == ErrorKind::NotFound || is_esrch(&source) => {
            return Err(Unknown::Stale(Stale::NoProcess { pid }));
        }
        Err(error) => return Err(io_unknown(error)),
    };
    if stat.start_ticks != identity.pid_start_ticks {
        let (live, page) = (stat.start_ticks, identity.pid_start_ticks);
        return Err(Unknown::Stale(Stale::OtherProcess { pid, live, page }));
    }
    // A zombie keeps pid and start time until it is reaped, but it will never beat again.
    if matches!(stat.state, 'Z' | 'X') { Err(Unknown::Stale(Stale::Zombie { pid })) } else { Ok(()) }
}

/// Whether the process may have made a file of this owner. What a page says of its process (number, start and boot) is no secret: whoever can
/// write into the directory can say it as well (G9). Root need not forge anything; and where `/proc` does not tell whose a process is, no
/// page is refused for it.
///
/// # Errors
/// `WrongOwner` when the process is another user's.
pub fn check_owner(owner: u32, pid: u32, proc_root: &Path) -> Result<(), Unknown> {
    let users = || users_of(&read(&proc_root.join(format!("{pid}/status"))).ok()?);
    match if owner == 0 { None } else { users() } {
        Some(users) if !users.contains(&owner) => {
            Err(Unknown::WrongOwner { owner, pid, user: users.get(1).copied().unwrap_or_default() })
        }
        _ => Ok(()),
    }
}

/// The real, effective, saved and file system user; `None` where the text does not tell them.
fn users_of(status: &str) -> Option<Vec<u32>> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let users: Vec<u32> = line.split_ascii_whitespace().map(|user| user.parse().ok()).collect::<Option<_>>()?;
    (!users.is_empty()).then_some(users)
}

/// `/proc/sys/kernel/random/boot_id` as bytes.
///
/// # Errors
/// When it cannot be read or is no UUID.
pub fn boot_id(proc_root: &Path) -> Result<[u8; 16], ProcError> {
    let path = proc_root.join("sys/kernel/random/boot_id");
    let text = read(&path)?;
    parse_uuid(text.trim()).ok_or(ProcError::Parse { path, text })
}

struct Stat {
    state: char,
    start_ticks: u64,
}

fn stat_at(path: &Path) -> Result<Stat, ProcError> {
    let text = read(path)?;
    parse_stat(&text).ok_or_else(|| ProcError::Parse { path: path.to_owned(), text })
}

/// Fields 3 and 22. The command name (field 2) may hold anything, `)` and spaces too: fields count from the last `)`.
fn parse_stat(text: &str) -> Option<Stat> {
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let start_ticks = fields.nth(18)?.parse().ok()?;
    Some(Stat { state, start_ticks })
}

/// Sixteen bytes out of 32 hexadecimal digits with any dashes.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> =
        text.chars().filter(|c| *c != '-').map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    if digits.len() == 32 { bytes.try_into().ok() } else { None }
}

/// Lossy: a process may name itself with any bytes, and its name must not make it unreadable.
fn read(path: &Path) -> Result<String, ProcError> {
    let bytes = read_whole(path).map_err(|source| ProcError::Read { path: path.to_owned(), source })?;
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

/// In as few calls as can be: these files have no size to ask for, and an agent reads them again and again.
fn read_whole(path: &Path) -> std::io::Result<Vec<u8>> {
    let (mut file, mut whole, mut buffer) = (fs::File::open(path)?, Vec::new(), [0; READ_BYTES]);
    loop {
        let read = file.read(&mut buffer)?;
        whole.extend_from_slice(&buffer[..read]);
        // a read that comes back short was the last
        if read < READ_BYTES {
            return Ok(whole);
        }
    }
}

fn is_esrch(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32)
}

fn io_unknown(error: ProcError) -> Unknown {
    let message = error.to_string();
    let (ProcError::Read { path, .. } | ProcError::Parse { path, .. }) = error;
    Unknown::Io { op: "checking the process in", path, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_with_a_hostile_command_name_is_read_from_its_last_parenthesis() {
        let line = "42 (a) Z 1 2 (x) S 1 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 1";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.state, stat.start_ticks), ('S', 987_654));
        for bad in ["", "42 (a", "42 (a) S 1 2", "42 (a) S 1 42 42 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 x"] {
            assert!(parse_stat(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_page_is_its_processs_users_or_roots() {
        let root = tempfile::tempdir().unwrap();
        let status = |text: &str| {
            fs::create_dir_all(root.path().join("7")).unwrap();
            fs::write(root.path().join("7/status"), text).unwrap();
        };
        let check = |owner| check_owner(owner, 7, root.path());
        assert_eq!(check(5), Ok(()), "whose the process is is not told");
        status("Name:\tengine\nUid:\t1000\t1001\t1002\t1001\nGid:\t5\t5\t5\t5\n");
        assert_eq!([1_000, 1_001, 1_002, 0].map(check), [const { Ok(()) }; 4]);
        let refused = check(5).unwrap_err();
        assert_eq!(refused, Unknown::WrongOwner { owner: 5, pid: 7, user: 1_001 });
        assert!(refused.to_string().contains("user 1001's: somebody else made it"), "{refused}");
        for unreadable in ["", "Uid:\n", "Uid:\tx\n", "Uid:\t-1\n"] {
            status(unreadable);
            assert_eq!(check(5), Ok(()), "{unreadable:?}");
        }
    }

    #[test]
    fn uuid_needs_all_its_digits() {
        assert_eq!(parse_uuid("00010203-0405-0607-0809-0a0b0c0d0eFF").unwrap()[14..], [14, 255]);
        for bad in ["", "0001", "0001020304050607080901010c0d0e0f0", "g0010203-0405-0607-0809-0a0b0c0d0eff"] {
            assert!(parse_uuid(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn this_process_is_live_and_its_clock_runs() {
        let me = Identity::of_this_process(0, 1, 5).unwrap();
        assert!(is_live(&me, Path::new(PROC_ROOT)));
        assert!(!is_live(&Identity { pid_start_ticks: me.pid_start_ticks + 1, ..me.clone() }, Path::new(PROC_ROOT)));
        let before = monotonic_ns();
        assert!(before > 0 && monotonic_ns() >= before);
    }
}
