//! Argo CD's health of an InferenceDeployment, by the interpreter that Argo CD has in it (gopher-lua, of `tests/tools`), in every state that
//! the operator's own test of its conditions knows.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::{Value, json};
use truebeat_tests::cluster::tools;

const CONFIG: &str = include_str!("../../docs/examples/argocd/argocd-cm.yaml");
const APPLICATION: &str = include_str!("../../docs/examples/argocd/application.yaml");
const KIND: (&str, &str) = ("inference.truebeat.io", "InferenceDeployment");
/// Names of states, and their conditions as `type=status/reason`.
const STATES: &str = include_str!(concat!(
    "../../operator/src/controllers/inference_deployment/snapshots/",
    "operator__controllers__inference_deployment__status__tests__conditions_as_a_table.snap"
));

fn script() -> String {
    let config: Value = serde_saphyr::from_str(CONFIG).unwrap();
    let key = format!("resource.customizations.health.{}_{}", KIND.0, KIND.1);
    config["data"][&key].as_str().unwrap_or_else(|| panic!("no {key}")).to_owned()
}

/// A value as Lua writes it, as Argo CD hands it over: what is null is not there.
fn lua(value: &Value) -> String {
    match value {
        Value::Null => "nil".to_owned(),
        Value::Array(list) => format!("{{{}}}", list.iter().map(lua).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| format!("[{}]={}", json!(key), lua(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        plain => plain.to_string(),
    }
}

/// Status and message. Argo CD gives a script no library but `table`, `os` and what is global.
fn health(script: &str, object: &Value) -> (String, String) {
    let chunk = format!(
        "local write = io.write\ngetmetatable('').__index = nil\n\
         string, math, io, debug, coroutine, channel = nil, nil, nil, nil, nil, nil\nobj = {}\n\
         local health = (function()\n{script}\nend)()\nwrite(health.status, '\\t', health.message)\n",
        lua(object)
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("health.lua");
    std::fs::write(&file, chunk).unwrap();
    let glua = tools::folder().unwrap().join("glua");
    assert!(glua.is_file(), "{} is not built: run tests/tools/build.sh", glua.display());
    let output = Command::new(glua).arg(file).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let words = said.split_once('\t').map(|(status, message)| (status.to_owned(), message.to_owned()));
    words.unwrap_or_else(|| panic!("{object}: {said}{}", String::from_utf8_lossy(&output.stderr)))
}

/// An object with these conditions, each of which says its own name.
fn object(mode: &str, conditions: &[&str]) -> Value {
    let condition = |text: &&str| {
        let (name, rest) = text.split_once('=').unwrap();
        let (status, reason) = rest.split_once('/').unwrap();
        json!({"type": name, "status": status, "reason": reason, "message": format!("{name} says so")})
    };
    json!({
        "metadata": {"generation": 3},
        "spec": {"recovery": {"mode": mode}},
        "status": {"observedGeneration": 3, "conditions": conditions.iter().map(condition).collect::<Vec<_>>()},
    })
}

#[test]
fn every_state_of_the_operators_own_table_has_its_health() {
    let wanted: BTreeMap<&str, (&str, &str)> = BTreeMap::from([
        ("healthy", ("Healthy", "Ready")),
        // it is being mended, or its kubelet will tell
        ("one frozen", ("Progressing", "EnginesProgressing")),
        ("one whose health lies", ("Progressing", "EnginesProgressing")),
        ("one fenced by a person, one stalls", ("Progressing", "EnginesProgressing")),
        ("one agent frozen", ("Progressing", "Ready")),
        ("all agents frozen", ("Progressing", "Ready")),
        ("no pod", ("Progressing", "Ready")),
        ("no deployment yet", ("Progressing", "Reconciling")),
        ("API away", ("Progressing", "Reconciling")),
        ("pods refused", ("Progressing", "Reconciling")),
        // the kubelet vouches for it, and nobody says that it hangs
        ("one silent", ("Healthy", "Ready")),
        ("one agent cut off, in mode Observe", ("Healthy", "Ready")),
        ("one fenced by a person", ("Suspended", "Ready")),
        // nobody but a person gets further
        ("one unreadable", ("Degraded", "EpisodesReadable")),
        ("one of no owner", ("Degraded", "ObjectsDoubted")),
        ("bad spec", ("Degraded", "Stalled")),
        ("refused", ("Degraded", "Stalled")),
    ]);
    let rows: Vec<(String, Vec<String>)> = serde_json::from_str(STATES.splitn(3, "---\n").nth(2).unwrap()).unwrap();
    assert_eq!(rows.len(), wanted.len(), "a state has no row here, or the other way round");
    let script = script();
    for (name, conditions) in rows {
        let (status, by) = wanted.get(name.as_str()).unwrap_or_else(|| panic!("`{name}` has no row here"));
        let conditions: Vec<&str> = conditions.iter().map(String::as_str).collect();
        let said = health(&script, &object(if name.contains("Observe") { "Observe" } else { "Recover" }, &conditions));
        assert_eq!(said, ((*status).to_owned(), format!("{by} says so")), "{name}");
    }
}

#[test]
fn what_nobody_has_looked_at_is_on_its_way_and_what_nobody_mends_is_degraded() {
    let script = script();
    let of = |object: &Value| health(&script, object).0;
    let well = ["Ready=True/AllReplicasReady", "EnginesProgressing=True/AllProgressing"];
    let hangs = ["Ready=True/AllReplicasReady", "EnginesProgressing=False/EngineNotProgressing"];
    let changed = |path: &str, value: Value| {
        let mut object = object("Recover", &well);
        let (parent, field) = path.rsplit_once('/').unwrap();
        object.pointer_mut(parent).unwrap()[field] = value;
        of(&object)
    };
    assert_eq!(of(&json!({"metadata": {"generation": 1}})), "Progressing", "just made");
    assert_eq!(changed("/status/observedGeneration", json!(-1)), "Progressing", "as the CRD defaults it");
    assert_eq!(changed("/metadata/generation", json!(4)), "Progressing", "edited since");
    assert_eq!(changed("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z")), "Progressing");
    assert_eq!(changed("/status/conditions", json!([])), "Progressing");
    assert_eq!(changed("/spec/recovery", Value::Null), "Healthy");
    for (mode, status) in [("Recover", "Progressing"), ("Fence", "Degraded"), ("Observe", "Degraded")] {
        assert_eq!(of(&object(mode, &hangs)), status, "{mode}");
    }
    let held = [hangs[0], hangs[1], "Reconciling=True/RolloutInProgress", "RestartsHeld=True/CommonCause"];
    let back = ["Ready=False/RolledBack", "Stalled=True/RolledBack", hangs[1]];
    let zero = ["Ready=True/ScaledToZero", "EnginesProgressing=Unknown/NoReplicas"];
    let found = [&held[..], &back, &zero].map(|conditions| of(&object("Recover", conditions)));
    assert_eq!(found, ["Degraded", "Degraded", "Healthy"]);
}

#[test]
fn an_autoscalers_replicas_are_left_alone() {
    let application: Value = serde_saphyr::from_str(APPLICATION).unwrap();
    let ignored = json!([{"group": KIND.0, "kind": KIND.1, "jsonPointers": ["/spec/replicas"]}]);
    assert_eq!(application["spec"]["ignoreDifferences"], ignored);
    let options = application["spec"]["syncPolicy"]["syncOptions"].as_array().unwrap();
    assert!(options.contains(&json!("RespectIgnoreDifferences=true")), "the sync would set them all the same");
}
