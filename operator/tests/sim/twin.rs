//! P12, reconcile twice = once: a pass over a copy of the world in which nothing else moves, repeated until it writes
//! nothing. A pass that sees what the one before it did may write again (the incident that it made has a status now), but
//! not for ever.

use std::sync::Arc;

use operator::controllers::inference_deployment::pass;

use super::{
    cluster::Cluster,
    passes::Caller,
    run::{calls, wall_of},
    story::FleetTerms,
};

/// So many passes may follow from each other; the next one is silent.
const PASSES: usize = 4;

/// What keeps writing in the frozen world `twin`.
pub async fn settles(twin: Arc<Cluster>, fleet: FleetTerms, now_ms: u64) -> Vec<String> {
    let caller = Caller::new(0, "twin");
    let calls = calls(twin.client(caller), wall_of(&twin), None, fleet);
    let names: Vec<(String, String)> =
        twin.lock().store.of("inferencedeployments").map(|(key, _)| (key.1.clone(), key.2.clone())).collect();
    let mut faults = Vec::new();
    for (namespace, name) in names {
        let mut writes = Vec::new();
        for _ in 0..=PASSES {
            calls.leadership.renewed();
            let before = twin.lock().store.version;
            let told = pass(&calls, &namespace, &name).await;
            writes.push(twin.lock().store.version - before);
            if writes.last() == Some(&0) || told.is_err() {
                break;
            }
        }
        if writes.len() > PASSES {
            let at = now_ms as f64 / 1000.0;
            faults.push(format!("{at:.3} s: P12: pass after pass over {namespace}/{name} writes: {writes:?} versions"));
        }
    }
    faults
}
