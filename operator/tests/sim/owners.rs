//! P10: a pass over an InferenceDeployment writes that one, what it owns, and its own mark on nodes, and nothing of anybody else's, of the same
//! namespace or of another. Whose an object is follows from its owners' UIDs and not from its labels or its name, which anybody may write. The
//! sweep of the nodes is nobody's pass: each thing that it puts on a node has an owner who wishes it of that node.

use std::sync::Arc;

use crds::{LABEL_DEPLOYMENT, node::LABEL_SUSPECT};
use operator::controllers::nodes::plan::{avoid_label, label_time};
use serde_json::Value;

use super::{
    kube::{object::Object, store::Store, wire::Call},
    passes::{Whose, Work},
    world::text,
};

const ROOT: &str = "InferenceDeployment";
/// From a pod up to the InferenceDeployment.
const OWNERS: [&str; 3] = ["replicasets", "deployments", "inferencedeployments"];

/// What is wrong with a write that was made for `work`; `old` is the object as it was before.
pub fn trespass(store: &Store, work: Option<&Work>, call: &Call, old: Option<&Object>) -> Option<String> {
    match work {
        Some(Work::Pass(whose)) => of_pass_over(store, whose, call, old)
            .map(|what| format!("by the pass over {}/{}: {what}", whose.0, whose.1)),
        Some(Work::Sweep) => of_sweep(store, call).map(|what| format!("by the sweep: {what}")),
        None => Some("by no pass".to_owned()),
    }
}

fn of_pass_over(store: &Store, whose: &Whose, call: &Call, old: Option<&Object>) -> Option<String> {
    let plural = call.target.kind.plural;
    match plural {
        "nodes" => foreign_mark(whose, &call.body),
        _ if call.target.namespace != whose.0 => Some("in another namespace".to_owned()),
        "inferencedeployments" => (call.target.name != whose.1).then(|| "another one".to_owned()),
        "events" => foreign_news(store, whose, &call.body),
        _ => old
            .and_then(|old| not_of(whose, owner_of(store, old)))
            .or_else(|| old.is_none().then(|| not_of(whose, owner_of(store, &call.body))).flatten())
            .or_else(|| foreign_words(store, whose, &call.body)),
    }
}

/// What is put on a node is wished of it by somebody who is there, or was a moment ago; what is taken off was somebody's.
fn of_sweep(store: &Store, call: &Call) -> Option<String> {
    if call.target.kind.plural != "nodes" {
        return Some("it is no node".to_owned());
    }
    let node = call.target.name.as_str();
    let of_node = |places: &Value| places.as_array().into_iter().flatten().any(|place| place["node"] == node);
    let wished = |infd: &Object| ["avoid", "recent"].iter().any(|list| of_node(&infd["status"]["recovery"][*list]));
    let by_nobody = || !infds(store).any(|infd| wished(&infd));
    let mut conditions = call.body["status"]["conditions"].as_array().into_iter().flatten();
    if conditions.any(|condition| condition["status"] == "True") && by_nobody() {
        return Some("a condition that nobody is the reason of".to_owned());
    }
    let mut labels = call.body["metadata"]["labels"].as_object().into_iter().flatten();
    labels.find_map(|(key, value)| {
        if key == LABEL_SUSPECT {
            return (!value.is_null() && by_nobody()).then(|| "a suspicion that nobody has".to_owned());
        }
        let until = |place: &Value| label_time(place["until"].as_str().unwrap_or_default());
        let asks = |infd: &Object| {
            let mut places = infd["status"]["recovery"]["avoid"].as_array().into_iter().flatten();
            value.is_null() || places.any(|place| place["node"] == node && *value == until(place))
        };
        let its_own = |infd: &Object| *key == avoid_label(&text(infd, "namespace"), &text(infd, "name"));
        let owned = infds(store).any(|infd| its_own(&infd) && asks(&infd));
        (!owned).then(|| format!("the label {key} to be {value}, which its owner does not ask for"))
    })
}

/// Every InferenceDeployment as it is, and as it was.
fn infds(store: &Store) -> impl Iterator<Item = Arc<Object>> {
    let live = store.of("inferencedeployments").map(|(_, entry)| entry.value.clone());
    let past = store.history.iter().rev().filter(|change| change.plural == "inferencedeployments");
    live.chain(past.map(|change| change.value.clone()))
}

/// A node bears one label of each: a pass writes its own.
fn foreign_mark((namespace, name): &Whose, body: &Object) -> Option<String> {
    let own = avoid_label(namespace, name);
    let mut keys = body["metadata"]["labels"].as_object().into_iter().flatten().map(|(key, _)| key);
    keys.find(|key| **key != own && *key != LABEL_SUSPECT).map(|key| format!("the label {key}"))
}

/// Whom an event is about. (Of a pod that is gone, and whose owners are, nobody can tell.)
fn foreign_news(store: &Store, whose: &Whose, body: &Object) -> Option<String> {
    let about = |reference: &Value| {
        let word = |field: &str| reference[field].as_str().unwrap_or_default().to_owned();
        (word("namespace"), word("name"))
    };
    let pod = &body["related"]["uid"];
    let root = (body["regarding"]["kind"] == ROOT).then(|| about(&body["regarding"]));
    not_of(whose, root).or_else(|| of_pod(store, pod).and_then(|owner| not_of(whose, Some(owner))))
}

/// What a body says of whose it is, whatever it is written on.
fn foreign_words(store: &Store, whose: &Whose, body: &Object) -> Option<String> {
    let named = |word: &Value| word.as_str().filter(|name| *name != whose.1).map(|name| format!("it is {name}'s"));
    let owners = body["metadata"]["ownerReferences"].as_array();
    let owned = owners.filter(|list| !list.is_empty()).and_then(|_| not_of(whose, owner_of(store, body)));
    let of_pod = of_pod(store, &body["spec"]["podUid"]).and_then(|owner| not_of(whose, Some(owner)));
    owned
        .or_else(|| named(&body["metadata"]["labels"][LABEL_DEPLOYMENT]))
        .or_else(|| named(&body["spec"]["deployment"]))
        .or(of_pod)
}

fn not_of(whose: &Whose, owner: Option<Whose>) -> Option<String> {
    match owner {
        Some(owner) if owner == *whose => None,
        Some((namespace, name)) => Some(format!("it is {namespace}/{name}'s")),
        None => Some("it is nobody's".to_owned()),
    }
}

/// Whose a pod is of which nothing but the UID is known.
fn of_pod(store: &Store, uid: &Value) -> Option<Whose> {
    let pod = find(store, &["pods"], uid.as_str().filter(|uid| !uid.is_empty())?)?;
    owner_of(store, &pod)
}

/// Up to the InferenceDeployment, step by step, by UIDs alone; those are looked for among what is gone as well.
fn owner_of(store: &Store, object: &Object) -> Option<Whose> {
    if object["kind"] == ROOT {
        return Some((text(object, "namespace"), text(object, "name")));
    }
    let owners = object["metadata"]["ownerReferences"].as_array()?;
    let found = owners.iter().find_map(|owner| find(store, &OWNERS, owner["uid"].as_str()?))?;
    owner_of(store, &found)
}

fn find(store: &Store, plurals: &[&'static str], uid: &str) -> Option<Arc<Object>> {
    let is = |object: &Arc<Object>| object["metadata"]["uid"] == uid;
    let mut live = plurals.iter().flat_map(|plural| store.of(plural)).map(|(_, entry)| &entry.value);
    let gone =
        || store.history.iter().rev().filter(|change| plurals.contains(&change.plural)).map(|change| &change.value);
    live.find(|object| is(object)).or_else(|| gone().find(|object| is(object))).cloned()
}
