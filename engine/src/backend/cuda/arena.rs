//! Who has which part of the device's memory: a budget that is asked for once and never exceeded, given out in pieces. Pure. What
//! does not fit is an answer, so that it can become admission control. A device's own allocator would wait for its kernels.

use std::collections::BTreeMap;

/// Every piece begins on a multiple of this: what vector loads and copies want.
pub const ALIGN: u64 = 256;

/// Free and taken pieces of one budget.
#[derive(Debug)]
pub struct Arena {
    budget_bytes: u64,
    /// Begin and length of what is free; neighbours are one.
    free: BTreeMap<u64, u64>,
    taken: BTreeMap<u64, u64>,
}

impl Arena {
    /// All of `budget_bytes` is free.
    pub fn new(budget_bytes: u64) -> Self {
        let budget_bytes = budget_bytes / ALIGN * ALIGN;
        let free = (budget_bytes > 0).then_some((0, budget_bytes)).into_iter().collect();
        Self { budget_bytes, free, taken: BTreeMap::new() }
    }

    /// Where a piece of `len_bytes` begins: the first that fits, so that equal histories give equal places. `None`: none fits.
    pub fn take(&mut self, len_bytes: u64) -> Option<u64> {
        let len = len_bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let (at, room) = self.free.iter().find(|(_, room)| **room >= len).map(|(at, room)| (*at, *room))?;
        self.free.remove(&at);
        if room > len {
            self.free.insert(at + len, room - len);
        }
        self.taken.insert(at, len);
        Some(at)
    }

    /// Gives back the piece that begins at `at`; nothing where none does.
    pub fn give(&mut self, at: u64) {
        let Some(mut len) = self.taken.remove(&at) else { return };
        let mut start = at;
        if let Some(after) = self.free.remove(&(at + len)) {
            len += after;
        }
        if let Some((before, room)) = self.free.range(..at).next_back().map(|(at, room)| (*at, *room))
            && before + room == at
        {
            self.free.remove(&before);
            (start, len) = (before, room + len);
        }
        self.free.insert(start, len);
    }

    /// All of it.
    pub fn budget_bytes(&self) -> u64 {
        self.budget_bytes
    }

    /// What nobody has, in however many pieces.
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_budget_is_hard_and_what_comes_back_is_whole_again() {
        let mut arena = Arena::new(1000);
        assert_eq!((arena.budget_bytes(), arena.free_bytes()), (768, 768));
        let pieces: Vec<_> = (0..3).map(|_| arena.take(1).unwrap()).collect();
        assert_eq!((pieces.as_slice(), arena.take(1), arena.free_bytes()), (&[0, 256, 512][..], None, 0));
        arena.give(0);
        arena.give(512);
        assert_eq!((arena.free_bytes(), arena.take(257)), (512, None), "two pieces are not one");
        arena.give(256);
        assert_eq!(arena.take(768), Some(0), "neighbours are joined");
        arena.give(7);
        assert_eq!(arena.take(u64::MAX), None);
    }

    proptest! {
        #[test]
        fn pieces_never_overlap_and_none_is_lost(lens in proptest::collection::vec((1u64..5000, any::<bool>()), 1..60)) {
            let mut arena = Arena::new(64 << 10);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for (len, gives) in lens {
                if gives && !held.is_empty() {
                    arena.give(held.swap_remove(len as usize % held.len()).0);
                } else if let Some(at) = arena.take(len) {
                    let end = at + len.next_multiple_of(ALIGN);
                    prop_assert!(end <= arena.budget_bytes() && at % ALIGN == 0);
                    prop_assert!(held.iter().all(|(other, end_of_other)| *other >= end || *end_of_other <= at));
                    held.push((at, end));
                }
                let taken: u64 = held.iter().map(|(at, end)| end - at).sum();
                prop_assert_eq!(taken + arena.free_bytes(), arena.budget_bytes());
            }
        }
    }
}
