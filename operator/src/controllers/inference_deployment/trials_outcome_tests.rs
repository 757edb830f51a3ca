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

#[test]
fn a_run_is_remembered_however_soon_restarts_count_no_more() {
    let mut scene = Scene::new(4);
    scene.infd.spec.recovery.stability_window = "1s".to_owned();
    scene.look(0);
    assert_eq!(scene.granted(300), ["a"]);
    scene.serves("a");
    scene.look(310);
    scene.look(371);
    assert_eq!(scene.granted(372), ["b"]);
    scene.stalls("a");
    scene.look(373);
    assert_eq!((scene.outcome(), scene.hold().failed), (TrialOutcome::Failed, 1), "who was restarted stalls again");
    scene.serves("b");
    scene.look(380);
    assert_eq!(scene.granted(973).len(), 1);
    let kept = &scene.infd.status.as_ref().unwrap().recovery.recent;
    assert_eq!(kept.len(), 1, "another run: {kept:?}");
}
