//! What is news of a replica, and to whom.

use super::*;
use std::sync::mpsc;
use vitals::verdict::StallClass;

fn news(now_ms: u64, outcome: &Outcome) -> News<'_> {
    let (phase, draining, gate) = (None, None, None);
    News {
        now_ms,
        outcome,
        ready: true,
        fenced: false,
        phase,
        incidents: &[],
        aside: Aside::No,
        by_hand: None,
        poison: &[],
        draining,
        shut: false,
        question: None,
        unfenced: false,
        left: false,
        gate,
        gate_hangs_ms: 0,
    }
}

#[test]
fn who_stays_does_not_wait_for_clients_that_keep_their_connections() {
    let outcome = Outcome::default();
    let reply = GateReply { connections: 3, ..GateReply::default() };
    let left = |shut| unfinished(&News { draining: Some(1), shut, gate: Some(&reply), ..news(0, &outcome) });
    assert_eq!([left(false), left(true)], [Some(0), Some(3)]);
}

#[test]
fn fault_f1_a_xid_of_an_open_episode_is_news() {
    let before = Declaration { episode: Some(Episode::default()), ..Declaration::default() };
    let mut after = before.clone();
    assert!(substance(&before) == substance(&after));
    after.episode.as_mut().unwrap().xids.push(Xid { code: 79, ..Xid::default() });
    assert!(substance(&before) != substance(&after));
}

#[test]
fn a_bundle_that_a_slow_disk_takes_after_the_kill_is_news() {
    let mut episode = Episode { evidence_at: Some("t".into()), ..Episode::default() };
    let before = Declaration { episode: Some(episode.clone()), ..Declaration::default() };
    episode.bundle = Some("/b".into());
    assert!(substance(&before) != substance(&Declaration { episode: Some(episode), ..Declaration::default() }));
}

/// While a person fences a replica its reason stays, whatever the engine does.
#[test]
fn that_an_engine_outlives_its_kill_is_news_by_its_class_alone() {
    let of_class = |class: &StallClass| Episode { class: class.name().into(), ..Episode::default() };
    let said = |class: &StallClass| Declaration { episode: Some(of_class(class)), ..Declaration::default() };
    let before = (said(&StallClass::StepStalled), 0);
    assert!(!is_due(Some(&before), &said(&StallClass::StepStalled), 0));
    assert!(is_due(Some(&before), &said(&StallClass::Unkillable), 0));
}

/// Its seconds grow at every look; that it is so at all is told once.
#[test]
fn that_what_an_engine_left_is_waited_for_in_vain_is_news_when_it_begins() {
    let said = |left, message: &str| Declaration { left, message: message.into(), ..Declaration::default() };
    let before = (said(false, "gone"), 0);
    assert!(is_due(Some(&before), &said(true, "gone; 1 left after 30 s"), 0));
    let before = (said(true, "gone; 1 left after 30 s"), 0);
    assert!(!is_due(Some(&before), &said(true, "gone; 1 left after 31 s"), 1_000));
}

#[test]
fn a_small_load_is_told_of_now_and_then_and_what_matters_at_once() {
    let said = |reason: &str, progressing: &str| Declaration {
        reason: reason.into(),
        progressing: progressing.into(),
        ..Declaration::default()
    };
    let idle = (said("Idle", "True"), 1_000);
    let due = |now: &Declaration, now_ms| is_due(Some(&idle), now, now_ms);
    let busy = said("Progressing", "True");
    assert!(!due(&busy, 1_100) && !due(&busy, 1_000 + BREATH_MS - 1) && due(&busy, 1_000 + BREATH_MS));
    assert!(!due(&idle.0, 1_000_000) && is_due(None, &busy, 0));
    for now in [said("Slow", "True"), said("StepStalled", "False"), said("Idle", "Unknown")] {
        assert!(due(&now, 1_100), "{now:?}");
    }
}

#[test]
fn a_calm_moment_is_a_sign_of_life_and_a_change_is_told_whole_at_once() {
    let (heard, lines) = mpsc::channel();
    let stdout = Latest::start("test", move |line| _ = heard.send(String::from_utf8(line).unwrap())).unwrap();
    let mut publisher = Publisher::new(stdout, None);
    let metrics = Metrics::new().unwrap();
    let calm = Outcome { verdict: Verdict::Idle, ..Outcome::default() };
    let mut said = |now_ms, outcome: &Outcome, any: bool| {
        publisher.publish(&news(now_ms, outcome), &metrics);
        let wait = Duration::from_secs(if any { 60 } else { 0 });
        lines.recv_timeout(wait).ok().map(|line| line.len() > 10 && line.contains("truebeat_ready 1"))
    };
    assert_eq!(said(10_000, &calm, true), Some(true));
    assert_eq!(said(11_900, &calm, false), None);
    assert_eq!(said(12_000, &calm, true), Some(false), "a sign of life");
    assert_eq!(said(13_900, &calm, false), None);
    assert_eq!(said(15_000, &calm, true), Some(true), "the figures");
    let suspect = Outcome { verdict: Verdict::Unknown, ..Outcome::default() };
    assert_eq!(said(15_100, &suspect, true), Some(true), "news");
    assert_eq!(said(16_100, &suspect, true), Some(true), "whole each second while all is not calm");
}

#[test]
fn a_phase_is_news_unless_it_is_one_of_many_in_a_busy_second() {
    let told = |verdict: Verdict| {
        let outcome = Outcome { verdict, ..Outcome::default() };
        let before = News { phase: Some(PagePhase::Prefill), ..news(0, &outcome) };
        let after = News { phase: Some(PagePhase::Decode), ..news(0, &outcome) };
        !Substance::of(&before).is_of(&after)
    };
    assert!(told(Verdict::Starting) && told(Verdict::Suspect(StallClass::DeviceWait)));
    assert!(!told(Verdict::Progressing) && !told(Verdict::Idle));
}
