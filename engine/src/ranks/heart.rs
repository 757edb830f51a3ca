//! A worker's heart, and a thread beside it: while a thread that the step under way waits for stands in line for a core, the step has so much
//! longer on this rank's page, as it has on the first rank's (H5). The worker's own thread computes, or stands in line itself.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::Team;
use crate::beat::Heart;
use crate::stuck::{Stuck, StuckKind};
use crate::waits::{Pardon, Patience, RunQueues, Turns, TurnsOf};

/// How often it is looked whether a step is under way, and who stands in line in one that lasts.
const LOOK: Duration = Duration::from_millis(50);
/// The heart is held for a few stores; who does not get it for so long stands still.
const HELD_MAX: Duration = Duration::from_secs(2);

/// One heart; who has it beats, one at a time (H7).
#[derive(Clone)]
pub(super) struct RankHeart(Arc<Shared>);

struct Shared {
    heart: Mutex<Heart>,
    /// The step under way whose wait in line counts; 0: none is. Changes while the heart is held.
    step: AtomicU64,
}

impl RankHeart {
    pub(super) fn new(heart: Heart) -> Self {
        Self(Arc::new(Shared { heart: Mutex::new(heart), step: AtomicU64::new(0) }))
    }

    /// Looks after the steps of this rank from now on, as long as the heart is there.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(super) fn look_after(&self, team: Arc<Team>) -> std::io::Result<()> {
        self.look_by(team, Arc::new(Turns::of))
    }

    pub(super) fn look_by(&self, team: Arc<Team>, turns: TurnsOf) -> std::io::Result<()> {
        let shared = Arc::downgrade(&self.0);
        let body = move || look_on(&shared, &team, &turns);
        thread::Builder::new().name("beat".into()).spawn(body).map(drop)
    }

    /// Beats.
    ///
    /// # Errors
    /// The other thread has the heart, and stands still.
    pub(super) fn with<T>(&self, beat: impl FnOnce(&mut Heart) -> T) -> Result<T, Stuck> {
        self.0.with(beat)
    }

    /// Beats once `step` begins, or ends (0). Whoever waits for ever (`--guards off`) forgives nobody, and begins none.
    ///
    /// # Errors
    /// As [`Self::with`].
    pub(super) fn in_step<T>(&self, step: u64, beat: impl FnOnce(&mut Heart) -> T) -> Result<T, Stuck> {
        self.with(|heart| {
            self.0.step.store(step, Ordering::Relaxed);
            beat(heart)
        })
    }
}

impl Shared {
    fn with<T>(&self, beat: impl FnOnce(&mut Heart) -> T) -> Result<T, Stuck> {
        let mut patience = Patience::new(Some(HELD_MAX));
        loop {
            match self.heart.try_lock() {
                Ok(mut heart) => return Ok(beat(&mut heart)),
                Err(TryLockError::Poisoned(heart)) => return Ok(beat(&mut heart.into_inner())),
                Err(TryLockError::WouldBlock) if patience.turn() => (),
                Err(TryLockError::WouldBlock) => {
                    let waited = patience.waited();
                    let text = format!("a rank could not write its page for {} ms", waited.as_millis());
                    return Err(Stuck { kind: StuckKind::Loop, text, waited });
                }
            }
        }
    }

    /// `step` has so much longer, if it is still under way.
    fn held_up(&self, step: u64, time: Duration) -> Result<(), Stuck> {
        self.with(|heart| {
            if self.step.load(Ordering::Relaxed) == step {
                heart.held_up(time);
            }
        })
    }
}

/// The thread beside the heart.
fn look_on(shared: &Weak<Shared>, team: &Team, turns: &TurnsOf) {
    let all: Vec<usize> = (0..team.world()).collect();
    let (mut line, mut last) = (Line::default(), Instant::now());
    loop {
        thread::sleep(LOOK);
        let Some(shared) = shared.upgrade() else { return };
        let passed = std::mem::replace(&mut last, Instant::now()).elapsed();
        let step = shared.step.load(Ordering::Relaxed);
        let told = line.look(step, passed, |queues| queues.held_up(&team.threads_of(&all), passed, turns.as_ref()));
        // whoever cannot write says so itself
        if told > Duration::ZERO && shared.held_up(step, told).is_err() {
            return;
        }
    }
}

/// What was seen of threads in line in the step under way.
#[derive(Default)]
struct Line {
    step: u64,
    run_queues: RunQueues,
    told: Pardon,
}

impl Line {
    /// How much longer the step has, so long after the last look. A step that ends before the next one costs no look at its threads.
    fn look(&mut self, step: u64, passed: Duration, held_up: impl FnOnce(&mut RunQueues) -> Duration) -> Duration {
        if step == 0 || step != self.step {
            *self = Self { step, ..Self::default() };
            return Duration::ZERO;
        }
        let held_up = held_up(&mut self.run_queues);
        self.told.of(held_up, passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_lasts_is_looked_at_from_its_second_look_on_and_begins_anew_with_each() {
        let (mut line, mut asked) = (Line::default(), 0);
        let looks = [(0, 30), (0, 30), (1, 30), (1, 30), (1, 10), (2, 40), (2, 40), (0, 40), (2, 40)];
        let told = looks.map(|(step, ms)| {
            let held_up = |_: &mut RunQueues| {
                asked += 1;
                Duration::from_millis(ms)
            };
            line.look(step, LOOK, held_up).as_millis()
        });
        // at most half of the time that has passed, and what is more later
        assert_eq!((told, asked), ([0, 0, 0, 25, 15, 0, 25, 0, 0], 3));
    }

    #[test]
    fn what_was_seen_in_one_step_is_not_given_to_the_next() {
        let heart = RankHeart::new(Heart::new(None, Arc::default()));
        let lease = || heart.with(|heart| heart.lease()).unwrap();
        let (before, late) = (lease(), Duration::from_millis(70));
        heart.in_step(5, |_| ()).unwrap();
        heart.0.held_up(4, late).unwrap();
        assert_eq!(lease(), before);
        heart.0.held_up(5, late).unwrap();
        assert_eq!(lease(), before + late);
    }

    #[test]
    fn who_does_not_get_the_heart_says_so() {
        let heart = RankHeart::new(Heart::new(None, Arc::default()));
        let held = heart.0.heart.try_lock().unwrap();
        let stuck = heart.with(|_| ()).unwrap_err();
        assert!(stuck.kind == StuckKind::Loop && stuck.waited >= HELD_MAX, "{stuck}");
        drop(held);
        assert!(heart.with(|_| ()).is_ok());
    }
}
