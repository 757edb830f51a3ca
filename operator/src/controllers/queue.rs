//! Which InferenceDeployment is due for a pass, pure: time is an argument. One pass at a time for each, the earliest due
//! first, and a backoff of its own for each that fails, so that one that always fails delays nobody else. Namespaces take
//! turns: a tenant that asks for much waits for itself (S16).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// After a failure nothing that happens calls the next pass sooner than this.
const UNHEARD: Duration = Duration::from_secs(2);

/// So many passes of one namespace at the same time: fewer than there are at all, so that one whose webhook hangs, and each of whose passes
/// lasts for as long as a pass may, leaves room for the others.
pub const NAMESPACE_MAX: usize = 6;

/// Passes over different InferenceDeployments at the same time.
pub const CONCURRENT_MAX: usize = 8;

/// Namespace and name of an InferenceDeployment.
pub type Key = (String, String);

/// What became of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Look again after this long, whatever happens.
    After(Duration),
    /// It failed: soon, and ever later as long as it fails.
    Failed,
    /// There is no such object any more.
    Forget,
}

/// The work to do.
#[derive(Debug, Default)]
pub struct Queue {
    due: BTreeMap<Key, Instant>,
    /// What waits, by namespace.
    order: BTreeMap<String, BTreeSet<(Instant, String)>>,
    running: BTreeSet<Key>,
    /// How often each has failed, and until when it hears of nothing.
    failures: BTreeMap<Key, (u32, Instant)>,
}

impl Queue {
    /// A pass is wanted at `at`; an earlier wish stands. One that failed hears of nothing for a while: a pass that fails may itself be what
    /// happens (its status tells of the error, in words that change), and would call the next one. And not for longer: a stall is no less urgent
    /// because a child of its object is refused.
    pub fn ask(&mut self, key: Key, at: Instant) {
        let deaf = self.failures.get(&key).filter(|_| !self.running.contains(&key));
        let at = deaf.map_or(at, |(_, until)| at.max(*until));
        if self.due.get(&key).is_some_and(|due| *due <= at) {
            return;
        }
        if let Some(later) = self.due.insert(key.clone(), at) {
            self.unlist(later, &key);
        }
        // One that runs is asked for again when it is done.
        if !self.running.contains(&key) {
            self.list(at, key);
        }
    }

    /// A pass is wanted over each of these, from `at` on and in this order.
    pub fn ask_in_order(&mut self, keys: Vec<Key>, at: Instant) {
        keys.into_iter().zip(0..).for_each(|(key, place)| self.ask(key, at + Duration::from_nanos(place)));
    }

    /// A pass is wanted, from `at` on, over each of these in this order, and then over each other that is known.
    pub fn ask_all(&mut self, mut keys: Vec<Key>, at: Instant) {
        keys.extend(self.due.keys().chain(&self.running).cloned());
        self.ask_in_order(keys, at);
    }

    /// The next one that is due, of the namespace with the fewest passes at work; it counts as running until [`Self::done`].
    pub fn take(&mut self, now: Instant) -> Option<Key> {
        let due = self.heads().filter(|(_, (at, _))| *at <= now);
        let (namespace, (at, name)) = due.min_by_key(|(namespace, (at, _))| (self.at_work(namespace), *at))?;
        let (at, key) = (*at, (namespace.clone(), name.clone()));
        self.unlist(at, &key);
        self.due.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }

    /// The pass over `key` ended at `now`.
    pub fn done(&mut self, key: Key, next: Next, now: Instant) {
        self.running.remove(&key);
        let waiting = self.due.get(&key).copied();
        let at = match next {
            Next::After(pause) => {
                self.failures.remove(&key);
                now + pause
            }
            Next::Failed => {
                let (failures, deaf_until) = self.failures.entry(key.clone()).or_insert((0, now));
                let pause = (PAUSE_MIN * 2_u32.saturating_pow((*failures).min(8))).min(PAUSE_MAX);
                (*failures, *deaf_until) = (failures.saturating_add(1), now + pause.min(UNHEARD));
                // What happened meanwhile does not shorten the pause: an API in trouble is not hammered.
                self.due.remove(&key);
                now + pause
            }
            Next::Forget => {
                self.failures.remove(&key);
                if waiting.is_none() {
                    return;
                }
                now
            }
        };
        let at = self.due.remove(&key).map_or(at, |due| due.min(at));
        self.due.insert(key.clone(), at);
        self.list(at, key);
    }

    /// When the next one is due that need not wait for another pass of its namespace.
    pub fn next_due(&self) -> Option<Instant> {
        self.heads().map(|(_, (at, _))| *at).min()
    }

    /// The earliest of each namespace that may have one more pass at work. The last place is for one that has none.
    fn heads(&self) -> impl Iterator<Item = (&String, &(Instant, String))> {
        let most = if self.running.len() + 1 < CONCURRENT_MAX { NAMESPACE_MAX } else { 1 };
        let free = self.order.iter().filter(move |(namespace, _)| self.at_work(namespace) < most);
        free.filter_map(|(namespace, waiting)| Some((namespace, waiting.first()?)))
    }

    fn at_work(&self, namespace: &str) -> usize {
        self.running.iter().filter(|(other, _)| other == namespace).count()
    }

    fn list(&mut self, at: Instant, (namespace, name): Key) {
        self.order.entry(namespace).or_default().insert((at, name));
    }

    fn unlist(&mut self, at: Instant, (namespace, name): &Key) {
        let Some(waiting) = self.order.get_mut(namespace) else { return };
        waiting.remove(&(at, name.clone()));
        if waiting.is_empty() {
            self.order.remove(namespace);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::driver::DEBOUNCE;

    fn key(name: &str) -> Key {
        ("ns".to_owned(), name.to_owned())
    }

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn the_earliest_first_and_each_only_once_at_a_time() {
        let (mut queue, t) = (Queue::default(), Instant::now());
        queue.ask(key("b"), t + S);
        queue.ask(key("a"), t + 2 * S);
        queue.ask(key("b"), t + 3 * S);
        assert_eq!(queue.take(t), None);
        assert_eq!((queue.take(t + S), queue.take(t + S)), (Some(key("b")), None));
        queue.ask(key("b"), t + S);
        assert_eq!((queue.take(t + 2 * S), queue.take(t + 2 * S)), (Some(key("a")), None), "b still runs");
        queue.done(key("b"), Next::After(300 * S), t + 2 * S);
        assert_eq!(queue.take(t + 2 * S), Some(key("b")), "it was asked for while it ran");
    }

    #[test]
    fn an_order_is_kept() {
        let (mut queue, t) = (Queue::default(), Instant::now());
        queue.ask(key("b"), t + S);
        queue.ask_in_order(["c", "a", "b"].map(key).to_vec(), t);
        let taken: Vec<String> = std::iter::from_fn(|| queue.take(t + S)).map(|(_, name)| name).collect();
        assert_eq!(taken, ["c", "a", "b"]);
    }

    #[test]
    fn all_that_are_known_can_be_asked_for_at_once() {
        let (mut queue, t) = (Queue::default(), Instant::now());
        queue.ask(key("runs"), t);
        queue.ask(key("waits"), t + 300 * S);
        queue.ask(key("gone"), t);
        assert_eq!((queue.take(t), queue.take(t)), (Some(key("gone")), Some(key("runs"))));
        queue.done(key("gone"), Next::Forget, t);
        queue.ask_all(["young", "old"].map(key).to_vec(), t + S);
        let taken = [(); 4].map(|()| queue.take(t + 2 * S));
        assert_eq!(taken, [Some(key("young")), Some(key("old")), Some(key("waits")), None], "one runs, one is gone");
        queue.done(key("runs"), Next::After(300 * S), t + 2 * S);
        assert_eq!(queue.take(t + 2 * S), Some(key("runs")), "it was asked for while it ran");
    }

    #[test]
    fn s16_a_namespace_that_asks_for_much_waits_for_itself() {
        let (mut queue, t) = (Queue::default(), Instant::now());
        for n in 0..1000 {
            queue.ask(("flood".to_owned(), format!("d{n:03}")), t);
        }
        queue.ask(("calm".to_owned(), "chat".to_owned()), t + S);
        let taken: Vec<Key> = (0..8).filter_map(|_| queue.take(t + S)).collect();
        let calm = taken.iter().position(|(namespace, _)| namespace == "calm");
        assert_eq!(calm, Some(1), "the last to ask is the second to be served: one of the flood was at work");
        assert!(taken.iter().skip(2).all(|(namespace, _)| namespace == "flood"), "nothing is left idle");
    }

    /// A minute of the driver's loop in virtual time: in each of twenty namespaces something happens once a second, and in one more `flood(ms)`
    /// objects are written in that millisecond, of ten thousand. A pass takes 40 to 160 ms. How long the twenty waited, from the event to the
    /// end of the pass that saw it: at the 99th percentile, and for how many.
    fn of_the_others(flood: impl Fn(u64) -> u64) -> (Duration, usize) {
        let (mut queue, t) = (Queue::default(), Instant::now());
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let (mut running, mut asked, mut took) = (Vec::<(Instant, Key)>::new(), BTreeMap::new(), Vec::new());
        let mut written = 0;
        for ms in 0..60_000 {
            let now = t + Duration::from_millis(ms);
            for (_, key) in running.extract_if(.., |(end, _)| *end <= now) {
                took.extend(asked.remove(&(key.clone(), true)).map(|at: Instant| now - at));
                queue.done(key, Next::After(300 * S), now);
            }
            for namespace in (0..20).filter(|_| random(1_000) == 0) {
                let key = (format!("calm-{namespace}"), "chat".to_owned());
                asked.entry((key.clone(), false)).or_insert(now);
                queue.ask(key, now + DEBOUNCE);
            }
            for _ in 0..flood(ms) {
                queue.ask(("flood".to_owned(), format!("d{:04}", written % 10_000)), now + DEBOUNCE);
                written += 1;
            }
            while running.len() < CONCURRENT_MAX
                && let Some(key) = queue.take(now)
            {
                if let Some(at) = asked.remove(&(key.clone(), false)) {
                    asked.insert((key.clone(), true), at); // this pass sees it
                }
                running.push((now + Duration::from_millis(40 + random(121)), key));
            }
        }
        took.sort_unstable();
        (took[took.len() * 99 / 100], took.len())
    }

    #[test]
    fn s16_whoever_floods_does_not_double_the_time_of_the_others() {
        let (quiet, count) = of_the_others(|_| 0);
        let (flooded, flooded_count) = of_the_others(|_| 1); // a thousand objects a second
        let (reconnects, _) = of_the_others(|ms| if ms == 1_000 { 10_000 } else { 0 });
        println!(
            "p99 of {count} passes {quiet:?}; of {flooded_count} beside a flood {flooded:?}; after a burst {reconnects:?}"
        );
        assert!(count > 1_000 && flooded_count > 1_000, "nobody is left out: {count}, {flooded_count}");
        assert!(flooded <= 2 * quiet && reconnects <= 2 * quiet, "{quiet:?}, {flooded:?}, {reconnects:?}");
    }

    #[test]
    fn s16_whoever_hangs_leaves_room_for_the_others() {
        const { assert!(NAMESPACE_MAX < CONCURRENT_MAX) };
        let (mut queue, t) = (Queue::default(), Instant::now());
        (0..CONCURRENT_MAX).for_each(|n| queue.ask(key(&format!("slow-{n}")), t));
        let slow: Vec<Key> = std::iter::from_fn(|| queue.take(t)).collect();
        assert_eq!((slow.len(), queue.next_due()), (NAMESPACE_MAX, None), "nobody wakes for one that must wait");
        let other = ("other".to_owned(), "chat".to_owned());
        queue.ask(other.clone(), t);
        queue.ask(("other".to_owned(), "next".to_owned()), t);
        assert_eq!((queue.next_due(), queue.take(t)), (Some(t), Some(other)));
        assert_eq!((queue.next_due(), queue.take(t)), (None, None), "the last place is for a third one");
        queue.ask(("third".to_owned(), "chat".to_owned()), t);
        assert!(queue.take(t).is_some_and(|(namespace, _)| namespace == "third"));
        queue.done(("third".to_owned(), "chat".to_owned()), Next::Forget, t);
        queue.done(slow[0].clone(), Next::After(300 * S), t);
        assert!(queue.take(t).is_some_and(|(namespace, _)| namespace == "other"), "who has fewer at work comes first");
        queue.done(slow[1].clone(), Next::After(300 * S), t);
        assert!(queue.take(t).is_some_and(|(namespace, _)| namespace == "ns"), "and its own follow as they end");
    }

    #[test]
    fn failures_back_off_alone_and_events_shorten_the_pause_to_two_seconds_at_least() {
        let pauses = |happens: bool| {
            let (mut queue, mut now) = (Queue::default(), Instant::now());
            queue.ask(key("a"), now);
            let pauses: Vec<_> = (0..8)
                .map(|_| {
                    assert_eq!(queue.take(now), Some(key("a")));
                    queue.ask(key("a"), now);
                    queue.done(key("a"), Next::Failed, now);
                    if happens {
                        queue.ask(key("a"), now); // by its own write of the status, which the watch brings back
                    }
                    let due = queue.next_due().expect("it is tried again");
                    let pause = due - std::mem::replace(&mut now, due);
                    pause.as_millis()
                })
                .collect();
            (pauses, queue, now)
        };
        assert_eq!(pauses(true).0, [200, 400, 800, 1600, 2000, 2000, 2000, 2000]);
        let (alone, mut queue, now) = pauses(false);
        assert_eq!(alone, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(queue.take(now), Some(key("a")));
        queue.done(key("a"), Next::After(S), now);
        assert_eq!(queue.take(now + S), Some(key("a")));
        queue.done(key("a"), Next::Failed, now + S);
        assert_eq!(queue.next_due(), Some(now + S + PAUSE_MIN), "a success starts it over");
        let now = now + S + PAUSE_MIN;
        assert_eq!(queue.take(now), Some(key("a")));
        queue.done(key("a"), Next::After(300 * S), now);
        queue.ask(key("a"), now + DEBOUNCE);
        assert_eq!(queue.next_due(), Some(now + DEBOUNCE), "and what happens to one that is well is looked at");
    }

    #[test]
    fn what_is_gone_is_forgotten_unless_it_is_asked_for_again() {
        let (mut queue, t) = (Queue::default(), Instant::now());
        queue.ask(key("a"), t);
        queue.take(t).expect("due");
        queue.done(key("a"), Next::Forget, t);
        assert_eq!(queue.next_due(), None);
        queue.ask(key("a"), t);
        queue.take(t).expect("due");
        queue.ask(key("a"), t);
        queue.done(key("a"), Next::Forget, t);
        assert_eq!(queue.take(t), Some(key("a")));
    }
}
