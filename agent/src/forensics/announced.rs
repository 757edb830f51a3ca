//! Stacks from processes that tell their own (H10): no right over them is needed, and a loop that hangs is told all the same.
//!
//! Sends one signal, and only to a live process whose marker names it; reads two small files a process from the page directory,
//! which belongs to the engine and is not trusted: no link is followed, no pipe waited for, nothing is read without a bound.

use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::Signal;

use super::bundle::BundleEntry;
use crate::files::open_regular;
use crate::kill::send_to;
use crate::sources::EngineProcess;
use crate::sources::procs::ProcRoot;

/// H10.1.
const REQUEST: Signal = Signal::SIGURG;
/// H10.5.
const DUMP_BYTES_MAX: u64 = 1 << 20;
const MARKER_BYTES_MAX: u64 = 128;
const LINE_CHARS_MAX: usize = 400;
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// H10.3: a dump that is appended ends when it has not grown for this long.
const QUIET: Duration = Duration::from_millis(100);
/// Processes that are asked.
const PROCESSES_MAX: usize = 64;
/// Calls that make a place.
const PLACE_FRAMES_MAX: usize = 6;

/// What the processes told.
#[derive(Debug, Clone, Default)]
pub struct Announced {
    pub entries: Vec<BundleEntry>,
    /// The innermost calls of the thread that matters, of each process that answered.
    pub places: Vec<(i32, Vec<String>)>,
    /// Processes that told addresses and still look up their names.
    pub unnamed: Vec<i32>,
    pub notes: Vec<String>,
}

/// How a process answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Native,
    Faulthandler,
}

/// A process that was asked.
struct Asked {
    pid: i32,
    format: Format,
    path: PathBuf,
    before: Seen,
    /// The length at the last look, and since when it has been that.
    grown: (u64, Instant),
}

/// What the answer's file was before the signal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Seen {
    inode: u64,
    bytes: u64,
}

/// Asks every process of the tree that has announced that it answers, all at once, and waits at most `deadline`. Blocks.
pub fn collect(tree: &[i32], page_dir: &Path, deadline: Duration) -> Announced {
    let mut told = Announced::default();
    let mut waiting: Vec<Asked> =
        tree.iter().take(PROCESSES_MAX).filter_map(|pid| ask(*pid, page_dir, &mut told.notes)).collect();
    let since = Instant::now();
    while !waiting.is_empty() && since.elapsed() < deadline {
        std::thread::sleep(LOOK_EVERY);
        waiting.retain_mut(|asked| match answer(asked, false) {
            Some(text) => {
                told.take(asked.pid, asked.format, &text);
                false
            }
            None => true,
        });
    }
    for mut late in waiting {
        match answer(&mut late, true) {
            Some(text) => {
                told.notes.push(format!("the stacks of {} were not whole in time", late.pid));
                told.unnamed.extend((late.format == Format::Native).then_some(late.pid));
                told.take(late.pid, late.format, &text);
            }
            None => told.notes.push(format!("{} announced its stacks and told none", late.pid)),
        }
    }
    told
}

/// The answers of processes that have told addresses already, when they have found the names; waits at most `deadline`. Blocks.
pub fn named(mut pids: Vec<i32>, page_dir: &Path, deadline: Duration) -> Announced {
    let mut told = Announced::default();
    let since = Instant::now();
    while !pids.is_empty() && since.elapsed() < deadline {
        std::thread::sleep(LOOK_EVERY);
        pids.retain(|pid| {
            let path = page_dir.join(format!("stacks-{pid}.txt"));
            let text = read_from(&path, 0, DUMP_BYTES_MAX).unwrap_or_default();
            let whole = text.lines().next_back().is_some_and(|last| last.starts_with("end of dump"));
            if whole {
                told.take(*pid, Format::Native, &text);
            }
            !whole
        });
    }
    told
}

impl Announced {
    fn take(&mut self, pid: i32, format: Format, text: &str) {
        let text = clean(text);
        let place = place(format, &text);
        self.places.extend((!place.is_empty()).then_some((pid, place)));
        self.entries.push(BundleEntry { name: format!("stacks/own-{pid}.txt"), text });
    }
}

/// Sends the signal, if the marker names this very process and it can answer now.
fn ask(pid: i32, page_dir: &Path, notes: &mut Vec<String>) -> Option<Asked> {
    let marker = read_from(&page_dir.join(format!("stacks-{pid}.ready")), 0, MARKER_BYTES_MAX)?;
    let mut words = marker.split_ascii_whitespace();
    let start_ticks: u64 = words.next()?.parse().ok()?;
    let format = match words.next()? {
        "native" => Format::Native,
        "faulthandler" => Format::Faulthandler,
        other => {
            notes.push(format!("{pid} announced stacks in a format that is not known: {}", clean(other).trim()));
            return None;
        }
    };
    let process = EngineProcess { pid, start_ticks };
    if ProcRoot::live().stat(pid).is_some_and(|stat| matches!(stat.state, 'T' | 't')) {
        notes.push(format!("{pid} is stopped: it tells its stacks when it goes on"));
        return None;
    }
    let path = page_dir.join(format!("stacks-{pid}.txt"));
    let before = seen(&path).unwrap_or_default();
    // a marker of an earlier process with this pid reaches nobody
    if send_to(&[process], REQUEST).is_empty() {
        notes.push(format!("{pid} was not asked: the marker is not that process's, or there is no right to signal it"));
        return None;
    }
    Some(Asked { pid, format, path, before, grown: (before.bytes, Instant::now()) })
}

/// The answer if it is whole; at the deadline whatever there is.
fn answer(asked: &mut Asked, at_deadline: bool) -> Option<String> {
    let now = seen(&asked.path)?;
    if now == asked.before {
        return None;
    }
    if asked.format == Format::Native {
        let text = read_from(&asked.path, 0, DUMP_BYTES_MAX)?;
        let last = text.lines().next_back().unwrap_or_default();
        return (at_deadline || last.starts_with("end of dump")).then_some(text);
    }
    if asked.grown.0 != now.bytes {
        asked.grown = (now.bytes, Instant::now());
    }
    let begin = if now.inode == asked.before.inode && now.bytes > asked.before.bytes { asked.before.bytes } else { 0 };
    let ended = at_deadline || asked.grown.1.elapsed() >= QUIET;
    if ended { read_from(&asked.path, begin, DUMP_BYTES_MAX) } else { None }
}

fn seen(path: &Path) -> Option<Seen> {
    let meta = std::fs::symlink_metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some(Seen { inode: meta.ino(), bytes: meta.len() })
}

/// At most `bytes_max` from `begin` of a plain file, and of no link.
fn read_from(path: &Path, begin: u64, bytes_max: u64) -> Option<String> {
    let mut file = open_regular(path, OFlag::O_NOFOLLOW).ok()?;
    file.seek(SeekFrom::Start(begin)).ok()?;
    let mut bytes = Vec::new();
    file.take(bytes_max).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Printable lines of a bounded length.
fn clean(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        out.extend(line.chars().take(LINE_CHARS_MAX).map(|c| if c.is_control() { ' ' } else { c }));
        out.push('\n');
    }
    out
}

/// Where the thread that matters stands: the first of a native dump (the engine's own), the current one of a Python process.
fn place(format: Format, text: &str) -> Vec<String> {
    match format {
        Format::Native => {
            let frames = text.lines().skip_while(|line| !line.starts_with("thread ")).skip(1);
            let frames = frames.take_while(|line| line.starts_with("    ")).map(str::trim);
            // the standard library's part differs with the instruction at which the signal came
            let own =
                frames.filter(|frame| frame.contains(" (") && !frame.contains("(rust/") && !frame.contains(".so"));
            own.map(native_frame).take(PLACE_FRAMES_MAX).collect()
        }
        Format::Faulthandler => {
            let heads = |line: &&str| line.starts_with("Current thread ");
            let begin = text
                .lines()
                .position(|line| heads(&line))
                .or_else(|| text.lines().position(|line| line.starts_with("Thread ")));
            let frames = text.lines().skip(begin.map_or(usize::MAX, |at| at + 1));
            let frames = frames.take_while(|line| line.trim_start().starts_with("File "));
            frames.filter_map(python_frame).take(PLACE_FRAMES_MAX).collect()
        }
    }
}

/// `a::name<T>::{{closure}} (dir/file.rs:12)` as `name (file.rs)`: whether a call was folded into another decides how much of its path is
/// told, and that differs from build to build.
fn native_frame(frame: &str) -> String {
    let (name, place) = frame.rsplit_once(" (").unwrap_or((frame, ""));
    let file = place.split(':').next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    let name = name.split('<').next().filter(|name| !name.is_empty()).unwrap_or(name);
    let name = name.rsplit("::").find(|part| !part.is_empty() && !part.starts_with('{')).unwrap_or(name);
    format!("{name} ({})", file.trim_end_matches(')'))
}

/// `  File "/a/b.py", line 12 in f` as `f (b.py)`.
fn python_frame(line: &str) -> Option<String> {
    let (path, rest) = line.trim().strip_prefix("File \"")?.split_once("\", line ")?;
    let (_, function) = rest.split_once(" in ")?;
    Some(format!("{function} ({})", path.rsplit('/').next().unwrap_or(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_of_a_native_dump_is_the_engines_own_calls() {
        let text = "stacks of process 7\n\nthread 9 \"engine\" state R, wchan 0\n    spin_loop (rust/core/src/hint.rs:287)\n    \
                    engine::fault::spin (engine/src/fault.rs:162)\n    syscall (libc.so.6)\n    at<T> (engine/src/fault.rs:131)\n    \
                    engine::core::start::{{closure}} (src/core.rs:9)\n\n\
                    thread 10 \"x\" state S, wchan y\n    other (a/b.rs:1)\n";
        assert_eq!(place(Format::Native, text), ["spin (fault.rs)", "at (fault.rs)", "start (core.rs)"]);
        assert!(place(Format::Native, "no dump at all").is_empty());
    }

    #[test]
    fn the_place_of_a_python_dump_is_its_current_thread() {
        let text = "Thread 0x01 (most recent call first):\n  File \"/a/wait.py\", line 3 in wait\n\nCurrent thread 0x02 (most recent call first):\n  \
                    File \"/v/core.py\", line 30 in step\n  File \"/v/core.py\", line 31 in run\n\nExtension modules: numpy\n";
        assert_eq!(place(Format::Faulthandler, text), ["step (core.py)", "run (core.py)"]);
        assert_eq!(place(Format::Faulthandler, &text[..80]), ["wait (wait.py)"]);
        assert!(place(Format::Faulthandler, "").is_empty());
    }
}
