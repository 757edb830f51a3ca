//! Whose doing a change of endpoints was: a kubelet that waits one second for an answer takes a healthy replica out of traffic when the
//! machine gives nobody a core for so long. That is no word of the agent's.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use serde::Deserialize;
use truebeat_tests::endpoints::Endpoints;

use crate::world::World;

#[derive(Deserialize)]
struct Events {
    items: Vec<Event>,
}

/// How many probes of each of some pods had been late at some time.
pub struct Probes(BTreeMap<String, usize>);

impl Probes {
    /// As of now.
    pub fn of(world: &World<'_>, pods: &[String]) -> Result<Self> {
        let counts = pods.iter().map(|pod| Ok((pod.clone(), timed_out(world, pod)?)));
        Ok(Self(counts.collect::<Result<_>>()?))
    }

    /// How often this pod's endpoint has changed since `since`; nothing but late probes may have done it.
    pub fn account_for(&self, world: &World<'_>, endpoints: &Endpoints, pod: &str, since: Instant) -> Result<usize> {
        let flips = endpoints.flips().into_iter().filter(|flip| flip.at > since && flip.pod == *pod).count();
        let late = self.late(world, pod)?;
        ensure!(flips <= 2 * late, "{flips} changes of {pod}'s endpoint, and {late} of its probes were late");
        Ok(flips)
    }

    /// How many of this pod's probes were given up on since, for nothing came in time. One that was answered with a refusal is none.
    pub fn late(&self, world: &World<'_>, pod: &str) -> Result<usize> {
        let before = self.0.get(pod).copied().unwrap_or(0);
        Ok(timed_out(world, pod)?.saturating_sub(before))
    }
}

/// In the pod's life.
fn timed_out(world: &World<'_>, pod: &str) -> Result<usize> {
    let selector = format!("--field-selector=reason=Unhealthy,involvedObject.name={pod}");
    let text = world.kubectl(&["get", "events", &selector, "-o", "json"])?;
    let events: Events = serde_json::from_str(&text).context("kubectl get events said no list")?;
    let late = events.items.iter().filter(|event| {
        let said = event.message.as_deref().unwrap_or_default();
        ["context deadline exceeded", "Client.Timeout"].iter().any(|words| said.contains(words))
    });
    Ok(late.map(|event| usize::try_from(event.count.unwrap_or(1)).unwrap_or(1)).sum())
}
