//! The thread that makes programs, beside the steps: it is asked and never waited for. It ends with its owner.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use super::key::ProgramKey;
use super::lower::{Program, Sizes};

/// Shapes that may wait to be captured.
const WAITING_MAX: usize = 16;
/// An idle thread turns at least this often.
const IDLE: Duration = Duration::from_millis(500);

/// What is asked of the thread, and what it has made.
pub struct Capture {
    sizes: Sizes,
    /// `None`: not started yet, or not to be had.
    ends: Option<Ends>,
    /// Asked for and not back yet.
    waiting: Vec<ProgramKey>,
}

impl Capture {
    pub fn new(sizes: Sizes) -> Self {
        Self { sizes, ends: None, waiting: Vec::new() }
    }

    /// Whether this program is on its way.
    pub fn is_asked_for(&self, key: &ProgramKey) -> bool {
        self.waiting.contains(key)
    }

    /// Asks for a program. False: too many are asked for already, or there is no thread to be had.
    pub fn want(&mut self, key: &ProgramKey) -> bool {
        if self.ends.is_none() {
            self.ends =
                start(self.sizes).inspect_err(|error| tracing::warn!(%error, "no thread for step programs")).ok();
        }
        let asked = self.waiting.len() < WAITING_MAX
            && self.ends.as_ref().is_some_and(|(wanted, _)| wanted.try_send(key.clone()).is_ok());
        if asked {
            self.waiting.push(key.clone());
        }
        asked
    }

    /// Whether nothing is asked for.
    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A program that was made, if there is one. Never waits.
    pub fn made(&mut self) -> Option<Program> {
        let program = self.ends.as_ref()?.1.try_recv().ok()?;
        self.waiting.retain(|key| *key != program.key);
        Some(program)
    }
}

type Ends = (SyncSender<ProgramKey>, Receiver<Program>);

fn start(sizes: Sizes) -> std::io::Result<Ends> {
    let (wanted, asked) = sync_channel::<ProgramKey>(WAITING_MAX);
    // as many as may be asked for: there is always room
    let (give, made) = sync_channel(WAITING_MAX);
    let body = move || {
        loop {
            match asked.recv_timeout(IDLE) {
                Ok(key) => drop(give.try_send(Program::new(key, &sizes))),
                Err(RecvTimeoutError::Timeout) => (),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    };
    thread::Builder::new().name("capture".into()).spawn(body)?;
    Ok((wanted, made))
}
