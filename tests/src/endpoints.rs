//! Who gets traffic, and since when: a watch on the EndpointSlices of one Service with a timestamp for every flip. This is what a
//! client of the Service would feel, so stories measure a fence here and not on the pod.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};

use crate::wait::until_async;

/// One change of one pod's endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flip {
    /// When the watch delivered it.
    pub at: Instant,
    /// The pod's name.
    pub pod: String,
    /// `Some(ready)` while the endpoint exists, `None` once it is gone.
    pub ready: Option<bool>,
}

/// A running watch; dropping it ends it.
#[derive(Debug)]
pub struct Endpoints {
    seen: Arc<Mutex<Seen>>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Seen {
    /// State by slice, because a pod may move from one slice of the Service to another.
    slices: BTreeMap<String, BTreeMap<String, bool>>,
    flips: Vec<Flip>,
}

impl Endpoints {
    /// Starts watching `service` in `namespace`.
    pub fn watch(client: Client, namespace: &str, service: &str) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let slices: Api<EndpointSlice> = Api::namespaced(client, namespace);
        let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}"));
        let shared = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            let mut events = watcher(slices, config).default_backoff().boxed();
            loop {
                match events.try_next().await {
                    Ok(Some(event)) => lock(&shared).take(event, Instant::now()),
                    Ok(None) => return,
                    Err(_) => {} // the watcher reconnects by itself (stories kill the API server)
                }
            }
        });
        Self { seen, task }
    }

    /// Every flip so far, oldest first.
    pub fn flips(&self) -> Vec<Flip> {
        lock(&self.seen).flips.clone()
    }

    /// The pods that get traffic now.
    pub fn ready(&self) -> Vec<String> {
        let seen = lock(&self.seen);
        let mut ready: Vec<_> = seen.state().into_iter().filter(|(_, ready)| *ready).map(|(pod, _)| pod).collect();
        ready.sort();
        ready
    }

    /// Waits for the first flip of `pod` at or after `since` to ready (`true`) or to not ready or gone (`false`); gives its moment.
    ///
    /// # Errors
    /// When it does not come within `bound`.
    pub async fn flip(&self, pod: &str, to_ready: bool, since: Instant, bound: Duration) -> Result<Instant> {
        let what = format!("the endpoint of {pod} to be {}", if to_ready { "ready" } else { "away" });
        let wanted = |flip: &&Flip| flip.pod == pod && flip.at >= since && (flip.ready == Some(true)) == to_ready;
        until_async(&what, bound, || async { Ok(lock(&self.seen).flips.iter().find(wanted).map(|flip| flip.at)) }).await
    }

    /// Waits until exactly `count` pods get traffic; gives their names.
    ///
    /// # Errors
    /// When it does not come within `bound`.
    pub async fn count(&self, count: usize, bound: Duration) -> Result<Vec<String>> {
        let what = format!("{count} ready endpoints");
        until_async(&what, bound, || async {
            let ready = self.ready();
            Ok((ready.len() == count).then_some(ready))
        })
        .await
    }
}

impl Drop for Endpoints {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seen {
    fn state(&self) -> BTreeMap<String, bool> {
        let mut state = BTreeMap::new();
        for (pod, ready) in self.slices.values().flatten() {
            *state.entry(pod.clone()).or_insert(false) |= *ready;
        }
        state
    }

    fn take(&mut self, event: watcher::Event<EndpointSlice>, at: Instant) {
        let before = self.state();
        match event {
            // a relist brings what exists; a slice that vanished meanwhile is not in it, but slices of a living Service do not vanish
            watcher::Event::Init | watcher::Event::InitDone => {}
            watcher::Event::InitApply(slice) | watcher::Event::Apply(slice) => {
                self.slices.insert(slice.name_any(), pods(&slice));
            }
            watcher::Event::Delete(slice) => {
                self.slices.remove(&slice.name_any());
            }
        }
        let after = self.state();
        let gone = before.keys().filter(|pod| !after.contains_key(*pod)).map(|pod| (pod.clone(), None));
        let changed = after
            .iter()
            .filter(|(pod, ready)| before.get(*pod) != Some(*ready))
            .map(|(pod, ready)| (pod.clone(), Some(*ready)));
        self.flips.extend(gone.chain(changed).map(|(pod, ready)| Flip { at, pod, ready }));
    }
}

fn pods(slice: &EndpointSlice) -> BTreeMap<String, bool> {
    let endpoints = slice.endpoints.iter().flatten();
    endpoints
        .filter_map(|endpoint| {
            let pod = endpoint.target_ref.as_ref()?.name.clone()?;
            let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true);
            Some((pod, ready))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(pods: &[(&str, bool)]) -> EndpointSlice {
        let endpoints: Vec<_> = pods
            .iter()
            .map(|(pod, ready)| serde_json::json!({"addresses": [], "conditions": {"ready": ready}, "targetRef": {"name": pod}}))
            .collect();
        serde_json::from_value(
            serde_json::json!({"addressType": "IPv4", "metadata": {"name": "s"}, "endpoints": endpoints}),
        )
        .unwrap()
    }

    #[test]
    fn only_changes_are_flips_and_leaving_is_one() {
        let mut seen = Seen::default();
        let now = Instant::now();
        for pods in [&[("a", true), ("b", false)][..], &[("a", true), ("b", true)], &[("b", true)]] {
            seen.take(watcher::Event::Apply(slice(pods)), now);
        }
        let flips: Vec<_> = seen.flips.iter().map(|flip| (flip.pod.as_str(), flip.ready)).collect();
        assert_eq!(flips, [("a", Some(true)), ("b", Some(false)), ("b", Some(true)), ("a", None)]);
    }
}
