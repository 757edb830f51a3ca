//! The tail of the engine's log: what the bundle is to have of it, and every new line to the signature table (V4).
//!
//! A thread of its own reads the file, followed by inode, so that a stuck disk delays nobody (I4). A partial line waits for its
//! end; a backlog is skipped rather than read. In a pod the file lies in memory and is there for nobody else: the room of what was read is
//! given back by a hole, which moves no writer's end and loses no line.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc::O_NONBLOCK;
use vitals::log_signs::{Meaning, Signature, scan};
use vitals::observation::LogHit;

use super::clock::monotonic_ms;
use super::haste::{Haste, Rounds};
use super::log_memory::LogMemory;

/// What is read in calm nobody waits for: haste is heard at once.
const POLLS: Rounds = Rounds { calm: Duration::from_secs(2), hurried: Duration::from_millis(250) };
/// Between two looks whether a poll that was asked for is over.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Where a line is cut (characters).
pub const LINE_CHARS_MAX: usize = 1_500;
/// Most that one poll reads.
const POLL_BYTES_MAX: u64 = 1 << 20;
/// Of a log that is trimmed, what is kept of the part that was read, for an agent that starts anew; and room is given back in such pieces.
const KEPT_BYTES: u64 = 256 << 10;
const PIECE_BYTES: u64 = 1 << 20;
/// Bytes of old log read when the tail starts: all that the bundle would have of them, had this tail been there.
const HISTORY_BYTES: u64 = KEPT_BYTES;
/// A longer line without an end is taken as it is.
const PARTIAL_BYTES_MAX: usize = 64 << 10;
/// Characters of a line that a hit shows.
const HIT_CHARS_MAX: usize = 300;
/// Hits that wait for the next tick.
const HITS_MAX: usize = 100;

/// The tail of one file; its thread ends when dropped.
#[derive(Debug)]
pub struct LogTail {
    reader: Follows,
    stop: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
struct Shared {
    memory: LogMemory,
    hits: Vec<LogHit>,
    /// When the last poll began that is over.
    polled: Option<Instant>,
}

/// What was read of a log, for whoever asks off the tick.
#[derive(Debug, Clone)]
pub struct LogReader(Words);

#[derive(Debug, Clone)]
enum Words {
    Follows(Follows),
    Said(Vec<String>),
}

#[derive(Debug, Clone)]
struct Follows {
    shared: Arc<Mutex<Shared>>,
    haste: Haste,
}

impl From<Vec<String>> for LogReader {
    /// Of a log that says no more.
    fn from(lines: Vec<String>) -> Self {
        Self(Words::Said(lines))
    }
}

impl LogReader {
    /// What is kept, oldest first.
    pub fn lines(&self) -> Vec<String> {
        match &self.0 {
            Words::Follows(follows) => follows.lock().memory.lines(),
            Words::Said(lines) => lines.clone(),
        }
    }

    /// The same once all is read that lies in the file by now, or this time is over. Sleeps: never on a tick.
    pub fn lines_until_now(&self, wait: Duration) -> Vec<String> {
        let asked = Instant::now();
        if let Words::Follows(follows) = &self.0 {
            while follows.lock().polled.is_none_or(|began| began < asked) && asked.elapsed() < wait {
                follows.haste.rouse();
                std::thread::sleep(LOOK_EVERY);
            }
        }
        self.lines()
    }
}

impl Follows {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogTail {
    /// Starts following a file, which need not exist yet. Errors where no thread can be had.
    pub fn spawn(mut follower: Follower, haste: Haste) -> std::io::Result<Self> {
        let reader = Follows { shared: Arc::default(), haste };
        let stop = Arc::new(AtomicBool::new(false));
        let (into, ended) = (reader.clone(), Arc::clone(&stop));
        std::thread::Builder::new().name("log-tail".to_owned()).spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let began = Instant::now();
                let read = follower.poll();
                into.lock().take(read, monotonic_ms(), began);
                into.haste.doze(POLLS);
            }
        })?;
        Ok(Self { reader, stop })
    }

    /// The signatures found since the last call.
    pub fn take_hits(&self) -> Vec<LogHit> {
        std::mem::take(&mut self.reader.lock().hits)
    }

    /// For what was read, and is going to be.
    pub fn reader(&self) -> LogReader {
        LogReader(Words::Follows(self.reader.clone()))
    }

    /// Another engine writes it from now on.
    pub fn begin_anew(&self) {
        self.reader.lock().memory.begin_anew();
    }
}

impl Drop for LogTail {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn take(&mut self, read: Vec<NewLine>, now_ms: u64, began: Instant) {
        let any_history = read.iter().any(|line| line.history);
        for NewLine { text, history } in read {
            let signature = scan(&text);
            if !history && self.hits.len() < HITS_MAX {
                self.hits.extend(signature.map(|signature| hit(signature, &text, now_ms)));
            }
            let grave = signature.is_some_and(|sign| matches!(sign.meaning, Meaning::Fatal | Meaning::Device));
            self.memory.push(text, grave);
        }
        if any_history {
            // what told of an end there may be an earlier engine's: it is kept until this one tells of its own
            self.memory.begin_anew();
        }
        self.polled = Some(began);
    }
}

/// One line of the file. What was there before the tail began is history: worth keeping, no news.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewLine {
    pub text: String,
    pub history: bool,
}

/// Follows a path through rotation and truncation. No thread, no clock.
#[derive(Debug)]
pub struct Follower {
    path: PathBuf,
    open: Option<Open>,
    polled: bool,
    partial: Vec<u8>,
    /// What comes next is no beginning of a line, up to the next end of one. A client may have written it: taken for a line, it would pass for
    /// what the engine says of itself.
    beheaded: bool,
    trim: bool,
}

#[derive(Debug)]
struct Open {
    file: File,
    inode: (u64, u64),
    position: u64,
    /// Up to here the file holds nothing any more.
    given_back: u64,
}

impl Follower {
    /// Nothing is opened before the first poll.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), open: None, polled: false, partial: Vec::new(), beheaded: false, trim: false }
    }

    /// What was read is given back: for a log in memory that is written for this reader alone.
    #[must_use]
    pub fn trimming(self, trim: bool) -> Self {
        Self { trim, ..self }
    }

    /// The lines that came since the last poll. A missing or unreadable file has none.
    pub fn poll(&mut self) -> Vec<NewLine> {
        let first = !std::mem::replace(&mut self.polled, true);
        let mut lines = self.read_on(false);
        if self.has_moved() {
            // whatever the old file still held was read above
            self.partial.clear();
            self.open = self.open_at(first);
            self.beheaded = self.open.as_ref().is_some_and(|open| open.position > 0);
            lines.extend(self.read_on(first));
        }
        if self.trim {
            self.trim = self.open.as_mut().is_none_or(Open::give_back);
        }
        lines
    }

    /// Is the path another file than the one that is open?
    fn has_moved(&self) -> bool {
        let Ok(now) = std::fs::metadata(&self.path) else { return false };
        self.open.as_ref().is_none_or(|open| open.inode != (now.dev(), now.ino()))
    }

    fn open_at(&self, first: bool) -> Option<Open> {
        // what lies there may be anything: no wait on a FIFO
        let open = |write| File::options().read(true).write(write).custom_flags(O_NONBLOCK).open(&self.path);
        let file = open(self.trim).or_else(|_| open(false)).ok()?;
        let meta = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let position = if first { meta.len().saturating_sub(HISTORY_BYTES) } else { 0 };
        Some(Open { file, inode: (meta.dev(), meta.ino()), position, given_back: 0 })
    }

    fn read_on(&mut self, history: bool) -> Vec<NewLine> {
        let Some(open) = &mut self.open else { return Vec::new() };
        let length = open.file.metadata().map_or(open.position, |meta| meta.len());
        if length < open.position {
            // truncated in place: it begins anew
            (open.position, open.given_back) = (0, 0);
            (self.beheaded, self.partial) = (false, Vec::new());
        }
        if length - open.position > POLL_BYTES_MAX {
            open.position = length - POLL_BYTES_MAX;
            (self.beheaded, self.partial) = (true, Vec::new());
        }
        if length == open.position || open.file.seek(SeekFrom::Start(open.position)).is_err() {
            return Vec::new();
        }
        let mut bytes = Vec::new();
        // an error in the middle leaves what was read
        let _ = (&mut open.file).take(POLL_BYTES_MAX).read_to_end(&mut bytes);
        open.position += bytes.len() as u64;
        self.split(&bytes, history)
    }

    fn split(&mut self, bytes: &[u8], history: bool) -> Vec<NewLine> {
        let mut lines = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let ends = piece.ends_with(b"\n");
            if self.beheaded {
                self.beheaded = !ends;
                continue;
            }
            self.partial.extend_from_slice(piece);
            if ends || self.partial.len() > PARTIAL_BYTES_MAX {
                self.beheaded = !ends;
                let line = String::from_utf8_lossy(&self.partial);
                let text: String = line.trim_end_matches(['\n', '\r']).chars().take(LINE_CHARS_MAX).collect();
                self.partial.clear();
                lines.push(NewLine { text, history });
            }
        }
        lines
    }
}

impl Open {
    /// Makes a hole of what was read, but for its end. False where that cannot be: whoever writes must see to it then.
    fn give_back(&mut self) -> bool {
        let end = self.position.saturating_sub(KEPT_BYTES);
        let length = end.saturating_sub(self.given_back);
        if length < PIECE_BYTES {
            return true;
        }
        let (Ok(from), Ok(length)) = (i64::try_from(self.given_back), i64::try_from(length)) else { return false };
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        if let Err(error) = fallocate(&self.file, hole, from, length) {
            tracing::debug!(%error, "the room of the engine's log cannot be given back");
            return false;
        }
        self.given_back = end;
        true
    }
}

/// A line of this signature.
fn hit(signature: &Signature, line: &str, now_ms: u64) -> LogHit {
    let line = line.chars().take(HIT_CHARS_MAX).collect();
    LogHit { signature: signature.name.to_owned(), at_ms: now_ms, line }
}
