//! What comes of a trial, and what is told of it where that is not known.

use super::*;

#[test]
fn a_successor_that_stalls_says_that_replacing_does_not_help() {
    for proven in [false, true] {
        let mut scene = Scene::new(4);
        scene.infd.spec.recovery.restarts_before_replace = 0;
        scene.look(0);
        assert_eq!(scene.look(300).grants[0].action, GrantAction::Replace);
        scene.pods.remove(0);
        scene.look(310);
        scene.pods.push(made(311, healthy("e")));
        scene.look(320);
        if proven {
            scene.look(381);
            assert_eq!(scene.outcome(), TrialOutcome::Helped);
        }
        scene.set("e", made(311, pod("e", "Stalled", 59)));
        scene.look(390);
        assert_eq!((scene.outcome(), scene.hold().failed), (TrialOutcome::Failed, 1), "proven: {proven}");
    }
}

#[test]
fn the_only_one_that_waits_is_on_trial_alone_in_the_fleet() {
    let mut scene = Scene::new(1);
    let fleet = Fleet { replicas: 6, stalled: 5, restarts_percent: 100, hold_percent: 30, ..Fleet::default() };
    scene.fleet = Some(fleet.clone());
    scene.look(0);
    assert_eq!(scene.granted(300), ["a"]);
    for (seconds, stage) in [(301, "Granted"), (305, "Killed"), (310, "Restarting")] {
        scene.set("a", pod("a", stage, 1));
        scene.look(seconds);
        assert!(scene.hold().pending().is_some(), "{stage}: nobody else of this deployment waits");
    }
    let mut other = Scene::new(1);
    other.fleet = Some(Fleet { holds: vec![scene.hold()], ..fleet.clone() });
    other.look(0);
    assert_eq!(other.granted(320), NOBODY, "one at a time in all of the fleet");
    scene.serves("a");
    scene.look(320);
    assert!(scene.hold().pending().is_some(), "it has proven nothing yet");
    let plan = scene.look(381);
    assert_eq!((scene.outcome(), plan.hold), (TrialOutcome::Helped, Hold::No));
    assert!(!scene.hold().stands());
    other.fleet = Some(fleet);
    assert_eq!(other.granted(382), ["a"]);
}

#[test]
fn who_was_tried_in_vain_and_waits_again_is_held_no_longer_than_the_fleet() {
    let mut scene = Scene::new(1);
    let held = Fleet { replicas: 6, stalled: 5, restarts_percent: 100, hold_percent: 30, ..Fleet::default() };
    scene.fleet = Some(held.clone());
    scene.look(0);
    scene.look(300);
    scene.serves("a");
    scene.look(310);
    scene.stalls("a");
    scene.look(320);
    assert_eq!((scene.outcome(), scene.hold().stands()), (TrialOutcome::Failed, true));
    scene.fleet = Some(Fleet { stalled: 0, ..held });
    assert_eq!(scene.granted(330), ["a"]);
    for (seconds, stage) in [(331, "Granted"), (335, "Killed"), (340, "Restarting")] {
        assert!(!scene.hold().stands(), "no grant stands beside a hold that it is no trial of (P15)");
        if let crate::controllers::inference_deployment::observed::EpisodeView::Known(known) =
            &mut scene.pods[0].episode
        {
            known.episode.stage = stage.to_owned();
        }
        scene.look(seconds);
    }
    assert!(!scene.hold().stands(), "what is over does not come back for what was tried under it");
}

#[test]
fn a_restart_that_is_seen_to_be_in_vain_is_not_waited_for() {
    let failed = |change: &dyn Fn(&mut Scene)| {
        let mut scene = Scene::new(4);
        scene.look(0);
        scene.look(300);
        change(&mut scene);
        scene.look(400);
        (scene.outcome() == TrialOutcome::Failed, scene.look(400 + 600).grants)
    };
    let ends = |scene: &mut Scene, restarts| scene.set("a", PodView { restarts, ..pod("a", "Restarting", 1) });
    assert!(!failed(&|scene| ends(scene, 3)).0, "the kill, and two ends that may be chance");
    let (in_vain, next) = failed(&|scene| ends(scene, 4));
    let next: Vec<_> = next.iter().map(|grant| (grant.pod.as_str(), grant.action)).collect();
    assert_eq!((in_vain, next), (true, vec![("a", GrantAction::Replace)]), "its replacement is the next trial");
    let unkillable = |scene: &mut Scene| {
        let mut stuck = pod("a", "Killed", 1);
        if let crate::controllers::inference_deployment::observed::EpisodeView::Known(known) = &mut stuck.episode {
            known.episode.class = "Unkillable".to_owned();
        }
        scene.set("a", stuck);
    };
    let (in_vain, next) = failed(&unkillable);
    assert_eq!((in_vain, next[0].action), (true, GrantAction::Replace));
}

#[test]
fn a_trial_whose_pod_is_taken_away_says_nothing() {
    for take in [0, 1, 2] {
        let mut scene = Scene::new(4);
        scene.look(0);
        assert_eq!(scene.granted(300), ["a"]);
        match take {
            0 => _ = scene.pods.remove(0),
            1 => scene.pods[0].leaving = true,
            _ => scene.set("a", PodView { fence: crds::fence::Fence::read("yes"), ..healthy("a") }),
        }
        scene.look(310);
        // (one that leaves has its slot until it is gone)
        let next = Some("b").filter(|_| take != 1);
        assert_eq!(scene.hold().trial.map(|trial| trial.pod).as_deref(), next, "the next one is tried");
        let plan = scene.look(311);
        assert_eq!((scene.hold().failed, plan.hold), (0, Hold::Deployment("3 of 4 replicas stall at once".to_owned())));
    }
}

#[test]
fn what_an_older_schema_forgets_is_told_in_the_same_words_each_time() {
    let mut scene = Scene::new(4);
    let mut told = |seconds| {
        let plan = scene.look(seconds);
        scene.infd.status.get_or_insert_default().recovery.hold = None;
        (plan.trial, plan.grants.len())
    };
    assert_eq!(told(0), ("; one is tried when they have been held for 5m".to_owned(), 0));
    assert_eq!(told(301), told(601));
}

#[test]
fn a_trial_on_its_way_is_told_although_the_next_one_is_forbidden() {
    let mut scene = Scene::new(4);
    scene.look(0);
    scene.look(300);
    scene.infd.spec.recovery.trial_after = "0s".to_owned();
    assert!(scene.look(310).trial.contains("on trial since"));
}

#[test]
fn a_mode_that_grants_nothing_says_nothing_of_the_trial_that_it_ends() {
    for (mode, proven) in [(RecoveryMode::Observe, false), (RecoveryMode::Fence, false), (RecoveryMode::Observe, true)]
    {
        let mut scene = Scene::new(4);
        scene.look(0);
        assert_eq!(scene.granted(300), ["a"]);
        if proven {
            scene.serves("a");
            scene.look(310);
            scene.look(371);
            assert_eq!(scene.outcome(), TrialOutcome::Helped);
        }
        scene.infd.spec.recovery.mode = mode;
        scene.look(380);
        scene.look(380 + 32 * 60); // as long as any trial is waited for
        assert_eq!(scene.infd.status.as_ref().unwrap().recovery.hold, None, "{mode:?}: nothing to remember");
        scene.infd.spec.recovery.mode = RecoveryMode::Recover;
        NAMES.into_iter().for_each(|name| scene.stalls(name));
        let plan = scene.look(2_400);
        assert_eq!((scene.hold().failed, plan.trial.as_str()), (0, "; one is tried when they have been held for 5m"));
        assert_eq!((scene.granted(2_699).len(), scene.granted(2_700).len()), (0, 1), "{mode:?}");
    }
}

#[test]
fn what_was_in_vain_before_another_mode_is_remembered_for_an_hour() {
    let mut scene = Scene::new(4);
    scene.look(0);
    scene.look(300);
    scene.stalls("a");
    scene.look(310);
    NAMES.into_iter().for_each(|name| scene.stalls(name));
    assert_eq!(scene.granted(910).len(), 1, "the second one");
    scene.infd.spec.recovery.mode = RecoveryMode::Observe;
    scene.look(920);
    assert_eq!((scene.hold().stands(), scene.hold().failed, scene.hold().trial), (false, 1, None));
    scene.infd.spec.recovery.mode = RecoveryMode::Recover;
    NAMES.into_iter().for_each(|name| scene.stalls(name));
    scene.look(1_000);
    assert_eq!(scene.hold().failed, 1, "and the one that the mode ended is not counted");
}

/// Of seven replicas three stall on the node `n1`, and so many on the other one.
fn in_a_place(elsewhere: usize) -> Scene {
    let mut scene = Scene::new(3);
    scene.infd.spec.replicas = 7;
    scene.infd.spec.recovery.max_unavailable = 4;
    scene.pods[3].node = "n2".to_owned();
    scene.pods.extend(["e", "f", "g"].map(|name| PodView { node: "n2".to_owned(), ..healthy(name) }));
    widen(&mut scene, elsewhere);
    scene
}

/// So many on the other node stall from now on, and the rest serve.
fn widen(scene: &mut Scene, elsewhere: usize) {
    for (n, name) in ["e", "f", "g"].into_iter().enumerate() {
        let view = if n < elsewhere { pod(name, "Stalled", 30) } else { healthy(name) };
        scene.set(name, PodView { node: "n2".to_owned(), ..view });
    }
}

#[test]
fn a_hold_that_widens_is_tried_when_it_has_stood_as_wide() {
    let mut scene = in_a_place(0);
    assert!(matches!(scene.look(0).hold, Hold::Place(_)));
    widen(&mut scene, 3);
    let plan = scene.look(290);
    assert!(matches!(plan.hold, Hold::Deployment(_)));
    assert_eq!(plan.trial, "; one is tried at 2026-01-01T00:11:50Z");
    assert_eq!((scene.granted(589).len(), scene.granted(590).len()), (0, 1));

    let mut scene = Scene::new(4);
    scene.look(0);
    scene.fleet = Some(Fleet { stalled: 90, hold_percent: 30, ..everybody_else_is_well() });
    assert!(scene.look(290).trial.contains("00:11:50Z"), "the fleet is held since then");
    assert_eq!((scene.granted(589).len(), scene.granted(590).len()), (0, 1));
}

#[test]
fn a_hold_that_widens_after_a_trial_that_helped_is_looked_at_anew() {
    let mut scene = in_a_place(0);
    scene.look(0);
    assert_eq!(scene.granted(300), ["a"]);
    scene.serves("a");
    widen(&mut scene, 3);
    assert!(matches!(scene.look(310).hold, Hold::Deployment(_)));
    let plan = scene.look(371);
    assert_eq!(scene.outcome(), TrialOutcome::Helped);
    assert_eq!(plan.trial, "; that of pod a on trial helped, the next one is tried at 2026-01-01T00:12:10Z");
    assert_eq!((scene.granted(609).len(), scene.granted(610).len()), (0, 1));
}

#[test]
fn a_hold_that_flips_or_narrows_waits_for_no_third_time() {
    let mut scene = in_a_place(0);
    scene.look(0);
    for (seconds, elsewhere) in [(100, 3), (200, 0), (290, 3), (310, 0), (320, 3), (399, 0)] {
        widen(&mut scene, elsewhere);
        assert_eq!(scene.granted(seconds), NOBODY, "{seconds}");
    }
    assert_eq!(scene.granted(400).len(), 1, "300 s after it was first as wide as it has been");

    let mut scene = in_a_place(3);
    assert!(matches!(scene.look(0).hold, Hold::Deployment(_)));
    widen(&mut scene, 0);
    assert!(matches!(scene.look(290).hold, Hold::Place(_)), "the same wait, under another name");
    assert_eq!((scene.granted(299).len(), scene.granted(300).len()), (0, 1));
}

#[test]
fn a_run_is_remembered_however_soon_restarts_count_no_more() {
    let mut scene = Scene::new(4);
    scene.infd.spec.recovery.stability_window = "1s".to_owned();
    scene.a_helps_and_b_is_next();
    scene.stalls("a");
    scene.look(373);
    assert_eq!((scene.outcome(), scene.hold().failed), (TrialOutcome::Failed, 1), "who was restarted stalls again");
    scene.serves("b");
    scene.look(380);
    assert_eq!(scene.granted(973).len(), 1);
    let kept = &scene.infd.status.as_ref().unwrap().recovery.recent;
    assert_eq!(kept.len(), 1, "another run: {kept:?}");
}

#[test]
fn in_a_fleet_that_is_held_nothing_is_tried_before_the_time_that_is_told() {
    use TrialOutcome::{Failed, Helped};
    let trial = |outcome, granted_at: i64| {
        let ended_at = Some(at(granted_at + 10).to_string());
        Trial { pod: "x".into(), granted_at: at(granted_at).to_string(), outcome, ended_at, ..Trial::default() }
    };
    let hold = |failed, trial| HoldStatus { since: BEGAN.to_owned(), failed, trial, ..HoldStatus::default() };
    let own = [
        (hold(0, None), "; one at a time in the whole fleet is tried, here none before 2026-01-01T00:07:00Z"),
        (hold(1, None), "; one at a time in the whole fleet is tried, here none before 2026-01-01T00:12:00Z"),
        (
            hold(0, Some(trial(Helped, 300))),
            "; that of pod x on trial helped, one at a time in the whole fleet is tried",
        ),
        (
            hold(2, Some(trial(Failed, 300))),
            "; that of pod x on trial was in vain (so far 2 here), one at a time in the whole fleet is tried, here none before 2026-01-01T00:27:10Z",
        ),
    ];
    let elsewhere = [Vec::new(), vec![hold(0, Some(trial(Helped, 400)))], vec![hold(3, Some(trial(Failed, 400)))]];
    for ((own, words), holds) in own.iter().flat_map(|own| elsewhere.iter().map(move |holds| (own, holds))) {
        let infd = infd("chat");
        let pods = [pod("a", "Stalled", 1)];
        let fleet = Fleet { replicas: 5, stalled: 5, hold_percent: 30, holds: holds.clone(), ..Fleet::default() };
        let terms = Terms::of(&infd, &pods, Some(&fleet));
        assert!(terms.fleet_alarmed);
        let after = SignedDuration::from_mins(5);
        assert_eq!(super::words(own, true, after, true), *words);
        let first = (0..10_000).find(|s| due(Some(own), (Some(&fleet), &terms), after, at(*s)));
        let first = first.expect("it is tried at last");
        let told = words.split_once(" before ").map(|(_, at)| at.parse::<Timestamp>().unwrap());
        assert!(told.is_none_or(|told| at(first) >= told), "{words} {first} {holds:?}");
    }
}
