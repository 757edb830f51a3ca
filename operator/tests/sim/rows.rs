//! The rows of the catalogue of faults (RELIABILITY §3: A1–A21, B1–B10, F1–F6, H1–H11) that fall to the simulator, each a
//! scene under its own name with what is expected of it beyond the properties that every run is held to. B1 and B2 are
//! `crashes` and `pairs`.

use serde_json::json;

use super::{
    act::Act,
    broken,
    changes::{self, BAD_IMAGE},
    clocks, doubts,
    faults::{Fate, Faults, Outage, Rates, Rule},
    fleet, gone, held, leaving, rare, refused,
    report::Report,
    run::run,
    said::Log,
    story::{Story, create, edit, freeze, plain, spec},
    strangers, stuck, untrue,
};

/// One row.
pub struct Row {
    pub name: &'static str,
    story: fn() -> Story,
    expect: fn(&Log<'_>) -> Vec<Option<String>>,
    /// What is violated where the world is not in order in the end.
    property: Option<&'static str>,
}

impl Row {
    pub fn run(&self, keep_lines: bool) -> Report {
        let mut report = run(&(self.story)().for_long(), true);
        let faults: Vec<String> = (self.expect)(&Log::of(&report)).into_iter().flatten().collect();
        let name = self.name.split('-').next().unwrap_or_default().to_uppercase();
        report.violations.extend(faults.into_iter().map(|what| format!("{name}: {what}")));
        if let Some(property) = self.property {
            let named = |what: &String| what.replace("P4:", property).replace("P13:", property);
            report.violations = report.violations.iter().map(named).collect();
        }
        if !keep_lines {
            report.lines.clear();
        }
        report
    }
}

const OURS: &[&str] = &[
    "inferencedeployments",
    "engineincidents",
    "pods",
    "services",
    "deployments",
    "roles",
    "rolebindings",
    "serviceaccounts",
    "events",
];
pub const CRDS: &[&str] = &["inferencedeployments", "engineincidents"];
pub const CHANGES: &[&str] = &["patch", "replace", "create", "delete"];
const HOUR: u64 = 3_600_000;

/// All of them.
pub fn all() -> Vec<Row> {
    let of = |property, row: Row| Row { property: Some(property), ..row };
    let mut rows = vec![
        row("a1-api-gone-5s", || gone(5_000), |log| vec![log.granted_by(60_000), log.no_burst(25_000)]),
        row("a1-api-gone-5min", || gone(300_000), |log| vec![log.no_burst(320_000)]),
        row("a1-api-gone-5h", || gone(5 * HOUR), |log| vec![log.no_burst(20_000 + 5 * HOUR)]),
        of("A2:", row("a2-watch-black-holed", black_holed, |log| vec![log.granted_by(60_000)])),
        row("a3-one-watch-flaps", one_flaps, |log| vec![log.granted_by(30_000)]),
        row("a4-gone-and-expired-pages", gone_versions, |log| vec![log.granted_by(60_000), log.no_delete()]),
        row("a5-conflict-storm", || overtaken(500), |log| vec![log.granted_by(60_000), log.no_hot_loop()]),
        row("a5-conflict-always", || overtaken(1000), |log| vec![log.no_hot_loop()]),
        row("a6-retry-after", busy, |log| vec![log.granted_by(65_000)]),
        row("a8-timeout-after-effect", doubts::unheard, |log| vec![log.granted_by(60_000), log.incidents(1)]),
        row("a8-timeout-after-a-grant", doubts::unheard_grant, |log| vec![log.granted_by(50_000)]),
        row("a9-slow-answers", doubts::slow, |log| vec![log.one_writer()]),
        of("P2:", row("a10-old-views", old_views, |log| vec![log.granted_by(60_000)])),
        row("a11-opaque-versions", untrue::opaque, |log| vec![log.granted_by(30_000)]),
        of("P3:", row("a12-doubled-and-lost-events", doubled, |_| Vec::new())),
        of("P3:", row("a12-nobody-heard-of-it", unheard_of, |_| Vec::new())),
        row("a13-foreign-webhook-down", webhook, |log| vec![log.granted_by(40_000), log.no_hot_loop()]),
        row("a13-record-refused", || doubts::record_refused(75_000), |log| vec![log.incidents(1), log.no_hot_loop()]),
        row(
            "a13-record-refused-for-long",
            || doubts::record_refused(200_000),
            |log| vec![log.changes("/deployments/chat", (52_000, 110_000)), log.no_hot_loop()],
        ),
        row("a13-record-refused-of-a-replaced", doubts::record_refused_of_a_replaced, |log| {
            vec![log.incidents(2), log.changes("DELETE /api/v1/namespaces/serving/pods/", (80_000, 130_000))]
        }),
        row("a13-mark-refused", doubts::mark_refused, |log| {
            vec![log.changes("DELETE /api/v1/namespaces/serving/pods/", (110_000, 150_000)), log.no_hot_loop()]
        }),
        row("a14-right-revoked", revoked, |log| vec![log.no_hot_loop(), log.incidents(1)]),
        row("a15-crd-gone", crd_gone, |log| {
            vec![log.no_delete(), log.quiet((16_000, 61_000)), log.no_grant_before(61_000), log.granted_by(80_000)]
        }),
        row("a16-owner-corrupted", untrue::corrupted, untrue::named_until_mended),
        row("a16-label-corrupted", untrue::mislabelled, untrue::unknown_until_mended),
        row("a17-huge-objects", huge, |log| vec![log.granted_by(40_000), log.no_hot_loop()]),
        row("a17-annotations-full", doubts::annotations_full, doubts::told_once_there_is_room),
        row("a18-quota", untrue::quota, untrue::restarted_where_it_is),
        row("a19-namespace-terminating", terminating, |log| vec![log.no_hot_loop()]),
        row("a20-token-rotated", token, |log| vec![log.granted_by(90_000)]),
        row("a21-etcd-restored", untrue::restored_in_a_restart, |log| {
            vec![log.no_delete(), log.quiet((27_000, 85_000))]
        }),
        row("a21-etcd-restored-in-a-stall", untrue::restored_in_a_stall, |log| {
            let grant = log.changes("truebeat.io/restart-grant", (303_000, 320_000));
            vec![log.no_delete(), log.quiet((112_500, 170_000)), grant]
        }),
        row("a21-etcd-restored-unseen", untrue::restored_unseen, |log| {
            let grant = log.changes("truebeat.io/restart-grant", (603_000, 620_000));
            vec![log.no_delete(), log.quiet((432_000, 506_000)), grant]
        }),
        row("b2-record-before-rollback", doubts::dies_of_a_rollback, |log| {
            vec![log.incidents(1), log.says_at_most(1, "/deployments/chat", BAD_IMAGE)]
        }),
        row("b3-frozen-leader", || frozen(Act::Pause { operator: 0, ms: 40_000 }), |log| vec![log.granted_by(60_000)]),
        row("b4-lease-deleted", || frozen(Act::DeleteLease), |log| vec![log.granted_by(60_000)]),
        row("b4-lease-deleted-when-followed", deleted_when_followed, |log| vec![log.granted_by(90_000)]),
        row("b4-lease-deleted-unseen", deleted_unseen, |log| vec![log.granted_by(60_000)]),
        row("b6-panic-in-a-pass", panics, |log| vec![log.granted_by(40_000)]),
        row("b8-newer-object", changes::newer_object, |log| vec![log.granted_by(30_000)]),
        of("P5:", row("b8-older-children", changes::older_children, |_| Vec::new())),
        row("b10-sigterm-in-recovery", terminated, |log| {
            vec![log.ends_within(23_500, 1_000), log.succeeded_by(26_500)]
        }),
        row("i1-went-on-before-its-replacement", doubts::went_on, |log| {
            let granted = log.changes("\"action\":\"Replace\"", (83_000, 87_000));
            let refused = log.times(&["DELETE /api/v1/namespaces/serving/pods/", " 409 "]);
            vec![granted, refused.is_empty().then(|| "nobody tried to delete it".to_owned())]
        }),
        row("i2-restart-that-never-comes-back", broken::ends_at_every_start, |log| {
            let replaced = log.changes("DELETE /api/v1/namespaces/serving/pods/", (60_000, 90_000));
            let next = log.changes("truebeat.io/restart-grant", (70_000, 110_000));
            vec![log.granted_by(40_000), replaced, next, log.grants_at_most(2)]
        }),
        row("i2-three-one-after-another", three_in_turn, |log| vec![log.granted_by(40_000), log.has("RestartsHeld")]),
        row("i2-drain-of-one-node", leaving::alone, leaving::one_by_one),
        row("i2-stall-in-a-drain", leaving::stall_elsewhere, leaving::the_stall_first),
        row("i2-stall-on-a-drained-node", leaving::stall_on_it, leaving::the_slot_goes_along),
        row("i5-engine-outlives-its-kill", broken::undead, |log| {
            let replaced = log.changes("DELETE /api/v1/namespaces/serving/pods/", (33_000, 50_000));
            let next = log.changes("truebeat.io/restart-grant", (203_000, 220_000));
            vec![log.granted_by(40_000), log.has("UnkillableEngine"), replaced, next]
        }),
        row("i5-unkillable-where-restarts-were-in-vain", broken::undead_on_a_bad_node, |log| {
            let replaced = log.changes("DELETE /api/v1/namespaces/serving/pods/", (80_000, 100_000));
            vec![replaced, log.changes("UnkillableEngine", (120_000, 180_000))]
        }),
        row("i7-poison-request", poison_request, |log| {
            vec![log.granted_by(40_000), log.grants_at_most(2), log.has("truebeat.io/poison")]
        }),
        row("b7-poison-object", poison, |log| vec![log.granted_by(30_000)]),
        row("f1-xid-needs-a-node", || broken::gpu_fault(false), replaced_at_once),
        row("f1-xid-of-the-dead", || broken::gpu_fault(true), replaced_at_once),
        row("f1-xid-that-a-restart-mends", broken::contained, |log| vec![log.granted_by(40_000), log.no_delete()]),
        row("f3-same-broken-gpu", broken::same_gpu, |_| Vec::new()),
        row("f4-node-not-ready", broken::node_lost, |log| vec![log.no_delete(), log.no_grant_before(u64::MAX)]),
        row("f4-node-dies-in-a-restart", broken::dies_in_a_restart, |log| {
            vec![log.no_delete(), log.changes("truebeat.io/restart-grant", (203_000, 220_000))]
        }),
        row("f5-preempted", preempted, |log| vec![log.no_delete(), log.grants_at_most(0), log.incidents(0)]),
        row("f6-gpu-held", broken::gpu_held, |log| vec![log.no_delete()]),
        row(
            "h4-all-alarm",
            || all_freeze(40, Some(95_000)),
            |log| vec![log.grants_at_most(1), log.has("RestartsHeld")],
        ),
        row("h5-all-wedged", || all_freeze(100, None), |log| vec![log.granted_by(40_000), log.incidents(6)]),
        row("h8-replayed-verdict", replayed, |log| vec![log.no_delete(), log.incidents(1), log.no_grant_after(45_000)]),
        row("s1-one-namespace", one_namespace, |log| vec![log.granted_by(40_000)]),
        row("h6-storm-and-restarts", storm_and_restarts, |log| vec![log.granted_by(60_000)]),
    ];
    let more = [held::rows, broken::rows, stuck::rows, fleet::rows, strangers::rows, clocks::rows, refused::rows];
    rows.extend(more.into_iter().flat_map(|rows| rows()).chain(gone::rows()).chain(rare::rows()));
    rows
}

/// One of them.
pub fn row(name: &'static str, story: fn() -> Story, expect: fn(&Log<'_>) -> Vec<Option<String>>) -> Row {
    Row { name, story, expect, property: None }
}

/// Two replicas, one of which freezes at 20 s, and more.
pub fn scene(more: Vec<(u64, Act)>, rules: Vec<Rule>) -> Story {
    let mut acts = [vec![create(2), freeze(20_000, 0)], more].concat();
    acts.sort_by_key(|(at, _)| *at);
    Story { faults: Faults { rules, ..Faults::none(7) }, ..plain(acts, Vec::new()) }
}

fn by_rate(rates: Rates) -> Story {
    let mut story = scene(Vec::new(), Vec::new());
    (story.faults.rates, story.faults.end_ms, story.settle_ms) = (rates, 100_000, 400_000);
    story
}

pub fn all_kinds(fate: Fate, (from_ms, to_ms): (u64, u64), verbs: &'static [&'static str], chance: u64) -> Rule {
    Rule { from_ms, to_ms, verbs, plurals: OURS, path: "", chance, fate }
}

fn gone(ms: u64) -> Story {
    let mut story = scene(Vec::new(), Vec::new());
    story.faults.outages.push(Outage { from_ms: 20_000, to_ms: 20_000 + ms, black_hole: false });
    (story.settle_ms, story.acts) = (150_000, vec![create(2), freeze(21_000, 0)]);
    story
}

/// What is made when the network is well again is found although the old watches never say another word.
fn black_holed() -> Story {
    let other = (100_000, Act::Create { name: "other", spec: spec(1, "Recover") });
    scene(vec![other], vec![all_kinds(Fate::Silent, (15_000, 80_000), &["watch"], 1000)])
}

fn one_flaps() -> Story {
    let why = (500, "InternalError", "etcd is unhappy");
    scene(Vec::new(), vec![Rule::refuse((10_000, 120_000), &["watch"], &["engineincidents"], why)])
}

fn gone_versions() -> Story {
    let mut story = by_rate(Rates { watch_gone: 700, ..Rates::default() });
    story.acts.insert(0, (0, Act::Pages { size: 2 }));
    story
}

fn overtaken(chance: u64) -> Story {
    scene(Vec::new(), vec![all_kinds(Fate::Overtaken, (10_000, 60_000), CHANGES, chance)])
}

fn busy() -> Story {
    let refusal = super::kube::Refusal::new(429, "TooManyRequests", "busy");
    let rule =
        |retry_after_s, span| all_kinds(Fate::Refused { refusal: refusal.clone(), retry_after_s }, span, CHANGES, 1000);
    scene(Vec::new(), vec![rule(0, (20_000, 30_000)), rule(3600, (30_000, 40_000)), rule(1, (40_000, 50_000))])
}

fn old_views() -> Story {
    let mut story = by_rate(Rates { watch_lag_ms: 5_000, watch_broken: 200, ..Rates::default() });
    story.acts.extend([(22_000, Act::Kill { operator: 0 }), freeze(40_000, 1), (43_000, Act::Kill { operator: 1 })]);
    story
}

fn doubled() -> Story {
    by_rate(Rates { watch_doubled: 700, watch_elided: 900, watch_lag_ms: 1_000, ..Rates::default() })
}

/// It is created, and nobody is told: there is no pass over it that could look again. What is told later takes the watch past it.
fn unheard_of() -> Story {
    let mut story = by_rate(Rates { watch_elided: 1_000, ..Rates::default() });
    story.acts.push((20_000, Act::Create { name: "other", spec: spec(1, "Recover") }));
    story.acts.push(edit(22_000, json!({"replicas": 3})));
    story.faults.end_ms = 21_000;
    story
}

fn webhook() -> Story {
    let why = (500, "InternalError", "failed calling webhook \"policy.example.com\"");
    let rule = Rule::refuse((19_000, 60_000), &["patch"], &["deployments"], why);
    let told = Act::Expect { condition: "Reconciling", status: Some("True") };
    scene(vec![edit(20_000, json!({"replicas": 3})), (59_000, told)], vec![rule])
}

fn revoked() -> Story {
    let why = (403, "Forbidden", "pods is forbidden: the operator cannot patch resource \"pods\"");
    let rule = Rule::refuse((15_000, 80_000), &["patch"], &["pods"], why);
    let told = Act::Expect { condition: "Stalled", status: Some("True") };
    let more = vec![edit(30_000, json!({"replicas": 3})), (60_000, Act::ExpectServing { count: 2 })];
    scene([more, vec![(60_000, told)]].concat(), vec![rule])
}

fn crd_gone() -> Story {
    let why = (404, "NotFound", "the server could not find the requested resource");
    let serving = (60_000, Act::ExpectServing { count: 1 });
    scene(vec![serving], vec![Rule::refuse((15_000, 61_000), &[], CRDS, why)])
}

fn huge() -> Story {
    let note = json!({"metadata": {"annotations": {"example.com/blob": "x".repeat(250_000)}}});
    let chat = Act::Edit { name: "chat", patch: note.clone() };
    scene(vec![(10_000, chat), (10_000, Act::PatchPods { patch: note })], Vec::new())
}

fn terminating() -> Story {
    let why = (403, "Forbidden", "unable to create new content in namespace serving because it is being terminated");
    let rule = Rule::refuse((20_000, 60_000), &["patch", "create"], &["services"], why);
    scene(vec![(20_000, Act::DeleteChild { plural: "services" })], vec![rule])
}

fn token() -> Story {
    let why = (401, "Unauthorized", "Unauthorized");
    scene(Vec::new(), vec![Rule::refuse((20_000, 50_000), &[], &[], why)])
}

fn frozen(act: Act) -> Story {
    scene(vec![(21_000, act.clone()), (24_000, act)], Vec::new())
}

/// The other candidate dies, the Lease is deleted, and its next process finds none, while the leader hears of it late.
fn deleted_unseen() -> Story {
    let slow = Fate::Served { effect_ms: 5, answer_ms: 2_700 };
    let late = Rule { plurals: &["leases"], ..all_kinds(slow, (20_250, 40_000), &["get"], 1000) };
    scene(vec![(20_000, Act::Kill { operator: 1 }), (20_250, Act::DeleteLease)], vec![late])
}

/// Nobody can renew for as long as the Lease lasts; the second candidate takes it, and then it is deleted, while the first one has
/// found it in its own name a moment ago (seed 18249).
fn deleted_when_followed() -> Story {
    let why = (500, "InternalError", "etcdserver: leader changed");
    let rule = Rule::refuse((20_000, 37_250), &["replace"], &["leases"], why);
    scene(vec![(37_750, Act::DeleteLease), freeze(37_750, 1)], vec![rule])
}

fn panics() -> Story {
    let get = Rule { plurals: &["services"], ..all_kinds(Fate::Panic, (15_000, 60_000), &["get"], 1000) };
    let other = (0, Act::Create { name: "other", spec: spec(1, "Recover") });
    scene(vec![other, freeze(25_000, 2)], vec![Rule { path: "/services/chat", ..get }])
}

fn poison() -> Story {
    let mut bad = spec(1, "Recover");
    bad["engine"]["env"] = json!([{"name": "A"}, {"name": "A", "value": "\u{0}\u{fffd}"}]);
    bad["engine"]["resources"] = json!({"requests": {"nvidia.com/gpu": "1e400"}, "limits": {"cpu": ""}});
    bad["recovery"]["stabilityWindow"] = json!("99999999999999999999h");
    let gone = (60_000, Act::Delete { name: "poison" });
    scene(vec![(10_000, Act::Create { name: "poison", spec: bad }), gone], Vec::new())
}

/// A request that freezes whoever answers it goes from replica to replica; the third refuses it, and so does the first one's successor.
fn poison_request() -> Story {
    let poison = |at_ms, nth| (at_ms, Act::Poison { nth, request: super::fields::POISON });
    let mut story = scene(Vec::new(), Vec::new());
    story.acts = vec![create(3), poison(20_000, 0), poison(45_000, 1), poison(80_000, 2), poison(90_000, 0)];
    story.acts.push((110_000, Act::ExpectServing { count: 3 }));
    story
}

/// The leader is asked to end while it recovers a replica.
fn terminated() -> Story {
    scene(vec![(23_500, Act::Terminate { operator: 0 })], Vec::new())
}

/// What an agent said in the middle of a stall is said once more when that is long over, and one more restart would replace the pod.
fn replayed() -> Story {
    let mut hasty = spec(2, "Recover");
    hasty["recovery"]["restartsBeforeReplace"] = json!(1);
    let mut story = scene(Vec::new(), Vec::new());
    story.acts = vec![(0, Act::Create { name: "chat", spec: hasty }), freeze(20_000, 0)];
    story.acts.extend([(23_500, Act::Overhear), (45_000, Act::Replay)]);
    story
}

fn preempted() -> Story {
    let mut story = scene(Vec::new(), Vec::new());
    story.acts = vec![create(2), (20_000, Act::DeletePod { nth: 0 }), (40_000, Act::ExpectServing { count: 2 })];
    story
}

/// No key is handed out, the pod goes, and whoever looks after nodes is told what this one needs.
fn replaced_at_once(log: &Log<'_>) -> Vec<Option<String>> {
    let deleted = log.has("DELETE /api/v1/namespaces/serving/pods/");
    vec![log.no_grant_before(u64::MAX), deleted, log.has("NodeNeedsRestart"), log.has("Xid 79 of GPU-1")]
}

fn all_freeze(hold_percent: u64, until_ms: Option<u64>) -> Story {
    let mut six = spec(6, "Recover");
    six["recovery"]["holdPercent"] = json!(hold_percent);
    let mut story = scene(Vec::new(), Vec::new());
    story.acts = vec![(0, Act::Create { name: "chat", spec: six })];
    let stalls = (0..6).map(|nth| {
        let at_ms = 30_000 + 1_500 * nth as u64;
        (at_ms, Act::Freeze { nth, heals_ms: until_ms.map(|until| until - at_ms) })
    });
    story.acts.extend(stalls);
    story.settle_ms = 200_000;
    story
}

/// Three of three freeze, each a little after the one before, which has its grant by then.
fn three_in_turn() -> Story {
    let mut three = spec(3, "Recover");
    three["recovery"]["holdPercent"] = json!(60);
    let stalls = [freeze(30_000, 0), freeze(31_500, 1), freeze(33_000, 2)];
    plain([vec![(0, Act::Create { name: "chat", spec: three })], stalls.to_vec()].concat(), Vec::new())
}

/// Operators of one namespace live through a sick node without a look at any node.
fn one_namespace() -> Story {
    let acts = super::story::acts("sick-node").expect("a standard story");
    Story { scope: Some(super::story::NAMESPACE), ..plain(acts, Vec::new()) }
}

fn storm_and_restarts() -> Story {
    let mut story = all_freeze(100, None);
    story.acts.extend((0..12).map(|n| (30_000 + 10_000 * n, Act::Kill { operator: (n % 2) as usize })));
    story.acts.sort_by_key(|(at, _)| *at);
    story
}
