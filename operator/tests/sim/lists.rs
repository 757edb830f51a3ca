//! What the comparison with the real server asks of lists: a namespace with a few objects that come, change and go, and lists of them by
//! labels, by name, and page by page.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    differential::{JSON, Known, MERGE, Seen, Step},
    kube::kinds,
    rng::Rng,
};

/// Where the real server is told of a namespace; the simulated one knows none.
pub const NAMESPACES: &str = "/api/v1/namespaces";
const OBJECTS: u64 = 7;
const LABELS: [&str; 12] =
    ["a=1", "a==2", "a!=1", "a", "!a", "a in (1,2)", "a notin (1)", "a=1,b", "a!=1,!b", "b,a in (2, 3)", "b=1", ""];

/// Does a step concern objects of a namespace of its own?
pub fn concerns(path: &str) -> bool {
    path.contains("/namespaces/list-")
}

/// Code and reason, and of a list whom it names in which order, and whether it goes on.
pub fn seen(step: &Step, code: u16, answer: &Value, known: &mut Known) -> Seen {
    let reason = answer["reason"].as_str().filter(|_| code >= 300).unwrap_or_default().to_owned();
    let mut object = Value::Null;
    if step.method == "GET" && code == 200 {
        let items = answer["items"].as_array().into_iter().flatten();
        let items: Vec<Value> =
            items.map(|item| json!([item["metadata"]["name"], item["metadata"]["labels"]])).collect();
        known.goes_on = answer["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        object = json!({"kind": answer["kind"], "items": items, "more": !known.goes_on.is_empty()});
    }
    Seen { code, reason, moved: false, object, owners: BTreeMap::new() }
}

/// A sequence of requests on the objects of one namespace.
pub fn sequence(seed: u64) -> Vec<Step> {
    let mut rng = Rng::new(seed ^ 0x1157);
    let kind = kinds::of(rng.pick::<&str>(&["configmaps", "leases", "inferencedeployments", "engineincidents"]));
    let root = if kind.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", kind.group) };
    let namespace = format!("list-{seed}");
    let path = format!("{root}/{}/namespaces/{namespace}/{}", kind.version, kind.plural);
    let metadata = json!({"name": namespace});
    let mut steps = vec![post(NAMESPACES, json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}))];
    for _ in 0..rng.range(8, 16) {
        match rng.range(0, 8) {
            0..=3 => steps.push(post(&path, object(&mut rng, kind))),
            4 => {
                let labels = json!({"a": rng.pick(&[json!("1"), json!("2"), Value::Null])});
                let path = format!("{path}/o{}", rng.range(0, OBJECTS));
                let body = json!({"metadata": {"labels": labels}});
                steps.push(Step { method: "PATCH", path, query: String::new(), content_type: MERGE, body });
            }
            _ => steps.extend(list(&mut rng, &path)),
        }
    }
    steps.extend(list(&mut rng, &path));
    let gone = (0..OBJECTS).map(|nth| request("DELETE", format!("{path}/o{nth}"), String::new()));
    steps.extend(gone);
    steps
}

/// A list, and where it may have pages the next ones.
fn list(rng: &mut Rng, path: &str) -> Vec<Step> {
    let encoded = |text: &str| text.replace(' ', "%20").replace('!', "%21").replace('=', "%3D");
    let mut query = String::new();
    if rng.permille(700) {
        query += &format!("labelSelector={}", encoded(rng.pick::<&str>(&LABELS)));
    }
    if rng.permille(300) {
        let name = format!("metadata.name={}", *rng.pick(&["o0", "o1", "nobody"]));
        let others = ["metadata.name!=o1".to_owned(), "spec.nobody=1".to_owned(), name.replace('=', "==")];
        let field = if rng.permille(600) { name } else { rng.pick(&others).clone() };
        query += &format!("&fieldSelector={}", encoded(&field));
    }
    if rng.permille(400) {
        return vec![request("GET", path.to_owned(), query)];
    }
    query += &format!("&limit={}", rng.range(1, 4));
    let next = format!("{query}&continue=$CONTINUE");
    let pages = (0..rng.range(0, 4)).map(|_| next.clone());
    std::iter::once(query).chain(pages).map(|query| request("GET", path.to_owned(), query)).collect()
}

fn object(rng: &mut Rng, kind: &kinds::Kind) -> Value {
    let metadata = json!({"name": format!("o{}", rng.range(0, OBJECTS))});
    let mut object = json!({"apiVersion": kind.api_version(), "kind": kind.kind, "metadata": metadata});
    for label in ["a", "b"] {
        if rng.permille(600) {
            object["metadata"]["labels"][label] = json!(rng.pick(&["1", "2"]));
        }
    }
    match kind.plural {
        "inferencedeployments" => object["spec"] = super::story::spec(1, "Recover"),
        "engineincidents" => {
            object["spec"] =
                json!({"deployment": "chat", "pod": "p", "podUid": "u", "class": "Livelock", "episodeId": "e"});
        }
        _ => {}
    }
    object
}

fn post(path: &str, body: Value) -> Step {
    Step { method: "POST", path: path.to_owned(), query: String::new(), content_type: JSON, body }
}

fn request(method: &'static str, path: String, query: String) -> Step {
    Step { method, path, query, content_type: JSON, body: Value::Null }
}
