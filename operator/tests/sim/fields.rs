//! Every field of the spec, found in the CRD's own schema, with two values for each: P11 (a field has an effect that can be
//! seen) and P5 (what was changed and changed back is as if it had never been) are asked of all of them, a field that
//! somebody adds tomorrow included.

use serde_json::{Map, Value, json};

use super::{
    act::Act,
    kube::schema,
    report::Report,
    run::run,
    story::{edit, freeze, plain, spec},
};

/// Fields whose effect lies where this simulation has nothing, and where it is tested instead.
const ELSEWHERE: [(&str, &str); 1] = [(
    "recovery.avoidNodesPercent",
    "of four nodes one is avoided by any share: `avoid_tests` of the plan have more of them",
)];

/// The fingerprint of a request that freezes whoever answers it.
pub const POISON: &str = "00000000000000aa";

/// One field: a whole spec with the one value in it, and with the other.
pub struct Field {
    /// `engine.env[].name`, below `spec`.
    pub path: String,
    pub one: Value,
    pub other: Value,
}

/// All fields, in the order of the schema.
pub fn all() -> Vec<Field> {
    let rules = &schema::of("InferenceDeployment").expect("a schema")["properties"]["spec"];
    let mut leaves = Vec::new();
    walk(rules, &mut Vec::new(), &mut leaves);
    leaves
        .into_iter()
        .map(|(path, leaf)| {
            let path_text = path.join(".").replace(".[]", "[]");
            let whole = |n: usize| {
                let mut whole = base(&path_text);
                put(&mut whole, &path, sample(&path_text, leaf, n));
                complete(rules, &mut whole);
                whole
            };
            Field { one: whole(0), other: whole(1), path: path_text }
        })
        .collect()
}

/// P11: the two values make a difference to somebody other than the spec itself.
pub fn effect(field: &Field, keep_lines: bool) -> Report {
    let live = |spec: &Value| {
        let create = (0, Act::Create { name: "chat", spec: spec.clone() });
        run(&plain([vec![create], scene(&field.path)].concat(), Vec::new()), true)
    };
    let (one, mut other) = (live(&field.one), live(&field.other));
    other.violations.splice(0..0, one.violations.clone());
    if [&one, &other].iter().any(|report| report.end_state.get("inferencedeployments/serving/chat").is_none()) {
        other.violations.push(format!("P11: a value of spec.{} is refused: {} {}", field.path, field.one, field.other));
    }
    let elsewhere = ELSEWHERE.iter().any(|(path, _)| *path == field.path);
    if !elsewhere && seen(&one) == seen(&other) {
        other.violations.push(format!("P11: spec.{} has no effect that anybody could see", field.path));
    }
    if !keep_lines {
        other.lines.clear();
    }
    other
}

/// P5: to one value, to the other, and back to where it began.
pub fn rollback(field: &Field, keep_lines: bool) -> Report {
    let start = || (0, Act::Create { name: "chat", spec: base("") });
    let to = |at_ms, spec: &Value| (at_ms, Act::Replace { name: "chat", spec: spec.clone() });
    let acts = vec![start(), to(20_000, &field.one), to(60_000, &field.other), to(100_000, &base(""))];
    let never = run(&plain(vec![start()], Vec::new()), false);
    let mut back = run(&plain(acts, Vec::new()), keep_lines);
    back.compare("P5", "the spec that was never changed", &never);
    back
}

/// What can be seen of a run: the children in the end, and every step on the way but for the spec itself.
fn seen(report: &Report) -> (Value, Vec<String>) {
    let ours = report.end_state.as_object().into_iter().flatten();
    let children = ours.filter(|(key, _)| !key.starts_with("inferencedeployments/"));
    let children: Map<String, Value> = children.map(|(key, value)| (key.clone(), value.clone())).collect();
    let lines = report.lines.iter().filter(|line| !line.contains(" act Create"));
    let steps = lines.map(|line| match line.split_once(" {") {
        Some((head, _)) if !line.contains("/pods/") && !line.contains("/nodes/") => head.to_owned(),
        _ => line.clone(),
    });
    (children.into(), steps.collect())
}

/// What must happen before the field can show what it does.
fn scene(path: &str) -> Vec<(u64, Act)> {
    match path {
        "recovery.holdPercent" => (0..4).map(|nth| (20_000, Act::Freeze { nth, heals_ms: Some(40_000) })).collect(),
        // tried before they heal by themselves, or not any more
        "recovery.trialAfter" => (0..4).map(|nth| (20_000, Act::Freeze { nth, heals_ms: Some(100_000) })).collect(),
        // where nobody restarts it must heal by itself
        "recovery.mode" => vec![(20_000, Act::Freeze { nth: 0, heals_ms: Some(20_000) })],
        "recovery.maxUnavailable" => (0..3).map(|nth| freeze(30_000, nth)).collect(),
        // a revision whose engines freeze, and the one that takes its place
        "rollout.onFailure" | "rollout.toleratedStalls" => {
            let image = |at_ms, image: &str| edit(at_ms, json!({"engine": {"image": image}}));
            vec![image(50_000, "engine:bad"), image(140_000, "engine:2")]
        }
        _ if path.starts_with("scaling.") => {
            vec![(20_000, Act::Freeze { nth: 0, heals_ms: Some(60_000) }), edit(25_000, json!({"replicas": 1}))]
        }
        "recovery.avoidFor" => vec![freeze(20_000, 0), freeze(60_000, 0)],
        // the pod of a stall that is over goes, and somebody looks again a good minute later
        "recovery.incidentTtl" => {
            vec![freeze(20_000, 0), (60_000, Act::DeletePod { nth: 0 }), edit(140_000, json!({"replicas": 3}))]
        }
        // the second stall within the first pause, the third within the second
        "recovery.restartBackoff" => vec![freeze(20_000, 0), freeze(40_000, 0)],
        "recovery.restartBackoffMax" => vec![freeze(20_000, 0), freeze(45_000, 0), freeze(75_000, 0)],
        "recovery.poisonRequests" | "recovery.poisonFor" => {
            [(20_000, 0), (60_000, 1)].map(|(at_ms, nth)| (at_ms, Act::Poison { nth, request: POISON })).to_vec()
        }
        _ if path.starts_with("recovery.") => vec![freeze(20_000, 0), freeze(90_000, 0)],
        _ => Vec::new(),
    }
}

/// The spec in which the field stands.
fn base(path: &str) -> Value {
    let mut base = spec(2, "Recover");
    match path {
        // the fleet's share of twenty replicas is two
        "recovery.maxUnavailable" => base["replicas"] = json!(20),
        "recovery.holdPercent" => base["replicas"] = json!(4),
        "recovery.trialAfter" => (base["replicas"], base["recovery"]["holdPercent"]) = (json!(4), json!(60)),
        "recovery.lastReplica" => base["replicas"] = json!(1),
        "recovery.stabilityWindow" | "recovery.avoidFor" => base["recovery"]["restartsBeforeReplace"] = json!(1),
        "recovery.restartBackoffMax" => base["recovery"]["restartBackoff"] = json!("20s"),
        "scaling.holdSecondsMax" => base["scaling"] = json!({"duringIncidents": "NoScaleIn"}),
        _ if path.starts_with("model.source.pvc") || path.starts_with("model.source.oci") => {
            base["model"]["source"] = json!({})
        }
        _ => {}
    }
    if path.starts_with("scaling.") {
        base["recovery"]["mode"] = json!("Fence"); // so that the incident lasts until the engine heals
    }
    base
}

/// Two values that differ, by what the schema says; by name where the sense lies in the figure.
fn sample(path: &str, rules: &Value, n: usize) -> Value {
    let pick = |list: [Value; 2]| list[n].clone();
    match path {
        "recovery.maxUnavailable" | "recovery.restartsBeforeReplace" => return pick([json!(1), json!(2)]),
        "recovery.holdPercent" => return pick([json!(60), json!(100)]),
        "recovery.trialAfter" => return pick([json!("1m"), json!("2m")]),
        "recovery.stabilityWindow" => return pick([json!("30s"), json!("10m")]),
        "recovery.restartBackoff" => return pick([json!("1s"), json!("40s")]),
        "recovery.restartBackoffMax" => return pick([json!("20s"), json!("40s")]),
        "recovery.mode" => return pick([json!("Recover"), json!("Fence")]),
        "recovery.incidentTtl" => return pick([json!("1m"), json!("168h")]),
        "rollout.progressDeadlineSeconds" => return pick([json!(600), json!(1200)]),
        "rollout.toleratedStalls" => return pick([json!(0), json!(5)]),
        "scaling.holdSecondsMax" => return pick([json!(5), json!(900)]),
        "podOverlay.spec" => return json!({"priorityClassName": format!("a{n}")}),
        _ => {}
    }
    if let Some(list) = rules["enum"].as_array() {
        return list[n % list.len()].clone();
    }
    let pattern = rules["pattern"].as_str().unwrap_or_default();
    match rules["type"].as_str() {
        Some("integer") => json!(rules["minimum"].as_f64().unwrap_or(0.0) as i64 + 1 + n as i64),
        Some("number") => json!(rules["minimum"].as_f64().unwrap_or(0.0) + 1.0 + n as f64),
        Some("boolean") => json!(n == 1),
        Some("array") => json!([sample("", &rules["items"], n)]),
        Some("object") => json!({"cpu": pick([json!("1"), json!("2")])}),
        // below the caps that are not set
        _ if path.ends_with("Floor") => pick([json!("70ms"), json!("90ms")]),
        _ if pattern.contains("ms|s|m|h") => pick([json!("7m"), json!("9m")]),
        _ if pattern.starts_with("^/") => json!(format!("/models/a{n}")),
        _ => json!(format!("a{n}")),
    }
}

fn walk<'a>(rules: &'a Value, path: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, &'a Value)>) {
    let items = &rules["items"];
    let below: Vec<(&str, &Value)> = match rules["properties"].as_object() {
        Some(properties) => properties.iter().map(|(name, rules)| (name.as_str(), rules)).collect(),
        None if items["type"] == "object" => vec![("[]", items)],
        None => return leaves.push((path.clone(), rules)),
    };
    for (name, rules) in below {
        path.push(name.to_owned());
        walk(rules, path, leaves);
        path.pop();
    }
}

fn put(whole: &mut Value, path: &[String], value: Value) {
    let Some((name, rest)) = path.split_first() else { return *whole = value };
    if name == "[]" {
        if !whole.is_array() {
            *whole = json!([{}]);
        }
        return put(&mut whole[0], rest, value);
    }
    put(&mut whole[name.as_str()], rest, value);
}

/// Adds what the schema requires beside what is there.
fn complete(rules: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => {
            for name in rules["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !map.contains_key(name) {
                    map.insert(name.to_owned(), sample("", &rules["properties"][name], 0));
                }
            }
            map.iter_mut().for_each(|(name, child)| complete(&rules["properties"][name], child));
        }
        Value::Array(list) => list.iter_mut().for_each(|item| complete(&rules["items"], item)),
        _ => {}
    }
}
