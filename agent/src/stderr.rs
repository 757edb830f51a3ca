//! Standard error of the sidecar's processes, which nobody waits for: a pipe that is full, because whoever reads our log has gone to
//! sleep, must not hold the detector, the gate or the supervisor (I4, D9). The thread behind it starts with the first word.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::onward::Onward;

const LOOK_EVERY: Duration = Duration::from_millis(2);

static OUT: OnceLock<Option<Mutex<Onward>>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// Words of one process; for `tracing_subscriber`'s `with_writer`.
#[derive(Debug, Clone, Copy)]
pub struct Stderr;

/// Makes a writer; each of its writes is a line.
pub fn writer() -> Stderr {
    Stderr
}

impl Write for Stderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let out =
            OUT.get_or_init(|| Onward::start_soon("the agent's log", Box::new(io::stderr())).ok().map(Mutex::new));
        let taken = out.as_ref().is_some_and(|out| out.lock().unwrap_or_else(PoisonError::into_inner).send(line));
        if !taken {
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

/// Waits until what was said is written, and no longer than this: for the end of a process.
pub fn settle(at_most: Duration) {
    let began = Instant::now();
    let Some(Some(out)) = OUT.get() else { return };
    while !out.lock().unwrap_or_else(PoisonError::into_inner).is_empty() && began.elapsed() < at_most {
        std::thread::sleep(LOOK_EVERY);
    }
}
