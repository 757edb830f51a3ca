//! Which places new pods keep away from, pure. A pod that restarts did not cure is replaced, and its successor must not get
//! the same broken GPU (F3); an engine that outlives SIGKILL still owns its GPU (I5); and a GPU that the driver says needs a reset, or
//! its node a restart, serves nobody (F1).
//!
//! Bounded twice, so that avoiding never strands a deployment: by time, and by share of the nodes on which a pod could run
//! at all. And where a pod that came after it finds no place all the same, everything is lifted at once: a suspicion is worth less
//! than a replica. One that had none before waits for something else, and would be given just the place that is avoided. But where the
//! pod of that place was leaving already, it may be the successor, who waits for just this place; and where that place is left by all
//! of ours and could take a pod, it is just what is missing. What is broken is broken all the same, and is kept apart from it: whoever
//! looks after nodes must hear of it ([`broken`]).

use crds::{
    Avoided, AvoidedBecause, Grant, GrantAction, InferenceDeployment, RecoveryStatus,
    episode::Episode,
    inference_deployment::Recovery,
    xid::{XIDS_MAX, Xid},
};
use jiff::{SignedDuration, Timestamp};

use super::{
    escalate::duration_of,
    observed::{Ground, PodView},
    plan::Replacement,
};
use crate::controllers::nodes::{
    boot,
    fits::Needs,
    plan::{in_force, next_end},
    view::NodeView,
};

/// A pod that found no place for so long ends all avoidance.
const STRANDED_AFTER: SignedDuration = SignedDuration::from_secs(30);
/// For so long others are told of what is broken where the policy is to keep away for less, or never.
const TOLD_FOR_MIN: SignedDuration = SignedDuration::from_hours(1);
/// The status holds no more.
const PLACES_MAX: usize = 500;

/// The places to avoid after this look; `fresh` are the grants that are new.
pub fn next(infd: &InferenceDeployment, ground: Ground<'_>, fresh: &[&Grant], now: Timestamp) -> Vec<Avoided> {
    let Ground { pods, nodes, .. } = ground;
    let (held, span) = (held(infd), span_of(&infd.spec.recovery));
    if stranded(infd, ground, now) {
        return Vec::new();
    }
    let held = held.iter().filter(|place| in_force(&place.until, span, now)).cloned();
    let mut places: Vec<Avoided> = held.filter_map(|place| ground.left_of(place)).collect();
    let Some(until) = now.checked_add(span).ok().filter(|_| span > SignedDuration::ZERO) else { return places };
    // asked for by a new place alone: a pass that finds none looks at no node
    let most = || {
        let needs = Needs::of(&infd.spec).shown_by(pods, nodes);
        allowed(nodes, &needs, infd.spec.recovery.avoid_nodes_percent)
    };
    let told = infd.status.as_ref().map(|status| status.recovery.broken.as_slice()).unwrap_or_default();
    for place in ground.bad(fresh, until).into_iter().filter(|place| !was_lifted(told, place)) {
        match places.iter().position(|known| known.node == place.node) {
            Some(at) => learn(&mut places[at], place),
            None if places.len() < PLACES_MAX && there(&places, nodes) < most() => places.push(place),
            None => {}
        }
    }
    places
}

/// The places that are avoided, by the status.
pub fn held(infd: &InferenceDeployment) -> &[Avoided] {
    infd.status.as_ref().map(|s| s.recovery.avoid.as_slice()).unwrap_or_default()
}

/// For how long a place is avoided.
pub fn span_of(recovery: &Recovery) -> SignedDuration {
    duration_of(&recovery.avoid_for).unwrap_or_default()
}

/// Why a place is avoided no longer although its time is not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lifted {
    /// What was wrong with it a restart of its node has mended.
    NodeStartedAnew,
    NoOtherPlace,
}

pub fn why_lifted(place: &Avoided, ground: Ground<'_>) -> Lifted {
    ground.left_of(place.clone()).map_or(Lifted::NodeStartedAnew, |_| Lifted::NoOtherPlace)
}

/// For how long others are told of a place after the last news of it. What is broken there is, whatever the policy of new pods.
pub fn told_for(recovery: &Recovery) -> SignedDuration {
    span_of(recovery).max(TOLD_FOR_MIN)
}

/// The places of which others must hear although new pods do not keep away from them, beside those that are avoided after this look. A process
/// that outlives SIGKILL owns its GPU (I5), and a GPU that needs a reset serves nobody (F1), whether or not there is another place.
pub fn broken(infd: &InferenceDeployment, ground: Ground<'_>, avoid: &[Avoided], now: Timestamp) -> Vec<Avoided> {
    let RecoveryStatus { avoid: avoided, broken: told, .. } =
        infd.status.as_ref().map(|s| s.recovery.clone()).unwrap_or_default();
    let span = told_for(&infd.spec.recovery);
    let grave = |place: &Avoided| place.because != AvoidedBecause::RestartsDidNotCure;
    // whoever is stranded now would be so again by what is still so
    let lifts = stranded(infd, ground, now);
    let avoided = avoided.into_iter().filter(grave).map(|place| Avoided { lifted: lifts, ..place });
    let held = told.iter().cloned().chain(avoided);
    let mut places: Vec<Avoided> = Vec::new();
    let held = held.filter(|place| in_force(&place.until, span, now));
    for place in held.filter_map(|place| ground.left_of(place)) {
        tell(&mut places, place);
    }
    let until = now.checked_add(span).unwrap_or(now);
    // what was lifted stays so for as long as it is so, also when the time of its word is over
    for place in ground.bad(&[], until) {
        let lifted = was_lifted(&told, &place);
        tell(&mut places, Avoided { lifted, ..place });
    }
    // one that is avoided for less is told of as what it was all the same
    let graver = |place: &Avoided, known: &Avoided| gravity(place.because) > gravity(known.because);
    places.retain(|place| !avoid.iter().any(|known| known.node == place.node && !graver(place, known)));
    places.truncate(PLACES_MAX);
    places
}

fn tell(places: &mut Vec<Avoided>, place: Avoided) {
    match places.iter_mut().find(|known| known.node == place.node) {
        Some(known) => learn(known, place),
        None => places.push(place),
    }
}

/// What is so now is seen again at every look; only news move the end (P7): a replacement, and what is graver than what was known. Of Xids
/// nothing is forgotten before it, and the gravest stays what the place is known for: by that word others hear of the node (I5).
fn learn(known: &mut Avoided, place: Avoided) {
    let news = is_news(known, &place);
    let more: Vec<Xid> = place.xids.into_iter().filter(|xid| !known.xids.contains(xid)).collect();
    known.xids.extend(more);
    known.xids.truncate(XIDS_MAX);
    let (old, new) = (gravity(known.because), gravity(place.because));
    if (news || known.boot_id.is_empty()) && !place.boot_id.is_empty() {
        known.boot_id = place.boot_id;
    }
    if news && known.left_at.is_empty() {
        known.left_at = place.left_at;
    }
    if news {
        known.until = place.until;
        known.lifted &= place.lifted;
    } else {
        known.lifted |= place.lifted;
    }
    if new > old || (new == old && place.because == AvoidedBecause::RestartsDidNotCure) {
        (known.gpu_uuids, known.because) = (place.gpu_uuids, place.because);
    }
}

/// Was this place lifted, by what is told of places, and is there no news of it since?
fn was_lifted(told: &[Avoided], place: &Avoided) -> bool {
    told.iter().any(|known| known.lifted && known.node == place.node && !is_news(known, place))
}

/// Is `place` more than what is so now and was so before?
fn is_news(known: &Avoided, place: &Avoided) -> bool {
    gravity(place.because) > gravity(known.because) || place.because == AvoidedBecause::RestartsDidNotCure
}

/// What others must hear of first: an engine that still owns its GPU, then a GPU that serves nobody, then restarts that were in vain.
fn gravity(because: AvoidedBecause) -> u8 {
    match because {
        AvoidedBecause::RestartsDidNotCure => 0,
        AvoidedBecause::GpuFault => 1,
        AvoidedBecause::Unkillable => 2,
    }
}

impl Ground<'_> {
    /// The places of these pods that are bad, until then.
    fn bad(&self, fresh: &[&Grant], until: Timestamp) -> Vec<Avoided> {
        self.pods.iter().filter_map(|pod| self.bad_place(pod, fresh, until)).collect()
    }

    /// The place of this pod, if it is bad. What was said of it before its node was started anew its agent has not taken back yet.
    fn bad_place(&self, pod: &PodView, fresh: &[&Grant], until: Timestamp) -> Option<Avoided> {
        let because = because(pod, fresh).filter(|_| !pod.node.is_empty())?;
        let (gpu_uuids, xids) = pod.open_episode().map(broken_by).unwrap_or_default();
        let boot_id = boot::of_episode(pod, self.incidents, self.nodes).to_owned();
        let (node, until) = (pod.node.clone(), until.to_string());
        let left_at = pod.leaving_since.clone().unwrap_or_default();
        self.left_of(Avoided { node, gpu_uuids, until, because, xids, boot_id, left_at, lifted: false })
    }

    /// Have all of this deployment left the node, and could a pod of it run there? Whether somebody else took what it left is not known.
    fn has_room(&self, infd: &InferenceDeployment, node: &str) -> bool {
        let needs = || Needs::of(&infd.spec).shown_by(self.pods, self.nodes);
        let fits = |view: &NodeView| view.name == node && needs().fit(view);
        !self.pods.iter().any(|pod| pod.node == node) && self.nodes.iter().any(fits)
    }

    fn left_of(&self, place: Avoided) -> Option<Avoided> {
        let now = boot::of(self.nodes, &place.node);
        boot::left_of(place, now)
    }
}

/// Why the place of this pod is bad, if it is.
fn because(pod: &PodView, fresh: &[&Grant]) -> Option<AvoidedBecause> {
    if pod.open_episode().is_some_and(Episode::unkillable) {
        return Some(AvoidedBecause::Unkillable);
    }
    // said of a confirmed stall or a death, whether or not the budget has a slot for it now
    if pod.open_episode().is_some_and(|episode| episode.is_stall() && episode.needs_another_place()) {
        return Some(AvoidedBecause::GpuFault);
    }
    let replaced = fresh.iter().any(|grant| grant.pod_uid == pod.uid && grant.action == GrantAction::Replace);
    replaced.then_some(AvoidedBecause::RestartsDidNotCure)
}

/// The GPUs of the engine, and the Xids among what it tells that no restart mends. Those name their GPUs where they are known.
fn broken_by(episode: &Episode) -> (Vec<String>, Vec<Xid>) {
    let xids: Vec<Xid> = episode.xids.iter().filter(|xid| xid.remedy.outlasts_a_restart()).cloned().collect();
    (episode.gpu_uuids.clone(), xids)
}

/// Of how many places there is a node. One that is gone takes no share; when it comes back there may be more than the share allows, or no other
/// place at all, which a pod that finds none ends ([`stranded`]).
fn there(places: &[Avoided], nodes: &[NodeView]) -> usize {
    places.iter().filter(|place| nodes.iter().any(|node| node.name == place.node)).count()
}

/// How many nodes may be avoided at once: a share of those on which a pod could run, one of two, never the last.
fn allowed(nodes: &[NodeView], needs: &Needs, percent: i32) -> usize {
    let count = nodes.iter().filter(|node| needs.fit(node)).count();
    let share = count * usize::try_from(percent).unwrap_or(0) / 100;
    share.max(1).min(count.saturating_sub(1))
}

/// Has a pod waited for a place for too long, and only since there were places to avoid, or since one of them was left? Or whatever
/// it waited for before, and there is room for it on one of them?
fn stranded(infd: &InferenceDeployment, ground: Ground<'_>, now: Timestamp) -> bool {
    let span = span_of(&infd.spec.recovery);
    let read = |at: &str| at.parse::<Timestamp>().ok();
    let waits =
        || ground.pods.iter().filter(|pod| !pod.leaving).filter_map(|pod| read(pod.unschedulable_since.as_deref()?));
    held(infd).iter().any(|place| {
        let Some(began) = read(&place.until).and_then(|until| until.checked_sub(span).ok()) else { return false };
        let from = read(&place.left_at).map_or(began, |left| left.min(began));
        // the scheduler's time is in whole seconds
        let of_it = |at: Timestamp| from.duration_since(at) < SignedDuration::from_secs(1);
        let long = |at: &Timestamp| now.duration_since((*at).max(began)) >= STRANDED_AFTER;
        waits().filter(long).any(of_it) || (waits().any(|at| long(&at)) && ground.has_room(infd, &place.node))
    })
}

/// The nodes that must be marked before these pods are deleted: name, and time until which.
pub fn marks(places: &[Avoided], pods: &[PodView], replaces: &[Replacement]) -> Vec<(String, String)> {
    let leaves = |place: &&Avoided| {
        pods.iter().any(|pod| pod.node == place.node && replaces.iter().any(|leaving| leaving.uid == pod.uid))
    };
    places.iter().filter(leaves).map(|place| (place.node.clone(), place.until.clone())).collect()
}

/// When to look again so that what ends by time ends in time; `None`: nothing is avoided.
pub fn recheck(places: &[Avoided], pods: &[PodView], now: Timestamp) -> Option<SignedDuration> {
    let end = next_end(places.iter().map(|place| place.until.clone()), now)?;
    let waits = pods.iter().any(|pod| pod.unschedulable_since.is_some());
    Some(if waits { end.min(SignedDuration::from_secs(5)) } else { end })
}

#[cfg(test)]
#[path = "avoid_tests.rs"]
mod tests;
