//! What a replica says of itself: kubelet's half of a pod's status and the agent's conditions, as the operator will read them.

use std::net::Ipv4Addr;

use anyhow::{Context, Result};
use crds::episode::{CONDITION_EPISODE, CONDITION_PROGRESSING, Episode};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

/// Requests at the same time when many speak.
const AT_ONCE: usize = 32;

/// What is to be said.
#[derive(Debug, Clone, PartialEq)]
pub enum Says {
    /// Ready, and its engine progresses.
    Serves,
    /// Fenced and confirmed: episode `id` waits for its restart. The kubelet has seen the agent's 503.
    Stalls { id: String, class: &'static str },
    /// Episode `.0` is over, and it serves again.
    Recovered(String),
}

impl Says {
    /// An ordinary stall.
    pub fn stalls(id: &str) -> Self {
        Says::Stalls { id: id.to_owned(), class: "StepStalled" }
    }

    fn serves(&self) -> bool {
        !matches!(self, Says::Stalls { .. })
    }

    /// The condition of the episode: status, reason, message.
    fn episode(&self, now: &str) -> Result<(&'static str, String, String)> {
        let at = Some(now.to_owned());
        let known = |id: &String, class: &str, stage: &str| Episode {
            id: id.clone(),
            class: class.to_owned(),
            stage: stage.to_owned(),
            reasons: vec!["simulated".to_owned()],
            suspect_at: at.clone(),
            fenced_at: at.clone(),
            confirmed_at: at.clone(),
            serving_at: at.clone().filter(|_| stage == "Recovered"),
            ..Episode::default()
        };
        Ok(match self {
            Says::Serves => ("False", "None".to_owned(), String::new()),
            Says::Stalls { id, class } => {
                ("True", "Stalled".to_owned(), serde_json::to_string(&known(id, class, "Stalled"))?)
            }
            Says::Recovered(id) => {
                ("False", "Recovered".to_owned(), serde_json::to_string(&known(id, "StepStalled", "Recovered"))?)
            }
        })
    }
}

/// The status patch by which `pod` says it, as kubelet and agent would write it together.
///
/// # Errors
/// Never in practice: an episode is JSON.
pub fn status(pod: &Pod, says: &Says, now: Timestamp) -> Result<Value> {
    let (second, milli) =
        (now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(), now.strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string());
    let word = |yes: bool| if yes { "True" } else { "False" };
    let serves = says.serves();
    let (open, stage, episode) = says.episode(&milli)?;
    let condition = |type_: &str, status: &str, reason: &str, message: &str| json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": second});
    let known = pod.status.as_ref().and_then(|status| status.pod_ip.clone());
    let ip = known.unwrap_or_else(|| address(&pod.uid().unwrap_or_default()).to_string());
    let engine = json!({
        "name": "engine", "image": "simulated", "imageID": "", "restartCount": 0, "ready": serves, "started": true,
        "state": {"running": {"startedAt": second}},
    });
    Ok(json!({"status": {
        "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "containerStatuses": [engine],
        "conditions": [
            condition("Initialized", "True", "", ""),
            condition("ContainersReady", word(serves), "", ""),
            condition("Ready", word(serves), "", ""),
            condition(CONDITION_PROGRESSING, word(serves), "Simulated", ""),
            condition(CONDITION_EPISODE, open, &stage, &episode),
        ],
    }}))
}

/// An address of this pod's own, by its UID: two pods of one fleet hardly ever share one, and nothing is sent there.
fn address(uid: &str) -> Ipv4Addr {
    let hash = uid.bytes().fold(5381_u32, |hash, byte| hash.wrapping_mul(33) ^ u32::from(byte));
    let [_, b, c, d] = hash.to_be_bytes();
    Ipv4Addr::new(10, b, c, d.clamp(1, 254))
}

/// Writes it, as an administrator.
///
/// # Errors
/// In the API server's words.
pub async fn say(client: &Client, pod: &Pod, says: &Says) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    let patch = Patch::Strategic(status(pod, says, Timestamp::now())?);
    api.patch_status(&pod.name_any(), &PatchParams::default(), &patch).await.with_context(|| pod.name_any())?;
    Ok(())
}

/// Many at once: each pod says what is beside it.
///
/// # Errors
/// The first that fails.
pub async fn say_all(client: &Client, words: Vec<(&Pod, Says)>) -> Result<()> {
    let one = |(pod, says): (&Pod, Says)| {
        let pod = pod.clone();
        async move { say(client, &pod, &says).await }
    };
    stream::iter(words.into_iter().map(one)).buffer_unordered(AT_ONCE).try_collect().await
}

/// Ends what the API server only marked: where no kubelet is, nobody confirms that a pod has ended.
///
/// # Errors
/// In the API server's words; a pod that is gone is fine.
pub async fn bury(client: &Client, pod: &Pod) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
    match api
        .delete(&pod.name_any(), &DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::background() })
        .await
    {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map(drop).with_context(|| pod.name_any()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_not_ready_and_waits_for_a_grant() {
        let said = status(&Pod::default(), &Says::stalls("e-1"), Timestamp::UNIX_EPOCH).unwrap();
        let conditions = said["status"]["conditions"].as_array().unwrap();
        let find = |type_: &str| conditions.iter().find(|c| c["type"] == type_).unwrap().clone();
        assert_eq!(find("Ready")["status"], "False");
        let episode: Episode = serde_json::from_str(find(CONDITION_EPISODE)["message"].as_str().unwrap()).unwrap();
        assert!(episode.awaits_grant() && episode.fenced_at.is_some());
        let said = status(&Pod::default(), &Says::Recovered("e-1".into()), Timestamp::UNIX_EPOCH).unwrap();
        assert_eq!(said["status"]["conditions"][2]["status"], "True");
    }
}
