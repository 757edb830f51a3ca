//! What `/readyz` is made of: every watch in step, and the Lease seen lately. Plain values; written by the watches and
//! the elector, read by the HTTP server.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::time::Duration;

use crate::{leader::Leadership, metrics::Metrics};

/// The Lease is read every 2 s; so long without it means that the API server is away.
const CONTACT_AGE_MAX: Duration = Duration::from_secs(15);

/// Which watches there are and whether each is in step with the API server.
pub struct Health {
    watches: Mutex<BTreeMap<&'static str, bool>>,
    leadership: Arc<Leadership>,
    metrics: Arc<Metrics>,
}

impl Health {
    /// No watch yet.
    pub fn new(leadership: Arc<Leadership>, metrics: Arc<Metrics>) -> Self {
        Health { watches: Mutex::default(), leadership, metrics }
    }

    /// The watch of `kind` is in step, or is not.
    pub fn watch(&self, kind: &'static str, up: bool) {
        self.metrics.watch_up.with_label_values(&[kind]).set(i64::from(up));
        self.watches.lock().unwrap_or_else(PoisonError::into_inner).insert(kind, up);
    }

    /// The controllers stopped: there is no watch any more.
    pub fn no_watches(&self) {
        self.metrics.watch_up.reset();
        self.watches.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// What is wrong; empty: ready. A candidate that waits for the lease is ready: it does what it should.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        match self.leadership.contact_age() {
            None => faults.push("the Lease was never seen".to_owned()),
            Some(age) if age > CONTACT_AGE_MAX => {
                faults.push(format!("the Lease was last seen {} s ago", age.as_secs()))
            }
            Some(_) => {}
        }
        let watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        faults.extend(watches.iter().filter(|(_, up)| !**up).map(|(kind, _)| format!("the watch of {kind} is stale")));
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn ready_only_with_lease_and_every_watch() {
        let leadership = Arc::new(Leadership::default());
        let health = Health::new(leadership.clone(), Arc::new(Metrics::new().unwrap()));
        assert_eq!(health.faults(), ["the Lease was never seen"]);
        leadership.contact();
        assert!(health.faults().is_empty());
        health.watch("Pod", false);
        assert_eq!(health.faults(), ["the watch of Pod is stale"]);
        health.watch("Pod", true);
        tokio::time::advance(Duration::from_secs(16)).await;
        assert_eq!(health.faults(), ["the Lease was last seen 16 s ago"]);
    }
}
