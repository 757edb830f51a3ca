//! What speaks against a new revision, pure: stalls, crashes and silence of its replicas, and not what a node, a GPU, the cluster, or a cause
//! that befell old replicas as well has done to them.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    EngineIncident,
    episode::{CLASS_UNKILLABLE, Episode},
    rollout::{FailedRevision, FailureReason},
};
use jiff::{SignedDuration, Timestamp};

use super::{
    build::revision,
    escalate::older,
    hindrance,
    observed::{Observed, PodView},
    rollout::{number, own_sets, reason},
};

/// An engine that has ended this often and did not come back crashes.
pub const CRASHES_MIN: i32 = 3;
/// Stalls that were confirmed so close to each other may have one cause. A new replica, of which nothing was learned, is confirmed minutes
/// after an old one that froze in the same moment.
const TOGETHER: SignedDuration = SignedDuration::from_mins(10);

/// What is repeated of what kept replicas from coming up: the memory of a failed revision holds no more than 1024 characters.
const WHY_CHARS_MAX: usize = 600;

/// The API server leaves no more of a `generateName` before it adds five letters (`names.SimpleNameGenerator` of k8s.io/apiserver).
const GENERATED_PREFIX_MAX: usize = 58;

/// Why the revision `wanted` has failed, if it has.
pub fn failure(observed: &Observed, wanted: &str, now: Timestamp) -> Option<FailedRevision> {
    let (reason, message) = stalls(observed, wanted)
        .map(|message| (FailureReason::ReplicaStalled, message))
        .or_else(|| crashes(observed, wanted, now).map(|message| (FailureReason::ReplicaCrashes, message)))
        .or_else(|| late(observed, wanted, now).map(|message| (FailureReason::NoProgress, message)))?;
    Some(FailedRevision { revision: wanted.to_owned(), reason, message, at: now.to_string() })
}

/// A confirmed stall.
#[derive(Debug, Clone, Default)]
struct Stall<'a> {
    class: &'a str,
    confirmed_at: Option<Timestamp>,
    /// No restart in place mends it: it is its GPU's or its node's.
    of_the_place: bool,
}

impl<'a> Stall<'a> {
    fn of(episode: &'a Episode) -> Self {
        let at = episode.confirmed_at.as_deref().or(episode.suspect_at.as_deref());
        let confirmed_at = at.and_then(|at| at.parse().ok());
        Stall { class: &episode.class, confirmed_at, of_the_place: episode.needs_another_place() }
    }

    /// One that is recorded; `None`: it was never confirmed, or no stall.
    fn recorded(incident: &'a EngineIncident) -> Option<Self> {
        let at =
            incident.status.as_ref()?.timeline.confirmed_at.as_deref().filter(|_| incident.spec.class != "Dead")?;
        Some(Stall { class: &incident.spec.class, confirmed_at: at.parse().ok(), of_the_place: of_the_place(incident) })
    }

    fn beside(&self, other: &Stall<'_>) -> bool {
        let both = self.confirmed_at.zip(other.confirmed_at);
        both.is_some_and(|(own, other)| own.duration_since(other).abs() <= TOGETHER)
    }
}

fn of_the_place(incident: &EngineIncident) -> bool {
    let spec = &incident.spec;
    spec.class == CLASS_UNKILLABLE || spec.xids.iter().any(|xid| xid.remedy.outlasts_a_restart())
}

/// More confirmed stalls of new replicas than the policy bears. What befell an old one at the same time is no fault of the revision, also
/// when the old one is well again; while an old one is under suspicion nobody knows yet. In the first rollout of all there is nothing that
/// would be better: recovery is what helps.
fn stalls(observed: &Observed, wanted: &str) -> Option<String> {
    let memory = observed.infd.status.as_ref().map(|status| &status.rollout);
    if memory.is_none_or(|memory| memory.stable.is_empty()) {
        return None;
    }
    // (one that only another place mends may hang for days, and says nothing of the others)
    let hangs =
        |pod: &PodView| !pod.needs_another_place() && pod.open_episode().is_some_and(|episode| episode.class != "Dead");
    if observed.pods.iter().any(|pod| !pod.leaving && is_witness(observed, wanted, &pod.revision) && hangs(pod)) {
        return None;
    }
    let old = old_stalls(observed, wanted);
    let mut new = new_stalls(observed, wanted);
    new.retain(|_, stall| !stall.of_the_place && !old.iter().any(|old| old.beside(stall)));
    let tolerated = usize::try_from(observed.infd.spec.rollout.tolerated_stalls).unwrap_or(0);
    let ((_, pod), Stall { class, .. }) = new.iter().nth(tolerated)?;
    Some(format!("new replica {pod} makes no progress ({class}), {} confirmed in all", count(new.len(), "stall")))
}

/// Those of the replicas of `wanted` that stand, by episode and pod: an id is unique in its pod alone.
fn new_stalls<'a>(observed: &'a Observed, wanted: &str) -> BTreeMap<(&'a str, &'a str), Stall<'a>> {
    let pods = || observed.pods.iter().filter(|pod| !pod.leaving && pod.revision == wanted);
    let open = pods().filter(|pod| pod.stalled()).filter_map(|pod| {
        let episode = pod.open_episode()?;
        Some(((episode.id.as_str(), pod.name.as_str()), Stall::of(episode)))
    });
    let past = observed.incidents.iter().filter(|incident| pods().any(|pod| pod.uid == incident.spec.pod_uid));
    let past = past.filter_map(|i| Some(((i.spec.episode_id.as_str(), i.spec.pod.as_str()), Stall::recorded(i)?)));
    let mut all: BTreeMap<_, Stall<'a>> = BTreeMap::new();
    for (key, stall) in open.chain(past) {
        let known = all.entry(key).or_insert_with(|| stall.clone());
        known.of_the_place |= stall.of_the_place;
    }
    all
}

/// Those of replicas of other revisions, also of some that are gone. One that has failed itself is no witness, nor is a broken GPU.
fn old_stalls<'a>(observed: &'a Observed, wanted: &str) -> Vec<Stall<'a>> {
    let other = |revision: &str| is_witness(observed, wanted, revision);
    let told = observed.pods.iter().filter(|pod| other(&pod.revision)).filter_map(PodView::reported);
    let told = told.filter(|told| told.episode.is_stall() && told.episode.class != "Dead");
    let recorded = observed.incidents.iter().filter(|incident| other(revision_of(observed, incident)));
    let all = told.map(|told| Stall::of(&told.episode)).chain(recorded.filter_map(Stall::recorded));
    all.filter(|stall| !stall.of_the_place).collect()
}

/// The revision of the pod that an incident tells of; empty: nobody knows. Of one that is gone its name tells, by its ReplicaSet's.
fn revision_of<'a>(observed: &'a Observed, incident: &EngineIncident) -> &'a str {
    if let Some(pod) = observed.pods.iter().find(|pod| pod.uid == incident.spec.pod_uid) {
        return &pod.revision;
    }
    let made_it = |set: &&serde_json::Value| {
        set["metadata"]["name"].as_str().is_some_and(|set| is_named_by(set, &incident.spec.pod))
    };
    own_sets(observed).into_iter().find(made_it).map(|set| revision::of(&set["spec"]["template"])).unwrap_or_default()
}

/// Is this the name of a pod that this ReplicaSet made? Where its own is long, as of an InferenceDeployment with 47 or 48 characters, the API
/// server cuts off the dash before it adds its letters.
pub fn is_named_by(set: &str, pod: &str) -> bool {
    let prefix = format!("{set}-");
    let prefix = prefix.get(..GENERATED_PREFIX_MAX).unwrap_or(&prefix);
    pod.strip_prefix(prefix).is_some_and(|rest| !rest.is_empty() && !rest.contains('-'))
}

/// An engine of a new replica that ends again and again, while those of old ones live: who lost a driver or a volume lost it for both.
fn crashes(observed: &Observed, wanted: &str, now: Timestamp) -> Option<String> {
    if old_ones_die(observed, wanted, now) {
        return None;
    }
    // one that a person fenced is not ready for that reason alone, and on a broken GPU no revision would serve
    let counts = |pod: &&PodView| {
        !pod.leaving && pod.fence.is_none() && pod.revision == wanted && !pod.ready && !pod.needs_another_place()
    };
    let mut ends = observed.pods.iter().filter(counts).map(|pod| (pod, ends_by_itself(observed, pod)));
    let (pod, ends) = ends.find(|(_, ends)| *ends >= CRASHES_MIN)?;
    Some(format!("the engine of new replica {} ended {ends} times and does not serve", pod.name))
}

/// Do so many replicas of other revisions die, or died a moment ago, that it is one cause? By the share that holds restarts: among many one ends
/// now and then. One that has failed itself is no witness, nor is a broken GPU.
fn old_ones_die(observed: &Observed, wanted: &str, now: Timestamp) -> bool {
    let other = |revision: &str| is_witness(observed, wanted, revision);
    let dead = |pod: &&PodView| !pod.needs_another_place() && pod.open_episode().is_some_and(|e| e.class == "Dead");
    let old: Vec<&PodView> = observed.pods.iter().filter(|pod| !pod.leaving && other(&pod.revision)).collect();
    let mut died: BTreeSet<&str> = old.iter().copied().filter(dead).map(|pod| pod.uid.as_str()).collect();
    let lately = |incident: &&EngineIncident| {
        let at = incident.status.as_ref().and_then(|status| status.timeline.suspect_at.as_deref()?.parse().ok());
        at.is_some_and(|at: Timestamp| now.duration_since(at).abs() <= TOGETHER)
    };
    let deaths = observed.incidents.iter().filter(|incident| incident.spec.class == "Dead" && !of_the_place(incident));
    let deaths = deaths.filter(lately).filter(|incident| other(revision_of(observed, incident)));
    died.extend(deaths.map(|incident| incident.spec.pod_uid.as_str()));
    let percent = usize::try_from(observed.infd.spec.recovery.hold_percent).unwrap_or(100);
    died.len() * 100 > old.len().max(died.len()) * percent
}

/// May replicas of this revision tell what befell others than those of `wanted`?
fn is_witness(observed: &Observed, wanted: &str, revision: &str) -> bool {
    let failed = observed.infd.status.iter().flat_map(|status| &status.rollout.failed);
    !revision.is_empty() && revision != wanted && !failed.into_iter().any(|failed| failed.revision == revision)
}

/// How often the engine ended, nobody had ended it, and it did not come back. A kill was a stall's, which is borne or not as one
/// (`toleratedStalls`).
fn ends_by_itself(observed: &Observed, pod: &PodView) -> i32 {
    let counts_not = |incident: &&EngineIncident| {
        let status = incident.status.as_ref();
        let killed = status.is_some_and(|status| status.timeline.killed_at.is_some());
        let dead = incident.spec.class == "Dead";
        let came_back = dead && status.is_some_and(|status| status.outcome.as_deref() == Some("Recovered"));
        killed || came_back || (dead && of_the_place(incident))
    };
    let own = observed.incidents.iter().filter(|incident| incident.spec.pod_uid == pod.uid);
    let mut other: Vec<&str> = own.filter(counts_not).map(|incident| incident.spec.episode_id.as_str()).collect();
    other.extend(pod.open_episode().filter(|episode| episode.killed_at.is_some()).map(|episode| episode.id.as_str()));
    other.sort_unstable();
    other.dedup();
    pod.restarts.saturating_sub(i32::try_from(other.len()).unwrap_or(i32::MAX))
}

/// The Deployment's own clock, which runs over operators: no new replica came to count in time.
fn late(observed: &Observed, wanted: &str, now: Timestamp) -> Option<String> {
    let live = observed.children.get("Deployment")?;
    let current = number(&live["status"]["observedGeneration"]) >= number(&live["metadata"]["generation"]);
    let by_hand = observed.pods.iter().any(|pod| pod.revision == wanted && pod.fence.is_some());
    if !current || by_hand || revision::of(&live["spec"]["template"]) != wanted || lacks_places(observed, wanted, now) {
        return None;
    }
    let seconds = observed.infd.spec.rollout.progress_deadline_seconds;
    let overdue = match reason(live, "Progressing") {
        "ProgressDeadlineExceeded" => true,
        "NewReplicaSetAvailable" => never_came(observed, wanted, seconds, now),
        _ => false,
    };
    overdue.then(|| {
        let why = hindrance::of_pods(observed.pods.iter().filter(|pod| pod.revision == wanted));
        let why: String = why.chars().take(WHY_CHARS_MAX).collect();
        let why = if why.is_empty() { why } else { format!(": {why}") };
        format!("no new replica came to deliver within {seconds} s{why}")
    })
}

/// Do replicas of this revision deliver, and those alone not for which the cluster has no place?
fn lacks_places(observed: &Observed, wanted: &str, now: Timestamp) -> bool {
    let new = || observed.pods.iter().filter(|pod| pod.revision == wanted && !pod.leaving);
    new().any(|pod| pod.progresses(now)) && new().all(|pod| pod.ready || pod.unschedulable_since.is_some())
}

/// A template that came while there were no replicas was there at once, and the Deployment's clock does not run for those that come later.
fn never_came(observed: &Observed, wanted: &str, seconds: i32, now: Timestamp) -> bool {
    let (age, now) = (SignedDuration::from_secs(seconds.into()), now.to_string());
    let waits = |pod: &&PodView| {
        let old = pod.created_at.as_deref().is_some_and(|at| older(at, age, &now));
        old && !pod.ready && pod.restarts == 0 && pod.open_episode().is_none()
    };
    let mut new = observed.pods.iter().filter(|pod| pod.revision == wanted && !pod.leaving).peekable();
    new.peek().is_some() && new.all(|pod| waits(&pod))
}

fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
