//! `truebeat kubectl fence|unfence POD`: a person takes a replica out of traffic and puts it back. It writes one annotation
//! on the pod and waits until the pod shows it; the agent shuts the gate, and nothing is restarted for it (I1).

use std::time::Duration;

use anyhow::{Context, bail};
use crds::episode::CONDITION_PROGRESSING;
use crds::fence::{ANNOTATION_FENCE, FENCED_BY_PERSON, Fence};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde_json::Value;
use tokio::time::{Instant, timeout};

use super::pods::{condition, fence, fenced, is_last, is_ready, others_serve};
use super::word::{Word, pod_of_ours, who, written};
use crate::bundle::on_one_line;

/// The kubelet hands the annotation on within a minute at worst, seconds as a rule.
const SEEN_MAX: Duration = Duration::from_secs(90);
pub const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A look that takes longer has met an API server, or a connection to it, that is gone: the next one may find another.
pub const LOOK_MAX: Duration = Duration::from_secs(10);

/// What a person wants.
#[derive(Debug, Clone)]
pub struct Wish {
    pub pod: String,
    /// `Some`: fence, with the reason in words; `None`: unfence.
    pub fence: Option<String>,
    /// Even where nobody else serves.
    pub even_if_last: bool,
}

/// What is to be done about it.
#[derive(Debug)]
pub struct Asked {
    pub word: Word,
    /// It serves now, so that somebody else has to.
    needs_another: bool,
}

/// What is to be written; `None`: it stands there already.
///
/// # Errors
/// No such pod, none of Truebeat's, the last one that serves, or no fence that could be taken off.
pub async fn ask(client: &Client, namespace: &str, wish: &Wish) -> anyhow::Result<Option<Asked>> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let name = &wish.pod;
    let (pod, deployment) = pod_of_ours(&pods, namespace, name, "fence it").await?;
    match (&wish.fence, fence(&pod)) {
        (None, Some(_)) => {
            let word = Word::of(&pod, ANNOTATION_FENCE, Value::Null);
            Ok(Some(Asked { word, needs_another: false }))
        }
        // taken off a moment ago, and its agent has yet to read so
        (None, None) if says_by_person(&pod) => Ok(None),
        (None, None) => bail!(
            "pod {name} bears no person's fence: there is nothing to take off. Why a pod is out of traffic is told by `truebeat kubectl why {name} -n {namespace}`"
        ),
        (Some(_), Some(stands)) => {
            eprintln!(
                "truebeat: pod {name} is {} already, and that fence stands",
                on_one_line(&fenced(&stands)).collect::<String>()
            );
            Ok(None)
        }
        (Some(why), None) => {
            if !wish.even_if_last && is_last(&pod, &replicas(&pods, &deployment).await?) {
                bail!(
                    "{name} is the last replica of {deployment} that serves: its clients would have nobody (I3); --even-if-last fences it all the same"
                );
            }
            let fence = Fence::of(&who(client).await, &written(jiff::Timestamp::now()), why);
            let word = Word::of(&pod, ANNOTATION_FENCE, Value::String(serde_json::to_string(&fence)?));
            Ok(Some(Asked { word, needs_another: is_ready(&pod) && !wish.even_if_last }))
        }
    }
}

/// Looks once more when it is written: of two who fence the last two replicas at the same moment neither has seen the other's word. A look that
/// fails changes nothing.
///
/// # Errors
/// Nobody else serves now, and the fence is off again, or cannot be taken off.
pub async fn confirm(client: &Client, namespace: &str, wish: &Wish, asked: &Asked) -> anyhow::Result<()> {
    if !asked.needs_another {
        return Ok(());
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let seen = async {
        let (pod, deployment) = pod_of_ours(&pods, namespace, &wish.pod, "fence it").await?;
        let last = !others_serve(&pod, &replicas(&pods, &deployment).await?);
        anyhow::Ok(last.then_some(deployment))
    };
    let Ok(Ok(Some(deployment))) = timeout(LOOK_MAX, seen).await else { return Ok(()) };
    let name = &wish.pod;
    asked.word.taken_back().write(client, namespace).await.with_context(|| {
        format!(
            "no other replica of {deployment} serves, or all of them are being fenced, and the fence of {name} stands; \
             `truebeat kubectl unfence {name} -n {namespace}` takes it off"
        )
    })?;
    bail!(
        "no other replica of {deployment} serves, or all of them are being fenced: the fence of {name} is off again (I3); --even-if-last fences it all the same"
    )
}

async fn replicas(pods: &Api<Pod>, deployment: &str) -> anyhow::Result<Vec<Pod>> {
    let all = pods.list(&super::members(deployment)).await.context("could not list the deployment's pods")?;
    Ok(all.items)
}

/// Waits until the pod shows it: out of traffic by the agent's word that a person wants it so, or in it again. Says so, with the time it took.
/// Readiness alone says too little: a replica that is out of traffic for a reason of its own may be back before the kubelet has handed the
/// annotation on.
///
/// # Errors
/// It does not show within a minute and a half; the wish stands all the same.
pub async fn wait(client: &Client, namespace: &str, wish: &Wish) -> anyhow::Result<String> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let (name, since) = (&wish.pod, Instant::now());
    let wanted = wish.fence.is_none();
    let (mut heard, mut out, mut gone) = (false, false, false);
    let shows = async {
        loop {
            let pod = timeout(LOOK_MAX, pods.get_opt(name)).await.ok().and_then(Result::ok);
            heard = pod.is_some();
            gone = matches!(pod, Some(None));
            if gone {
                return;
            }
            if let Some(pod) = pod.flatten() {
                out = !is_ready(&pod);
                if out != wanted && says_by_person(&pod) != wanted {
                    return;
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let seen = timeout(SEEN_MAX, shows).await.is_ok();
    let (written, after) = (if wanted { "the fence is off" } else { "the fence is written" }, SEEN_MAX.as_secs());
    match (seen, wanted) {
        (_, true) if gone => bail!("pod {name} is gone meanwhile: there is no fence to take off"),
        (_, false) if gone => Ok(format!("pod {name} is gone meanwhile: it takes no requests")),
        (true, true) => Ok(format!("pod {name} is Ready again after {:.1} s", since.elapsed().as_secs_f64())),
        (true, false) => Ok(format!("pod {name} takes no new requests after {:.1} s", since.elapsed().as_secs_f64())),
        (false, _) if !heard => bail!(
            "{written}, but the API server has not said within {after} s whether pod {name} shows it; look again with \
             `kubectl get pod {name} -n {namespace}`"
        ),
        (false, false) if out => bail!(
            "{written}, and pod {name} takes no requests, but its agent has not said within {after} s that it has read the fence: \
             `truebeat kubectl why {name} -n {namespace}`"
        ),
        (false, true) if !out => bail!(
            "{written}, and pod {name} is Ready, but its agent has not said within {after} s that it has read so: \
             `truebeat kubectl why {name} -n {namespace}`"
        ),
        (false, true) => bail!(
            "{written}, but pod {name} is not Ready after {after} s: `truebeat kubectl why {name} -n {namespace}`"
        ),
        (false, false) => bail!("{written}, but pod {name} is still Ready after {after} s: is its agent new enough?"),
    }
}

/// Does its agent say that a person keeps it out of traffic?
fn says_by_person(pod: &Pod) -> bool {
    condition(pod, CONDITION_PROGRESSING).is_some_and(|c| c.reason.as_deref() == Some(FENCED_BY_PERSON))
}

#[cfg(test)]
#[path = "fence_tests.rs"]
mod tests;
