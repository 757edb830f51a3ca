//! Another version of the operator comes: nobody's engine goes for it.

use anyhow::{Result, ensure};
use crds::{InferenceDeployment, LABEL_REVISION, rollout::RolloutStatus};
use serde_json::{Value, json};
use truebeat_tests::product;
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::kill::scale_operator;
use crate::lifecycle::manifest_of;
use crate::probes::Witness;
use crate::recovery::removed;
use crate::rollout::{settled, without_a_loss};
use crate::world::{BOUND, World, answered, members};

const NAME: &str = "older";
/// The revision that the older operator has made of the same spec.
pub const THEIRS: &str = "0123456789";

fn manifest(hold_percent: i32, attempt: i32) -> String {
    let rest = format!(
        "rollout: {{soakSeconds: 1, attempt: {attempt}}}\n  recovery: {{holdPercent: {hold_percent}}}\n  drainSeconds: 9"
    );
    manifest_of(NAME, 1, "--drain-timeout, 2s", &rest)
}

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    times.act("kubectl apply: InferenceDeployment older, 1 replica");
    product::apply(world.cluster, &manifest(50, 0))?;
    let endpoints = world.endpoints(NAME);
    let fresh = settled(world, NAME, "").await?;
    made_by_another(world, NAME, 1, times).await?;
    product::apply(world.cluster, &manifest(51, 0))?;
    let pods = members(&world.pods, NAME);
    let load = world.patient_load(NAME).await?;
    answered(&load).await?;

    let witness = Witness::of(world, &endpoints)?;
    let begun = times.act("today's operator comes");
    scale_operator(world, 2)?;
    until_async("it to tell of the newer revision", BOUND, || async {
        Ok((memory(world, NAME).newer == fresh).then_some(()))
    })
    .await?;
    times.now(&format!("status.rollout: wanted {THEIRS}, newer {fresh}"));
    told(world, &fresh).await?;
    times.note("an Event TemplateKept says why");
    times.seen("all well", world.quiet(NAME).await?);
    product::apply(world.cluster, &manifest(52, 0))?;
    until_async("a change that no pod shows to be taken in", BOUND, || async {
        Ok(up_to_date(world, NAME, 52).then_some(()))
    })
    .await?;
    answered(&load).await?;
    ensure!(members(&world.pods, NAME) == pods, "{pods:?} became {:?}", members(&world.pods, NAME));
    times.now(
        "the same pod serves, after two changes of the spec that no pod shows, one of them before the operator came",
    );

    times.act("kubectl apply: another attempt");
    product::apply(world.cluster, &manifest(52, 1))?;
    let after = settled(world, NAME, THEIRS).await?;
    let memory = memory(world, NAME);
    ensure!(memory.newer.is_empty() && memory.wanted == after && after != fresh, "{memory:?}");
    times.now("the newer template is there");
    without_a_loss(&witness, &load, begun, "the upgrade", times).await?;
    removed(world, NAME).await
}

/// The operator goes; what it leaves is as an older one would have left it, whose pods had one annotation more.
pub async fn made_by_another(world: &World<'_>, name: &str, replicas: usize, times: &mut Times) -> Result<()> {
    times.act("no operator; what stands is what an older one has made of the same spec");
    scale_operator(world, 0)?;
    let labels = json!({LABEL_REVISION: THEIRS});
    let template =
        json!({"metadata": {"labels": labels, "annotations": {"example.com/written-by": "an older operator"}}});
    patch(world, ("deploy", name), &[], &json!({"spec": {"template": template}}))?;
    world.kubectl(&["rollout", "status", "deploy", name, "--timeout=90s"])?;
    let theirs = json!({"stable": THEIRS, "target": THEIRS, "wanted": THEIRS});
    patch(world, ("infd", name), &["--subresource=status"], &json!({"status": {"rollout": theirs}}))?;
    until_async("the old replicas to be gone", BOUND, || async {
        Ok((members(&world.pods, name).len() == replicas && memory(world, name).wanted == THEIRS).then_some(()))
    })
    .await?;
    times.now("what it has made serves");
    Ok(())
}

fn patch(world: &World<'_>, (kind, name): (&str, &str), args: &[&str], patch: &Value) -> Result<()> {
    world.kubectl(&[&["patch", kind, name, "--type=merge", "-p", &patch.to_string()], args].concat()).map(drop)
}

pub fn memory(world: &World<'_>, name: &str) -> RolloutStatus {
    let object = world.infds.now().remove(name);
    object.and_then(|object| object.status.as_ref().map(|status| status.rollout.clone())).unwrap_or_default()
}

/// Has an operator taken this change of the spec in?
pub fn up_to_date(world: &World<'_>, name: &str, hold_percent: i32) -> bool {
    let object = world.infds.now().remove(name);
    let seen = |object: &InferenceDeployment| object.status.as_ref().map(|status| status.observed_generation);
    object.is_some_and(|object| {
        object.spec.recovery.hold_percent == hold_percent && seen(&object) == object.metadata.generation
    })
}

async fn told(world: &World<'_>, newer: &str) -> Result<()> {
    let event = format!("{NAME}.{newer}.newer");
    until_async("the event", BOUND, || async {
        let note = world.kubectl(&["get", "events.events.k8s.io", &event, "-o", "jsonpath={.reason}: {.note}"]);
        Ok(note.ok().filter(|note| note.starts_with("TemplateKept: ") && note.contains(newer)))
    })
    .await
    .map(drop)
}
