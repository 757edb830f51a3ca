//! Where things lie in the ranks' shared memory: a head, a block for each rank, two slots for the plan, and two slots of data a rank.
//! Typed access to the words, nothing more. One writer a block; the first rank writes head and plan.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::blame;
use crate::raw::shared::{SharedMap, shared_file};
use crate::stuck::StuckKind;

/// Values of one chunk of a collective.
pub const CHUNK_WORDS: usize = 1 << 18;
/// Bytes that a plan may have at least, and at most: memory that nothing is written to is not taken, but who reads 256 MiB a step is slow.
const PLAN_BYTES_MIN: usize = 4 << 20;
pub const PLAN_BYTES_MAX: usize = 256 << 20;

const MAGIC: u64 = u64::from_le_bytes(*b"TBRANKS1");
const HEAD_WORDS: usize = 16;
const RANK_WORDS: usize = 96;
const HELPERS_AT: usize = 16;
const TEXT_AT: usize = 32;
/// Threads of a rank, beside the one that takes part in collectives, that the others can be told of.
pub const HELPERS_MAX: usize = TEXT_AT - HELPERS_AT;
const TEXT_BYTES_MAX: usize = (RANK_WORDS - TEXT_AT) * 8;

/// Words of the head.
const MAGIC_AT: usize = 0;
const WORLD_AT: usize = 1;
const STEP_AT: usize = 2;
const STOP_AT: usize = 3;

/// A word of a rank's block.
#[derive(Debug, Clone, Copy)]
#[repr(usize)]
pub enum Word {
    Pid = 0,
    /// 1: loaded, and ready for steps.
    Ready = 1,
    /// Collectives that this rank has brought its values to.
    Arrived = 2,
    /// Values brought to the last even, and to the last odd collective.
    LenEven = 3,
    LenOdd = 4,
    /// The step that this rank is about to launch.
    Agreed = 5,
    /// What the last even, and the last odd step is: one rank may be a step ahead of another that still reads.
    HashEven = 6,
    HashOdd = 11,
    /// The thread that takes part in collectives.
    Tid = 12,
    /// The last step that it could not compute its part of.
    Spoiled = 13,
    /// Steps that it refused a program of another shape for.
    Refused = 14,
    /// Whom it blames, if it has given up because of others.
    Blames = 15,
    /// 1: it has given up, and says why.
    Failed = 7,
    TextLen = 8,
    /// Progress of its start-up, in bytes.
    Done = 9,
    Total = 10,
}

/// The shared memory of all ranks.
#[derive(Debug)]
pub struct Layout {
    map: SharedMap,
    world: usize,
    /// Words of a plan's slot: its length, and its bytes.
    plan_words: usize,
}

impl Layout {
    /// Memory for `world` ranks, with room for plans of `plan_bytes`; the file is what the others map.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(world: usize, plan_bytes: usize) -> std::io::Result<(Self, File)> {
        let plan_words = 1 + plan_bytes.clamp(PLAN_BYTES_MIN, PLAN_BYTES_MAX).div_ceil(8);
        let control_words = before_plans(world) + 2 * plan_words;
        let file = shared_file(control_words, data_words(world))?;
        let layout = Self { map: SharedMap::new(&file, control_words)?, world, plan_words };
        layout.map.control()[WORLD_AT].store(world as u64, Ordering::Relaxed);
        layout.map.control()[MAGIC_AT].store(MAGIC, Ordering::Release);
        Ok((layout, file))
    }

    /// The memory that another rank made.
    ///
    /// # Errors
    /// When it is not the ranks' memory, or of another number of ranks.
    pub fn join(file: &File, world: usize) -> std::io::Result<Self> {
        let refused = || std::io::Error::other(format!("this is not the memory of {world} ranks"));
        // what is neither data nor blocks are plans; the length is sealed
        let words = usize::try_from(file.metadata()?.len() / 8).unwrap_or(0);
        let plans = words.checked_sub(data_words(world) / 2 + before_plans(world)).ok_or_else(refused)?;
        let plan_words = plans / 2;
        let layout = Self { map: SharedMap::new(file, before_plans(world) + 2 * plan_words)?, world, plan_words };
        let control = layout.map.control();
        let is = (control[MAGIC_AT].load(Ordering::Acquire), control[WORLD_AT].load(Ordering::Relaxed));
        if is != (MAGIC, world as u64) || plan_words == 0 || layout.map.data().len() < data_words(world) {
            return Err(refused());
        }
        Ok(layout)
    }

    pub fn world(&self) -> usize {
        self.world
    }

    /// One word of a rank.
    pub fn of(&self, rank: usize, word: Word) -> &AtomicU64 {
        &self.map.control()[HEAD_WORDS + rank * RANK_WORDS + word as usize]
    }

    /// The threads that compute parts of a rank's steps beside the one that takes part in collectives, as `/proc` knows them; 0: none.
    pub fn helpers(&self, rank: usize) -> &[AtomicU64] {
        let at = HEAD_WORDS + rank * RANK_WORDS;
        &self.map.control()[at + HELPERS_AT..at + TEXT_AT]
    }

    /// The last step that was broadcast.
    pub fn step(&self) -> &AtomicU64 {
        &self.map.control()[STEP_AT]
    }

    /// Not 0: every rank is to end.
    pub fn stop(&self) -> &AtomicU64 {
        &self.map.control()[STOP_AT]
    }

    /// A rank's values of a collective.
    pub fn data(&self, rank: usize, collective: u64) -> &[AtomicU32] {
        let slot = (rank * 2 + usize::from(!collective.is_multiple_of(2))) * CHUNK_WORDS;
        &self.map.data()[slot..slot + CHUNK_WORDS]
    }

    /// Writes the plan of `step`. False: it is too long.
    pub fn write_plan(&self, step: u64, bytes: &[u8]) -> bool {
        if bytes.len() > self.plan_bytes() {
            return false;
        }
        let words = &self.map.control()[self.plan_slot(step)];
        words[0].store(bytes.len() as u64, Ordering::Relaxed);
        store_bytes(&words[1..], bytes);
        true
    }

    /// The plan of `step`; believed only after all of it was read.
    pub fn read_plan(&self, step: u64) -> Vec<u8> {
        let words = &self.map.control()[self.plan_slot(step)];
        let len = usize::try_from(words[0].load(Ordering::Relaxed)).unwrap_or(usize::MAX).min(self.plan_bytes());
        load_bytes(&words[1..], len)
    }

    fn plan_bytes(&self) -> usize {
        (self.plan_words - 1) * 8
    }

    /// Says why `rank` gives up, because of whom (`None`: of itself), and that it does.
    pub fn write_failure(&self, rank: usize, text: &str, kind: Option<&StuckKind>) {
        self.write_text(rank, text);
        self.of(rank, Word::Blames).store(kind.map_or(0, blame::word_of), Ordering::Relaxed);
        self.of(rank, Word::Failed).store(1, Ordering::Release);
    }

    /// Why `rank` gave up, if it did, and what that is if others are at fault.
    pub fn failure(&self, rank: usize) -> Option<(String, Option<StuckKind>)> {
        if self.of(rank, Word::Failed).load(Ordering::Acquire) == 0 {
            return None;
        }
        Some((self.text(rank), blame::kind_of(self.of(rank, Word::Blames).load(Ordering::Relaxed), self.world)))
    }

    /// Says that `rank` could not compute its part of `step`, and why.
    pub fn write_spoiled(&self, rank: usize, step: u64, text: &str) {
        self.write_text(rank, text);
        self.of(rank, Word::Spoiled).store(step, Ordering::Release);
    }

    /// Why `rank` could not compute its part of `step`, if it could not. No step is 0.
    pub fn spoiled(&self, rank: usize, step: u64) -> Option<String> {
        let spoiled = step > 0 && self.of(rank, Word::Spoiled).load(Ordering::Acquire) == step;
        spoiled.then(|| self.text(rank))
    }

    fn write_text(&self, rank: usize, text: &str) {
        let mut len = text.len().min(TEXT_BYTES_MAX);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        store_bytes(self.text_words(rank), &text.as_bytes()[..len]);
        self.of(rank, Word::TextLen).store(len as u64, Ordering::Relaxed);
    }

    fn text(&self, rank: usize) -> String {
        let len = usize::try_from(self.of(rank, Word::TextLen).load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        String::from_utf8_lossy(&load_bytes(self.text_words(rank), len.min(TEXT_BYTES_MAX))).into_owned()
    }

    fn text_words(&self, rank: usize) -> &[AtomicU64] {
        let at = HEAD_WORDS + rank * RANK_WORDS;
        &self.map.control()[at + TEXT_AT..at + RANK_WORDS]
    }

    fn plan_slot(&self, step: u64) -> Range<usize> {
        let at = before_plans(self.world) + usize::from(!step.is_multiple_of(2)) * self.plan_words;
        at..at + self.plan_words
    }
}

/// Words of control before the plans.
fn before_plans(world: usize) -> usize {
    HEAD_WORDS + world * RANK_WORDS
}

fn data_words(world: usize) -> usize {
    world * 2 * CHUNK_WORDS
}

fn store_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks(8)) {
        let mut value = [0; 8];
        value[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(value), Ordering::Relaxed);
    }
}

fn load_bytes(words: &[AtomicU64], len: usize) -> Vec<u8> {
    let used = words.iter().take(len.div_ceil(8));
    let mut bytes: Vec<u8> = used.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_rank_writes_another_reads() {
        let (a, file) = Layout::create(3, 0).unwrap();
        let b = Layout::join(&file, 3).unwrap();
        let plan: Vec<u8> = (0..1001).map(|i| i as u8).collect();
        assert!(a.write_plan(4, &plan) && a.write_plan(5, b"odd"));
        assert_eq!((b.read_plan(4), b.read_plan(5)), (plan, b"odd".to_vec()));
        assert!(!a.write_plan(6, &vec![0; PLAN_BYTES_MIN + 1]));
        assert_eq!(b.failure(2), None);
        let long = "é".repeat(TEXT_BYTES_MAX);
        a.write_failure(2, &long, None);
        let (words, blamed) = b.failure(2).unwrap();
        assert!(long.starts_with(&words) && blamed.is_none());
        a.write_failure(2, "rank 1 is gone", Some(&StuckKind::RankGone { rank: 1 }));
        assert_eq!(b.failure(2), Some(("rank 1 is gone".to_owned(), Some(StuckKind::RankGone { rank: 1 }))));
        assert_eq!((b.spoiled(1, 0), b.spoiled(1, 4)), (None, None));
        a.write_spoiled(1, 4, "a panic");
        assert_eq!((b.spoiled(1, 4).as_deref(), b.spoiled(1, 5)), (Some("a panic"), None));
        a.data(2, 7)[CHUNK_WORDS - 1].store(9, Ordering::Relaxed);
        assert_eq!(b.data(2, 7)[CHUNK_WORDS - 1].load(Ordering::Relaxed), 9);
        assert_eq!(b.data(2, 6)[CHUNK_WORDS - 1].load(Ordering::Relaxed), 0);
        assert!(Layout::join(&file, 2).is_err() && Layout::join(&file, 4).is_err());
    }

    #[test]
    fn a_plan_as_long_as_was_asked_for_has_room_beside_all_else() {
        let len = 9 << 20;
        let (a, file) = Layout::create(2, len - 3).unwrap();
        let b = Layout::join(&file, 2).unwrap();
        a.data(0, 0)[0].store(5, Ordering::Relaxed);
        a.write_failure(1, "words", None);
        assert!(
            a.write_plan(2, &vec![2; len]) && a.write_plan(3, &vec![3; len]) && !a.write_plan(4, &vec![4; len + 1])
        );
        assert!(b.read_plan(2) == vec![2; len] && b.read_plan(3) == vec![3; len]);
        assert_eq!(b.data(0, 0)[0].load(Ordering::Relaxed), 5);
        assert_eq!(b.failure(1), Some(("words".to_owned(), None)));
        assert!(Layout::join(&shared_file(1, 0).unwrap(), 1).is_err());
    }
}
