//! S1 (one namespace), S3, S4, S8: what is installed, as the API server has it.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use truebeat_tests::audit;
use truebeat_tests::fleet::operator::{ACCOUNT, Candidate, NAMESPACE, USER};
use truebeat_tests::product;
use truebeat_tests::wait::until_async;

use crate::world::{BOUND, World};

pub const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../charts/truebeat");
const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/examples");

/// What the chart renders with these values, object by object, as the API server's own reader sees it.
pub fn charted(world: &World<'_>, namespace: &str, sets: &[&str]) -> Result<Vec<Value>> {
    let mut args = vec!["template", "truebeat", CHART, "--namespace", namespace];
    args.extend(sets.iter().flat_map(|set| ["--set", set]));
    let file = world.cluster.layout().path("charted.yaml");
    std::fs::write(&file, world.cluster.helm(&args)?)?;
    let list =
        world.cluster.kubectl(&["create", "--dry-run=client", "-o", "json", "-f", &file.display().to_string()])?;
    // kubectl prints one object after the other
    serde_json::Deserializer::from_str(&list).into_iter().map(|object| object.context("kubectl's JSON")).collect()
}

fn names(objects: &[Value]) -> Vec<String> {
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    objects.iter().map(|o| format!("{}/{}", word(&o["kind"]), word(&o["metadata"]["name"]))).collect()
}

/// The manifests are applied already, with every warning an error; here the chart, and what the operator makes of each example.
pub async fn restricted(world: &World<'_>) -> Result<()> {
    charted(world, NAMESPACE, &[])?;
    let file = world.cluster.layout().path("charted.yaml").display().to_string();
    world.cluster.kubectl(&["--warnings-as-errors", "apply", "--dry-run=server", "-f", &file])?;
    world.tenant("examples")?;
    world.cluster.kubectl(&["-n", "examples", "--warnings-as-errors", "apply", "-f", EXAMPLES])?;
    let wanted = world.json(&["-n", "examples", "infd"])?;
    let wanted = wanted["items"].as_array().context("examples")?.clone();
    ensure!(wanted.len() >= 7, "{} examples", wanted.len());
    for infd in &wanted {
        let (name, replicas) =
            (infd["metadata"]["name"].as_str().context("a name")?, infd["spec"]["replicas"].as_u64());
        // admission refuses a pod that is not restricted: those that exist are
        until_async(&format!("the pods of {name}"), BOUND, || async {
            Ok((world.pods("examples", name).await?.len() as u64 == replicas.unwrap_or(1)).then_some(()))
        })
        .await?;
    }
    nothing_in("examples", &world.json(&["-n", "examples", "pods"])?)?;
    let warned = audit::read(&world.cluster.audit_log(), USER)?;
    let warned: Vec<_> =
        warned.iter().filter_map(|e| e.annotations.get("pod-security.kubernetes.io/audit-violations")).collect();
    ensure!(warned.is_empty(), "Pod Security warned of {warned:?}");
    world.leave("examples").await
}

/// The operator's own pods, by both installations. (What it makes for engines is looked at in S3, with every example.)
pub async fn nothing(world: &World<'_>) -> Result<()> {
    let live = world.json(&["-n", NAMESPACE, "deployments"])?;
    let charted = json!({"items": charted(world, NAMESPACE, &[])?});
    for (whose, list) in [("manifests", live), ("chart", charted)] {
        let items = list["items"].as_array().context("items")?;
        let templates: Vec<Value> =
            items.iter().filter(|o| o["kind"] == "Deployment").map(|o| o["spec"]["template"].clone()).collect();
        ensure!(!templates.is_empty(), "{whose}: no Deployment");
        nothing_in(whose, &json!({"items": templates}))?;
    }
    Ok(())
}

/// Every container of these pods: a user of its own, no root, no right, nothing to write to, no way to more.
fn nothing_in(whose: &str, pods: &Value) -> Result<()> {
    let mut seen = 0;
    for pod in pods["items"].as_array().context("pods")? {
        let (spec, all) = (&pod["spec"], &pod["spec"]["securityContext"]);
        ensure!(all["runAsNonRoot"] == true && all["runAsUser"].as_u64() > Some(0), "{whose}: {all}");
        ensure!(all["seccompProfile"]["type"] == "RuntimeDefault", "{whose}: {all}");
        for host in ["hostNetwork", "hostPID", "hostIPC"] {
            ensure!(spec[host].as_bool() != Some(true), "{whose}: {host}");
        }
        let lists = [&spec["containers"], &spec["initContainers"]];
        for container in lists.into_iter().filter_map(Value::as_array).flatten() {
            let own = &container["securityContext"];
            let least = own["allowPrivilegeEscalation"] == false
                && own["readOnlyRootFilesystem"] == true
                && own["capabilities"] == json!({"drop": ["ALL"]})
                && own["privileged"].as_bool() != Some(true);
            ensure!(least, "{whose}: {} runs with {own}", container["name"]);
            seen += 1;
        }
    }
    ensure!(seen > 0, "{whose}: no container");
    Ok(())
}

/// None is installed, and no value of the chart brings one.
pub fn no_webhook(world: &World<'_>) -> Result<()> {
    let kinds = "validatingwebhookconfigurations,mutatingwebhookconfigurations";
    let live = world.cluster.kubectl(&["get", kinds, "-o", "name"])?;
    ensure!(live.trim().is_empty(), "{live}");
    let more = ["networkPolicy.enabled=true", "dashboard.enabled=true"];
    let rendered = names(&charted(world, NAMESPACE, &more)?);
    ensure!(!rendered.iter().any(|name| name.contains("Webhook")), "{rendered:?}");
    let crds = world.json(&["crds"])?.to_string();
    ensure!(!crds.contains("\"strategy\":\"Webhook\""), "a CRD is converted by a webhook");
    Ok(())
}

/// With `watchNamespace` nothing reaches beyond it: no ClusterRole, no node; and an operator with these rights is in step.
pub async fn one_namespace(world: &World<'_>) -> Result<()> {
    let (home, watched) = ("one-system", "one-watched");
    world.tenant(home)?;
    world.tenant(watched)?;
    let sets =
        [&format!("watchNamespace={watched}"), "crds.install=false", "admissionPolicy.install=false", "replicas=1"];
    let objects = charted(world, home, &sets)?;
    for object in &objects {
        let kind = object["kind"].as_str().unwrap_or_default();
        ensure!(!kind.starts_with("ClusterRole"), "{:?}", names(&objects));
        let place = object["metadata"]["namespace"].as_str().unwrap_or_default();
        ensure!(place == home || (place == watched && kind.starts_with("Role")), "{kind} in {place}");
    }
    let rights =
        objects.iter().find(|o| o["kind"] == "Role" && o["metadata"]["namespace"] == watched).context("a Role")?;
    ensure!(!rights["rules"].to_string().contains("nodes"), "{}", rights["rules"]);
    // so that what S1 shows of each rule of the ClusterRole is true of these
    let whole = world.json(&["clusterrole", ACCOUNT])?["rules"].as_array().context("rules")?.clone();
    let mut more = rights["rules"].as_array().context("rules")?.iter().filter(|rule| !whole.contains(rule));
    ensure!(more.next().is_none(), "one namespace is granted more: {}", rights["rules"]);
    let accounts: Vec<&Value> = objects.iter().filter(|o| o["kind"] != "Deployment" && o["kind"] != "Pod").collect();
    product::apply(world.cluster, &json!({"apiVersion": "v1", "kind": "List", "items": accounts}).to_string())?;
    let candidate = Candidate {
        binary: &world.programs.operator,
        name: "operator-one",
        port: 9501,
        account: (home, ACCOUNT),
        args: &["--watch-namespace", watched, "--namespace", home],
    };
    let operator = candidate.start(world.cluster, &world.client).await?;
    let in_step = until_async("all nine watches to be in step", BOUND, || async {
        Ok((operator.metric("truebeat_operator_watch_up", "").await? == 9.0).then_some(()))
    })
    .await;
    operator.process.end(BOUND);
    in_step?;
    let user = format!("system:serviceaccount:{home}:{ACCOUNT}");
    let asked = audit::read(&world.cluster.audit_log(), &user)?;
    let refused: Vec<_> =
        asked.iter().filter(|e| matches!(e.code(), 401 | 403)).map(|e| (&e.verb, e.resource())).collect();
    ensure!(!asked.is_empty() && refused.is_empty(), "asked for and not granted: {refused:?}");
    Ok(())
}
