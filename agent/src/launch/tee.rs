//! The engine's output goes on to ours and into a log file of bounded size. Nobody waits for either: where nobody reads ours, or the disk is
//! full or hangs, what does not fit is dropped and counted. That is no reason for an engine to stand still (D9, D10).
//!
//! Ours has every byte at once. The log has whole lines, where they come in time: standard output and standard error meet in it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::capped_log::CappedLog;
use role::onward::{Backlog, Onward};

const READ_BYTES: usize = 16 << 10;
/// A line without an end waits for it so long, and up to this length.
const HELD_MAX: Duration = Duration::from_millis(100);
const HELD_BYTES_MAX: usize = 64 << 10;
/// Stands before the rest of a line that was cut, which a client may have written: at the beginning of a line it would pass for what the engine
/// says of itself.
const REST: &[u8] = " … ".as_bytes();

/// The log, written by a thread of its own; for all that the engines of one launcher say.
#[derive(Debug, Clone)]
pub struct Log(Arc<Mutex<Pen>>);

#[derive(Debug)]
struct Pen {
    onward: Onward,
    streams: u64,
    /// The stream whose last line has no end yet.
    unfinished: Option<u64>,
    /// Streams whose line another one has cut: what they say next is the rest of it.
    cut: Vec<u64>,
}

impl Log {
    /// Starts the thread.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(log: CappedLog) -> io::Result<Self> {
        let onward = Onward::start("the engine's log", Box::new(log))?;
        Ok(Self(Arc::new(Mutex::new(Pen { onward, streams: 0, unfinished: None, cut: Vec::new() }))))
    }

    /// Is everything written that was taken?
    pub fn is_empty(&self) -> bool {
        self.with(|pen| pen.onward.is_empty())
    }

    fn stream(&self) -> Stream {
        let number = self.with(|pen| {
            pen.streams += 1;
            pen.streams
        });
        Stream { log: self.clone(), number, held: Vec::new(), held_since: None }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Pen) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Pen {
    fn write(&mut self, stream: u64, text: &[u8]) {
        let cuts = self.unfinished.filter(|other| *other != stream);
        self.cut.extend(cuts);
        let end: &[u8] = if cuts.is_some() { b"\n" } else { b"" };
        let goes_on = self.cut.contains(&stream);
        self.cut.retain(|other| *other != stream);
        let head = if goes_on { REST } else { b"" };
        self.onward.send(&[end, head, text].concat());
        self.unfinished = (!text.ends_with(b"\n")).then_some(stream);
    }
}

/// What comes through one pipe.
#[derive(Debug)]
struct Stream {
    log: Log,
    number: u64,
    /// A line whose end has not come, and since when.
    held: Vec<u8>,
    held_since: Option<Instant>,
}

impl Stream {
    fn take(&mut self, chunk: &[u8]) {
        let end = chunk.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let (lines, rest) = chunk.split_at(end);
        self.held.extend_from_slice(lines);
        if end > 0 {
            self.flush();
        }
        self.held.extend_from_slice(rest);
        if self.held.len() > HELD_BYTES_MAX {
            self.flush();
        }
        if !self.held.is_empty() {
            self.held_since.get_or_insert_with(Instant::now);
        }
    }

    /// How long what is held may wait still; `None` where nothing is.
    fn patience(&self) -> Option<Duration> {
        self.held_since.map(|since| HELD_MAX.saturating_sub(since.elapsed()))
    }

    fn flush(&mut self) {
        if !self.held.is_empty() {
            self.log.with(|pen| pen.write(self.number, &self.held));
            self.held.clear();
        }
        self.held_since = None;
    }
}

/// What became of one pipe.
#[derive(Debug)]
pub struct Tee {
    read: Arc<AtomicBool>,
    passed_on: Backlog,
}

impl Tee {
    /// Has the last writer closed it, and is everything passed on that came? The log is to be asked afterwards.
    pub fn is_done(&self) -> bool {
        self.read.load(Ordering::Acquire) && self.passed_on.is_empty()
    }
}

/// Starts a thread that copies `from` to `on` and to the log until the last writer has closed it. It waits for neither: the engine's pipe is
/// always emptied.
///
/// # Errors
/// When the thread cannot be started.
pub fn tee(from: OwnedFd, on: Box<dyn Write + Send>, log: &Log) -> io::Result<Tee> {
    let mut onward = Onward::start("the engine's output", on)?;
    let read = Arc::new(AtomicBool::new(false));
    let tee = Tee { read: Arc::clone(&read), passed_on: onward.backlog() };
    let mut stream = log.stream();
    let copy = move || {
        let mut from = File::from(from);
        let mut buffer = vec![0; READ_BYTES];
        loop {
            if stream.patience().is_some_and(|wait| !comes_within(&from, wait)) {
                stream.flush();
            }
            match read_some(&mut from, &mut buffer) {
                Ok(n) if n > 0 => {
                    stream.take(&buffer[..n]);
                    onward.send(&buffer[..n]);
                }
                _ => break,
            }
        }
        stream.flush();
        read.store(true, Ordering::Release);
    };
    std::thread::Builder::new().name("engine-log".to_owned()).spawn(copy)?;
    Ok(tee)
}

/// Is there anything to read, or an end, before this time is over?
fn comes_within(from: &File, wait: Duration) -> bool {
    let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO);
    poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout).is_ok_and(|ready| ready > 0)
}

fn read_some(from: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
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
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;
    use std::sync::mpsc;

    const SOON: Duration = Duration::from_secs(30);
    const FLOOD_BYTES: usize = 8 << 20;

    fn until(what: &str, mut wanted: impl FnMut() -> bool) {
        let began = Instant::now();
        while !wanted() {
            assert!(began.elapsed() < SOON, "never: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn log_in(dir: &Path) -> Log {
        Log::start(CappedLog::open(&dir.join("engine.log"), 1 << 30).unwrap()).unwrap()
    }

    fn written(dir: &Path) -> String {
        std::fs::read_to_string(dir.join("engine.log")).unwrap()
    }

    /// An engine that prints a flood and ends; true where it came to its end.
    fn prints_on(log: &Log) -> bool {
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
        assert!(prints_on(&log), "the engine waits for its log");
        assert!(!log.is_empty());
    }

    #[test]
    fn d10_a_disk_that_is_full_holds_no_engine() {
        let log = Log::start(CappedLog::open(Path::new("/dev/full"), 1 << 30).unwrap()).unwrap();
        assert!(prints_on(&log));
    }

    #[test]
    fn lines_of_two_streams_stay_whole_in_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = log_in(dir.path());
        let (mut out, mut err) = (log.stream(), log.stream());
        out.take(b"one, ");
        err.take(b"two\n");
        out.take(b"one\nthree?");
        assert!(out.patience().is_some_and(|wait| wait <= HELD_MAX) && err.patience().is_none());
        // its end does not come in time
        out.flush();
        err.take(b"four\n");
        out.take(&vec![b'x'; HELD_BYTES_MAX + 1]);
        assert!(out.patience().is_none());
        until("it is written", || log.is_empty());
        let long = "x".repeat(HELD_BYTES_MAX + 1);
        assert_eq!(written(dir.path()), format!("two\none, one\nthree?\nfour\n … {long}"));
    }

    #[test]
    fn a_prompt_is_passed_on_and_logged_although_its_line_has_no_end() {
        let dir = tempfile::tempdir().unwrap();
        let ((from, mut engine), (mut heard, terminal)) = (io::pipe().unwrap(), io::pipe().unwrap());
        let _tee = tee(from.into(), Box::new(terminal), &log_in(dir.path())).unwrap();
        engine.write_all(b"name? ").unwrap();
        let mut bytes = [0; 6];
        heard.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"name? ");
        until("it is logged", || written(dir.path()) == "name? ");
    }

    #[test]
    fn a_pipe_is_done_when_its_last_word_is_passed_on() {
        struct Slow(Arc<Mutex<Vec<u8>>>, mpsc::Receiver<()>);
        impl Write for Slow {
            fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
                self.1.recv_timeout(Duration::from_secs(60)).unwrap();
                self.0.lock().unwrap().extend_from_slice(piece);
                Ok(piece.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let (from, mut engine) = io::pipe().unwrap();
        let (go_on, told) = mpsc::channel();
        let tee = tee(from.into(), Box::new(Slow(Arc::clone(&heard), told)), &log_in(dir.path())).unwrap();
        engine.write_all(b"last words").unwrap();
        until("it is read", || !tee.passed_on.is_empty());
        drop(engine);
        assert!(!tee.is_done());
        go_on.send(()).unwrap();
        until("it is done", || tee.is_done());
        assert_eq!(heard.lock().unwrap().as_slice(), b"last words");
    }
}
