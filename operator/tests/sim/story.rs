//! The standard stories: what users and fate do, each a scene of its own whose end does not depend on chance.

use serde_json::{Value, json};

use super::{
    act::Act,
    faults::{Faults, Side},
    world::GPU,
};

pub const NAMESPACE: &str = "serving";
/// What has come to be in order stays so for so many times the time that it may take.
const STAYS: u64 = 10;
/// The annotation by which the operator marks the last serving replica (I3).
pub const LAST_SERVING: &str = "truebeat.io/last-serving";

/// The operator's flags about the whole fleet.
#[derive(Debug, Clone, Copy)]
pub struct FleetTerms {
    /// The share that holds it; 100: none.
    pub hold_percent: usize,
    pub restarts_percent: usize,
    /// So many recoveries at once on one node, and in one failure domain; 0: no limit.
    pub place_max: (usize, usize),
}

impl Default for FleetTerms {
    /// Common causes have stories of their own.
    fn default() -> Self {
        FleetTerms { hold_percent: 100, restarts_percent: 10, place_max: (2, 0) }
    }
}

impl FleetTerms {
    pub fn held_at(hold_percent: usize) -> Self {
        FleetTerms { hold_percent, ..FleetTerms::default() }
    }
}

/// A whole run.
#[derive(Debug, Clone)]
pub struct Story {
    /// When, and what.
    pub acts: Vec<(u64, Act)>,
    pub faults: Faults,
    /// The one namespace that the operators look after; `None`: all of them.
    pub scope: Option<&'static str>,
    pub fleet: FleetTerms,
    /// From the last act or fault until everything must be in order (P4).
    pub settle_ms: u64,
    /// How long it must stay so without a write (P4, P7).
    pub stay_ms: u64,
    /// Acts wait for what they are meant for.
    pub patient: bool,
    /// How long what lost its owner stays at least.
    pub garbage_ms: u64,
}

impl Story {
    /// The same, whose end is held for ten times the bound (P4).
    pub fn for_long(self) -> Self {
        Story { stay_ms: STAYS * self.settle_ms, ..self }
    }
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

/// As many replicas as there are GPUs at most.
pub fn gpus(replicas: u64) -> Value {
    let mut spec = spec(replicas, "Recover");
    spec["engine"]["resources"] = json!({"limits": {GPU: "1"}});
    spec
}

pub fn create(replicas: u64) -> (u64, Act) {
    (0, Act::Create { name: "chat", spec: spec(replicas, "Recover") })
}

pub fn freeze(at_ms: u64, nth: usize) -> (u64, Act) {
    (at_ms, Act::Freeze { nth, heals_ms: None })
}

/// A change of the spec of `chat` by its user.
pub fn edit(at_ms: u64, patch: Value) -> (u64, Act) {
    (at_ms, Act::Edit { name: "chat", patch: json!({"spec": patch}) })
}

/// Replicas that all freeze, and agents that soon help themselves if nobody answers.
fn impatient(replicas: u64) -> Vec<(u64, Act)> {
    let mut spec = spec(replicas, "Recover");
    spec["recovery"]["unattendedAfter"] = json!("10s");
    let stalls = (0..replicas as usize).map(|nth| freeze(20_000, nth));
    std::iter::once((0, Act::Create { name: "chat", spec })).chain(stalls).collect()
}

/// The acts of a standard story.
pub fn acts(name: &str) -> Option<Vec<(u64, Act)>> {
    standard().into_iter().find(|(story, _)| *story == name).map(|(_, acts)| acts)
}

/// Does the end of this story depend on when an operator looks?
pub fn by_the_clock(name: &str) -> bool {
    matches!(name, "sick-node" | "common-cause-proceed" | "gpu-replaced" | "replaced-in-stall" | "nodes-drained")
}

type Scene = (&'static str, Vec<(u64, Act)>);

/// The stories whose every write is a crash point (P1). Their ends do not depend on chance.
pub fn standard() -> Vec<Scene> {
    [changes(), stalls(), recoveries(), super::changes::stories()].concat()
}

/// What users and bystanders do.
fn changes() -> Vec<Scene> {
    let cost = json!({"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "42"}}});
    let theirs = Act::PatchPods { patch: cost };
    let image = |image: &str, drain: u64| json!({"engine": {"image": image}, "drainSeconds": drain});
    let replicas = |replicas: u64| json!({"replicas": replicas});
    vec![
        ("create", vec![create(2)]),
        ("scale", vec![create(1), edit(20_000, replicas(4)), edit(60_000, replicas(2))]),
        ("rollout", vec![create(2), edit(20_000, json!({"engine": {"image": "engine:2"}}))]),
        ("rollback", vec![create(2), edit(20_000, image("engine:2", 60)), edit(50_000, image("engine:1", 30))]),
        (
            "meddle",
            vec![create(2), (19_000, theirs), (20_000, Act::Meddle), (30_000, Act::DeleteChild { plural: "services" })],
        ),
        // the frozen one goes first, although it still counts as ready
        (
            "scale-in-stall",
            vec![
                (0, Act::Create { name: "chat", spec: spec(3, "Observe") }),
                (45_000, Act::Freeze { nth: 1, heals_ms: Some(60_000) }),
                edit(55_000, replicas(2)),
            ],
        ),
    ]
}

/// Engines that freeze or die, and what may come in between.
fn stalls() -> Vec<Scene> {
    let wiped = Act::PatchPods { patch: json!({"status": {"conditions": []}}) };
    let clears = Act::Freeze { nth: 0, heals_ms: Some(2_000) };
    let other = (0, Act::Create { name: "other", spec: spec(2, "Recover") });
    vec![
        ("freeze-one", vec![create(2), freeze(20_000, 0)]),
        ("freeze-all", vec![create(3), freeze(20_000, 0), freeze(20_000, 1), freeze(20_000, 2)]),
        ("clears-by-itself", vec![create(2), (20_000, clears)]),
        ("crash", vec![create(2), (20_000, Act::Crash { nth: 1 })]),
        ("delete-in-stall", vec![create(2), freeze(20_000, 0), (24_500, Act::Delete { name: "chat" })]),
        ("replaced-in-stall", vec![create(2), freeze(20_000, 0), (24_000, Act::DeletePod { nth: 0 })]),
        ("two-deployments", vec![create(2), other, freeze(45_000, 0), freeze(45_000, 1), freeze(45_000, 2)]),
        // whoever wipes all conditions of a pod (a merge patch does) leaves nothing to read for a while
        (
            "conditions-wiped",
            vec![create(3), freeze(20_000, 0), freeze(20_000, 1), (25_250, wiped.clone()), (26_250, wiped)],
        ),
        ("waits-in-the-queue", impatient(3)),
    ]
}

/// What a restart does not cure, and what no restart should be tried on.
fn recoveries() -> Vec<Scene> {
    let with = |mut spec: Value, field: &str, value: u64| {
        spec["recovery"][field] = json!(value);
        (0, Act::Create { name: "chat", spec })
    };
    let storm = (0..4).map(|nth| (45_000, Act::Freeze { nth, heals_ms: Some(40_000) })).collect::<Vec<_>>();
    let sick = |at_ms, sick| (at_ms, Act::Sick { node: 0, sick });
    let gpus = vec![
        with(gpus(4), "restartsBeforeReplace", 1),
        (20_000, Act::Unkillable { exit_ms: 20_000 }),
        freeze(20_000, 0),
        freeze(80_000, 0),
        freeze(80_000, 1),
    ];
    vec![
        ("sick-node", vec![create(2), sick(20_000, true), sick(110_000, false)]),
        ("gpu-replaced", gpus),
        ("leaves-slowly", leaves_slowly()),
        ("nodes-drained", nodes_drained()),
        ("common-cause", [vec![with(spec(4, "Recover"), "holdPercent", 60)], storm.clone()].concat()),
        ("common-cause-proceed", [vec![create(4)], storm].concat()),
        ("held-and-tried", super::held::all_stall()),
    ]
}

/// A replaced pod that is long in leaving. Nothing is avoided and one node is free, so that its successor is up elsewhere meanwhile, and
/// would be on the same GPU if the pod's object were gone before its process; the next one that stalls waits for its slot.
fn leaves_slowly() -> Vec<(u64, Act)> {
    let mut spec = gpus(3);
    spec["recovery"]["restartsBeforeReplace"] = json!(1);
    spec["recovery"]["avoidFor"] = json!("0s");
    vec![
        (0, Act::Create { name: "chat", spec }),
        freeze(20_000, 0),
        // late enough that the restart is over, even where another operator has to begin it
        (78_000, Act::Unkillable { exit_ms: 40_000 }),
        freeze(80_000, 0),
        freeze(81_000, 1),
        // the second dies at once when it may: whether one that takes long is replaced as well would hang on a moment's delay
        (100_000, Act::Unkillable { exit_ms: 1_500 }),
    ]
}

/// One replica is fenced, so that the budget lets nobody go; the node of that one is drained as well, and it goes at once, in the middle
/// of its restart. The others go one after another, each when the one before is up elsewhere.
fn nodes_drained() -> Vec<(u64, Act)> {
    let drain = |at_ms, node| (at_ms, Act::Drain { node, ms: 50_000 });
    vec![create(3), freeze(20_000, 2), drain(22_000, 0), drain(22_250, 1), drain(24_500, 2)]
}

/// What must be so in mid-story where no operator dies.
pub fn expectations(name: &str) -> Vec<(u64, Act)> {
    match name {
        "freeze-one" => vec![
            (23_250, Act::Expect { condition: "EnginesProgressing", status: Some("False") }),
            (23_250, Act::Expect { condition: "HealthLies", status: Some("True") }),
        ],
        // the Service is deleted with whatever stood on it
        "meddle" => {
            let kept = |at_ms, plural| (at_ms, Act::ExpectKept { plural, patch: super::strangers::note() });
            vec![kept(29_000, "services"), kept(29_000, "deployments"), kept(60_000, "deployments")]
        }
        "scale-in-stall" => vec![(65_000, Act::ExpectServing { count: 2 })],
        "nodes-drained" => {
            let free = (0..3).map(|node| (70_000, Act::ExpectFree { node }));
            free.chain([(70_000, Act::ExpectServing { count: 3 })]).collect()
        }
        other => super::changes::expectations(other),
    }
}

/// What the log of a standard story must and must not hold, where the end alone does not tell, and what it says of whom.
pub fn words(name: &str) -> &'static [(&'static str, &'static str, bool)] {
    const DELETE: &str = "DELETE /api/v1/namespaces/serving/pods/";
    const GRANT: &str = "truebeat.io/restart-grant";
    match name {
        "freeze-one" => &[("P11", GRANT, true), ("P11", DELETE, false), ("P15", "RestartsHeld", false)],
        "gpu-replaced" | "leaves-slowly" => &[("P11", GRANT, true), ("P11", DELETE, true)],
        "nodes-drained" => &[("P4", "-0003 201", true), ("P4", "-0001 429", true), ("P4", "-0002 429", true)],
        "sick-node" => &[("P11", GRANT, true), ("P11", DELETE, true), ("P11", "NodeSuspect", true)],
        "common-cause" => &[("P15", GRANT, false), ("P15", "RestartsHeld", true)],
        "held-and-tried" => &[("I2", "RestartsHeld", true), ("I2", "TrialHelped", true), ("I2", "TrialFailed", false)],
        "common-cause-proceed" => &[("P11", GRANT, true), ("P11", "RestartsHeld", false)],
        "waits-in-the-queue" => &[("I1", "grants itself", false)],
        other => super::changes::words(other),
    }
}

pub fn plain(acts: Vec<(u64, Act)>, crashes: Vec<(u64, Side)>) -> Story {
    let faults = Faults { crashes, ..Faults::none(7) };
    Story {
        acts,
        faults,
        scope: None,
        fleet: FleetTerms::default(),
        settle_ms: 200_000,
        stay_ms: 20_000,
        patient: false,
        garbage_ms: 0,
    }
}
