//! Standard stories of specs that change: a revision whose engines hang, the same one mended, and the incident in which an autoscaler
//! went from 6 to 20 and back to 6 and kept the frozen ones.

use serde_json::{Value, json};

use super::story::{Act, freeze, spec};

/// Engines of this image freeze some seconds after they have begun to serve, wherever they run.
pub const BAD_IMAGE: &str = "engine:bad";

pub fn stories() -> Vec<(&'static str, Vec<(u64, Act)>)> {
    let create = |replicas, mode| (0, Act::Create { name: "chat", spec: spec(replicas, mode) });
    let edit = |patch: Value| Act::Edit { name: "chat", patch };
    let image = |image: &str| edit(json!({"spec": {"engine": {"image": image}}}));
    let replicas = |n: u64| edit(json!({"spec": {"replicas": n}}));
    vec![
        ("bad-revision", vec![create(2, "Recover"), (50_000, image(BAD_IMAGE))]),
        ("bad-revision-mended", vec![create(2, "Recover"), (50_000, image(BAD_IMAGE)), (105_000, image("engine:2"))]),
        // nobody restarts them: whoever survives is frozen for ever
        (
            "6-20-6",
            vec![
                create(6, "Fence"),
                (40_000, freeze(0)),
                (40_000, freeze(3)),
                (44_000, replicas(20)),
                (80_000, replicas(6)),
            ],
        ),
    ]
}

/// What their logs must and must not hold.
pub fn words(name: &str) -> &'static [(&'static str, bool)] {
    match name {
        "bad-revision" => &[("rolled-back", true), ("\"reason\":\"RolledBack\"", true)],
        "bad-revision-mended" => &[("rolled-back", true)],
        "6-20-6" => &[("truebeat.io/restart-grant", false), ("pod-deletion-cost\":\"-1000\"", true)],
        _ => &[],
    }
}
