//! What a tool that keeps manifests in Git sees: nothing changes that nobody changed, by either way of applying; the examples pass the
//! server; what cannot be built is said in words.

use anyhow::{Result, ensure};
use truebeat_tests::product::{AGENT_IMAGE, ENGINE_IMAGE, MODEL};
use truebeat_tests::times::Times;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples");

/// No replica: what is looked at here needs no pod.
fn manifest(extra: &str) -> String {
    format!(
        r#"
apiVersion: inference.truebeat.io/v1alpha1
kind: InferenceDeployment
metadata: {{name: git, namespace: serving, labels: {{team: a}}}}
spec:
  replicas: 0
  model: {{source: {{file: {{path: {MODEL}}}}}}}
  engine:
    kind: Truebeat
    image: {ENGINE_IMAGE}
    env: [{{name: A, value: "1"}}]
    resources: {{requests: {{cpu: "0.5", memory: 1024Mi}}}}
  agent: {{image: {AGENT_IMAGE}}}
{extra}"#
    )
}

pub async fn story(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    times.act("kubectl apply --dry-run=server: every example");
    let said = world.kubectl(&["--warnings-as-errors", "apply", "--dry-run=server", "-f", EXAMPLES])?;
    ensure!(said.lines().filter(|line| line.ends_with("(server dry run)")).count() >= 6, "{said}");
    times.now("the server takes all of them, without a warning");

    let file = world.cluster.layout().path("git.yaml");
    std::fs::write(&file, manifest(""))?;
    let file = file.display().to_string();
    times.act("kubectl apply --server-side, twice, and kubectl diff both ways");
    for _ in 0..2 {
        world.kubectl(&["--warnings-as-errors", "apply", "--server-side", "-f", &file])?;
    }
    condition(world, "Ready", "ScaledToZero").await?;
    let version = || world.kubectl(&["get", "infd", "git", "-o", "jsonpath={.metadata.resourceVersion}"]);
    let before = version()?;
    for way in ["--server-side=true", "--server-side=false"] {
        // kubectl ends with status 1 where there is a difference
        let diff = world.kubectl(&["diff", way, "-f", &file])?;
        ensure!(diff.trim().is_empty(), "{way}: {diff}");
    }
    let said = world.kubectl(&["apply", "--server-side", "-f", &file])?;
    ensure!(
        said.contains("serverside-applied") && version()? == before,
        "an apply of the same wrote something: {said}"
    );
    let managed = world.kubectl(&["get", "infd", "git", "-o", "json", "--show-managed-fields"])?;
    let object: serde_json::Value = serde_json::from_str(&managed)?;
    let fields = object["metadata"]["managedFields"].as_array().cloned().unwrap_or_default();
    let spec: Vec<_> = fields.iter().filter(|f| !f["fieldsV1"]["f:spec"].is_null()).map(|f| &f["manager"]).collect();
    ensure!(spec == ["kubectl"], "others own parts of the spec: {spec:?}");
    times.now("no difference, no new version; the spec has one owner");

    times.act("an overlay that would take the fence away");
    let overlay = "  podOverlay: {spec: {containers: [{name: engine, readinessProbe: {tcpSocket: {port: 8000}}}]}}\n";
    std::fs::write(&file, manifest(overlay))?;
    world.kubectl(&["apply", "--server-side", "-f", &file])?;
    let message = condition(world, "Stalled", "InvalidSpec").await?;
    ensure!(message.contains("readinessProbe is the operator's"), "{message}");
    times.now(&format!("Stalled=True: {message}"));
    std::fs::write(&file, manifest("  podOverlay: {spec: {nodeSelector: {gpu: h100}}}\n"))?;
    world.kubectl(&["apply", "--server-side", "-f", &file])?;
    condition(world, "Ready", "ScaledToZero").await?;
    let selector = world.kubectl(&["get", "deploy", "git", "-o", "jsonpath={.spec.template.spec.nodeSelector.gpu}"])?;
    ensure!(selector == "h100", "the overlay did not arrive: {selector}");
    times.now("one that may stands in the Deployment");

    let table = world.kubectl(&["get", "inference"])?;
    let head = table.lines().next().unwrap_or_default();
    for column in ["REPLICAS", "READY", "PROGRESSING", "FENCED", "INCIDENTS", "REASON", "AGE"] {
        ensure!(head.contains(column), "no column {column}: {table}");
    }
    let refused = world.kubectl(&["patch", "infd", "git", "--type=merge", "-p", r#"{"spec":{"gate":{"port":8081}}}"#]);
    let refused = format!("{:#}", refused.err().unwrap_or_else(|| anyhow::anyhow!("another gate port was taken")));
    ensure!(refused.contains("gate.port cannot change"), "{refused}");
    world.kubectl(&["delete", "infd", "git", "--wait=true", "--timeout=60s"]).map(drop)
}

/// Waits for a condition with this reason; gives its message.
async fn condition(world: &World<'_>, type_: &str, reason: &str) -> Result<String> {
    until_async(&format!("{type_} for {reason}"), BOUND, || async {
        let Some(infd) = world.infds.now().remove("git") else { return Ok(None) };
        let fresh = infd.status.as_ref().map(|status| status.observed_generation) == infd.metadata.generation;
        let conditions = infd.status.iter().flat_map(|status| &status.conditions);
        let found = conditions.into_iter().find(|c| c.type_ == type_ && c.reason == reason);
        Ok(found.filter(|_| fresh).map(|c| c.message.clone()))
    })
    .await
}
