//! Which part of the pinned memory the next bytes for the device go to: two halves, one of which is filled while the device copies the
//! other. Pure: the caller knows when a half is done.

use std::ops::Range;

/// Pieces begin on multiples of this.
const ALIGN: usize = 16;

/// Two halves of `half_bytes` each.
#[derive(Debug)]
pub struct Halves {
    half_bytes: usize,
    active: usize,
    used_bytes: usize,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Room {
    /// So many bytes go here; the rest of them must ask again.
    Here(Range<usize>),
    /// This half is full: mark it, wait until the device has copied the other, and turn.
    Full,
}

impl Halves {
    pub fn new(half_bytes: usize) -> Self {
        Self { half_bytes: half_bytes.next_multiple_of(ALIGN), active: 0, used_bytes: 0 }
    }

    /// Bytes of both.
    pub fn len_bytes(&self) -> usize {
        2 * self.half_bytes
    }

    /// The half that is filled, 0 or 1.
    pub fn active(&self) -> usize {
        self.active
    }

    /// Room for `wanted` bytes, or for as many as there is.
    pub fn room(&mut self, wanted: usize) -> Room {
        let len = wanted.min(self.half_bytes - self.used_bytes);
        if len == 0 && wanted > 0 {
            return Room::Full;
        }
        let start = self.active * self.half_bytes + self.used_bytes;
        self.used_bytes += len.next_multiple_of(ALIGN).min(self.half_bytes - self.used_bytes);
        Room::Here(start..start + len)
    }

    /// The other half is filled from now on.
    pub fn turn(&mut self) {
        (self.active, self.used_bytes) = (1 - self.active, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_is_filled_then_the_other_and_no_byte_twice() {
        let mut halves = Halves::new(40);
        assert_eq!(halves.len_bytes(), 96);
        assert_eq!((halves.room(5), halves.room(20)), (Room::Here(0..5), Room::Here(16..36)));
        assert_eq!(halves.room(100), Room::Full);
        halves.turn();
        assert_eq!((halves.active(), halves.room(100), halves.room(1)), (1, Room::Here(48..96), Room::Full));
        halves.turn();
        assert_eq!((halves.active(), halves.room(0), halves.room(48)), (0, Room::Here(0..0), Room::Here(0..48)));
    }
}
