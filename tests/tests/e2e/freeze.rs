//! Engines that freeze and say 200: caught, explained, replaced, one at a time.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use crds::EngineIncident;
use kube::ResourceExt;
use truebeat_tests::product;
use truebeat_tests::times::Times;

use crate::probes::{Probes, Witness};
use crate::world::{BOUND, World, by_its_own_clock, restarted, restarts, told, two_serving, uid};

/// Far above what a busy machine adds, far below what a replica that does not serve would show.
const SERVING_SILENCE_MAX: Duration = Duration::from_secs(8);
/// Of an experiment that may show nothing.
const TRIES: u32 = 3;

pub async fn one(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let (victim, other) = (&pods[0], &pods[1]);
    let pages = world.pages(&pods)?;
    let (probes, witness) = (Probes::of(world, &pods)?, Witness::of(world, &endpoints)?);
    let before = restarts(&*world.pod(victim)?, "engine");

    let (frozen, wall) =
        (times.act(&format!("SIGUSR2 to the engine of {victim}: it freezes, and lies")), SystemTime::now());
    world.freeze(victim)?;
    let away = endpoints.flip(victim, false, frozen, BOUND).await?;
    times.seen("its endpoint is away", away);
    let (at, ()) = world.incident("an incident", victim, frozen, |_| Some(())).await?;
    times.seen("an EngineIncident tells of it", at);
    let granted = |inc: &EngineIncident| inc.status.as_ref()?.timeline.granted_at.as_ref().map(drop);
    let (at, ()) = world.incident("a grant", victim, frozen, granted).await?;
    times.seen("the restart is granted", at);
    restarted(world, victim, before + 1, frozen, times).await?;
    times.seen("its endpoint is back", endpoints.flip(victim, true, away, BOUND).await?);
    let outcome = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().map(|_| inc.clone());
    let (at, incident) = world.incident("the incident's end", victim, frozen, outcome).await?;
    times.seen("the incident is closed", at);
    times.seen("status and conditions are all well", world.quiet("chat").await?);

    times.note(&by_its_own_clock(&incident, wall)?);
    is_explained(world, victim, &incident, times)?;
    let silence = pages.silence(other, frozen);
    times.note(&format!("{other} delivered all the time; its longest pause: {} ms", silence.as_millis()));
    ensure!(silence < SERVING_SILENCE_MAX, "{other} delivered nothing for {silence:?}");
    let felt = load.felt(frozen);
    times.note(&told(&felt));
    let unreachable = witness.unreachable(&load, frozen).await;
    ensure!(unreachable == 0, "at some moment no replica took connections: {felt:?}");
    probes.account_for(world, &endpoints, other, frozen)?;
    ensure!(world.incidents_since(frozen).len() == 1, "more than one incident: {:?}", world.incidents_since(frozen));
    Ok(())
}

/// Class, bundle and message are there for the person who comes later.
fn is_explained(world: &World<'_>, pod: &str, incident: &EngineIncident, times: &mut Times) -> Result<()> {
    let status = incident.status.as_ref().context("an incident without a status")?;
    ensure!(incident.spec.class == "StepStalled", "the class is {}", incident.spec.class);
    ensure!(status.outcome.as_deref() == Some("Recovered"), "the outcome is {:?}", status.outcome);
    ensure!(status.granted_by.as_deref() == Some("operator"), "granted by {:?}", status.granted_by);
    let bundle = status.bundle.as_ref().context("the incident names no bundle")?;
    let name = std::path::Path::new(bundle).file_name().context("a bundle without a name")?;
    let file = product::volume(world.cluster, &uid(&*world.pod(pod)?), "bundles").join(name);
    let bytes = std::fs::metadata(&file).with_context(|| format!("no bundle at {}", file.display()))?.len();
    ensure!(bytes > 0, "the bundle is empty");
    times.note(&format!(
        "class {}, bundle {bundle} ({bytes} bytes), fingerprint {}",
        incident.spec.class, incident.spec.fingerprint
    ));
    let described = world.kubectl(&["describe", "pod", pod])?;
    ensure!(described.contains("StepStalled"), "kubectl describe pod shows no termination message:\n{described}");
    let line = described.lines().skip_while(|line| !line.contains("Last State")).find(|line| line.contains("Message:"));
    times.note(&format!("kubectl describe pod: {}", line.unwrap_or("(message)").trim()));
    Ok(())
}

/// Both freeze at one moment and are found within seconds, whatever step each was in: the budget makes one wait for the other. A young
/// engine that the machine itself has held up is given time by its own rhythm, so that it may be found only when the other serves: then
/// nothing was shown, and they freeze again.
pub async fn both(world: &mut World<'_>, times: &mut Times) -> Result<()> {
    for _ in 0..TRIES {
        if both_at_once(world, times).await? {
            return Ok(());
        }
        times.note("nobody had to wait: once more");
    }
    anyhow::bail!("in {TRIES} tries nobody had to wait")
}

/// Did one have to wait for the other? Never are two away at once.
async fn both_at_once(world: &World<'_>, times: &mut Times) -> Result<bool> {
    let endpoints = world.endpoints("chat");
    let load = world.load("chat").await?;
    let pods = two_serving(world, &endpoints, &load).await?;
    let _alone: Vec<_> = pods.iter().map(|pod| world.load_on(pod)).collect::<Result<_>>()?;
    let before: Vec<i32> = pods.iter().map(|pod| Ok(restarts(&*world.pod(pod)?, "engine"))).collect::<Result<_>>()?;
    let (frozen, wall) = (times.act("SIGUSR2 to both engines"), SystemTime::now());
    pods.iter().try_for_each(|pod| world.freeze(pod))?;
    let mut ends = Vec::new();
    for (pod, before) in pods.iter().zip(before) {
        times.seen(&format!("{pod}: endpoint away"), endpoints.flip(pod, false, frozen, BOUND).await?);
        let granted = |inc: &EngineIncident| inc.status.as_ref()?.timeline.granted_at.as_ref().map(drop);
        let (at, ()) = world.incident("a grant", pod, frozen, granted).await?;
        times.seen(&format!("{pod}: restart granted"), at);
        restarted(world, pod, before + 1, frozen, times).await?;
        let outcome = |inc: &EngineIncident| inc.status.as_ref()?.outcome.clone().map(|_| inc.clone());
        let (at, incident) = world.incident("the incident's end", pod, frozen, outcome).await?;
        times.seen(&format!("{pod}: incident closed"), at);
        times.note(&format!("{pod}: {}", by_its_own_clock(&incident, wall)?));
        ends.push(incident);
    }
    endpoints.count(2, BOUND).await?;
    times.seen("both serve, status all well", world.quiet("chat").await?);
    let waited = one_at_a_time(world, frozen, &ends, times)?;
    times.note(&told(&load.felt(frozen)));
    ensure!(world.incidents_since(frozen).len() == 2, "not two incidents: {:?}", world.incidents_since(frozen));
    Ok(waited)
}

/// I2 at every instant, by three witnesses: the stored grants, the agents' own times, and the containers' times by the kubelet. Did the
/// second ask before the first served?
fn one_at_a_time(world: &World<'_>, since: Instant, ends: &[EngineIncident], times: &mut Times) -> Result<bool> {
    let mut frames = 0;
    for frame in world.infds.since(since) {
        let Some(chat) = frame.object.filter(|object| object.name_any() == "chat") else { continue };
        let grants = chat.status.as_ref().map_or(0, |status| status.recovery.grants.len());
        ensure!(grants <= 1, "{grants} grants at once");
        frames += 1;
    }
    let mut spans = Vec::new();
    for incident in ends {
        let timeline = incident.status.as_ref().map(|status| status.timeline.clone()).unwrap_or_default();
        let span = timeline.granted_at.zip(timeline.serving_at).context("a restart without its times")?;
        spans.push((span, incident.spec.pod.clone(), timeline.evidence_at));
    }
    spans.sort();
    let [((_, first_serves), first, _), ((second_granted, _), second, second_asks)] = &spans[..] else {
        anyhow::bail!("not two restarts: {spans:?}")
    };
    ensure!(
        first_serves <= second_granted,
        "{second} was granted at {second_granted}, {first} served only at {first_serves}"
    );
    let asks = second_asks.as_ref().context("a restart without evidence")?;
    let ended = ended_at(world, second)?;
    ensure!(*ended >= **first_serves, "{second} ended at {ended}, {first} served only at {first_serves}");
    times.note(&format!("never two at once: {first} served at {first_serves}, then {second} granted at {second_granted} (asked at {asks})"));
    times.note(&format!(
        "(in all {frames} states of the status at most one grant; {second}'s container ended at {ended})"
    ));
    Ok(asks < first_serves)
}

/// When the previous engine container of `pod` ended, by the kubelet (whole seconds, so the end of that second).
fn ended_at(world: &World<'_>, pod: &str) -> Result<String> {
    let pod = world.pod(pod)?;
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let last =
        statuses.filter_map(|status| status.last_state.as_ref()?.terminated.as_ref()?.finished_at.clone()).next();
    let at = last.context("no previous container")?.0;
    Ok((at + k8s_openapi::jiff::SignedDuration::from_secs(1)).to_string())
}
