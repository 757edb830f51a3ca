//! Step programs (E2): what a device calls a graph. A program is a step's kernel calls, flattened, with their partitions resolved for one
//! exact shape (`key`); it is lowered from the decoder's sizes (`lower`) on a thread of its own, and runs steps of that shape and no other, in
//! buffers that all programs share (`workspace`). Every other step runs eagerly, at once: nobody waits for a capture, and nothing is padded.
//!
//! A program is found by its key's number, and the guard then holds its whole shape against the step's, at every replay: whatever found the
//! wrong one, another key of the same number or the fault `padded-graph` (S1), that step runs eagerly, and is counted as refused.
//!
//! **Invariant:** with guards on a program leaves this cache only for a step of its own key, so that its collectives bring what the other
//! ranks expect (S1).

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

use crate::fault::{Faults, Place};
use crate::model::StepBatch;
use capture::Capture;

/// Programs that are kept; the one that was not used for longest goes first.
const PROGRAMS_MAX: usize = 64;
/// A shape whose steps need more bytes of buffers has no program, which bounds the workspace: each buffer is as long as the step that
/// needs most rows of its kind, and there are two kinds, those of all tokens and those of tokens whose logits are wanted.
const BYTES_MAX: usize = 128 << 20;
/// The same on a device, where 256 rows of logits are the least that there is room for.
const DEVICE_BYTES_MAX: usize = 512 << 20;
/// Shapes that were seen once lately: one that comes again is captured.
const SEEN_MAX: usize = 64;

/// What became of steps and programs; shared with who tells it.
#[derive(Debug, Default)]
pub struct ProgramCounts {
    pub replayed: AtomicU64,
    pub eager: AtomicU64,
    pub captured: AtomicU64,
    pub evicted: AtomicU64,
    /// Steps that a program of another shape was found for, and that ran eagerly.
    pub refused: AtomicU64,
    /// The same, of the other ranks.
    pub refused_elsewhere: AtomicU64,
    /// Steps by a program that the device ran as one launch.
    pub graphs: AtomicU64,
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
    /// A program of another shape is refused.
    guarded: bool,
    faults: Faults,
    /// Programs, and bytes of the buffers of a shape.
    most: (usize, usize),
}

impl Programs {
    /// No programs yet, for a decoder of these sizes.
    pub fn new(sizes: Sizes) -> Self {
        Self {
            sizes,
            kept: Vec::new(),
            seen: VecDeque::new(),
            capture: Capture::new(sizes),
            counts: Arc::default(),
            guarded: true,
            faults: Faults::default(),
            most: (PROGRAMS_MAX, BYTES_MAX),
        }
    }

    /// The same, struck by faults.
    pub fn struck_by(self, faults: Faults) -> Self {
        Self { faults, ..self }
    }

    /// Whether a program of another shape is refused from now on (`--guards`).
    pub fn guard(&mut self, guarded: bool) {
        self.guarded = guarded;
    }

    /// The same, whose buffers lie in the memory of a device.
    pub fn on_device(self) -> Self {
        Self { most: (PROGRAMS_MAX, DEVICE_BYTES_MAX), ..self }
    }

    /// The same, that keeps so many programs, each for a shape of so many bytes of buffers.
    #[cfg(test)]
    pub fn bounded(self, programs: usize, bytes: usize) -> Self {
        Self { most: (programs, bytes), ..self }
    }

    pub fn counts(&self) -> Arc<ProgramCounts> {
        self.counts.clone()
    }

    /// The program of exactly this step, taken out for it (without guards: whatever is found). `None`: the step runs eagerly; its shape is captured elsewhere if it is worth it.
    pub fn take(&mut self, batch: &StepBatch) -> Option<Program> {
        while let Some(program) = self.capture.made() {
            self.counts.captured.fetch_add(1, Relaxed);
            self.put_back(program);
        }
        let found = self.find(batch);
        let Some(at) = found.filter(|at| self.may_run(*at, batch)) else {
            self.counts.eager.fetch_add(1, Relaxed);
            self.counts.last_key.store(0, Relaxed);
            self.look_at(batch);
            return None;
        };
        self.counts.replayed.fetch_add(1, Relaxed);
        self.counts.last_key.store(self.kept[at].key.number(), Relaxed);
        if self.kept[at].key.is_of(batch) {
            return Some(self.kept.remove(at));
        }
        tracing::warn!("a step runs by a program of another shape, without guards: {}", self.both(at, batch));
        Some(self.kept[at].laid_over(batch, &self.sizes))
    }

    /// Where the program for a step is kept.
    fn find(&mut self, batch: &StepBatch) -> Option<usize> {
        let rounded = self.faults.armed(Place::Program).then(|| ProgramKey::rounded_up(batch)).flatten();
        let number = rounded.as_ref().map_or_else(|| ProgramKey::number_of(batch), ProgramKey::number);
        let find = |kept: &[Program]| kept.iter().position(|program| program.key.number() == number);
        find(&self.kept).or_else(|| {
            // engines that round up captured it before their first request
            self.put_back(Program::new(rounded?, &self.sizes));
            find(&self.kept)
        })
    }

    /// The guard against S1: a program runs steps of its own shape, whoever found it for whatever.
    fn may_run(&self, at: usize, batch: &StepBatch) -> bool {
        let may = !self.guarded || self.kept[at].key.is_of(batch);
        if !may && self.counts.refused.fetch_add(1, Relaxed) == 0 {
            tracing::warn!(
                "a program of another shape is refused, the step runs eagerly: {}; said once, counted each time",
                self.both(at, batch)
            );
        }
        may
    }

    /// What a program and a step differ in, for the log.
    fn both(&self, at: usize, batch: &StepBatch) -> String {
        let key = &self.kept[at].key;
        let (rows, requests) = (batch.seqs.iter().map(|seq| seq.tokens.len()).sum::<usize>(), batch.seqs.len());
        let (of_rows, of_requests) = (key.rows(), key.rows_of_seqs().count());
        format!("a step of {requests} requests, {rows} rows, and a program of {of_requests} requests, {of_rows} rows")
    }

    /// After its step. A program whose step went wrong is not brought back, and one that never left is kept already.
    pub fn put_back(&mut self, program: Program) {
        if self.kept.iter().any(|kept| kept.key == program.key) {
            return;
        }
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
