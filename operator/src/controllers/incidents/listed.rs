//! A record as it is read: without who wrote which field of it, which is as long as the record itself, and of which every pass reads dozens.

use crds::{EngineIncident, EngineIncidentSpec, EngineIncidentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Deserialize;

use crate::controllers::metadata::without_managers;

/// An [`EngineIncident`] of a list.
#[derive(Debug, Clone, Deserialize, Resource)]
#[resource(inherit = "EngineIncident")]
pub struct ListedIncident {
    #[serde(deserialize_with = "without_managers")]
    pub metadata: ObjectMeta,
    pub spec: EngineIncidentSpec,
    pub status: Option<EngineIncidentStatus>,
}

impl From<ListedIncident> for EngineIncident {
    fn from(ListedIncident { metadata, spec, status }: ListedIncident) -> Self {
        EngineIncident { metadata, spec, status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn nothing_of_a_record_is_lost_but_who_wrote_it() {
        let written = json!([{"manager": "m", "operation": "Apply", "fieldsV1": {"f:spec": {}}}]);
        let whole = |managed: Value| {
            json!({
                "apiVersion": "inference.truebeat.io/v1alpha1", "kind": "EngineIncident",
                "metadata": {"name": "i", "namespace": "serving", "uid": "u", "managedFields": managed},
                "spec": {"deployment": "chat", "pod": "a", "podUid": "uid-a", "class": "Dead", "episodeId": "e-a"},
                "status": {"stage": "Cleared", "outcome": "Cleared", "timeline": {"suspectAt": "2026-01-01T00:00:00Z"}},
            })
        };
        let listed: ListedIncident = serde_json::from_value(whole(written)).unwrap();
        assert_eq!(EngineIncident::from(listed), serde_json::from_value(whole(Value::Null)).unwrap());
        assert_eq!(ListedIncident::url_path(&(), Some("ns")), EngineIncident::url_path(&(), Some("ns")));
    }
}
