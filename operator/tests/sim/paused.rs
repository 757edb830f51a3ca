//! A Deployment that is paused, by its controller's own rule (kubernetes, pkg/controller/deployment/sync.go, `scale`): no ReplicaSet is
//! made for it; of those that are there the active ones share out its number, and where none is active the one of its template gets all,
//! or the newest. Each ReplicaSet keeps to its number meanwhile.

use std::{cmp::Reverse, sync::Arc};

use serde_json::{Value, json};

use super::{
    kube::{object::Object, store::Store},
    world::{PLAIN, World, delete_pod, goes_first, is_ready, owner, target, text},
};

/// How many pods there could be in all when the ReplicaSet got its number.
const MOST_BEFORE: &str = "deployment.kubernetes.io/max-replicas";

/// A ReplicaSet, and the number that it is to have.
#[derive(Debug, Clone)]
struct Set {
    live: Arc<Object>,
    name: String,
    size: i64,
    /// `MOST_BEFORE`.
    most: i64,
}

/// The number of replicas, and how many pods there may be in all.
fn scale_of(deployment: &Object) -> (i64, i64) {
    let spec = &deployment["spec"];
    let wanted = spec["replicas"].as_i64().unwrap_or(1);
    (wanted, wanted + spec["strategy"]["rollingUpdate"]["maxSurge"].as_i64().unwrap_or(1))
}

/// The Deployment's own, oldest first.
fn sets_of(store: &Store, deployment: &Object) -> Vec<Set> {
    let own = |set: &Object| {
        set["metadata"]["ownerReferences"][0]["uid"] == deployment["metadata"]["uid"]
            && set["metadata"]["deletionTimestamp"].is_null()
    };
    let all = store.of("replicasets").map(|(_, entry)| &entry.value).filter(|set| own(set));
    let mut sets: Vec<Set> = all
        .map(|live| {
            let most = live["metadata"]["annotations"][MOST_BEFORE].as_str().and_then(|text| text.parse().ok());
            let (name, size) = (text(live, "name"), live["spec"]["replicas"].as_i64().unwrap_or(0));
            Set { live: live.clone(), name, size, most: most.unwrap_or(0) }
        })
        .collect();
    sets.sort_by_key(|set| (text(&set.live, "creationTimestamp"), set.name.clone()));
    sets
}

fn count(pods: &[Arc<Object>], set: &str) -> i64 {
    pods.iter().filter(|pod| owner(pod) == set).count() as i64
}

fn write(store: &mut Store, set: &Set, (size, most): (i64, i64)) {
    if (set.size, set.most) == (size, most) {
        return;
    }
    let at = target("replicasets", &text(&set.live, "namespace"), &set.name, PLAIN);
    let notes = json!({MOST_BEFORE: most.to_string()});
    let _ = store.merge(&at, json!({"metadata": {"annotations": notes}, "spec": {"replicas": size}}));
}

/// What the ReplicaSets of a Deployment that is not paused are asked for is what they have.
pub fn note_sizes(store: &mut Store, deployment: &Object, pods: &[Arc<Object>]) {
    let (_, most) = scale_of(deployment);
    for set in sets_of(store, deployment) {
        write(store, &set, (count(pods, &set.name), most));
    }
}

impl World {
    /// One step of a Deployment that is paused; `fresh` is the name that the ReplicaSet of its template has, if it was made.
    pub fn stand_still(&mut self, store: &mut Store, deployment: &Object, fresh: &str, pods: &[Arc<Object>]) {
        let (wanted, most) = scale_of(deployment);
        let before = sets_of(store, deployment);
        for (set, size) in before.iter().zip(shared_out(&before, fresh, (wanted, most), pods)) {
            write(store, set, (size, if size == set.size { set.most } else { most }));
        }
        let namespace = text(deployment, "namespace");
        for set in sets_of(store, deployment) {
            let there = count(pods, &set.name);
            if there < set.size {
                let template: &Value = &set.live["spec"]["template"];
                self.create_pod(store, &namespace, &set.name, &text(&set.live, "uid"), template);
            } else if there > set.size {
                let own = pods.iter().filter(|pod| owner(pod) == set.name);
                let victim = own.min_by_key(|pod| goes_first(pod));
                victim.into_iter().for_each(|victim| delete_pod(store, victim));
            }
        }
    }
}

/// The number that each of `sets` is to have.
fn shared_out(sets: &[Set], fresh: &str, (wanted, most): (i64, i64), pods: &[Arc<Object>]) -> Vec<i64> {
    let mut sizes: Vec<i64> = sets.iter().map(|set| set.size).collect();
    let mut active: Vec<usize> = (0..sets.len()).filter(|at| sizes[*at] > 0).collect();
    let new = sets.iter().position(|set| set.name == fresh);
    let serving = |name: &str| pods.iter().filter(|pod| owner(pod) == name && is_ready(pod)).count() as i64;
    match (active.as_slice(), new) {
        ([], _) => new.or(sets.len().checked_sub(1)).into_iter().for_each(|at| sizes[at] = wanted),
        ([only], _) => sizes[*only] = wanted,
        (_, Some(new)) if sizes[new] == wanted && serving(fresh) == wanted => {
            active.into_iter().filter(|at| *at != new).for_each(|at| sizes[at] = 0);
        }
        _ => {
            let room = if wanted > 0 { most } else { 0 } - sizes.iter().sum::<i64>();
            // the greatest first; of equal ones the newest if there is something to give, else the oldest
            active.sort_by_key(|at| {
                (Reverse(sizes[*at]), if room > 0 { Reverse(*at) } else { Reverse(usize::MAX - at) })
            });
            let mut given = 0;
            for at in &active {
                let part = share(&sets[*at], (wanted, most), pods.len() as i64);
                let part = if room > 0 { part.min(room - given) } else { part.max(room - given) };
                let part = if room == given { 0 } else { part };
                (sizes[*at], given) = (sizes[*at] + part, given + part);
            }
            sizes[active[0]] = (sizes[active[0]] + room - given).max(0);
        }
    }
    sizes
}

/// What is one ReplicaSet's, in proportion, of a change of the number.
fn share(set: &Set, (wanted, most): (i64, i64), there: i64) -> i64 {
    let before = if set.most == 0 { there } else { set.most };
    match (wanted, before) {
        (0, _) => -set.size,
        (_, 0) => 0,
        _ => (2 * set.size * most + before) / (2 * before) - set.size,
    }
}
