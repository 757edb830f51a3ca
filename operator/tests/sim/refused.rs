//! What the API server does not let in, or takes its time over: somebody's webhook that is slow (A13), a right to read that is gone (A14), what is
//! too large (A17), a quota that no successor fits into (A18).

use serde_json::{Value, json};

use super::{
    act::Act,
    faults::{Fate, Rule},
    kube::{kinds, object::Object, store::Store},
    rows::{Row, all_kinds, row},
    said::Log,
    story::{Story, create, edit, freeze, plain, spec},
};

const DEPLOYMENT: &str = "deployments/chat waits for a webhook";
const DELETE: &str = "DELETE /api/v1/namespaces/serving/pods/";
/// What etcd takes of one object.
const OBJECT_MAX: usize = 1_500_000;
const SLOW: (u64, u64) = (19_000, 120_000);

pub fn rows() -> Vec<Row> {
    vec![
        row("a13-foreign-webhook-slow", webhook_slow, held_up_alone),
        row("a14-child-that-may-not-be-read", child_unread, |log| {
            let told = log.changes("cannot get resource \\\"rolebindings\\\"", (15_000, 60_000));
            vec![told, log.granted_by(40_000), log.no_hot_loop(), log.no_delete()]
        }),
        row("a14-deployment-that-may-not-be-read", deployment_unread, |log| {
            let rolled = log.changes("PATCH /apis/apps/v1/namespaces/serving/deployments/chat", (100_000, 125_000));
            vec![rolled, log.granted_by(40_000), log.no_hot_loop(), log.no_delete()]
        }),
        row("a14-history-that-may-not-be-read", history_unread, |log| {
            vec![log.has("cannot list resource"), log.granted_by(120_000), log.no_hot_loop(), log.no_delete()]
        }),
        row("a14-pods-that-may-not-be-listed", pods_unread, |log| {
            let told = log.changes("cannot list resource \\\"pods\\\"", (15_000, 40_000));
            vec![told, log.granted_between((60_000, 90_000)), log.no_hot_loop()]
        }),
        row("a17-ten-thousand-conditions", crowded, |log| {
            vec![log.granted_by(40_000), log.no_write_above(16_000), log.no_hot_loop(), log.no_delete()]
        }),
        row("a17-object-full", full, |log| {
            let told = log.changes("request is too large", (22_000, 60_000));
            vec![log.granted_between((70_000, 100_000)), told, log.no_hot_loop(), log.no_delete()]
        }),
        row("a17-overlay-too-large", overlaid, |log| {
            let told = log.changes("bytes are too many", (20_000, 25_000));
            vec![told, log.granted_by(45_000), log.no_hot_loop(), log.no_delete()]
        }),
        row("a18-quota-after-the-grant", refused_after_the_grant, |log| {
            let granted = log.changes("\"action\":\"Replace\"", (80_000, 90_000));
            let instead = log.changes("truebeat.io/restart-grant", (87_000, 120_000));
            vec![log.no_delete(), granted, instead, log.has("PodsRefused")]
        }),
        row("i2-replacement-that-nobody-lets-be-made", undeletable, others_go_on),
        row("a18-quota-below-its-use", lowered_quota, |log| {
            let deleted = log.times(&[DELETE, " 200 "]);
            let one = (deleted.len() != 1).then(|| format!("pods were deleted at {deleted:?} ms"));
            let instead = log.changes("truebeat.io/restart-grant", (150_000, 200_000));
            vec![one, instead, log.changes("PodsRefused", (80_000, 120_000))]
        }),
    ]
}

/// Somebody's webhook takes 29 s over each change of one Deployment. A replica of that one stalls, and one of its neighbour, whose number
/// is changed as well.
fn webhook_slow() -> Story {
    let slow = all_kinds(Fate::Held { ms: 29_000 }, SLOW, &["patch"], 1000);
    let of_chat = Rule { plurals: &["deployments"], path: "/deployments/chat", ..slow };
    let told = |at_ms| (at_ms, Act::Expect { condition: "Reconciling", status: Some("True") });
    // pods in the order of their names: two of chat, two of other
    let acts = vec![
        create(2),
        (0, Act::Create { name: "other", spec: spec(2, "Recover") }),
        edit(20_000, json!({"replicas": 3})),
        (25_000, Act::Edit { name: "other", patch: json!({"spec": {"replicas": 3}}) }),
        told(40_000),
        freeze(45_000, 2),
        (46_000, Act::ExpectServing { count: 4 }),
        freeze(75_000, 0),
        told(115_000),
    ];
    let mut story = plain(acts, Vec::new());
    story.faults.rules.push(of_chat);
    story
}

/// Each try costs one deadline, of the one whose webhook is slow; it is tried again and again, ever later; nobody else waits, nor does
/// what is more urgent than the change that is held up.
fn held_up_alone(log: &Log<'_>) -> Vec<Option<String>> {
    let tries = log.times(&[DEPLOYMENT]);
    let pauses: Vec<u64> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let hurried = pauses.iter().skip(5).find(|pause| **pause < 4_000 + 2_000);
    vec![
        (!(6..=20).contains(&tries.len())).then(|| format!("tried {} times", tries.len())),
        hurried.map(|pause| format!("tried again after {pause} ms: {pauses:?}")),
        log.has("no answer within 4 s"),
        log.changes("/deployments/other", (25_000, 28_000)),
        log.changes("truebeat.io/restart-grant", (45_000, 52_000)),
        log.changes("truebeat.io/restart-grant", (75_000, 90_000)),
        log.no_hot_loop(),
    ]
}

/// Agents, or whoever may write there, leave 10,000 conditions on each pod and on the InferenceDeployment, as many bytes as etcd takes.
fn crowded() -> Story {
    let acts = vec![create(2), (10_000, Act::Crowd { conditions: 10_000 }), freeze(20_000, 0)];
    plain(acts, Vec::new())
}

/// Adds so many conditions of somebody else to all pods and InferenceDeployments.
pub fn crowd(store: &mut Store, conditions: usize) {
    let filler = "x".repeat(OBJECT_MAX / conditions - 130);
    let crowd: Vec<Value> = (0..conditions)
        .map(|n| {
            let type_ = format!("example.com/{n:05}");
            json!({
                "type": type_, "status": "True", "reason": "Crowd", "message": filler,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            })
        })
        .collect();
    for plural in ["pods", "inferencedeployments"] {
        let found: Vec<_> = store.of(plural).map(|(key, entry)| (key.clone(), entry.clone())).collect();
        for (key, entry) in found {
            let mut crowded = entry.value.json();
            let own = crowded["status"]["conditions"].as_array().cloned().unwrap_or_default();
            crowded["status"]["conditions"] = [own, crowd.clone()].concat().into();
            store.put(kinds::of(plural), key, Object::from(crowded), entry.managers);
        }
    }
}

/// Somebody lays more over the pods than could stand in each of them: what runs goes on, and is recovered.
fn overlaid() -> Story {
    let much = json!({"podOverlay": {"spec": {"nodeSelector": {"example.com/blob": "x".repeat(600_000)}}}});
    let told = Act::Expect { condition: "Stalled", status: Some("True") };
    let well = [(60_000, Act::ExpectServing { count: 2 }), edit(61_000, json!({"podOverlay": null}))];
    let acts = vec![create(2), edit(20_000, much), (30_000, told), freeze(35_000, 0)];
    plain([acts, well.to_vec()].concat(), Vec::new())
}

/// A pod that is as large as may be takes no further word.
fn full() -> Story {
    let why = (500, "InternalError", "etcdserver: request is too large");
    let mut story = plain(vec![create(2), freeze(20_000, 0)], Vec::new());
    story.faults.rules.push(Rule::refuse((15_000, 70_000), &["patch"], &["pods"], why));
    story
}

/// Somebody's policy lets no pod of theirs be deleted. One is to be replaced, and does not help itself; another stalls meanwhile.
fn undeletable() -> Story {
    let mut spec = spec(2, "Recover");
    spec["recovery"]["restartsBeforeReplace"] = json!(1);
    spec["recovery"]["unattendedAfter"] = json!("1h");
    let stalls =
        vec![freeze(20_000, 0), freeze(80_000, 0), freeze(100_000, 1), (960_000, Act::ExpectServing { count: 2 })];
    let mut story = plain([vec![(0, Act::Create { name: "chat", spec })], stalls].concat(), Vec::new());
    let why = (403, "Forbidden", "admission webhook \"keep.example.com\" denied the request: delete protection");
    story.faults.rules.push(Rule::refuse((70_000, 900_000), &["delete"], &["pods"], why));
    story
}

/// The other has its restart as soon as a replacement that does not come up would have given its slot back.
fn others_go_on(log: &Log<'_>) -> Vec<Option<String>> {
    let mut grants = log.grants();
    grants.retain(|at| *at > 100_000);
    let restarted = grants.first().is_some_and(|at| (680_000..720_000).contains(at));
    vec![
        (!restarted).then(|| format!("restarts were granted at {grants:?} ms")),
        log.has("delete protection"),
        log.no_hot_loop(),
    ]
}

/// The replacement is granted and waits for its record; meanwhile there is no room for another pod.
fn refused_after_the_grant() -> Story {
    let quota = [(83_000, Act::Quota { pods: Some(2) }), edit(84_500, json!({"replicas": 3}))];
    let lifted = [(150_000, Act::ExpectServing { count: 2 }), (160_000, Act::Quota { pods: None })];
    let acts = [hasty(2), vec![freeze(20_000, 0), freeze(80_000, 0)], quota.to_vec(), lifted.to_vec()].concat();
    let mut story = plain(acts, Vec::new());
    story.faults.rules.push(super::doubts::records_refused((80_000, 125_000)));
    story
}

/// A quota that was lowered below what stands tells nobody until somebody goes: the first one that is replaced has no successor, and no other
/// one goes.
fn lowered_quota() -> Story {
    let stalls = [freeze(20_000, 0), freeze(25_000, 1), (70_000, Act::Quota { pods: Some(2) })];
    let again = [freeze(80_000, 0), freeze(150_000, 0), (240_000, Act::Quota { pods: None })];
    let mut story = plain([hasty(3), stalls.to_vec(), again.to_vec()].concat(), Vec::new());
    story.fleet.restarts_percent = 100; // the one that is away leaves a slot to the next
    story
}

/// Two may be away, and one restart in vain is enough.
fn hasty(replicas: u64) -> Vec<(u64, Act)> {
    let mut spec = spec(replicas, "Recover");
    spec["recovery"]["restartsBeforeReplace"] = json!(1);
    spec["recovery"]["maxUnavailable"] = json!(2);
    vec![(0, Act::Create { name: "chat", spec })]
}

/// A right to read is gone, from the 15th second to this one.
fn unread(verb: &'static [&'static str], plurals: &'static [&'static str], to_ms: u64, why: &'static str) -> Rule {
    Rule::refuse((15_000, to_ms), verb, plurals, (403, "Forbidden", why))
}

fn without_reading(acts: Vec<(u64, Act)>, rule: Rule) -> Story {
    let mut story = plain(acts, Vec::new());
    story.faults.rules.push(rule);
    story
}

/// Whoever trims rights takes those to look at others' rights first. All else goes on.
fn child_unread() -> Story {
    let told = (60_000, Act::Expect { condition: "Stalled", status: Some("True") });
    let acts = vec![
        create(2),
        freeze(20_000, 0),
        edit(30_000, json!({"replicas": 3})),
        told,
        (80_000, Act::ExpectServing { count: 3 }),
        (130_000, Act::Expect { condition: "Stalled", status: None }),
    ];
    let why = "rolebindings is forbidden: User cannot get resource \"rolebindings\" in API group";
    without_reading(acts, unread(&["get"], &["rolebindings"], 100_000, why))
}

/// What nobody has seen nobody changes: a new revision waits until the Deployment can be read.
fn deployment_unread() -> Story {
    let acts = vec![
        create(2),
        freeze(20_000, 0),
        edit(30_000, json!({"engine": {"image": "engine:2"}})),
        (60_000, Act::Expect { condition: "Stalled", status: Some("True") }),
        (95_000, Act::ExpectOf { image: "engine:2", count: 0 }),
        (95_000, Act::ExpectServing { count: 2 }),
    ];
    let why = "deployments is forbidden: User cannot get resource \"deployments\" in API group";
    without_reading(acts, unread(&["get"], &["deployments"], 100_000, why))
}

/// In a rollout nobody knows where the Deployment could go back to: it is left as it goes, and a stall is recovered all the same.
fn history_unread() -> Story {
    let acts = vec![create(2), edit(20_000, json!({"engine": {"image": "engine:2"}})), freeze(100_000, 0)];
    let why = "replicasets is forbidden: User cannot list resource \"replicasets\" in API group";
    without_reading(acts, unread(&["list"], &["replicasets"], 200_000, why))
}

/// Without its pods nothing can be decided: it is told, and goes on when they can be listed again.
fn pods_unread() -> Story {
    let told = (50_000, Act::Expect { condition: "Stalled", status: Some("True") });
    let acts = vec![create(2), freeze(20_000, 0), told, (120_000, Act::Expect { condition: "Stalled", status: None })];
    let why = "pods is forbidden: User cannot list resource \"pods\" in API group";
    without_reading(acts, unread(&["list"], &["pods"], 60_000, why))
}
