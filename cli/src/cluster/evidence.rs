//! `truebeat kubectl bundles|bundle`: the evidence of a replica, from the agent in its pod, or, where bundles are kept on a claim, from any
//! agent that mounts it: then also of pods that are gone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use agent::forensics::bundle;
use agent::forensics::shelf::{FILE_BYTES_MAX, Shelved};
use anyhow::{Context, bail, ensure};
use crds::LABEL_DEPLOYMENT;
use crds::agent::AGENT_PROGRAM;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use kube::{Api, Client, ResourceExt};
use tokio::time::timeout;

use super::{DEADLINE, Named, exec};
use crate::bundle::on_one_line;

/// Of one agent's list.
const LIST_BYTES_MAX: u64 = 4 << 20;
/// So many places are asked at once, and so many agents of one place one after the other.
const ASKED_AT_ONCE: usize = 8;
const TRIES_MAX: usize = 3;
const LIST_DEADLINE: Duration = Duration::from_secs(20);
const SEND_DEADLINE: Duration = Duration::from_secs(120);
const POD_NAME_CHARS_MAX: usize = 63;

/// Whose evidence is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub deployment: String,
    /// The pod that wrote it.
    pub pod: Option<String>,
    /// The episode that it is about.
    pub episode: Option<String>,
}

/// What `name` stands for: an incident, a pod (also one that is gone, if an incident tells of it) or an InferenceDeployment.
///
/// # Errors
/// Nothing of that name, or no right to read it.
pub async fn wanted(client: &Client, namespace: &str, name: &str) -> anyhow::Result<Wanted> {
    Ok(match super::named(client, namespace, name).await? {
        Some(Named::Incident(incident)) => {
            let spec = incident.spec;
            Wanted { deployment: spec.deployment, pod: Some(spec.pod), episode: Some(spec.episode_id) }
        }
        Some(Named::Pod(pod)) => {
            let Some(deployment) = pod.labels().get(LABEL_DEPLOYMENT) else {
                bail!("pod {name} belongs to no InferenceDeployment: there is no agent in it");
            };
            Wanted { deployment: deployment.clone(), pod: Some(name.to_owned()), episode: None }
        }
        Some(Named::Deployment(_)) => Wanted { deployment: name.to_owned(), pod: None, episode: None },
        None => {
            let gone = super::of_gone_pod(client, namespace, name).await?;
            let gone = gone.into_iter().next().context("no incident tells of it")?;
            Wanted { deployment: gone.spec.deployment, pod: Some(name.to_owned()), episode: None }
        }
    })
}

/// What lies there, as far as it could be told.
#[derive(Debug)]
pub struct Found {
    /// The bundles of what is wanted, newest first, each with the pod whose agent has it.
    pub bundles: Vec<(String, Shelved)>,
    /// Where others may lie: who was not asked, or did not answer, and why.
    pub unheard: Vec<String>,
}

/// Asks all who may have some.
///
/// # Errors
/// No agent runs that could be asked, or there is nothing of those that answer while others do not.
pub async fn list(client: &Client, namespace: &str, wanted: &Wanted) -> anyhow::Result<Found> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let all = timeout(DEADLINE, pods.list(&super::members(&wanted.deployment)))
        .await
        .context("the API server lists no pods in time")?;
    let all = all.context("could not list the deployment's pods (may you read pods?)")?;
    let (asked, mut unheard) = shelves(namespace, &all.items, wanted)?;
    let answers = asked.iter().map(|shelf| ask(&pods, shelf, wanted));
    let answers: Vec<_> = futures::stream::iter(answers).buffered(ASKED_AT_ONCE).collect().await;
    let mut found = Vec::new();
    for answer in answers {
        match answer {
            Ok((pod, shelved)) => found.extend(shelved.into_iter().map(|bundle| (pod.clone(), bundle))),
            Err(error) => unheard.push(format!("{error:#}")),
        }
    }
    let bundles = of_interest(found, wanted);
    ensure!(!bundles.is_empty() || unheard.is_empty(), "{}", unheard.join("; "));
    Ok(Found { bundles, unheard })
}

/// Brings one bundle here, the newest where several are meant, and says where it is and what.
///
/// # Errors
/// There is none, a newer one may lie where nobody answers, its agent does not answer, what comes is not what was told, or it cannot be written here.
pub async fn fetch(
    client: &Client,
    namespace: &str,
    wanted: &Wanted,
    to: Option<&Path>,
) -> anyhow::Result<(PathBuf, Shelved)> {
    let Found { bundles, unheard } = list(client, namespace, wanted).await?;
    ensure!(
        wanted.episode.is_some() || unheard.is_empty(),
        "which bundle of {} is the newest cannot be told ({}); name a pod that answers, or an incident, or one of `truebeat kubectl bundles {}` by --episode",
        wanted.deployment,
        unheard.join("; "),
        wanted.deployment
    );
    let (carrier, found) = bundles.into_iter().next().context(
        "no bundle of it lies there: none was written (of a suspicion and of a fence by hand none is; else its agent's log says why: `kubectl logs POD -c agent`), or twenty newer ones have taken its place",
    )?;
    let Shelved { episode, pod, bytes: told, .. } = &found;
    let file = to.map_or_else(|| bundle::path_of(Path::new(""), episode), Path::to_owned);
    ensure!(!file.is_dir(), "{} is a folder; --to names the file to write", file.display());
    let of = |file: &Path| bundle::manifest_of(file).map(|manifest| manifest.episode);
    ensure!(
        to.is_some() || !file.exists() || of(&file).as_ref() == Some(episode),
        "{} is here already, and is not that bundle; --to FILE names another place",
        file.display()
    );
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let words = [AGENT_PROGRAM, "agent", "evidence", "send", "--of", pod.as_str(), "--", episode.as_str()];
    let bytes = exec::output(&pods, &carrier, &words, FILE_BYTES_MAX, SEND_DEADLINE).await?;
    ensure!(bytes.len() as u64 == *told, "{} of {told} bytes came; try again", bytes.len());
    let partial = file.with_added_extension("partial");
    let placed = write_private(&partial, &bytes)
        .with_context(|| format!("could not write {}; --to FILE names another place", file.display()))
        .and_then(|()| {
            ensure!(
                of(&partial).as_ref() == Some(episode),
                "what pod {carrier} sent is no bundle of episode {episode}"
            );
            std::fs::rename(&partial, &file).with_context(|| format!("could not write {}", file.display()))
        });
    if placed.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    placed.map(|()| (file, found))
}

/// Evidence is for whoever fetched it alone, and goes through no link that somebody laid there.
fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?.write_all(bytes)
}

/// One place where bundles lie, and whose agents can tell of it.
#[derive(Debug, PartialEq, Eq)]
struct Shelf {
    agents: Vec<String>,
    /// It is a claim: it holds the bundles of more pods than of those that are asked.
    is_claim: bool,
}

/// Asks one agent after the other until one answers: its name, and what it tells.
async fn ask(pods: &Api<Pod>, shelf: &Shelf, wanted: &Wanted) -> anyhow::Result<(String, Vec<Shelved>)> {
    let mut words = vec![AGENT_PROGRAM, "agent", "evidence", "list"];
    words.extend(wanted.pod.iter().flat_map(|pod| ["--of", pod.as_str()]));
    let mut errors = Vec::new();
    for agent in shelf.agents.iter().take(TRIES_MAX) {
        let answer = exec::output(pods, agent, &words, LIST_BYTES_MAX, LIST_DEADLINE).await;
        match answer.and_then(|bytes| parse(&bytes).with_context(|| format!("the agent of pod {agent} told no list"))) {
            Ok(mut told) => {
                // of another pod's evidence one that has only its own knows nothing
                told.retain(|bundle| shelf.is_claim || bundle.pod == *agent);
                return Ok((agent.clone(), told));
            }
            Err(error) => errors.push(format!("{error:#}")),
        }
    }
    bail!("{}", errors.join("; "))
}

/// Pure: the lines of a list. A pod may say anything, so nothing that could move a cursor comes through.
fn parse(bytes: &[u8]) -> anyhow::Result<Vec<Shelved>> {
    let plain = |text: String| on_one_line(&text).collect();
    let lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let parsed = lines.map(|line| {
        let told: Shelved = serde_json::from_slice(line)?;
        Ok(Shelved {
            episode: plain(told.episode),
            pod: plain(told.pod),
            class: plain(told.class),
            fingerprint: plain(told.fingerprint),
            ..told
        })
    });
    parsed.collect()
}

/// Pure: where to look, and where nobody can tell. A claim is one place, whoever tells of it; without one, each pod is a place of its own.
fn shelves(namespace: &str, pods: &[Pod], wanted: &Wanted) -> anyhow::Result<(Vec<Shelf>, Vec<String>)> {
    let mut running: Vec<&Pod> = pods.iter().filter(|pod| agent_runs(pod)).collect();
    // the pod that wrote it first, if it lives
    running.sort_by_key(|pod| Some(pod.name_any()) != wanted.pod);
    let holders = |claim: &str| -> Shelf {
        let agents = running.iter().filter(|pod| claim_of(pod) == Some(claim)).map(|pod| pod.name_any());
        Shelf { agents: agents.collect(), is_claim: true }
    };
    let claims: BTreeSet<&str> = running.iter().filter_map(|pod| claim_of(pod)).collect();
    let alone = |pod: &&Pod| Shelf { agents: vec![pod.name_any()], is_claim: false };
    let Some(name) = &wanted.pod else {
        ensure!(!running.is_empty(), "no agent of {} runs that could be asked", wanted.deployment);
        let elsewhere = |pod: &&Pod| claim_of(pod).map_or_else(|| has_ended(pod), |claim| claims.contains(claim));
        let silent = pods.iter().filter(|pod| agent_ran(pod) && !elsewhere(pod));
        let silent = silent.map(|pod| format!("the agent of pod {} does not run now", pod.name_any())).collect();
        let own = running.iter().filter(|pod| claim_of(pod).is_none()).map(alone);
        return Ok((own.chain(claims.into_iter().map(holders)).collect(), silent));
    };
    let places = match pods.iter().find(|pod| pod.name_any() == *name) {
        Some(pod) => match claim_of(pod) {
            Some(claim) if claims.contains(claim) => vec![holders(claim)],
            None if agent_runs(pod) => vec![alone(&pod)],
            _ => bail!(
                "the agent of pod {name} does not run now; its evidence lies in the pod or on its claim: do not delete the pod, and see `kubectl describe pod {name} -n {namespace}`"
            ),
        },
        None if claims.is_empty() => bail!(
            "pod {name} is gone, and its evidence with it; `truebeat kubectl why {name} -n {namespace}` has what the incident tells. With spec.agent.evidence.claimName bundles outlive their pods"
        ),
        None => claims.into_iter().map(holders).collect(),
    };
    Ok((places, Vec::new()))
}

fn agent_runs(pod: &Pod) -> bool {
    agent(pod).and_then(|status| status.state.as_ref()).is_some_and(|state| state.running.is_some())
}

/// Does it not run, and has it ever? One that has yet to begin has written nothing.
fn agent_ran(pod: &Pod) -> bool {
    let ended = |state: &Option<ContainerState>| state.as_ref().is_some_and(|state| state.terminated.is_some());
    let ran = |status: &ContainerStatus| status.restart_count > 0 || ended(&status.state) || ended(&status.last_state);
    !agent_runs(pod) && agent(pod).is_some_and(ran)
}

/// It was evicted, or its node went down: an object that stays until a person deletes it. What lay in the pod went with its processes.
fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn agent(pod: &Pod) -> Option<&ContainerStatus> {
    let statuses = pod.status.as_ref()?.init_container_statuses.as_ref()?;
    statuses.iter().find(|status| status.name == "agent")
}

fn claim_of(pod: &Pod) -> Option<&str> {
    let mut volumes = pod.spec.as_ref()?.volumes.as_ref()?.iter();
    let claim = volumes.find(|volume| volume.name == "bundles")?.persistent_volume_claim.as_ref()?;
    Some(&claim.claim_name)
}

/// Pure: each bundle once, of what is wanted, newest first. A claim may be shared by several deployments.
fn of_interest(mut found: Vec<(String, Shelved)>, wanted: &Wanted) -> Vec<(String, Shelved)> {
    let mut seen = BTreeSet::new();
    found.sort_by_key(|(_, bundle)| std::cmp::Reverse(bundle.written_s));
    found.retain(|(_, bundle)| {
        let ours = match &wanted.pod {
            Some(pod) => bundle.pod == *pod,
            None => is_replica(&bundle.pod, &wanted.deployment),
        };
        let meant = wanted.episode.as_ref().is_none_or(|episode| bundle.episode == *episode);
        ours && meant && seen.insert((bundle.pod.clone(), bundle.episode.clone()))
    });
    found
}

/// By its name `DEPLOYMENT-REVISION-REPLICA`: a pod that is gone has no labels any more. Where that is too long the API server cuts the end of
/// what comes before the last five characters.
fn is_replica(pod: &str, deployment: &str) -> bool {
    let Some(rest) = pod.strip_prefix(deployment).and_then(|rest| rest.strip_prefix('-')) else { return false };
    let dashes = rest.matches('-').count();
    dashes == 1 || (dashes == 0 && pod.len() == POD_NAME_CHARS_MAX)
}

#[cfg(test)]
#[path = "evidence_tests.rs"]
mod tests;
