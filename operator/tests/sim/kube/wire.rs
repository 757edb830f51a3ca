//! HTTP as the client speaks it: from a request to a verb on the store, and from a selector to a list.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;
use http::{Method, Uri};
use serde_json::Value;

use super::{Refusal, kinds::KINDS, object::Object, select, store::Store, verbs::Target};

/// How far a list that asks for any version lags behind.
const STALE_MS: u64 = 4_000;

/// A request, understood.
#[derive(Debug, Clone)]
pub struct Call {
    pub method: Method,
    pub target: Target,
    pub query: BTreeMap<String, String>,
    pub content_type: String,
    pub body: Object,
    pub path: String,
    /// The client asks for the metadata alone.
    pub partial: bool,
}

impl Call {
    /// Reads a request. The manager is the one that it names.
    pub fn parse(method: &Method, uri: &Uri, content_type: &str, body: &[u8]) -> Result<Self, Refusal> {
        let query: BTreeMap<String, String> = uri.query().unwrap_or_default().split('&').filter_map(pair).collect();
        let not_found = || Refusal::new(404, "NotFound", "the server could not find the requested resource");
        let words: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
        let (group, rest) = match words.as_slice() {
            ["api", _, rest @ ..] => ("", rest),
            ["apis", group, _, rest @ ..] => (*group, rest),
            _ => return Err(not_found()),
        };
        let (namespace, rest) = match rest {
            ["namespaces", namespace, plural, rest @ ..] => (*namespace, [&[*plural], rest].concat()),
            rest => ("", rest.to_vec()),
        };
        let plural = rest.first().ok_or_else(not_found)?;
        let kind = KINDS.iter().find(|kind| kind.plural == *plural && kind.group == group).ok_or_else(not_found)?;
        let manager = query.get("fieldManager").map_or("unknown", String::as_str);
        let mut target = Target::new(kind, namespace, rest.get(1).unwrap_or(&""), manager);
        target.subresource = rest.get(2).unwrap_or(&"").to_string();
        target.force = query.get("force").is_some_and(|force| force == "true");
        let body = if body.is_empty() { Value::Null } else { serde_json::from_slice::<Value>(body).map_err(bad)? };
        let (method, content_type) = (method.clone(), content_type.to_owned());
        let path = uri.path().to_owned();
        Ok(Call { method, target, query, content_type, body: body.into(), path, partial: false })
    }

    /// As RBAC names it; a PUT is a `replace`.
    pub fn verb(&self) -> &'static str {
        match (self.method.as_str(), self.target.name.is_empty()) {
            ("GET", _) if self.is_watch() => "watch",
            ("GET", true) => "list",
            ("GET", false) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "replace",
            ("DELETE", _) => "delete",
            _ => "patch",
        }
    }

    pub fn is_write(&self) -> bool {
        self.method != Method::GET
    }

    pub fn is_watch(&self) -> bool {
        self.query.get("watch").is_some_and(|watch| watch == "true" || watch == "1")
    }

    /// Does it all at once.
    pub fn perform(&self, store: &mut Store) -> Result<(u16, Arc<Object>), Refusal> {
        let target = &self.target;
        match (self.method.as_str(), target.name.is_empty()) {
            ("GET", true) => self.list(store),
            ("GET", false) => store.read(target),
            ("POST", _) if target.subresource == "eviction" => store.evict(target, &self.body),
            ("POST", _) => store.create(target, self.body.clone()),
            ("PUT", _) => store.replace(target, self.body.clone()),
            ("PATCH", _) if self.content_type.contains("apply-patch") => store.apply(target, self.body.clone()),
            ("PATCH", _) if self.content_type.contains("merge-patch+json") => store.merge(target, self.body.clone()),
            ("DELETE", _) => store.delete(target, self.body.clone()),
            _ => Err(Refusal::new(405, "MethodNotAllowed", "the server does not allow this method")),
        }
    }

    fn list(&self, store: &Store) -> Result<(u16, Arc<Object>), Refusal> {
        let kind = self.target.kind;
        self.query.get("fieldSelector").map_or(Ok(()), |selector| select::known_fields(selector))?;
        let within = |value: &&Arc<Object>| {
            let namespace = &self.target.namespace;
            namespace.is_empty() || value["metadata"]["namespace"] == namespace.as_str()
        };
        let here = |value: &&Arc<Object>| within(value) && self.selects(value);
        if self.query.get("resourceVersion").is_some_and(|version| version == "0") {
            // "any version": from a watch cache that may lag (P2)
            let old = store.as_of(kind.plural, store.now_ms.saturating_sub(STALE_MS));
            return Ok((200, self.list_of(old.iter().filter(here), &store.version_text(), "")));
        }
        let limit = self.query.get("limit").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
        let one = self.query.get("fieldSelector").is_some_and(|selector| select::of_one(selector));
        let Some(limit) = limit.filter(|_| !one) else {
            let all = store.of(kind.plural).map(|(_, entry)| &entry.value).filter(here);
            return Ok((200, self.list_of(all, &store.version_text(), "")));
        };
        // a page; what it goes on from is gone as soon as anything has changed
        let (version, from) = match self.query.get("continue").and_then(|token| token.split_once(':')) {
            Some((version, from)) => (version.to_owned(), from.parse().unwrap_or(0)),
            None => (store.version_text(), 0),
        };
        if version != store.version_text() {
            return Err(Refusal::new(410, "Expired", "The provided continue parameter is too old"));
        }
        // it ends where it is full, and goes on wherever anything is left, be that selected or not
        let page = if store.page == 0 { limit } else { store.page.min(limit) };
        let mut rest = store.of(kind.plural).map(|(_, entry)| &entry.value).filter(within).enumerate().skip(from);
        let items: Vec<_> = rest.by_ref().filter(|(_, value)| self.selects(value)).take(page).collect();
        let next = rest.next().map(|(at, _)| format!("{version}:{at}")).unwrap_or_default();
        Ok((200, self.list_of(items.into_iter().map(|(_, value)| value), &version, &next)))
    }

    /// A list as the API writes it.
    fn list_of<'a>(&self, items: impl Iterator<Item = &'a Arc<Object>>, version: &str, next: &str) -> Arc<Object> {
        let kind = self.target.kind;
        let (group_version, name) = match self.partial {
            true => ("meta.k8s.io/v1".to_owned(), "PartialObjectMetadata"),
            false => (kind.api_version(), kind.kind),
        };
        let head = format!(
            r#"{{"apiVersion":"{group_version}","kind":"{name}List","metadata":{{"resourceVersion":"{version}","continue":"{next}"}},"items":["#
        );
        let mut text = head.into_bytes();
        for (at, item) in items.enumerate() {
            text.extend((at > 0).then_some(b','));
            text.extend_from_slice(&self.text_of(item));
        }
        text.extend_from_slice(b"]}");
        Object::list(text)
    }

    /// What the client gets of an object that it asks for. (A list is text already.)
    pub fn text_of(&self, object: &Object) -> Bytes {
        if self.partial && !object.is_empty() { object.partial() } else { object.text() }
    }

    /// Do the request's selectors take this object?
    pub fn selects(&self, value: &Object) -> bool {
        let (labels, fields) = (self.query.get("labelSelector"), self.query.get("fieldSelector"));
        labels.is_none_or(|selector| select::by_labels(selector, &value["metadata"]["labels"]))
            && fields.is_none_or(|selector| select::by_fields(selector, value))
    }
}

fn bad(error: serde_json::Error) -> Refusal {
    Refusal::new(400, "BadRequest", error.to_string())
}

fn pair(text: &str) -> Option<(String, String)> {
    let (key, value) = text.split_once('=')?;
    Some((decode(key), decode(value)))
}

fn decode(text: &str) -> String {
    let (bytes, mut out, mut i) = (text.as_bytes(), Vec::new(), 0);
    while i < bytes.len() {
        let hex = (bytes[i] == b'%').then(|| text.get(i + 1..i + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 3;
            }
            None => {
                out.push(if bytes[i] == b'+' { b' ' } else { bytes[i] });
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}
