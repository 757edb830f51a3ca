//! The restart budget (I1, I2), pure: which grants stay, which end, which are new.
//!
//! A grant is a slot held by one pod, by UID. It ends when the agent says that the episode is over, when the pod is gone, when it does
//! not go although it must and its successor is up, or when a restart has had its time (`restarts`); never because evidence is missing: a
//! doubt keeps the slot taken, so the budget can only be used too little.
//! The caller stores the result under the resourceVersion of the status it came from *before* any pod learns of it.

use crds::{Grant, GrantAction, episode::Episode, inference_deployment::RecoveryMode};
use jiff::{SignedDuration, Timestamp};

use super::{
    escalate::{self, Hold, Terms},
    observed::PodView,
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
    let before = kept.len();
    let unheld = Terms { places: terms.places.clone().unheld(), ..terms.clone() };
    // A person's word goes before a common cause, and before nobody's budget.
    kept.extend(within_budget(&kept, pods, &unheld, now, |pod| pod.asked().is_some()));
    if !matches!(terms.hold, Hold::Deployment(_) | Hold::Fleet(_)) {
        kept.extend(within_budget(&kept, pods, terms, now, |_| true));
    }
    if kept.len() == before && terms.trial {
        on_trial(&mut kept, pods, &unheld, now);
    }
    kept
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
    let (away, waiting): (Vec<_>, Vec<_>) = waiting.partition(|pod| in_restart(pod, terms, now));
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
/// and what began on it since is another case: a mere suspicion deletes nothing (I1).
pub fn to_replace(grants: &[Grant], pod: &PodView) -> bool {
    let Some(episode) = pod.open_episode() else { return false };
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
    if grant.action == GrantAction::Replace || pod.is_some_and(|pod| escalate::lingers(pod, now)) {
        return (!escalate::replaced(grant, pods, terms, now)).then(|| grant.clone());
    }
    let pod = pod?; // its pod is gone
    let Some(reported) = pod.reported() else {
        // Nothing readable: over only if the pod may serve, which the agent says through the readiness probe.
        return (!pod.ready).then(|| grant.clone());
    };
    if !reported.open {
        return None;
    }
    // A new key is a new grant, whoever holds the slot: a common cause and a mode that grants nothing hold for it too.
    let held = terms.mode != RecoveryMode::Recover || (terms.holds_at(&pod.node) && pod.asked().is_none());
    if reported.episode.id != grant.episode && wants_slot(pod) {
        // The same pod stalled anew: the slot is still its own, if it may have it, and the grant must name the new episode.
        let may = !held && terms.may_restart(pod, now);
        return renewed(grant, pod, escalate::action(pod, terms, now), terms, now).filter(|_| may);
    }
    if reported.episode.id != grant.episode && escalate::older(&grant.granted_at, restarts::PATIENCE_MIN, now) {
        return None; // by the pod's own word that restart is over: what it tells of asks for none
    }
    if let Some(follower) = follower(grant, pod, terms, now).filter(|_| !held) {
        return Some(follower);
    }
    (!restarts::overdue(pod, &grant.granted_at, terms, now)).then(|| grant.clone())
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
    let elsewhere =
        |pod: &&PodView| in_restart(pod, terms, now) && !holds_slot(grants, pod) && !escalate::lingers(pod, now);
    grants.len() + pods.iter().filter(elsewhere).count()
}

/// In the middle of a restart that somebody granted, be it the agent itself, or an operator whose status was lost. An engine that died by
/// itself was granted nothing and holds nothing up.
fn in_restart(pod: &PodView, terms: &Terms<'_>, now: &str) -> bool {
    let granted = pod.open_episode().filter(|episode| episode.granted_by.is_some());
    let under_way = granted.filter(|e| matches!(e.stage.as_str(), "Granted" | "Killed" | "Restarting"));
    let begun = |e: &Episode| e.granted_at.clone().or(e.suspect_at.clone()).unwrap_or_default();
    under_way.is_some_and(|e| !restarts::overdue(pod, &begun(e), terms, now))
}

/// Only a confirmed stall asks for the second key. The agent takes its evidence meanwhile and, granted, holds the kill
/// until that is done or its time is over (I6). A pod on its way out needs no restart. An engine that died asks for nothing, it is started
/// again anyhow, but where a restart is in vain its pod is replaced, under the same budget (F1).
pub fn wants_slot(pod: &PodView) -> bool {
    let asks = |episode: &Episode| episode.awaits_grant() || episode.awaits_replacement();
    !pod.leaving && !pod.uid.is_empty() && pod.open_episode().is_some_and(asks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::testing::{granted_by, pod};

    const NOW: &str = "2026-01-01T00:00:00Z";

    fn step(grants: &[Grant], pods: &[PodView]) -> Vec<String> {
        next(grants, pods, &Terms::simple(RecoveryMode::Recover, 1), NOW).into_iter().map(|g| g.episode).collect()
    }

    fn held(pod: &PodView) -> Grant {
        grant(pod, GrantAction::Restart, &Terms::simple(RecoveryMode::Recover, 1), NOW).unwrap()
    }

    #[test]
    fn two_frozen_get_one_grant_the_older_first() {
        let (young, old) = (pod("a", "Stalled", 9), pod("b", "Stalled", 3));
        assert_eq!(step(&[], &[young.clone(), old.clone()]), ["e-b"]);
        assert_eq!(step(&[held(&old)], &[young, old]), ["e-b"]);
    }

    #[test]
    fn only_a_confirmed_stall_gets_one() {
        for stage in ["Suspect", "Recovered", "Cleared"] {
            assert!(step(&[], &[pod("a", stage, 1)]).is_empty(), "{stage}");
        }
        let leaving = PodView { leaving: true, ..pod("a", "Stalled", 1) };
        assert!(step(&[], &[leaving]).is_empty());
    }

    #[test]
    fn other_modes_grant_nothing_and_take_nothing_back() {
        let frozen = pod("a", "Stalled", 1);
        for mode in [RecoveryMode::Observe, RecoveryMode::Fence] {
            assert!(next(&[], std::slice::from_ref(&frozen), &Terms::simple(mode, 1), NOW).is_empty());
            assert_eq!(next(&[held(&frozen)], std::slice::from_ref(&frozen), &Terms::simple(mode, 1), NOW).len(), 1);
        }
    }

    #[test]
    fn a_slot_is_free_again_when_the_episode_closes_or_the_pod_is_gone() {
        let (done, frozen) = (pod("a", "Recovered", 1), pod("b", "Stalled", 2));
        let grants = [held(&pod("a", "Stalled", 1))];
        assert_eq!(step(&grants, &[done, frozen.clone()]), ["e-b"]);
        assert_eq!(step(&grants, &[frozen]), ["e-b"]);
    }

    #[test]
    fn a_doubt_keeps_the_slot() {
        let frozen = pod("a", "Stalled", 1);
        let silent = PodView { episode: Default::default(), ready: false, ..frozen.clone() };
        let serving = PodView { ready: true, ..silent.clone() };
        let other = pod("b", "Stalled", 2);
        assert_eq!(step(&[held(&frozen)], &[silent, other.clone()]), ["e-a"]);
        assert_eq!(step(&[held(&frozen)], &[serving, other]), ["e-b"]);
    }

    #[test]
    fn a_restart_that_a_pod_granted_itself_counts() {
        for stage in ["Granted", "Killed", "Restarting"] {
            let mut restarting = pod("a", stage, 1);
            granted_by(&mut restarting, "self");
            assert!(step(&[], &[restarting, pod("b", "Stalled", 2)]).is_empty(), "{stage}");
        }
    }

    #[test]
    fn an_engine_that_dies_by_itself_again_and_again_holds_up_nobody() {
        assert_eq!(step(&[], &[pod("a", "Restarting", 1), pod("b", "Stalled", 2)]), ["e-b"]);
    }

    #[test]
    fn who_waits_for_the_budget_is_told_so_and_nobody_else() {
        let (first, second) = (pod("a", "Stalled", 1), pod("b", "Stalled", 2));
        let grants = [held(&first)];
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let note = |pod: &PodView, now| to_queue(&grants, pod, RecoveryMode::Recover, at(now));
        let told = Some("e-b@2026-01-01T00:01:00Z".to_owned());
        assert_eq!(note(&second, "2026-01-01T00:01:00.789Z"), told);
        let waiting = PodView { queued: told, ..second.clone() };
        assert_eq!(note(&waiting, "2026-01-01T00:01:19.9Z"), None, "fresh: silent (P7)");
        assert_eq!(note(&waiting, "2026-01-01T00:01:20Z").as_deref(), Some("e-b@2026-01-01T00:01:20Z"));
        assert!(note(&waiting, "2026-01-01T00:00:00Z").is_some(), "from the future: a clock was set back");
        for foreign in ["e-x@2026-01-01T00:01:00Z", "e-b", "e-b@now"] {
            let pod = PodView { queued: Some(foreign.to_owned()), ..second.clone() };
            assert!(note(&pod, "2026-01-01T00:01:00Z").is_some(), "{foreign}");
        }
        for quiet in [first, pod("c", "Suspect", 1), PodView { leaving: true, ..second.clone() }] {
            assert_eq!(note(&quiet, "2026-01-01T00:01:00Z"), None);
        }
        for mode in [RecoveryMode::Observe, RecoveryMode::Fence] {
            assert_eq!(to_queue(&grants, &second, mode, at(NOW)), None, "nothing is queued where nothing is granted");
        }
    }

    #[test]
    fn a_new_episode_of_the_same_pod_takes_over_its_slot() {
        let mut again = pod("a", "Stalled", 1);
        let grants = [Grant { episode: "e-old".to_owned(), ..held(&again) }];
        assert_eq!(step(&grants, &[again.clone(), pod("b", "Stalled", 0)]), ["e-a"]);
        again = pod("a", "Suspect", 1);
        assert_eq!(step(&grants, &[again.clone()]), ["e-old"], "not confirmed yet: nothing new is granted");
        let (pods, terms) = ([again], Terms::simple(RecoveryMode::Recover, 1));
        let last = ["00:10:00Z", "00:10:01Z"].map(|at| next(&grants, &pods, &terms, &format!("2026-01-01T{at}")).len());
        assert_eq!(last, [1, 0], "its end was not heard, and the slot is not kept for it for ever");
    }

    #[test]
    fn a_slot_that_is_taken_over_escalates_as_any_other() {
        let again = pod("a", "Stalled", 1);
        let grants = [Grant { episode: "e-old".to_owned(), ..held(&again) }];
        let restarted =
            |at: &str| crds::PastGrant { pod_uid: again.uid.clone(), granted_at: at.to_owned(), ..Default::default() };
        let recent = ["2025-12-31T23:55:00Z", "2025-12-31T23:58:00Z"].map(restarted);
        let terms = Terms { recent: &recent, ..Terms::simple(RecoveryMode::Recover, 1) };
        let next = next(&grants, std::slice::from_ref(&again), &terms, NOW);
        let next: Vec<_> = next.iter().map(|grant| (grant.episode.as_str(), grant.action)).collect();
        assert_eq!(next, [("e-a", GrantAction::Replace)], "two restarts within the window cured nothing");
    }

    #[test]
    fn a_new_episode_gets_no_key_where_none_are_handed_out() {
        let again = pod("a", "Stalled", 1);
        let grants = [Grant { episode: "e-old".to_owned(), ..held(&again) }];
        let all_stall = Terms {
            hold: Hold::Deployment("5 of 6 replicas stall at once".to_owned()),
            ..Terms::simple(RecoveryMode::Recover, 1)
        };
        for terms in [all_stall, Terms::simple(RecoveryMode::Fence, 1)] {
            let kept = next(&grants, std::slice::from_ref(&again), &terms, NOW);
            assert!(kept.is_empty(), "it waits as all others do: {kept:?}");
        }
    }

    #[test]
    fn a_former_leaders_fast_clock_keeps_no_slot_for_longer_than_a_look_finds_it() {
        let terms = Terms { replicas: 2, ..Terms::simple(RecoveryMode::Recover, 1) };
        let cured = pod("a", "Cleared", 1);
        let ahead = Grant {
            action: GrantAction::Replace,
            granted_at: "2026-01-01T02:00:00Z".to_owned(),
            ..held(&pod("a", "Stalled", 1))
        };
        let look = |grants: &[Grant], pods: &[PodView], now: &str| next(grants, pods, &terms, now);
        let found = look(std::slice::from_ref(&ahead), std::slice::from_ref(&cured), NOW);
        assert_eq!((found.len(), found[0].granted_at.as_str()), (1, NOW), "a delete may be on its way");
        assert_eq!(fresh(&found, std::slice::from_ref(&ahead)).count(), 0, "it is no other grant");
        assert_eq!(look(&found, std::slice::from_ref(&cured), "2026-01-01T00:00:30Z"), found, "put right once (P7)");
        assert_eq!(look(&found, &[cured], "2026-01-01T00:00:31Z"), []);
        let starting = [PodView { ready: false, episode: Default::default(), ..pod("b", "", 1) }];
        let found = look(&[ahead], &starting, NOW);
        assert_eq!((look(&found, &starting, "2026-01-01T00:10:00Z").len()), 1, "its successor is not up");
        assert_eq!(look(&found, &starting, "2026-01-01T00:10:01Z"), [], "and has had its time");
        let near = Grant { granted_at: "2026-01-01T00:04:59Z".to_owned(), ..found[0].clone() };
        assert_eq!(look(std::slice::from_ref(&near), &starting, NOW), [near], "clocks differ a little");
    }

    #[test]
    fn a_grant_is_announced_once() {
        let frozen = pod("a", "Stalled", 1);
        let grants = [held(&frozen)];
        assert!(to_announce(&grants, &frozen).is_some());
        let told = PodView { grant: Some("e-a".to_owned()), ..frozen.clone() };
        assert!(to_announce(&grants, &told).is_none());
        let replaced = PodView { uid: "other".to_owned(), ..frozen };
        assert!(to_announce(&grants, &replaced).is_none(), "a new pod with the old name has no grant (P8)");
    }
}
