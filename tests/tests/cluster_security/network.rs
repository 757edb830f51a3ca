//! S9: what the policies let through, read as a network plugin reads them. (By packets: the story `s09_network_policies` of `e2e`.)

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use truebeat_tests::fleet::operator::NAMESPACE;
use truebeat_tests::product;

use crate::manifests::charted;
use crate::world::{World, documented};

/// The chart's policy for the operator, and the one that `docs/security.md` gives for engines: both ways closed but for what is named.
pub fn policies(world: &World<'_>) -> Result<()> {
    let objects = charted(
        world,
        NAMESPACE,
        &["networkPolicy.enabled=true", "networkPolicy.from[0].namespaceSelector.matchLabels.a=b"],
    )?;
    let find = |kind: &str| objects.iter().find(|object| object["kind"] == kind).with_context(|| format!("no {kind}"));
    let (policy, deployment) = (&find("NetworkPolicy")?["spec"], find("Deployment")?);
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    for (key, value) in policy["podSelector"]["matchLabels"].as_object().context("a selector")? {
        ensure!(labels[key] == *value, "the policy selects pods with {key}={value}, the operator's have {labels}");
    }
    closed_but_for(policy, ("ingress", &[json!("http")]), ("egress", &[json!(443), json!(6443)]))?;
    let from = policy["ingress"][0]["from"].as_array().context("nobody is named")?;
    ensure!(from.len() == 2 && from[1]["namespaceSelector"]["matchLabels"]["a"] == "b", "{policy}");
    let test = &from[0]["podSelector"]["matchLabels"];
    ensure!(test["app.kubernetes.io/component"] == "test" && from[0]["namespaceSelector"].is_null(), "{policy}");

    world.tenant("network")?;
    product::apply(world.cluster, documented("kind: NetworkPolicy")?)?;
    let engines = world.json(&["-n", "network", "networkpolicy", "engines"])?;
    closed_but_for(&engines["spec"], ("ingress", &[json!(8080), json!(9400)]), ("egress", &[json!(443), json!(6443)]))
}

/// One direction and the ports that it leaves open.
type Open<'a> = (&'a str, &'a [Value]);

fn closed_but_for(policy: &Value, into: Open<'_>, out: Open<'_>) -> Result<()> {
    ensure!(policy["policyTypes"] == json!(["Ingress", "Egress"]), "{}", policy["policyTypes"]);
    for (direction, wanted) in [into, out] {
        let rules = policy[direction].as_array().with_context(|| format!("no {direction}"))?;
        let mut open = Vec::new();
        for rule in rules {
            // a rule without ports lets every port through
            let ports = rule["ports"].as_array().with_context(|| format!("{direction}: {rule} names no port"))?;
            open.extend(ports.iter().map(|port| port["port"].clone()));
        }
        ensure!(open == wanted, "{direction} lets through {open:?}, not {wanted:?}");
    }
    Ok(())
}
