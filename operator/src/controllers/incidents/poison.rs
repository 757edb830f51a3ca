//! Which requests each pod's gate refuses (I7): the rule of `crds::poison` over the records of stalls and what pods report now. Pure, and
//! derived from the API alone, so that any operator after any crash hands out the same (P1).

use std::collections::BTreeMap;

use crds::{
    EngineIncident,
    inference_deployment::{PoisonRequests, RecoveryMode},
    poison::{ANNOTATION_POISON, Refusals, Stall, milliseconds, write},
};
use jiff::Timestamp;

use crate::controllers::inference_deployment::{
    escalate::duration_of,
    observed::{Observed, PodView},
    plan::PodPatch,
};

/// Adds to `patches` what pods must be told. Pods that are granted a restart hear of it last: when the engine is killed its clients try
/// again elsewhere, and elsewhere must know by then.
pub fn annotate(observed: &Observed, patches: &mut Vec<PodPatch>, now: Timestamp) {
    let wanted = Wanted::of(observed, now);
    for pod in observed.pods.iter().filter(|pod| !pod.leaving) {
        let text = wanted.by(&pod.uid);
        if text == pod.poison {
            continue;
        }
        match patches.iter_mut().find(|patch| patch.uid == pod.uid) {
            Some(patch) => _ = patch.annotations.insert(ANNOTATION_POISON, text),
            None => patches.push(PodPatch {
                name: pod.name.clone(),
                uid: pod.uid.clone(),
                annotations: BTreeMap::from([(ANNOTATION_POISON, text)]),
            }),
        }
    }
    patches.sort_by_key(PodPatch::grants);
}

/// The annotation's text: of each pod that refuses something of its own, and of all others.
#[derive(Debug, Default)]
struct Wanted {
    own: BTreeMap<String, Option<String>>,
    others: Option<String>,
}

impl Wanted {
    fn of(observed: &Observed, now: Timestamp) -> Self {
        let recovery = &observed.infd.spec.recovery;
        let refuses = recovery.poison_requests == PoisonRequests::Refuse && recovery.mode != RecoveryMode::Observe;
        let keep = duration_of(&recovery.poison_for).filter(|_| refuses);
        let stalls: Vec<Stall<'_>> =
            observed.incidents.iter().filter_map(recorded).chain(observed.pods.iter().filter_map(reported)).collect();
        let Some(keep) = keep.filter(|_| !stalls.is_empty()) else { return Self::default() };
        let keep_ms = i64::try_from(keep.as_millis()).unwrap_or(i64::MAX);
        let Refusals { own, others } = Refusals::of(&stalls, keep_ms, now.as_millisecond());
        let own = own.into_iter().map(|(uid, refused)| (uid, write(&refused))).collect();
        Self { own, others: write(&others) }
    }

    fn by(&self, uid: &str) -> Option<String> {
        self.own.get(uid).unwrap_or(&self.others).clone()
    }
}

fn recorded(incident: &EngineIncident) -> Option<Stall<'_>> {
    let status = incident.status.as_ref()?;
    let at_ms = milliseconds(status.timeline.suspect_at.as_deref()?)?;
    let told = incident.is_stall() && !status.in_flight.is_empty();
    told.then_some(Stall { replica: &incident.spec.pod_uid, at_ms, in_flight: &status.in_flight })
}

fn reported(pod: &PodView) -> Option<Stall<'_>> {
    let episode = &pod.reported()?.episode;
    let at_ms = milliseconds(episode.suspect_at.as_deref()?)?;
    let told = episode.is_stall() && !episode.in_flight.is_empty();
    told.then_some(Stall { replica: &pod.uid, at_ms, in_flight: &episode.in_flight })
}

#[cfg(test)]
#[path = "poison_tests.rs"]
mod tests;
