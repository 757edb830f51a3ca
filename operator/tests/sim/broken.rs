//! Scenes for the rows about GPUs and nodes that are broken, not heard, or held by a process that does not end.

use serde_json::json;

use super::{
    act::Act,
    faults::Rule,
    rows::{Row, row, scene},
    story::{Story, acts, create, freeze, gpus, plain, spec},
};

/// What the driver says of a GPU (F1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    pub code: i32,
    pub remedy: &'static str,
}

impl Fault {
    /// Is the GPU useless for whoever is started on it?
    pub fn lasts(self) -> bool {
        self.remedy != "RestartApplication"
    }
}

/// Those with an expectation at moments of their own.
pub fn rows() -> Vec<Row> {
    vec![
        row("f1-node-that-was-rebooted", rebooted, |log| vec![log.has("NodeNeedsRestart"), log.grants_at_most(1)]),
        row("a14-fleet-that-cannot-be-listed", unlisted, |log| {
            let helped = log.times(&["grants itself"]).first().map(|at| format!("an agent helps itself at {at} ms"));
            let recorded = log.changes("/engineincidents/", (60_000, 120_000));
            vec![helped, recorded, log.no_grant_before(620_000), log.granted_by(700_000)]
        }),
        row("f6-no-place-but-the-one-it-left", left_first, |log| {
            vec![log.has("UnkillableEngine"), log.changes("AvoidanceLifted", (60_000, 120_000))]
        }),
    ]
}

/// A right to list is gone when a replica stalls, and nobody knows what the fleet has granted. Its agent hears that it waits, and does not help
/// itself: it would be one restart more than the fleet bears.
fn unlisted() -> Story {
    let mut story = plain(vec![create(2), freeze(60_000, 0)], Vec::new());
    let why = (403, "Forbidden", "inferencedeployments is forbidden: User cannot list resource at the cluster scope");
    story.faults.rules.push(Rule::refuse((20_000, 620_000), &["list"], &["inferencedeployments"], why));
    story
}

/// A frozen engine's pod is deleted before anybody knows that the engine outlives its kill, and every other GPU is taken.
fn left_first() -> Story {
    let mut acts = vec![(0, Act::Create { name: "chat", spec: gpus(4) })];
    acts.extend([
        (20_000, Act::Unkillable { exit_ms: 30_000 }),
        freeze(20_000, 0),
        (30_000, Act::DeletePod { nth: 0 }),
    ]);
    acts.push((150_000, Act::ExpectServing { count: 4 }));
    plain(acts, Vec::new())
}

/// A GPU falls off the bus, and whoever looks after nodes restarts this one, as its condition asks: once.
fn rebooted() -> Story {
    let fault = Fault { code: 79, remedy: "RestartNode" };
    let marked = |at_ms, marked| (at_ms, Act::ExpectMarked { node: 0, marked });
    let acts = vec![
        (20_000, Act::GpuFault { node: 0, fault, dies: false }),
        marked(100_000, true),
        (120_000, Act::Reboot { node: 0 }),
        marked(160_000, false),
        marked(400_000, false),
    ];
    plain([vec![create(2)], acts].concat(), Vec::new())
}

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

/// An engine freezes and outlives its kill by far: its pod goes nowhere, its successor is elsewhere, and the next one that freezes is not
/// kept waiting for it.
pub fn undead() -> Story {
    let acts = vec![
        (0, Act::Create { name: "chat", spec: gpus(3) }),
        (20_000, Act::Unkillable { exit_ms: 300_000 }),
        freeze(20_000, 0),
        (60_000, Act::Unkillable { exit_ms: 1_500 }),
        (60_000, Act::ExpectServing { count: 3 }),
        freeze(200_000, 1),
    ];
    plain(acts, Vec::new())
}

/// Restarts were in vain on a node, and then the engine of another pod there outlives its kill: the node is known for that from then on.
pub fn undead_on_a_bad_node() -> Story {
    let mut spec = spec(5, "Recover");
    spec["recovery"]["restartsBeforeReplace"] = json!(1);
    let acts = vec![
        (0, Act::Create { name: "chat", spec }),
        freeze(20_000, 0),
        freeze(80_000, 0),
        // of those that are left only the fourth stands on the first one's node
        (120_000, Act::Unkillable { exit_ms: 60_000 }),
        freeze(120_000, 3),
        (160_000, Act::Unkillable { exit_ms: 1_500 }),
        (230_000, Act::ExpectFree { node: 0 }),
    ];
    plain(acts, Vec::new())
}

/// A node is lost in the middle of a granted restart, and its pod is evicted and does not end before the node is heard again.
pub fn dies_in_a_restart() -> Story {
    let lost = |at_ms, lost| (at_ms, Act::NodeLost { node: 0, lost });
    let acts = vec![
        (0, Act::Create { name: "chat", spec: gpus(3) }),
        freeze(20_000, 0),
        lost(24_500, true),
        (60_000, Act::DeletePod { nth: 0 }),
        freeze(200_000, 1),
        lost(230_000, false),
    ];
    plain(acts, Vec::new())
}

/// A GPU falls off the bus under an engine: nothing that is started there serves again.
pub fn gpu_fault(dies: bool) -> Story {
    let fault = Fault { code: 79, remedy: "RestartNode" };
    let gone = [(60_000, Act::ExpectFree { node: 0 }), (60_000, Act::ExpectServing { count: 2 })];
    plain([vec![create(2), (20_000, Act::GpuFault { node: 0, fault, dies })], gone.to_vec()].concat(), Vec::new())
}

/// An engine freezes, and ends at every start after its kill, and nobody says why; another one freezes meanwhile.
pub fn ends_at_every_start() -> Story {
    let fault = Fault { code: 31, remedy: "Unknown" };
    let fails = Act::GpuFault { node: 0, fault, dies: false };
    let well = [(150_000, Act::ExpectFree { node: 0 }), (150_000, Act::ExpectServing { count: 3 })];
    plain([vec![create(3), (20_000, fails), freeze(30_000, 1)], well.to_vec()].concat(), Vec::new())
}

/// A memory error that was contained: the engine that it hit must be started anew, and that is all.
pub fn contained() -> Story {
    let fault = Fault { code: 94, remedy: "RestartApplication" };
    plain(vec![create(2), (20_000, Act::GpuFault { node: 0, fault, dies: false })], Vec::new())
}

/// Engines on one node freeze again and again; once restarts have not cured one its successor is elsewhere.
pub fn same_gpu() -> Story {
    let mut acts = acts("sick-node").expect("a standard story");
    acts.push((105_000, Act::ExpectFree { node: 0 }));
    acts.sort_by_key(|(at, _)| *at);
    plain(acts, Vec::new())
}
