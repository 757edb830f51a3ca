//! Output that nobody waits for: a bounded queue and a thread that may block for ever. What finds no room or cannot be written is dropped,
//! counted, and told to whoever reads again (D9, I4).

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};

/// What waits for a slow reader at most: the burst of words with which an engine dies, in however many pieces it comes.
const BYTES_MAX: usize = 2 << 20;
/// The same of a program's own words.
const OWN_BYTES_MAX: usize = 256 << 10;
/// Small pieces are joined up to what a pipe takes whole (`PIPE_BUF`): lines of several processes do not mix in it.
const JOINED_BYTES_MAX: usize = 4 << 10;
/// Should a word that something is queued ever be missed.
const LOOK_SELDOM: Duration = Duration::from_secs(60);
/// Between two tries at what takes nothing just now and would not have us wait (a terminal that somebody made so).
const TRY_AGAIN: Duration = Duration::from_millis(20);

/// The writer's end.
#[derive(Debug)]
pub struct Onward {
    what: &'static str,
    bytes_max: usize,
    backlog: Backlog,
}

/// What is queued or being written, for whoever waits until it is not.
#[derive(Debug, Clone, Default)]
pub struct Backlog(Arc<(Mutex<Queue>, Condvar)>);

#[derive(Debug, Default)]
struct Queue {
    pieces: VecDeque<Piece>,
    /// Of the pieces, the one included that is being written.
    bytes: usize,
    /// Bytes that were dropped since the reader was last told.
    dropped: u64,
    /// Nobody writes any more; nobody reads any more.
    closed: bool,
    left: bool,
}

#[derive(Debug)]
struct Piece {
    text: Vec<u8>,
    /// How many bytes of output are lost with it: its own, or those that it tells of.
    stands_for: u64,
}

impl Onward {
    /// Starts the thread; it ends with this value, or when the reader has gone. `what` is what a reader is told was dropped.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(what: &'static str, on: Box<dyn Write + Send>) -> io::Result<Self> {
        Self::start_with(what, BYTES_MAX, on, || ())
    }

    /// The same for a program's own words, which are few. The thread does `ask` first: how it wants to be scheduled.
    ///
    /// # Errors
    /// As [`Onward::start`].
    pub fn start_own(what: &'static str, on: Box<dyn Write + Send>, ask: fn()) -> io::Result<Self> {
        Self::start_with(what, OWN_BYTES_MAX, on, ask)
    }

    fn start_with(what: &'static str, bytes_max: usize, mut on: Box<dyn Write + Send>, ask: fn()) -> io::Result<Self> {
        let backlog = Backlog::default();
        let queued = backlog.clone();
        let write = move || {
            ask();
            write_from_the_background();
            while let Some(piece) = queued.next() {
                let written = write_all(on.as_mut(), &piece.text);
                if queued.settle(&piece, written).is_break() {
                    break;
                }
            }
        };
        std::thread::Builder::new().name("onward".to_owned()).spawn(write)?;
        Ok(Self { what, bytes_max, backlog })
    }

    /// Passes a piece on. Never waits; false where it was dropped. A reader that has gone takes everything: there is nobody to keep it for.
    pub fn send(&mut self, piece: &[u8]) -> bool {
        let mut queue = self.backlog.lock();
        if queue.left {
            return true;
        }
        if queue.dropped > 0 {
            let (what, dropped) = (self.what, queue.dropped);
            let note = format!("\n[truebeat: {dropped} bytes of {what} were dropped, nobody took them in time]\n");
            if queue.put(note.as_bytes(), dropped, self.bytes_max) {
                queue.dropped = 0;
            }
        }
        let bytes = piece.len() as u64;
        let sent = queue.dropped == 0 && queue.put(piece, bytes, self.bytes_max);
        if !sent {
            queue.dropped += bytes;
        }
        drop(queue);
        self.backlog.0.1.notify_one();
        sent
    }

    /// Is everything written that was taken?
    pub fn is_empty(&self) -> bool {
        self.backlog.is_empty()
    }

    /// The same to ask when this value has gone.
    pub fn backlog(&self) -> Backlog {
        self.backlog.clone()
    }
}

impl Drop for Onward {
    fn drop(&mut self) {
        self.backlog.lock().closed = true;
        self.backlog.0.1.notify_one();
    }
}

impl Backlog {
    /// Is everything written that was taken?
    pub fn is_empty(&self) -> bool {
        self.lock().bytes == 0
    }

    /// Whoever has it moves some bytes in memory, and neither writes, waits nor calls anybody meanwhile: writing is done without it.
    #[expect(
        clippy::disallowed_methods,
        reason = "held for the time of a copy, with no I/O and no other wait under it (E1)"
    )]
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next piece, once there is one; `None` when all is written that will ever be.
    fn next(&self) -> Option<Piece> {
        let mut queue = self.lock();
        loop {
            if let Some(piece) = queue.pieces.pop_front() {
                return Some(piece);
            }
            if queue.closed {
                return None;
            }
            queue = self.0.1.wait_timeout(queue, LOOK_SELDOM).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What became of a piece. A disk that is full is no reader that has gone: it may have room for the next.
    fn settle(&self, piece: &Piece, written: io::Result<()>) -> std::ops::ControlFlow<()> {
        let mut queue = self.lock();
        queue.bytes = queue.bytes.saturating_sub(piece.text.len());
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                *queue = Queue { left: true, ..Queue::default() };
                return std::ops::ControlFlow::Break(());
            }
            Err(_) => queue.dropped += piece.stands_for,
        }
        std::ops::ControlFlow::Continue(())
    }
}

impl Queue {
    /// False where there is no room.
    fn put(&mut self, text: &[u8], stands_for: u64, bytes_max: usize) -> bool {
        if self.bytes > 0 && self.bytes + text.len() > bytes_max {
            return false;
        }
        self.bytes += text.len();
        match self.pieces.back_mut().filter(|last| last.text.len() + text.len() <= JOINED_BYTES_MAX) {
            Some(last) => {
                last.text.extend_from_slice(text);
                last.stands_for += stands_for;
            }
            None => self.pieces.push_back(Piece { text: text.to_owned(), stands_for }),
        }
        true
    }
}

fn write_all(on: &mut dyn Write, mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match patiently(|| on.write(text))? {
            0 => return Err(ErrorKind::WriteZero.into()),
            n => text = text.get(n..).unwrap_or_default(),
        }
    }
    patiently(|| on.flush())
}

/// Tries again where it takes nothing just now.
fn patiently<T>(mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match act() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(TRY_AGAIN),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Where `stty tostop` is set, whoever writes to the terminal and is not in its foreground is stopped with all his group, and gate and
/// detector never are in it. Who has the signal blocked just writes.
fn write_from_the_background() {
    // (where that fails a terminal may stop this process for its words)
    let _ = SigSet::from(Signal::SIGTTOU).thread_block();
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
mod tests {
    use super::*;
    use std::io::Read;
    use std::time::Instant;

    const PIECE_BYTES: usize = 16 << 10;
    const SOON: Duration = Duration::from_secs(30);

    fn until(mut wanted: impl FnMut() -> bool) {
        let began = Instant::now();
        while !wanted() {
            assert!(began.elapsed() < SOON, "never");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Does with each write what the next of these says, and then takes everything.
    struct Moody {
        moods: VecDeque<ErrorKind>,
        took: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Moody {
        fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
            if let Some(mood) = self.moods.pop_front() {
                return Err(mood.into());
            }
            self.took.lock().unwrap().extend_from_slice(piece);
            Ok(piece.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn d09_what_nobody_reads_is_dropped_and_counted_and_never_waited_for() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut onward = Onward::start("the engine's output", Box::new(writer)).unwrap();
        // far more than pipe and queue hold: returns all the same
        let taken = (0..200).filter(|_| onward.send(&[b'x'; PIECE_BYTES])).count();
        assert!(taken < 200 && onward.backlog.lock().dropped > 0 && !onward.is_empty());
        let mut heard = Vec::new();
        let mut bytes = [0; PIECE_BYTES];
        let note = b"bytes of the engine's output were dropped";
        while !heard[heard.len().saturating_sub(4 * PIECE_BYTES)..].windows(note.len()).any(|part| part == note) {
            let n = reader.read(&mut bytes).unwrap();
            heard.extend_from_slice(&bytes[..n]);
            onward.send(b"y");
        }
        assert!(heard.len() < 200 * PIECE_BYTES);
    }

    /// A traceback comes line by line, far faster than a reader takes it.
    #[test]
    fn d09_a_burst_of_many_small_pieces_is_kept() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut onward = Onward::start("x", Box::new(writer)).unwrap();
        let lines: Vec<String> = (0..20_000).map(|n| format!("line {n} of what it died of\n")).collect();
        assert!(lines.iter().all(|line| onward.send(line.as_bytes())));
        drop(onward);
        let mut heard = String::new();
        reader.read_to_string(&mut heard).unwrap();
        assert!(heard == lines.concat());
    }

    #[test]
    fn d10_what_cannot_be_written_is_counted_and_the_next_is_tried() {
        let took = Arc::new(Mutex::new(Vec::new()));
        let moods = [ErrorKind::StorageFull, ErrorKind::StorageFull, ErrorKind::WouldBlock, ErrorKind::Interrupted];
        let moody = Moody { moods: moods.into(), took: Arc::clone(&took) };
        let mut onward = Onward::start("the log", Box::new(moody)).unwrap();
        for word in ["first", "second", "third"] {
            assert!(onward.send(word.as_bytes()));
            until(|| onward.is_empty());
        }
        let heard = String::from_utf8(took.lock().unwrap().clone()).unwrap();
        assert!(heard.contains("[truebeat: 11 bytes of the log were dropped") && heard.ends_with("\nthird"), "{heard}");
    }

    #[test]
    fn no_terminal_stops_whoever_writes() {
        struct Asked(std::sync::mpsc::Sender<bool>);
        impl Write for Asked {
            fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
                let blocked = SigSet::thread_get_mask().unwrap();
                self.0.send(blocked.contains(Signal::SIGTTOU)).unwrap();
                Ok(piece.len())
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let (tell, told) = std::sync::mpsc::channel();
        Onward::start("x", Box::new(Asked(tell))).unwrap().send(b"x");
        assert!(told.recv().unwrap());
    }

    #[test]
    fn a_reader_that_has_gone_is_no_reason_to_keep_anything() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut onward = Onward::start("x", Box::new(writer)).unwrap();
        assert!(onward.send(b"x"));
        until(|| onward.is_empty());
        // far more than the queue holds
        assert!((0..200).all(|_| onward.send(&[b'x'; PIECE_BYTES])));
        assert!(onward.is_empty() && onward.backlog.lock().dropped == 0);
    }
}
