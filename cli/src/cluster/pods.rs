//! What a pod says of its replica, as the on-call's commands read it. Pure.

use crds::episode::{CONDITION_EPISODE, Episode};
use crds::fence::{ANNOTATION_FENCE, Fence};
use crds::inference_deployment::RecoveryMode;
use crds::recovery_note::{ANNOTATION_RECOVERY, RecoveryNote};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;

/// Does nobody else of the deployment serve? Whom a person has fenced is about to be out of traffic, though the kubelet may not have handed
/// that on for a minute.
pub fn is_last(pod: &Pod, all: &[Pod]) -> bool {
    is_ready(pod) && !others_serve(pod, all)
}

/// Does somebody else, who bears no person's fence?
pub fn others_serve(pod: &Pod, all: &[Pod]) -> bool {
    let serves = |other: &Pod| is_ready(other) && fence(other).is_none();
    all.iter().any(|other| other.uid() != pod.uid() && serves(other))
}

/// Does it take requests, by the kubelet's word, and stay?
pub fn is_ready(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none() && condition(pod, "Ready").is_some_and(|c| c.status == "True")
}

/// The fence of a person that stands on it.
pub fn fence(pod: &Pod) -> Option<Fence> {
    pod.annotations().get(ANNOTATION_FENCE).and_then(|text| Fence::read(text))
}

/// Who fenced it, when and why, in words.
pub fn fenced(fence: &Fence) -> String {
    let at = if fence.at.is_empty() { String::new() } else { format!(" at {}", fence.at) };
    fence.words() + &at
}

/// How far recovery may go in it, as its agent reads it; `None`: nobody has told.
pub fn mode(pod: &Pod) -> Option<RecoveryMode> {
    pod.annotations().get(ANNOTATION_RECOVERY).and_then(|text| RecoveryNote::mode(text))
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
