//! What must be so at some moment in the middle of a story.

use crds::node::{CONDITION_ENGINE_STALLS, LABEL_SUSPECT};

use super::{
    act::{Act, child},
    agent::Engine,
    cluster::State,
    end::condition,
    kube::{object::Object, verbs::merge_patch},
    story::NAMESPACE,
    world::{World, target},
};

/// Looks whether it is.
pub fn expect(act: &Act, world: &World, state: &mut State, now_ms: u64) {
    let fault = match act {
        Act::Expect { condition: type_, status } => {
            let chat = state.store.get(&("inferencedeployments", NAMESPACE.to_owned(), "chat".to_owned()));
            let found = chat.and_then(|entry| condition(&entry.value, type_));
            (found.as_ref().map(|(word, _)| word.as_str()) != *status)
                .then(|| format!("P13: {type_} is {found:?} and should be {status:?}"))
        }
        Act::ExpectServing { count } => {
            let serving = world.pods.values().filter(|pod| matches!(pod.agent.engine, Engine::Serving { .. })).count();
            (serving != *count).then(|| format!("P4: {serving} engines serve and {count} should"))
        }
        Act::ExpectFree { node } => {
            let node = format!("node-{node}");
            let there: Vec<&str> =
                world.pods.values().filter(|pod| pod.node == node).map(|pod| pod.name.as_str()).collect();
            (!there.is_empty()).then(|| format!("P4: {there:?} runs on {node}"))
        }
        Act::ExpectMarked { node, marked } => {
            let node = format!("node-{node}");
            let live = state.store.read(&target("nodes", "", &node, "user")).ok();
            let suspect = live.as_ref().is_some_and(|(_, live)| !live["metadata"]["labels"][LABEL_SUSPECT].is_null());
            let told = live.and_then(|(_, live)| condition(&live, CONDITION_ENGINE_STALLS));
            let told = told.is_some_and(|(word, _)| word == "True");
            ((suspect, told) != (*marked, *marked))
                .then(|| format!("P4: {node} is marked {suspect}, told of {told}, and both should be {marked}"))
        }
        Act::ExpectOf { image, count } => {
            let runs = |pod: &Object| pod["spec"]["containers"][0]["image"] == *image;
            let running = state.store.of("pods").filter(|(_, entry)| runs(&entry.value)).count();
            (running != *count).then(|| format!("P4: {running} pods run {image} and {count} should"))
        }
        Act::ExpectKept { plural, patch } => {
            let live = state.store.read(&target(plural, NAMESPACE, child(plural), "user")).ok();
            let live = live.map(|(_, live)| live.json()).unwrap_or_default();
            let mut patched = live.clone();
            merge_patch(&mut patched, patch);
            (patched != live).then(|| format!("P9: the {plural} should have {patch}, and has not"))
        }
        Act::ExpectNo { plural, pointer } => {
            let live = state.store.read(&target(plural, NAMESPACE, child(plural), "user")).ok();
            let field = live.and_then(|(_, live)| live.json().pointer(pointer).cloned());
            field.map(|field| format!("P4: {pointer} of the {plural} is {field} and should not be there"))
        }
        _ => None,
    };
    fault.into_iter().for_each(|what| state.checks.broken(now_ms, what));
}
