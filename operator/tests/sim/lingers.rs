//! Scenes for the rows about what neither serves nor goes: processes that outlive their kill or their pod, and nodes that are not heard.

use super::{
    act::Act,
    rows::scene,
    story::{Story, create, freeze, gpus, plain},
};

pub fn node_lost() -> Story {
    let lost = |at_ms, lost| (at_ms, Act::NodeLost { node: 0, lost });
    let mut story = scene(Vec::new(), Vec::new());
    story.acts = vec![create(2), lost(20_000, true), (60_000, Act::ExpectServing { count: 2 }), lost(60_250, false)];
    story
}

pub fn gpu_held() -> Story {
    let mut story = scene(Vec::new(), Vec::new());
    story.acts = vec![(0, Act::Create { name: "chat", spec: gpus(4) })];
    story.acts.extend([(20_000, Act::Unkillable { exit_ms: 30_000 }), (20_250, Act::DeletePod { nth: 0 })]);
    // the old one among them, and no successor
    story.acts.push((45_000, Act::ExpectServing { count: 4 }));
    story
}

/// An engine that freezes and outlives its kill by far.
pub fn undead() -> Story {
    let spec = gpus(3);
    let acts = vec![
        (0, Act::Create { name: "chat", spec }),
        (20_000, Act::Unkillable { exit_ms: 60_000 }),
        freeze(20_000, 0),
        (45_000, Act::Unkillable { exit_ms: 1_500 }),
    ];
    plain(acts, Vec::new())
}
