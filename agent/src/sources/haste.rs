//! How fast the sources in the background go: a word from the detector, heard by their tasks and threads at once.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::ticker::Timer;

/// The time between two rounds of a source.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    pub calm: Duration,
    pub hurried: Duration,
}

impl Rounds {
    fn now(self, hurried: bool) -> Duration {
        if hurried { self.hurried } else { self.calm }
    }
}

/// Whether to hurry. Clones are one.
#[derive(Debug, Clone)]
pub struct Haste(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tasks: watch::Sender<bool>,
    threads: (Mutex<Bell>, Condvar),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bell {
    hurried: bool,
    roused: u64,
}

impl Default for Haste {
    /// Hurried, as long as nobody says otherwise.
    fn default() -> Self {
        let bell = Bell { hurried: true, roused: 0 };
        Self(Arc::new(Shared { tasks: watch::Sender::new(true), threads: (Mutex::new(bell), Condvar::new()) }))
    }
}

impl Haste {
    /// Hurry, or take your time.
    pub fn set(&self, hurried: bool) {
        let changed = self.0.tasks.send_if_modified(|before| std::mem::replace(before, hurried) != hurried);
        if changed {
            let (flag, bell) = &self.0.threads;
            flag.lock().unwrap_or_else(PoisonError::into_inner).hurried = hurried;
            bell.notify_all();
        }
    }

    /// One round now of each thread that dozes; one that is in a round already does not hear it.
    pub fn rouse(&self) {
        let (flag, bell) = &self.0.threads;
        flag.lock().unwrap_or_else(PoisonError::into_inner).roused += 1;
        bell.notify_all();
    }

    /// For tasks: returns when the next round is due, counted from `began`; sooner where haste comes meanwhile.
    pub async fn rest(&self, began: Instant, rounds: Rounds, timer: &mut Timer) {
        let mut changes = self.0.tasks.subscribe();
        loop {
            let due = began + rounds.now(*changes.borrow_and_update());
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            tokio::select! {
                () = timer.wait(left) => {}
                _ = changes.changed() => {}
            }
        }
    }

    /// For threads: waits for a round's time, or until the haste changes or somebody rouses them.
    pub fn doze(&self, rounds: Rounds) {
        let (flag, bell) = &self.0.threads;
        let guard = flag.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *guard;
        let _ = bell.wait_timeout_while(guard, rounds.now(before.hurried), |now| *now == before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUNDS: Rounds = Rounds { calm: Duration::from_secs(3_600), hurried: Duration::from_millis(1) };

    #[tokio::test]
    async fn haste_ends_a_rest_that_has_begun() {
        let haste = Haste::default();
        haste.set(false);
        let began = Instant::now();
        let resting = haste.clone();
        let rest = tokio::spawn(async move { resting.rest(began, ROUNDS, &mut Timer::start()).await });
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(!rest.is_finished());
        haste.set(true);
        rest.await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn haste_wakes_a_thread() {
        let haste = Haste::default();
        haste.set(false);
        let dozing = haste.clone();
        let thread = std::thread::spawn(move || dozing.doze(ROUNDS));
        haste.set(true);
        // one that had missed the word would sleep for an hour
        thread.join().unwrap();
        haste.set(false);
        let dozing = haste.clone();
        let thread = std::thread::spawn(move || dozing.doze(ROUNDS));
        while !thread.is_finished() {
            haste.rouse();
            std::thread::yield_now();
        }
    }
}
