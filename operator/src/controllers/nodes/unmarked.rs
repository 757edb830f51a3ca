//! How long the mark of a node is waited for, pure: time is an argument.
//!
//! A mark keeps a successor from the place that its pod leaves; a suspicion is worth less than a replica. Where somebody's webhook refuses
//! it, or never answers, the pod that stalls is not kept for ever, and nor is the slot that it holds.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// A webhook's pod or a leader of etcd is back by then.
const PATIENCE: Duration = Duration::from_secs(30);
/// What failed so long ago tells nothing of what fails now.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// By node: since when its mark fails.
#[derive(Debug, Default)]
pub struct Unmarked(Mutex<BTreeMap<String, Instant>>);

impl Unmarked {
    /// The mark of `node` failed `now`: must whoever replaces a pod there wait for another try?
    pub fn waits(&self, node: &str, now: Instant) -> bool {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        since.retain(|_, since| now.saturating_duration_since(*since) < FORGOTTEN_AFTER);
        now.saturating_duration_since(*since.entry(node.to_owned()).or_insert(now)) < PATIENCE
    }

    /// The node is marked, or never will be.
    pub fn settled(&self, node: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_waited_for_once_and_for_a_while() {
        let (unmarked, t) = (Unmarked::default(), Instant::now());
        assert!(unmarked.waits("n1", t) && unmarked.waits("n1", t + PATIENCE / 2));
        assert!(!unmarked.waits("n1", t + PATIENCE) && unmarked.waits("n2", t + PATIENCE), "each by itself");
        assert!(!unmarked.waits("n1", t + PATIENCE * 2), "in vain is in vain");
        unmarked.settled("n1");
        assert!(unmarked.waits("n1", t + PATIENCE * 2), "another failure");
        assert!(unmarked.waits("n2", t + PATIENCE + FORGOTTEN_AFTER), "so long after it is another one as well");
    }
}
