//! A story by seed: what happens, what fails, who dies.

use serde_json::json;

use super::{
    act::Act,
    faults::{Faults, Outage, Rates, Side},
    policies::Policies,
    rng::Rng,
    story::{Story, gpus, spec},
    world::NODES,
};

const CHILDREN: [&str; 5] = ["services", "deployments", "roles", "rolebindings", "serviceaccounts"];

/// The story of this seed.
pub fn story(seed: u64) -> Story {
    let mut rng = Rng::new(seed);
    let mode = *rng.pick(&["Recover", "Recover", "Recover", "Recover", "Fence", "Observe"]);
    let replicas = rng.range(1, 5);
    let mut chat = if rng.permille(200) { gpus(replicas) } else { spec(replicas, mode) };
    chat["recovery"]["mode"] = json!(mode);
    let mut policies = Policies::new(seed);
    policies.vary(&mut chat);
    let mut acts = vec![(0, Act::Create { name: "chat", spec: chat })];
    if rng.permille(300) {
        let (at, mut other) = (rng.range(0, 10_000), spec(rng.range(1, 3), "Recover"));
        policies.vary(&mut other);
        acts.push((at, Act::Create { name: "other", spec: other }));
    }
    acts.extend(policies.neighbour());
    let end = 150_000;
    for _ in 0..rng.range(1, 9) {
        let at = rng.range(10_000, end);
        let act = random_act(&mut rng, mode);
        acts.push((at, act));
    }
    // from dice of its own: the other acts of a seed stay what they were before there were drains
    let mut dice = Rng::new(seed ^ 0xd4a1);
    if dice.permille(250) {
        let node = dice.range(0, NODES as u64) as usize;
        acts.push((dice.range(10_000, end), Act::Drain { node, ms: dice.range(5_000, 60_000) }));
    }
    acts.extend(policies.troubles(mode, end));
    if rng.permille(150) {
        acts.push((end - 1, Act::Delete { name: "chat" }));
    }
    acts.extend((0..2).map(|_| (rng.range(10_000, end), Act::PassAgain)));
    acts.sort_by_key(|(at, _)| *at);
    let mut level = |most: u64| if rng.permille(500) { rng.range(0, most) } else { 0 };
    let rates = Rates {
        refused: level(150),
        applied_unheard: level(100),
        repeated: level(100),
        silent: level(40),
        conflict: level(150),
        slow: level(100),
        watch_broken: level(100),
        watch_gone: level(200),
        watch_elided: level(100),
        watch_doubled: level(200),
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
    let bookmarks = policies.bookmarks;
    let faults = Faults { rates, rules: Vec::new(), outages, bookmarks, end_ms, crashes, rng: Rng::new(seed ^ 0xf0) };
    // where events are lost the slow look heals, which is every 300 s
    let slow = acts.iter().any(|(_, act)| matches!(act, Act::Unkillable { .. }));
    let settle_ms = if elides || slow { 400_000 } else { 150_000 } + policies.patience_ms();
    Story {
        acts,
        faults,
        scope: None,
        fleet: policies.fleet,
        settle_ms,
        stay_ms: 310_000,
        patient: false,
        garbage_ms: 0,
    }
}

fn random_act(rng: &mut Rng, mode: &str) -> Act {
    let nth = rng.range(0, 4) as usize;
    let operator = rng.range(0, 2) as usize;
    // where nobody restarts, only what heals by itself can be in order at the end
    let heals = mode != "Recover" || rng.permille(300);
    match rng.range(0, 15) {
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
        12 => Act::Unkillable { exit_ms: rng.range(2_000, 30_000) },
        13 => Act::Pause { operator, ms: rng.range(1_000, 40_000) },
        _ => Act::DeleteLease,
    }
}
