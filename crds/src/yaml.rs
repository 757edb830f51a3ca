//! `crdgen`: the CustomResourceDefinitions as YAML files, generated from the types. The files under `crds/yaml` are
//! committed; a test fails when they are stale.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSON};
use kube::CustomResourceExt;
use thiserror::Error;

use crate::{EngineIncident, InferenceDeployment};

/// A CRD could not be written as YAML.
#[derive(Debug, Error)]
pub enum YamlError {
    #[error("write {name} as JSON: {source}")]
    Json { name: &'static str, source: serde_json::Error },
    #[error("write {name} as YAML: {source}")]
    Yaml { name: &'static str, source: serde_saphyr::SerializeError },
}

/// File name and content of each CustomResourceDefinition, in the order in which they should be applied.
pub fn crdgen() -> Result<Vec<(String, String)>, YamlError> {
    let crds = [("InferenceDeployment", InferenceDeployment::crd()), ("EngineIncident", EngineIncident::crd())];
    let mut files = Vec::with_capacity(crds.len());
    for (name, mut crd) in crds {
        if name == "InferenceDeployment" {
            unseen(&mut crd);
        }
        let file = format!("{}.yaml", crd.metadata.name.as_deref().unwrap_or(name));
        files.push((file, to_yaml(name, &crd)?));
    }
    Ok(files)
}

/// An object without a status is ready in the eyes of kstatus. Until an operator has looked it must not be: the server itself says
/// that no generation was observed. (The derive macro knows no default for a whole status.)
fn unseen(crd: &mut CustomResourceDefinition) {
    for version in &mut crd.spec.versions {
        let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut());
        if let Some(status) = schema.and_then(|schema| schema.properties.as_mut()?.get_mut("status")) {
            status.default = Some(JSON(serde_json::json!({"observedGeneration": -1})));
        }
    }
}

/// One object as a YAML document, by way of JSON: absent fields stay absent, numbers and strings keep their type.
pub fn to_yaml<T: serde::Serialize>(name: &'static str, object: &T) -> Result<String, YamlError> {
    let value = serde_json::to_value(object).map_err(|source| YamlError::Json { name, source })?;
    serde_saphyr::to_string(&value).map_err(|source| YamlError::Yaml { name, source })
}
