//! Model check of the seqlock: loom runs every interleaving, and every stale value that the memory order allows.
//!
//! Each mutant breaks one thing through the traits, with the code under test unchanged; a model that did not catch it
//! would prove nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};

use super::{Sink, Slot, Source, read, write};

/// What is left out of the protocol.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    NoOddMark,
    NoEvenCheck,
    NoSecondLook,
    NoReleaseFence,
    NoAcquireFence,
}

/// Sequence and two payload words; a consistent payload is `[n, n + 100]`.
struct Memory {
    words: [AtomicU64; 3],
    mutant: Mutant,
}

impl Sink for Memory {
    fn store_relaxed(&self, word: usize, value: u64) {
        if self.mutant != Mutant::NoOddMark || word > 0 {
            self.words[word].store(value, Ordering::Relaxed);
        }
    }

    fn store_release(&self, word: usize, value: u64) {
        self.words[word].store(value, Ordering::Release);
    }

    fn fence_release(&self) {
        if self.mutant != Mutant::NoReleaseFence {
            fence(Ordering::Release);
        }
    }
}

/// The reader's side, which remembers its first look for [`Mutant::NoSecondLook`].
struct View<'a> {
    memory: &'a Memory,
    first: Option<u64>,
}

impl Source for View<'_> {
    type Payload = [u64; 2];
    type Error = ();

    fn seq(&mut self) -> Result<u64, ()> {
        let seen = self.memory.words[0].load(Ordering::Relaxed);
        Ok(match (self.memory.mutant, self.first.take()) {
            (Mutant::NoEvenCheck, _) => seen.next_multiple_of(2),
            (Mutant::NoSecondLook, Some(first)) => first,
            (Mutant::NoSecondLook, None) => *self.first.insert(seen),
            _ => seen,
        })
    }

    // Higher word first: no order within the payload is promised.
    fn payload(&mut self) -> Result<[u64; 2], ()> {
        let high = self.memory.words[2].load(Ordering::Relaxed);
        Ok([self.memory.words[1].load(Ordering::Relaxed), high])
    }

    fn fence_acquire(&self) {
        if self.memory.mutant != Mutant::NoAcquireFence {
            fence(Ordering::Acquire);
        }
    }
}

/// Runs two writes against one try of a reader in every possible way; panics at the first torn value believed.
/// One try is enough: a second one carries nothing over from the first, it only begins later.
fn check(mutant: Mutant) {
    loom::model(move || {
        let words = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];
        let memory = Arc::new(Memory { words, mutant });
        let writer = {
            let memory = memory.clone();
            loom::thread::spawn(move || {
                write(&*memory, 2, &[1, 101]);
                write(&*memory, 4, &[2, 102]);
            })
        };
        if let Ok(Slot::Stable([low, high])) = read(&mut View { memory: &memory, first: None }, 1) {
            assert!(low > 0 && high == low + 100, "believed a torn value: {low} {high}");
        }
        writer.join().unwrap();
        let last = read(&mut View { memory: &memory, first: None }, 1);
        assert_eq!(last, Ok(Slot::Stable([2, 102])), "a writer at rest must be readable at the first try");
    });
}

#[test]
fn no_interleaving_makes_a_reader_believe_a_torn_value() {
    check(Mutant::None);
}

#[test]
fn each_part_of_the_protocol_is_needed() {
    use Mutant::{NoAcquireFence, NoEvenCheck, NoOddMark, NoReleaseFence, NoSecondLook};
    for (mutant, name) in [
        (NoOddMark, "no odd mark"),
        (NoEvenCheck, "no even check"),
        (NoSecondLook, "no second look"),
        (NoReleaseFence, "no release fence"),
        (NoAcquireFence, "no acquire fence"),
    ] {
        let caught = catch_unwind(AssertUnwindSafe(|| check(mutant)));
        let Err(panic) = caught else { panic!("the model did not catch: {name}") };
        let said = panic.downcast_ref::<String>().map_or("", String::as_str);
        assert!(said.contains("believed a torn value"), "{name} was caught for another reason: {said}");
    }
}

/// A fixed answer, to count tries.
struct Script {
    seqs: Vec<u64>,
    looks: u32,
}

impl Source for Script {
    type Payload = ();
    type Error = ();

    fn seq(&mut self) -> Result<u64, ()> {
        let seq = self.seqs[(self.looks as usize).min(self.seqs.len() - 1)];
        self.looks += 1;
        Ok(seq)
    }

    fn payload(&mut self) -> Result<(), ()> {
        Ok(())
    }

    fn fence_acquire(&self) {}
}

#[test]
fn a_reader_gives_up_after_its_tries() {
    let mut dead = Script { seqs: vec![7], looks: 0 };
    assert_eq!(read(&mut dead, 64), Ok(Slot::Torn));
    assert_eq!(dead.looks, 128, "two looks a try");
    let mut late = Script { seqs: vec![3, 4, 4, 6, 6, 6], looks: 0 };
    assert_eq!(read(&mut late, 3), Ok(Slot::Stable(())));
    assert_eq!(read(&mut Script { seqs: vec![0], looks: 0 }, 1), Ok(Slot::Empty));
}
