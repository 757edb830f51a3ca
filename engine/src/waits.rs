//! The one way to wait (E1): look, and look again, until time is up. Every wait of the engine's own threads goes through
//! [`Patience`]; `clippy.toml` forbids the untimed ones of the standard library. Reads the monotonic clock, and in `/proc` who was kept
//! from running.

use std::thread;
use std::time::{Duration, Instant};

/// More than this between two looks is a machine that did not run us; it did not run the other side either, so it is not counted.
const LOOK_MAX: Duration = Duration::from_millis(20);
/// Looks before the processor is given away, and before the thread sleeps.
const SPINS: u32 = 200;
const YIELDS: u32 = 600;
/// First and longest sleep between two looks.
const NAP_MIN: Duration = Duration::from_micros(50);
const NAP_MAX: Duration = Duration::from_millis(1);
/// Who dozes has been at rest for so long, and then sleeps up to so long between two looks.
const DOZE_AFTER: Duration = Duration::from_secs(1);
const DOZE_MAX: Duration = Duration::from_millis(5);

/// A wait under way.
#[derive(Debug)]
pub struct Patience {
    /// None: for ever, as the engines of the field wait (`--guards off`).
    allowed: Option<Duration>,
    counted: Duration,
    began: Instant,
    last: Instant,
    looks: u32,
    nap: Duration,
    rest: Rest,
}

/// What a wait does between two looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rest {
    /// Spins, then yields, then sleeps longer and longer: whoever ends the wait wakes it.
    Naps,
    /// The same, and more deeply after a while of rest: what ends the wait may be late by a deep nap, and many wait for nothing.
    Dozes,
    /// Spins, then yields: nobody wakes it, and what comes late costs.
    Yields,
    Spins,
}

impl Rest {
    /// The longest sleep of one who has waited so long.
    fn nap_max(self, waited: Duration) -> Duration {
        if self == Self::Dozes && waited >= DOZE_AFTER { DOZE_MAX } else { NAP_MAX }
    }
}

impl Patience {
    /// A wait that may take `allowed`; `None`: for ever.
    pub fn new(allowed: Option<Duration>) -> Self {
        let now = Instant::now();
        Self { allowed, counted: Duration::ZERO, began: now, last: now, looks: 0, nap: NAP_MIN, rest: Rest::Naps }
    }

    /// As [`Self::new`], with ever fewer looks where nothing has come for a while.
    pub fn dozing(allowed: Option<Duration>) -> Self {
        Self { rest: Rest::Dozes, ..Self::new(allowed) }
    }

    /// As [`Self::new`], burning its processor all the while, as a blocking device synchronisation does.
    pub fn spinning(allowed: Option<Duration>) -> Self {
        Self { rest: Rest::Spins, ..Self::new(allowed) }
    }

    /// As [`Self::new`], without sleep: for a device that wakes nobody, where half a millisecond of sleep would be a tax on every step.
    pub fn yielding(allowed: Option<Duration>) -> Self {
        Self { rest: Rest::Yields, ..Self::new(allowed) }
    }

    /// Lets a little time pass. False: time is up.
    pub fn turn(&mut self) -> bool {
        self.rest();
        let now = Instant::now();
        self.counted += now.duration_since(self.last).min(LOOK_MAX);
        self.last = now;
        self.allowed.is_none_or(|allowed| self.counted < allowed)
    }

    /// So much of the time that counts was the machine's fault.
    pub fn forgive(&mut self, held_up: Duration) {
        self.counted = self.counted.saturating_sub(held_up);
    }

    /// The other side showed life: its time begins anew.
    pub fn renew(&mut self) {
        self.counted = Duration::ZERO;
    }

    /// Time that counts, since the beginning or the last sign of life.
    pub fn counted(&self) -> Duration {
        self.counted
    }

    /// Time on the wall since the beginning.
    pub fn waited(&self) -> Duration {
        self.began.elapsed()
    }

    fn rest(&mut self) {
        self.looks = self.looks.saturating_add(1);
        if self.rest == Rest::Spins || self.looks <= SPINS {
            std::hint::spin_loop();
        } else if self.rest == Rest::Yields || self.looks <= YIELDS {
            thread::yield_now();
        } else {
            // parked, not asleep: whoever ends the wait may say so
            thread::park_timeout(self.nap);
            self.nap = (self.nap * 2).min(self.rest.nap_max(self.waited()));
        }
    }
}

/// How long a thread wanted the processor and did not get it, from one question to the next.
#[derive(Debug, Clone, Default)]
pub struct RunQueue {
    before: Option<Duration>,
}

impl RunQueue {
    /// Of thread `tid`, since the last question; nothing at the first one, and where the kernel does not count it.
    pub fn held_up(&mut self, tid: u64) -> Duration {
        self.since(held_up(tid))
    }

    fn since(&mut self, now: Option<Duration>) -> Duration {
        let before = std::mem::replace(&mut self.before, now);
        now.zip(before).map_or(Duration::ZERO, |(now, before)| now.saturating_sub(before))
    }
}

/// The same since the thread began (`/proc/<tid>/schedstat`).
fn held_up(tid: u64) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{tid}/schedstat")).ok()?;
    text.split_whitespace().nth(1)?.parse().ok().map(Duration::from_nanos)
}

/// The number under which `/proc` knows the calling thread.
pub fn this_tid() -> u64 {
    u64::try_from(nix::unistd::gettid().as_raw()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_held_up_by_what_is_new_and_one_that_is_gone_by_nothing() {
        let mut queue = RunQueue::default();
        let told = [Some(70), Some(90), None, Some(95), Some(99)].map(|ms| queue.since(ms.map(Duration::from_millis)));
        assert_eq!(told.map(|time| time.as_millis()), [0, 20, 0, 0, 4]);
        let counts = std::path::Path::new("/proc/self/schedstat").exists();
        assert!(held_up(this_tid()).is_some() == counts && held_up(u64::from(u32::MAX)).is_none());
    }

    #[test]
    fn time_is_up_when_it_is_and_life_renews_it() {
        let mut patience = Patience::new(Some(Duration::from_millis(5)));
        while patience.turn() {}
        assert!(patience.counted() >= Duration::from_millis(5));
        patience.renew();
        assert_eq!(patience.counted(), Duration::ZERO, "it counts from the sign of life");
    }

    #[test]
    fn a_pause_of_this_thread_is_hardly_counted() {
        let mut patience = Patience::new(Some(Duration::from_millis(100)));
        thread::sleep(Duration::from_millis(150));
        assert!(patience.turn() && patience.counted() <= LOOK_MAX);
        assert!(patience.waited() >= Duration::from_millis(150));
    }

    #[test]
    fn only_who_dozes_sleeps_deeper_and_only_after_a_while() {
        let longest = |rest: Rest| [0, 999, 1000].map(|ms| rest.nap_max(Duration::from_millis(ms)).as_millis());
        assert_eq!((longest(Rest::Naps), longest(Rest::Dozes)), ([1, 1, 1], [1, 1, 5]));
    }

    #[test]
    fn without_a_bound_it_goes_on() {
        let mut patience = Patience::spinning(None);
        assert!((0..10_000).all(|_| patience.turn()));
    }
}
