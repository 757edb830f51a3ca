//! What a cluster's objects say, in one screen. Pure: objects in, text out, the time as an argument.

use std::fmt::Write;

use agent::forensics::shelf::Shelved;
use crds::episode::{CONDITION_EPISODE, CONDITION_PROGRESSING, Episode};
use crds::inference_deployment::RecoveryMode;
use crds::maintenance::{ANNOTATION_MAINTENANCE, Maintenance};
use crds::poison::{ANNOTATION_POISON, read};
use crds::restart::{ANNOTATION_RESTART, RestartWish};
use crds::xid::{Xid, bounded};
use crds::{EngineIncident, InferenceDeployment, Timeline};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use kube::ResourceExt;

use super::pods::{condition, fence, fenced, mode};
use super::replicas::replicas;

/// Incidents that fit on one screen below a pod or a deployment.
const SHOWN: usize = 5;
/// Cells are padded to so many characters at most.
const CELL_CHARS: usize = 120;

/// Is it not closed?
pub fn is_open(incident: &EngineIncident) -> bool {
    incident.status.as_ref().is_none_or(|status| status.outcome.is_none())
}

/// Open ones first, then the newest first.
pub fn sort(incidents: &mut [EngineIncident]) {
    incidents.sort_by_key(|incident| (is_open(incident), began(incident)));
    incidents.reverse();
}

fn began(incident: &EngineIncident) -> Option<Timestamp> {
    incident.metadata.creation_timestamp.as_ref().map(|at| at.0)
}

/// That there are none, and where was looked: `None`, in all namespaces.
pub fn no_incidents(namespace: Option<&str>, open: bool) -> String {
    let place = namespace.map(|namespace| format!(" in namespace {namespace}")).unwrap_or_default();
    format!("no {}incidents{place}", if open { "open " } else { "" })
}

/// One line each.
pub fn table(incidents: &[EngineIncident], with_namespace: bool, now: Timestamp) -> String {
    let head = ["NAMESPACE", "NAME", "CLASS", "POD", "STAGE", "OUTCOME", "DURATION", "LOST", "AGE"].map(str::to_owned);
    let mut rows = vec![head.to_vec()];
    rows.extend(incidents.iter().map(|incident| row(incident, now).to_vec()));
    aligned(&rows, usize::from(!with_namespace))
}

/// The bundles that lie somewhere, one line each.
pub fn bundles(bundles: &[Shelved], now: Timestamp) -> String {
    if bundles.is_empty() {
        return "no bundles\n".to_owned();
    }
    let mut rows = vec![["EPISODE", "CLASS", "POD", "FINGERPRINT", "BYTES", "AGE"].map(str::to_owned).to_vec()];
    rows.extend(bundles.iter().map(|bundle| {
        let written_s = i64::try_from(bundle.written_s).unwrap_or(i64::MAX);
        let text = [&bundle.episode, &bundle.class, &bundle.pod, &bundle.fingerprint].map(Clone::clone);
        let rest = [bundle.bytes.to_string(), age(now.as_second().saturating_sub(written_s))];
        text.into_iter().chain(rest).collect()
    }));
    aligned(&rows, 0)
}

/// Rows of equally many cells, without the first `skipped` columns.
fn aligned(rows: &[Vec<String>], skipped: usize) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        // (a column is no wider than a screen, whatever one of its cells says)
        let cells =
            row.iter().zip(&widths).skip(skipped).map(|(cell, width)| format!("{cell:<0$}", *width.min(&CELL_CHARS)));
        let line = cells.collect::<Vec<_>>().join("  ");
        text += line.trim_end();
        text.push('\n');
    }
    text
}

fn row(incident: &EngineIncident, now: Timestamp) -> [String; 9] {
    let status = incident.status.clone().unwrap_or_default();
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    [
        incident.namespace().unwrap_or_default(),
        incident.name_any(),
        incident.spec.class.clone(),
        incident.spec.pod.clone(),
        status.stage,
        or_dash(status.outcome),
        or_dash(status.duration),
        status.requests_lost.to_string(),
        or_dash(began(incident).map(|at| age(now.duration_since(at).as_secs()))),
    ]
}

/// `75` → `75s`, `4000` → `66m`.
fn age(seconds: i64) -> String {
    match seconds.max(0) {
        s if s < 120 => format!("{s}s"),
        s if s < 7_200 => format!("{}m", s / 60),
        s if s < 172_800 => format!("{}h", s / 3_600),
        s => format!("{}d", s / 86_400),
    }
}

/// One incident whole.
pub fn incident(incident: &EngineIncident) -> String {
    let (spec, status) = (&incident.spec, incident.status.clone().unwrap_or_default());
    let node = if spec.node.is_empty() { "an unknown node" } else { &spec.node };
    let end = match (&status.outcome, &status.duration) {
        (Some(outcome), Some(duration)) => format!("{outcome} after {duration}"),
        (Some(outcome), None) => outcome.clone(),
        (None, _) => {
            let fenced = status.timeline.fenced_at.is_some();
            format!("open: {}", Step { stage: &status.stage, fenced, mode: None }.in_words())
        }
    };
    let mut text = format!("{}: {} of {} on {node}\n{end}\n", incident.name_any(), spec.class, spec.pod);
    for reason in &status.reasons {
        _ = writeln!(text, "  - {reason}");
    }
    text += &faults(&spec.xids);
    text += &times(&status.timeline);
    if let Some(by) = &status.granted_by {
        _ = writeln!(text, "  the restart was granted by {by}");
    }
    _ = writeln!(text, "requests lost {}, refused {}", status.requests_lost, status.requests_refused);
    if !spec.fingerprint.is_empty() {
        _ = writeln!(text, "fingerprint {} (the same disease has the same)", spec.fingerprint);
    }
    if let Some(bundle) = &status.bundle {
        _ = writeln!(text, "evidence in the pod: {bundle}");
        let namespace = incident.namespace().map(|namespace| format!(" -n {namespace}")).unwrap_or_default();
        _ = writeln!(text, "  fetch it: kubectl truebeat bundle {}{namespace}", incident.name_any());
    }
    text
}

/// What the driver said of the GPUs, and what mends it.
fn faults(xids: &[Xid]) -> String {
    bounded(xids.to_vec()).iter().map(|xid| format!("  the driver reports {}\n", xid.words())).collect()
}

/// How far an episode is.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    pub stage: &'a str,
    /// Was it taken out of traffic for it, whatever was done since? In mode Observe nobody is, nor is the last one that serves.
    pub fenced: bool,
    /// Of the pod, where it is known.
    pub mode: Option<RecoveryMode>,
}

impl<'a> Step<'a> {
    /// Of the episode that is open in this pod.
    pub fn of(episode: &'a Episode, pod: &Pod) -> Self {
        Self { stage: &episode.stage, fenced: episode.fenced_at.is_some(), mode: mode(pod) }
    }

    /// What an episode is about.
    pub fn in_words(self) -> &'a str {
        match self.stage {
            "Suspect" if self.fenced => "fenced on suspicion; nothing is destroyed",
            "Suspect" => "suspected, and not fenced for it; nothing is destroyed",
            "Stalled" => match self.mode {
                Some(RecoveryMode::Recover) => "confirmed; the restart waits for a grant",
                Some(RecoveryMode::Fence) => "confirmed; mode Fence restarts nobody",
                Some(RecoveryMode::Observe) => "confirmed; mode Observe neither fences nor restarts",
                None => "confirmed, and not restarted yet",
            },
            "Granted" => "the restart is granted",
            "Killed" => "the engine was killed and its container restarts",
            "Fenced" => "a person keeps it out of traffic; `truebeat kubectl unfence` ends it",
            "Restarting" => "the engine starts and does not serve yet",
            other => other,
        }
    }
}

/// The steps with their distance from the first.
fn times(timeline: &Timeline) -> String {
    let steps = [
        ("suspect", &timeline.suspect_at),
        ("fenced", &timeline.fenced_at),
        ("confirmed", &timeline.confirmed_at),
        ("evidence", &timeline.evidence_at),
        ("granted", &timeline.granted_at),
        ("killed", &timeline.killed_at),
        ("serving", &timeline.serving_at),
    ];
    let mut first: Option<Timestamp> = None;
    let mut text = String::new();
    for (what, at) in steps {
        let Some(at) = at else { continue };
        match at.parse::<Timestamp>() {
            Ok(time) => {
                let zero = *first.get_or_insert(time);
                _ = writeln!(text, "  {what:<10}{at}  +{:.1} s", time.duration_since(zero).as_secs_f64());
            }
            Err(_) => _ = writeln!(text, "  {what:<10}{at}"), // told as it stands, however odd
        }
    }
    text
}

/// What a pod's agent declares, and the pod's incidents.
pub fn pod(pod: &Pod, incidents: &[EngineIncident], now: Timestamp) -> String {
    let find = |type_| condition(pod, type_);
    let mut text = format!("pod {}: ", pod.name_any());
    text += &find(CONDITION_PROGRESSING).map_or_else(
        || "no agent has declared anything about it (is it a pod of an InferenceDeployment?)\n".to_owned(),
        progressing,
    );
    let ready = find("Ready").is_some_and(|condition| condition.status == "True");
    _ = writeln!(text, "  traffic: {}", if ready { "yes, the pod is Ready" } else { "no, the pod is not Ready" });
    if let Some(fence) = fence(pod) {
        _ = writeln!(text, "  {}; `truebeat kubectl unfence` ends it", fenced(&fence));
    }
    if let Some(declared) = pod.annotations().get(ANNOTATION_MAINTENANCE).and_then(|text| Maintenance::read(text)) {
        let over = if declared.holds(now) { "no silence counts" } else { "it is over" };
        _ = writeln!(text, "  {}; {over}; `truebeat kubectl maintenance --end` takes it off", declared.words());
    }
    if let Some(condition) = find(CONDITION_EPISODE).filter(|condition| condition.status == "True") {
        text += &episode(condition.message.as_deref().unwrap_or_default(), pod);
    }
    if let Some(wish) = pod.annotations().get(ANNOTATION_RESTART).and_then(|text| RestartWish::read(text)) {
        _ = writeln!(text, "  a restart was {}", wish.whole_words());
    }
    let refused = pod.annotations().get(ANNOTATION_POISON).map(|text| read(text)).unwrap_or_default();
    refused.iter().for_each(|one| _ = writeln!(text, "  its gate refuses: {}", one.words()));
    text + &recent(incidents)
}

fn progressing(condition: &PodCondition) -> String {
    let word = match condition.status.as_str() {
        "True" => "makes progress",
        "False" => "makes NO progress",
        _ => "the agent cannot tell",
    };
    let reason = condition.reason.as_deref().unwrap_or("no reason given");
    let since = condition.last_transition_time.as_ref().map(|at| format!(" since {}", at.0)).unwrap_or_default();
    let since =
        since + &condition.last_probe_time.as_ref().map(|at| format!(", by its word of {}", at.0)).unwrap_or_default();
    let message = condition.message.as_deref().filter(|text| !text.is_empty());
    let message = message.map(|text| format!("  - {text}\n")).unwrap_or_default();
    format!("{word} ({reason}){since}\n{message}")
}

fn episode(json: &str, pod: &Pod) -> String {
    match serde_json::from_str::<Episode>(json) {
        Ok(episode) => {
            let how_far = Step::of(&episode, pod).in_words();
            let what = format!("  episode {}: {}; {how_far}\n", episode.id, episode.class);
            what + &faults(&episode.xids)
        }
        Err(error) => format!("  its agent reports an episode that cannot be read: {error}\n"),
    }
}

/// What the operator says of a deployment, its replicas, and its incidents.
pub fn deployment(infd: &InferenceDeployment, pods: &[Pod], incidents: &[EngineIncident], now: Timestamp) -> String {
    let status = infd.status.clone().unwrap_or_default();
    let by_person = match status.fenced_by_person {
        0 => String::new(),
        n => format!(" ({n} by a person)"),
    };
    let mut text = format!(
        "inferencedeployment {}: {} wanted, {} there, {} ready, {} progressing, {} fenced{}, {} incidents open\n",
        infd.name_any(),
        infd.spec.replicas,
        status.replicas,
        status.ready_replicas,
        status.progressing_replicas,
        status.fenced_replicas,
        by_person,
        status.open_incidents
    );
    for condition in &status.conditions {
        let since = age(now.duration_since(condition.last_transition_time.0).as_secs());
        let (type_, state, reason) = (&condition.type_, &condition.status, &condition.reason);
        _ = writeln!(text, "  {type_}={state} ({reason}) for {since}: {}", condition.message);
    }
    text += &known_bad(infd);
    text += &replicas(pods, &status.recovery, now);
    for place in &status.recovery.avoid {
        _ = writeln!(text, "  new pods keep away from node {} until {}", place.node, place.until);
        text += &faults(&place.xids);
    }
    for place in &status.recovery.broken {
        _ = writeln!(text, "  node {} is broken, and new pods do not keep away from it", place.node);
        text += &faults(&place.xids);
    }
    text + &recent(incidents)
}

/// What upstream knows against the flags that the replicas run with.
pub fn known_bad(infd: &InferenceDeployment) -> String {
    let known = crds::known_bad::of(&infd.spec.engine);
    known.iter().map(|entry| format!("  known to be bad: {}\n", entry.words())).collect()
}

fn recent(incidents: &[EngineIncident]) -> String {
    let mut text = match incidents.len() {
        0 => "no incidents\n".to_owned(),
        n if n > SHOWN => format!("{n} incidents, the newest {SHOWN} of them:\n"),
        _ => String::new(),
    };
    for one in incidents.iter().take(SHOWN) {
        text += &incident(one);
    }
    text
}

#[cfg(test)]
#[path = "tell_tests.rs"]
mod tests;
