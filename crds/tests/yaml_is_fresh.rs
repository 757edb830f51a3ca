//! The committed CRDs are what the types generate. `TRUEBEAT_REGENERATE=1 cargo test -p crds` writes them anew.

use std::path::PathBuf;

#[test]
fn committed_yaml_equals_generated() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("yaml");
    for (file, text) in crds::yaml::crdgen().expect("crdgen") {
        let path = folder.join(&file);
        if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
            std::fs::write(&path, &text).expect("write the generated file");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == text, "{file} is stale: run TRUEBEAT_REGENERATE=1 cargo test -p crds");
    }
}

#[test]
fn the_group_is_one_constant() {
    use kube::Resource;
    assert_eq!(crds::InferenceDeployment::group(&()), crds::GROUP);
    assert_eq!(crds::EngineIncident::group(&()), crds::GROUP);
    assert_eq!(crds::InferenceDeployment::version(&()), crds::VERSION);
    assert!(crds::LABEL_DEPLOYMENT.starts_with(crds::GROUP));
}

/// Every list and string of the schema has a limit, every property a description (but for the condition list's own type).
#[test]
fn every_list_and_string_is_bounded_and_described() {
    use kube::CustomResourceExt;
    for crd in [crds::InferenceDeployment::crd(), crds::EngineIncident::crd()] {
        let schema = serde_json::to_value(&crd.spec.versions[0].schema).unwrap();
        let mut faults = Vec::new();
        for part in ["spec", "status"] {
            walk(part, &schema["openAPIV3Schema"]["properties"][part], &mut faults);
        }
        assert!(faults.is_empty(), "{faults:#?}");
    }
}

fn walk(path: &str, node: &serde_json::Value, faults: &mut Vec<String>) {
    if path.ends_with("conditions[]") {
        return; // the type of meta/v1, limited by its own API documentation
    }
    let bounded = match node["type"].as_str() {
        Some("string") => node.get("enum").is_some() || node.get("maxLength").is_some(),
        Some("array") => node.get("maxItems").is_some(),
        Some("integer") => path.starts_with("status") || node.get("maximum").is_some(),
        Some("object") => node.get("additionalProperties").is_none() || node.get("maxProperties").is_some(),
        _ => true,
    };
    if !bounded {
        faults.push(format!("{path}: no limit"));
    }
    for (name, property) in node["properties"].as_object().into_iter().flatten() {
        if property.get("description").is_none() {
            faults.push(format!("{path}.{name}: no description"));
        }
        walk(&format!("{path}.{name}"), property, faults);
    }
    for (suffix, key) in [("[]", "items"), ("{}", "additionalProperties")] {
        if let Some(inner) = node.get(key) {
            walk(&format!("{path}{suffix}"), inner, faults);
        }
    }
}
