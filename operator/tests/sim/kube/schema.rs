//! What a CustomResourceDefinition does to an object: unknown fields pruned, defaults filled in, and the simple rules
//! checked (types, required, bounds, enums). CEL rules are evaluated by kube's own evaluator where the caller asks.

use std::{fmt, sync::LazyLock};

use crds::{EngineIncident, InferenceDeployment};
use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::object::Object;

static DEPLOYMENT: LazyLock<Value> = LazyLock::new(|| schema(&InferenceDeployment::crd()));
static INCIDENT: LazyLock<Value> = LazyLock::new(|| schema(&EngineIncident::crd()));

fn schema(crd: &impl serde::Serialize) -> Value {
    json!(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// The schema of a kind that a CRD made.
pub fn of(kind: &str) -> Option<&'static Value> {
    match kind {
        "InferenceDeployment" => Some(&DEPLOYMENT),
        "EngineIncident" => Some(&INCIDENT),
        _ => None,
    }
}

/// Prunes and defaults `object` in place; what is wrong with it afterwards.
pub fn admit(schema: &Value, object: &mut Object) -> Vec<String> {
    let mut faults = Vec::new();
    for part in ["spec", "status"] {
        let rules = &schema["properties"][part];
        match object.get(part) {
            Some(_) => faults.extend(object.admit(part, |value| {
                let mut faults = Vec::new();
                visit(rules, value, &Path::Root(part), &mut faults);
                faults
            })),
            None if schema["required"].as_array().is_some_and(|r| r.contains(&json!(part))) => {
                faults.push(format!("{part}: Required value"));
            }
            None => {}
        }
    }
    faults
}

/// Where a value stands: put into words only where something is wrong with it.
enum Path<'a> {
    Root(&'a str),
    Below(&'a Path<'a>, &'a str),
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Root(name) => f.write_str(name),
            Path::Below(path, name) => write!(f, "{path}.{name}"),
        }
    }
}

fn visit(schema: &Value, value: &mut Value, path: &Path<'_>, faults: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            if schema["type"] != "object" {
                return faults.push(format!("{path}: Invalid value: \"object\""));
            }
            if let Some(properties) = schema["properties"].as_object() {
                map.retain(|name, _| properties.contains_key(name));
                for (name, rules) in properties {
                    let missing = map.get(name).is_none_or(|v| v.is_null() && rules["nullable"] != true);
                    if let (true, Some(default)) = (missing, rules.get("default")) {
                        map.insert(name.clone(), default.clone());
                    }
                    if let Some(child) = map.get_mut(name) {
                        visit(rules, child, &Path::Below(path, name), faults);
                    }
                }
            } else if let Some(rules) = schema.get("additionalProperties") {
                map.iter_mut().for_each(|(name, child)| visit(rules, child, &Path::Below(path, name), faults));
            }
            for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !map.contains_key(name) {
                    faults.push(format!("{path}.{name}: Required value"));
                }
            }
        }
        Value::Array(list) => {
            if schema["type"] != "array" {
                return faults.push(format!("{path}: Invalid value: \"array\""));
            }
            if schema["maxItems"].as_u64().is_some_and(|max| list.len() as u64 > max) {
                faults.push(format!("{path}: Too many"));
            }
            list.iter_mut().for_each(|item| visit(&schema["items"], item, path, faults));
        }
        scalar => faults.extend(scalar_fault(schema, scalar).map(|what| format!("{path}: {what}"))),
    }
}

fn scalar_fault(schema: &Value, value: &Value) -> Option<&'static str> {
    let typed = match schema["type"].as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("boolean") => value.is_boolean(),
        Some("number") => value.is_number(),
        _ => schema["x-kubernetes-int-or-string"] == true,
    };
    if !typed {
        return Some("Invalid value: wrong type");
    }
    if schema["enum"].as_array().is_some_and(|list| !list.contains(value)) {
        return Some("Unsupported value");
    }
    let number = value.as_f64();
    let bound = |name: &str| schema[name].as_f64();
    if number.zip(bound("minimum")).is_some_and(|(n, min)| n < min)
        || number.zip(bound("maximum")).is_some_and(|(n, max)| n > max)
    {
        return Some("Invalid value: out of bounds");
    }
    let length = value.as_str().map(|text| text.chars().count() as f64);
    if length.zip(bound("minLength")).is_some_and(|(n, min)| n < min)
        || length.zip(bound("maxLength")).is_some_and(|(n, max)| n > max)
    {
        return Some("Invalid value: length");
    }
    None
}
