//! How long the mark of a node is waited for, pure: time is an argument.
//!
//! A mark keeps a successor from the place that its pod leaves; a suspicion is worth less than a replica. Where somebody's webhook refuses
//! it, or never answers, the pod that stalls is not kept for ever, and nor is the slot that it holds.

use std::time::Duration;

use tokio::time::Instant;

use crate::controllers::waiting::Waiting;

/// What failed so long ago tells nothing of what fails now.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// By node: since when its mark fails.
#[derive(Debug, Default)]
pub struct Unmarked(Waiting<String>);

impl Unmarked {
    /// The mark of `node` failed `now`: must whoever replaces a pod there wait for another try?
    pub fn waits(&self, node: &str, now: Instant) -> bool {
        self.0.forget_older(FORGOTTEN_AFTER, now);
        self.0.waits(node.to_owned(), now)
    }

    /// The node is marked, or never will be.
    pub fn settled(&self, node: &str) {
        self.0.settled(&node.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::waiting::PATIENCE;

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
