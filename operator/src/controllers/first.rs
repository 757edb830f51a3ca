//! The first look of whoever begins to lead, pure: time is an argument. Each kind tells of everybody once, and every InferenceDeployment is
//! looked at: once, when all kinds have told, and not after each of them; and where something has changed last first, for a stall that nobody
//! has heard yet is among the youngest changes, and in a large fleet the last one waits for seconds.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use jiff::Timestamp;
use tokio::time::Instant;

use super::queue::Key;

/// A kind that is listed slowly is not waited for for longer; one that cannot be listed is not waited for at all. Ten thousand pods take a
/// second or two.
pub const WAIT_MAX: Duration = Duration::from_secs(3);

/// Whose objects there are, and when the last change of any of them was stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changed(BTreeMap<Key, Option<Timestamp>>);

impl Changed {
    /// An object of this one was changed then.
    pub fn note(&mut self, key: Key, at: Option<Timestamp>) {
        let known = self.0.entry(key).or_default();
        *known = at.max(*known);
    }

    /// The youngest change first; by name where there is nothing to choose.
    pub fn in_order(&self) -> Vec<Key> {
        let mut all: Vec<_> = self.0.iter().collect();
        // (the sort keeps the names' order among equals)
        all.sort_by(|a, b| b.1.cmp(a.1));
        all.into_iter().map(|(key, _)| key.clone()).collect()
    }
}

/// What was told so far.
#[derive(Debug)]
pub struct FirstLook {
    kinds: usize,
    /// Those that have told, or cannot.
    told: BTreeSet<&'static str>,
    until: Instant,
    changed: Changed,
}

impl FirstLook {
    /// At so many kinds.
    pub fn at(kinds: usize, now: Instant) -> Self {
        Self { kinds, told: BTreeSet::new(), until: now + WAIT_MAX, changed: Changed::default() }
    }

    /// One kind has told, or cannot: then nothing has changed of it that anybody knows.
    pub fn heard(&mut self, kind: &'static str, changed: Changed) {
        self.told.insert(kind);
        changed.0.into_iter().for_each(|(key, at)| self.changed.note(key, at));
    }

    /// So long at most it is waited for.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Whom to look at, in this order; `None`: a kind is still waited for.
    pub fn over(&self, now: Instant) -> Option<Vec<Key>> {
        let is_over = self.told.len() >= self.kinds || now >= self.until;
        is_over.then(|| self.changed.in_order())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(names: &[(&str, Option<i64>)]) -> Changed {
        let at = |second: i64| Timestamp::from_second(second).unwrap();
        let mut changed = Changed::default();
        names.iter().for_each(|(name, second)| changed.note(("ns".to_owned(), (*name).to_owned()), second.map(at)));
        changed
    }

    fn names(look: &FirstLook, now: Instant) -> Option<String> {
        let names: Vec<String> = look.over(now)?.into_iter().map(|(_, name)| name).collect();
        Some(names.join(" "))
    }

    #[test]
    fn when_all_have_told_the_youngest_change_comes_first() {
        let t = Instant::now();
        let mut look = FirstLook::at(2, t);
        look.heard("Pod", told(&[("a", Some(5)), ("b", Some(7)), ("c", None), ("d", None)]));
        look.heard("Pod", Changed::default());
        assert_eq!(names(&look, t), None, "one is missing");
        look.heard("Service", told(&[("a", Some(9)), ("b", Some(6)), ("c", Some(1)), ("orphan", None)]));
        assert_eq!(names(&look, t).as_deref(), Some("a b c d orphan"));
    }

    #[test]
    fn a_kind_that_is_silent_is_waited_for_and_not_for_ever() {
        let t = Instant::now();
        let mut look = FirstLook::at(2, t);
        look.heard("Pod", told(&[("a", None)]));
        assert_eq!(names(&look, t + WAIT_MAX - Duration::from_millis(1)), None);
        assert_eq!((names(&look, t + WAIT_MAX).as_deref(), look.until()), (Some("a"), t + WAIT_MAX));
        assert_eq!(names(&FirstLook::at(2, t), t + WAIT_MAX).as_deref(), Some(""), "nobody has told anything");
    }
}
