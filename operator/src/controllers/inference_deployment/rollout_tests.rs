//! Rollouts as small histories: what stands, what is wanted, what the new replicas do.

use super::*;
use crate::controllers::inference_deployment::{
    build::build,
    plan,
    testing::{healthy, infd, looked, pod, template},
};
use crds::{
    EngineIncident, InferenceDeployment, LABEL_REVISION,
    episode::{ANNOTATION_RESTART_GRANT, ANNOTATION_RESTART_QUEUED},
    rollout::FailureReason,
};
use serde_json::json;

pub(super) fn now() -> Timestamp {
    "2026-01-01T00:02:00Z".parse().unwrap()
}

fn revised(image: &str) -> InferenceDeployment {
    let mut object = infd("chat");
    object.spec.engine.image = image.to_owned();
    object
}

pub(super) fn of_revision(revision: &str, pod: PodView) -> PodView {
    PodView { revision: revision.to_owned(), ..pod }
}

pub(super) fn changed(observed: &mut Observed, change: impl FnOnce(&mut crds::InferenceDeploymentSpec)) {
    change(&mut observed.infd.spec);
    *observed.infd.metadata.generation.as_mut().unwrap() += 1;
}

/// A Deployment that runs the good revision, and a spec that wants another: `new` are the replicas of that.
pub(super) struct Bench {
    pub(super) observed: Observed,
    pub(super) good: String,
    pub(super) bad: String,
}

impl Bench {
    pub(super) fn new(new: Vec<PodView>) -> Self {
        let (old, wanted) = (template(&infd("chat")), revised("engine:2"));
        let (good, bad) = (revision::of(&old).to_owned(), revision::of(&template(&wanted)).to_owned());
        let mut set = old.clone();
        set["metadata"]["labels"]["pod-template-hash"] = json!("5d8f");
        set["metadata"]["creationTimestamp"] = Value::Null;
        let live = json!({
            "metadata": {"generation": 2, "uid": "uid-deployment"},
            "spec": {"replicas": 2, "template": template(&wanted)},
            "status": {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 1, "availableReplicas": 2},
        });
        let of = |template: Value| {
            let owner = json!({"uid": "uid-deployment", "controller": true});
            json!({"metadata": {"ownerReferences": [owner]}, "spec": {"template": template, "replicas": 1}})
        };
        let sets = json!([of(template(&wanted)), of(set)]);
        let children = [("Deployment".to_owned(), live), ("ReplicaSet".to_owned(), sets)].into();
        let mut pods = vec![of_revision(&good, healthy("a")), of_revision(&good, healthy("b"))];
        pods.extend(new.into_iter().map(|pod| of_revision(&bad, pod)));
        let mut observed = Observed { children, ..looked(wanted, pods) };
        observed.infd.status.get_or_insert_default().rollout.stable.clone_from(&good);
        Bench { observed, good, bad }
    }

    pub(super) fn look(&self) -> (Course, Value) {
        let mut desired = build(&self.observed.infd);
        let course = steer(&self.observed, &mut desired, now());
        (course, desired.pop().unwrap().body["spec"]["template"].take())
    }

    /// The reason of the failure that was found, `Failed`, or nothing.
    pub(super) fn word(&self) -> String {
        match self.look().0.state {
            State::Well => String::new(),
            State::RolledBack(failed) => format!("{:?}", failed.reason),
            State::Held(_) => "Held".to_owned(),
            State::Failed(_) => "Failed".to_owned(),
        }
    }
}

#[test]
fn a_new_replica_that_stalls_takes_its_revision_back() {
    let bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    let (course, template) = bench.look();
    let State::RolledBack(failed) = &course.state else { panic!("{course:?}") };
    assert_eq!((failed.reason, failed.revision.as_str()), (FailureReason::ReplicaStalled, bench.bad.as_str()));
    assert!(failed.message.contains("new replica c") && failed.message.contains("StepStalled"), "{}", failed.message);
    assert_eq!((&course.memory.target, &course.memory.stable), (&bench.good, &bench.good));
    assert_eq!(course.memory.failed, std::slice::from_ref(failed));
    assert_eq!(
        template,
        super::super::testing::template(&infd("chat")),
        "to the byte what stood there before, without the controller's own"
    );
}

#[test]
fn what_failed_once_is_not_tried_again_and_another_spec_is() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    let first = bench.look().0;
    bench.observed.infd.status.as_mut().unwrap().rollout = first.memory.clone();
    bench.observed.pods.pop(); // it is gone with its revision
    let later = bench.look().0;
    assert_eq!(later, first, "remembered, to the time of it: quiescent is silent (P7)");
    changed(&mut bench.observed, |spec| spec.engine.image = "engine:3".to_owned());
    let fixed = bench.look().0;
    assert_eq!((fixed.state, fixed.memory.failed.len()), (State::Well, 1));
    assert_ne!(fixed.memory.target, bench.good);
    changed(&mut bench.observed, |spec| spec.engine.image = "engine:2".to_owned());
    assert_eq!(bench.word(), "ReplicaStalled", "the same spec again is the same revision");
    changed(&mut bench.observed, |spec| spec.rollout.attempt = 1);
    assert_eq!(bench.word(), "", "somebody wants it tried once more");
    changed(&mut bench.observed, |spec| *spec = infd("chat").spec);
    assert_eq!(bench.look().0.state, State::Well, "a revert in Git is the good revision itself");
}

#[test]
fn only_what_speaks_against_the_revision_counts() {
    let suspect = pod("c", "Suspect", 1);
    let recovered = pod("c", "Recovered", 1);
    let leaving = PodView { leaving: true, ..pod("c", "Stalled", 1) };
    for new in [suspect, recovered, leaving] {
        assert_eq!(Bench::new(vec![new]).word(), "");
    }
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    bench.observed.pods[0] = of_revision(&bench.good, pod("a", "Stalled", 1));
    assert_eq!(bench.word(), "", "an old one stalls as well: a common cause");
}

#[test]
fn as_many_stalls_as_the_policy_bears() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    bench.observed.infd.spec.rollout.tolerated_stalls = 1;
    assert_eq!(bench.word(), "");
    let past: EngineIncident = serde_json::from_value(json!({
        "metadata": {"name": "i"},
        "spec": {"deployment": "chat", "pod": "c", "podUid": "uid-c", "class": "Livelock", "episodeId": "e-before"},
        "status": {"stage": "Recovered", "timeline": {"confirmedAt": "2026-01-01T00:00:00Z"}, "outcome": "Recovered"},
    }))
    .unwrap();
    bench.observed.incidents.push(past);
    assert_eq!(bench.word(), "ReplicaStalled", "one that it recovered from, and this one");
    let copy = PodView { name: "d".to_owned(), uid: "uid-d".to_owned(), ..pod("c", "Stalled", 1) };
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1), copy]);
    bench.observed.infd.spec.rollout.tolerated_stalls = 1;
    assert_eq!(bench.word(), "ReplicaStalled", "an id is unique in its pod alone");
}

#[test]
fn crashes_and_silence_have_names_of_their_own() {
    let new = |ready, restarts| PodView { ready, restarts, progressing: None, ..healthy("c") };
    assert_eq!(Bench::new(vec![new(false, 2)]).word(), "");
    assert_eq!(Bench::new(vec![new(true, 5)]).word(), "", "it serves now");
    assert_eq!(Bench::new(vec![new(false, 3)]).word(), "ReplicaCrashes");
    let mut killed_once = Bench::new(vec![new(false, 3)]);
    let killed = serde_json::from_value(json!({
        "metadata": {"name": "i"},
        "spec": {"deployment": "chat", "pod": "c", "podUid": "uid-c", "class": "Livelock", "episodeId": "e-1"},
        "status": {"stage": "Recovered", "timeline": {"killedAt": "2026-01-01T00:00:00Z"}, "outcome": "Recovered"},
    }));
    killed_once.observed.incidents.push(killed.unwrap());
    assert_eq!(killed_once.word(), "", "what we ended did not end by itself: that stall is borne, or not, as one");
    let mut bench = Bench::new(vec![new(false, 0)]);
    let overdue = json!([{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}]);
    bench.observed.children.get_mut("Deployment").unwrap()["status"]["conditions"] = overdue;
    assert_eq!(bench.word(), "NoProgress");
    bench.observed.children.get_mut("Deployment").unwrap()["metadata"]["generation"] = json!(3);
    assert_eq!(bench.word(), "", "that was said of an earlier template");
}

/// Scaled from nothing, the Deployment takes its template for rolled out, whatever its pods do.
#[test]
fn a_revision_that_came_while_there_were_no_replicas_has_a_clock_as_well() {
    let age = |seconds: i64| Some((now() - jiff::SignedDuration::from_secs(seconds)).to_string());
    let new = |seconds, pod| PodView { ready: false, progressing: None, created_at: age(seconds), ..pod };
    let word = |pods: Vec<PodView>| {
        let mut bench = Bench::new(pods);
        let whole = json!([{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]);
        bench.observed.children.get_mut("Deployment").unwrap()["status"]["conditions"] = whole;
        bench.observed.infd.spec.rollout.progress_deadline_seconds = 600;
        bench.word()
    };
    assert_eq!(word(vec![new(601, healthy("c")), new(700, healthy("d"))]), "NoProgress");
    assert_eq!(word(vec![new(599, healthy("c")), new(700, healthy("d"))]), "", "one of them has time left");
    assert_eq!(word(vec![PodView { ready: true, ..new(700, healthy("c")) }]), "");
    assert_eq!(
        word(vec![PodView { restarts: 1, ..new(700, healthy("c")) }]),
        "",
        "it was up, or its crashes are counted"
    );
    assert_eq!(word(vec![new(700, pod("c", "Suspect", 1))]), "", "its agent judges it");
    assert_eq!(word(vec![]), "");
}

#[test]
fn without_a_way_back_it_fails_where_it_stands() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    bench.observed.children.remove("ReplicaSet");
    assert!(matches!(bench.look().0.state, State::Failed(why) if why.contains("no ReplicaSet of the last good")));
    let mut first = Bench::new(vec![pod("c", "Stalled", 1)]);
    first.observed.infd.status = None;
    assert_eq!(first.word(), "", "a stall in the first rollout of all is recovery's affair");
    first.observed.pods = vec![of_revision(&first.bad, PodView { ready: false, restarts: 9, ..healthy("c") })];
    let (course, _) = first.look();
    assert!(matches!(course.state, State::Failed(why) if why.contains("no earlier revision")));
    first.observed.infd.status.get_or_insert_default().rollout = course.memory;
    first.observed.pods = vec![of_revision(&first.bad, PodView { restarts: 9, ..healthy("c") })];
    let known = first.look().0.state;
    assert!(matches!(known, State::Failed(_)), "up for a moment between two crashes: {known:?}");
}

#[test]
fn a_revision_that_is_held_stays_as_far_as_it_has_come() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    let paused = |bench: &Bench| {
        let mut desired = build(&bench.observed.infd);
        let course = steer(&bench.observed, &mut desired, now());
        let spec = desired.pop().unwrap().body["spec"].take();
        (course, spec["paused"] == true, revision::of(&spec["template"]).to_owned())
    };
    assert!(!paused(&bench).1, "a rollback is no pause");
    bench.observed.infd.spec.rollout.on_failure = OnFailure::Hold;
    let (course, held, template) = paused(&bench);
    assert_eq!((held, &template, bench.word().as_str()), (true, &bench.bad, "Held"), "neither further nor back");
    assert_eq!(course.taken_back(), "", "its replicas are replicas, and recovery is theirs");
    bench.observed.infd.status.as_mut().unwrap().rollout = course.memory.clone();
    bench.observed.pods[2] = of_revision(&bench.bad, healthy("c"));
    assert_eq!(
        paused(&bench),
        (course, true, template),
        "a restart has cured that replica, and nothing goes on for it (P7)"
    );
    changed(&mut bench.observed, |spec| spec.rollout.attempt = 1);
    assert!(!paused(&bench).1, "somebody wants it tried once more");
    changed(&mut bench.observed, |spec| spec.rollout.attempt = 0);
    changed(&mut bench.observed, |spec| spec.rollout.on_failure = OnFailure::RollBack);
    assert_eq!(bench.word(), "ReplicaStalled", "another policy for what has failed already");
}

/// A revision that is held, and what stands of it by the sizes of its ReplicaSets: the failed one's and the good one's.
fn held(sizes: [i32; 2]) -> Bench {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    bench.observed.infd.spec.rollout.on_failure = OnFailure::Hold;
    bench.observed.infd.status.as_mut().unwrap().rollout = bench.look().0.memory;
    bench.observed.pods.clear();
    for (set, size) in sizes.into_iter().enumerate() {
        bench.observed.children.get_mut("ReplicaSet").unwrap()[set]["spec"]["replicas"] = json!(size);
    }
    bench
}

/// Word, and whether it is paused; the template is the failed revision's.
fn as_wanted(bench: &Bench) -> (String, bool, bool) {
    let mut desired = build(&bench.observed.infd);
    steer(&bench.observed, &mut desired, now());
    let spec = desired.pop().unwrap().body["spec"].take();
    (bench.word(), spec["paused"] == true, revision::of(&spec["template"]) == bench.bad)
}

#[test]
fn where_nothing_of_a_held_revision_stands_the_good_one_comes_up() {
    let (held_there, good) = (("Held".to_owned(), true, true), ("ReplicaStalled".to_owned(), false, false));
    assert_eq!(as_wanted(&held([1, 2])), held_there);
    assert_eq!(as_wanted(&held([0, 2])), good, "it was rolled back, and then the policy became another");
    assert_eq!(as_wanted(&held([0, 0])), good, "the controller would give all to the revision of the template");
    let mut to_zero = held([1, 2]);
    to_zero.observed.infd.spec.replicas = 0;
    assert_eq!(as_wanted(&to_zero), good, "nobody can come too late for the way back up");
    let mut from_zero = held([1, 2]);
    from_zero.observed.children.get_mut("Deployment").unwrap()["spec"]["replicas"] = json!(0);
    assert_eq!(as_wanted(&from_zero), good, "its controller is about to see it");
}

#[test]
fn a_held_revision_without_a_deployment_is_made_without_a_pause() {
    let mut bench = held([1, 2]);
    bench.observed.children.remove("Deployment");
    assert_eq!(as_wanted(&bench), ("Failed".to_owned(), false, true), "a paused one would never have a pod");
    let mut anew = held([1, 2]);
    anew.observed.children.get_mut("Deployment").unwrap()["metadata"]["uid"] = json!("uid-another");
    assert_eq!(as_wanted(&anew), ("Failed".to_owned(), false, true), "the ReplicaSets of the one before do not count");
    let mut third = held([0, 1]);
    third.observed.children.get_mut("ReplicaSet").unwrap()[1]["spec"]["template"]["metadata"]["labels"]
        [LABEL_REVISION] = json!("third");
    assert_eq!(as_wanted(&third), ("Held".to_owned(), true, true), "no way back, and what stands is not replaced");
    let mut first = Bench::new(vec![PodView { ready: false, restarts: 9, ..healthy("c") }]);
    first.observed.infd.spec.rollout.on_failure = OnFailure::Hold;
    first.observed.infd.status = None;
    first.observed.children.remove("ReplicaSet");
    assert_eq!(as_wanted(&first), ("Held".to_owned(), true, true), "in the first rollout nobody knows the history yet");
}

#[test]
fn what_another_operator_took_back_stays_back() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    let first = bench.look().0;
    let memory = &mut bench.observed.infd.status.as_mut().unwrap().rollout;
    *memory = first.memory;
    // this operator makes another template of the spec that has failed
    for set in bench.observed.children.get_mut("ReplicaSet").unwrap().as_array_mut().unwrap() {
        let labels = &mut set["spec"]["template"]["metadata"]["labels"];
        if labels[LABEL_REVISION] == bench.bad.as_str() {
            labels[LABEL_REVISION] = json!("theirs");
        }
    }
    memory.wanted = "theirs".to_owned();
    memory.failed[0].revision = "theirs".to_owned();
    let stays_back = |bench: &Bench| {
        let (course, template) = bench.look();
        assert!(matches!(course.state, State::RolledBack(_)), "{course:?}");
        assert_eq!((revision::of(&template), &course.memory.newer), (bench.good.as_str(), &bench.bad));
    };
    stays_back(&bench);
    let sets = bench.observed.children.get_mut("ReplicaSet").unwrap().as_array_mut().unwrap();
    sets.retain(|set| revision::of(&set["spec"]["template"]) != "theirs");
    stays_back(&bench);
}

#[test]
fn a_replica_set_of_somebody_else_is_no_way_back() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    bench.observed.children.get_mut("ReplicaSet").unwrap()[1]["metadata"]["ownerReferences"][0]["uid"] = json!("other");
    assert_eq!(bench.word(), "Failed");
}

/// The pass that takes a revision back grants its replicas nothing, and hands out no key that an earlier one has stored.
#[test]
fn replicas_of_a_revision_that_is_taken_back_get_no_restart() {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    let planned = |bench: &Bench| plan::plan(&bench.observed, build(&bench.observed.infd), None, now());
    let told = |bench: &Bench| {
        planned(bench).pods.iter().any(|patch| patch.annotations.contains_key(ANNOTATION_RESTART_GRANT))
    };
    assert_eq!((planned(&bench).grants.len(), told(&bench)), (0, false));
    let note = planned(&bench).pods.iter().any(|patch| patch.annotations.contains_key(ANNOTATION_RESTART_QUEUED));
    assert!(note, "its agent hears that somebody is there, and does not help itself (I1)");
    let held = Bench::new(vec![pod("c", "Stalled", 1)]);
    bench.observed.infd.spec.rollout.on_failure = OnFailure::Hold;
    let granted = planned(&bench).grants;
    assert_eq!((granted.len(), told(&bench)), (1, true), "one that is held is a replica like any other");
    bench = held;
    bench.observed.infd.status.as_mut().unwrap().recovery.grants = granted;
    assert_eq!(
        (planned(&bench).grants.len(), told(&bench)),
        (1, false),
        "a slot that is taken stays so until it is gone"
    );
}

#[test]
fn the_memory_is_bounded_and_history_is_read_only_where_it_matters() {
    let mut failed = Vec::new();
    for n in 0..15 {
        let failure = FailedRevision { revision: n.to_string(), ..FailedRevision::default() };
        remember(&mut failed, &failure);
        remember(&mut failed, &failure);
    }
    assert_eq!((failed.len(), failed[9].revision.as_str()), (FAILED_MAX, "14"));
    let live = |revision: &str| json!({"spec": {"template": {"metadata": {"labels": {LABEL_REVISION: revision}}}}});
    let memory = RolloutStatus { stable: "s".to_owned(), ..RolloutStatus::default() };
    assert!(!needs_history(&RolloutStatus::default(), None) && !needs_history(&memory, Some(&live("s"))));
    assert!(needs_history(&memory, Some(&live("r"))) && needs_history(&memory, None));
    assert!(needs_history(&RolloutStatus { newer: "n".to_owned(), ..memory.clone() }, Some(&live("s"))));
    assert!(needs_history(&RolloutStatus { failed: failed.clone(), ..memory }, Some(&live("s"))));
    assert!(needs_history(&RolloutStatus { failed, ..RolloutStatus::default() }, None), "also in the first rollout");
}

#[test]
fn a_spec_that_cannot_be_built_forgets_nothing() {
    let bench = Bench::new(Vec::new());
    let course = steer(&bench.observed, &mut [], now());
    assert_eq!((course.state, course.memory.stable), (State::Well, bench.good));
}
