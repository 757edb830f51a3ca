//! What the API server showed, frame by frame: a watch that keeps every state of every object with the moment it came, so that a
//! story can ask afterwards "when first?" and "was it ever?", and no state between two polls is lost.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures::{StreamExt, TryStreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::wait::until_async;

/// One state of one object.
#[derive(Debug, Clone)]
pub struct Frame<K> {
    /// When the watch delivered it.
    pub at: Instant,
    /// The object's name.
    pub name: String,
    /// The object; `None`: it is gone.
    pub object: Option<Arc<K>>,
}

/// A running watch; dropping it ends it.
#[derive(Debug)]
pub struct Film<K> {
    frames: Arc<Mutex<Vec<Frame<K>>>>,
    task: tokio::task::JoinHandle<()>,
}

/// A film as another thread sees it.
#[derive(Debug)]
pub struct Handle<K>(Arc<Mutex<Vec<Frame<K>>>>);

impl<K> Handle<K> {
    /// What exists now, by name.
    pub fn now(&self) -> BTreeMap<String, Arc<K>> {
        current(&lock(&self.0))
    }
}

impl<K> Film<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// Starts watching everything that `api` sees.
    pub fn watch(api: Api<K>) -> Self {
        let frames = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&frames);
        let task = tokio::spawn(async move {
            let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
            let mut relisted = None;
            loop {
                match events.try_next().await {
                    Ok(Some(event)) => take(&mut lock(&shared), &mut relisted, event),
                    Ok(None) => return,
                    Err(_) => {} // the watcher reconnects by itself
                }
            }
        });
        Self { frames, task }
    }

    /// Every frame so far, oldest first.
    pub fn frames(&self) -> Vec<Frame<K>> {
        lock(&self.frames).clone()
    }

    /// The frames at or after `since`.
    pub fn since(&self, since: Instant) -> Vec<Frame<K>> {
        lock(&self.frames).iter().filter(|frame| frame.at >= since).cloned().collect()
    }

    /// The same film for another thread; it is not the one that ends the watch.
    pub fn handle(&self) -> Handle<K> {
        Handle(Arc::clone(&self.frames))
    }

    /// What exists now, by name.
    pub fn now(&self) -> BTreeMap<String, Arc<K>> {
        current(&lock(&self.frames))
    }

    /// Waits for the first frame at or after `since` for which `probe` gives a value; gives its moment too.
    ///
    /// # Errors
    /// When it does not come within `bound`.
    pub async fn first<T>(
        &self,
        what: &str,
        since: Instant,
        bound: Duration,
        probe: impl Fn(&K) -> Option<T>,
    ) -> Result<(Instant, T)> {
        let look = |frame: &Frame<K>| Some((frame.at, probe(frame.object.as_deref()?)?));
        until_async(what, bound, || async {
            Ok(lock(&self.frames).iter().filter(|frame| frame.at >= since).find_map(look))
        })
        .await
    }
}

impl<K> Drop for Film<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock<K>(frames: &Mutex<Vec<Frame<K>>>) -> MutexGuard<'_, Vec<Frame<K>>> {
    frames.lock().unwrap_or_else(PoisonError::into_inner)
}

fn current<K>(frames: &[Frame<K>]) -> BTreeMap<String, Arc<K>> {
    let mut now = BTreeMap::new();
    for frame in frames {
        match &frame.object {
            Some(object) => now.insert(frame.name.clone(), Arc::clone(object)),
            None => now.remove(&frame.name),
        };
    }
    now
}

/// `relisted`: the names that a relist has brought so far; what it does not bring is gone.
fn take<K: Resource + ResourceExt>(
    frames: &mut Vec<Frame<K>>,
    relisted: &mut Option<Vec<String>>,
    event: watcher::Event<K>,
) {
    let at = Instant::now();
    match event {
        watcher::Event::Init => *relisted = Some(Vec::new()),
        watcher::Event::InitDone => {
            let there = relisted.take().unwrap_or_default();
            let gone = current(frames).into_keys().filter(|name| !there.contains(name));
            frames.extend(gone.map(|name| Frame { at, name, object: None }));
        }
        watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
            let name = object.name_any();
            if let Some(there) = relisted {
                there.push(name.clone());
            }
            frames.push(Frame { at, name, object: Some(Arc::new(object)) });
        }
        watcher::Event::Delete(object) => frames.push(Frame { at, name: object.name_any(), object: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::core::v1::ConfigMap;

    fn object(name: &str) -> ConfigMap {
        serde_json::from_value(serde_json::json!({"metadata": {"name": name}})).unwrap()
    }

    #[test]
    fn what_a_relist_does_not_bring_is_gone() {
        let (mut frames, mut relisted) = (Vec::new(), None);
        for event in [
            watcher::Event::Apply(object("a")),
            watcher::Event::Apply(object("b")),
            watcher::Event::Init,
            watcher::Event::InitApply(object("b")),
            watcher::Event::InitDone,
        ] {
            take(&mut frames, &mut relisted, event);
        }
        assert_eq!(current(&frames).into_keys().collect::<Vec<_>>(), ["b"]);
        assert_eq!(frames.iter().filter(|frame| frame.object.is_none()).count(), 1);
    }
}
