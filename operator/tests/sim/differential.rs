//! The simulator's API server against a real kube-apiserver: the same random sequences of requests on both, every answer
//! compared (code, reason, the object without what must differ, whether the version moved, who owns which field; of a list its items). A
//! simulator that answers otherwise than the real one proves nothing about anybody.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use crds::{EngineIncident, InferenceDeployment};
use futures::{StreamExt, stream};
use http::{Method, Request};
use kube::{Client, CustomResourceExt, client::Body};
use serde_json::{Value, json};

use super::{
    evictions,
    kube::{
        fields::{Managers, Path},
        kinds,
        store::Store,
        wire::Call,
    },
    lists,
    rng::Rng,
    story,
};

const AT_ONCE: usize = 16;
/// One sequence in so many is about evictions.
const EVICTIONS_EVERY: u64 = 5;
/// Of the others one in so many is about lists.
const LISTS_EVERY: u64 = 4;
const APPLY: &str = "application/apply-patch+yaml";
pub const MERGE: &str = "application/merge-patch+json";
pub const JSON: &str = "application/json";

/// One request; `$UID`, `$RV`, `$OLDRV` and, in a query, `$CONTINUE` stand for what each side has answered last.
#[derive(Debug, Clone)]
pub struct Step {
    pub method: &'static str,
    pub path: String,
    pub query: String,
    pub content_type: &'static str,
    pub body: Value,
}

/// What each side knows of the object.
#[derive(Debug, Clone, Default)]
pub struct Known {
    pub uid: String,
    version: String,
    old: String,
    /// Where the last list goes on.
    pub goes_on: String,
}

/// What was answered, in a form that both sides can have.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    pub code: u16,
    pub reason: String,
    pub moved: bool,
    pub object: Value,
    pub owners: BTreeMap<String, BTreeSet<String>>,
}

/// Runs `count` sequences, many at a time, each on an object of its own; the differences, in words.
pub async fn run(from: u64, count: u64) -> Result<Vec<String>, String> {
    let started = Instant::now();
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = kube::Config::from_kubeconfig(&kube::config::KubeConfigOptions::default()).await;
    let mut config = config.map_err(|error| format!("KUBECONFIG: {error}"))?;
    config.default_retry = false;
    let client = Client::try_from(config).map_err(|error| error.to_string())?;
    install(&client).await?;
    let (mut requests, mut differences) = (0, Vec::new());
    let mut answers = stream::iter(from..from + count)
        .map(|seed| {
            let client = client.clone();
            async move { (seed, compare(&client, &sequence(seed)).await) }
        })
        .buffered(AT_ONCE);
    while let Some((seed, compared)) = answers.next().await {
        let (made, difference) = compared?;
        requests += made;
        differences.extend(difference.map(|what| format!("sequence {seed}: {what}")));
    }
    let seconds = started.elapsed().as_secs_f64();
    let differ = differences.len();
    println!("{requests} requests in {count} sequences in {seconds:.1} s, {differ} sequences differ");
    Ok(differences)
}

async fn install(client: &Client) -> Result<(), String> {
    let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    for crd in [json!(InferenceDeployment::crd()), json!(EngineIncident::crd())] {
        let step = Step { method: "POST", path: path.into(), query: String::new(), content_type: JSON, body: crd };
        let (code, answer) = ask(client, &step, &step.body).await?;
        if code != 201 && code != 409 {
            return Err(format!("the CRD was not taken: {code} {answer}"));
        }
    }
    for plural in ["inferencedeployments", "engineincidents"] {
        let kind = kinds::of(plural);
        let path = format!("/apis/{}/{}/namespaces/default/{plural}", kind.group, kind.version);
        let step = Step { method: "GET", path, query: String::new(), content_type: JSON, body: Value::Null };
        let mut tries = 0;
        while ask(client, &step, &Value::Null).await?.0 != 200 {
            tries += 1;
            if tries > 200 {
                return Err(format!("{plural} are not served"));
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }
    Ok(())
}

async fn compare(client: &Client, steps: &[Step]) -> Result<(usize, Option<String>), String> {
    let mut store = Store::default();
    store.track_updates = true;
    store.version = 10;
    let (mut ours, mut theirs) = (Known::default(), Known::default());
    for (at, step) in steps.iter().enumerate() {
        let (code, answer) = ask(client, &step.at(&theirs), &fill(&step.body, &theirs)).await?;
        if step.path == lists::NAMESPACES {
            continue;
        }
        let real = seen(step, code, &answer, real_owners(&answer), &mut theirs);
        let uri = format!("{}?{}", step.path, step.at(&ours).query).parse().map_err(|error| format!("{error}"))?;
        let body = fill(&step.body, &ours);
        let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let method: Method = step.method.parse().map_err(|error| format!("{error}"))?;
        let call = Call::parse(&method, &uri, step.content_type, &bytes).map_err(|refusal| refusal.message)?;
        let name = step.path.split('/').rfind(|word| *word != "status").unwrap_or_default();
        let posted = body["metadata"]["name"].as_str().unwrap_or(name).to_owned();
        let key = (call.target.kind.plural, "default".to_owned(), posted);
        let (code, answer) = match call.perform(&mut store) {
            Ok((code, value)) => (code, serde_json::from_slice(&call.text_of(&value)).unwrap_or_default()),
            Err(refusal) => (refusal.code, refusal.status()),
        };
        let owners = store.get(&key).map(|entry| our_owners(&entry.managers)).unwrap_or_default();
        let sim = seen(step, code, &answer, owners, &mut ours);
        if sim != real {
            let history: Vec<String> =
                steps[..=at].iter().map(|s| format!("\n    {} {}?{} {}", s.method, s.path, s.query, s.body)).collect();
            let words = answer["message"].as_str().unwrap_or_default();
            return Ok((at + 1, Some(format!("real {real:?}\n  sim  {sim:?} {words}{}", history.concat()))));
        }
    }
    Ok((steps.len(), None))
}

impl Step {
    /// The same with the place where the last list of this side goes on.
    fn at(&self, known: &Known) -> Step {
        Step { query: self.query.replace("$CONTINUE", &known.goes_on), ..self.clone() }
    }
}

async fn ask(client: &Client, step: &Step, body: &Value) -> Result<(u16, Value), String> {
    let bytes = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
    let uri = format!("{}?{}", step.path, step.query);
    let request = Request::builder().method(step.method).uri(uri).header("content-type", step.content_type);
    let request = request.body(Body::from(bytes)).map_err(|error| error.to_string())?;
    let response = client.send(request).await.map_err(|error| error.to_string())?;
    let code = response.status().as_u16();
    let bytes = response.into_body().collect_bytes().await.map_err(|error| error.to_string())?;
    Ok((code, serde_json::from_slice(&bytes).unwrap_or(Value::Null)))
}

fn fill(body: &Value, known: &Known) -> Value {
    match body {
        Value::String(text) => match text.as_str() {
            "$UID" => json!(known.uid),
            "$RV" => json!(known.version),
            "$OLDRV" => json!(known.old),
            _ => body.clone(),
        },
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), fill(value, known))).collect(),
        Value::Array(list) => list.iter().map(|value| fill(value, known)).collect(),
        _ => body.clone(),
    }
}

fn seen(step: &Step, code: u16, answer: &Value, owners: BTreeMap<String, BTreeSet<String>>, known: &mut Known) -> Seen {
    if evictions::concerns(&step.path) {
        return evictions::seen(step, code, answer, known);
    }
    if lists::concerns(&step.path) {
        return lists::seen(step, code, answer, known);
    }
    if code >= 300 || step.method == "DELETE" || answer["kind"] == "Status" {
        let reason = if code >= 300 { answer["reason"].as_str().unwrap_or_default().to_owned() } else { String::new() };
        return Seen { code, reason, moved: false, object: Value::Null, owners: BTreeMap::new() };
    }
    let metadata = &answer["metadata"];
    let version = metadata["resourceVersion"].as_str().unwrap_or_default().to_owned();
    let leaving = metadata["deletionTimestamp"].is_string();
    // (what the answer to the update says that lets an object go at last is the server's own affair)
    let moved = version != known.version && !(leaving && metadata["finalizers"].is_null());
    if moved {
        known.old = std::mem::replace(&mut known.version, version);
    }
    metadata["uid"].as_str().unwrap_or_default().clone_into(&mut known.uid);
    let some = |value: &Value| {
        if value.as_object().is_some_and(serde_json::Map::is_empty) { Value::Null } else { value.clone() }
    };
    let object = json!({
        "labels": some(&metadata["labels"]), "annotations": some(&metadata["annotations"]),
        "finalizers": metadata["finalizers"], "generation": metadata["generation"],
        "leaving": leaving,
        "data": some(&answer["data"]), "spec": answer["spec"], "status": some(&answer["status"]),
    });
    let going = leaving && metadata["finalizers"].is_null();
    let owners = if going { BTreeMap::new() } else { owners };
    Seen { code, reason: String::new(), moved, object, owners }
}

fn our_owners(managers: &Managers) -> BTreeMap<String, BTreeSet<String>> {
    let mut owners = BTreeMap::new();
    for (manager, set) in managers {
        let operation = if manager.apply { "Apply" } else { "Update" };
        let leaf = |path: &&Path| !set.iter().any(|other| other.len() > path.len() && other.starts_with(path));
        let paths = set.iter().filter(leaf).map(|path| path.join("/")).collect();
        insert(&mut owners, format!("{} {operation} {}", manager.name, manager.subresource), paths);
    }
    owners
}

fn insert(owners: &mut BTreeMap<String, BTreeSet<String>>, manager: String, mut paths: BTreeSet<String>) {
    // that a map as such is somebody's says nothing about fields
    let maps = ["f:metadata/f:labels", "f:metadata/f:annotations", "f:data", "f:spec", "f:status"];
    paths.retain(|path| !maps.contains(&path.as_str()));
    if !paths.is_empty() {
        owners.insert(manager, paths);
    }
}

fn real_owners(answer: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let mut owners = BTreeMap::new();
    for entry in answer["metadata"]["managedFields"].as_array().into_iter().flatten() {
        let word = |field: &str| entry[field].as_str().unwrap_or_default();
        let mut paths = BTreeSet::new();
        leaves(&entry["fieldsV1"], "", &mut paths);
        insert(&mut owners, format!("{} {} {}", word("manager"), word("operation"), word("subresource")), paths);
    }
    owners
}

fn leaves(node: &Value, path: &str, out: &mut BTreeSet<String>) {
    let children: Vec<_> = node.as_object().into_iter().flatten().filter(|(key, _)| *key != ".").collect();
    if children.is_empty() && !path.is_empty() {
        out.insert(path.to_owned());
    }
    for (key, child) in children {
        let path = if path.is_empty() { key.clone() } else { format!("{path}/{key}") };
        leaves(child, &path, out);
    }
}

/// A sequence of requests on one object.
fn sequence(seed: u64) -> Vec<Step> {
    if seed.is_multiple_of(EVICTIONS_EVERY) {
        return evictions::sequence(seed);
    }
    if seed.is_multiple_of(LISTS_EVERY) {
        return lists::sequence(seed);
    }
    let mut rng = Rng::new(seed ^ 0xd1ff);
    let plural = *rng.pick(&["configmaps", "leases", "inferencedeployments", "engineincidents"]);
    let name = format!("d{seed}");
    let mut steps: Vec<Step> = (0..rng.range(6, 16)).map(|_| step(&mut rng, plural, &name)).collect();
    // in the end it goes, so that the server stays small
    let bare = |method, content_type, body| Step {
        method,
        path: path(plural, &name),
        query: String::new(),
        content_type,
        body,
    };
    steps.push(bare("PATCH", MERGE, json!({"metadata": {"finalizers": null}})));
    steps.push(bare("DELETE", JSON, Value::Null));
    steps
}

fn path(plural: &str, name: &str) -> String {
    let kind = kinds::of(plural);
    let root = if kind.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", kind.group) };
    let slash = if name.is_empty() { "" } else { "/" };
    format!("{root}/{}/namespaces/default/{plural}{slash}{name}", kind.version)
}

fn step(rng: &mut Rng, plural: &'static str, name: &str) -> Step {
    let manager = *rng.pick(&["alice", "bob"]);
    let custom = kinds::of(plural).custom();
    let mut path = path(plural, name);
    let mut query = format!("fieldManager={manager}");
    let status = custom && rng.permille(300);
    let mut body = object(rng, plural, name, status);
    let (method, content_type) = match rng.range(0, 12) {
        0..=1 => {
            path = self::path(plural, "");
            body = object(rng, plural, name, false);
            ("POST", JSON)
        }
        2 => {
            body = Value::Null;
            ("GET", JSON)
        }
        3..=4 => {
            body["metadata"]["resourceVersion"] = json!(*rng.pick(&["$RV", "$RV", "$RV", "$OLDRV"]));
            body["metadata"]["uid"] = json!("$UID");
            ("PUT", JSON)
        }
        5..=6 => {
            body.as_object_mut()
                .into_iter()
                .for_each(|map| map.retain(|key, _| !matches!(key.as_str(), "apiVersion" | "kind")));
            body["metadata"].as_object_mut().into_iter().for_each(|map| drop(map.remove("name")));
            match rng.range(0, 4) {
                0 => body["metadata"]["uid"] = json!("$UID"),
                1 => body["metadata"]["resourceVersion"] = json!("$OLDRV"),
                2 => body["metadata"]["finalizers"] = json!(["example.com/wait"]),
                _ => {}
            }
            ("PATCH", MERGE)
        }
        7..=10 => {
            query += &format!("&force={}", rng.permille(600));
            if rng.permille(200) {
                body["metadata"]["uid"] = json!("$UID");
            }
            ("PATCH", APPLY)
        }
        _ => {
            let uid = if rng.permille(500) { "$UID" } else { "00000000-0000-0000-0000-000000000000" };
            body = json!({"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}});
            ("DELETE", JSON)
        }
    };
    if status && !matches!(method, "POST" | "DELETE" | "GET") {
        path += "/status";
    }
    Step { method, path, query, content_type, body }
}

fn object(rng: &mut Rng, plural: &str, name: &str, status: bool) -> Value {
    let kind = kinds::of(plural);
    let mut value = json!({"apiVersion": kind.api_version(), "kind": kind.kind, "metadata": {"name": name}});
    for (field, keys) in [("labels", ["a", "b"]), ("annotations", ["x", "y"])] {
        for key in keys {
            if !status && rng.permille(350) {
                value["metadata"][field][key] = json!(rng.pick(&["1", "2"]));
            }
        }
    }
    match plural {
        "configmaps" => {
            let keys = ["k", "l", "m"];
            keys.iter().for_each(|key| {
                if rng.permille(500) {
                    value["data"][*key] = json!(rng.pick(&["1", "2"]))
                }
            });
        }
        "leases" => {
            value["spec"]["holderIdentity"] = json!(rng.pick(&["op-1", "op-2"]));
            if rng.permille(500) {
                value["spec"]["leaseDurationSeconds"] = json!(rng.pick(&[15, 30]));
            }
        }
        "inferencedeployments" => {
            value["spec"] = story::spec(rng.range(1, 3), "Recover");
            if rng.permille(300) {
                value["spec"]["engine"]["env"] =
                    json!([{"name": rng.pick(&["A", "B"]), "value": rng.pick(&["1", "2"])}]);
            }
            if status {
                let time = "2026-01-01T00:00:00Z";
                let (type_, word) = (*rng.pick(&["Ready", "Stalled"]), *rng.pick(&["True", "False"]));
                let condition =
                    json!({"type": type_, "status": word, "reason": "R", "message": "", "lastTransitionTime": time});
                value["status"] = json!({"replicas": rng.range(0, 3), "conditions": [condition]});
            }
        }
        _ => {
            value["spec"] =
                json!({"deployment": "chat", "pod": "p", "podUid": "u", "class": "Livelock", "episodeId": "e"});
            if status {
                value["status"] = json!({"stage": rng.pick(&["Suspect", "Stalled"]), "requestsLost": rng.range(0, 3)});
            }
        }
    }
    value
}
