//! One watch of one kind as an endless stream of "this InferenceDeployment may have changed", which begins with "whoever has any, and any may have".
//!
//! It takes the place of kube's `watcher` for three reasons (RELIABILITY §7, A2, A4): every request has a deadline, so a
//! connection that is open and silent is noticed in 30 s and not in 295 s or never; each watch backs off alone; and a
//! new list also names whom it no longer holds, so that an object that was there before the watch was down and is not after it is not missed.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt, stream};
use kube::api::{ListParams, WatchEvent, WatchParams};
use tokio::time::{Instant, sleep, timeout};

use super::{
    first::Changed,
    metadata::{Seen, Source},
    queue::Key,
};
use crate::health::Health;

/// The server ends a watch after this long, and it is taken up again from where it was: no new list.
const WATCH_SECONDS: u32 = 25;
/// A watch that says nothing for longer, not even that it ends, is dead.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// An event that was lost is made up for by a new list, where nothing else looks after so long (A12).
pub const LIST_EVERY: Duration = Duration::from_secs(300);
const CALL_MAX: Duration = Duration::from_secs(10);
const PAGE: u32 = 500;
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

type Events = Pin<Box<dyn Stream<Item = kube::Result<WatchEvent<Seen>>> + Send>>;

/// What is watched.
#[derive(Debug, Clone, Copy)]
pub struct Watched {
    /// Its name, for people.
    pub kind: &'static str,
    /// Only objects with this label.
    pub label: Option<&'static str>,
    /// A new list after so long, however well the watch goes.
    pub list_every: Option<Duration>,
}

/// Whom an event concerns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Concerned {
    One(Key),
    /// The kind is watched from now on: whose objects there are, and when they changed last. Whose objects went while it was not watched yet,
    /// nobody can say.
    First {
        kind: &'static str,
        changed: Changed,
    },
    /// This kind could not be listed, and was never before: the list that comes at last is its [`First`](Self::First).
    Unlisted {
        kind: &'static str,
    },
}

/// Whom events of this source concern: `owner` maps an object to its InferenceDeployment.
pub fn keys(
    source: Source,
    watched: Watched,
    health: Arc<Health>,
    owner: fn(&Seen) -> Option<Key>,
) -> impl Stream<Item = Concerned> + Send + use<> {
    health.watch(watched.kind, false);
    let (ready, listed) = (VecDeque::new(), Instant::now());
    let feed = Feed { source, watched, health, owner, listed, known: None, ready, failures: 0, at: At::Start };
    stream::unfold(feed, |mut feed| async move { Some((feed.next().await, feed)) })
}

/// Whom the objects of this kind belonged to at the last look, and how many each had: a new list names those as well whose last one is gone,
/// and whoever is known to have none is forgotten. Events that are lost or doubled bend the counts until the next list; what is missed for
/// that is seen by the pass that comes now and then.
#[derive(Debug, Default)]
struct Known(BTreeMap<Key, usize>);

impl Known {
    fn added(&mut self, key: Key) {
        *self.0.entry(key).or_default() += 1;
    }

    fn modified(&mut self, key: Key) {
        self.0.entry(key).or_insert(1);
    }

    fn deleted(&mut self, key: Key) {
        if let Some(count) = self.0.remove(&key).filter(|count| *count > 1) {
            self.0.insert(key, count - 1);
        }
    }

    /// Takes a new list; whoever is in it, or was known before, may have changed.
    fn listed(&mut self, now: Known) -> BTreeSet<Key> {
        let before = std::mem::replace(self, now);
        before.0.into_keys().chain(self.0.keys().cloned()).collect()
    }
}

enum At {
    /// Nothing is known: list.
    Start,
    /// In step up to this resourceVersion: watch.
    Listed(String),
    Watching {
        events: Events,
        version: String,
        since: Instant,
    },
}

struct Feed {
    source: Source,
    watched: Watched,
    health: Arc<Health>,
    owner: fn(&Seen) -> Option<Key>,
    listed: Instant,
    /// `None`: there was no list yet.
    known: Option<Known>,
    ready: VecDeque<Concerned>,
    failures: u32,
    at: At,
}

impl Feed {
    async fn next(&mut self) -> Concerned {
        loop {
            if let Some(whom) = self.ready.pop_front() {
                return whom;
            }
            let step = match std::mem::replace(&mut self.at, At::Start) {
                At::Start => self.list().await,
                At::Listed(_) if self.is_list_due() => self.list().await,
                At::Listed(version) => self.open(version).await,
                At::Watching { events, version, since } => self.follow(events, version, since).await,
            };
            match step {
                Ok(at) => self.at = at,
                Err(why) => self.broken(&why).await,
            }
        }
    }

    fn is_list_due(&self) -> bool {
        self.watched.list_every.is_some_and(|every| self.listed.elapsed() >= every)
    }

    /// After an error it waits and starts over with a list, so that "in step" is known and never guessed.
    async fn broken(&mut self, why: &str) {
        self.health.watch(self.watched.kind, false);
        tracing::warn!(kind = self.watched.kind, why, "watch broken, starting over");
        if self.known.is_none() && self.failures == 0 {
            self.ready.push_back(Concerned::Unlisted { kind: self.watched.kind });
        }
        let pause = (BACKOFF_MIN * 2_u32.saturating_pow(self.failures.min(6))).min(BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        sleep(pause).await;
    }

    async fn list(&mut self) -> Result<At, String> {
        let mut params =
            ListParams { label_selector: self.watched.label.map(str::to_owned), ..ListParams::default() }.limit(PAGE);
        let (mut now, mut changed) = (Known::default(), Changed::default());
        loop {
            let page =
                timeout(CALL_MAX, self.source.list(&params)).await.map_err(|_| "no answer to a list".to_owned())?;
            let page = page.map_err(|error| format!("list: {error}"))?;
            for object in &page.items {
                let Some(key) = (self.owner)(object) else { continue };
                changed.note(key.clone(), object.changed_at());
                now.added(key);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => {
                    let version = page.metadata.resource_version.filter(|version| !version.is_empty());
                    let version = version.ok_or_else(|| "a list without resourceVersion".to_owned())?;
                    self.in_step(now, changed);
                    self.health.watch(self.watched.kind, true);
                    self.listed = Instant::now();
                    return Ok(At::Listed(version));
                }
            }
        }
    }

    /// All that is known was listed just now.
    fn in_step(&mut self, now: Known, changed: Changed) {
        let Some(known) = &mut self.known else {
            self.known = Some(now);
            self.ready.push_back(Concerned::First { kind: self.watched.kind, changed });
            return;
        };
        self.ready.extend(known.listed(now).into_iter().map(Concerned::One));
    }

    async fn open(&mut self, version: String) -> Result<At, String> {
        let params = WatchParams { label_selector: self.watched.label.map(str::to_owned), ..WatchParams::default() };
        let params = params.timeout(WATCH_SECONDS);
        let opened = timeout(CALL_MAX, self.source.watch(&params, &version)).await;
        let events =
            opened.map_err(|_| "no answer to a watch".to_owned())?.map_err(|error| format!("watch: {error}"))?;
        Ok(At::Watching { events: Box::pin(events), version, since: Instant::now() })
    }

    /// An event came. Returns the version up to which all is known.
    fn heard(&mut self, object: &Seen, version: String, change: fn(&mut Known, Key)) -> String {
        if let Some(key) = (self.owner)(object) {
            change(self.known.get_or_insert_default(), key.clone());
            self.ready.push_back(Concerned::One(key));
        }
        self.failures = 0;
        object.metadata.resource_version.clone().filter(|new| !new.is_empty()).unwrap_or(version)
    }

    async fn follow(&mut self, mut events: Events, version: String, since: Instant) -> Result<At, String> {
        let event = timeout(IDLE_MAX, events.next()).await.map_err(|_| "silent for 30 s".to_owned())?;
        let version = match event {
            Some(Ok(WatchEvent::Added(object))) => self.heard(&object, version, Known::added),
            Some(Ok(WatchEvent::Modified(object))) => self.heard(&object, version, Known::modified),
            Some(Ok(WatchEvent::Deleted(object))) => self.heard(&object, version, Known::deleted),
            Some(Ok(WatchEvent::Bookmark(mark))) => {
                self.failures = 0;
                mark.metadata.resource_version
            }
            Some(Ok(WatchEvent::Error(status))) => return Err(format!("{} ({})", status.message, status.code)),
            Some(Err(error)) => return Err(error.to_string()),
            // Its time is over. One that ends at once is no watch at all.
            None if since.elapsed() >= Duration::from_secs(1) => return Ok(At::Listed(version)),
            None => return Err("ended as soon as it began".to_owned()),
        };
        Ok(At::Watching { events, version, since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{leader::Leadership, metrics::Metrics};
    use k8s_openapi::api::core::v1::Pod;
    use kube::client::Body;
    use serde_json::json;

    fn feed() -> Feed {
        let (service, _) = tower_test::mock::pair::<http::Request<Body>, http::Response<Body>>();
        let health = Health::new(Arc::new(Leadership::default()), Arc::new(Metrics::new().unwrap()));
        Feed {
            source: Source::of::<Pod>(kube::Client::new(service, "default"), None),
            watched: Watched { kind: "Pod", label: None, list_every: None },
            health: Arc::new(health),
            owner: |_| Some(("ns".to_owned(), "chat".to_owned())),
            listed: Instant::now(),
            known: None,
            ready: VecDeque::new(),
            failures: 3,
            at: At::Start,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_bookmark_says_from_where_to_go_on_and_is_nobodys_change() {
        let metadata = json!({"resourceVersion": "9", "creationTimestamp": null});
        let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata});
        let mark = serde_json::from_value(json!({"type": "BOOKMARK", "object": object})).unwrap();
        let (mut feed, since) = (feed(), Instant::now());
        let marked = feed.follow(Box::pin(stream::iter([Ok(mark)])), "5".to_owned(), since).await;
        let Ok(At::Watching { events, version, .. }) = marked else { panic!("it goes on") };
        assert_eq!((version.as_str(), feed.ready.len(), feed.failures), ("9", 0, 0));
        tokio::time::advance(Duration::from_secs(25)).await;
        let ended = feed.follow(events, version, since).await;
        assert!(matches!(ended, Ok(At::Listed(version)) if version == "9"), "taken up again from there");
    }

    #[tokio::test]
    async fn the_first_list_concerns_also_those_who_have_nothing_in_it() {
        let chat = ("ns".to_owned(), "chat".to_owned());
        let list = || Known(BTreeMap::from([(chat.clone(), 1)]));
        let mut feed = feed();
        let mut changed = Changed::default();
        changed.note(chat.clone(), None);
        feed.in_step(list(), changed.clone());
        assert_eq!(feed.ready, [Concerned::First { kind: "Pod", changed }]);
        feed.ready.clear();
        feed.in_step(Known::default(), Changed::default());
        assert_eq!(feed.ready, [Concerned::One(chat.clone())], "from then on it knows whose are gone");
    }

    #[test]
    fn whose_last_object_is_gone_is_forgotten_and_whose_is_not_is_named_by_the_next_list() {
        let key = |name: &str| ("ns".to_owned(), name.to_owned());
        let named =
            |known: &mut Known| known.listed(Known::default()).into_iter().map(|(_, name)| name).collect::<Vec<_>>();
        let mut known = Known::default();
        for name in ["a", "a", "b"] {
            known.added(key(name));
        }
        known.modified(key("a"));
        known.modified(key("c"));
        known.deleted(key("a"));
        known.deleted(key("b"));
        known.deleted(key("d"));
        assert_eq!(named(&mut known), ["a", "c"], "nobody has heard of the end of these");
        assert_eq!(named(&mut known), [""; 0], "and once is enough");
    }
}
