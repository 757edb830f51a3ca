//! Output that nobody waits for: a bounded queue and a thread that may block for ever. What finds no room is dropped, counted, and told
//! to whoever reads again (D9, I4).

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use nix::sys::signal::{SigSet, Signal};

use crate::short_slice;

/// Pieces that wait for a slow reader.
const PIECES_MAX: usize = 64;

/// The writer's end.
#[derive(Debug)]
pub struct Onward {
    what: &'static str,
    queue: SyncSender<Vec<u8>>,
    /// Pieces that are queued or being written.
    waiting: Arc<AtomicUsize>,
    dropped: u64,
}

impl Onward {
    /// Starts the thread; it ends with this value, or when a write fails. `what` is what a reader is told was dropped.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(what: &'static str, on: Box<dyn Write + Send>) -> io::Result<Self> {
        Self::start_with(what, on, || ())
    }

    /// The same for words that somebody waits for: they are written before the turn of whoever runs is over.
    ///
    /// # Errors
    /// As [`Onward::start`].
    pub fn start_soon(what: &'static str, on: Box<dyn Write + Send>) -> io::Result<Self> {
        Self::start_with(what, on, short_slice::ask_or_log)
    }

    fn start_with(what: &'static str, mut on: Box<dyn Write + Send>, ask: fn()) -> io::Result<Self> {
        let (queue, pieces) = sync_channel::<Vec<u8>>(PIECES_MAX);
        let waiting = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&waiting);
        let write = move || {
            ask();
            write_from_the_background();
            let write = |piece: Vec<u8>| {
                let done = on.write_all(&piece).and_then(|()| on.flush());
                left.fetch_sub(1, Ordering::Release);
                done
            };
            _ = pieces.iter().try_for_each(write);
        };
        std::thread::Builder::new().name("onward".to_owned()).spawn(write)?;
        Ok(Self { what, queue, waiting, dropped: 0 })
    }

    /// Passes a piece on. Never waits; false where it was dropped.
    pub fn send(&mut self, piece: &[u8]) -> bool {
        if self.dropped > 0 {
            let (what, dropped) = (self.what, self.dropped);
            let note = format!("\n[truebeat: {dropped} bytes of {what} were dropped, nobody took them in time]\n");
            if self.put(note.into_bytes()) {
                self.dropped = 0;
            }
        }
        let sent = self.dropped == 0 && self.put(piece.to_vec());
        if !sent {
            self.dropped += piece.len() as u64;
        }
        sent
    }

    /// Is everything written that was taken?
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// A reader that has gone takes everything: there is nobody to keep it for.
    fn put(&self, piece: Vec<u8>) -> bool {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let sent = self.queue.try_send(piece);
        if sent.is_err() {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        !matches!(sent, Err(TrySendError::Full(_)))
    }
}

/// Where `stty tostop` is set, whoever writes to the terminal and is not in its foreground is stopped with all his group, and gate and
/// detector never are in it. Who has the signal blocked just writes.
fn write_from_the_background() {
    let stops = SigSet::from(Signal::SIGTTOU);
    if let Err(error) = stops.thread_block() {
        tracing::debug!(%error, "a terminal may stop this process for its words");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    const PIECE_BYTES: usize = 16 << 10;

    #[test]
    fn d09_what_nobody_reads_is_dropped_and_counted_and_never_waited_for() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut onward = Onward::start("the engine's output", Box::new(writer)).unwrap();
        // far more than pipe and queue hold: returns all the same
        let taken = (0..200).filter(|_| onward.send(&[b'x'; PIECE_BYTES])).count();
        assert!(taken < 200 && onward.dropped > 0 && !onward.is_empty());
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
        assert!((0..10_000).all(|_| onward.send(b"x") || onward.dropped > 0));
    }
}
