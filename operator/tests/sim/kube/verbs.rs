//! What each verb does to the store: the rules of the API server, without its transport.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    Refusal,
    fields::{self, Manager},
    kinds::Kind,
    object::Object,
    schema,
    store::{Key, Store},
};

type Answer = Result<(u16, Arc<Object>), Refusal>;

/// Which object, and who asks.
#[derive(Debug, Clone)]
pub struct Target {
    pub kind: &'static Kind,
    pub namespace: String,
    pub name: String,
    /// `status` or empty.
    pub subresource: String,
    pub manager: String,
    pub force: bool,
}

impl Target {
    pub fn new(kind: &'static Kind, namespace: &str, name: &str, manager: &str) -> Self {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Target { kind, namespace, name, subresource: String::new(), manager: manager.to_owned(), force: true }
    }

    pub fn status(mut self) -> Self {
        self.subresource = "status".to_owned();
        self
    }

    pub fn key(&self) -> Key {
        (self.kind.plural, self.namespace.clone(), self.name.clone())
    }

    fn manager(&self, apply: bool) -> Manager {
        Manager { name: self.manager.clone(), apply, subresource: self.subresource.clone() }
    }

    fn not_found(&self) -> Refusal {
        Refusal::new(404, "NotFound", format!("{} \"{}\" not found", self.kind.plural, self.name))
    }

    fn conflict(&self, why: &str) -> Refusal {
        let what = format!("Operation cannot be fulfilled on {} \"{}\": {why}", self.kind.plural, self.name);
        Refusal::new(409, "Conflict", what)
    }

    fn invalid(&self, faults: &[String]) -> Refusal {
        Refusal::new(422, "Invalid", format!("{} \"{}\" is invalid: {}", self.kind.kind, self.name, faults.join("; ")))
    }
}

/// Metadata that no update changes; who owns which field is kept elsewhere.
const OWNED: [&str; 9] = [
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "resourceVersion",
    "generation",
    "deletionGracePeriodSeconds",
    "managedFields",
];
const MODIFIED: &str = "the object has been modified; please apply your changes to the latest version and try again";

impl Store {
    pub fn read(&self, target: &Target) -> Answer {
        self.get(&target.key()).map(|entry| (200, entry.value.clone())).ok_or_else(|| target.not_found())
    }

    pub fn create(&mut self, target: &Target, body: impl Into<Object>) -> Answer {
        let (mut target, body) = (target.clone(), body.into());
        target.name = text(&body, "name").to_owned();
        if let (true, Some(stem)) = (target.name.is_empty(), body["metadata"]["generateName"].as_str()) {
            target.name = format!("{stem}{:05}", self.version % 100_000);
        }
        if target.name.is_empty() {
            return Err(target.invalid(&["metadata.name: Required value: name or generateName is required".to_owned()]));
        }
        if self.get(&target.key()).is_some() {
            let what = format!("{} \"{}\" already exists", target.kind.plural, target.name);
            return Err(Refusal::new(409, "AlreadyExists", what));
        }
        let mut value = self.newborn(&target, body)?;
        strip_status(target.kind, &mut value);
        let mut managers = fields::Managers::new();
        if self.track_updates {
            fields::update(&Object::default(), &value, &mut managers, &target.manager(false), target.kind.custom());
        }
        Ok((201, self.put(target.kind, target.key(), value, managers.into())))
    }

    /// PUT.
    pub fn replace(&mut self, target: &Target, body: impl Into<Object>) -> Answer {
        let body = body.into();
        let Some(old) = self.get(&target.key()).cloned() else {
            // the Lease is one of the few kinds that an update creates
            let bound = !text(&body, "uid").is_empty() || !text(&body, "resourceVersion").is_empty();
            return match target.kind.kind {
                "Lease" if bound => Err(target.conflict("StorageError: invalid object, it is not there")),
                "Lease" => self.create(target, body),
                _ => Err(target.not_found()),
            };
        };
        let version = text(&body, "resourceVersion");
        if version.is_empty() && !target.kind.unconditional {
            return Err(target.invalid(&["metadata.resourceVersion: must be specified for an update".to_owned()]));
        }
        if !version.is_empty() && version != text(&old.value, "resourceVersion") {
            return Err(target.conflict(MODIFIED));
        }
        let uid = text(&body, "uid");
        if !uid.is_empty() && uid != text(&old.value, "uid") {
            return Err(target.conflict("Precondition failed: UID in precondition differs"));
        }
        self.finish_update(target, body)
    }

    /// JSON merge patch.
    pub fn merge(&mut self, target: &Target, patch: impl Into<Object>) -> Answer {
        let Some(old) = self.get(&target.key()).cloned() else { return Err(target.not_found()) };
        let mut body = Object::clone(&old.value);
        for (name, value) in patch.into().fields() {
            match value {
                Value::Null => body.set(name, Value::Null),
                value => merge_patch(&mut body[name], value),
            }
        }
        let version = text(&body, "resourceVersion");
        if version.is_empty() && !target.kind.unconditional {
            return Err(target.invalid(&["metadata.resourceVersion: must be specified for an update".to_owned()]));
        }
        if !version.is_empty() && version != text(&old.value, "resourceVersion") {
            return Err(target.conflict(MODIFIED));
        }
        if text(&body, "uid") != text(&old.value, "uid") {
            return Err(target.conflict("Precondition failed: UID in precondition differs"));
        }
        self.finish_update(target, body)
    }

    fn finish_update(&mut self, target: &Target, body: Object) -> Answer {
        let Some(old) = self.get(&target.key()).cloned() else { return Err(target.not_found()) };
        let mut value = self.successor(target, &old.value, body)?;
        // an update, unlike an apply, reads the metadata as Go's own type, in which an empty map is none
        for field in ["labels", "annotations"] {
            if value["metadata"][field].as_object().is_some_and(serde_json::Map::is_empty) {
                set(&mut value["metadata"], field, Value::Null);
            }
        }
        let mut managers = old.managers;
        // an object whose fields are nobody's is not tracked, as the server holds it, until somebody applies
        if self.track_updates && !managers.is_empty() {
            fields::update(
                &old.value,
                &value,
                Arc::make_mut(&mut managers),
                &target.manager(false),
                target.kind.custom(),
            );
        }
        Ok((200, self.settle(target, value, managers)))
    }

    pub fn apply(&mut self, target: &Target, body: impl Into<Object>) -> Answer {
        let body = body.into();
        let me = target.manager(true);
        let uid = text(&body, "uid").to_owned();
        let Some(old) = self.get(&target.key()).cloned() else {
            if !target.subresource.is_empty() {
                return Err(target.not_found());
            }
            if !uid.is_empty() {
                return Err(target.conflict("uid mismatch: the object does not exist"));
            }
            let mut value = self.newborn(target, body.clone())?;
            strip_status(target.kind, &mut value);
            let mut wanted = body;
            strip_status(target.kind, &mut wanted);
            let mut managers: fields::Managers = [(me, fields::leaves(&wanted).into_keys().collect())].into();
            managers.retain(|_, owned| !owned.is_empty());
            return Ok((201, self.put(target.kind, target.key(), value, managers.into())));
        };
        if !uid.is_empty() && uid != text(&old.value, "uid") {
            return Err(target.conflict("Precondition failed: UID in precondition differs"));
        }
        let version = text(&body, "resourceVersion");
        if !version.is_empty() && version != text(&old.value, "resourceVersion") {
            return Err(target.conflict(MODIFIED));
        }
        let body = self.within_reach(target, body);
        let mut managers = old.managers.clone();
        if self.track_updates && managers.is_empty() {
            // then the fields are those of whoever wrote them before
            let before =
                fields::Manager { name: "before-first-apply".into(), apply: false, subresource: String::new() };
            fields::update(&Object::default(), &old.value, Arc::make_mut(&mut managers), &before, target.kind.custom());
        }
        let applied = fields::apply(&old.value, &managers, &body, (&me, target.kind.custom()), target.force);
        let (merged, managers) = applied.map_err(|paths| {
            let what = format!("Apply failed with {} conflicts: {paths:?}", paths.len());
            Refusal::new(409, "Conflict", what)
        })?;
        let value = self.successor(target, &old.value, merged)?;
        Ok((200, self.settle(target, value, managers)))
    }

    /// An apply through a subresource speaks of that part alone, one through the main resource of all but the status.
    fn within_reach(&self, target: &Target, mut body: Object) -> Object {
        if target.subresource == "status"
            && target.kind.custom()
            && let Some(metadata) = body["metadata"].as_object_mut()
        {
            metadata.retain(|name, _| name == "name" || name == "namespace");
        }
        match target.subresource.as_str() {
            "status" => body.retain(|name| matches!(name, "apiVersion" | "kind" | "metadata" | "status")),
            _ => strip_status(target.kind, &mut body),
        }
        body
    }

    /// DELETE with its options.
    pub fn delete(&mut self, target: &Target, options: impl Into<Object>) -> Answer {
        let options = options.into();
        let Some(old) = self.get(&target.key()).cloned() else { return Err(target.not_found()) };
        let wanted = &options["preconditions"];
        for (field, name) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
            if wanted[field].as_str().is_some_and(|wanted| wanted != text(&old.value, field)) {
                return Err(target.conflict(&format!("Precondition failed: {name} in precondition differs")));
            }
        }
        let waits = old.value["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) > 0;
        if waits && options["gracePeriodSeconds"].is_null() {
            return Ok((200, old.value)); // on its way already, and nobody asks for more haste
        }
        let over = matches!(old.value["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let scheduled = target.kind.kind == "Pod" && old.value["spec"]["nodeName"].is_string() && !over;
        let default = old.value["spec"]["terminationGracePeriodSeconds"].as_i64().unwrap_or(30);
        let grace = if scheduled { options["gracePeriodSeconds"].as_i64().unwrap_or(default) } else { 0 };
        let held = old.value["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
        if grace == 0 && !held {
            let last = self.remove(&target.key()).ok_or_else(|| target.not_found())?;
            return Ok((200, last));
        }
        let mut value = Object::clone(&old.value);
        if value["metadata"]["deletionTimestamp"].is_null() {
            let grace_ms = u64::try_from(grace).unwrap_or(0) * 1_000;
            value["metadata"]["deletionTimestamp"] = json!(super::store::at(self.now_ms + grace_ms));
            value["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            if target.kind.generation {
                value["metadata"]["generation"] = json!(value["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
            }
        }
        Ok((200, self.put(target.kind, target.key(), value, old.managers)))
    }

    fn newborn(&mut self, target: &Target, mut body: Object) -> Result<Object, Refusal> {
        let uid = self.uid();
        body["apiVersion"] = json!(target.kind.api_version());
        body["kind"] = json!(target.kind.kind);
        let now = self.now();
        if !body["metadata"].is_object() {
            body["metadata"] = json!({});
        }
        let metadata = &mut body["metadata"];
        metadata["name"] = json!(target.name);
        if !target.namespace.is_empty() {
            metadata["namespace"] = json!(target.namespace);
        }
        metadata["uid"] = json!(uid);
        metadata["creationTimestamp"] = json!(now);
        if let Some(map) = metadata.as_object_mut() {
            ["resourceVersion", "managedFields", "deletionTimestamp", "generation"]
                .iter()
                .for_each(|name| drop(map.remove(*name)));
        }
        if target.kind.generation {
            metadata["generation"] = json!(1);
        }
        self.admitted(target, body)
    }

    /// The new object that an update of `old` to `body` makes: what the server owns stays, what lies outside is ignored.
    fn successor(&mut self, target: &Target, old: &Object, mut value: Object) -> Result<Object, Refusal> {
        if target.subresource == "status" {
            let theirs = |name: &str| name == "status" || (name == "metadata" && !target.kind.custom());
            let ours = old.fields().map(|(name, _)| name).filter(|name| !theirs(name));
            ours.for_each(|name| value.share(old, name));
            value.retain(|name| theirs(name) || old.get(name).is_some());
            if !target.kind.custom() {
                keep(old, &mut value, &["ownerReferences"]);
            }
        } else if target.kind.status {
            value.share(old, "status");
        }
        keep(old, &mut value, &OWNED);
        ["apiVersion", "kind"].iter().for_each(|name| value.share(old, name));
        let mut value = self.admitted(target, value)?;
        if target.kind.generation && target.subresource.is_empty() && !old.agrees_but(&value, &["metadata", "status"]) {
            value["metadata"]["generation"] = json!(old["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
        }
        Ok(value)
    }

    fn admitted(&self, target: &Target, mut value: Object) -> Result<Object, Refusal> {
        if let Some(rules) = schema::of(target.kind.kind) {
            let faults = schema::admit(rules, &mut value);
            if !faults.is_empty() {
                return Err(target.invalid(&faults));
            }
        }
        Ok(value)
    }

    /// Stores; an object on its way out goes when nothing holds it any more.
    fn settle(&mut self, target: &Target, value: Object, managers: Arc<fields::Managers>) -> Arc<Object> {
        let metadata = &value["metadata"];
        let held = metadata["finalizers"].as_array().is_some_and(|list| !list.is_empty());
        let waits = metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or(0) > 0;
        let goes = metadata["deletionTimestamp"].is_string() && !held && !waits;
        let stored = self.put(target.kind, target.key(), value, managers);
        if goes { self.remove(&target.key()).unwrap_or(stored) } else { stored }
    }
}

/// Of the metadata these are as they were.
fn keep(old: &Object, value: &mut Object, fields: &[&str]) {
    let (before, after) = (&old["metadata"], &value["metadata"]);
    let moved: Vec<&&str> = fields.iter().filter(|name| before.get(name) != after.get(name)).collect();
    // (written only where they differ: to write is to make all of it anew)
    for name in moved {
        set(&mut value["metadata"], name, before[*name].clone());
    }
}

fn strip_status(kind: &Kind, value: &mut Object) {
    if kind.status {
        value.set("status", Value::Null);
    }
}

fn set(object: &mut Value, field: &str, value: Value) {
    if let Some(map) = object.as_object_mut() {
        match value {
            Value::Null => drop(map.remove(field)),
            value => drop(map.insert(field.to_owned(), value)),
        }
    }
}

fn text<'a>(object: &'a Object, field: &str) -> &'a str {
    object["metadata"][field].as_str().unwrap_or_default()
}

pub fn merge_patch(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return *target = patch.clone() };
    if !target.is_object() {
        *target = json!({});
    }
    let Some(map) = target.as_object_mut() else { return };
    for (name, value) in patch {
        match value {
            Value::Null => drop(map.remove(name)),
            value => merge_patch(map.entry(name.clone()).or_insert(Value::Null), value),
        }
    }
}
