//! The objects and their history. Every effective change has its own resourceVersion and is kept for the watches.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json};

use super::{fields::Managers, kinds::Kind};

/// Plural, namespace, name.
pub type Key = (&'static str, String, String);

/// One object.
#[derive(Debug, Clone)]
pub struct Entry {
    pub value: Arc<Value>,
    pub managers: Managers,
}

/// One effective change, as watches see it.
#[derive(Debug, Clone)]
pub struct Change {
    pub version: u64,
    pub plural: &'static str,
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub event: &'static str,
    pub value: Arc<Value>,
    /// Milliseconds of virtual time.
    pub at_ms: u64,
}

/// All of it.
#[derive(Debug, Default)]
pub struct Store {
    pub version: u64,
    /// Watches from before this version are told that it is gone.
    pub compacted: u64,
    pub objects: BTreeMap<Key, Entry>,
    pub history: Vec<Change>,
    uids: u64,
    /// Keep book of what plain updates own as well. The simulation does without: every apply in it is forced.
    pub track_updates: bool,
    /// How many objects have been removed.
    pub removed: u64,
    /// Set by the owner of the clock before each use.
    pub now: String,
    pub now_ms: u64,
}

impl Store {
    pub fn get(&self, key: &Key) -> Option<&Entry> {
        self.objects.get(key)
    }

    /// The objects of a kind, in the order of their names.
    pub fn of(&self, plural: &'static str) -> impl Iterator<Item = (&Key, &Entry)> {
        let from: Key = (plural, String::new(), String::new());
        self.objects.range(from..).take_while(move |(key, _)| key.0 == plural)
    }

    pub fn uid(&mut self) -> String {
        self.uids += 1;
        format!("00000000-0000-4000-8000-{:012}", self.uids)
    }

    /// Stores `value` under a new version. An equal one changes nothing but its managers, which is silent as well.
    pub fn put(&mut self, kind: &'static Kind, key: Key, mut value: Value, managers: Managers) -> Arc<Value> {
        let old = self.objects.get(&key);
        if let Some(old) = old
            && same(&old.value, &value)
            && old.managers == managers
        {
            return old.value.clone();
        }
        let event = if old.is_some() { "MODIFIED" } else { "ADDED" };
        self.version += 1;
        value["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let value = Arc::new(value);
        self.note(kind.plural, event, value.clone());
        self.objects.insert(key, Entry { value: value.clone(), managers });
        value
    }

    /// Takes the object away.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let entry = self.objects.remove(key)?;
        self.removed += 1;
        self.version += 1;
        let mut last = (*entry.value).clone();
        last["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let last = Arc::new(last);
        self.note(key.0, "DELETED", last.clone());
        Some(last)
    }

    /// The objects of a kind as they were at `at_ms`.
    pub fn as_of(&self, plural: &str, at_ms: u64) -> Vec<Arc<Value>> {
        let mut objects = BTreeMap::new();
        for change in self.history.iter().filter(|change| change.plural == plural && change.at_ms <= at_ms) {
            let uid = change.value["metadata"]["uid"].to_string();
            match change.event {
                "DELETED" => drop(objects.remove(&uid)),
                _ => drop(objects.insert(uid, change.value.clone())),
            }
        }
        objects.into_values().collect()
    }

    fn note(&mut self, plural: &'static str, event: &'static str, value: Arc<Value>) {
        self.history.push(Change { version: self.version, plural, event, value, at_ms: self.now_ms });
    }
}

fn same(old: &Value, new: &Value) -> bool {
    let bare = |value: &Value| {
        let mut value = value.clone();
        if let Some(metadata) = value["metadata"].as_object_mut() {
            metadata.remove("resourceVersion");
            metadata.remove("managedFields");
        }
        value
    };
    bare(old) == bare(new)
}
