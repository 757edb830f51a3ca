//! How many replicas the Deployment gets (O5), pure: what the spec says, which an autoscaler may own, unless an open incident holds it.
//!
//! Figures that a stall has bent say too little or too much: a fleet that lost half its replicas to a hang was scaled from 6 to 20 and
//! back to 6, and the two frozen ones were among the six. The frozen ones going first is the deletion cost's work (`plan`); here is the
//! freeze that a policy may ask for meanwhile, which always has an end.

use crds::{conditions::SCALING_HELD, scaling::DuringIncidents};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{
    build::{Child, revision},
    observed::{Observed, PodView},
};
use crate::wall::AHEAD_MAX;

/// Annotation on the Deployment: how many replicas the operator gave it, and to which revision. `kubectl rollout undo` brings back the annotations
/// of an old ReplicaSet, and these speak of another.
pub const ANNOTATION_REPLICAS: &str = "inference.truebeat.io/replicas";

/// Puts the number of replicas into the wanted Deployment; says why where it is not the spec's.
pub fn steer(observed: &Observed, desired: &mut [Child], now: Timestamp) -> Option<String> {
    let wanted = observed.infd.spec.replicas;
    let child = desired.iter_mut().find(|child| child.resource.kind == "Deployment")?;
    give(&mut child.body, wanted);
    let target = observed.infd.status.as_ref().map(|status| status.rollout.target.as_str()).unwrap_or_default();
    let standing = given(observed.children.get("Deployment")?, target)?;
    let policy = &observed.infd.spec.scaling;
    let replicas = match policy.during_incidents {
        _ if wanted == 0 => wanted,
        DuringIncidents::Follow => wanted,
        DuringIncidents::NoScaleIn => wanted.max(standing),
        DuringIncidents::Hold => standing,
    };
    let most = SignedDuration::from_secs(policy.hold_seconds_max.into());
    if replicas == wanted {
        return None;
    }
    if held_for_too_long(observed, most, now) {
        // told until it has followed: a write that fails must not begin another freeze
        let over = format!("{standing} replicas were held for as long as the policy allows; {wanted} follow");
        return (standing != wanted).then_some(over);
    }
    let pod = observed.pods.iter().find(|pod| stalls(observed, pod, most, now))?;
    give(&mut child.body, replicas);
    Some(format!("{wanted} replicas are wanted, {standing} stay while {} stalls", pod.name))
}

/// Makes it the number of this Deployment, with a note of it.
fn give(deployment: &mut Value, replicas: i32) {
    deployment["spec"]["replicas"] = json!(replicas);
    let note = format!("{replicas}@{}", revision::of(&deployment["spec"]["template"]));
    deployment["metadata"]["annotations"][ANNOTATION_REPLICAS] = json!(note);
}

/// The number that the operator gave this Deployment last: what somebody else has written there since is no policy's. An earlier version
/// has left no note of it.
fn given(live: &Value, target: &str) -> Option<i32> {
    noted(live, target).or_else(|| standing(live))
}

fn noted(live: &Value, target: &str) -> Option<i32> {
    let noted = live["metadata"]["annotations"][ANNOTATION_REPLICAS].as_str().and_then(|noted| noted.split_once('@'));
    noted.filter(|(_, revision)| *revision == target).and_then(|(replicas, _)| replicas.parse().ok())
}

fn standing(live: &Value) -> Option<i32> {
    i32::try_from(live["spec"]["replicas"].as_i64()?).ok()
}

/// The number that somebody else has written on the Deployment, where the operator gave it another.
pub fn overwritten(observed: &Observed) -> Option<i32> {
    let live = observed.children.get("Deployment")?;
    let given = noted(live, &observed.infd.status.as_ref()?.rollout.target)?;
    standing(live).filter(|there| *there != given)
}

/// The replicas that the wanted Deployment keeps up, if there is one.
pub fn replicas_of(desired: &[Child]) -> Option<usize> {
    let child = desired.iter().find(|child| child.resource.kind == "Deployment")?;
    usize::try_from(child.body["spec"]["replicas"].as_u64()?).ok()
}

/// Has the number been held for so long, by whatever incidents one after another? Where replicas stall in turn one is always young enough. Once
/// the number has followed, another wish may be held anew.
fn held_for_too_long(observed: &Observed, most: SignedDuration, now: Timestamp) -> bool {
    let told = observed.infd.status.iter().flat_map(|status| &status.conditions);
    let mut held = told.filter(|c| c.type_ == SCALING_HELD && c.status == "True");
    held.next().is_some_and(|held| !is_younger(held.last_transition_time.0, most, now))
}

/// What is further ahead than clocks differ has no age, and is not young.
fn is_younger(since: Timestamp, age_max: SignedDuration, now: Timestamp) -> bool {
    let age = now.duration_since(since);
    age < age_max && age >= -AHEAD_MAX
}

/// Is an episode open on it that is younger than this? One whose age cannot be read holds nothing: a freeze must have an end.
fn stalls(observed: &Observed, pod: &PodView, age_max: SignedDuration, now: Timestamp) -> bool {
    let Some(episode) = pod.open_episode().filter(|_| !pod.leaving) else { return false };
    // the record's age is by the server's clock; before there is one, the agent's has to do, which may be wrong
    let record = observed.incidents.iter().find(|incident| incident.tells_of(&episode.id, &pod.uid));
    let recorded = record.and_then(|incident| incident.metadata.creation_timestamp.as_ref()).map(|time| time.0);
    let told = || episode.suspect_at.as_deref().and_then(|at| at.parse::<Timestamp>().ok());
    recorded.or_else(told).is_some_and(|since| is_younger(since, age_max, now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        build::build,
        observed::EpisodeView,
        testing::{healthy, infd, looked, pod},
    };
    use crds::EngineIncident;

    /// The replicas that the Deployment gets: `standing` are there, the spec says `wanted`, one stalls since second 1.
    fn replicas(policy: DuringIncidents, standing: i32, wanted: i32, second: &str) -> (i64, bool) {
        let mut object = infd("chat");
        object.spec.replicas = wanted;
        object.spec.scaling.during_incidents = policy;
        object.spec.scaling.hold_seconds_max = 30;
        let live = json!({"spec": {"replicas": standing}});
        let pods = vec![healthy("a"), pod("b", "Stalled", 1)];
        let mut desired = build(&object);
        let children = [("Deployment".to_owned(), live)].into();
        let observed = Observed { children, ..looked(object, pods) };
        let now = format!("2026-01-01T00:00:{second}Z").parse().unwrap();
        let held = steer(&observed, &mut desired, now).is_some();
        (desired.last().unwrap().body["spec"]["replicas"].as_i64().unwrap(), held)
    }

    /// Is the scale-in held at second 10 while the agent says that it began then, and the record was made at that second?
    fn held_by(suspect_at: &str, recorded_at: Option<&str>) -> bool {
        let mut object = infd("chat");
        object.spec.replicas = 6;
        object.spec.scaling.during_incidents = DuringIncidents::Hold;
        object.spec.scaling.hold_seconds_max = 30;
        let mut frozen = pod("b", "Stalled", 1);
        if let EpisodeView::Known(reported) = &mut frozen.episode {
            reported.episode.suspect_at = Some(suspect_at.to_owned());
        }
        let record = |at: &str| -> EngineIncident {
            let spec = json!({"deployment": "chat", "pod": "b", "podUid": frozen.uid, "class": "Livelock", "episodeId": "e-b"});
            let metadata = json!({"name": "i", "creationTimestamp": at});
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
        };
        let incidents = recorded_at.map(record).into_iter().collect();
        let mut desired = build(&object);
        let children = [("Deployment".to_owned(), json!({"spec": {"replicas": 20}}))].into();
        let observed = Observed { children, incidents, ..looked(object, vec![frozen]) };
        steer(&observed, &mut desired, "2026-01-01T00:00:10Z".parse().unwrap()).is_some()
    }

    #[test]
    fn a_freeze_ends_whatever_the_clock_of_a_node_says() {
        assert!(held_by("2026-01-01T00:00:01Z", None));
        assert!(held_by("2026-01-01T00:04:00Z", None), "a little ahead");
        assert!(!held_by("2099-01-01T00:00:00Z", None), "from the future");
        assert!(held_by("2099-01-01T00:00:00Z", Some("2026-01-01T00:00:02Z")), "the server knows when it began");
        assert!(!held_by("2099-01-01T00:00:00Z", Some("2025-12-31T23:59:00Z")), "and when it has been long enough");
        assert!(held_by("2025-12-31T23:00:00Z", Some("2026-01-01T00:00:02Z")), "a clock that is slow");
    }

    #[test]
    fn a_freeze_ends_whatever_incidents_follow_one_another() {
        let held = |since: &str| {
            let mut object = infd("chat");
            object.spec.replicas = 20;
            object.spec.scaling.during_incidents = DuringIncidents::Hold;
            object.spec.scaling.hold_seconds_max = 30;
            let condition = json!({"type": "ScalingHeld", "status": "True", "reason": "IncidentOpen", "message": "", "lastTransitionTime": since});
            object.status.get_or_insert_default().conditions = vec![serde_json::from_value(condition).unwrap()];
            let mut desired = build(&object);
            let children = [("Deployment".to_owned(), json!({"spec": {"replicas": 6}}))].into();
            let observed = Observed { children, ..looked(object, vec![healthy("a"), pod("b", "Stalled", 55)]) };
            let said = steer(&observed, &mut desired, "2026-01-01T00:01:00Z".parse().unwrap());
            (said.is_some(), desired.last().unwrap().body["spec"]["replicas"].as_i64().unwrap())
        };
        assert_eq!(held("2026-01-01T00:00:45Z"), (true, 6));
        assert_eq!(
            held("2026-01-01T00:00:20Z"),
            (true, 20),
            "one stall came after another; told until it has followed"
        );
        assert_eq!(held("2099-01-01T00:00:00Z"), (true, 20), "by a clock that was wrong");
    }

    #[test]
    fn a_number_that_somebody_else_wrote_is_not_held() {
        let mut object = infd("chat");
        object.spec.replicas = 6;
        object.spec.scaling.during_incidents = DuringIncidents::Hold;
        let mut desired = build(&object);
        let now = "2026-01-01T00:00:10Z".parse().unwrap();
        let mut observed = looked(object, vec![pod("b", "Stalled", 1)]);
        assert_eq!(steer(&observed, &mut desired, now), None, "there is none yet");
        let mut live = desired.last().unwrap().body.clone();
        live["spec"]["replicas"] = json!(500);
        let target = revision::of(&live["spec"]["template"]).to_owned();
        observed.infd.status.get_or_insert_default().rollout.target = target;
        observed.children.insert("Deployment".to_owned(), live);
        assert_eq!(steer(&observed, &mut desired, now), None);
        assert_eq!(desired.last().unwrap().body["spec"]["replicas"], 6);
        // the annotations of an old ReplicaSet, brought back by `kubectl rollout undo`
        let live = observed.children.get_mut("Deployment").unwrap();
        (live["spec"]["replicas"], live["metadata"]["annotations"][ANNOTATION_REPLICAS]) = (json!(20), json!("8@old"));
        assert!(steer(&observed, &mut desired, now).is_some_and(|why| why.contains("20 stay")));
    }

    #[test]
    fn the_policy_says_what_an_incident_holds() {
        use DuringIncidents::{Follow, Hold, NoScaleIn};
        let table = [
            (Follow, 6, 20, 20, false),
            (Follow, 20, 6, 6, false),
            (NoScaleIn, 6, 20, 20, false),
            (NoScaleIn, 20, 6, 20, true),
            (Hold, 6, 20, 6, true),
            (Hold, 20, 6, 20, true),
            (Hold, 6, 6, 6, false),
            (Hold, 6, 0, 0, false),
            (NoScaleIn, 6, 0, 0, false),
        ];
        for (policy, standing, wanted, gets, held) in table {
            assert_eq!(replicas(policy, standing, wanted, "10"), (gets, held), "{policy:?} {standing} -> {wanted}");
        }
        assert_eq!(replicas(Hold, 6, 20, "31"), (20, false), "an old incident holds nothing any more");
    }
}
