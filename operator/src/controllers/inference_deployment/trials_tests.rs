//! What a hold remembers and when one restart is tried under it, both ways.

use super::*;
use crate::controllers::inference_deployment::{
    escalate::duration_of,
    plan::{Plan, plan},
    testing::{healthy, infd, looked, pod},
};
use crds::{GrantAction, InferenceDeployment, inference_deployment::RecoveryMode};

const BEGAN: &str = "2026-01-01T00:02:00Z";

/// `BEGAN` and so many seconds.
fn at(seconds: i64) -> Timestamp {
    BEGAN.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seconds)
}

/// A look at the fleet that finds nothing which would hold or bound anybody.
fn everybody_else_is_well() -> Fleet {
    Fleet { replicas: 100, restarts_percent: 100, hold_percent: 100, ..Fleet::default() }
}

/// Four replicas, of which so many stall.
struct Scene {
    infd: InferenceDeployment,
    pods: Vec<PodView>,
    fleet: Option<Fleet>,
    episodes: u32,
}

impl Scene {
    fn new(stalled: usize) -> Self {
        let mut infd = infd("chat");
        infd.spec.replicas = 4;
        infd.spec.recovery.restart_backoff = "0s".to_owned();
        let named = |n: usize| if n < stalled { pod(NAMES[n], "Stalled", 1) } else { healthy(NAMES[n]) };
        Scene { infd, pods: (0..4).map(named).collect(), fleet: Some(everybody_else_is_well()), episodes: 0 }
    }

    /// A pass, stored.
    fn look(&mut self, seconds: i64) -> Plan {
        let observed = looked(self.infd.clone(), self.pods.clone());
        let plan = plan(&observed, Vec::new(), self.fleet.as_ref(), at(seconds));
        let recovery = &mut self.infd.status.get_or_insert_default().recovery;
        (recovery.grants, recovery.recent) = (plan.grants.clone(), plan.recent.clone());
        recovery.hold = plan.hold_status.clone();
        plan
    }

    fn granted(&mut self, seconds: i64) -> Vec<String> {
        self.look(seconds).grants.into_iter().map(|grant| grant.pod).collect()
    }

    fn hold(&self) -> HoldStatus {
        self.infd.status.as_ref().and_then(|status| status.recovery.hold.clone()).unwrap()
    }

    /// It comes back.
    fn serves(&mut self, name: &str) {
        self.set(name, healthy(name));
    }

    /// It stalls, in an episode that is not the one before.
    fn stalls(&mut self, name: &str) {
        let mut stalled = pod(name, "Stalled", 59);
        if let crate::controllers::inference_deployment::observed::EpisodeView::Known(known) = &mut stalled.episode {
            self.episodes += 1;
            known.episode.id = format!("e-{name}-{}", self.episodes);
        }
        self.set(name, stalled);
    }

    fn set(&mut self, name: &str, view: PodView) {
        let place = self.pods.iter_mut().find(|pod| pod.name == name).unwrap();
        *place = view;
    }

    /// The first trial helps, and its minute is over.
    fn a_helps_and_b_is_next(&mut self) {
        self.look(0);
        assert_eq!(self.granted(300), ["a"]);
        self.serves("a");
        self.look(310);
        self.look(371);
        assert_eq!(self.granted(372), ["b"]);
    }

    fn outcome(&self) -> TrialOutcome {
        self.hold().trial.unwrap().outcome
    }
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const NOBODY: [&str; 0] = [];

#[test]
fn one_is_tried_when_the_hold_has_stood_and_the_others_follow_when_it_has_proven_itself() {
    let mut scene = Scene::new(4);
    assert_eq!(scene.granted(0), NOBODY);
    assert_eq!(scene.granted(299), NOBODY);
    let plan = scene.look(300);
    assert_eq!(plan.grants.iter().map(|grant| grant.pod.as_str()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(plan.trial, " but that of pod a, on trial since 2026-01-01T00:07:00Z");
    assert_eq!(scene.granted(301), ["a"], "and nobody beside it");
    scene.serves("a");
    assert_eq!(scene.granted(310), NOBODY, "its slot is free, and it has proven nothing yet");
    assert_eq!(scene.granted(369), NOBODY);
    assert_eq!(
        (scene.granted(371), scene.outcome()),
        (vec![], TrialOutcome::Helped),
        "it has, and that is stored first"
    );
    assert_eq!(scene.granted(372), ["b"]);
    assert!(matches!(scene.look(373).hold, Hold::Deployment(_)), "three, one of them on trial");
    scene.serves("b");
    scene.look(380);
    assert_eq!(scene.look(441).hold, Hold::Deployment("3 of 4 replicas stall at once".to_owned()));
    let plan = scene.look(442);
    assert_eq!((plan.hold, plan.grants.len()), (Hold::No, 1), "two of four are no common cause");
    assert!(!scene.hold().stands() && scene.hold().failed == 0, "{:?}", scene.hold());
}

#[test]
fn each_trial_in_vain_doubles_the_pause_up_to_an_hour() {
    let mut scene = Scene::new(4);
    scene.look(0);
    let (mut last, mut times) = (0, Vec::new());
    for _ in 0..6 {
        let next = (last..).step_by(10).find(|second| !scene.granted(*second).is_empty()).unwrap();
        let tried = scene.hold().trial.unwrap().pod;
        times.push((next - last) / 60);
        scene.stalls(&tried);
        assert_eq!(scene.granted(next + 10), NOBODY);
        assert_eq!(scene.outcome(), TrialOutcome::Failed);
        last = next + 10;
    }
    assert_eq!(times, [5, 10, 20, 40, 60, 60]);
    assert_eq!(scene.hold().failed, 6);
    let told = scene.look(last + 10).trial;
    assert!(told.contains("in vain (so far 6), the next one is tried at 2026-01-01T04:"), "{told}");
}

#[test]
fn who_stalls_again_after_its_proof_says_that_restarts_do_not_help() {
    let mut scene = Scene::new(4);
    scene.a_helps_and_b_is_next();
    scene.stalls("a");
    assert_eq!(scene.granted(373), ["b"], "its key was granted");
    assert_eq!((scene.outcome(), scene.hold().failed), (TrialOutcome::Failed, 1));
    scene.serves("b");
    assert_eq!(scene.granted(500), NOBODY);
    assert_eq!(scene.granted(973), ["c"], "ten minutes later");
}

#[test]
fn what_does_not_come_back_is_in_vain_when_its_time_is_over() {
    let mut scene = Scene::new(4);
    scene.look(0);
    scene.look(300);
    scene.set("a", pod("a", "Restarting", 1));
    scene.look(300 + 31 * 60);
    assert_eq!(scene.outcome(), TrialOutcome::Pending);
    scene.look(301 + 31 * 60);
    assert_eq!(scene.outcome(), TrialOutcome::Failed);
}

#[test]
fn a_pod_that_was_replaced_on_trial_is_judged_by_how_many_serve() {
    let mut scene = Scene::new(3);
    for remembered in 0..2 {
        let past =
            PastGrant { pod_uid: "uid-a".into(), granted_at: at(100 + remembered).to_string(), ..Default::default() };
        scene.infd.status.get_or_insert_default().recovery.recent.push(past);
    }
    scene.look(0);
    let plan = scene.look(300);
    assert_eq!((plan.grants[0].action, plan.replaces.len()), (GrantAction::Replace, 1));
    scene.pods.remove(0);
    assert!(matches!(scene.look(310).hold, Hold::Deployment(_)), "two, and one on trial");
    scene.serves("b");
    scene.look(315);
    assert!(scene.hold().trial.unwrap().serves_since.is_none(), "another one heals by itself");
    scene.stalls("b");
    scene.pods.push(made(312, healthy("e")));
    scene.look(320);
    assert!(scene.hold().trial.unwrap().serves_since.is_some());
    scene.look(381);
    assert_eq!(scene.outcome(), TrialOutcome::Helped);
}

#[test]
fn a_hold_that_comes_back_is_remembered_for_an_hour() {
    let again = |over: i64| {
        let mut scene = Scene::new(4);
        scene.look(0);
        scene.look(300);
        NAMES.into_iter().for_each(|name| scene.serves(name));
        scene.look(310);
        assert!(scene.hold().stands(), "what was tried has proven nothing yet");
        scene.look(371);
        assert!(!scene.hold().stands());
        NAMES.into_iter().for_each(|name| scene.stalls(name));
        scene.look(371 + over);
        scene.hold().failed
    };
    assert_eq!((again(3_600), again(3_601)), (1, 0));
    let mut never_tried = Scene::new(4);
    never_tried.look(0);
    NAMES.into_iter().for_each(|name| never_tried.serves(name));
    assert_eq!(never_tried.look(20).hold_status, None, "nothing to remember");
}

#[test]
fn a_policy_that_tries_nothing_and_modes_that_grant_nothing_try_nothing() {
    let mut scene = Scene::new(4);
    scene.infd.spec.recovery.trial_after = "0s".to_owned();
    scene.look(0);
    let plan = scene.look(86_400);
    assert_eq!((plan.grants.len(), plan.trial.as_str()), (0, ""));
    for mode in [RecoveryMode::Observe, RecoveryMode::Fence] {
        let mut scene = Scene::new(4);
        scene.look(0);
        scene.infd.spec.recovery.mode = mode;
        assert_eq!(scene.granted(300), NOBODY, "{mode:?}");
        assert!(scene.infd.status.as_ref().is_some_and(|status| status.recovery.hold.is_none()), "held no more");
        assert_eq!(scene.granted(86_400), NOBODY, "{mode:?}");
    }
}

#[test]
fn a_trial_has_no_budget_of_its_own() {
    let due = |change: &dyn Fn(&mut Scene)| {
        let mut scene = Scene::new(4);
        scene.look(0);
        change(&mut scene);
        scene.granted(300)
    };
    assert_eq!(due(&|_| ()), ["a"]);
    assert_eq!(due(&|scene| scene.infd.spec.recovery.max_unavailable = 0), NOBODY);
    let fleet = || Fleet { replicas: 6, restarts_percent: 10, hold_percent: 100, ..Fleet::default() };
    assert_eq!(due(&|scene| scene.fleet = Some(Fleet { granted: 1, ..fleet() })), NOBODY);
    let here = || vec![("n1".to_owned(), String::new())];
    assert_eq!(due(&|scene| scene.fleet = Some(Fleet { grants_at: here(), place_max: (1, 0), ..fleet() })), NOBODY);
    let paused = |scene: &mut Scene| {
        scene.infd.spec.recovery.restart_backoff = "1m".to_owned();
        let past = PastGrant { pod_uid: "uid-a".into(), granted_at: at(290).to_string(), ..Default::default() };
        scene.infd.status.get_or_insert_default().recovery.recent.push(past);
    };
    assert_eq!(due(&paused), ["b"], "whose last restart is too young waits");
    assert_eq!(due(&|scene| scene.pods[0].last_serving = true), ["b"], "slow beats nothing (I3)");
}

#[test]
fn in_a_fleet_that_is_held_there_is_one_trial_and_one_pause() {
    let elsewhere = |outcome, granted_at: i64, failed| {
        let (granted_at, ended_at) = (at(granted_at).to_string(), Some(at(granted_at + 10).to_string()));
        let trial = Trial { granted_at, outcome, ended_at, ..Trial::default() };
        HoldStatus { since: BEGAN.to_owned(), failed, trial: Some(trial), ..HoldStatus::default() }
    };
    let granted = |holds: Vec<HoldStatus>, seconds: i64| {
        let mut scene = Scene::new(2);
        let fleet = Fleet { replicas: 6, stalled: 4, restarts_percent: 100, hold_percent: 30, ..Fleet::default() };
        scene.fleet = Some(Fleet { holds, ..fleet });
        assert!(matches!(scene.look(0).hold, Hold::Fleet(_)));
        scene.granted(seconds).len()
    };
    use TrialOutcome::{Failed, Helped, Pending};
    assert_eq!((granted(Vec::new(), 299), granted(Vec::new(), 300)), (0, 1));
    assert_eq!(granted(vec![elsewhere(Pending, 290, 0)], 400), 0, "one at a time");
    assert_eq!(granted(vec![elsewhere(Pending, 290, 0)], 7_200), 1, "one that nobody looks after");
    assert_eq!(granted(vec![elsewhere(Helped, 290, 0)], 400), 1);
    let failed = || vec![elsewhere(Failed, 290, 1)];
    assert_eq!((granted(failed(), 300 + 599), granted(failed(), 300 + 600)), (0, 1), "what was in vain there");
    let over = HoldStatus { over_at: Some(at(295).to_string()), ..elsewhere(Failed, 290, 5) };
    assert_eq!(granted(vec![over], 300), 1, "it is held no more");
}

#[test]
fn a_time_of_a_clock_that_was_ahead_keeps_nobody_waiting() {
    let mut scene = Scene::new(4);
    scene.look(86_400);
    scene.look(0);
    assert_eq!((scene.granted(299), scene.granted(300)), (vec![], vec!["a".to_owned()]));
    assert_eq!(duration_of("5m"), Some(SignedDuration::from_mins(5)));
}

#[test]
fn a_place_that_is_held_is_tried_when_nobody_else_waits() {
    let mut scene = Scene::new(3);
    scene.infd.spec.replicas = 7;
    scene.pods[3].node = "n2".to_owned();
    for name in ["e", "f", "g"] {
        scene.pods.push(PodView { node: "n2".to_owned(), ..healthy(name) });
    }
    assert!(matches!(scene.look(0).hold, Hold::Place(_)));
    assert_eq!(scene.granted(299), NOBODY);
    scene.set("d", PodView { node: "n2".to_owned(), ..pod("d", "Stalled", 9) });
    assert_eq!(scene.granted(300), ["d"], "elsewhere restarts are granted");
    assert_eq!(scene.hold().trial, None);
    scene.set("d", PodView { node: "n2".to_owned(), ..healthy("d") });
    assert_eq!(scene.granted(310), ["a"]);
    assert_eq!(scene.hold().trial.unwrap().pod, "a");
}

/// The same, made so many seconds after `BEGAN`.
fn made(seconds: i64, pod: PodView) -> PodView {
    PodView { created_at: Some(at(seconds).to_string()), ..pod }
}

/// A person's wish that this pod be restarted for this episode.
fn wish(pod: &mut PodView, episode: &str) {
    pod.wish = Some(crds::restart::RestartWish { episode: episode.to_owned(), ..Default::default() });
}

#[test]
fn a_person_is_no_common_cause_and_no_pause_and_has_no_budget_of_their_own() {
    let granted = |change: &dyn Fn(&mut Scene)| {
        let mut scene = Scene::new(4);
        wish(&mut scene.pods[2], "e-c");
        change(&mut scene);
        let granted = scene.granted(0);
        (granted, scene.hold().trial.is_some())
    };
    assert_eq!(granted(&|_| ()), (vec!["c".to_owned()], false), "under a hold, at once, and it is no trial");
    let nothing = (Vec::new(), false);
    assert_eq!(granted(&|scene| wish(&mut scene.pods[2], "e-before")), nothing, "that stall is over");
    assert_eq!(granted(&|scene| scene.infd.spec.recovery.max_unavailable = 0), nothing);
    let taken = || Fleet { replicas: 6, granted: 1, restarts_percent: 10, hold_percent: 100, ..Fleet::default() };
    assert_eq!(granted(&|scene| scene.fleet = Some(taken())), nothing);
    let suspected = |scene: &mut Scene| {
        scene.pods.push(pod("e", "Suspect", 1));
        wish(&mut scene.pods[4], "e-e");
        scene.pods[2].wish = None;
    };
    assert_eq!(granted(&suspected), nothing, "a suspicion is no stall (I1)");
    let mut modes = Scene::new(4);
    wish(&mut modes.pods[2], "e-c");
    modes.infd.spec.recovery.mode = RecoveryMode::Fence;
    assert_eq!(modes.granted(0), NOBODY);
}

#[test]
fn a_person_does_not_wait_for_the_pause_after_the_last_restart() {
    let granted = |asked: bool| {
        let mut scene = Scene::new(1);
        scene.infd.spec.recovery.restart_backoff = "1m".to_owned();
        let past = PastGrant { pod_uid: "uid-a".into(), granted_at: at(-10).to_string(), ..Default::default() };
        scene.infd.status.get_or_insert_default().recovery.recent.push(past);
        if asked {
            wish(&mut scene.pods[0], "e-a");
        }
        scene.granted(0)
    };
    assert_eq!((granted(false), granted(true)), (vec![], vec!["a".to_owned()]));
}

#[path = "trials_outcome_tests.rs"]
mod outcomes;
