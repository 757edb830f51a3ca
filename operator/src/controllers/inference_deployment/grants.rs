//! The restart budget (I1, I2), pure: which grants stay, which end, which are new.
//!
//! A grant is a slot held by one pod, by UID. It ends when the agent says that the episode is over, when the pod is gone, when it does
//! not go although it must and its successor is up, or when a restart has had its time (`restarts`); never because evidence is missing: a
//! doubt keeps the slot taken, so the budget can only be used too little.
//! The caller stores the result under the resourceVersion of the status it came from *before* any pod learns of it.

use crds::{Grant, GrantAction, episode::Episode, inference_deployment::RecoveryMode};
use jiff::{SignedDuration, Timestamp};

use super::{
    escalate::{self, Hold, REPLACE_MAX, Terms, older},
    observed::{EpisodeView, PodView},
    restarts,
};
use crate::wall::ahead;

/// How long a note that a restart waits stands before it is renewed. The agents take it for fresh a good deal longer.
const QUEUED_FRESH: SignedDuration = SignedDuration::from_secs(20);

/// The grants after this look. `grants` were read before `pods`.
pub fn next(grants: &[Grant], pods: &[PodView], terms: &Terms<'_>, now: &str) -> Vec<Grant> {
    let mut kept: Vec<Grant> = grants.iter().filter_map(|grant| keep(grant, pods, terms, now)).collect();
    // (a restart that is in vain waits for nothing, and its replacement may be tried)
    let nothing_to_do = !terms.trial && !pods.iter().any(wants_slot);
    if terms.mode != RecoveryMode::Recover || nothing_to_do {
        return kept;
    }
    let is_held = matches!(terms.hold, Hold::Deployment(_) | Hold::Fleet(_));
    if !is_held {
        make_way(&mut kept, pods, terms, now);
    }
    let before = kept.len();
    let unheld = Terms { places: terms.places.clone().unheld(), ..terms.clone() };
    // A person's word goes before a common cause, and before nobody's budget.
    kept.extend(within_budget(&kept, pods, &unheld, now, |pod| pod.asked().is_some()));
    if !is_held {
        // whose replacement nobody lets be made comes after those who need no refused call
        let given_up = |pod: &PodView| !holds_slot(&kept, pod) && holds_slot(grants, pod);
        let others = within_budget(&kept, pods, terms, now, |pod| !given_up(pod));
        kept.extend(others);
        kept.extend(within_budget(&kept, pods, terms, now, |_| true));
    }
    if kept.len() == before && terms.trial {
        on_trial(&mut kept, pods, &unheld, now);
    }
    kept
}

/// Ends the grants of replacements that nobody lets be made (somebody's policy protects the pods, his webhook is down), for as long as one takes that
/// does not come up, where somebody else waits. Where nobody does they are tried on; and so are those whose pods would ask for no other.
fn make_way(kept: &mut Vec<Grant>, pods: &[PodView], terms: &Terms<'_>, now: &str) {
    if waiting(kept, pods, terms, now).is_empty() {
        return;
    }
    let refused = |grant: &Grant| {
        let pod = pods.iter().find(|pod| pod.uid == grant.pod_uid);
        grant.action == GrantAction::Replace
            && pod.is_some_and(wants_slot)
            && older(&grant.granted_at, REPLACE_MAX, now)
    };
    kept.retain(|grant| !refused(grant));
}

/// Who waits for a slot and has none, the one that waits longest first; the name makes the order total. Where one is tried the last one that
/// still serves comes last (I3).
fn waiting<'a>(kept: &[Grant], pods: &'a [PodView], terms: &Terms<'_>, now: &str) -> Vec<&'a PodView> {
    let mut waiting: Vec<&PodView> =
        pods.iter().filter(|pod| terms.may_restart(pod, now) && !holds_slot(kept, pod)).collect();
    let spared = |pod: &PodView| terms.trial && pod.last_serving;
    waiting.sort_by_key(|pod| (spared(pod), pod.open_episode().and_then(|e| e.suspect_at.clone()), pod.name.clone()));
    waiting
}

/// As many new grants for those that are `wanted` as the budgets allow beside those that stand.
fn within_budget(
    kept: &[Grant],
    pods: &[PodView],
    terms: &Terms<'_>,
    now: &str,
    wanted: impl Fn(&PodView) -> bool,
) -> Vec<Grant> {
    let waiting = waiting(kept, pods, terms, now).into_iter().filter(|pod| wanted(pod));
    let slots = usize::try_from(terms.max_unavailable).unwrap_or(0).min(terms.fleet.count);
    let free = slots.saturating_sub(taken(kept, pods, terms, now));
    // A restart that was granted elsewhere and is in vain has its slot already.
    let (away, waiting): (Vec<_>, Vec<_>) = waiting.partition(|pod| in_restart(pod, terms));
    let own = slots.saturating_sub(kept.len());
    // Whoever waits in a place that is full lets the next one pass.
    let mut places = terms.places.clone();
    places.take_all(kept);
    let mut fits: Vec<&PodView> = away.into_iter().filter(|pod| places.admit(&pod.node)).take(own).collect();
    fits.extend(waiting.into_iter().filter(|pod| places.admit(&pod.node)).take(free));
    fits.into_iter().filter_map(|pod| grant(pod, escalate::action(pod, terms, now), terms, now)).collect()
}

/// The one recovery that is tried where restarts are held (`trials`), within the same budgets. Whose restart is in vain has its slot already.
fn on_trial(kept: &mut Vec<Grant>, pods: &[PodView], terms: &Terms<'_>, now: &str) {
    let holder = |grant: &Grant| pods.iter().find(|pod| pod.uid == grant.pod_uid);
    let follows = |grant: &Grant| holder(grant).and_then(|pod| follower(grant, pod, terms, now));
    if let Some((old, fresh)) = kept.iter_mut().find_map(|grant| follows(grant).map(|fresh| (grant, fresh))) {
        *old = fresh;
        return;
    }
    kept.extend(within_budget(kept, pods, terms, now, |_| true).into_iter().next());
}

/// The grants among these that `held` has not: new keys. By their time alone they are none, for that may have been put right.
pub fn fresh<'a>(grants: &'a [Grant], held: &'a [Grant]) -> impl Iterator<Item = &'a Grant> {
    let same = |a: &Grant, b: &Grant| (&a.pod_uid, &a.episode, a.action) == (&b.pod_uid, &b.episode, b.action);
    grants.iter().filter(move |grant| !held.iter().any(|before| same(grant, before)))
}

/// The grant that should stand on this pod as an annotation now, if it does not yet.
pub fn to_announce<'a>(grants: &'a [Grant], pod: &PodView) -> Option<&'a Grant> {
    let mine = |grant: &&Grant| grant.pod_uid == pod.uid && grant.action == GrantAction::Restart;
    let grant = grants.iter().find(mine)?;
    let awaited = wants_slot(pod) && pod.open_episode().is_some_and(|episode| episode.id == grant.episode);
    (awaited && pod.grant.as_deref() != Some(&grant.episode)).then_some(grant)
}

/// Is the replacement of this pod granted for what it stalls by now, and is it still there? One that went on by itself meanwhile is spared,
/// and what began on it since is another case: a mere suspicion deletes nothing (I1). Nor is one deleted, whatever was granted before, while
/// nobody may be made in its place (A18).
pub fn to_replace(grants: &[Grant], pod: &PodView, terms: &Terms<'_>) -> bool {
    let Some(episode) = pod.open_episode().filter(|_| !terms.nobody_follows(pod)) else { return false };
    let mine = |grant: &&Grant| {
        grant.pod_uid == pod.uid && grant.action == GrantAction::Replace && grant.episode == episode.id
    };
    grants.iter().filter(mine).any(|grant| wants_slot(pod) || restarts::is_left(pod) || restarts::fails(grant, pod))
}

/// The note for a pod that asks for a restart while the budget has no slot, if the one that stands there is not fresh.
/// It tells the agent that an operator is there (I1). Nothing takes it off: a note that is not renewed says nothing.
pub fn to_queue(grants: &[Grant], pod: &PodView, mode: RecoveryMode, now: Timestamp) -> Option<String> {
    if mode != RecoveryMode::Recover || !wants_slot(pod) || holds_slot(grants, pod) {
        return None;
    }
    let episode = &pod.open_episode()?.id;
    let age = noted(pod).and_then(|at| at.parse().ok()).map(|at: Timestamp| now.duration_since(at));
    let fresh = age.is_some_and(|age| age >= SignedDuration::ZERO && age < QUEUED_FRESH);
    (!fresh).then(|| format!("{episode}@{now:.0}"))
}

/// When its agent was told last that the restart which it asks for now has to wait.
pub fn noted(pod: &PodView) -> Option<&str> {
    let (id, at) = pod.queued.as_deref()?.rsplit_once('@')?;
    (id == pod.open_episode()?.id).then_some(at)
}

fn grant(pod: &PodView, action: GrantAction, terms: &Terms<'_>, now: &str) -> Option<Grant> {
    Some(Grant {
        episode: pod.open_episode()?.id.clone(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        action,
        node: pod.node.clone(),
        domain: terms.places.domain(&pod.node).to_owned(),
        granted_at: now.to_owned(),
        restarts: Some(pod.restarts),
    })
}

/// Another key for the holder of `old`. A pod stays on its node: where no node can be listed now, its failure domain is the recorded one, or
/// the domain's budget would forget it.
fn renewed(old: &Grant, pod: &PodView, action: GrantAction, terms: &Terms<'_>, now: &str) -> Option<Grant> {
    let mut fresh = grant(pod, action, terms, now)?;
    if fresh.domain.is_empty() && fresh.node == old.node {
        fresh.domain.clone_from(&old.domain);
    }
    Some(fresh)
}

/// The same grant with a time that can be counted from. One that a former leader dated ahead, by a clock that was wrong, says nothing of when
/// it was: it is taken for new, once, or whatever ends by its age would wait for that clock.
fn dated(grant: &Grant, now: &str) -> Grant {
    let times = grant.granted_at.parse::<Timestamp>().ok().zip(now.parse::<Timestamp>().ok());
    let ahead = times.is_some_and(|(at, now)| ahead(at, now));
    Grant { granted_at: if ahead { now.to_owned() } else { grant.granted_at.clone() }, ..grant.clone() }
}

/// The grant as it lives on, or `None` where it is over.
fn keep(grant: &Grant, pods: &[PodView], terms: &Terms<'_>, now: &str) -> Option<Grant> {
    let grant = &dated(grant, now);
    let pod = pods.iter().find(|pod| pod.uid == grant.pod_uid);
    if let Some(restart) = pod.and_then(|pod| turned_back(grant, pod, terms, now)) {
        return Some(restart);
    }
    if grant.action == GrantAction::Replace || pod.is_some_and(|pod| escalate::lingers(pod, now)) {
        return (!escalate::replaced(grant, pods, terms, now)).then(|| grant.clone());
    }
    let pod = pod?; // its pod is gone
    let Some(reported) = pod.reported() else {
        // Nothing readable: over if the pod may serve, which the agent says through the readiness probe. An agent that tells of nothing has lost
        // its book (with its node), and waits for no key: its pod is a start like any other.
        let forgotten = pod.episode == EpisodeView::None && older(&grant.granted_at, terms.patience, now);
        return (!pod.ready && !forgotten).then(|| grant.clone());
    };
    if !reported.open {
        return None;
    }
    let held = held(pod, terms);
    if reported.episode.id != grant.episode && wants_slot(pod) {
        // The same pod stalled anew: the slot is still its own, if it may have it, and the grant must name the new episode.
        let may = !held && terms.may_restart(pod, now);
        return renewed(grant, pod, escalate::action(pod, terms, now), terms, now).filter(|_| may);
    }
    if reported.episode.id != grant.episode && older(&grant.granted_at, restarts::PATIENCE_MIN, now) {
        return None; // by the pod's own word that restart is over: what it tells of asks for none
    }
    if let Some(follower) = follower(grant, pod, terms, now).filter(|_| !held) {
        return Some(follower);
    }
    (!restarts::overdue(pod, &grant.granted_at, terms, now)).then(|| grant.clone())
}

/// A new key is a new grant, whoever holds the slot: a common cause and a mode that grants nothing hold for it too.
fn held(pod: &PodView, terms: &Terms<'_>) -> bool {
    terms.mode != RecoveryMode::Recover || (terms.holds_at(&pod.node) && pod.asked().is_none())
}

/// The restart that a replacement becomes which is granted and not made yet, where by now nobody may be made in its place (A18): one more that
/// may be in vain is better than no pod.
fn turned_back(grant: &Grant, pod: &PodView, terms: &Terms<'_>, now: &str) -> Option<Grant> {
    let same = !pod.leaving && pod.open_episode().is_some_and(|episode| episode.id == grant.episode);
    let back = same && grant.action == GrantAction::Replace && terms.nobody_follows(pod) && !held(pod, terms);
    back.then(|| Grant { action: GrantAction::Restart, granted_at: now.to_owned(), ..grant.clone() })
}

/// What follows on the slot of a restart that is in vain.
fn follower(grant: &Grant, pod: &PodView, terms: &Terms<'_>, now: &str) -> Option<Grant> {
    if grant.action == GrantAction::Replace {
        return None;
    }
    if pod.open_episode()?.awaits_replacement() && terms.may_restart(pod, now) {
        // After the key it showed that a restart is in vain: by a Xid, or by a process that does not end.
        return renewed(grant, pod, escalate::action(pod, terms, now), terms, now);
    }
    let replaceable = !terms.pods_refused && terms.may_recover(pod, now);
    let fresh = renewed(grant, pod, GrantAction::Replace, terms, now).filter(|_| replaceable)?;
    restarts::in_vain(grant, pod, terms, now).then_some(Grant { restarts: grant.restarts, ..fresh })
}

fn holds_slot(grants: &[Grant], pod: &PodView) -> bool {
    grants.iter().any(|grant| grant.pod_uid == pod.uid)
}

/// Slots in use: the grants, and the pods in the middle of a restart that was granted elsewhere. One that does not end although it was
/// asked to is made up for by its successor.
pub fn taken(grants: &[Grant], pods: &[PodView], terms: &Terms<'_>, now: &str) -> usize {
    let elsewhere = |pod: &&PodView| in_restart(pod, terms) && !holds_slot(grants, pod) && !escalate::lingers(pod, now);
    grants.len() + pods.iter().filter(elsewhere).count()
}

/// In the middle of a restart that somebody granted, be it the agent itself, or an operator whose status was lost. An engine that died by
/// itself was granted nothing and holds nothing up.
fn in_restart(pod: &PodView, terms: &Terms<'_>) -> bool {
    let granted = pod.open_episode().filter(|episode| episode.granted_by.is_some());
    let under_way = granted.is_some_and(|e| matches!(e.stage.as_str(), "Granted" | "Killed" | "Restarting"));
    under_way && !restarts::seen_too_long(pod, terms)
}

/// Only a confirmed stall asks for the second key. The agent takes its evidence meanwhile and, granted, holds the kill
/// until that is done or its time is over (I6). A pod on its way out needs no restart. An engine that died asks for nothing, it is started
/// again anyhow, but where a restart is in vain its pod is replaced, under the same budget (F1).
pub fn wants_slot(pod: &PodView) -> bool {
    let asks = |episode: &Episode| episode.awaits_grant() || episode.awaits_replacement();
    !pod.leaving && !pod.uid.is_empty() && pod.open_episode().is_some_and(asks)
}

#[cfg(test)]
#[path = "grants_tests.rs"]
mod tests;
