//! I1 and I6 in the recovery machine: two keys, evidence first but bounded, at most one own grant a window.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
use proptest::prelude::*;
use vitals::observation::Ms;
use vitals::recovery::{
    Effect, EpisodeStage, GrantedBy, Mode, Recovery, RecoveryInput, RecoveryOutput, RecoveryPolicy,
};
use vitals::verdict::{Action, Outcome, StallClass, Verdict};

/// The mode is changed while an engine hangs: what was done and is not wanted any more is undone, and nothing is killed.
#[test]
fn a_change_of_mode_in_the_middle_of_an_episode_holds_at_once() {
    let policy = |mode| RecoveryPolicy { mode, ..RecoveryPolicy::default() };
    let stalled = || Verdict::Stalled(StallClass::StepStalled);
    let mut world = World::new(policy(Mode::Recover));
    world.see(0, Verdict::Progressing);
    assert!(world.see(100, Verdict::Suspect(StallClass::StepStalled)).effects.contains(&Effect::Fence));
    world.granted = true;
    assert_eq!(world.see(100, stalled()).stage, Some(EpisodeStage::Granted), "evidence is on its way");
    assert!(world.recovery.set_policy(policy(Mode::Fence)) && !world.recovery.set_policy(policy(Mode::Fence)));
    world.evidence = true;
    let fenced = world.see(100, stalled());
    assert_eq!((fenced.stage, fenced.granted_by), (Some(EpisodeStage::Stalled), None), "the key is turned back");
    assert_eq!(fenced.effects, [Effect::Fence]);
    world.recovery.set_policy(policy(Mode::Observe));
    assert_eq!(world.see(100, stalled()).effects, [Effect::Unfence]);
    world.recovery.set_policy(policy(Mode::Recover));
    let killed = world.see(100, stalled());
    assert_eq!((killed.stage, killed.granted_by), (Some(EpisodeStage::Killed), Some(GrantedBy::Operator)));
    assert_eq!(killed.effects, [Effect::Fence, Effect::Kill]);
    world.recovery.set_policy(policy(Mode::Observe));
    world.process = None;
    assert_eq!(world.see(100, Verdict::Dead).stage, Some(EpisodeStage::Restarting), "what was killed comes back");
}

fn outcome(verdict: Verdict) -> Outcome {
    let actions = match &verdict {
        Verdict::Suspect(_) | Verdict::Dead => vec![Action::Fence],
        Verdict::Stalled(StallClass::Unkillable) => vec![Action::Fence, Action::EscalateToNode],
        Verdict::Stalled(_) => vec![Action::Fence, Action::CaptureEvidence, Action::WantRestart],
        Verdict::Starting | Verdict::Unknown => vec![],
        _ => vec![Action::Unfence],
    };
    let fenced = actions.contains(&Action::Fence);
    Outcome { verdict, actions, fenced, ..Outcome::default() }
}

struct World {
    recovery: Recovery,
    now: Ms,
    process: Option<u64>,
    evidence: bool,
    granted: bool,
    answered: Option<Ms>,
    leaves: bool,
    spared: Option<u64>,
}

impl World {
    fn new(policy: RecoveryPolicy) -> Self {
        Self {
            recovery: Recovery::new(policy),
            now: 0,
            process: Some(1),
            evidence: false,
            granted: false,
            answered: None,
            leaves: false,
            spared: None,
        }
    }

    fn see(&mut self, ms: Ms, verdict: Verdict) -> RecoveryOutput {
        self.now += ms;
        let outcome = outcome(verdict);
        self.recovery.step(
            self.now,
            &RecoveryInput {
                spared: self.spared,
                outcome: &outcome,
                evidence_done: self.evidence,
                granted: self.granted,
                operator_answered_ms: self.answered,
                process: self.process,
                leaves: self.leaves,
            },
        )
    }
}

fn stall() -> Verdict {
    Verdict::Stalled(StallClass::StepStalled)
}

#[test]
fn a_grant_for_what_proved_to_be_no_engine_is_given_back() {
    let starting = || Verdict::Stalled(StallClass::StartupStalled);
    for (process, verdict) in [(None, Verdict::Starting), (Some(1), starting()), (Some(2), Verdict::Starting)] {
        let mut world = World::new(RecoveryPolicy { unattended_after_ms: Some(100), ..RecoveryPolicy::default() });
        world.evidence = true;
        let killed = |out: &RecoveryOutput| out.effects.contains(&Effect::Kill);
        let out = (0..9).map(|_| world.see(100, starting())).find(killed).unwrap();
        assert_eq!(out.stage, Some(EpisodeStage::Killed));
        (world.spared, world.process) = (Some(1), process);
        assert_eq!(world.see(100, verdict.clone()).stage, Some(EpisodeStage::Cleared), "{process:?}");
        assert_eq!(world.see(100, verdict).stage, None, "nothing is asked for it any more");
        // one that has served and hangs is an engine, or its successor; and nothing was spent
        world.process = process.or(Some(3));
        assert!((0..9).any(|_| killed(&world.see(100, stall()))), "{process:?}");
    }
}

#[test]
fn an_engine_that_ends_when_its_replica_has_left_is_no_death_and_one_that_stalls_then_is_a_stall() {
    let mut world = World::new(RecoveryPolicy::default());
    (world.leaves, world.process) = (true, None);
    let out = world.see(100, Verdict::Dead);
    assert_eq!((out.stage, out.effects), (None, vec![Effect::Fence]));
    world.leaves = false;
    assert_eq!(world.see(100, Verdict::Dead).stage, Some(EpisodeStage::Restarting), "it owed something");

    let mut world = World { leaves: true, ..World::new(RecoveryPolicy::default()) };
    assert_eq!(world.see(100, stall()).stage, Some(EpisodeStage::Stalled));
    world.process = None;
    assert_eq!(world.see(100, Verdict::Dead).stage, Some(EpisodeStage::Restarting), "its episode goes on");
}

#[test]
fn the_whole_way_with_an_operator() {
    let mut world = World::new(RecoveryPolicy::default());
    assert_eq!(world.see(0, Verdict::Progressing).stage, None);
    let out = world.see(100, Verdict::Suspect(StallClass::StepStalled));
    assert_eq!((out.stage, out.effects), (Some(EpisodeStage::Suspect), vec![Effect::Fence, Effect::OpenEpisode]));
    let out = world.see(2_000, stall());
    assert_eq!(
        (out.stage, out.effects),
        (Some(EpisodeStage::Stalled), vec![Effect::Fence, Effect::CaptureEvidence, Effect::RequestGrant])
    );
    world.granted = true;
    let out = world.see(100, stall());
    assert_eq!(out.stage, Some(EpisodeStage::Granted));
    assert!(!out.effects.contains(&Effect::Kill), "no kill before the evidence");
    world.evidence = true;
    let out = world.see(100, stall());
    assert_eq!((out.stage, out.granted_by), (Some(EpisodeStage::Killed), Some(GrantedBy::Operator)));
    assert!(out.effects.contains(&Effect::Kill));
    world.process = None;
    assert_eq!(world.see(100, Verdict::Dead).stage, Some(EpisodeStage::Restarting));
    world.process = Some(2);
    assert_eq!(world.see(100, Verdict::Starting).stage, Some(EpisodeStage::Restarting));
    let out = world.see(100, Verdict::Idle);
    assert_eq!((out.stage, out.effects), (Some(EpisodeStage::Recovered), vec![Effect::Unfence, Effect::CloseEpisode]));
    assert_eq!(world.see(100, Verdict::Idle).stage, None);
}

#[test]
fn h2_evidence_that_never_comes_delays_the_kill_by_its_bound_and_no_more() {
    let mut world = World::new(RecoveryPolicy { self_grant: true, ..RecoveryPolicy::default() });
    world.see(0, stall());
    assert_eq!(world.see(21_000, stall()).stage, Some(EpisodeStage::Stalled));
    let out = world.see(1_000, stall());
    assert_eq!((out.stage, out.granted_by), (Some(EpisodeStage::Killed), Some(GrantedBy::Itself)));
}

#[test]
fn an_engine_that_delivers_again_is_not_killed_though_both_keys_are_turned() {
    let mut world = World::new(RecoveryPolicy::default());
    world.see(0, stall());
    world.granted = true;
    assert_eq!(world.see(100, stall()).stage, Some(EpisodeStage::Granted));
    world.evidence = true;
    let out = world.see(100, Verdict::Progressing);
    assert_eq!((out.stage, out.effects), (Some(EpisodeStage::Cleared), vec![Effect::Unfence, Effect::CloseEpisode]));
}

#[test]
fn a_crash_is_an_episode_without_a_kill() {
    let mut world = World::new(RecoveryPolicy::default());
    world.see(0, Verdict::Progressing);
    world.process = None;
    let out = world.see(100, Verdict::Dead);
    assert_eq!((out.stage, out.class.as_deref()), (Some(EpisodeStage::Restarting), Some("Dead")));
    world.process = Some(2);
    world.see(100, Verdict::Starting);
    assert_eq!(world.see(100, Verdict::Progressing).stage, Some(EpisodeStage::Recovered));
}

#[test]
fn who_ends_while_only_suspected_has_died_and_leaves_its_evidence() {
    for successor in [None, Some(2)] {
        let mut world = World::new(RecoveryPolicy::default());
        world.see(0, Verdict::Suspect(StallClass::StepStalled));
        world.process = successor;
        let out = world.see(1_000, if successor.is_none() { Verdict::Dead } else { Verdict::Starting });
        assert_eq!((out.stage, out.class.as_deref()), (Some(EpisodeStage::Restarting), Some("Dead")));
        assert!(out.effects.contains(&Effect::CaptureEvidence), "{:?}", out.effects);
        assert!(!world.see(100, Verdict::Dead).effects.contains(&Effect::CaptureEvidence), "once");
    }
    let mut world = World { leaves: true, ..World::new(RecoveryPolicy::default()) };
    world.see(0, Verdict::Suspect(StallClass::StepStalled));
    world.process = None;
    assert_eq!(world.see(100, Verdict::Dead).stage, Some(EpisodeStage::Cleared), "it was asked to leave");
    assert_eq!(world.see(100, Verdict::Dead).stage, None);
}

#[test]
fn an_operator_that_answers_is_not_absent() {
    let unattended = RecoveryPolicy { unattended_after_ms: Some(60_000), ..RecoveryPolicy::default() };
    let mut world = World::new(unattended);
    world.evidence = true;
    for _ in 0..600 {
        world.answered = Some(world.now);
        assert_eq!(world.see(1_000, stall()).stage, Some(EpisodeStage::Stalled), "the operator queued it each second");
    }
    assert_eq!(world.see(58_000, stall()).stage, Some(EpisodeStage::Stalled));
    let out = world.see(2_000, stall());
    assert_eq!(
        (out.stage, out.granted_by),
        (Some(EpisodeStage::Killed), Some(GrantedBy::Itself)),
        "a minute of absence"
    );
}

#[test]
fn modes_do_no_more_than_they_say() {
    for (mode, fences) in [(Mode::Observe, false), (Mode::Fence, true)] {
        let mut world = World::new(RecoveryPolicy { mode, self_grant: true, ..RecoveryPolicy::default() });
        for _ in 0..1_000 {
            let out = world.see(100, stall());
            assert_eq!(out.effects.contains(&Effect::Fence), fences);
            assert!(out.effects.contains(&Effect::CaptureEvidence), "whoever restarts it by hand wants it");
            assert!(!out.effects.contains(&Effect::Kill) && !out.effects.contains(&Effect::RequestGrant));
        }
    }
}

#[test]
fn an_unkillable_process_is_the_nodes() {
    let mut world = World::new(RecoveryPolicy { self_grant: true, ..RecoveryPolicy::default() });
    world.see(0, stall());
    world.evidence = true;
    let out = world.see(100, stall());
    assert!(out.effects.contains(&Effect::Kill) && out.class.as_deref() == Some("StepStalled"));
    let out = world.see(10_000, Verdict::Stalled(StallClass::Unkillable));
    assert!(out.effects.contains(&Effect::EscalateToNode) && !out.effects.contains(&Effect::Kill));
    let said = |out: &RecoveryOutput| (out.stage, out.class.clone());
    let undead = Some("Unkillable".to_owned());
    assert_eq!(said(&out), (Some(EpisodeStage::Killed), undead.clone()), "whoever can do something reads the class");
    assert_eq!(said(&world.see(100, Verdict::Unknown)), (Some(EpisodeStage::Killed), undead.clone()));
    world.process = None;
    assert_eq!(said(&world.see(60_000, Verdict::Dead)), (Some(EpisodeStage::Restarting), undead), "it ended at last");
}

#[test]
fn a_process_that_outlives_the_kill_of_a_former_agent_is_told_of_at_every_stage() {
    let undead = || Verdict::Stalled(StallClass::Unkillable);
    for (before, process) in [(stall(), Some(1)), (Verdict::Dead, None)] {
        let mut world = World::new(RecoveryPolicy::default());
        world.see(0, Verdict::Progressing);
        world.process = process;
        let first = world.see(100, before);
        world.process = Some(1);
        let out = world.see(10_000, undead());
        assert_eq!((out.stage, out.class.as_deref()), (first.stage, Some("Unkillable")));
        assert!(out.effects.contains(&Effect::EscalateToNode));
    }
}

fn verdicts() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        6 => Just(stall()),
        2 => Just(Verdict::Suspect(StallClass::StepStalled)),
        1 => Just(Verdict::Progressing),
        1 => Just(Verdict::Dead),
        1 => Just(Verdict::Starting),
        1 => Just(Verdict::Unknown),
        1 => Just(Verdict::Stalled(StallClass::Unkillable)),
    ]
}

proptest! {
    #[test]
    fn a_kill_has_both_keys_and_evidence_or_its_bound_and_own_grants_are_rare(
        steps in proptest::collection::vec((0u64..30_000, verdicts(), any::<bool>(), any::<bool>(), 0u64..3), 1..200),
        after in proptest::option::of(0u64..60_000),
        self_grant in any::<bool>(),
    ) {
        let window = 120_000;
        let policy = RecoveryPolicy { unattended_after_ms: after, unattended_window_ms: window, self_grant, ..RecoveryPolicy::default() };
        let mut world = World::new(policy);
        let (mut confirmed, mut operator, mut own) = (None, false, Vec::new());
        let mut last_stage = None;
        for (ms, verdict, evidence, granted, process) in steps {
            world.evidence = evidence;
            world.granted = granted;
            world.process = (process > 0).then_some(process);
            let out = world.see(ms, verdict.clone());
            let fresh = out.effects.contains(&Effect::OpenEpisode);
            if fresh {
                (confirmed, operator) = (None, false);
            }
            if out.stage >= Some(EpisodeStage::Stalled) && out.stage <= Some(EpisodeStage::Killed) && confirmed.is_none() {
                confirmed = Some(world.now);
            }
            operator |= granted;
            if out.granted_by == Some(GrantedBy::Itself) && last_stage < Some(EpisodeStage::Granted) && !self_grant {
                own.push(world.now);
            }
            if out.effects.contains(&Effect::Kill) {
                prop_assert_eq!(&verdict, &stall(), "killed without a confirmed verdict");
                prop_assert!(operator || self_grant || after.is_some(), "killed with one key");
                prop_assert!(out.granted_by.is_some());
                let waited = world.now - confirmed.unwrap_or(world.now);
                prop_assert!(evidence || waited >= 22_000, "killed before the evidence, after {} ms", waited);
            }
            last_stage = out.stage.filter(|stage| !stage.closed());
        }
        for pair in own.windows(2) {
            prop_assert!(pair[1] - pair[0] >= window, "two own grants in one window: {:?}", pair);
        }
    }
}
