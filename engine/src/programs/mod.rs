//! Step programs (E2): what a device calls a graph. A program is a step's kernel calls, flattened, with their partitions resolved for one
//! exact shape (`key`); it is lowered from the decoder's sizes (`lower`) on a thread of its own, and runs steps of that shape and no other, in
//! buffers that all programs share (`workspace`). Every other step runs eagerly, at once: nobody waits for a capture, and nothing is padded.
//!
//! **Invariant:** a program leaves this cache only for a step of its own key, so that its collectives bring what the other ranks expect (S1).

mod capture;
mod key;
mod lower;
mod workspace;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use key::ProgramKey;
pub use lower::{Buffer, Call, Matrix, Norm, Program, Sizes};
pub use workspace::Workspace;

use crate::model::StepBatch;
use capture::Capture;

/// Programs that are kept; the one that was not used for longest goes first.
const PROGRAMS_MAX: usize = 64;
/// A shape whose steps need more bytes of buffers has no program, which bounds the workspace: each buffer is as long as the step that
/// needs most rows of its kind, and there are two kinds, those of all tokens and those of tokens whose logits are wanted.
const BYTES_MAX: usize = 128 << 20;
/// Shapes that were seen once lately: one that comes again is captured.
const SEEN_MAX: usize = 64;

/// What became of steps and programs; shared with who tells it.
#[derive(Debug, Default)]
pub struct ProgramCounts {
    pub replayed: AtomicU64,
    pub eager: AtomicU64,
    pub captured: AtomicU64,
    pub evicted: AtomicU64,
    /// Key of the program of the last step, for the flight recorder; 0: it ran eagerly.
    pub last_key: AtomicU64,
}

/// The programs of one decoder.
pub struct Programs {
    sizes: Sizes,
    /// The one that was used last stands last.
    kept: Vec<Program>,
    seen: VecDeque<ProgramKey>,
    capture: Capture,
    counts: Arc<ProgramCounts>,
    /// Programs, and bytes of the buffers of a shape.
    most: (usize, usize),
}

impl Programs {
    /// No programs yet, for a decoder of these sizes.
    pub fn new(sizes: Sizes) -> Self {
        let (kept, seen, counts) = (Vec::new(), VecDeque::new(), Arc::default());
        Self { sizes, kept, seen, capture: Capture::new(sizes), counts, most: (PROGRAMS_MAX, BYTES_MAX) }
    }

    /// The same, that keeps so many programs, each for a shape of so many bytes of buffers.
    #[cfg(test)]
    pub fn bounded(self, programs: usize, bytes: usize) -> Self {
        Self { most: (programs, bytes), ..self }
    }

    pub fn counts(&self) -> Arc<ProgramCounts> {
        self.counts.clone()
    }

    /// The program of exactly this step, taken out for it. `None`: the step runs eagerly; its shape is captured elsewhere if it is worth it.
    pub fn take(&mut self, batch: &StepBatch) -> Option<Program> {
        while let Some(program) = self.capture.made() {
            self.counts.captured.fetch_add(1, Relaxed);
            self.put_back(program);
        }
        let Some(at) = self.kept.iter().position(|program| program.key.is_of(batch)) else {
            self.counts.eager.fetch_add(1, Relaxed);
            self.counts.last_key.store(0, Relaxed);
            self.look_at(batch);
            return None;
        };
        self.counts.replayed.fetch_add(1, Relaxed);
        self.counts.last_key.store(self.kept[at].key.number(), Relaxed);
        Some(self.kept.remove(at))
    }

    /// After its step. A program whose step went wrong is not brought back.
    pub fn put_back(&mut self, program: Program) {
        self.kept.push(program);
        while self.kept.len() > self.most.0 {
            drop(self.kept.remove(0));
            self.counts.evicted.fetch_add(1, Relaxed);
        }
    }

    /// A shape that ran eagerly: at its second time it is wanted as a program.
    fn look_at(&mut self, batch: &StepBatch) {
        let Some(key) = ProgramKey::of(batch) else { return };
        if self.capture.is_asked_for(&key) || lower::bytes(&key, &self.sizes) > self.most.1 {
            return;
        }
        match self.seen.iter().position(|seen| *seen == key) {
            Some(at) => {
                // kept in mind where the capture is busy
                if self.capture.want(&key) {
                    drop(self.seen.remove(at));
                }
            }
            None => {
                self.seen.truncate(SEEN_MAX - 1);
                self.seen.push_front(key);
            }
        }
    }
}

#[cfg(test)]
mod tests;
