//! The front end's copy of the last beat: two places, each under a sequence lock of atomics. The engine thread never waits for a reader, and a
//! reader gives up after a bounded number of tries (as H7 has it for the page). A writer that loses its core in the middle of a store holds
//! the place that nobody reads: `/health` must not call a loop stalled for that.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use heartbeat::page::{Beat, Phase};

const WORDS: usize = 15;
const READ_TRIES_MAX: usize = 64;

/// What was published last, and when anything owed last moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    pub beat: Beat,
    pub progress_ns: u64,
}

/// One writer, any number of readers.
#[derive(Debug, Default)]
pub struct BeatBoard {
    /// How many stores are whole; the last is in the place of its parity.
    stores: AtomicU64,
    places: [Place; 2],
}

#[derive(Debug, Default)]
struct Place {
    /// Odd while a store is under way.
    sequence: AtomicU64,
    words: [AtomicU64; WORDS],
}

impl BeatBoard {
    /// Stores a view. One thread alone may call this.
    pub fn store(&self, view: &View) {
        let next = self.stores.load(Ordering::Relaxed).wrapping_add(1);
        self.place(next).write(encode(view));
        self.stores.store(next, Ordering::Release);
    }

    /// The last view; `None` before the first, or when stores come faster than we can read for as often as we are willing to try.
    pub fn load(&self) -> Option<View> {
        (0..READ_TRIES_MAX).find_map(|_| match self.stores.load(Ordering::Acquire) {
            0 => None,
            last => self.place(last).read().and_then(|words| decode(&words)),
        })
    }

    fn place(&self, store: u64) -> &Place {
        let [even, odd] = &self.places;
        if store.is_multiple_of(2) { even } else { odd }
    }
}

impl Place {
    fn write(&self, words: [u64; WORDS]) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// `None`: another store was under way, or has begun.
    fn read(&self) -> Option<[u64; WORDS]> {
        let before = self.sequence.load(Ordering::Acquire);
        let words = std::array::from_fn(|i| self.words[i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let same = self.sequence.load(Ordering::Relaxed) == before;
        (same && before.is_multiple_of(2)).then_some(words)
    }
}

fn encode(v: &View) -> [u64; WORDS] {
    let b = &v.beat;
    [
        b.steps_completed,
        b.tokens_delivered,
        b.requests_finished,
        u64::from(b.running),
        u64::from(b.waiting),
        b.prompt_tokens_owed,
        b.phase as u64,
        u64::from(b.phase_tokens),
        b.phase_entered_ns,
        u64::from(b.lease_ms),
        b.step_started_ns,
        b.work_done,
        b.work_total,
        b.published_ns,
        v.progress_ns,
    ]
}

fn decode(w: &[u64; WORDS]) -> Option<View> {
    let beat = Beat {
        steps_completed: w[0],
        tokens_delivered: w[1],
        requests_finished: w[2],
        running: w[3] as u32,
        waiting: w[4] as u32,
        prompt_tokens_owed: w[5],
        phase: phase_of(w[6])?,
        phase_tokens: w[7] as u32,
        phase_entered_ns: w[8],
        lease_ms: w[9] as u32,
        step_started_ns: w[10],
        work_done: w[11],
        work_total: w[12],
        published_ns: w[13],
    };
    Some(View { beat, progress_ns: w[14] })
}

fn phase_of(word: u64) -> Option<Phase> {
    use Phase::*;
    [Load, Compile, Capture, WarmUp, Idle, Prefill, Decode, Sleep, Drain].into_iter().find(|p| *p as u64 == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_that_stands_in_the_middle_of_a_store_hides_nothing() {
        let board = BeatBoard::default();
        for i in 1..5 {
            let view = View { beat: Beat::of_phase(Phase::Decode, i), progress_ns: i };
            board.store(&view);
            // it loses its core, as the next store begins
            let sequence = &board.place(i + 1).sequence;
            sequence.fetch_add(1, Ordering::Relaxed);
            assert_eq!(board.load(), Some(view));
            sequence.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]
    #[test]
    fn what_is_stored_is_what_is_read_and_readers_never_see_a_mix() {
        let board = BeatBoard::default();
        assert_eq!(board.load(), None);
        std::thread::scope(|s| {
            s.spawn(|| {
                for i in 1..20_000u64 {
                    let mut beat = Beat::of_phase(Phase::Load, i);
                    (beat.steps_completed, beat.tokens_delivered) = (i, 2 * i);
                    board.store(&View { beat, progress_ns: 3 * i });
                }
            });
            for _ in 0..20_000 {
                if let Some(v) = board.load() {
                    assert_eq!(v.beat.tokens_delivered, 2 * v.beat.steps_completed);
                    assert_eq!(v.progress_ns, 3 * v.beat.steps_completed);
                }
            }
        });
        assert_eq!(board.load().unwrap().beat.steps_completed, 19_999);
    }
}
