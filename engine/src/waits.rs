//! The one way to wait (E1): look, and look again, until time is up. Every wait of the engine's own threads goes through
//! [`Patience`]; `clippy.toml` forbids the untimed ones of the standard library. Reads the monotonic clock, and in `/proc` who was kept
//! from running.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
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
    /// The same whatever was forgiven or renewed.
    looked: Duration,
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
        let (counted, looked) = (Duration::ZERO, Duration::ZERO);
        Self { allowed, counted, looked, began: now, last: now, looks: 0, nap: NAP_MIN, rest: Rest::Naps }
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
        let passed = now.duration_since(self.last).min(LOOK_MAX);
        (self.counted, self.looked, self.last) = (self.counted + passed, self.looked + passed, now);
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

    /// Time in which this thread could look, since the beginning, whatever was forgiven of it.
    pub fn looked(&self) -> Duration {
        self.looked
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

/// What the kernel says of a thread's life so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turns {
    pub ran: Duration,
    /// It wanted the processor and did not get it; such a wait is added when it ends.
    pub held_up: Duration,
    /// It runs, or wants to.
    pub wants: bool,
}

impl Turns {
    /// Of thread `tid`; `None`: it is gone, or the kernel does not count.
    pub fn of(tid: u64) -> Option<Self> {
        let of_thread = |file: &str| std::fs::read_to_string(format!("/proc/{tid}/{file}")).ok();
        let counts = of_thread("schedstat")?;
        let mut counts = counts.split_whitespace().map_while(|count| count.parse().ok().map(Duration::from_nanos));
        let (ran, held_up) = (counts.next()?, counts.next()?);
        let wants = of_thread("stat")?.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('R'));
        Some(Self { ran, held_up, wants })
    }
}

/// How long a thread wanted the processor and did not get it, from one question to the next.
#[derive(Debug, Clone, Default)]
pub struct RunQueue {
    before: Option<Turns>,
    /// What was told of a wait that goes on.
    told: Duration,
}

impl RunQueue {
    /// Of thread `tid`, since the last question, which was so long ago; nothing at the first one, and where the kernel does not count it.
    pub fn held_up(&mut self, tid: u64, passed: Duration) -> Duration {
        self.since(Turns::of(tid), passed)
    }

    fn since(&mut self, now: Option<Turns>, passed: Duration) -> Duration {
        let Some((now, before)) = now.zip(std::mem::replace(&mut self.before, now)) else {
            self.told = Duration::ZERO;
            return Duration::ZERO;
        };
        // who could run at both looks, and neither ran nor ended a wait, has waited all the time
        if now == before && now.wants {
            self.told += passed;
            return passed;
        }
        now.held_up.saturating_sub(before.held_up).saturating_sub(std::mem::take(&mut self.told))
    }
}

/// Threads, as `/proc` knows them, each known once it runs; 0 before.
pub type Tids = Arc<[AtomicU64]>;

/// The threads that somebody waits for at the time of the question, as `/proc` knows them; 0: not known.
pub type Threads = Arc<dyn Fn() -> Vec<u64> + Send + Sync>;

/// What is known of a thread, as [`Turns::of`].
pub type TurnsOf = Arc<dyn Fn(u64) -> Option<Turns> + Send + Sync>;

/// How long several threads wanted the processor and did not get it, from one question to the next.
#[derive(Debug, Clone, Default)]
pub struct RunQueues {
    of: HashMap<u64, RunQueue>,
}

impl RunQueues {
    /// The longest of them since the last question, which was so long ago, by what `read` says of each. Who waits for all of them waits for
    /// the unluckiest.
    pub fn held_up(&mut self, tids: &[u64], passed: Duration, read: &dyn Fn(u64) -> Option<Turns>) -> Duration {
        let of = |tid: &u64| self.of.entry(*tid).or_default().since(read(*tid), passed);
        tids.iter().filter(|tid| **tid != 0).map(of).max().unwrap_or(Duration::ZERO)
    }
}

/// What a wait forgives of the time that others were held up: half of the time that has passed at most, and what is more later.
#[derive(Debug, Clone, Copy, Default)]
pub struct Pardon {
    owed: Duration,
}

impl Pardon {
    /// Of `passed` since the last question, in which others were held up for so long.
    pub fn of(&mut self, held_up: Duration, passed: Duration) -> Duration {
        self.owed += held_up;
        let given = self.owed.min(passed / 2);
        self.owed -= given;
        given
    }
}

/// The number under which `/proc` knows the calling thread.
pub fn this_tid() -> u64 {
    u64::try_from(nix::unistd::gettid().as_raw()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `ran` and `held_up` in milliseconds.
    fn turns(ran: u64, held_up: u64, wants: bool) -> Turns {
        Turns { ran: Duration::from_millis(ran), held_up: Duration::from_millis(held_up), wants }
    }

    #[test]
    fn a_thread_is_held_up_by_what_is_new_and_one_that_is_gone_by_nothing() {
        let (mut queue, look) = (RunQueue::default(), Duration::from_millis(50));
        let looks = [Some(70), Some(90), None, Some(95), Some(99)].map(|ms| ms.map(|ms| turns(ms, ms, true)));
        assert_eq!(looks.map(|now| queue.since(now, look).as_millis()), [0, 20, 0, 0, 4]);
        let counts = std::path::Path::new("/proc/self/schedstat").exists();
        let mine = Turns::of(this_tid());
        assert!(mine.is_some_and(|turns| turns.wants) == counts && Turns::of(u64::from(u32::MAX)).is_none());
    }

    #[test]
    fn a_wait_that_goes_on_counts_before_its_end_and_once() {
        let (mut queue, look) = (RunQueue::default(), Duration::from_millis(50));
        // in line for 120 ms from the first look on; then with a core; then asleep
        let looks = [(9, 5, true), (9, 5, true), (9, 5, true), (30, 125, true), (70, 125, true), (75, 125, false)];
        let told = looks.map(|(ran, held, wants)| queue.since(Some(turns(ran, held, wants)), look).as_millis());
        assert_eq!(told, [0, 50, 50, 20, 0, 0]);
        assert_eq!(queue.since(Some(turns(75, 125, false)), look), Duration::ZERO, "who sleeps is not in line");
    }

    #[test]
    fn of_several_threads_the_unluckiest_counts_and_half_of_the_time_is_forgiven_at_most() {
        let (mut queues, ms) = (RunQueues::default(), Duration::from_millis);
        // a thread that has not begun, one that is held up, one that ends and one that is new
        let looks = [[(0, 900), (7, 10), (8, 0)], [(0, 950), (7, 40), (8, 5)], [(0, 990), (7, 41), (9, 70)]];
        let told = looks.map(|look| {
            let read = |tid| look.iter().find(|(of, _)| *of == tid).map(|(_, held)| turns(*held, *held, true));
            queues.held_up(&look.map(|(tid, _)| tid), ms(50), &read).as_millis()
        });
        assert_eq!(told, [0, 30, 1]);
        let mut pardon = Pardon::default();
        let given = [(120, 100), (0, 100), (0, 100), (7, 100)].map(|(held, passed)| pardon.of(ms(held), ms(passed)));
        assert_eq!(given.map(|time| time.as_millis()), [50, 50, 20, 7]);
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
