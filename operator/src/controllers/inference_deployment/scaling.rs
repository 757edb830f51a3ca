//! How many replicas the Deployment gets (O5), pure: what the spec says, which an autoscaler may own, unless an open incident holds it.
//!
//! Figures that a stall has bent say too little or too much: a fleet that lost half its replicas to a hang was scaled from 6 to 20 and
//! back to 6, and the two frozen ones were among the six. The frozen ones going first is the deletion cost's work (`plan`); here is the
//! freeze that a policy may ask for meanwhile, which always has an end.

use crds::scaling::DuringIncidents;
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::{
    build::Child,
    observed::{Observed, PodView},
};

/// Puts the number of replicas into the wanted Deployment; says why where it is not the spec's.
pub fn steer(observed: &Observed, desired: &mut [Child], now: Timestamp) -> Option<String> {
    let wanted = observed.infd.spec.replicas;
    let standing = &observed.children.get("Deployment")?["spec"]["replicas"];
    let standing = standing.as_i64().and_then(|n| i32::try_from(n).ok())?;
    let policy = &observed.infd.spec.scaling;
    let replicas = match policy.during_incidents {
        _ if wanted == 0 => wanted,
        DuringIncidents::Follow => wanted,
        DuringIncidents::NoScaleIn => wanted.max(standing),
        DuringIncidents::Hold => standing,
    };
    if replicas == wanted {
        return None;
    }
    let most = SignedDuration::from_secs(policy.hold_seconds_max.into());
    let pod = observed.pods.iter().find(|pod| stalls(pod, most, now))?;
    let child = desired.iter_mut().find(|child| child.resource.kind == "Deployment")?;
    child.body["spec"]["replicas"] = json!(replicas);
    Some(format!("{wanted} replicas are wanted, {standing} stay while {} stalls", pod.name))
}

/// Is an episode open on it that is younger than this? One whose age cannot be read holds nothing: a freeze must have an end.
fn stalls(pod: &PodView, age_max: SignedDuration, now: Timestamp) -> bool {
    let since = pod.open_episode().filter(|_| !pod.leaving).and_then(|episode| episode.suspect_at.as_deref());
    let since = since.and_then(|at| at.parse::<Timestamp>().ok());
    since.is_some_and(|since| now.duration_since(since) < age_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::inference_deployment::{
        build::build,
        testing::{healthy, infd, pod},
    };

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
        let observed = Observed { infd: object, children, pods, incidents: Vec::new(), nodes: Default::default() };
        let now = format!("2026-01-01T00:00:{second}Z").parse().unwrap();
        let held = steer(&observed, &mut desired, now).is_some();
        (desired.last().unwrap().body["spec"]["replicas"].as_i64().unwrap(), held)
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
