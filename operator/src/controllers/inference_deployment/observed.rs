//! What the operator sees of one InferenceDeployment, as plain values: the input of every pure stage.

use std::{collections::BTreeMap, sync::Arc};

use crds::{
    EngineIncident, InferenceDeployment, LABEL_DEPLOYMENT, LABEL_REVISION,
    episode::{
        ANNOTATION_LAST_SERVING, ANNOTATION_RESTART_GRANT, ANNOTATION_RESTART_QUEUED, CONDITION_EPISODE,
        CONDITION_HEALTH_LIE, CONDITION_PROGRESSING, Episode, VOUCHED_MAX,
    },
    fence::{ANNOTATION_FENCE, Fence},
    poison::ANNOTATION_POISON,
    recovery_note::ANNOTATION_RECOVERY,
    restart::{ANNOTATION_RESTART, RestartWish},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::core::v1::{ContainerStatus, Pod, PodCondition, PodStatus},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Resource, ResourceExt};
use serde::Deserialize;
use serde_json::Value;

use super::{build::Child, execute::StepError, hindrance};
use crate::controllers::{incidents::read, metadata::without_managers, nodes::view::NodeView};

/// Annotation by which the ReplicaSet controller orders the pods that it may delete.
pub const ANNOTATION_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Label by which the Deployment controller tells the pods of its ReplicaSets apart: the end of the set's name.
const LABEL_TEMPLATE_HASH: &str = "pod-template-hash";

/// One consistent look: the InferenceDeployment was read first, everything else after it (see `gather`).
#[derive(Debug, Clone)]
pub struct Observed {
    pub infd: InferenceDeployment,
    /// Live children by kind; absent: there is none. `ReplicaSet` is a list, the Deployment's history, where it was asked for.
    pub children: BTreeMap<String, Value>,
    pub pods: Vec<PodView>,
    pub incidents: Vec<EngineIncident>,
    /// All nodes, looked at only while an episode is open or a place is avoided; none where they are not known.
    pub nodes: Arc<[NodeView]>,
    /// Pods, by name, that are labelled as its own and fail the cross-check with their owner: nothing is decided by them or done with them.
    pub doubted: Vec<String>,
    /// Kinds of children whose names are taken by what is on its way out. What another InferenceDeployment of this name has left is not
    /// among `children`.
    pub going: Vec<String>,
    /// Kinds of children that may not be read, with what the server says of it: what is there nobody knows, so nothing of it is written. The
    /// rest goes on without (A14).
    pub unread: BTreeMap<String, StepError>,
}

/// Who runs, where, and what is recorded of them: what episodes and places are judged by.
#[derive(Debug, Clone, Copy)]
pub struct Ground<'a> {
    pub pods: &'a [PodView],
    /// Empty where they are not known.
    pub nodes: &'a [NodeView],
    pub incidents: &'a [EngineIncident],
}

#[cfg(test)]
impl<'a> Ground<'a> {
    /// Of pods alone.
    pub fn of(pods: &'a [PodView]) -> Self {
        Ground { pods, nodes: &[], incidents: &[] }
    }
}

/// A pod as it is read: nobody looks at its containers and volumes, nor at who wrote which field, which are most of its text.
#[derive(Debug, Clone, Deserialize, Resource)]
#[resource(inherit = "Pod")]
pub struct ListedPod {
    #[serde(deserialize_with = "without_managers")]
    pub metadata: ObjectMeta,
    pub spec: Option<Placement>,
    pub status: Option<PodStatus>,
}

/// What is read of a pod's spec.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    pub node_name: Option<String>,
}

/// What a stage needs to know of a pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodView {
    pub name: String,
    pub uid: String,
    /// When it was made, RFC 3339; `None`: it does not say.
    pub created_at: Option<String>,
    /// The version of what was looked at: whatever is destroyed by this look is destroyed only as it was seen.
    pub version: String,
    pub node: String,
    /// The revision of its template.
    pub revision: String,
    /// How often its engine's container was started again.
    pub restarts: i32,
    /// Since when its engine's container runs, by the kubelet, RFC 3339.
    pub engine_since: Option<String>,
    /// For how long this operator has seen it come up again from what it tells of (`elsewhere`).
    pub coming_up_for: SignedDuration,
    /// The kubelet says that its agent does not run: it ends at every start, or cannot be started.
    pub agent_away: bool,
    /// Being deleted: no replica any more.
    pub leaving: bool,
    /// Since when it leaves, RFC 3339.
    pub leaving_since: Option<String>,
    /// When its grace is over, if it leaves, RFC 3339.
    pub grace_until: Option<String>,
    /// The kubelet's `Ready`, which asks the agent.
    pub ready: bool,
    /// The agent's last declaration; `None`: it has not said, or cannot tell.
    pub progressing: Option<bool>,
    /// When its agent gave that word, where such a word ages, RFC 3339.
    pub vouched_at: Option<String>,
    /// Its engine is stalled, and answers 200 to `/health` all the same.
    pub health_lies: bool,
    pub episode: EpisodeView,
    /// The restart grant that stands on the pod.
    pub grant: Option<String>,
    /// The note on the pod that its restart waits for the budget.
    pub queued: Option<String>,
    /// How far recovery goes, as it stands on the pod.
    pub recovery: Option<String>,
    /// The deletion cost that stands on the pod.
    pub deletion_cost: Option<String>,
    /// The mark of the last one that serves stands on the pod.
    pub last_serving: bool,
    /// What its gate was told to refuse (I7), as it stands on the pod.
    pub poison: Option<String>,
    /// A person keeps it out of traffic.
    pub fence: Option<Fence>,
    /// A person wants it restarted.
    pub wish: Option<RestartWish>,
    /// Since when the scheduler finds no place for it, RFC 3339.
    pub unschedulable_since: Option<String>,
    /// Why one of its containers does not start, in words.
    pub hindered: Option<String>,
}

/// The episode that a pod reports.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum EpisodeView {
    #[default]
    None,
    /// The text is not what the contract says; the reason.
    Unreadable(String),
    Known(Box<ReportedEpisode>),
}

/// An episode as it stands on a pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReportedEpisode {
    pub episode: Episode,
    /// Still going on: the condition is `True` and the stage is no final one.
    pub open: bool,
    /// When the condition last changed its status, RFC 3339.
    pub changed_at: Option<String>,
}

impl PodView {
    /// The episode, if one is readable.
    pub fn reported(&self) -> Option<&ReportedEpisode> {
        match &self.episode {
            EpisodeView::Known(reported) => Some(reported),
            _ => None,
        }
    }

    /// The episode, if one is going on.
    pub fn open_episode(&self) -> Option<&Episode> {
        self.reported().filter(|reported| reported.open).map(|reported| &reported.episode)
    }

    /// Does its engine make progress, by an agent that is there? The condition is the agent's last word and outlives it; the kubelet asks the
    /// agent every second, and `Ready` falls when nobody answers. The word of one that does not is no news (I4).
    pub fn progresses(&self, now: Timestamp) -> bool {
        self.ready && self.progressing == Some(true) && !self.word_is_old(now)
    }

    /// Is the agent's word one that ages, and too old? Where nobody fences, `Ready` says nothing of the engine.
    pub fn word_is_old(&self, now: Timestamp) -> bool {
        let at = self.vouched_at.as_deref().and_then(|at| at.parse::<Timestamp>().ok());
        at.is_some_and(|at| now.duration_since(at).as_secs() > i64::try_from(VOUCHED_MAX.as_secs()).unwrap_or(i64::MAX))
    }

    /// Does an open episode tell of what no restart in place mends?
    pub fn needs_another_place(&self) -> bool {
        self.open_episode().is_some_and(Episode::needs_another_place)
    }

    /// Confirmed to make no progress, and not mended yet. One that died is started again by itself.
    pub fn stalled(&self) -> bool {
        self.open_episode().is_some_and(|episode| episode.stage != "Suspect" && episode.class != "Dead")
    }

    /// A person's wish that it be restarted for the stall that is open now.
    pub fn asked(&self) -> Option<&RestartWish> {
        let episode = self.open_episode()?;
        self.wish.as_ref().filter(|wish| wish.episode == episode.id)
    }

    /// Kept out of traffic by an open episode. A person's fence is none: it must not count as a stall of the fleet (I2).
    pub fn fenced(&self) -> bool {
        self.open_episode().is_some_and(|episode| episode.fenced_at.is_some())
    }

    /// A person keeps it out of traffic, and no episode does.
    pub fn fenced_by_person(&self) -> bool {
        self.fence.is_some() && !self.fenced()
    }
}

impl Observed {
    pub fn ground(&self) -> Ground<'_> {
        Ground { pods: &self.pods, nodes: &self.nodes, incidents: &self.incidents }
    }

    /// Is it known what there is of this kind of child? Whoever has not seen the history of a Deployment does not know where it is to go.
    pub fn is_read(&self, kind: &str) -> bool {
        let seen = |kind: &str| !self.unread.contains_key(kind);
        seen(kind) && (kind != "Deployment" || seen("ReplicaSet"))
    }

    /// Those of the wanted children that can be compared with what there is.
    pub fn readable(&self, mut wanted: Vec<Child>) -> Vec<Child> {
        wanted.retain(|child| self.is_read(&child.resource.kind));
        wanted
    }

    /// What the API server says of pods that it refuses to make for the Deployment, while it does.
    pub fn pods_refused(&self) -> Option<&str> {
        let conditions = self.children.get("Deployment")?["status"]["conditions"].as_array()?;
        let refused = conditions.iter().find(|c| c["type"] == "ReplicaFailure" && c["status"] == "True")?;
        refused["message"].as_str().or(Some("no reason given"))
    }
}

/// Is the object with this UID the controller of `live`? A name or a label anybody may write; a UID is given once.
pub fn owned_by(live: &Value, uid: &str) -> bool {
    let owners = live["metadata"]["ownerReferences"].as_array();
    !uid.is_empty() && owners.into_iter().flatten().any(|owner| owner["uid"] == uid && owner["controller"] == true)
}

/// Takes out of `children` what an InferenceDeployment of the same name that was deleted has left: it has another UID, and the garbage
/// collector comes later than who makes the object anew. Returns the kinds of all that goes: nothing can be applied before it is gone.
pub fn set_going_apart(children: &mut BTreeMap<String, Value>, infd: &InferenceDeployment) -> Vec<String> {
    let (name, uid) = (infd.name_any(), infd.uid().unwrap_or_default());
    let predecessor = |owner: &Value| {
        owner["controller"] == true
            && owner["kind"] == *InferenceDeployment::kind(&())
            && owner["name"] == name.as_str()
            && owner["uid"] != uid.as_str()
    };
    let mut going = Vec::new();
    children.retain(|kind, live| {
        let left = live["metadata"]["ownerReferences"].as_array().into_iter().flatten().any(predecessor);
        if left || live["metadata"]["deletionTimestamp"].is_string() {
            going.push(kind.clone());
        }
        !left
    });
    going
}

/// Is this pod one of `infd`'s? The label alone is not enough: anybody may label a pod, or copy a template with its labels. The set that owns it is
/// named whole, or that of a Deployment `<infd>-canary` would be taken for one of ours.
pub fn belongs(pod: &ListedPod, infd: &str) -> bool {
    let hash = pod.labels().get(LABEL_TEMPLATE_HASH).map(String::as_str).unwrap_or_default();
    let by_replica_set = |name: &str| name.strip_prefix(infd).and_then(|rest| rest.strip_prefix('-')) == Some(hash);
    !hash.is_empty()
        && pod.labels().get(LABEL_DEPLOYMENT).is_some_and(|name| name == infd)
        && pod.owner_references().iter().any(|o| {
            o.controller == Some(true)
                && o.kind == "ReplicaSet"
                && o.api_version == "apps/v1"
                && by_replica_set(&o.name)
        })
}

/// Pods that bear the label of `infd` and are not its own by their owner (A16): the one or the other is not what it was, and nobody knows
/// which. One that leaves or has ended needs no one to look at it.
pub fn doubted(pods: &[ListedPod], infd: &str) -> Vec<String> {
    staying(pods, |pod| !belongs(pod, infd))
}

/// The same where there is no such InferenceDeployment: whoever stays is nobody's.
pub fn left_behind(pods: &[ListedPod]) -> Vec<String> {
    staying(pods, |_| true)
}

fn staying(pods: &[ListedPod], wanted: impl Fn(&ListedPod) -> bool) -> Vec<String> {
    let stays = |pod: &&ListedPod| pod.metadata.deletion_timestamp.is_none() && !ended(pod);
    let mut names: Vec<String> =
        pods.iter().filter(stays).filter(|pod| wanted(pod)).map(ResourceExt::name_any).collect();
    names.sort_unstable();
    names
}

fn ended(pod: &ListedPod) -> bool {
    matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
}

/// The pods of `infd` that still run or will. One that ended for good (evicted, or its node shut down) stays as an object
/// until a person deletes it, with the last that its agent said; it is gone all the same: it holds no slot (I2).
pub fn members(pods: &[ListedPod], infd: &str) -> Vec<PodView> {
    pods.iter().filter(|pod| belongs(pod, infd) && !ended(pod)).map(view).collect()
}

/// The view of one pod.
pub fn view(pod: &ListedPod) -> PodView {
    let status = pod.status.as_ref();
    let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    let find = |type_: &str| conditions.iter().find(|c| c.type_ == type_);
    PodView {
        name: pod.name_any(),
        uid: pod.uid().unwrap_or_default(),
        created_at: pod.meta().creation_timestamp.as_ref().map(|time| time.0.to_string()),
        version: pod.resource_version().unwrap_or_default(),
        node: pod.spec.as_ref().and_then(|s| s.node_name.clone()).unwrap_or_default(),
        revision: pod.labels().get(LABEL_REVISION).cloned().unwrap_or_default(),
        restarts: engine(status).map_or(0, |engine| engine.restart_count),
        engine_since: engine(status).and_then(running_since),
        coming_up_for: SignedDuration::ZERO,
        agent_away: agent_away(status),
        leaving: pod.metadata.deletion_timestamp.is_some(),
        leaving_since: leaving_since(&pod.metadata),
        grace_until: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0.to_string()),
        ready: find("Ready").is_some_and(|c| c.status == "True"),
        progressing: find(CONDITION_PROGRESSING).and_then(|c| match c.status.as_str() {
            "True" => Some(true),
            "False" => Some(false),
            _ => None,
        }),
        vouched_at: find(CONDITION_PROGRESSING).and_then(|c| c.last_probe_time.as_ref()).map(|time| time.0.to_string()),
        health_lies: find(CONDITION_HEALTH_LIE).is_some_and(|c| c.status == "True"),
        episode: find(CONDITION_EPISODE).map_or(EpisodeView::None, episode),
        grant: pod.annotations().get(ANNOTATION_RESTART_GRANT).cloned(),
        queued: pod.annotations().get(ANNOTATION_RESTART_QUEUED).cloned(),
        recovery: pod.annotations().get(ANNOTATION_RECOVERY).cloned(),
        deletion_cost: pod.annotations().get(ANNOTATION_DELETION_COST).cloned(),
        last_serving: pod.annotations().contains_key(ANNOTATION_LAST_SERVING),
        poison: pod.annotations().get(ANNOTATION_POISON).cloned(),
        fence: pod.annotations().get(ANNOTATION_FENCE).and_then(|text| Fence::read(text)),
        wish: pod.annotations().get(ANNOTATION_RESTART).and_then(|text| RestartWish::read(text)),
        unschedulable_since: find("PodScheduled")
            .filter(|c| c.status == "False" && c.reason.as_deref() == Some("Unschedulable"))
            .and_then(|c| c.last_transition_time.as_ref().map(|time| time.0.to_string())),
        hindered: hindrance::of(status),
    }
}

/// A pod's `deletionTimestamp` is the end of its grace; whoever shortens the grace moves both.
fn leaving_since(metadata: &ObjectMeta) -> Option<String> {
    let grace = SignedDuration::from_secs(metadata.deletion_grace_period_seconds.unwrap_or(0));
    Some(metadata.deletion_timestamp.as_ref()?.0.checked_sub(grace).ok()?.to_string())
}

fn engine(status: Option<&PodStatus>) -> Option<&ContainerStatus> {
    let containers = status.and_then(|status| status.container_statuses.as_deref()).unwrap_or_default();
    containers.iter().find(|container| container.name == "engine")
}

fn running_since(container: &ContainerStatus) -> Option<String> {
    let running = container.state.as_ref()?.running.as_ref()?;
    running.started_at.as_ref().map(|time| time.0.to_string())
}

fn agent_away(status: Option<&PodStatus>) -> bool {
    let containers = status.and_then(|status| status.init_container_statuses.as_deref()).unwrap_or_default();
    let state = containers.iter().find(|container| container.name == "agent").and_then(|agent| agent.state.as_ref());
    state.is_some_and(|state| state.waiting.is_some() || state.terminated.is_some())
}

/// A condition that is `False` without a text says that nothing has happened yet.
fn episode(condition: &PodCondition) -> EpisodeView {
    let text = condition.message.as_deref().unwrap_or_default();
    if text.is_empty() && condition.status != "True" {
        return EpisodeView::None;
    }
    match read::read(text) {
        Ok(episode) => {
            let open = condition.status == "True" && !episode.closed();
            let changed_at = condition.last_transition_time.as_ref().map(|time| time.0.to_string());
            EpisodeView::Known(Box::new(ReportedEpisode { episode, open, changed_at }))
        }
        Err(error) => EpisodeView::Unreadable(error.to_string()),
    }
}

#[cfg(test)]
#[path = "observed_tests.rs"]
mod tests;
