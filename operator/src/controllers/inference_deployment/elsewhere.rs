//! Since when this operator sees a pod come up again from a restart that stands in no budget (its agent granted it, or the status that held the
//! grant was lost), pure: time is an argument.
//!
//! Such a pod takes a slot for as long as a granted restart is waited for (I2). Counted from the time at which its agent says that it began, a
//! node whose clock is behind would have its restart called overdue at once, and another one granted beside it; one whose clock is ahead would
//! keep the slot of an engine that never comes back for as many hours, and nobody else be recovered (C1). So it is counted from when it was
//! seen. What is seen is of this process: the next leader counts anew, and the budget is used too little, if anything.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Mutex, PoisonError},
};

use jiff::SignedDuration;
use tokio::time::Instant;

use super::{observed::PodView, restarts::on_its_way_up};
use crate::controllers::queue::Key;

/// The UID of a pod, and what it tells of.
type Case = (String, String);

/// By InferenceDeployment: who comes up again there, and since when.
#[derive(Debug, Default)]
pub struct Elsewhere(Mutex<HashMap<Key, BTreeMap<Case, Instant>>>);

impl Elsewhere {
    /// Tells each pod for how long it has been seen on its way up, and forgets whoever is not any more.
    pub fn look(&self, of: &Key, pods: &mut [PodView], now: Instant) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.remove(of).unwrap_or_default();
        let mut seen = BTreeMap::new();
        for pod in pods {
            let Some(case) = on_its_way_up(pod).map(|episode| (pod.uid.clone(), episode.id.clone())) else { continue };
            let since = before.get(&case).copied().unwrap_or(now);
            pod.coming_up_for = SignedDuration::try_from(now.saturating_duration_since(since)).unwrap_or_default();
            seen.insert(case, since);
        }
        if !seen.is_empty() {
            known.insert(of.clone(), seen);
        }
    }

    /// There is nothing of this name any more.
    pub fn forget(&self, namespace: &str, name: &str) {
        let of = (namespace.to_owned(), name.to_owned());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&of);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{healthy, pod};
    use std::time::Duration;

    const A_WHILE: Duration = Duration::from_secs(60);

    #[test]
    fn it_is_counted_from_when_it_was_seen_and_for_each_restart_anew() {
        let (elsewhere, chat, t) = (Elsewhere::default(), ("serving".to_owned(), "chat".to_owned()), Instant::now());
        let look = |pods: &[PodView], at: Instant| {
            let mut pods = pods.to_vec();
            elsewhere.look(&chat, &mut pods, at);
            pods.iter().map(|pod| pod.coming_up_for.as_secs()).collect::<Vec<_>>()
        };
        let (restarts, serves) = (pod("a", "Restarting", 1), healthy("a"));
        let killed = pod("b", "Killed", 1);
        let both = [restarts.clone(), killed];
        assert_eq!(look(&both, t), [0, 0]);
        assert_eq!(look(&both, t + A_WHILE), [60, 0], "what has not ended does not come up");
        let another = PodView { uid: "uid-other".to_owned(), ..restarts.clone() };
        let restarts = [restarts];
        assert_eq!(look(&[another], t + 2 * A_WHILE), [0], "of the same name (P8)");
        look(&restarts, t);
        look(&[serves], t + A_WHILE);
        assert_eq!(look(&restarts, t + 2 * A_WHILE), [0], "it has served since");
        elsewhere.forget("serving", "chat");
        assert_eq!(look(&restarts, t + 3 * A_WHILE), [0]);
    }
}
