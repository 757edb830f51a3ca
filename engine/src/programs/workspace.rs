//! What programs work in. A decoder runs one step at a time, so its programs share one set of buffers, as long as the largest step needs:
//! with a set of its own each program held hundreds of KiB (of MiB, in a large model) between its steps, and whoever dropped one for another
//! left holes in an allocator's arena that the next one, of another shape, did not fit.

use super::lower::{BUFFERS, Buffer};
use crate::backend::Backend;

/// The buffers, and what their rows are rounded into. Each call gives what it writes the size that it needs; a buffer keeps its memory
/// when the next step is smaller. What stands in one when a step begins does not matter.
pub struct Workspace<B: Backend> {
    buffers: [B::Matrix; BUFFERS],
    scratch: B::Scratch,
}

impl<B: Backend> Default for Workspace<B> {
    fn default() -> Self {
        Self { buffers: Default::default(), scratch: B::Scratch::default() }
    }
}

impl<B: Backend> Workspace<B> {
    pub fn buffer(&self, buffer: Buffer) -> &B::Matrix {
        &self.buffers[buffer as usize]
    }

    /// Takes a buffer out, to be written beside another; [`Self::give_back`] brings it back.
    pub fn lend(&mut self, buffer: Buffer) -> B::Matrix {
        std::mem::take(&mut self.buffers[buffer as usize])
    }

    pub fn give_back(&mut self, buffer: Buffer, matrix: B::Matrix) {
        self.buffers[buffer as usize] = matrix;
    }

    /// Runs `f` on a buffer that is written, with all others to read.
    pub fn write<T>(&mut self, buffer: Buffer, f: impl FnOnce(&mut B::Matrix, &Self, &mut B::Scratch) -> T) -> T {
        let (mut taken, mut scratch) = (self.lend(buffer), std::mem::take(&mut self.scratch));
        let result = f(&mut taken, self, &mut scratch);
        self.give_back(buffer, taken);
        self.scratch = scratch;
        result
    }
}
