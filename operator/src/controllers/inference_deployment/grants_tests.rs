//! The budget: who has a slot, for how long, and what follows on it.

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

#[test]
fn fault_a18_a_replacement_whom_nobody_may_follow_becomes_one_more_restart() {
    let stalled = pod("a", "Stalled", 1);
    let replace = Grant { action: GrantAction::Replace, ..held(&stalled) };
    let terms = |pods_refused| Terms { pods_refused, replicas: 1, ..Terms::simple(RecoveryMode::Recover, 1) };
    let later = "2026-01-01T00:00:20Z";
    let next = |pod: &PodView, terms: &Terms<'_>| {
        let next = next(std::slice::from_ref(&replace), std::slice::from_ref(pod), terms, later);
        assert_eq!(next.len(), 1, "the slot is its own: {next:?}");
        (next[0].action, to_replace(&next, pod, terms), to_announce(&next, pod).is_some())
    };
    assert_eq!(next(&stalled, &terms(false)), (GrantAction::Replace, true, false));
    assert_eq!(next(&stalled, &terms(true)), (GrantAction::Restart, false, true));
    let leaving = PodView { leaving: true, ..stalled.clone() };
    assert_eq!(next(&leaving, &terms(true)), (GrantAction::Replace, false, false), "it goes already");
    let held_back = Terms { hold: Hold::Deployment("5 of 6 replicas stall".to_owned()), ..terms(true) };
    assert_eq!(next(&stalled, &held_back), (GrantAction::Replace, false, false), "no key while restarts are held");
    let back = next_of(&replace, &stalled, &terms(true), later);
    assert_eq!(next_of(&back, &stalled, &terms(true), "2026-01-01T00:00:40Z"), back, "quiescent is silent (P7)");
}

fn next_of(grant: &Grant, pod: &PodView, terms: &Terms<'_>, now: &str) -> Grant {
    next(std::slice::from_ref(grant), std::slice::from_ref(pod), terms, now).remove(0)
}

#[test]
fn a_replacement_that_nobody_lets_be_made_makes_way_for_who_waits() {
    let pods = [pod("a", "Stalled", 1), pod("b", "Stalled", 2), pod("c", "Recovered", 3)];
    let replace =
        Grant { action: GrantAction::Replace, granted_at: "2026-01-01T00:00:10Z".to_owned(), ..held(&pods[0]) };
    let recover = || Terms { replicas: 3, ..Terms::simple(RecoveryMode::Recover, 1) };
    let look = |pods: &[PodView], terms: &Terms<'_>, now: &str| -> Vec<(String, GrantAction)> {
        let next = next(std::slice::from_ref(&replace), pods, terms, now);
        next.into_iter().map(|grant| (grant.pod, grant.action)).collect()
    };
    let its_own = vec![("a".to_owned(), GrantAction::Replace)];
    let (in_time, over) = ("2026-01-01T00:10:10Z", "2026-01-01T00:10:11Z");
    assert_eq!(look(&pods, &recover(), in_time), its_own);
    assert_eq!(look(&pods, &recover(), over), [("b".to_owned(), GrantAction::Restart)]);
    assert_eq!(look(&pods[..1], &recover(), over), its_own, "it is tried on where nobody else waits");
    let leaving = [PodView { leaving: true, ..pods[0].clone() }, pods[1].clone()];
    assert_eq!(look(&leaving, &recover(), over), its_own, "that one is made: its grace is another matter");
    let killed = [PodView { agent_away: true, ..pod("a", "Killed", 1) }, pods[1].clone()];
    assert_eq!(look(&killed, &recover(), over), its_own, "it would ask for no other");
    let fence = Terms { mode: RecoveryMode::Fence, ..recover() };
    assert_eq!(look(&pods, &fence, over), its_own, "where nothing is granted nobody waits");
    let held_back = Terms { hold: Hold::Deployment("5 of 6 replicas stall".to_owned()), ..recover() };
    assert_eq!(look(&pods, &held_back, over), its_own);
}

#[test]
fn an_agent_that_tells_of_nothing_waits_for_no_key() {
    let grant = held(&pod("a", "Stalled", 1));
    let kept = |episode: EpisodeView, ready, minutes: i64| {
        let pod = PodView { episode, ready, ..pod("a", "Stalled", 1) };
        let now = grant.granted_at.parse::<jiff::Timestamp>().unwrap() + SignedDuration::from_mins(minutes);
        next(std::slice::from_ref(&grant), &[pod], &Terms::simple(RecoveryMode::Recover, 1), &now.to_string()).len()
    };
    assert_eq!(kept(EpisodeView::None, false, 10), 1, "its node was started anew, and its engine may come up");
    assert_eq!(kept(EpisodeView::None, false, 31), 0, "as long as a restart is waited for");
    assert_eq!(kept(EpisodeView::None, true, 1), 0);
    assert_eq!(kept(EpisodeView::Unreadable("{".to_owned()), false, 600), 1, "who is not understood may have begun");
}
