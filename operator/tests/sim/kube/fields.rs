//! Field management: which manager owns which field, server-side apply with its conflicts, and updates that take fields
//! over. A path is a list of `f:name`, `k:{"key":…}` and `v:value` elements, as in `managedFields`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::{Map, Value, json};

use super::object::Object;

/// (Paths share their elements: most of one is the beginning of another.)
pub type Path = Vec<Arc<str>>;
pub type Set = BTreeSet<Path>;

/// Who wrote, how, and through which subresource.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Manager {
    pub name: String,
    pub apply: bool,
    pub subresource: String,
}

pub type Managers = BTreeMap<Manager, Set>;

enum List {
    Map(&'static [&'static str]),
    Set,
    Atomic,
}

/// How lists merge, by the name of the field (a schema in miniature; what is not here is atomic).
fn list_of(path: &Path) -> List {
    let name = path.last().map(|element| element.trim_start_matches("f:")).unwrap_or_default();
    let under_container = path.iter().any(|e| matches!(&**e, "f:containers" | "f:initContainers"));
    match name {
        "conditions" => List::Map(&["type"]),
        "containers" | "initContainers" | "env" | "volumes" => List::Map(&["name"]),
        "volumeMounts" => List::Map(&["mountPath"]),
        "ports" if under_container => List::Map(&["containerPort", "protocol"]),
        "ports" => List::Map(&["port", "protocol"]),
        "ownerReferences" => List::Map(&["uid"]),
        "grants" | "recent" => List::Map(&["podUid"]),
        "finalizers" => List::Set,
        _ => List::Atomic,
    }
}

fn atomic_map(path: &Path) -> bool {
    let name = path.last().map(|element| element.trim_start_matches("f:")).unwrap_or_default();
    matches!(name, "selector" | "nodeSelector" | "secretKeyRef" | "configMapKeyRef" | "fieldRef" | "roleRef")
}

fn key_of(item: &Value, keys: &[&str]) -> String {
    let value = |key: &str| {
        item.get(key).cloned().unwrap_or_else(|| if key == "protocol" { json!("TCP") } else { Value::Null })
    };
    let map: Map<String, Value> = keys.iter().map(|key| ((*key).to_owned(), value(key))).collect();
    format!("k:{}", Value::Object(map))
}

/// Every leaf of `object` that a manager can own; list items have an entry of their own, of value null.
pub fn leaves(object: &Object) -> BTreeMap<Path, &Value> {
    leaves_but(object, |_| false)
}

/// The same without the fields that are `left` out.
pub fn leaves_but(object: &Object, left: impl Fn(&str) -> bool) -> BTreeMap<Path, &Value> {
    let mut out = BTreeMap::new();
    for (name, child) in object.fields().filter(|(name, _)| !left(name)) {
        match name {
            "apiVersion" | "kind" => {}
            "metadata" => {
                for (field, child) in child.as_object().into_iter().flatten() {
                    let owned = matches!(field.as_str(), "labels" | "annotations" | "finalizers" | "ownerReferences");
                    // (of these an empty one is none)
                    if owned && !is_bare(child) {
                        walk(child, vec!["f:metadata".into(), format!("f:{field}").into()], &mut out);
                    }
                }
            }
            _ => walk(child, vec![format!("f:{name}").into()], &mut out),
        }
    }
    out
}

/// The maps and lists that a manager owns as such because an update of its made them: all of a custom object, and of the
/// others those that Go can tell apart from empty ones.
fn containers(object: &Object, custom: bool) -> Set {
    let mut out = Set::new();
    for (name, child) in object.fields() {
        match name {
            "metadata" => {
                for field in ["labels", "annotations", "finalizers", "ownerReferences"] {
                    if child.get(field).is_some_and(|value| !is_bare(value)) {
                        out.insert(vec!["f:metadata".into(), format!("f:{field}").into()]);
                    }
                }
            }
            "data" => drop(out.insert(vec!["f:data".into()])),
            _ if custom => containers_below(child, vec![format!("f:{name}").into()], &mut out),
            _ => {}
        }
    }
    out
}

fn containers_below(value: &Value, path: Path, out: &mut Set) {
    let below = |element: String| path.iter().cloned().chain([element.into()]).collect::<Path>();
    match (value, list_of(&path)) {
        (Value::Object(map), _) if !map.is_empty() && !atomic_map(&path) => {
            map.iter().for_each(|(name, child)| containers_below(child, below(format!("f:{name}")), out));
        }
        (Value::Array(list), List::Map(keys)) => {
            list.iter().for_each(|item| containers_below(item, below(key_of(item, keys)), out));
        }
        (Value::Array(_), List::Set) => {}
        _ => return,
    }
    out.insert(path);
}

fn walk<'a>(value: &'a Value, path: Path, out: &mut BTreeMap<Path, &'a Value>) {
    let below = |element: String| path.iter().cloned().chain([element.into()]).collect::<Path>();
    match value {
        Value::Object(map) if !map.is_empty() && !atomic_map(&path) => {
            map.iter().for_each(|(name, child)| walk(child, below(format!("f:{name}")), out));
        }
        Value::Array(list) => match list_of(&path) {
            List::Map(keys) => {
                for item in list {
                    let at = below(key_of(item, keys));
                    out.insert(at.clone(), &Value::Null);
                    walk(item, at, out);
                }
            }
            List::Set => out.extend(list.iter().map(|item| (below(format!("v:{item}")), item))),
            List::Atomic => drop(out.insert(path, value)),
        },
        _ => drop(out.insert(path, value)),
    }
}

/// Server-side apply: the merged object and the new managers, or the paths that others own with another value.
pub fn apply(
    live: &Object,
    managers: &Arc<Managers>,
    applied: &Object,
    (me, custom): (&Manager, bool),
    force: bool,
) -> Result<(Object, Arc<Managers>), Vec<Path>> {
    let wanted = leaves(applied);
    // who is alone has nobody to differ with, which spares most of the work, and who says the same fields again the rest
    let alone = managers.keys().all(|manager| manager == me);
    if alone && managers.get(me).is_some_and(|mine| mine.iter().eq(wanted.keys())) {
        return Ok((merged(live, applied), managers.clone()));
    }
    let mut managers = Managers::clone(managers);
    let before = if alone { BTreeMap::new() } else { leaves(live) };
    let differs = |path: &Path, value: &Value| !value.is_null() && before.get(path) != Some(&value);
    let mut changed: Set =
        wanted.iter().filter(|(path, value)| differs(path, value)).map(|(path, _)| path.clone()).collect();
    if !alone {
        // a map that is made anew is still that of who made it first
        changed.extend(containers(applied, custom).difference(&containers(live, custom)).cloned());
    }
    let mut conflicts = Vec::new();
    for (_, owned) in managers.iter_mut().filter(|(manager, _)| *manager != me) {
        let taken: Vec<Path> = changed.iter().filter(|path| owned.contains(*path)).cloned().collect();
        owned.retain(|path| !force || !taken.contains(path));
        conflicts.extend(taken);
    }
    if !force && !conflicts.is_empty() {
        return Err(conflicts);
    }
    let mut merged = merged(live, applied);
    let mine = managers.remove(me).unwrap_or_default();
    let dropped = mine.iter().filter(|path| !wanted.contains_key(*path));
    // an item goes, whoever owns parts of it, unless somebody else lists it
    let listed = |path: &Path| path.last().is_some_and(|element| element.starts_with("k:"));
    let owns = |owned: &Set, path: &Path| owned.iter().any(|o| o == path || (!listed(path) && o.starts_with(path)));
    let others = |path: &Path| managers.values().any(|owned| owns(owned, path));
    let kept_below = |path: &Path| wanted.keys().any(|other| other.starts_with(path));
    let mut dropped: Vec<&Path> = dropped.filter(|path| !others(path) && !kept_below(path)).collect();
    dropped.sort_by_key(|path| path.len()); // an item before its key, or nobody would know it any more
    // a map that somebody else made stays when it is empty, where the server can tell it from none
    let kept = |path: &[Arc<str>]| custom && managers.values().any(|owned| owned.contains(path));
    dropped.iter().for_each(|path| remove_from(&mut merged, path, &kept));
    let items: Vec<Path> = dropped.into_iter().filter(|path| listed(path)).cloned().collect();
    for owned in managers.values_mut() {
        owned.retain(|path| !items.iter().any(|item| path.starts_with(item)));
    }
    managers.insert(me.clone(), wanted.into_keys().collect());
    managers.retain(|_, owned| !owned.is_empty());
    Ok((merged, managers.into()))
}

/// After an update or a patch: what it changed is its manager's, what it removed is nobody's.
pub fn update(old: &Object, new: &Object, managers: &mut Managers, me: &Manager, custom: bool) {
    let (before, after) = (leaves(old), leaves(new));
    let (maps_before, maps_after) = (containers(old, custom), containers(new, custom));
    let changed = after.iter().filter(|(path, value)| before.get(*path) != Some(value)).map(|(path, _)| path.clone());
    let changed: Set = changed.chain(maps_after.difference(&maps_before).cloned()).collect();
    let gone = before.keys().filter(|path| !after.contains_key(*path)).cloned();
    let gone: Set = gone.chain(maps_before.difference(&maps_after).cloned()).collect();
    for owned in managers.values_mut() {
        owned.retain(|path| !changed.contains(path) && !gone.contains(path));
    }
    if !changed.is_empty() {
        managers.entry(me.clone()).or_default().extend(changed);
    }
    managers.retain(|_, owned| !owned.is_empty());
}

fn merged(live: &Object, applied: &Object) -> Object {
    let mut merged = live.clone();
    for (name, value) in applied.fields().filter(|(name, value)| live.get(name) != Some(value)) {
        match live.get(name) {
            Some(_) => merge(&mut merged[name], value, &vec![format!("f:{name}").into()]),
            None => merged[name] = value.clone(),
        }
    }
    merged
}

fn merge(live: &mut Value, applied: &Value, path: &Path) {
    let below = |element: String| path.iter().cloned().chain([element.into()]).collect::<Path>();
    match (live, applied) {
        (Value::Object(live), Value::Object(applied)) if !atomic_map(path) => {
            for (name, value) in applied {
                match live.get_mut(name) {
                    Some(child) => merge(child, value, &below(format!("f:{name}"))),
                    None => drop(live.insert(name.clone(), value.clone())),
                }
            }
        }
        (Value::Array(live), Value::Array(applied)) => match list_of(path) {
            List::Map(keys) => *live = merge_items(std::mem::take(live), applied, keys, path),
            List::Set => applied.iter().for_each(|item| {
                if !live.contains(item) {
                    live.push(item.clone());
                }
            }),
            List::Atomic => live.clone_from(applied),
        },
        (live, applied) => *live = applied.clone(),
    }
}

/// Items that both have, and new ones, stand in the order of the applied list; the others keep their places.
fn merge_items(live: Vec<Value>, applied: &[Value], keys: &[&str], path: &Path) -> Vec<Value> {
    let mut theirs: Vec<(String, Value)> = live.into_iter().map(|item| (key_of(&item, keys), item)).collect();
    let mut mine = applied.iter().map(|item| (key_of(item, keys), item)).peekable();
    let known: BTreeSet<String> = theirs.iter().map(|(key, _)| key.clone()).collect();
    let wanted: BTreeSet<String> = applied.iter().map(|item| key_of(item, keys)).collect();
    let mut old: BTreeMap<String, Value> = theirs.iter().filter(|(key, _)| wanted.contains(key)).cloned().collect();
    let mut take = |(key, item): (String, &Value)| match old.remove(&key) {
        Some(mut both) => {
            merge(&mut both, item, &path.iter().cloned().chain([key.into()]).collect());
            both
        }
        None => item.clone(),
    };
    let mut out = Vec::new();
    for (key, item) in theirs.drain(..) {
        if !wanted.contains(&key) {
            out.push(item);
            continue;
        }
        while let Some(new) = mine.next_if(|(key, _)| !known.contains(key)) {
            out.push(take(new));
        }
        out.extend(mine.next().map(&mut take));
    }
    out.extend(mine.map(take));
    out
}

/// Takes away what is at `path`, and the fields of the object that are empty then and not `kept`.
fn remove_from(object: &mut Object, path: &[Arc<str>], kept: &dyn Fn(&[Arc<str>]) -> bool) {
    let Some(name) = path.first().map(|element| &element[2..]).filter(|name| object.get(name).is_some()) else {
        return;
    };
    if path.len() > 1 {
        remove(&mut object[name], path, 1, kept);
    }
    if path.len() == 1 || (is_bare(&object[name]) && !kept(&path[..1])) {
        object.set(name, Value::Null);
    }
}

fn is_bare(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// The same within a value, from the element `depth` on, and the maps and lists that are empty then and not `kept`.
fn remove(value: &mut Value, path: &[Arc<str>], depth: usize, kept: &dyn Fn(&[Arc<str>]) -> bool) {
    let Some(element) = path.get(depth) else { return };
    let (name, last) = (&element[2..], depth + 1 == path.len());
    match value {
        Value::Object(map) if last => drop(map.remove(name)),
        Value::Object(map) => {
            let Some(child) = map.get_mut(name) else { return };
            remove(child, path, depth + 1, kept);
            if is_bare(child) && !kept(&path[..=depth]) {
                map.remove(name);
            }
        }
        Value::Array(list) => {
            let matches = |item: &Value| {
                let Ok(Value::Object(keys)) = serde_json::from_str(name) else { return false };
                keys.iter().all(|(key, value)| item.get(key).unwrap_or(&json!("TCP")) == value)
            };
            if !last {
                let item = list.iter_mut().filter(|item| matches(item));
                item.for_each(|item| remove(item, path, depth + 1, kept));
            } else if element.starts_with("v:") {
                list.retain(|item| serde_json::from_str::<Value>(name).is_ok_and(|gone| gone != *item));
            } else {
                list.retain(|item| !matches(item));
            }
        }
        _ => {}
    }
}
