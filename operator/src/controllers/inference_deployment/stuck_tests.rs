//! A rollback whose Deployment cannot get further: what it takes back stands on, and is recovered like any other.

use super::{
    tests::{Bench, now, of_revision},
    *,
};
use crate::controllers::inference_deployment::{
    build::build,
    plan::{self, Plan},
    status::status,
    testing::{healthy, infd, pod, template},
};
use crds::{episode::ANNOTATION_RESTART_GRANT, restart::RestartWish};
use serde_json::json;

/// Taken back so many seconds ago, its own replica `c` stalled, and a successor `d` not up.
fn taken_back(seconds: i64) -> Bench {
    let mut bench = Bench::new(vec![pod("c", "Stalled", 1)]);
    let mut memory = bench.look().0.memory;
    memory.failed[0].at = (now() - SignedDuration::from_secs(seconds)).to_string();
    let infd_status = bench.observed.infd.status.as_mut().unwrap();
    infd_status.rollout = memory;
    infd_status.observed_generation = 1;
    live(&mut bench)["spec"]["template"] = template(&infd("chat"));
    live(&mut bench)["metadata"]["ownerReferences"] = json!([{"uid": "uid-infd", "controller": true}]);
    let starting = PodView { ready: false, progressing: None, ..healthy("d") };
    bench.observed.pods.push(of_revision(&bench.good, starting));
    bench
}

fn live(bench: &mut Bench) -> &mut Value {
    bench.observed.children.get_mut("Deployment").unwrap()
}

fn planned(bench: &Bench) -> Plan {
    plan::plan(&bench.observed, build(&bench.observed.infd), None, now())
}

/// Is its replica told to restart; and is the rollback said to be stuck?
fn seen(bench: &Bench) -> (bool, bool) {
    let plan = planned(bench);
    let told = plan.pods.iter().any(|patch| patch.annotations.contains_key(ANNOTATION_RESTART_GRANT));
    assert_eq!(told, plan.grants.len() == 1);
    (told, plan.stuck.is_some())
}

fn unplaced(bench: &mut Bench, since: &str) {
    bench.observed.pods[3].unschedulable_since = Some(since.to_owned());
}

fn condition(bench: &mut Bench, type_: &str, reason: &str) {
    live(bench)["status"]["conditions"] = json!([{"type": type_, "status": "True", "reason": reason}]);
}

#[test]
fn while_a_rollback_moves_what_goes_gets_no_restart() {
    assert_eq!(seen(&taken_back(3_600)), (false, false));
    let mut fresh = taken_back(3_600);
    unplaced(&mut fresh, "2026-01-01T00:01:31Z");
    assert_eq!(seen(&fresh), (false, false), "a place may be found yet");
    let mut young = taken_back(30);
    unplaced(&mut young, "2026-01-01T00:00:00Z");
    assert_eq!(seen(&young), (false, false), "the controller may not have looked");
    let mut begins = taken_back(120);
    live(&mut begins)["spec"]["template"] = template(&begins.observed.infd);
    assert_eq!(seen(&begins), (false, false), "a record may be waited for");
}

#[test]
fn a_rollback_that_a_former_leader_dated_ahead_is_not_waited_for() {
    let mut ahead = taken_back(-7_200);
    unplaced(&mut ahead, "2026-01-01T00:00:00Z");
    assert!(seen(&ahead).0, "or nothing would be recovered for two hours");
}

#[test]
fn where_a_rollback_does_not_move_what_stands_is_recovered() {
    let stuck = (true, true);
    let after = |change: fn(&mut Bench)| {
        let mut bench = taken_back(31);
        change(&mut bench);
        seen(&bench)
    };
    assert_eq!(after(|b| unplaced(b, "2026-01-01T00:01:29Z")), stuck);
    assert_eq!(after(|b| condition(b, "ReplicaFailure", "FailedCreate")), stuck);
    assert_eq!(after(|b| condition(b, "Progressing", "ProgressDeadlineExceeded")), stuck);
    assert_eq!(after(|b| condition(b, "Progressing", "ReplicaSetUpdated")), (false, false));
    assert_eq!(after(|b| live(b)["spec"]["paused"] = json!(true)), stuck);
    let mut refused = taken_back(121);
    live(&mut refused)["spec"]["template"] = template(&refused.observed.infd);
    assert_eq!(seen(&refused), stuck, "nobody lets the operator change the Deployment");
    refused.observed.infd.metadata.generation = Some(2);
    assert_eq!(seen(&refused), (false, false), "another spec, looked at for the first time");
}

#[test]
fn a_persons_word_goes_before_a_rollback() {
    let mut bench = taken_back(1);
    let wish = RestartWish { episode: "e-c".to_owned(), ..RestartWish::default() };
    bench.observed.pods[2].wish = Some(wish);
    assert_eq!(seen(&bench), (true, false));
}

#[test]
fn the_status_says_why_there_is_no_restart_or_no_rollback() {
    let message = |bench: &Bench, type_: &str| {
        let status = status(&bench.observed, &planned(bench), &[], &[], now());
        status.conditions.into_iter().find(|c| c.type_ == type_).unwrap().message
    };
    let mut bench = taken_back(31);
    let told = message(&bench, "EnginesProgressing");
    assert!(
        told.ends_with(&format!("; a restart is not granted: revision {} goes with its replicas", bench.bad)),
        "{told}"
    );
    unplaced(&mut bench, "2026-01-01T00:01:00Z");
    let told = message(&bench, "Stalled");
    assert!(told.contains("; that does not move (there is no place for d), and what stands is recovered;"), "{told}");
    assert!(!message(&bench, "EnginesProgressing").contains("not granted"));
}
