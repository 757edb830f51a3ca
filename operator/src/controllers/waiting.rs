//! Who waits for what another refuses, and since when, pure: time is an argument. A webhook of somebody else that is down keeps nobody for
//! ever. The wait is of this process; another leader has its own.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// For so long one waits: a webhook's pod or a leader of etcd is back by then.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// By what is waited for: since when.
#[derive(Debug)]
pub struct Waiting<K>(Mutex<BTreeMap<K, Instant>>);

impl<K> Default for Waiting<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Ord> Waiting<K> {
    /// It is refused `now`: is it to be waited for? Who has waited in vain does not wait again until it is settled.
    pub fn waits(&self, what: K, now: Instant) -> bool {
        now.saturating_duration_since(*self.lock().entry(what).or_insert(now)) < PATIENCE
    }

    /// It is refused no more, or there is no such thing.
    pub fn settled(&self, what: &K) {
        self.lock().remove(what);
    }

    /// What began longer ago than `age` tells nothing of now.
    pub fn forget_older(&self, age: Duration, now: Instant) {
        self.lock().retain(|_, since| now.saturating_duration_since(*since) < age);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
