//! The objects and their history. Every effective change has its own resourceVersion and is kept for the watches.

use std::{collections::BTreeMap, sync::Arc};

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{fields::Managers, kinds::Kind, object::Object};

/// Plural, namespace, name.
pub type Key = (&'static str, String, String);

/// One object as it is now.
#[derive(Debug, Clone)]
pub struct Entry {
    pub value: Arc<Object>,
    pub managers: Arc<Managers>,
}

/// One effective change, as watches see it.
#[derive(Debug, Clone)]
pub struct Change {
    pub version: u64,
    pub plural: &'static str,
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub event: &'static str,
    pub value: Arc<Object>,
    /// Milliseconds of virtual time.
    pub at_ms: u64,
}

/// What etcd's snapshot holds.
#[derive(Debug, Clone)]
pub struct Backup {
    version: u64,
    objects: BTreeMap<Key, Entry>,
}

/// All of it.
#[derive(Debug, Clone, Default)]
pub struct Store {
    pub version: u64,
    /// Watches from before this version are told that it is gone.
    pub compacted: u64,
    pub objects: BTreeMap<Key, Entry>,
    pub history: Vec<Change>,
    uids: u64,
    /// Keep book of what plain updates own as well. The simulation does without: every apply in it is forced.
    pub track_updates: bool,
    /// Lists come in pages of this size, if they are asked for; 0: in one.
    pub page: usize,
    /// Versions have a form that nobody may take for a number.
    pub opaque: bool,
    /// How often everything was set back.
    pub epoch: u64,
    /// How many objects have been removed.
    pub removed: u64,
    /// How often something changed that a controller of Kubernetes or a watch of ours may care for.
    pub stirred: u64,
    /// Set by the owner of the clock before each use.
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

    /// How many objects have come and gone: whoever looks after owners need look only when it moves.
    pub fn turnover(&self) -> u64 {
        self.uids + self.removed
    }

    pub fn uid(&mut self) -> String {
        self.uids += 1;
        format!("00000000-0000-4000-8000-{:012}", self.uids)
    }

    /// The newest version as clients see it.
    pub fn version_text(&self) -> String {
        if self.opaque { format!("v{}", self.version) } else { self.version.to_string() }
    }

    /// Reads a version again.
    pub fn version_of(text: &str) -> Option<u64> {
        text.trim_start_matches('v').parse().ok()
    }

    /// The time as objects bear it.
    pub fn now(&self) -> String {
        at(self.now_ms)
    }

    /// Stores `value` under a new version. An equal one changes nothing but its managers, which is silent as well.
    pub fn put(&mut self, kind: &'static Kind, key: Key, mut value: Object, managers: Arc<Managers>) -> Arc<Object> {
        let old = self.objects.get(&key);
        if let Some(old) = old
            && same(&old.value, &value)
            && old.managers == managers
        {
            return old.value.clone();
        }
        let event = if old.is_some() { "MODIFIED" } else { "ADDED" };
        self.version += 1;
        value["metadata"]["resourceVersion"] = json!(self.version_text());
        let value = Arc::new(value);
        self.note(kind.plural, event, value.clone());
        self.objects.insert(key, Entry { value: value.clone(), managers });
        value
    }

    /// Takes the object away.
    pub fn remove(&mut self, key: &Key) -> Option<Arc<Object>> {
        let entry = self.objects.remove(key)?;
        self.removed += 1;
        self.version += 1;
        let mut last = Object::clone(&entry.value);
        last["metadata"]["resourceVersion"] = json!(self.version_text());
        let last = Arc::new(last);
        self.note(key.0, "DELETED", last.clone());
        Some(last)
    }

    pub fn backup(&self) -> Backup {
        Backup { version: self.version, objects: self.objects.clone() }
    }

    /// Everything is as it was then, versions included; watches end.
    pub fn restore(&mut self, backup: Backup) {
        self.version = backup.version;
        self.objects = backup.objects;
        self.history.retain(|change| change.version <= backup.version);
        self.epoch += 1;
        self.stirred += 1;
    }

    /// Somebody of no interest writes this object.
    pub fn touch(&mut self, key: &Key) {
        let Some(Entry { value, managers }) = self.objects.get(key).cloned() else { return };
        let mut next = Object::clone(&value);
        next["metadata"]["annotations"]["example.com/touched"] = json!(self.version.to_string());
        let kind = super::kinds::of(key.0);
        self.put(kind, key.clone(), next, managers);
    }

    /// The objects of a kind as they were at `at_ms`.
    pub fn as_of(&self, plural: &str, at_ms: u64) -> Vec<Arc<Object>> {
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

    fn note(&mut self, plural: &'static str, event: &'static str, value: Arc<Object>) {
        self.stirred += u64::from(!matches!(plural, "leases" | "events"));
        self.history.push(Change { version: self.version, plural, event, value, at_ms: self.now_ms });
    }
}

/// A moment as objects have it.
pub fn at(ms: u64) -> String {
    wall(ms).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// The wall clock at `now_ms`.
pub fn wall(now_ms: u64) -> Timestamp {
    const START: Timestamp = Timestamp::constant(1_767_225_600, 0); // 2026-01-01T00:00:00Z
    START + SignedDuration::from_millis(i64::try_from(now_ms).unwrap_or(i64::MAX))
}

/// Are both the same but for what each write changes?
fn same(old: &Object, new: &Object) -> bool {
    let silent = |field: &str| matches!(field, "resourceVersion" | "managedFields");
    let covers = |a: &Value, b: &Value| {
        let mut fields = a.as_object().into_iter().flatten().filter(|(name, _)| !silent(name));
        fields.all(|(name, value)| b.get(name) == Some(value))
    };
    let (a, b) = (&old["metadata"], &new["metadata"]);
    old.agrees_but(new, &["metadata"]) && (old.agrees(new, "metadata") || (covers(a, b) && covers(b, a)))
}
