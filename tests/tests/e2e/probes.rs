//! Whose doing a change of endpoints was: a kubelet that waits one second for an answer takes a healthy replica out of traffic when the
//! machine gives nobody a core for so long. That is no word of the agent's.

use std::time::{Instant, SystemTime};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use crate::world::World;

#[derive(Deserialize)]
struct Events {
    items: Vec<Event>,
}

/// How many of this pod's probes since `since` were given up on, for nothing came in time. One that was answered with a refusal is none.
pub fn late(world: &World<'_>, pod: &str, since: Instant) -> Result<usize> {
    let selector = format!("--field-selector=reason=Unhealthy,involvedObject.name={pod}");
    let text = world.kubectl(&["get", "events", &selector, "-o", "json"])?;
    let events: Events = serde_json::from_str(&text).context("kubectl get events said no list")?;
    // an event tells whole seconds
    let since = SystemTime::now() - since.elapsed() - std::time::Duration::from_secs(1);
    let since = Timestamp::try_from(since)?;
    let counts = events.items.iter().filter(|event| timed_out(event) && seen_last(event) >= since);
    Ok(counts.map(|event| usize::try_from(event.count.unwrap_or(1)).unwrap_or(1)).sum())
}

fn timed_out(event: &Event) -> bool {
    let said = event.message.as_deref().unwrap_or_default();
    ["context deadline exceeded", "Client.Timeout"].iter().any(|words| said.contains(words))
}

fn seen_last(event: &Event) -> Timestamp {
    let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
    let last = event.last_timestamp.as_ref().map(|Time(at)| *at);
    last.or(series).or_else(|| event.event_time.as_ref().map(|time| time.0)).unwrap_or(Timestamp::MIN)
}
