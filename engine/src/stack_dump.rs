//! The engine tells its own stacks, without any right over itself: somebody sends SIGURG, and `stacks-<pid>.txt` appears beside the
//! page (H10). A thread that is frozen in a step, in a lock or in a wait is told like any other, for the handler runs on it.
//!
//! A thread of its own asks each thread in turn (`capture`), writes the bare addresses first, and then the same with names
//! (`symbols`): where looking up names takes too long or ends badly, the addresses are there. Names of functions, files and lines
//! only: no argument, no local, so no prompt.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use heartbeat::monotonic_ns;
use heartbeat::page::Identity;
use nix::libc;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use thiserror::Error;

use crate::waits::Patience;

mod capture;
mod symbols;

use symbols::Symbols;

/// Threads of one dump.
const THREADS_MAX: usize = 256;
/// A thread that takes signals answers in microseconds; one that does not sits in the kernel.
const THREAD_WAIT_MAX: Duration = Duration::from_millis(50);
/// One that runs takes its signal when it is next given a core. Those that matter are waited for, within what an engine that gives up has.
const RUNNING_WAIT_MAX: Duration = Duration::from_millis(100);
const RUNS: &str = "state R";
const MATTER: [&str; 2] = ["engine", "device"];
/// All threads together.
const CAPTURE_MAX: Duration = Duration::from_millis(700);
/// Bytes of one dump (H10.5).
const DUMP_BYTES_MAX: usize = 1 << 20;
/// Between two dumps, whoever asks how often.
const REST: Duration = Duration::from_millis(500);
/// A dump of a process that is gone is left alone for so long.
const LEFT_FOR: Duration = Duration::from_secs(600);
/// The dump thread's wait has a deadline as every wait has (E1); nothing follows from its passing.
const LISTEN_MAX: Duration = Duration::from_secs(60);

/// Dumps that are whole.
static DUMPS: AtomicU64 = AtomicU64::new(0);

/// Why the engine cannot tell its stacks. It runs all the same.
#[derive(Debug, Error)]
pub enum StackDumpError {
    #[error("the page directory {dir:?} cannot be made")]
    Directory { dir: PathBuf, source: io::Error },
    #[error("this process cannot read who it is")]
    Identity(#[from] heartbeat::process::ProcError),
    #[error("SIGURG cannot be handled")]
    Signal(#[source] io::Error),
    #[error("the dump thread cannot be started")]
    Thread(#[source] io::Error),
    #[error("the marker {path:?} cannot be written")]
    Marker { path: PathBuf, source: io::Error },
}

/// One thread of a dump.
struct ThreadStack {
    tid: i32,
    name: String,
    /// State letter and kernel wait, as `/proc` tells them.
    place: String,
    frames: Result<Vec<usize>, capture::Missed>,
}

/// Handles SIGURG from now on and says so in `dir` (H10.2). Once a process: a second call would take the first one's requests.
///
/// # Errors
/// [`StackDumpError`]; the process may go on without.
pub fn start(dir: &Path) -> Result<(), StackDumpError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o755).create(dir);
    made.map_err(|source| StackDumpError::Directory { dir: dir.to_owned(), source })?;
    sweep(dir);
    let identity = Identity::of_this_process(0, 1, 0)?;
    let listener = capture::install().map_err(StackDumpError::Signal)?;
    listener.set_read_timeout(Some(LISTEN_MAX)).map_err(StackDumpError::Signal)?;
    let (dump, header) = (dir.join(format!("stacks-{}.txt", identity.pid)), header(&identity));
    std::thread::Builder::new()
        .name("stacks".into())
        .spawn(move || listen(listener, &dump, &header))
        .map_err(StackDumpError::Thread)?;
    let marker = dir.join(format!("stacks-{}.ready", identity.pid));
    let text = format!("{} native\n", identity.pid_start_ticks);
    write_whole(&marker, &text).map_err(|source| StackDumpError::Marker { path: marker, source })
}

/// Removes what processes left that are gone for a while: the directory lies in memory and is small. What an engine said at its end is
/// evidence until the agent has taken it.
fn sweep(dir: &Path) {
    let is_old = |entry: &fs::DirEntry| {
        let written = entry.metadata().and_then(|meta| meta.modified());
        written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > LEFT_FOR))
    };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(is_old) {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix("stacks-")?.split_once('.')?.0.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // somebody else may have been faster
            drop(fs::remove_file(entry.path()));
        }
    }
}

/// Has this process's stacks dumped, as if somebody had asked, and waits until they are there, for `wait_max` at most. False: they are
/// not whole yet, or nobody listens, which costs no time.
pub fn dump_now(wait_max: Duration) -> bool {
    if !capture::listens() {
        return false;
    }
    let before = DUMPS.load(Ordering::Acquire);
    let _ = kill(Pid::this(), capture::SIGNAL);
    let mut patience = Patience::new(Some(wait_max));
    while DUMPS.load(Ordering::Acquire) == before {
        if !patience.turn() {
            return false;
        }
    }
    true
}

fn header(identity: &Identity) -> String {
    format!("stacks of process {}, started at {} ticks", identity.pid, identity.pid_start_ticks)
}

/// The dump thread. It is never joined: it waits for nobody but a signal.
fn listen(mut listener: UnixStream, dump: &Path, header: &str) {
    let mut count = 0_u64;
    let mut bytes = [0_u8; 64];
    loop {
        match listener.read(&mut bytes) {
            Ok(0) => return,
            Ok(_) => {
                count += 1;
                take(count, dump, header);
                std::thread::sleep(REST);
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => (),
            Err(error) => {
                tracing::error!(%error, "no more stack dumps");
                return;
            }
        }
    }
}

/// One dump: addresses first, names over it.
fn take(count: u64, dump: &Path, header: &str) {
    let since = Instant::now();
    let stacks = all_threads();
    let capture_us = since.elapsed().as_micros();
    let head = format!("{header}, dump {count} at {} ns, taken in {capture_us} us\n", monotonic_ns());
    let mut symbols = Symbols::of_this_process();
    let bare = rendered(&head, &stacks, &symbols);
    if let Err(error) = write_whole(dump, &bare) {
        tracing::warn!(%error, dump = %dump.display(), "the stack dump cannot be written");
        return;
    }
    symbols.load();
    let named = format!("{}end of dump {count}\n", rendered(&head, &stacks, &symbols));
    if let Err(error) = write_whole(dump, &named) {
        tracing::warn!(%error, dump = %dump.display(), "the names of the stack dump cannot be written");
    }
    DUMPS.fetch_add(1, Ordering::Release);
    tracing::info!(dump = %dump.display(), took = ?since.elapsed(), "stacks dumped on SIGURG");
}

/// Every thread but this one; the engine's own first, for it is the one that matters.
fn all_threads() -> Vec<ThreadStack> {
    let since = Instant::now();
    let own = nix::unistd::gettid().as_raw();
    let mut threads: Vec<(i32, String)> = fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|tid| *tid != own)
        .map(|tid| (tid, task_file(tid, "comm")))
        .collect();
    threads.sort_by_key(|(tid, name)| (name != "engine", *tid));
    threads.truncate(THREADS_MAX);
    threads
        .into_iter()
        .map(|(tid, name)| {
            // read before the signal: the handler's own run is not what is asked for
            let place = place(tid);
            let left = CAPTURE_MAX.saturating_sub(since.elapsed());
            let runs = place.starts_with(RUNS) && MATTER.contains(&name.as_str());
            let wait = if runs { RUNNING_WAIT_MAX } else { THREAD_WAIT_MAX }.min(left);
            let frames = if left.is_zero() { Err(capture::Missed::Silent) } else { capture::frames_of(tid, wait) };
            ThreadStack { tid, name, place, frames }
        })
        .collect()
}

fn place(tid: i32) -> String {
    let stat = task_file(tid, "stat");
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next()).unwrap_or('?');
    format!("state {state}, wchan {}", task_file(tid, "wchan"))
}

fn task_file(tid: i32, name: &str) -> String {
    fs::read_to_string(format!("/proc/self/task/{tid}/{name}")).unwrap_or_default().trim().to_owned()
}

fn rendered(head: &str, stacks: &[ThreadStack], symbols: &Symbols) -> String {
    let mut text = head.to_owned();
    for stack in stacks {
        let begin = text.len();
        text.push_str(&format!("\nthread {} {:?} {}\n", stack.tid, stack.name, stack.place));
        match &stack.frames {
            // the standard library's way of starting a thread is in every stack and tells nothing
            Ok(frames) => frames
                .iter()
                .flat_map(|address| symbols.name(*address))
                .take_while(|name| !name.starts_with("__rust_begin_short_backtrace"))
                .for_each(|name| text.push_str(&format!("    {name}\n"))),
            Err(missed) => text.push_str(&format!("    ({missed})\n")),
        }
        if text.len() > DUMP_BYTES_MAX - 128 {
            text.truncate(begin);
            text.push_str("\n(the rest is cut)\n");
            break;
        }
    }
    text
}

/// Under another name first, for the owner alone, following no link.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let beside = path.with_extension("part");
    let mut options = fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o644).custom_flags(libc::O_NOFOLLOW);
    io::Write::write_all(&mut options.open(&beside)?, text.as_bytes())?;
    fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn what_processes_left_is_swept_once_it_is_old_and_they_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (gone, lives) = (i32::MAX, std::process::id());
        let old = SystemTime::now() - LEFT_FOR - Duration::from_secs(1);
        for (name, at) in [
            (format!("stacks-{gone}.txt"), old),
            (format!("stacks-{gone}.ready"), old),
            (format!("stacks-{lives}.txt"), old),
            (format!("stacks-{}.txt", gone - 1), SystemTime::now()),
            ("rank-0.beat".to_owned(), old),
        ] {
            fs::File::create(dir.path().join(name)).unwrap().set_modified(at).unwrap();
        }
        sweep(dir.path());
        let mut left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        let mut expected =
            vec!["rank-0.beat".to_owned(), format!("stacks-{}.txt", gone - 1), format!("stacks-{lives}.txt")];
        expected.sort();
        assert_eq!(left, expected);
    }
}
