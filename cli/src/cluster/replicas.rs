//! What `why` tells of the replicas of an InferenceDeployment: each in a line, who holds a slot of the restart budget, who was restarted again and
//! again, and what is tried under a hold. Pure: objects in, text out, the time as an argument.

use std::collections::BTreeMap;
use std::fmt::Write;

use crds::episode::CONDITION_PROGRESSING;
use crds::{GrantAction, HoldScope, HoldStatus, PastGrant, RecoveryStatus, TrialOutcome};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

use super::pods::{condition, episode, is_ready};
use super::tell::Step;

/// So many replicas get a line of their own; those that are not well come first.
const SHOWN: usize = 20;
/// A hold that ended longer ago is no news. The operator remembers it until the next one.
const OVER_SHOWN: SignedDuration = SignedDuration::from_hours(1);
/// Nor are recoveries from before that: the operator keeps them until there is another one.
const RECENT_SHOWN: SignedDuration = SignedDuration::from_hours(24);

/// All of it.
pub fn replicas(pods: &[Pod], recovery: &RecoveryStatus, now: Timestamp) -> String {
    let mut lines: Vec<(bool, String)> = pods.iter().map(|pod| (well(pod), line(pod))).collect();
    lines.sort();
    let mut text: String = lines.iter().take(SHOWN).map(|(_, line)| line.as_str()).collect();
    if lines.len() > SHOWN {
        let well = lines.iter().skip(SHOWN).filter(|(well, _)| *well).count();
        _ = writeln!(text, "  and {} more, {well} of them well", lines.len() - SHOWN);
    }
    for grant in &recovery.grants {
        let what = if grant.action == GrantAction::Replace { "replacement" } else { "restart" };
        _ = writeln!(text, "  a slot of the budget: {what} of {} since {}", grant.pod, grant.granted_at);
    }
    text += &repetitions(pods, &recovery.recent, now);
    text + &recovery.hold.as_ref().map(|hold| held(hold, now)).unwrap_or_default()
}

/// Was that no longer ago? What cannot be read is not known to be old.
fn within(at: &str, span: SignedDuration, now: Timestamp) -> bool {
    at.parse::<Timestamp>().ok().is_none_or(|at| now.duration_since(at) <= span)
}

fn well(pod: &Pod) -> bool {
    is_ready(pod) && condition(pod, CONDITION_PROGRESSING).is_some_and(|c| c.status == "True") && episode(pod).is_none()
}

fn line(pod: &Pod) -> String {
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or("no node yet");
    let traffic = match (pod.metadata.deletion_timestamp.is_some(), is_ready(pod)) {
        (true, _) => "on its way out",
        (false, true) => "Ready",
        (false, false) => "not Ready",
    };
    let word =
        condition(pod, CONDITION_PROGRESSING).and_then(|c| c.reason.as_deref()).unwrap_or("no word of its agent");
    let stage = episode(pod).map(|open| format!("; {}: {}", open.class, Step::of(&open, pod).in_words()));
    format!("  {} on {node}: {traffic}, {word}{}\n", pod.name_any(), stage.unwrap_or_default())
}

/// Who was recovered more than once within a day, as far as the operator keeps it.
fn repetitions(pods: &[Pod], recent: &[PastGrant], now: Timestamp) -> String {
    let mut of_pod: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for past in recent.iter().filter(|past| within(&past.granted_at, RECENT_SHOWN, now)) {
        let (count, last) = of_pod.entry(&past.pod_uid).or_default();
        (*count, *last) = (*count + 1, &past.granted_at);
    }
    let named = |uid: &str| pods.iter().find(|pod| pod.uid().as_deref() == Some(uid)).map(ResourceExt::name_any);
    let again = of_pod.into_iter().filter(|(_, (count, _))| *count > 1);
    again
        .map(|(uid, (count, last))| {
            let name = named(uid).unwrap_or_else(|| "a pod that is gone".to_owned());
            format!("  {name} was restarted or replaced {count} times in the last 24 hours, the last time at {last}\n")
        })
        .collect()
}

fn held(hold: &HoldStatus, now: Timestamp) -> String {
    let since = &hold.since;
    let span = match &hold.over_at {
        Some(over_at) if !within(over_at, OVER_SHOWN, now) => return String::new(),
        Some(over_at) => format!("were held from {since} to {over_at}"),
        None => format!("are held since {since}"),
    };
    let (wider, here) = match hold.scope {
        Some(HoldScope::Fleet) => ("the whole fleet", " here"),
        Some(HoldScope::Deployment) => ("the whole deployment", ""),
        Some(HoldScope::Place) | None => ("more", ""),
    };
    let widened = hold.widened_at.as_ref().map(|at| format!(", widened to {wider} at {at}")).unwrap_or_default();
    let mut text = format!("  restarts {span}{widened}; trials in vain{here}: {}\n", hold.failed);
    if let Some(trial) = &hold.trial {
        let outcome = match trial.outcome {
            TrialOutcome::Pending if hold.over_at.is_some() => "the hold was over before it was known what came of it",
            TrialOutcome::Pending => "not known yet what comes of it",
            TrialOutcome::Helped => "it helped",
            TrialOutcome::Failed => "in vain",
        };
        _ = writeln!(text, "  the last trial: {} at {}, {outcome}", trial.pod, trial.granted_at);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crds::episode::CONDITION_EPISODE;
    use serde_json::{Value, json};

    fn pod(name: &str, ready: &str, stage: Option<&str>) -> Pod {
        let text = stage.map(|stage| json!({"id": "e", "class": "StepStalled", "stage": stage}).to_string());
        let word = if stage.is_some() { "False" } else { "True" };
        let reason = if stage.is_some() { "StepStalled" } else { "Progressing" };
        let conditions = json!([
            {"type": "Ready", "status": ready},
            {"type": CONDITION_PROGRESSING, "status": word, "reason": reason},
            {"type": CONDITION_EPISODE, "status": if stage.is_some() { "True" } else { "False" }, "message": text},
        ]);
        serde_json::from_value(json!({
            "metadata": {"name": name, "uid": name}, "spec": {"nodeName": "n1", "containers": []}, "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    fn now() -> Timestamp {
        "2026-01-01T00:10:00Z".parse().unwrap()
    }

    fn recovery(value: Value) -> RecoveryStatus {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn who_is_not_well_comes_first_and_who_holds_a_slot_is_named() {
        let pods = [pod("a", "True", None), pod("b", "False", Some("Stalled"))];
        let past = |uid: &str, at: &str| json!({"podUid": uid, "grantedAt": at});
        let known = recovery(json!({
            "grants": [{"episode": "e", "pod": "b", "podUid": "b", "grantedAt": "2026-01-01T00:05:00Z"}],
            "recent": [past("b", "2026-01-01T00:00:00Z"), past("a", "2026-01-01T00:01:00Z"), past("b", "2026-01-01T00:05:00Z")],
        }));
        let wanted = "  b on n1: not Ready, StepStalled; StepStalled: confirmed, and not restarted yet\n  a on n1: Ready, Progressing\n  \
            a slot of the budget: restart of b since 2026-01-01T00:05:00Z\n  \
            b was restarted or replaced 2 times in the last 24 hours, the last time at 2026-01-01T00:05:00Z\n";
        assert_eq!(replicas(&pods, &known, now()), wanted);
        assert_eq!(replicas(&[], &RecoveryStatus::default(), now()), "");
    }

    #[test]
    fn what_was_granted_longer_than_a_day_ago_is_no_repetition() {
        let past = |at: &str| json!({"podUid": "b", "grantedAt": at});
        let times = ["2025-12-30T00:00:00Z", "2025-12-31T00:09:59Z", "2025-12-31T00:10:00Z", "2026-01-01T00:11:00Z"];
        let of = |times: &[&str]| {
            let recent: Vec<Value> = times.iter().map(|at| past(at)).collect();
            replicas(&[pod("b", "True", None)], &recovery(json!({"recent": recent})), now())
        };
        let text = of(&times);
        assert!(
            text.ends_with(
                "b was restarted or replaced 2 times in the last 24 hours, the last time at 2026-01-01T00:11:00Z\n"
            ),
            "{text}"
        );
        assert!(!of(&times[..3]).contains("times"), "one of them is no repetition");
        assert!(of(&["odd", "odd"]).contains("2 times"), "what cannot be read is not known to be old");
    }

    #[test]
    fn a_hold_is_told_with_what_was_tried() {
        let trial = json!({
            "pod": "b", "podUid": "b", "episode": "e", "grantedAt": "2026-01-01T00:05:00Z", "runSince": "2026-01-01T00:05:00Z", "outcome": "Failed",
        });
        let known = recovery(json!({"hold": {"since": "2026-01-01T00:00:00Z", "failed": 1, "trial": trial}}));
        let wanted = "  restarts are held since 2026-01-01T00:00:00Z; trials in vain: 1\n  \
            the last trial: b at 2026-01-01T00:05:00Z, in vain\n";
        assert_eq!(replicas(&[], &known, now()), wanted);
    }

    #[test]
    fn a_hold_that_has_widened_says_since_when() {
        let of = |scope: &str, widened_at: Option<&str>| {
            let hold = json!({"since": "2026-01-01T00:00:00Z", "failed": 1, "scope": scope, "widenedAt": widened_at});
            replicas(&[], &recovery(json!({"hold": hold})), now())
        };
        let wanted = "  restarts are held since 2026-01-01T00:00:00Z, widened to the whole fleet at 2026-01-01T00:04:00Z; trials in vain here: 1\n";
        assert_eq!(of("Fleet", Some("2026-01-01T00:04:00Z")), wanted);
        let wanted = "  restarts are held since 2026-01-01T00:00:00Z; trials in vain: 1\n";
        assert_eq!((of("Deployment", None).as_str(), of("Place", None).as_str()), (wanted, wanted));
    }

    #[test]
    fn a_hold_that_is_over_is_told_as_that_for_an_hour() {
        let trial = |outcome: &str| {
            json!({
                "pod": "b", "podUid": "b", "episode": "e", "grantedAt": "2025-12-31T23:05:00Z", "runSince": "2025-12-31T23:05:00Z",
                "outcome": outcome,
            })
        };
        let of = |over_at: &str, outcome: &str| {
            let hold =
                json!({"since": "2025-12-31T23:00:00Z", "overAt": over_at, "failed": 2, "trial": trial(outcome)});
            replicas(&[], &recovery(json!({"hold": hold})), now())
        };
        let wanted = "  restarts were held from 2025-12-31T23:00:00Z to 2025-12-31T23:10:00Z; trials in vain: 2\n  \
            the last trial: b at 2025-12-31T23:05:00Z, it helped\n";
        assert_eq!(of("2025-12-31T23:10:00Z", "Helped"), wanted);
        assert_eq!(of("2025-12-31T23:09:59Z", "Helped"), "", "longer than an hour ago");
        assert!(
            of("2026-01-01T00:00:00Z", "Pending")
                .ends_with("b at 2025-12-31T23:05:00Z, the hold was over before it was known what came of it\n")
        );
    }

    #[test]
    fn of_many_replicas_those_that_are_well_are_counted() {
        let many: Vec<Pod> = (0..25).map(|n| pod(&format!("p{n:02}"), "True", None)).collect();
        let text = replicas(&many, &RecoveryStatus::default(), now());
        assert!(text.ends_with("  and 5 more, 5 of them well\n") && text.lines().count() == 21, "{text}");
    }
}
