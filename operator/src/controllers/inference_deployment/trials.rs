//! One restart on trial under a common cause, pure: a hold that only a person could end would leave a deployment of which nobody serves as it
//! is until somebody wakes up. So it opens as a circuit breaker does: after a while one replica is restarted, the others wait for what comes of
//! it, and each trial that is in vain doubles the pause before the next.
//!
//! A trial is a grant like any other, within every budget (I2), for a confirmed stall (I1). What is remembered of it stands in the status and is
//! written with the grant, so that no operator forgets or repeats it (P1). While nobody knows what comes of it its replica counts as
//! stalled, though it serves: otherwise the first that comes back would end the hold, and a cause that strikes again after seconds
//! would get one restart after another.

use crds::{
    Grant, GrantAction, HoldScope, HoldStatus, PastGrant, Trial, TrialOutcome, inference_deployment::RecoveryMode,
};
use jiff::{SignedDuration, Timestamp};

use super::{
    escalate::{Hold, Terms, in_stall, older},
    fleet::Fleet,
    grants::wants_slot,
    observed::PodView,
    restarts::{self, PATIENCE_MAX},
};
use crate::wall::ahead;

/// Whoever was restarted on trial serves for so long before that is taken for evidence: what hangs under its first requests hangs by then.
const PROOF: SignedDuration = SignedDuration::from_mins(1);
/// The longest pause between two trials, unless the first is longer: a person who lifts the cause waits no longer than that.
const PAUSE_MAX: SignedDuration = SignedDuration::from_hours(1);
/// A hold that comes back so soon is the same one, and what was tried under it before was in vain.
const REMEMBERED: SignedDuration = SignedDuration::from_hours(1);
const FAILED_MAX: i32 = 1000;
/// Of a fleet that is held.
const ONE_AT_A_TIME: &str = "one at a time in the whole fleet is tried";
/// Between the operator's clock and the API server's. A pod that is replaced is gone before its successor is made.
const CLOCKS_DIFFER: SignedDuration = SignedDuration::from_secs(5);

/// How many of this deployment, by what is stored, are on trial and do not stall: they count all the same.
pub fn unproven(hold: Option<&HoldStatus>, pods: &[PodView]) -> usize {
    let trial = hold.and_then(HoldStatus::pending);
    let counted = |trial: &Trial| pods.iter().any(|pod| pod.uid == trial.pod_uid && in_stall(pod));
    usize::from(trial.is_some_and(|trial| !counted(trial)))
}

/// The same by what another deployment's status alone says; of one whose pod is replaced that it counts already cannot be told.
pub fn unproven_elsewhere(hold: &HoldStatus) -> usize {
    let replaced = |trial: &Trial| trial.action == GrantAction::Replace;
    usize::from(hold.pending().is_some_and(|trial| trial.serves_since.is_some() || replaced(trial)))
}

/// What is remembered of the hold after this look: when it began or was over, and what has come of the trial.
pub fn next(
    before: Option<&HoldStatus>,
    (held, pods): (&[Grant], &[PodView]),
    terms: &Terms<'_>,
    now: Timestamp,
) -> Option<HoldStatus> {
    let begun = |failed| HoldStatus { since: now.to_string(), failed, scope: scope(terms), ..HoldStatus::default() };
    let holds = terms.hold != Hold::No;
    let Some(before) = before else { return holds.then(|| begun(0)) };
    let known = judged(widened(dated(before, now), scope(terms), now), (held, pods), terms, now);
    // whoever was the only one to wait is on trial and waits no more: it stands until it is known what comes of that
    let holds = holds || (known.stands() && known.trial.as_ref().is_some_and(|trial| on_its_way(trial, pods)));
    match (known.over_at.as_deref(), holds) {
        (None, true) | (Some(_), false) => Some(known),
        (None, false) if known.trial.is_none() && known.failed == 0 => None,
        (None, false) => Some(HoldStatus { over_at: Some(now.to_string()), ..known }),
        (Some(over_at), true) if older(over_at, REMEMBERED, &now.to_string()) => Some(begun(0)),
        (Some(_), true) => {
            // one that had failed is counted
            let counts = known.trial.as_ref().is_some_and(|trial| trial.outcome != TrialOutcome::Failed);
            Some(begun(known.failed.saturating_add(i32::from(counts)).min(FAILED_MAX)))
        }
    }
}

/// May one restart be tried now? Not by whoever has not looked at the fleet. Where the fleet is held there is one trial at a time in all of it,
/// and what is in vain anywhere makes everybody wait. What helps elsewhere shortens nobody's own pause.
pub fn due(
    hold: Option<&HoldStatus>,
    (fleet, terms): (Option<&Fleet>, &Terms<'_>),
    after: SignedDuration,
    now: Timestamp,
) -> bool {
    let Some(fleet) = fleet.filter(|fleet| fleet.unseen.is_none()) else { return false };
    let Some(own) = hold.filter(|hold| hold.stands() && !after.is_zero()) else { return false };
    let others = if terms.fleet_alarmed { fleet.holds.as_slice() } else { &[] };
    let others = || others.iter().filter(|other| other.stands());
    // what came of the last one is stored, and told, before the next one is granted
    let just_known = own.trial.as_ref().is_some_and(|trial| trial.ended_at == Some(now.to_string()));
    if just_known || own.pending().is_some() || others().filter_map(HoldStatus::pending).any(|trial| lasts(trial, now))
    {
        return false;
    }
    let failed = others().fold(own.failed, |sum, other| sum.saturating_add(other.failed));
    let known = own.trial.iter().chain(others().filter_map(|other| other.trial.as_ref()));
    let last = known.max_by_key(|trial| trial.granted_at.parse::<Timestamp>().ok());
    let next = last.filter(|trial| trial.outcome == TrialOutcome::Failed);
    let next = next.and_then(|trial| Some(trial.ended_at.as_ref()?.parse::<Timestamp>().ok()? + pause(after, failed)));
    let first = earliest(own, after);
    first.is_some_and(|first| now >= first) && next.is_none_or(|next| now >= next)
}

/// May it still be under way? One that another operator wrote and nobody looks after any more keeps nobody waiting for ever.
pub fn lasts(trial: &Trial, now: Timestamp) -> bool {
    !older(&trial.granted_at, PATIENCE_MAX + PROOF * 2, &now.to_string())
}

/// The memory of the hold with the trial that is granted by this look, if one is: whatever is new where restarts are held.
pub fn with_trial<'a>(
    hold: Option<HoldStatus>,
    mut fresh: impl Iterator<Item = &'a &'a Grant>,
    terms: &Terms<'_>,
    pods: &[PodView],
) -> Option<HoldStatus> {
    let mut hold = hold?;
    let asked = |uid: &str| pods.iter().any(|pod| pod.uid == uid && pod.asked().is_some());
    let tried = |grant: &Grant| terms.trial && terms.holds_at(&grant.node) && !asked(&grant.pod_uid);
    let Some(grant) = fresh.find(|grant| tried(grant)) else { return Some(hold) };
    let run = hold.trial.as_ref().filter(|trial| trial.outcome == TrialOutcome::Helped);
    hold.trial = Some(Trial {
        pod: grant.pod.clone(),
        pod_uid: grant.pod_uid.clone(),
        episode: grant.episode.clone(),
        action: grant.action,
        granted_at: grant.granted_at.clone(),
        run_since: run.map_or(&grant.granted_at, |trial| &trial.run_since).clone(),
        ..Trial::default()
    });
    Some(hold)
}

/// Since when the run of trials goes on of which nobody has failed, if one does.
pub fn run_since(hold: Option<&HoldStatus>) -> Option<Timestamp> {
    let trial = hold.filter(|hold| hold.stands())?.trial.as_ref()?;
    trial.run_since.parse().ok().filter(|_| trial.outcome != TrialOutcome::Failed)
}

/// Was this granted in the run of trials that goes on since then? It is remembered for as long, however soon it counts no more otherwise.
pub fn in_run(past: &PastGrant, since: Option<Timestamp>) -> bool {
    let granted = past.granted_at.parse::<Timestamp>().ok();
    granted.zip(since).is_some_and(|(at, since)| at >= since)
}

/// What is tried, in words that time alone does not change; they follow "no restart is granted". Of a hold that is not stored yet no time is
/// told: where an older schema prunes what is remembered it is new at each look, and would be told anew each time (P7). In a fleet that is
/// held what others try makes the pause longer, and never shorter than what is told.
pub fn words(hold: &HoldStatus, is_stored: bool, after: SignedDuration, fleet: bool) -> String {
    let at = earliest(hold, after).filter(|_| is_stored).map(|at| format!("{at:.0}"));
    let next = |one: &str| match (&at, humantime::format_duration(after.unsigned_abs())) {
        (Some(at), _) if fleet => format!("{ONE_AT_A_TIME}, here none before {at}"),
        (Some(at), _) => format!("{one} is tried at {at}"),
        (None, after) if fleet => format!("{ONE_AT_A_TIME}, here none before they have been held for {after}"),
        (None, after) => format!("{one} is tried when they have been held for {after}"),
    };
    match hold.trial.as_ref().map(|trial| (trial, trial.outcome)) {
        Some((trial, TrialOutcome::Pending)) => {
            format!(" but that of pod {}, on trial since {}", trial.pod, trial.granted_at)
        }
        _ if after.is_zero() => String::new(),
        None => format!("; {}", next("one")),
        Some((trial, TrialOutcome::Helped)) => {
            let follows = if fleet { ONE_AT_A_TIME } else { "and the next one follows" };
            let waits = widened_since(hold, trial).then(|| next("the next one"));
            format!("; that of pod {} on trial helped, {}", trial.pod, waits.as_deref().unwrap_or(follows))
        }
        Some((trial, TrialOutcome::Failed)) => {
            let (pod, failed, here) = (&trial.pod, hold.failed, if fleet { " here" } else { "" });
            format!("; that of pod {pod} on trial was in vain (so far {failed}{here}), {}", next("the next one"))
        }
    }
}

/// How much the hold of this look is about. One that is this deployment's own is the fleet's as well, where that is held.
fn scope(terms: &Terms<'_>) -> Option<HoldScope> {
    match terms.hold {
        Hold::No => None,
        Hold::Fleet(_) => Some(HoldScope::Fleet),
        Hold::Deployment(_) | Hold::Place(_) if terms.fleet_alarmed => Some(HoldScope::Fleet),
        Hold::Deployment(_) => Some(HoldScope::Deployment),
        Hold::Place(_) => Some(HoldScope::Place),
    }
}

/// The same, where it is about more now than ever since it began: another cause may be behind that, and whoever is paged for it looks first.
/// Of what narrows, or was as wide before, the same replicas have waited all the while.
fn widened(mut hold: HoldStatus, scope: Option<HoldScope>, now: Timestamp) -> HoldStatus {
    let wider = hold.stands() && scope > hold.scope;
    if wider {
        // (of what an older operator began nobody knows whether it is wider)
        hold.widened_at = hold.scope.map(|_| now.to_string());
        hold.scope = scope;
    }
    hold
}

/// Has the hold widened since this trial was granted?
fn widened_since(hold: &HoldStatus, trial: &Trial) -> bool {
    let widened = hold.widened_at.as_deref().and_then(|at| at.parse::<Timestamp>().ok());
    widened.zip(trial.granted_at.parse().ok()).is_some_and(|(widened, granted)| widened > granted)
}

/// Before then no trial is due here, whatever is tried elsewhere.
fn earliest(hold: &HoldStatus, after: SignedDuration) -> Option<Timestamp> {
    let read = |at: &str| at.parse::<Timestamp>().ok();
    let stands_since = read(hold.widened_at.as_ref().unwrap_or(&hold.since))?;
    let Some(trial) = &hold.trial else {
        // what failed by then failed before this one began
        return Some(stands_since + pause(after, hold.failed));
    };
    let anew = if widened_since(hold, trial) { pause(after, 0) } else { SignedDuration::ZERO };
    let ended = trial.ended_at.as_deref().filter(|_| trial.outcome == TrialOutcome::Failed).and_then(read);
    let stood = stands_since + anew;
    Some(ended.map_or(stood, |ended| stood.max(ended + pause(after, hold.failed))))
}

/// Is it not known yet what comes of this trial, or known to be in vain and its pod not back? Where that one waits for a slot again the terms say
/// whether it is held.
fn on_its_way(trial: &Trial, pods: &[PodView]) -> bool {
    let away = |pod: &PodView| pod.uid == trial.pod_uid && in_stall(pod) && !wants_slot(pod);
    match trial.outcome {
        TrialOutcome::Pending => true,
        TrialOutcome::Failed => pods.iter().any(away),
        TrialOutcome::Helped => false,
    }
}

fn pause(after: SignedDuration, failed: i32) -> SignedDuration {
    let doublings = u32::try_from(failed).unwrap_or(0);
    let factor = 2_i32.checked_pow(doublings).unwrap_or(i32::MAX);
    let most = PAUSE_MAX.max(after);
    after.checked_mul(factor).unwrap_or(most).min(most)
}

/// What has come of the trial.
fn judged(mut hold: HoldStatus, (held, pods): (&[Grant], &[PodView]), terms: &Terms<'_>, now: Timestamp) -> HoldStatus {
    let at = now.to_string();
    let stands = hold.stands();
    let Some(trial) = hold.trial.as_mut().filter(|trial| stands && trial.outcome != TrialOutcome::Failed) else {
        return hold;
    };
    let pending = trial.outcome == TrialOutcome::Pending;
    // a person who says that nothing be restarted ends the run, and what was not known by then stays so
    let ended = terms.mode != RecoveryMode::Recover;
    if ended || (pending && is_void(trial, pods)) {
        hold.trial = None;
        return hold;
    }
    let mut failed = stalls_again(trial, (held, pods), terms.recent);
    if pending && !failed {
        let serves = match pods.iter().find(|pod| pod.uid == trial.pod_uid) {
            Some(pod) => serves(pod, now),
            None => pods.iter().any(|pod| made_since(&trial.granted_at, pod) && serves(pod, now)),
        };
        trial.serves_since = trial.serves_since.take().filter(|_| serves).or_else(|| serves.then(|| at.clone()));
        let in_vain = in_vain(trial, (held, pods), terms, &at);
        failed = in_vain || (!serves && older(&trial.granted_at, terms.patience + PROOF, &at));
        if trial.serves_since.as_deref().is_some_and(|since| older(since, PROOF, &at)) {
            (trial.outcome, trial.ended_at) = (TrialOutcome::Helped, Some(at.clone()));
        }
    }
    if failed {
        (trial.outcome, trial.ended_at, trial.serves_since) = (TrialOutcome::Failed, Some(at), None);
        hold.failed = hold.failed.saturating_add(1).min(FAILED_MAX);
    }
    hold
}

/// Does nothing come of it that would say whether a restart helps? Its pod was taken away by a scale-in or a drain, or a person set it aside.
fn is_void(trial: &Trial, pods: &[PodView]) -> bool {
    let pod = pods.iter().find(|pod| pod.uid == trial.pod_uid);
    let goes = trial.action == GrantAction::Restart && pod.is_none_or(|pod| pod.leaving);
    goes || pod.is_some_and(|pod| pod.fence.is_some())
}

/// Is it known before its time that this restart does not help: does its engine end at each start, or must its pod be replaced?
fn in_vain(trial: &Trial, (held, pods): (&[Grant], &[PodView]), terms: &Terms<'_>, now: &str) -> bool {
    let mine = |grant: &&Grant| grant.pod_uid == trial.pod_uid && grant.episode == trial.episode;
    let pod = pods.iter().find(|pod| trial.action == GrantAction::Restart && pod.uid == trial.pod_uid);
    pod.is_some_and(|pod| {
        let asks =
            pod.open_episode().is_some_and(|episode| episode.id == trial.episode && episode.awaits_replacement());
        asks || held.iter().find(mine).is_some_and(|grant| restarts::in_vain(grant, pod, terms, now))
    })
}

/// Does anybody wait for a restart who was granted one since this run of trials began, and has used it, or who was made since?
fn stalls_again(trial: &Trial, (held, pods): (&[Grant], &[PodView]), recent: &[PastGrant]) -> bool {
    let since = trial.run_since.parse::<Timestamp>().ok();
    pods.iter().filter(|pod| wants_slot(pod)).any(|pod| {
        let episode = pod.open_episode().map(|episode| episode.id.as_str());
        let unused = held.iter().any(|grant| grant.pod_uid == pod.uid && Some(grant.episode.as_str()) == episode);
        let restarted = || recent.iter().any(|past| past.pod_uid == pod.uid && in_run(past, since));
        !unused && (made_since(&trial.run_since, pod) || restarted())
    })
}

/// Was this pod made since then? The API server dates it, to the second and by its own clock.
fn made_since(at: &str, pod: &PodView) -> bool {
    let made = pod.created_at.as_deref().and_then(|at| at.parse::<Timestamp>().ok());
    made.zip(at.parse::<Timestamp>().ok()).is_some_and(|(made, at)| made >= at - CLOCKS_DIFFER)
}

fn serves(pod: &PodView, now: Timestamp) -> bool {
    !pod.leaving && pod.open_episode().is_none() && pod.progresses(now)
}

/// The same with times that can be counted from. What a former leader dated ahead, by a clock that was wrong, is taken for new, once.
fn dated(hold: &HoldStatus, now: Timestamp) -> HoldStatus {
    let mut hold = hold.clone();
    let put_right = |at: &mut String| {
        if at.parse::<Timestamp>().is_ok_and(|time| ahead(time, now)) {
            *at = now.to_string();
        }
    };
    put_right(&mut hold.since);
    hold.over_at.iter_mut().chain(&mut hold.widened_at).for_each(put_right);
    for trial in hold.trial.iter_mut() {
        [&mut trial.granted_at, &mut trial.run_since].into_iter().for_each(put_right);
        trial.serves_since.iter_mut().chain(&mut trial.ended_at).for_each(put_right);
    }
    hold
}

#[cfg(test)]
#[path = "trials_tests.rs"]
mod tests;
