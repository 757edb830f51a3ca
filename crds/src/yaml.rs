//! `crdgen`: the CustomResourceDefinitions as YAML files, generated from the types. The files under `crds/yaml` are
//! committed; a test fails when they are stale.

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
    for (name, crd) in crds {
        let file = format!("{}.yaml", crd.metadata.name.as_deref().unwrap_or(name));
        files.push((file, to_yaml(name, &crd)?));
    }
    Ok(files)
}

/// One object as a YAML document, by way of JSON: absent fields stay absent, numbers and strings keep their type.
pub fn to_yaml<T: serde::Serialize>(name: &'static str, object: &T) -> Result<String, YamlError> {
    let value = serde_json::to_value(object).map_err(|source| YamlError::Json { name, source })?;
    serde_saphyr::to_string(&value).map_err(|source| YamlError::Yaml { name, source })
}
