//! What a pod says of its replica, as the on-call's commands read it. Pure.

use crds::episode::{CONDITION_EPISODE, Episode};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;

/// Does nobody else of the deployment serve?
pub fn is_last(pod: &Pod, all: &[Pod]) -> bool {
    is_ready(pod) && !all.iter().any(|other| other.uid() != pod.uid() && is_ready(other))
}

/// Does it take requests, by the kubelet's word, and stay?
pub fn is_ready(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && condition(pod, "Ready").is_some_and(|c| c.status == "True")
}

/// Its condition of this type.
pub fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.as_ref()?.iter().find(|condition| condition.type_ == type_)
}

/// The episode that is open, if one is and can be read.
pub fn episode(pod: &Pod) -> Option<Episode> {
    let open = condition(pod, CONDITION_EPISODE).filter(|condition| condition.status == "True")?;
    serde_json::from_str(open.message.as_deref()?).ok().filter(|episode: &Episode| !episode.closed())
}
