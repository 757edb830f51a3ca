//! `truebeat kubectl restart POD`: a person's word that a stalled replica be restarted now, although restarts are held or have to wait. It writes
//! one annotation on the pod, and no spec: Git knows nothing of it. The operator grants the restart, and the agent fences, saves the
//! evidence and kills as ever (I1, I2, I6).

use std::time::Duration;

use anyhow::{Context, bail};
use crds::episode::{ANNOTATION_RESTART_GRANT, CONDITION_PROGRESSING, Episode};
use crds::fence::Fence;
use crds::inference_deployment::RecoveryMode;
use crds::restart::{ANNOTATION_RESTART, RestartWish};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client, ResourceExt};
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::fence::{LOOK_EVERY, LOOK_MAX};
use super::pods::{condition, episode, is_last, mode};
use super::word::{Word, pod_of_ours, who, written};
use crate::bundle::on_one_line;

/// An operator that leads looks every two seconds while something is open.
const GRANTED_MAX: Duration = Duration::from_secs(30);

/// What a person wants.
#[derive(Debug, Clone)]
pub struct Wish {
    pub pod: String,
    pub reason: String,
    /// Even where nobody else serves.
    pub even_if_last: bool,
}

/// What was asked for: this stall of this pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    uid: String,
    episode: String,
    deployment: String,
    /// A restart is in vain: the replacement is what was asked for, and a key for the restart that still stands on the pod is no news.
    in_vain: bool,
}

/// What is asked for, and what is to be written.
///
/// # Errors
/// No such pod, none of Truebeat's, one without a confirmed stall, or the last one that serves.
pub async fn ask(client: &Client, namespace: &str, wish: &Wish) -> anyhow::Result<(Asked, Word)> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (pod, deployment) = pod_of_ours(&pods, namespace, &wish.pod, "restart it").await?;
    let episode = confirmed(&pod)?;
    let all = pods.list(&super::members(&deployment)).await.context("could not list the deployment's pods")?;
    if is_last(&pod, &all.items) && !wish.even_if_last {
        bail!(
            "{} is the last replica of {deployment} in traffic: its clients would have nobody while it restarts (I3); --even-if-last restarts it all the same",
            wish.pod
        );
    }
    let word = Fence::of(&who(client).await, &written(Timestamp::now()), &wish.reason);
    let text = serde_json::to_string(&RestartWish { word, episode: episode.id.clone() })?;
    let said = Word::of(&pod, ANNOTATION_RESTART, Value::String(text));
    let (uid, in_vain) = (pod.uid().unwrap_or_default(), episode.awaits_replacement());
    Ok((Asked { uid, episode: episode.id, deployment, in_vain }, said))
}

/// Waits until the restart is granted, and says how to follow it.
///
/// # Errors
/// It is not granted in time; the wish stands until this stall is over.
pub async fn wait(client: &Client, namespace: &str, name: &str, asked: &Asked) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (since, mut heard) = (Instant::now(), false);
    let granted = async {
        loop {
            let pod = timeout(LOOK_MAX, pods.get_opt(name)).await.ok().and_then(Result::ok);
            heard = pod.is_some();
            if let Some(what) = pod.and_then(|pod| seen(pod.as_ref(), asked)) {
                return what;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let after = GRANTED_MAX.as_secs();
    match timeout(GRANTED_MAX, granted).await {
        Ok(what) => Ok(format!(
            "pod {name}: {what} after {:.1} s; follow it with `truebeat kubectl why {name} -n {namespace}`",
            since.elapsed().as_secs_f64()
        )),
        Err(_) if !heard => bail!(
            "the wish is written, but the API server has not said within {after} s whether it is granted; look again with \
             `truebeat kubectl why {name} -n {namespace}`"
        ),
        Err(_) => bail!(
            "the wish is written and stands until this stall is over, but nobody has granted it within {after} s; what it waits for is said by \
             `truebeat kubectl why {} -n {namespace}`, under EnginesProgressing or RestartsHeld; where neither says it, see whether an operator leads",
            asked.deployment
        ),
    }
}

/// What has come of it; `None`: nothing yet.
fn seen(pod: Option<&Pod>, asked: &Asked) -> Option<&'static str> {
    let Some(pod) = pod.filter(|pod| pod.uid().as_deref() == Some(&asked.uid)) else { return Some("it was replaced") };
    if pod.metadata.deletion_timestamp.is_some() {
        return Some("it is being replaced");
    }
    if !asked.in_vain && pod.annotations().get(ANNOTATION_RESTART_GRANT) == Some(&asked.episode) {
        return Some("its restart is granted");
    }
    let now = episode(pod);
    let over = now.as_ref().is_none_or(|now| now.id != asked.episode);
    let waits = now.is_some_and(|now| now.awaits_grant() || (asked.in_vain && now.awaits_replacement()));
    over.then_some("its stall is over").or((!waits).then_some("its restart is under way"))
}

/// The stall that a restart would end, or a replacement where a restart is in vain.
fn confirmed(pod: &Pod) -> anyhow::Result<Episode> {
    let name = pod.name_any();
    if pod.metadata.deletion_timestamp.is_some() {
        bail!("pod {name} is on its way out already");
    }
    if let Some(mode) = mode(pod).filter(|mode| *mode != RecoveryMode::Recover) {
        bail!("spec.recovery.mode is {mode:?} for pod {name}: nothing is restarted in it, whoever asks");
    }
    let Some(episode) = episode(pod) else {
        let word = condition(pod, CONDITION_PROGRESSING);
        let word: String =
            on_one_line(word.and_then(|c| c.reason.as_deref()).unwrap_or("no word of its agent")).collect();
        bail!(
            "pod {name} has no confirmed stall ({word}), and without one nothing is killed (I1); to have another in its place, `kubectl delete pod \
             {name}` drains it first"
        );
    };
    if episode.awaits_grant() || episode.awaits_replacement() {
        return Ok(episode);
    }
    match episode.stage.as_str() {
        "Suspect" => bail!(
            "pod {name} is suspected and not confirmed to stall (I1): it goes on by itself, or ask again when it is"
        ),
        stage => {
            bail!("the restart of pod {name} is under way already ({})", on_one_line(stage).collect::<String>())
        }
    }
}

#[cfg(test)]
#[path = "restart_tests.rs"]
mod tests;
