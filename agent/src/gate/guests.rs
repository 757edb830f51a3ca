//! The connections of clients. One that asks for nothing is kept for longer than load balancers keep theirs; so many of them are bounded, and
//! where there are too many the one that has been idle for longest goes. Whoever waits for an answer is never sent away; how many there are of
//! these is counted here, for whoever lets requests in.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use nix::sys::resource::{Resource, getrlimit};
use tokio::sync::Notify;

use super::body::AnswerBody;

/// Some 40 MiB, 128 where each has sent half a head, and more than the balancers in front of one replica keep.
const IDLE_MAX: u64 = 2_048;
/// What of all descriptors those may have that do nothing; a stream takes two.
const IDLE_PARTS: u64 = 4;

/// All of them.
#[derive(Debug)]
pub struct Guests {
    idle_max: usize,
    /// Requests of all of them whose answers were not taken yet.
    asking: AtomicUsize,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    places: u64,
    /// The last place that was given when it was last looked who came late.
    seen: u64,
    /// Those that ask for nothing by their places: who has been idle for longest comes first.
    idle: BTreeMap<u64, Arc<Notify>>,
    /// Whoever has got an answer goes.
    parting: bool,
}

/// One connection.
#[derive(Debug)]
pub struct Guest {
    all: Arc<Guests>,
    /// Among the idle; 0 while it is not.
    place: AtomicU64,
    leave: Arc<Notify>,
    /// Requests of it whose answers were not taken yet, and whether there was one before.
    asks: AtomicU32,
    has_asked: AtomicBool,
    /// Its connection ends with the answer by itself.
    ends: AtomicBool,
}

/// A request and its answer: while this is there, its connection is not idle.
#[derive(Debug)]
pub struct Asking {
    guest: Arc<Guest>,
    together: usize,
}

impl Guests {
    /// As many idle ones as this process's descriptors allow for.
    pub fn by_limits() -> Arc<Self> {
        let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
        let idle_max = (descriptors / IDLE_PARTS).clamp(1, IDLE_MAX);
        Self::at_most(usize::try_from(idle_max).unwrap_or(1))
    }

    /// At most so many idle ones.
    pub fn at_most(idle_max: usize) -> Arc<Self> {
        Arc::new(Self { idle_max, asking: AtomicUsize::new(0), book: Mutex::default() })
    }

    /// A connection has come, and has not asked yet. What it has sent of its first head makes it no less idle.
    pub fn welcome(self: &Arc<Self>) -> Arc<Guest> {
        let guest = Guest {
            all: Arc::clone(self),
            place: AtomicU64::new(0),
            leave: Arc::default(),
            asks: AtomicU32::new(0),
            has_asked: AtomicBool::new(false),
            ends: AtomicBool::new(false),
        };
        guest.rest();
        Arc::new(guest)
    }

    /// Sends the one away that has been idle for longest.
    pub fn make_room(&self) {
        self.lock().send_away();
    }

    /// Sends all away that ask for nothing, and until [`Guests::stay`] whoever has got his answer.
    pub fn part(&self) {
        let mut book = self.lock();
        book.parting = true;
        book.seen = book.places;
        while book.send_away() {}
    }

    /// Sends those away as well that came since then, and have asked for nothing from one call to the next.
    pub fn part_late(&self) {
        let mut book = self.lock();
        let (before, now) = (book.seen, book.places);
        book.seen = now;
        while book.idle.first_key_value().is_some_and(|(place, _)| *place <= before) {
            book.send_away();
        }
    }

    /// Whoever has got an answer may ask again.
    pub fn stay(&self) {
        self.lock().parting = false;
    }

    /// Requests whose answers were not taken yet.
    #[cfg(test)]
    pub fn asking(&self) -> usize {
        self.asking.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        // The book is valid after every statement.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    /// False where nobody is idle.
    fn send_away(&mut self) -> bool {
        self.idle.pop_first().map(|(_, leave)| leave.notify_one()).is_some()
    }
}

impl Guest {
    /// A request has come.
    pub fn asks(self: &Arc<Self>) -> Asking {
        self.leave_place();
        self.asks.fetch_add(1, Ordering::Relaxed);
        self.has_asked.store(true, Ordering::Relaxed);
        let together = self.all.asking.fetch_add(1, Ordering::Relaxed) + 1;
        Asking { guest: Arc::clone(self), together }
    }

    /// Is an answer on its way?
    pub fn is_asking(&self) -> bool {
        self.asks.load(Ordering::Relaxed) > 0
    }

    /// Has it ever asked? Then the end of an answer may still be on its way to it.
    pub fn has_asked(&self) -> bool {
        self.has_asked.load(Ordering::Relaxed)
    }

    /// Returns when it shall go.
    pub async fn sent_away(&self) {
        self.leave.notified().await;
    }

    /// The answer says that it is the last one on this connection.
    pub fn gets_the_last(&self) {
        self.ends.store(true, Ordering::Relaxed);
    }

    /// Does its connection end by itself, when all of an answer was sent and all of the request was read?
    pub fn ends_by_itself(&self) -> bool {
        self.ends.load(Ordering::Relaxed)
    }

    fn rest(&self) {
        let mut book = self.all.lock();
        book.places += 1;
        let place = book.places;
        self.place.store(place, Ordering::Relaxed);
        book.idle.insert(place, Arc::clone(&self.leave));
        if book.idle.len() > self.all.idle_max {
            book.send_away();
        }
    }

    fn leave_place(&self) {
        let place = self.place.swap(0, Ordering::Relaxed);
        self.all.lock().idle.remove(&place);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.leave_place();
    }
}

impl Asking {
    /// How many requests there were when it came, of all clients and itself among them.
    pub fn together(&self) -> usize {
        self.together
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        let guest = &self.guest;
        guest.asks.fetch_sub(1, Ordering::Relaxed);
        guest.all.asking.fetch_sub(1, Ordering::Relaxed);
        if guest.all.lock().parting {
            guest.leave.notify_one();
        } else {
            guest.rest();
        }
    }
}

/// An answer whose connection is idle when all of it was taken.
#[derive(Debug)]
pub struct Answer {
    body: AnswerBody,
    _asking: Asking,
}

impl Answer {
    /// The answer to what is asked.
    pub fn new(body: AnswerBody, asking: Asking) -> Self {
        Self { body, _asking: asking }
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn goes(guest: &Guest) -> bool {
        guest.sent_away().now_or_never().is_some()
    }

    #[test]
    fn the_longest_idle_goes_and_whoever_asks_does_not() {
        let all = Guests::at_most(2);
        let [first, second, third] = [(); 3].map(|()| all.welcome());
        assert_eq!([&first, &second, &third].map(|guest| goes(guest)), [true, false, false]);
        let asking = second.asks();
        let fourth = all.welcome();
        assert_eq!([&second, &third, &fourth].map(|guest| goes(guest)), [false; 3], "two are idle");
        drop(asking);
        assert_eq!([&second, &third, &fourth].map(|guest| goes(guest)), [false, true, false], "the second asked since");
        let _asking = fourth.asks();
        all.make_room();
        all.make_room();
        assert_eq!([&second, &fourth].map(|guest| goes(guest)), [true, false]);
        let fifth = all.welcome();
        all.part();
        assert_eq!([&fourth, &fifth].map(|guest| goes(guest)), [false, true]);
    }

    #[test]
    fn while_all_part_whoever_has_got_his_answer_goes_and_whoever_comes_may_ask() {
        let all = Guests::at_most(9);
        let [idle, asks] = [(); 2].map(|()| all.welcome());
        let asking = asks.asks();
        all.part();
        let late = all.welcome();
        assert_eq!([&idle, &asks, &late].map(|guest| goes(guest)), [true, false, false]);
        all.part_late();
        assert!(!goes(&late), "it came a moment ago");
        let later = all.welcome();
        all.part_late();
        assert_eq!([&late, &asks, &later].map(|guest| goes(guest)), [true, false, false], "who asks for nothing goes");
        drop(asking);
        assert!(goes(&asks) && asks.has_asked() && !asks.is_asking());
        all.stay();
        drop(later.asks());
        assert!(!goes(&later));
    }

    #[test]
    fn whoever_is_gone_is_forgotten() {
        let all = Guests::at_most(9);
        let asking = all.welcome().asks();
        let together = [(); 2].map(|()| all.welcome().asks().together());
        assert_eq!((asking.together(), together), (1, [2, 2]), "the one is forgotten before the other comes");
        drop(all.welcome());
        assert!(all.lock().idle.is_empty());
        drop(asking);
        assert!(all.lock().idle.is_empty());
    }
}
