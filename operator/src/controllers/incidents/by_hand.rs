//! The record of a person's fence: who took a replica out of traffic, from when to when. Pure. It asks for no restart and
//! opens no budget: an incident like the others only in that it outlives the pod.

use crds::{
    EngineIncident, EngineIncidentSpec, EngineIncidentStatus, Timeline,
    fence::{FENCED_BY_PERSON, Fence},
};
use jiff::Timestamp;

use super::plan::IncidentWrite;
use crate::{controllers::inference_deployment::observed::PodView, digest::short};

/// The same fence has the same id for every operator after every crash (P1).
pub fn id(pod: &PodView, fence: &Fence) -> String {
    let hash = short(&format!("{}\n{}\n{}", fence.by, fence.at, fence.why), 6);
    format!("fence-{}-{hash}", pod.uid)
}

/// The record of this name as it should be; `None` in it where it is so already (P7).
pub fn write(
    (infd, name): (&str, &str),
    (pod, fence): (&PodView, &Fence),
    existing: Option<&EngineIncident>,
    now: Timestamp,
) -> IncidentWrite {
    let spec = EngineIncidentSpec {
        deployment: infd.to_owned(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        node: pod.node.clone(),
        class: FENCED_BY_PERSON.to_owned(),
        episode_id: id(pod, fence),
        ..EngineIncidentSpec::default()
    };
    let known = existing.and_then(|incident| incident.status.as_ref());
    let told = fence.at.parse::<Timestamp>().is_ok().then(|| fence.at.clone());
    // the same words once more after an end begin anew: a record that is closed says when another fence began
    let standing = known.filter(|status| status.outcome.is_none());
    let seen = || standing.and_then(|status| status.timeline.fenced_at.clone()).unwrap_or_else(|| now.to_string());
    let at = told.unwrap_or_else(seen);
    let status = EngineIncidentStatus {
        stage: "Fenced".to_owned(),
        reasons: vec![fence.words()],
        timeline: Timeline { suspect_at: Some(at.clone()), fenced_at: Some(at), ..Timeline::default() },
        ..EngineIncidentStatus::default()
    };
    IncidentWrite {
        name: name.to_owned(),
        told_by: Some(pod.uid.clone()),
        spec: (existing.map(|incident| &incident.spec) != Some(&spec)).then_some(spec),
        status: (known != Some(&status)).then_some(status),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::{
        incidents::plan::{IncidentPlan, plan_by_default as plan},
        inference_deployment::testing::{healthy, pod},
    };

    fn now() -> Timestamp {
        "2026-01-01T00:02:00Z".parse().unwrap()
    }

    fn stored(plan: &IncidentPlan) -> Vec<EngineIncident> {
        let one = |write: &IncidentWrite| {
            let mut incident = EngineIncident::new(&write.name, write.spec.clone().expect("a new one has a spec"));
            incident.status = write.status.clone();
            incident
        };
        plan.writes.iter().map(one).collect()
    }

    #[test]
    fn a_persons_fence_is_recorded_from_its_begin_to_its_end() {
        let fence = Fence { by: "ann".into(), at: "2026-01-01T00:01:00Z".into(), why: "a look".into() };
        let fenced = PodView { fence: Some(fence), ready: false, ..healthy("a") };
        let first = plan("chat", std::slice::from_ref(&fenced), &[], now());
        insta::assert_json_snapshot!((&first.writes[0].spec, &first.writes[0].status));
        let held = stored(&first);
        assert_eq!(
            (first.open, plan("chat", std::slice::from_ref(&fenced), &held, now()).writes),
            (1, vec![]),
            "silent (P7)"
        );
        for (pods, outcome) in [(vec![healthy("a")], "Unfenced"), (vec![healthy("b")], "PodGone")] {
            let end = plan("chat", &pods, &held, now());
            let status = end.writes[0].status.as_ref().unwrap();
            assert_eq!(
                (status.outcome.as_deref(), status.duration.as_deref(), end.open),
                (Some(outcome), Some("60.0s"), 0)
            );
        }
        let again = Fence { at: "2026-01-01T00:01:30Z".into(), ..fenced.fence.clone().unwrap() };
        let twice = plan("chat", &[PodView { fence: Some(again), ..fenced.clone() }], &held, now());
        assert_eq!((twice.writes.len(), twice.open), (2, 1), "another fence is another record");
    }

    #[test]
    fn a_fence_without_a_time_keeps_the_one_at_which_it_was_seen() {
        let pods = [PodView { fence: Fence::read("yes"), ..healthy("a") }];
        let held = stored(&plan("chat", &pods, &[], now()));
        let later = now() + jiff::SignedDuration::from_hours(1);
        assert_eq!(plan("chat", &pods, &held, later).writes, []);
        let closed = plan("chat", &[healthy("a")], &held, later).writes.remove(0);
        let mut records = held;
        records[0].status = closed.status;
        let again = plan("chat", &pods, &records, later + jiff::SignedDuration::from_hours(24)).writes.remove(0);
        let fenced_at = again.status.unwrap().timeline.fenced_at;
        assert_eq!(fenced_at.as_deref(), Some("2026-01-02T01:02:00Z"), "the day between was no part of it");
    }

    #[test]
    fn a_stall_of_a_fenced_pod_has_a_record_of_its_own() {
        let pods = [PodView { fence: Fence::read("yes"), ..pod("a", "Stalled", 1) }];
        let plan = plan("chat", &pods, &[], now());
        let mut classes: Vec<_> = plan.writes.iter().filter_map(|w| Some(w.spec.as_ref()?.class.as_str())).collect();
        classes.sort_unstable();
        assert_eq!((classes, plan.open), (vec!["FencedByPerson", "StepStalled"], 2));
    }
}
