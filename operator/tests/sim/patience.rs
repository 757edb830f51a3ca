//! Where an operator dies before anything stands, what a story does to engines and children comes too early: it would hit nothing, and the
//! end would differ from the one without a death for the story's sake. In crash plans such an act waits for what it is meant for.

use super::{
    act::{Act, first_pod_of, nth_pod},
    agent::Engine,
    kube::store::Store,
    story::NAMESPACE,
    world::World,
};

/// Longer than two operators, one after the other, take to be followed and for engines to start.
pub const MOST_MS: u64 = 90_000;

/// Is what this act is meant for not there yet?
pub fn lacks(act: &Act, world: &World, store: &Store) -> bool {
    let starts = |uid: Option<String>| {
        let pod = uid.and_then(|uid| world.pods.get(&uid));
        pod.is_none_or(|pod| matches!(pod.agent.engine, Engine::Starting { .. }))
    };
    match act {
        Act::Freeze { nth, .. } | Act::Crash { nth } | Act::Poison { nth, .. } => starts(nth_pod(world, *nth)),
        Act::FreezeOf { image } => starts(first_pod_of(world, store, image)),
        Act::Meddle => store.get(&("deployments", NAMESPACE.to_owned(), "chat".to_owned())).is_none(),
        _ => false,
    }
}
