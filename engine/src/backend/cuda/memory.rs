//! Pieces of the device's memory as values that are owned: a piece goes back when it is dropped, whichever thread drops it.

use std::sync::mpsc::Sender;

use super::driver::Address;

/// A piece of the device's memory.
#[derive(Debug)]
pub struct Slice {
    at: Address,
    len_bytes: u64,
    /// Where it lies in the arena.
    offset: u64,
    back: Sender<u64>,
}

impl Slice {
    pub(super) fn new((base, offset): (Address, u64), len_bytes: u64, back: Sender<u64>) -> Self {
        Self { at: base.plus(offset), len_bytes, offset, back }
    }

    pub fn at(&self) -> Address {
        self.at
    }

    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        // never waits; where the device is gone nobody wants it
        let _ = self.back.send(self.offset);
    }
}

/// A row-major f32 matrix on the device. It gets its memory when it is first written.
#[derive(Debug, Default)]
pub struct Matrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) place: Option<Slice>,
}

impl Matrix {
    /// Where its values lie; nowhere where it has none.
    pub(super) fn at(&self) -> Address {
        self.place.as_ref().map_or(Address::default(), Slice::at)
    }

    pub(super) fn len(&self) -> usize {
        self.rows * self.cols
    }
}
