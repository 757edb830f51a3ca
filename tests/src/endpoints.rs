//! Who gets traffic, and since when: a watch on the EndpointSlices of one Service with a timestamp for every flip. This is what a
//! client of the Service would feel, so stories measure a fence here and not on the pod.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};

use crate::wait::until_async;

/// What exists is asked this often beside the watch: a watch that says nothing more looks like endpoints that stay as they are.
const LIST_EVERY: Duration = Duration::from_secs(5);

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
    /// Version and state by slice, because a pod may move from one slice of the Service to another.
    slices: BTreeMap<String, (u64, BTreeMap<String, bool>)>,
    flips: Vec<Flip>,
}

impl Endpoints {
    /// Starts watching `service` in `namespace`.
    pub fn watch(client: Client, namespace: &str, service: &str) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let slices: Api<EndpointSlice> = Api::namespaced(client, namespace);
        let of_service = format!("kubernetes.io/service-name={service}");
        let (config, params) =
            (watcher::Config::default().labels(&of_service), ListParams::default().labels(&of_service));
        let shared = Arc::clone(&seen);
        let task = tokio::spawn(async move {
            let mut events = watcher(slices.clone(), config).default_backoff().boxed();
            let mut again = tokio::time::interval(LIST_EVERY);
            loop {
                tokio::select! {
                    event = events.try_next() => match event {
                        Ok(Some(event)) => lock(&shared).take(event, Instant::now()),
                        Ok(None) => return,
                        Err(_) => {} // the watcher reconnects by itself (stories kill the API server)
                    },
                    _ = again.tick() => {
                        let listed = slices.list(&params).await.map(|list| list.items).unwrap_or_default();
                        listed.into_iter().for_each(|slice| lock(&shared).take(watcher::Event::Apply(slice), Instant::now()));
                    }
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

    /// Waits until `pod` is ready (`true`), or not ready or gone (`false`), from `since` on; gives the moment of that flip. Whose endpoint was
    /// away at `since` already (a busy machine's probe came late, say) is away from then on.
    ///
    /// # Errors
    /// When it does not come within `bound`.
    pub async fn flip(&self, pod: &str, to_ready: bool, since: Instant, bound: Duration) -> Result<Instant> {
        let what = format!("the endpoint of {pod} to be {}", if to_ready { "ready" } else { "away" });
        until_async(&what, bound, || async { Ok(lock(&self.seen).flip(pod, to_ready, since)) })
            .await
            .with_context(|| format!("what its endpoint did, in seconds from then: {}", self.told(pod, since)))
    }

    /// The flips of `pod`, for people.
    fn told(&self, pod: &str, since: Instant) -> String {
        let seconds = |at: Instant| {
            at.saturating_duration_since(since).as_secs_f64() - since.saturating_duration_since(at).as_secs_f64()
        };
        let word = |ready| match ready {
            Some(true) => "ready",
            Some(false) => "not ready",
            None => "gone",
        };
        let one = |flip: &Flip| format!("{} {:+.1}", word(flip.ready), seconds(flip.at));
        let flips: Vec<_> = lock(&self.seen).flips.iter().filter(|flip| flip.pod == pod).map(one).collect();
        flips.join(", ")
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

/// From when to when no pod got traffic, once one had; up to now where none does yet.
pub fn empty(flips: &[Flip]) -> Vec<(Instant, Instant)> {
    let mut serving = BTreeSet::new();
    let mut spells: Vec<(Instant, Option<Instant>)> = Vec::new();
    for flip in flips {
        let nobody = serving.is_empty();
        match flip.ready {
            Some(true) => serving.insert(flip.pod.as_str()),
            _ => serving.remove(flip.pod.as_str()),
        };
        if nobody == serving.is_empty() {
            continue;
        }
        if !nobody {
            spells.push((flip.at, None));
        } else if let Some((_, end)) = spells.last_mut() {
            *end = Some(flip.at);
        }
    }
    let ended = spells.into_iter().map(|(begin, end)| (begin, end.unwrap_or_else(Instant::now)));
    // one that comes in the moment in which the other goes leaves none
    ended.filter(|(begin, end)| begin < end).collect()
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
    fn flip(&self, pod: &str, to_ready: bool, since: Instant) -> Option<Instant> {
        let mine = || self.flips.iter().filter(|flip| flip.pod == pod);
        let is = |flip: &&Flip| (flip.ready == Some(true)) == to_ready;
        let before = mine().rfind(|flip| flip.at <= since);
        let already = !to_ready && before.is_some_and(|flip| is(&flip));
        if already { Some(since) } else { mine().find(|flip| flip.at >= since && is(flip)).map(|flip| flip.at) }
    }

    fn state(&self) -> BTreeMap<String, bool> {
        let mut state = BTreeMap::new();
        for (pod, ready) in self.slices.values().flat_map(|(_, pods)| pods) {
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
                // the watch may be behind what was listed
                let version = slice.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0);
                if self.slices.get(&slice.name_any()).is_none_or(|(known, _)| *known <= version) {
                    self.slices.insert(slice.name_any(), (version, pods(&slice)));
                }
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

    #[test]
    fn nobody_is_there_from_the_last_ones_flip_to_the_next_ones() {
        let now = Instant::now();
        let at = |s| now + Duration::from_secs(s);
        let flips = |told: &[(u64, &str, Option<bool>)]| -> Vec<Flip> {
            told.iter().map(|(s, pod, ready)| Flip { at: at(*s), pod: (*pod).to_owned(), ready: *ready }).collect()
        };
        let begun = [(1, "a", Some(false)), (2, "a", Some(true)), (3, "b", Some(true)), (4, "a", None)];
        assert_eq!(empty(&flips(&begun)), [], "not yet, and then one is left");
        let gone = [(5, "b", Some(false)), (7, "c", Some(true)), (8, "c", None), (8, "d", Some(true))];
        assert_eq!(empty(&flips(&[&begun[..], &gone].concat())), [(at(5), at(7))], "one came as the other went");
    }

    #[test]
    fn what_the_watch_says_after_a_newer_list_is_old() {
        let mut seen = Seen::default();
        for (version, is_ready) in [("9", true), ("12", false), ("11", true), ("13", true)] {
            let mut slice = slice(&[("a", is_ready)]);
            slice.metadata.resource_version = Some(version.into());
            seen.take(watcher::Event::Apply(slice), Instant::now());
        }
        let flips: Vec<_> = seen.flips.iter().map(|flip| flip.ready).collect();
        assert_eq!(flips, [Some(true), Some(false), Some(true)]);
    }

    #[test]
    fn a_pod_that_was_away_already_is_away_and_one_that_was_ready_is_not_ready_again() {
        let at = |s| Instant::now() + Duration::from_secs(s);
        let [ready, away, back] = [at(10), at(20), at(30)];
        let mut seen = Seen::default();
        for (is_ready, at) in [(true, ready), (false, away), (true, back)] {
            seen.take(watcher::Event::Apply(slice(&[("a", is_ready)])), at);
        }
        let s = Duration::from_secs(1);
        let flip = |to_ready, since| seen.flip("a", to_ready, since);
        assert_eq!([flip(false, ready - s), flip(false, ready), flip(false, away)], [Some(away); 3]);
        assert_eq!((flip(false, away + s), flip(false, back)), (Some(away + s), None), "away already; not yet");
        assert_eq!([flip(true, ready + s), flip(true, away)], [Some(back); 2], "ready then, which is no news");
        assert_eq!((flip(true, back + s), seen.flip("b", false, ready)), (None, None));
    }
}
