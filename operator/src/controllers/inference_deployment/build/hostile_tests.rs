//! H10: whatever a person (or whoever stole their token) writes into an InferenceDeployment is refused with a reason, or is carried as text
//! to where its field says. No name, label, path of the host or shell comes of it.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::controllers::inference_deployment::{testing::infd, validate::validate};

const NASTY: [&str; 12] = [
    "../../etc/shadow",
    "/proc/1/root",
    "$(touch /tmp/x)",
    "`id`",
    "a; rm -rf /",
    "{{ .Values }}",
    "a\u{0}b",
    "\u{202e}txt",
    "a\nhostPath: /",
    "'; --",
    "%2e%2e%2f",
    "\\\\host\\share",
];

const SHELLS: [&str; 7] = ["sh", "ash", "bash", "busybox", "dash", "env", "zsh"];

fn hostile() -> impl Strategy<Value = String> {
    let long = "[a-zA-Z]{0,8}".prop_map(|text| text.repeat(200));
    prop_oneof![4 => prop::sample::select(NASTY.as_slice()).prop_map(str::to_owned), 2 => ".{0,40}", 1 => long]
}

/// A spec with this text wherever a person may write one.
fn spec_of(text: &str, field: usize) -> Value {
    let mut spec = json!(infd("chat").spec);
    match field {
        0 => spec["engine"]["image"] = json!(text),
        1 => spec["engine"]["args"] = json!([text]),
        2 => spec["engine"]["command"] = json!([text]),
        3 => spec["engine"]["env"] = json!([{"name": "A", "value": text}]),
        4 => spec["engine"]["env"] = json!([{"name": text, "value": "a"}]),
        5 => spec["model"]["source"] = json!({"file": {"path": text}}),
        6 => spec["model"]["source"] = json!({"pvc": {"claimName": text, "path": text}}),
        7 => spec["agent"]["image"] = json!(text),
        8 => spec["engine"]["resources"] = json!({"limits": {text: text}}),
        9 => spec["podOverlay"] = json!({"metadata": {"labels": {text: text}, "annotations": {text: text}}}),
        10 => spec["podOverlay"] = json!({"spec": {"volumes": [{"name": "a", "hostPath": {"path": text}}]}}),
        _ => spec["recovery"]["stabilityWindow"] = json!(text),
    }
    spec
}

/// Every text in an object, with the name of its field.
fn texts<'a>(value: &'a Value, field: &'a str, out: &mut Vec<(&'a str, &'a str)>) {
    match value {
        Value::String(text) => out.push((field, text)),
        Value::Array(list) => list.iter().for_each(|item| texts(item, field, out)),
        Value::Object(map) => map.iter().for_each(|(name, value)| texts(value, name, out)),
        _ => {}
    }
}

proptest! {
    #[test]
    fn fault_h10_hostile_text_is_refused_or_stays_text(text in hostile(), field in 0..12_usize) {
        let mut object = infd("chat");
        object.spec = serde_json::from_value(spec_of(&text, field)).expect("the shape is right");
        let problems = validate(&object);
        prop_assert!(field != 10 || !problems.is_empty(), "a folder of the node was let through");
        if !problems.is_empty() {
            return Ok(());
        }
        for child in build(&object) {
            prop_assert!(child.name == "chat" || child.name == "chat-truebeat-agent", "{}", child.name);
            prop_assert_eq!(&child.body["metadata"]["name"], &json!(child.name));
            prop_assert!(!child.body.to_string().contains("hostPath\":"), "{}", child.body);
            let mut all = Vec::new();
            texts(&child.body, "", &mut all);
            let program = |said: &str| said.rsplit('/').next().is_some_and(|program| SHELLS.contains(&program));
            let shells = |(field, said): &(&str, &str)| *field == "command" && *said != text && program(said);
            prop_assert!(!all.iter().any(shells), "a shell would read what a person wrote");
        }
    }
}
