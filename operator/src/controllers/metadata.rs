//! What is read of the objects' metadata, and nothing else of it. Most of the text of a pod's metadata says who wrote which field, as a tree of
//! hundreds of small values; of ten thousand pods, as whoever begins to lead lists them, that tree alone took seconds to build.

use std::collections::BTreeMap;

use futures::Stream;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::{
    Client, Resource,
    api::{ListParams, WatchEvent, WatchParams},
    core::{ObjectList, Request},
};
use serde::{Deserialize, Deserializer};

/// An object as a watch sees it.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Seen {
    pub metadata: SeenMetadata,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SeenMetadata {
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub resource_version: Option<String>,
    creation_timestamp: Option<Timestamp>,
    managed_fields: Vec<Written>,
}

/// That somebody wrote some of its fields; which ones nobody asks.
#[derive(Debug, Clone, Deserialize)]
struct Written {
    time: Option<Timestamp>,
}

impl Seen {
    /// When the last change of it was stored, by the API server's clock.
    pub fn changed_at(&self) -> Option<Timestamp> {
        let written = self.metadata.managed_fields.iter().filter_map(|written| written.time);
        written.max().or(self.metadata.creation_timestamp)
    }
}

/// The objects of one kind, as metadata.
#[derive(Clone)]
pub struct Source {
    client: Client,
    url: String,
}

impl Source {
    /// In this namespace; `None`: in all of them.
    pub fn of<K: Resource<DynamicType = ()>>(client: Client, namespace: Option<&str>) -> Self {
        Self { client, url: K::url_path(&(), namespace) }
    }

    /// One page of a list.
    pub async fn list(&self, params: &ListParams) -> kube::Result<ObjectList<Seen>> {
        let request = Request::new(&self.url).list_metadata(params).map_err(kube::Error::BuildRequest)?;
        self.client.request(request).await
    }

    /// A watch from this version on.
    pub async fn watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> kube::Result<impl Stream<Item = kube::Result<WatchEvent<Seen>>> + Send + use<>> {
        let request = Request::new(&self.url).watch_metadata(params, version).map_err(kube::Error::BuildRequest)?;
        self.client.request_events(request).await
    }
}

/// Metadata without who wrote what.
pub fn without_managers<'de, D: Deserializer<'de>>(from: D) -> Result<ObjectMeta, D::Error> {
    Ok(Unmanaged::deserialize(from)?.into())
}

/// All of [`ObjectMeta`] but that.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Unmanaged {
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_grace_period_seconds: Option<i64>,
    deletion_timestamp: Option<Time>,
    finalizers: Option<Vec<String>>,
    generate_name: Option<String>,
    generation: Option<i64>,
    labels: Option<BTreeMap<String, String>>,
    name: Option<String>,
    namespace: Option<String>,
    owner_references: Option<Vec<OwnerReference>>,
    resource_version: Option<String>,
    self_link: Option<String>,
    uid: Option<String>,
}

impl From<Unmanaged> for ObjectMeta {
    fn from(read: Unmanaged) -> Self {
        ObjectMeta {
            annotations: read.annotations,
            creation_timestamp: read.creation_timestamp,
            deletion_grace_period_seconds: read.deletion_grace_period_seconds,
            deletion_timestamp: read.deletion_timestamp,
            finalizers: read.finalizers,
            generate_name: read.generate_name,
            generation: read.generation,
            labels: read.labels,
            managed_fields: None,
            name: read.name,
            namespace: read.namespace,
            owner_references: read.owner_references,
            resource_version: read.resource_version,
            self_link: read.self_link,
            uid: read.uid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Every field of it.
    fn whole() -> Value {
        json!({
            "annotations": {"a": "b"}, "creationTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30,
            "deletionTimestamp": "2026-01-01T00:01:00Z", "finalizers": ["example.com/wait"], "generateName": "chat-",
            "generation": 7, "labels": {"c": "d"}, "name": "chat-x", "namespace": "serving",
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "chat", "uid": "u", "controller": true}],
            "resourceVersion": "42", "selfLink": "/x", "uid": "uid-x",
            "managedFields": [{"manager": "m", "operation": "Apply", "time": "2026-01-01T00:00:30Z", "fieldsV1": {"f:a": {}}}],
        })
    }

    #[test]
    fn nothing_but_who_wrote_what_is_left_out() {
        let read = without_managers(whole()).unwrap();
        let expected = ObjectMeta { managed_fields: None, ..serde_json::from_value(whole()).unwrap() };
        assert_eq!(read, expected);
        let back = serde_json::to_value(&read).unwrap();
        assert_eq!(
            back.as_object().unwrap().len() + 1,
            whole().as_object().unwrap().len(),
            "the test names every field"
        );
        assert_eq!(without_managers(json!({})).unwrap(), ObjectMeta::default());
        assert!(without_managers(json!({"name": 7})).is_err());
    }

    #[test]
    fn an_object_changed_when_anybody_wrote_it_last() {
        let changed = |metadata: Value| {
            let seen: Seen =
                serde_json::from_value(json!({"kind": "PartialObjectMetadata", "metadata": metadata})).unwrap();
            seen.changed_at().map(|at| at.as_second())
        };
        let at = |time: &str| json!({"manager": "m", "operation": "Apply", "time": time});
        let made = "1970-01-01T00:00:01Z";
        assert_eq!(changed(json!({})), None);
        assert_eq!(changed(json!({"creationTimestamp": null})), None);
        assert_eq!(changed(json!({"creationTimestamp": made})), Some(1));
        let fields = [at("1970-01-01T00:00:09Z"), at("1970-01-01T00:00:05Z"), json!({"manager": "m"})];
        assert_eq!(changed(json!({"creationTimestamp": made, "managedFields": fields})), Some(9));
    }
}
