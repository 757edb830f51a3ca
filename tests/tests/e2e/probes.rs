//! Whose doing a change of endpoints was: a kubelet that waits one second for an answer takes a healthy replica out of traffic when the
//! machine gives nobody a core for so long. That is no word of the agent's.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Event;
use serde::Deserialize;
use truebeat_tests::endpoints::{Endpoints, empty};
use truebeat_tests::load::Load;
use truebeat_tests::wait::until_async;

use crate::world::World;

/// What clients feel of an endpoint comes so long before or after the watch tells of it: a try may wait three seconds for its connection.
const AROUND: Duration = Duration::from_secs(5);
/// What the kubelet tells of a probe is there by then.
const TOLD_WITHIN: Duration = Duration::from_secs(10);

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

/// More moments without anybody are not the machine's.
const EXCUSED_MAX: usize = 2;

/// Who gets traffic of one Service, and whose doing it was when nobody did.
pub struct Witness<'a> {
    world: &'a World<'a>,
    endpoints: &'a Endpoints,
    before: Probes,
}

impl<'a> Witness<'a> {
    /// Of what happens from now on.
    pub fn of(world: &'a World<'a>, endpoints: &'a Endpoints) -> Result<Self> {
        Ok(Self { world, endpoints, before: Probes::of(world, &known(endpoints))? })
    }

    /// Tries since `since` that were lost; of those that nobody took, what [`Self::unreachable`] counts.
    pub async fn lost(&self, load: &Load, since: Instant) -> usize {
        let felt = load.felt(since);
        felt.refused + felt.broken + felt.silent + self.unreachable(load, since).await
    }

    /// Tries since `since` for which nobody took connections, without those made while late probes had left nobody there.
    pub async fn unreachable(&self, load: &Load, since: Instant) -> usize {
        let unreachable = load.unreachable(since);
        let near = |(begin, end): &(Instant, Instant), at: &Instant| *at + AROUND >= *begin && *at <= *end + AROUND;
        let mut spells = empty(&self.endpoints.flips());
        spells.retain(|spell| unreachable.iter().any(|at| near(spell, at)));
        let excused = self.late_probes_account_for(spells.len()).await;
        unreachable.iter().filter(|at| !excused || !spells.iter().any(|spell| near(spell, at))).count()
    }

    /// Did somebody get traffic at every moment from `since` on, but for those in which late probes had left nobody?
    pub async fn never_alone(&self, since: Instant) -> bool {
        let spells = empty(&self.endpoints.flips()).into_iter().filter(|(begin, _)| *begin >= since);
        self.late_probes_account_for(spells.count()).await
    }

    /// A late probe takes one replica away, once.
    async fn late_probes_account_for(&self, spells: usize) -> bool {
        if spells > EXCUSED_MAX {
            return false; // a product that leaves nobody again and again is no late machine
        }
        let late = || {
            let late =
                known(self.endpoints).iter().map(|pod| self.before.late(self.world, pod)).sum::<Result<usize>>()?;
            ensure!(late >= spells, "{spells} times nobody got traffic, and {late} probes were late");
            Ok(Some(()))
        };
        // the event comes a moment after the probe
        spells == 0 || until_async("events of late probes", TOLD_WITHIN, || async { late() }).await.is_ok()
    }
}

/// Every pod that has had an endpoint so far.
fn known(endpoints: &Endpoints) -> Vec<String> {
    let pods: BTreeSet<String> = endpoints.flips().into_iter().map(|flip| flip.pod).collect();
    pods.into_iter().collect()
}
