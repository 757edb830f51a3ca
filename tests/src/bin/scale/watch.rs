//! When what was seen: two watches over the whole cluster, of endpoints and of pods' metadata, with the moment of each change.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crds::episode::ANNOTATION_RESTART_GRANT;
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};

/// What happened to one pod, and when first since the last [`Seen::forget`].
#[derive(Debug, Clone, Default)]
pub struct Story {
    /// Its endpoint was ready and is not any more.
    pub gone_at: Option<Instant>,
    /// A grant and its episode.
    pub granted: Option<(String, Instant)>,
    /// It is being deleted, or deleted.
    pub deleted_at: Option<Instant>,
}

/// The two watches; they end with this value.
#[derive(Debug)]
pub struct Seen {
    stories: Arc<Mutex<HashMap<String, Story>>>,
    tasks: [tokio::task::JoinHandle<()>; 2],
}

impl Seen {
    /// Starts both.
    pub fn watch(client: &Client) -> Self {
        let stories = Arc::<Mutex<HashMap<String, Story>>>::default();
        let config = watcher::Config::default().page_size(2000);
        let slices = watcher(Api::<EndpointSlice>::all(client.clone()), config.clone()).default_backoff();
        let labels = config.labels("app.kubernetes.io/component=inference");
        let pods = watcher(Api::<PartialObjectMeta<Pod>>::all(client.clone()), labels).default_backoff();
        let (of_slices, of_pods) = (Arc::clone(&stories), Arc::clone(&stories));
        let endpoints = tokio::spawn(follow(slices, move |event| {
            if let Event::Apply(slice) = event {
                endpoints(&mut lock(&of_slices), &slice);
            }
        }));
        let metadata = tokio::spawn(follow(pods, move |event| match event {
            Event::Apply(pod) => {
                let grant = pod.annotations().get(ANNOTATION_RESTART_GRANT).cloned();
                note(&mut lock(&of_pods), &pod.name_any(), grant, pod.metadata.deletion_timestamp.is_some());
            }
            Event::Delete(pod) => note(&mut lock(&of_pods), &pod.name_any(), None, true),
            Event::Init | Event::InitApply(_) | Event::InitDone => {}
        }));
        Seen { stories, tasks: [endpoints, metadata] }
    }

    /// Nothing has happened yet.
    pub fn forget(&self) {
        lock(&self.stories).clear();
    }

    /// What happened to these pods.
    pub fn stories(&self, pods: &[String]) -> Vec<Story> {
        let stories = lock(&self.stories);
        pods.iter().map(|pod| stories.get(pod).cloned().unwrap_or_default()).collect()
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.tasks.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

/// Hands every event on, for ever; the watcher mends what breaks.
async fn follow<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
    mut take: impl FnMut(Event<K>) + Send,
) {
    let mut events = std::pin::pin!(events);
    while let Some(event) = events.next().await {
        if let Ok(event) = event {
            take(event);
        }
    }
}

fn lock(stories: &Mutex<HashMap<String, Story>>) -> MutexGuard<'_, HashMap<String, Story>> {
    stories.lock().unwrap_or_else(PoisonError::into_inner)
}

fn endpoints(stories: &mut HashMap<String, Story>, slice: &EndpointSlice) {
    let now = Instant::now();
    for endpoint in slice.endpoints.iter().flatten() {
        let ready = endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true);
        let Some(name) = endpoint.target_ref.as_ref().and_then(|target| target.name.clone()) else { continue };
        if !ready {
            stories.entry(name).or_default().gone_at.get_or_insert(now);
        }
    }
}

fn note(stories: &mut HashMap<String, Story>, pod: &str, grant: Option<String>, deleted: bool) {
    let now = Instant::now();
    let story = stories.entry(pod.to_owned()).or_default();
    if let Some(grant) = grant.filter(|grant| story.granted.as_ref().is_none_or(|(known, _)| known != grant)) {
        story.granted = Some((grant, now));
    }
    if deleted {
        story.deleted_at.get_or_insert(now);
    }
}
