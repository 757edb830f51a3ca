//! Standard error that nobody waits for: a pipe that is full, because whoever reads our log has gone to sleep, holds neither a detector, a gate
//! or a supervisor (I4, D9) nor an engine, whose loop, front end and guard all say something now and then (E1). The thread behind it starts
//! with the first word.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::onward::Onward;

const LOOK_EVERY: Duration = Duration::from_millis(2);

static OUT: OnceLock<Mutex<Onward>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Words of one process; for `tracing_subscriber`'s `with_writer`.
#[derive(Debug, Clone, Copy)]
pub struct Stderr {
    ask: fn(),
}

impl Stderr {
    /// Each write is a line. Whichever writes first has its `ask` done by the thread that all of this process's have.
    pub fn by(ask: fn()) -> Self {
        Self { ask }
    }
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if OUT.get().is_none() {
            // made before it is put there, so that nobody waits for a thread to start: of two that say the first word at once one is dropped, and
            // its thread, which has been given nothing, ends. Where no thread is to be had the next word tries again
            let made = Onward::start_own("the log", Box::new(io::stderr()), self.ask);
            drop(made.map(|made| OUT.set(Mutex::new(made))));
        }
        if !queue().is_some_and(|mut queue| queue.send(line)) {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines that found no room since the process began.
pub fn dropped_lines() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Has this process said anything by this way?
pub(crate) fn started() -> bool {
    queue().is_some()
}

/// A program's last line: by the same way where there is one, so that it waits for nobody either and stands behind what was said before.
pub(crate) fn say(line: &str) {
    match queue() {
        Some(mut queue) => _ = queue.send(format!("{line}\n").as_bytes()),
        // not `eprintln!`, which panics where nobody reads any more
        None => _ = writeln!(io::stderr(), "{line}"),
    }
}

/// Waits until what was said is written, and no longer than this: for the end of a process.
pub fn settle(at_most: Duration) {
    let began = Instant::now();
    while queue().is_some_and(|queue| !queue.is_empty()) && began.elapsed() < at_most {
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Where words wait for whoever reads, once there were any and a thread for them.
#[expect(clippy::disallowed_methods, reason = "held for as long as the lock within, of a copy in memory (E1)")]
fn queue() -> Option<MutexGuard<'static, Onward>> {
    Some(OUT.get()?.lock().unwrap_or_else(PoisonError::into_inner))
}
