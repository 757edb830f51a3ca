//! Where an operator dies before anything stands, what a story does to engines and children comes too early: it would hit nothing, and the
//! end would differ from the one without a death for the story's sake. In crash plans such an act waits for what it is meant for.

use super::{
    act::{Act, nth_pod},
    agent::Engine,
    kube::store::Store,
    story::NAMESPACE,
    world::{Pod, World},
};

/// Longer than two operators, one after the other, take to be followed and for engines to start.
pub const MOST_MS: u64 = 90_000;

/// Is what this act is meant for not there yet?
pub fn lacks(act: &Act, world: &World, store: &Store) -> bool {
    let starts = |pod: &Pod| matches!(pod.agent.engine, Engine::Starting { .. });
    match act {
        Act::Freeze { nth, .. } | Act::Crash { nth } | Act::Poison { nth, .. } => {
            nth_pod(world, *nth).and_then(|uid| world.pods.get(&uid)).is_none_or(starts)
        }
        Act::FreezeOf { image } => {
            let live = |name: &str| store.get(&("pods", NAMESPACE.to_owned(), name.to_owned()));
            let runs = |name: &str| live(name).is_some_and(|e| e.value["spec"]["containers"][0]["image"] == *image);
            world.pods.values().filter(|pod| runs(&pod.name)).min_by_key(|pod| pod.name.clone()).is_none_or(starts)
        }
        Act::Meddle => store.get(&("deployments", NAMESPACE.to_owned(), "chat".to_owned())).is_none(),
        _ => false,
    }
}
