//! Revisions, pure: a pod template and the number of the attempt, as a hash that stands on the template as a label; and what of a spec
//! the pods show, as a hash for the status.

use crds::{InferenceDeploymentSpec, LABEL_REVISION, rollout::Rollout};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::digest::short;

const BYTES: usize = 5;

/// Puts the revision of `template` on it. Equal templates of the same attempt have equal revisions.
pub fn stamp(template: &mut Value, attempt: i32) {
    let revision = short(&format!("{attempt} {}", canonical(template)), BYTES);
    template["metadata"]["labels"][LABEL_REVISION] = json!(revision);
}

/// What of a spec the pods show, as a hash that does not depend on how this version of the operator shows it. Of fields that have a
/// default only others are counted, so that one which a later version adds changes no hash; those of engine, agent, model and gate
/// must leave themselves out. How far recovery goes stands on the pods as well, but where they can be told anew (`RecoveryNote`): nobody
/// is replaced for it.
pub fn of_spec(spec: &InferenceDeploymentSpec) -> String {
    let rollout = unlike(&spec.rollout, &Rollout::default(), &["proof", "attempt"]);
    let shown = json!({
        "model": spec.model, "engine": spec.engine, "agent": spec.agent, "gate": spec.gate, "podOverlay": spec.pod_overlay,
        "drainSeconds": spec.drain_seconds, "rollout": rollout,
    });
    short(&canonical(&shown), BYTES)
}

/// Those of the fields that are not as in `default`.
fn unlike<T: Serialize>(value: &T, default: &T, fields: &[&str]) -> Map<String, Value> {
    let (value, default) = (json!(value), json!(default));
    let other = fields.iter().filter(|field| value[**field] != default[**field]);
    other.map(|field| ((*field).to_owned(), value[*field].clone())).collect()
}

/// JSON with sorted keys: the order in which a map hands them out is a matter of how the program was built, and no reason for a rollout.
pub fn canonical(value: &Value) -> String {
    let mut text = Vec::new();
    write_canonical(value, &mut text);
    String::from_utf8(text).unwrap_or_default() // JSON is never anything else
}

/// Into one text: every pass asks this of every object that it would write.
fn write_canonical(value: &Value, text: &mut Vec<u8>) {
    match value {
        Value::Object(map) => {
            let mut fields: Vec<_> = map.iter().collect();
            fields.sort_unstable_by_key(|(name, _)| *name);
            text.push(b'{');
            for (nth, (name, value)) in fields.into_iter().enumerate() {
                text.extend((nth > 0).then_some(b','));
                write_scalar(name, text);
                text.push(b':');
                write_canonical(value, text);
            }
            text.push(b'}');
        }
        Value::Array(list) => {
            text.push(b'[');
            for (nth, value) in list.iter().enumerate() {
                text.extend((nth > 0).then_some(b','));
                write_canonical(value, text);
            }
            text.push(b']');
        }
        scalar => write_scalar(scalar, text),
    }
}

/// A number, a word of JSON, or a quoted text.
fn write_scalar(scalar: &(impl Serialize + ?Sized), text: &mut Vec<u8>) {
    // only a map whose keys are no texts cannot be written
    let _ = serde_json::to_writer(text, scalar);
}

/// The revision that stands on a template or a pod; empty: none does.
pub fn of(object: &Value) -> &str {
    object["metadata"]["labels"][LABEL_REVISION].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_of_keys_is_no_change() {
        let (a, b) =
            (r#"{"x": [1, {"q": "\"", "p": null}], "a": 1.5}"#, r#"{"a": 1.5, "x": [1, {"p": null, "q": "\""}]}"#);
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(canonical(&read(a)), canonical(&read(b)));
        assert_eq!(read(&canonical(&read(a))), read(a));
    }

    #[test]
    fn a_revision_follows_from_template_and_attempt_alone() {
        let stamped = |image: &str, attempt| {
            let mut template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"image": image}});
            stamp(&mut template, attempt);
            of(&template).to_owned()
        };
        assert_eq!(stamped("x", 0), stamped("x", 0));
        assert_ne!(stamped("x", 0), stamped("y", 0));
        assert_ne!(stamped("x", 0), stamped("x", 1), "another attempt is another revision");
        assert_eq!((stamped("x", 0).len(), of(&json!({}))), (10, ""));
    }
}
