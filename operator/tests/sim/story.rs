//! What users and fate do: the standard stories, and stories by seed.

use serde_json::{Value, json};

use super::{
    changes,
    cluster::State,
    faults::{Faults, Outage, Rates, Side},
    rng::Rng,
    world::{World, target},
};

const CHILDREN: [&str; 5] = ["services", "deployments", "roles", "rolebindings", "serviceaccounts"];
pub const NAMESPACE: &str = "serving";
/// The annotation by which the operator marks the last serving replica (I3).
pub const LAST_SERVING: &str = "truebeat.io/last-serving";

/// One act.
#[derive(Debug, Clone)]
pub enum Act {
    Create {
        name: &'static str,
        spec: Value,
    },
    /// A merge patch of an InferenceDeployment by its user.
    Edit {
        name: &'static str,
        patch: Value,
    },
    Delete {
        name: &'static str,
    },
    /// Engines by their place in the order of names; they heal by themselves after so many milliseconds, if at all.
    Freeze {
        nth: usize,
        heals_ms: Option<u64>,
    },
    Crash {
        nth: usize,
    },
    DeletePod {
        nth: usize,
    },
    /// A node on which engines freeze again and again, or no more.
    Sick {
        node: usize,
        sick: bool,
    },
    /// Somebody writes labels and annotations of their own on our children, and changes a field that is ours.
    Meddle,
    /// Somebody deletes a child.
    DeleteChild {
        plural: &'static str,
    },
    /// An operator process dies; another is frozen for a time; the Lease is deleted by hand.
    Kill {
        operator: usize,
    },
    Pause {
        operator: usize,
        ms: u64,
    },
    DeleteLease,
}

/// A whole run.
#[derive(Debug, Clone)]
pub struct Story {
    pub name: String,
    /// When, and what.
    pub acts: Vec<(u64, Act)>,
    pub faults: Faults,
    /// From the last act or fault until everything must be in order (P4).
    pub settle_ms: u64,
    /// How long it must stay so without a write (P4, P7).
    pub stay_ms: u64,
}

pub fn spec(replicas: u64, mode: &str) -> Value {
    json!({
        "replicas": replicas,
        "model": {"source": {"file": {"path": "/models/tiny"}}},
        "engine": {"kind": "Truebeat", "image": "engine:1"},
        "agent": {"image": "agent:1"},
        // a common cause is a story of its own: whoever holds needs a person, and here is none
        "recovery": {"mode": mode, "maxUnavailable": 1, "holdPercent": 100},
    })
}

fn create(replicas: u64) -> (u64, Act) {
    (0, Act::Create { name: "chat", spec: spec(replicas, "Recover") })
}

pub fn freeze(nth: usize) -> Act {
    Act::Freeze { nth, heals_ms: None }
}

/// The stories whose every write is a crash point (P1). Their ends do not depend on chance.
pub fn standard() -> Vec<(&'static str, Vec<(u64, Act)>)> {
    let edit = |patch: Value| Act::Edit { name: "chat", patch };
    let mut hold = spec(4, "Recover");
    hold["recovery"]["holdPercent"] = json!(60);
    let held = Act::Create { name: "chat", spec: hold };
    let storm = |ms: u64| (0..4).map(|nth| (45_000, Act::Freeze { nth, heals_ms: Some(ms) })).collect::<Vec<_>>();
    let mut stories = vec![
        ("create", vec![create(2)]),
        ("freeze-one", vec![create(2), (20_000, freeze(0))]),
        ("freeze-all", vec![create(3), (20_000, freeze(0)), (20_000, freeze(1)), (20_000, freeze(2))]),
        ("clears-by-itself", vec![create(2), (20_000, Act::Freeze { nth: 0, heals_ms: Some(2_000) })]),
        ("crash", vec![create(2), (20_000, Act::Crash { nth: 1 })]),
        (
            "scale",
            vec![
                create(1),
                (20_000, edit(json!({"spec": {"replicas": 4}}))),
                (60_000, edit(json!({"spec": {"replicas": 2}}))),
            ],
        ),
        ("rollout", vec![create(2), (20_000, edit(json!({"spec": {"engine": {"image": "engine:2"}}})))]),
        (
            "rollback",
            vec![
                create(2),
                (20_000, edit(json!({"spec": {"engine": {"image": "engine:2"}, "drainSeconds": 60}}))),
                (50_000, edit(json!({"spec": {"engine": {"image": "engine:1"}, "drainSeconds": 30}}))),
            ],
        ),
        (
            "bad-spec",
            vec![
                create(1),
                (20_000, edit(json!({"spec": {"recovery": {"unattendedAfter": "99999999999h"}}}))),
                (40_000, edit(json!({"spec": {"recovery": {"unattendedAfter": "5m"}}}))),
            ],
        ),
        ("delete-in-stall", vec![create(2), (20_000, freeze(0)), (24_500, Act::Delete { name: "chat" })]),
        ("meddle", vec![create(2), (20_000, Act::Meddle), (30_000, Act::DeleteChild { plural: "services" })]),
        (
            "sick-node",
            vec![create(2), (20_000, Act::Sick { node: 0, sick: true }), (110_000, Act::Sick { node: 0, sick: false })],
        ),
        ("common-cause", [vec![(0, held)], storm(40_000)].concat()),
        ("common-cause-proceed", [vec![create(4)], storm(40_000)].concat()),
        ("replaced-in-stall", vec![create(2), (20_000, freeze(0)), (24_000, Act::DeletePod { nth: 0 })]),
    ];
    stories.extend(changes::stories());
    stories
}

/// What the log of a standard story must and must not hold, where the end alone does not tell (both ways of a field).
pub fn words(name: &str) -> &'static [(&'static str, bool)] {
    const DELETE: &str = "DELETE /api/v1/namespaces/serving/pods/";
    const GRANT: &str = "truebeat.io/restart-grant";
    match name {
        "freeze-one" => &[(GRANT, true), (DELETE, false), ("RestartsHeld", false)],
        "sick-node" => &[(GRANT, true), (DELETE, true), ("NodeSuspect", true)],
        "common-cause" => &[(GRANT, false), ("RestartsHeld", true)],
        "common-cause-proceed" => &[(GRANT, true), ("RestartsHeld", false)],
        other => changes::words(other),
    }
}

pub fn plain(name: &str, acts: Vec<(u64, Act)>, crashes: Vec<(u64, Side)>) -> Story {
    let faults = Faults { crashes, ..Faults::none(7) };
    Story { name: name.to_owned(), acts, faults, settle_ms: 90_000, stay_ms: 20_000 }
}

/// A story by seed: what happens, what fails, who dies.
pub fn random(seed: u64) -> Story {
    let mut rng = Rng::new(seed);
    let mode = *rng.pick(&["Recover", "Recover", "Recover", "Recover", "Fence", "Observe"]);
    let replicas = rng.range(1, 5);
    let mut acts = vec![(0, Act::Create { name: "chat", spec: spec(replicas, mode) })];
    if rng.permille(300) {
        acts.push((rng.range(0, 10_000), Act::Create { name: "other", spec: spec(rng.range(1, 3), "Recover") }));
    }
    let end = 150_000;
    for _ in 0..rng.range(1, 9) {
        let at = rng.range(10_000, end);
        let act = random_act(&mut rng, mode);
        acts.push((at, act));
    }
    if rng.permille(150) {
        acts.push((end - 1, Act::Delete { name: "chat" }));
    }
    acts.sort_by_key(|(at, _)| *at);
    let mut level = |most: u64| if rng.permille(500) { rng.range(0, most) } else { 0 };
    let rates = Rates {
        refused: level(150),
        applied_unheard: level(100),
        silent: level(40),
        conflict: level(150),
        slow: level(100),
        watch_broken: level(100),
        watch_gone: level(200),
        watch_elided: level(100),
        watch_lag_ms: level(3_000),
    };
    let elides = rates.watch_elided > 0;
    let mut outages = Vec::new();
    if rng.permille(250) {
        let from_ms = rng.range(5_000, end);
        let to_ms = from_ms + *rng.pick(&[5_000, 20_000, 60_000]);
        outages.push(Outage { from_ms, to_ms, black_hole: rng.permille(500) });
    }
    let crashes = (0..rng.range(0, 4)).map(|_| (rng.range(1, 60), *rng.pick(&[Side::Before, Side::After]))).collect();
    let end_ms = outages.iter().map(|o| o.to_ms).chain([end]).max().unwrap_or(end);
    let faults = Faults { rates, outages, end_ms, crashes, rng: Rng::new(seed ^ 0xf0) };
    // where events are lost the slow look heals, which is every 300 s
    let settle_ms = if elides { 400_000 } else { 150_000 };
    Story { name: format!("seed {seed}"), acts, faults, settle_ms, stay_ms: 310_000 }
}

fn random_act(rng: &mut Rng, mode: &str) -> Act {
    let nth = rng.range(0, 4) as usize;
    let operator = rng.range(0, 2) as usize;
    // where nobody restarts, only what heals by itself can be in order at the end
    let heals = mode != "Recover" || rng.permille(300);
    match rng.range(0, 14) {
        0..=4 => Act::Freeze { nth, heals_ms: heals.then(|| rng.range(500, 20_000)) },
        5 => Act::Crash { nth },
        6 => Act::DeletePod { nth },
        7 => Act::Edit { name: "chat", patch: json!({"spec": {"replicas": rng.range(0, 5)}}) },
        8 => Act::Edit {
            name: "chat",
            patch: json!({"spec": {"engine": {"image": format!("engine:{}", rng.range(1, 4))}}}),
        },
        9 => Act::Meddle,
        10 => Act::DeleteChild { plural: CHILDREN[rng.range(0, CHILDREN.len() as u64) as usize] },
        11 => Act::Kill { operator },
        12 => Act::Pause { operator, ms: rng.range(1_000, 40_000) },
        _ => Act::DeleteLease,
    }
}

/// Does one act to the world; the acts on operators are the runner's.
pub fn perform(act: &Act, world: &mut World, state: &mut State, now_ms: u64) {
    let store = &mut state.store;
    let nth_pod = |world: &World, nth: usize| {
        let mut uids: Vec<(String, String)> = world.pods.values().map(|p| (p.name.clone(), p.uid.clone())).collect();
        uids.sort();
        if uids.is_empty() { None } else { Some(uids[nth % uids.len()].1.clone()) }
    };
    match act {
        Act::Create { name, spec } => {
            let body = json!({"metadata": {"name": name, "labels": {"team": "a"}}, "spec": spec});
            let _ = store.create(&target("inferencedeployments", NAMESPACE, name, "user"), body);
        }
        Act::Edit { name, patch } => {
            let _ = store.merge(&target("inferencedeployments", NAMESPACE, name, "user"), patch);
        }
        Act::Delete { name } => {
            let _ = store.delete(&target("inferencedeployments", NAMESPACE, name, "user"), &Value::Null);
        }
        Act::Freeze { nth, heals_ms } => {
            if let Some(uid) = nth_pod(world, *nth)
                && let Some(pod) = world.pods.get_mut(&uid)
            {
                pod.agent.freeze(now_ms, heals_ms.map(|ms| now_ms + ms));
            }
        }
        Act::Crash { nth } => {
            if let Some(uid) = nth_pod(world, *nth)
                && let Some(pod) = world.pods.get_mut(&uid)
            {
                pod.agent.crash(now_ms);
            }
        }
        Act::DeletePod { nth } => {
            if let Some(pod) = nth_pod(world, *nth).and_then(|uid| world.pods.get(&uid)) {
                let _ = store.delete(&target("pods", &pod.namespace, &pod.name, "user"), &Value::Null);
            }
        }
        Act::Sick { node, sick } => {
            let node = format!("node-{node}");
            let _ = if *sick { world.sick_nodes.insert(node) } else { world.sick_nodes.remove(&node) };
        }
        Act::Meddle => {
            let note = json!({"metadata": {"annotations": {"example.com/owner": "team-a"}, "labels": {"example.com/tier": "gold"}}});
            for plural in ["services", "deployments"] {
                let _ = store.merge(&target(plural, NAMESPACE, "chat", "user"), &note);
            }
            let _ = store.merge(&target("deployments", NAMESPACE, "chat", "user"), &json!({"spec": {"replicas": 7}}));
        }
        Act::DeleteChild { plural } => {
            let name = if matches!(*plural, "services" | "deployments") { "chat" } else { "chat-truebeat-agent" };
            let _ = store.delete(&target(plural, NAMESPACE, name, "user"), &Value::Null);
        }
        Act::DeleteLease => {
            let _ = store.delete(&target("leases", "truebeat-system", "truebeat-operator", "user"), &Value::Null);
        }
        Act::Kill { .. } | Act::Pause { .. } => {}
    }
}
