//! `truebeat run` tells a person what happens: one line an event, on stderr. The lines are a pure function of two statuses.

use std::io::Write;
use std::sync::Arc;

use crds::episode::Episode;
use tokio::sync::watch;

use super::board::Posted;
use crate::status::StatusDoc;

/// Says every change until the board is gone; says nothing, for ever, where nobody wants to hear it.
pub async fn narrate(mut statuses: watch::Receiver<Option<Arc<Posted>>>, wanted: bool) {
    let mut before: Option<Arc<Posted>> = None;
    while wanted && statuses.changed().await.is_ok() {
        let Some(now) = statuses.borrow_and_update().clone() else { continue };
        for line in lines(before.as_ref().map(|posted| &posted.doc), &now.doc) {
            say(&line);
        }
        before = Some(now);
    }
    std::future::pending::<()>().await;
}

/// One line for a person. Where nobody reads (a closed or a full pipe) it is lost, and nothing else is.
pub fn say(line: &str) {
    let _ = crate::stderr::writer().write_all(format!("truebeat: {line}\n").as_bytes());
}

/// What a person should hear between two statuses.
fn lines(before: Option<&StatusDoc>, now: &StatusDoc) -> Vec<String> {
    let mut lines = Vec::new();
    let calm = |doc: &StatusDoc| matches!(doc.verdict.verdict.as_str(), "Idle" | "Progressing");
    // the breathing of a healthy engine between work and no work is no news
    let breathing = before.is_some_and(|before| calm(before) && calm(now));
    if !breathing && before.is_none_or(|before| !before.verdict.same_but_time(&now.verdict)) {
        let class = now.verdict.class.as_ref().map(|class| format!(" ({class})")).unwrap_or_default();
        let why = now.verdict.reasons.first().map(|reason| format!(": {}", reason.text)).unwrap_or_default();
        lines.push(format!("verdict {}{class}{why}", now.verdict.verdict));
    }
    for episode in now.incidents.iter().rev() {
        let old = before.and_then(|before| before.incidents.iter().find(|old| old.id == episode.id));
        // What had ended before this supervisor looked is history, not news.
        if old.is_some() || !episode.closed() || before.is_some() {
            lines.extend(steps(old.unwrap_or(&Episode::default()), episode));
        }
    }
    if before.is_none_or(|before| !before.ready) && now.ready {
        lines.push("ready: requests are served".to_owned());
    }
    lines
}

/// The steps that an episode has taken since `old`.
fn steps(old: &Episode, now: &Episode) -> Vec<String> {
    let granted_by = now.granted_by.as_deref().unwrap_or("nobody");
    let bundle = now.bundle.as_deref().unwrap_or_default();
    let unsaved = &now.evidence_at.clone().filter(|_| now.bundle.is_none());
    let all = [
        (&old.fenced_at, &now.fenced_at, format!("fenced ({}): new requests get 503", now.class)),
        (&old.evidence_at, unsaved, "evidence gathered, and no bundle of it written: the log says why".to_owned()),
        (&old.bundle, &now.bundle, format!("evidence saved at {bundle}")),
        (&old.granted_at, &now.granted_at, format!("restart granted by {granted_by}")),
        (&old.killed_at, &now.killed_at, format!("engine killed; {} requests lost", now.requests_lost)),
        (
            &old.serving_at,
            &now.serving_at,
            format!("serving again; {} requests were refused meanwhile", now.requests_refused),
        ),
    ];
    let mut lines: Vec<String> =
        all.into_iter().filter(|(old, now, _)| old.is_none() && now.is_some()).map(|(_, _, line)| line).collect();
    if now.stage == "Cleared" && old.stage != now.stage {
        lines.push("the suspicion ended by itself; the fence is lifted".to_owned());
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::{ReadyReason, VerdictDoc};

    fn doc(verdict: &str, ready: bool, incidents: Vec<Episode>) -> StatusDoc {
        let verdict = VerdictDoc {
            verdict: verdict.into(),
            class: None,
            since_ms: 0,
            fenced: !ready,
            reasons: vec![],
            phase: None,
            health_lies: false,
            poison: Vec::new(),
        };
        let reason = ReadyReason::default();
        StatusDoc { ready, reason, verdict, incidents, ..StatusDoc::default() }
    }

    #[test]
    fn what_a_slow_disk_makes_of_a_bundle_is_told_when_it_is_known() {
        let said = |old: &Episode, now: &Episode| steps(old, now);
        let (begun, gathered) = (Episode::default(), Episode { evidence_at: Some("t".into()), ..Episode::default() });
        let saved = Episode { bundle: Some("/b".into()), ..gathered.clone() };
        assert_eq!(said(&begun, &saved), ["evidence saved at /b"]);
        assert!(said(&begun, &gathered)[0].contains("no bundle of it written"));
        assert_eq!(said(&gathered, &saved), ["evidence saved at /b"]);
        assert!(said(&saved, &saved).is_empty() && said(&gathered, &gathered).is_empty());
    }

    #[test]
    fn each_step_is_told_once() {
        let mut episode =
            Episode { id: "a".into(), class: "Livelock".into(), stage: "Suspect".into(), ..Episode::default() };
        let first = doc("Progressing", true, vec![]);
        assert_eq!(lines(None, &first), ["verdict Progressing", "ready: requests are served"]);
        episode.fenced_at = Some("t".into());
        let second = doc("Suspect", false, vec![episode.clone()]);
        assert_eq!(lines(Some(&first), &second), ["verdict Suspect", "fenced (Livelock): new requests get 503"]);
        assert!(lines(Some(&second), &second).is_empty());
        assert!(lines(Some(&first), &doc("Idle", true, vec![])).is_empty(), "work comes and goes");
        episode.stage = "Cleared".into();
        let third = doc("Idle", true, vec![episode.clone()]);
        assert_eq!(lines(Some(&second), &third).len(), 3);
        assert_eq!(lines(None, &doc("Idle", true, vec![episode])).len(), 2, "history is not news");
    }
}
