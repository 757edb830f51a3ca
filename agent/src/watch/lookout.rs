//! Short looks at the pages between two ticks, by a thread of its own (2d). A look in the runtime goes through its timers, its tasks and what
//! they wait for, none of which a core has at hand ten times a second; this thread wakes up, reads, and sleeps again, for a third of the time.
//!
//! It judges nothing: what is not as it should be ends the looks, and is a tick's affair at once.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use vitals::observation::{Ms, PageObs};

use super::config::milliseconds;
use crate::short_slice;
use crate::sources::clock::monotonic_ms;
use crate::sources::{PageSource, SharedPages};

/// A look may come this much too early: what it asks is no other then, and a wake-up for so little costs as much as any.
const EARLY_MAX: Duration = Duration::from_millis(2);

/// What a look asks of the pages; no is a doubt.
#[derive(Debug)]
pub enum Ask {
    /// Do they say what they said, which owed nothing?
    Rest(Vec<PageObs>),
    /// Does every rank deliver, and is no step older than this?
    Deliver { step_ms_max: Ms },
}

/// Looks at even intervals.
#[derive(Debug)]
pub struct Order {
    pub ask: Ask,
    pub every: Duration,
    pub looks: u32,
    /// A look that comes later than this is a doubt: whoever judges is to know of it (V5).
    pub late_ms_max: Ms,
    /// When the tick before them was, and how much of the first interval it has taken.
    pub ticked_ms: Ms,
    pub took: Duration,
}

/// What became of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Looked {
    /// When all was last found as it should be: at a look, or at the tick before them.
    pub fine_ms: Ms,
    /// None of its looks was left out, and none found a doubt.
    pub all: bool,
}

/// The caller's end.
#[derive(Debug)]
pub struct Lookout {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is another order.
    bell: Condvar,
    doubt: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// The order under way, and when its next look is.
    under_way: Option<(Order, Instant)>,
    /// When the thread wakes up without being called.
    wakes: Option<Instant>,
    /// The last look, or the tick before it, that found all as it should be.
    fine_ms: Ms,
    doubted: bool,
}

impl Lookout {
    /// Starts the thread, which lives as long as the process.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(pages: SharedPages) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("lookout".to_owned()).spawn(move || {
            // a look is worth what it is early
            short_slice::ask_or_log();
            own.look_for_ever(&pages);
        })?;
        Ok(Self { shared, thread })
    }

    /// Is nobody there to look? A thread that panicked has ended.
    pub fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Begins with these looks, instead of any before.
    pub fn send(&self, order: Order) {
        let next = Instant::now() + order.every.saturating_sub(order.took);
        let mut state = self.shared.lock();
        let wakes = state.wakes.filter(|wakes| *wakes <= next + EARLY_MAX);
        *state = State { fine_ms: order.ticked_ms, doubted: false, under_way: Some((order, next)), wakes };
        drop(state);
        if wakes.is_none() {
            self.shared.bell.notify_one();
        }
    }

    /// Returns when one of them has found a doubt.
    pub async fn doubts(&self) {
        loop {
            let notified = self.shared.doubt.notified();
            if self.shared.lock().doubted {
                return;
            }
            // it may be a word about an order before this one
            notified.await;
        }
    }

    /// Ends the looks.
    pub fn recall(&self) -> Looked {
        let mut state = self.shared.lock();
        let all = state.under_way.take().is_none() && !state.doubted;
        Looked { fine_ms: state.fine_ms, all }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_for_ever(&self, pages: &Mutex<PageSource>) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            if state.is_due(now) {
                state.look((monotonic_ms(), now), &mut pages.lock().unwrap_or_else(PoisonError::into_inner));
                if state.doubted {
                    // whoever is woken asks at once what became of it
                    drop(state);
                    self.doubt.notify_one();
                    state = self.lock();
                }
            }
            state = match state.next_wake(Instant::now()) {
                None => self.bell.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(pause) => self.bell.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

impl State {
    fn is_due(&self, now: Instant) -> bool {
        self.under_way.as_ref().is_some_and(|(_, next)| next.saturating_duration_since(now) <= EARLY_MAX)
    }

    /// How long to sleep, if not until called: to the next look, else to the moment at which the next order's first look will be. So a
    /// thread whose looks go on from order to order need not be called for each.
    fn next_wake(&mut self, now: Instant) -> Option<Duration> {
        self.wakes = match &self.under_way {
            Some((_, next)) => Some(*next),
            None => self.wakes.filter(|wakes| *wakes > now),
        };
        self.wakes.map(|wakes| wakes.saturating_duration_since(now))
    }

    /// One look, which is due.
    fn look(&mut self, (now_ms, now): (Ms, Instant), pages: &mut PageSource) {
        let Some((mut order, _)) = self.under_way.take() else { return };
        self.wakes = None;
        let late_ms = now_ms.saturating_sub(self.fine_ms).saturating_sub(milliseconds(order.every));
        let fine = late_ms <= order.late_ms_max
            && match &order.ask {
                Ask::Rest(seen) => pages.rest_still(seen),
                Ask::Deliver { step_ms_max } => pages.deliver_still(now_ms, *step_ms_max),
            };
        if !fine {
            self.doubted = true;
            return;
        }
        self.fine_ms = now_ms;
        order.looks = order.looks.saturating_sub(1);
        if order.looks > 0 {
            let next = now + order.every;
            self.under_way = Some((order, next));
        } else {
            // the tick takes one interval's place
            self.wakes = Some(now + 2 * order.every);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::pace::Pace;

    const SOON: Duration = Duration::from_millis(1);
    const LONG: Duration = Duration::from_secs(60);

    /// Of an engine without a page, which a tick has found.
    fn pages() -> (tempfile::TempDir, SharedPages) {
        let dir = tempfile::tempdir().unwrap();
        let mut pages = PageSource::new(dir.path(), 1, None);
        pages.look(0, Pace::Stare, &mut Vec::new());
        (dir, Arc::new(Mutex::new(pages)))
    }

    fn order(ask: Ask, looks: u32, late_ms_max: Ms) -> Order {
        Order { ask, every: SOON, looks, late_ms_max, ticked_ms: monotonic_ms(), took: Duration::ZERO }
    }

    #[tokio::test]
    async fn looks_that_find_nothing_amiss_say_nothing_and_end() {
        let (_dir, pages) = pages();
        let lookout = Lookout::start(pages).unwrap();
        let sent = Order { every: SOON * 10, ..order(Ask::Rest(Vec::new()), 3, Ms::MAX) };
        let ticked_ms = sent.ticked_ms;
        lookout.send(sent);
        while lookout.shared.lock().under_way.is_some() {
            assert!(tokio::time::timeout(SOON, lookout.doubts()).await.is_err());
        }
        let looked = lookout.recall();
        assert!(
            looked.all && looked.fine_ms >= ticked_ms + 3 * 8,
            "three looks, none more than two milliseconds early"
        );
    }

    #[tokio::test]
    async fn a_doubt_ends_the_looks_and_is_told_at_once_and_once() {
        let (_dir, pages) = pages();
        let lookout = Lookout::start(pages).unwrap();
        let sent = order(Ask::Deliver { step_ms_max: 25 }, 1_000, Ms::MAX);
        let ticked_ms = sent.ticked_ms;
        lookout.send(sent);
        tokio::time::timeout(LONG, lookout.doubts()).await.expect("nobody delivers");
        assert_eq!(lookout.recall(), Looked { fine_ms: ticked_ms, all: false }, "no look found it well");
        let later = Order { every: LONG, ..order(Ask::Rest(Vec::new()), 1, Ms::MAX) };
        lookout.send(later);
        assert!(tokio::time::timeout(SOON * 20, lookout.doubts()).await.is_err(), "that was about the order before");
    }

    #[tokio::test]
    async fn a_look_that_comes_late_is_a_doubt() {
        let (_dir, pages) = pages();
        let lookout = Lookout::start(pages).unwrap();
        let long_ago = monotonic_ms() - 1_000;
        lookout.send(Order { ticked_ms: long_ago, ..order(Ask::Rest(Vec::new()), 1, 150) });
        tokio::time::timeout(LONG, lookout.doubts()).await.expect("it comes a second late");
        assert_eq!(lookout.recall(), Looked { fine_ms: long_ago, all: false });
    }

    #[tokio::test]
    async fn orders_that_follow_each_other_are_looked_after_with_and_without_a_call() {
        let (_dir, pages) = pages();
        let lookout = Lookout::start(pages).unwrap();
        for every in [SOON * 10, SOON * 10, SOON, SOON * 30, SOON * 10] {
            let sent = Order { every, ..order(Ask::Rest(Vec::new()), 2, Ms::MAX) };
            let ticked_ms = sent.ticked_ms;
            lookout.send(sent);
            let begun = Instant::now();
            while lookout.shared.lock().under_way.is_some() {
                assert!(begun.elapsed() < LONG, "nobody looks");
                tokio::time::sleep(SOON).await;
            }
            assert!(lookout.recall().fine_ms > ticked_ms);
            tokio::time::sleep(every).await;
        }
    }

    #[tokio::test]
    async fn an_order_that_is_taken_back_is_not_looked_after() {
        let (_dir, pages) = pages();
        let lookout = Lookout::start(pages).unwrap();
        let sent = Order { every: SOON * 50, ..order(Ask::Deliver { step_ms_max: 25 }, 1, Ms::MAX) };
        let ticked_ms = sent.ticked_ms;
        lookout.send(sent);
        assert_eq!(lookout.recall(), Looked { fine_ms: ticked_ms, all: false }, "its look was left out");
        assert!(tokio::time::timeout(SOON * 200, lookout.doubts()).await.is_err());
    }
}
