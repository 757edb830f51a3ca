//! Standard stories of specs that change: a revision whose engines hang, the same one mended, and the incident in which an autoscaler
//! went from 6 to 20 and back to 6 and kept the frozen ones.

use operator::{client::FIELD_MANAGER, controllers::inference_deployment::plan::ANNOTATION_APPLIED};
use serde_json::{Value, json};

use super::{
    act::{Act, child},
    kube::{store::Store, verbs::merge_patch},
    story::{NAMESPACE, Story, create, edit, freeze, plain, spec},
    world::target,
};

/// Engines of this image freeze some seconds after they have begun to serve, wherever they run.
pub const BAD_IMAGE: &str = "engine:bad";

pub fn stories() -> Vec<(&'static str, Vec<(u64, Act)>)> {
    let created = |replicas, mode| (0, Act::Create { name: "chat", spec: spec(replicas, mode) });
    let image = |at_ms: u64, image: &str| edit(at_ms, json!({"engine": {"image": image}}));
    let replicas = |at_ms: u64, n: u64| edit(at_ms, json!({"replicas": n}));
    let mut held = spec(2, "Recover");
    // long enough that the freeze falls into it also where another operator had to take over first
    held["rollout"] = json!({"onFailure": "Hold", "soakSeconds": 30});
    let held = (0, Act::Create { name: "chat", spec: held });
    let until_held = [held, image(90_000, "engine:2"), (112_000, Act::FreezeOf { image: "engine:2" })];
    let deleted = (180_000, Act::DeleteChild { plural: "deployments" });
    vec![
        // one stall of a new replica, which its restart cures; only another revision goes on
        ("held-revision", [until_held.to_vec(), vec![image(220_000, "engine:3")]].concat()),
        // what comes up when nothing of it stands comes up on the good one (at zero for long enough that a third operator sees it)
        ("held-revision-to-zero", [until_held.to_vec(), vec![replicas(180_000, 0), replicas(230_000, 2)]].concat()),
        // and where that went with the Deployment, on the only one that is known
        ("held-revision-deleted", [until_held.to_vec(), vec![deleted]].concat()),
        ("bad-revision", vec![created(2, "Recover"), image(50_000, BAD_IMAGE)]),
        ("bad-revision-mended", vec![created(2, "Recover"), image(50_000, BAD_IMAGE), image(105_000, "engine:2")]),
        // nobody restarts them: whoever survives is frozen for ever
        (
            "6-20-6",
            vec![created(6, "Fence"), freeze(40_000, 0), freeze(40_000, 3), replicas(44_000, 20), replicas(80_000, 6)],
        ),
    ]
}

/// What an older version of the operator had applied on children, and this one does not know, is gone once this one leads. (In the pod
/// template the revision tells as well; elsewhere it is the hash of what was applied last alone.)
pub fn older_children() -> Story {
    let older = |plural, patch| (20_000, Act::Older { plural, patch });
    let gone = |plural, pointer| (60_000, Act::ExpectNo { plural, pointer });
    let acts = vec![
        create(2),
        (20_000, Act::Kill { operator: 0 }),
        older("services", json!({"spec": {"publishNotReadyAddresses": true}})),
        older("poddisruptionbudgets", json!({"metadata": {"labels": {"truebeat.io/older": "1"}}})),
        gone("services", "/spec/publishNotReadyAddresses"),
        gone("poddisruptionbudgets", "/metadata/labels/truebeat.io~1older"),
    ];
    plain(acts, Vec::new())
}

/// In the fleet is an object that a newer version of the operator wrote: whoever cannot read it still serves the others.
pub fn newer_object() -> Story {
    let other = (0, Act::Create { name: "other", spec: spec(1, "Recover") });
    let newer = |value| Act::Newer { name: "other", pointer: "/spec/rollout/onFailure", value: json!(value) };
    plain(vec![create(2), other, (15_000, newer("Divert")), freeze(20_000, 0), (60_000, newer("RollBack"))], Vec::new())
}

/// What their logs must and must not hold, and what it says of whom.
pub fn words(name: &str) -> &'static [(&'static str, &'static str, bool)] {
    match name {
        "held-revision" => {
            &[("P11", "RolloutHeld", true), ("P11", "rolled-back", false), ("P11", "truebeat.io/restart-grant", true)]
        }
        "held-revision-to-zero" => &[("P11", "RolloutHeld", true), ("P13", "\"reason\":\"RolledBack\"", true)],
        "held-revision-deleted" => &[("P11", "RolloutHeld", true)],
        "bad-revision" => &[
            ("P13", "rolled-back", true),
            ("P13", "\"reason\":\"RolledBack\"", true),
            // what goes needs no restart
            ("P15", "\"grants\":", false),
        ],
        "bad-revision-mended" => &[("P13", "rolled-back", true)],
        "6-20-6" => &[("P4", "truebeat.io/restart-grant", false), ("P4", "pod-deletion-cost\":\"-1000\"", true)],
        _ => &[],
    }
}

/// What must be so in mid-story where no operator dies.
pub fn expectations(name: &str) -> Vec<(u64, Act)> {
    match name {
        "held-revision" => vec![
            (200_000, Act::Expect { condition: "Stalled", status: Some("True") }),
            (200_000, Act::ExpectOf { image: "engine:2", count: 1 }),
            (200_000, Act::ExpectServing { count: 3 }),
        ],
        "held-revision-to-zero" => vec![
            (175_000, Act::ExpectOf { image: "engine:2", count: 1 }),
            (280_000, Act::Expect { condition: "Stalled", status: Some("True") }),
            (280_000, Act::ExpectOf { image: "engine:2", count: 0 }),
            (280_000, Act::ExpectServing { count: 2 }),
        ],
        _ => Vec::new(),
    }
}

/// By server-side apply under the operator's own name: who applies without it takes it off, and nobody else does.
pub fn older(store: &mut Store, plural: &str, patch: &Value) {
    let at = target(plural, NAMESPACE, child(plural), FIELD_MANAGER);
    let Ok((_, live)) = store.read(&at) else { return };
    let mut body = live.json();
    let written = ["name", "labels", "annotations", "ownerReferences"];
    body["metadata"].as_object_mut().into_iter().for_each(|map| map.retain(|name, _| written.contains(&name.as_str())));
    body["metadata"]["annotations"][ANNOTATION_APPLIED] = json!("older");
    merge_patch(&mut body, patch);
    drop(store.apply(&at, body));
}
