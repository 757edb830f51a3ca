//! When things happened, and what is kept of it.

use super::*;
use vitals::verdict::Reason;

fn outcome(verdict: Verdict) -> Outcome {
    Outcome { verdict, ..Outcome::default() }
}

fn output(stage: Option<EpisodeStage>, granted_by: Option<GrantedBy>) -> RecoveryOutput {
    RecoveryOutput { stage, class: Some("Livelock".into()), granted_by, effects: vec![] }
}

#[test]
fn an_engine_that_outlives_its_kill_is_known_by_the_class_of_its_episode() {
    let class = StallClass::Unkillable.name().to_owned();
    assert!(Episode { class, ..Episode::default() }.unkillable(), "the operator reads no other word");
}

fn while_fenced<'a>(recovery: &'a RecoveryOutput, outcome: &'a Outcome, shut: bool) -> Moment<'a> {
    Moment { now: "t", recovery, outcome, shut, fenced: true, refused: 0 }
}

fn tick(book: &mut Incidents, now: &str, stage: Option<EpisodeStage>, verdict: Verdict) {
    let by = stage.filter(|stage| *stage >= EpisodeStage::Granted).map(|_| GrantedBy::Itself);
    let (recovery, outcome) = (output(stage, by), outcome(verdict));
    let shut = outcome.verdict.class().is_some();
    book.tick(&Moment { now, recovery: &recovery, outcome: &outcome, shut, fenced: shut, refused: 1 });
}

#[test]
fn an_episode_gets_each_time_once() {
    let mut book = Incidents::default();
    let stall = || Verdict::Stalled(StallClass::Livelock);
    book.begin("host-7-9", 1, "Livelock", "t0");
    tick(&mut book, "t1", Some(EpisodeStage::Suspect), Verdict::Suspect(StallClass::Livelock));
    tick(&mut book, "t2", Some(EpisodeStage::Stalled), stall());
    tick(&mut book, "t3", Some(EpisodeStage::Stalled), stall());
    book.captured("host-7-9-1", Some("/b".into()), "f", "t4");
    tick(&mut book, "t5", Some(EpisodeStage::Killed), stall());
    book.killed("host-7-9-1", 3, "t5");
    book.killed("host-7-9-1", 0, "t6");
    tick(&mut book, "t7", Some(EpisodeStage::Restarting), Verdict::Starting);
    tick(&mut book, "t8", Some(EpisodeStage::Recovered), Verdict::Idle);
    let e = &book.list()[0];
    let times =
        [&e.suspect_at, &e.fenced_at, &e.confirmed_at, &e.evidence_at, &e.granted_at, &e.killed_at, &e.serving_at];
    assert_eq!(times.map(|at| at.as_deref().unwrap()), ["t0", "t1", "t2", "t4", "t5", "t5", "t8"]);
    assert_eq!((e.requests_lost, e.requests_refused, e.granted_by.as_deref()), (3, 6, Some("self")));
    assert!(e.closed() && book.open().is_none());
}

/// Its supervisor waits for what outlives the kill, and the detector is another one meanwhile.
#[test]
fn a_detector_that_finds_the_engine_killed_does_not_rewrite_what_hung() {
    let mut book = Incidents::default();
    book.begin("host-7-9", 1, "Livelock", "t0");
    tick(&mut book, "t1", Some(EpisodeStage::Killed), Verdict::Stalled(StallClass::Livelock));
    book.killed("host-7-9-1", 0, "t1");
    book.begin("host-7-9", 2, "Dead", "t2");
    let dead = |stage| RecoveryOutput { class: Some("Dead".into()), ..output(Some(stage), None) };
    book.tick(&while_fenced(&dead(EpisodeStage::Restarting), &outcome(Verdict::Dead), true));
    assert_eq!((book.list().len(), book.list()[0].class.as_str()), (1, "Livelock"));
    book.begin("host-8-9", 1, "Dead", "t3");
    book.tick(&while_fenced(&dead(EpisodeStage::Restarting), &outcome(Verdict::Dead), true));
    assert_eq!(book.list()[0].class, "Dead", "the next one died by itself");
}

#[test]
fn a_bundle_that_comes_late_is_known_of_the_evidence_that_was_gathered_and_of_no_other() {
    let mut book = Incidents::default();
    book.begin("host-7-9", 1, "Livelock", "t0");
    book.written("host-7-9-1", "/early".into());
    book.captured("host-7-9-1", None, "f", "t1");
    assert_eq!((book.list()[0].bundle.as_deref(), book.list()[0].evidence_at.as_deref()), (None, Some("t1")));
    book.written("host-7-9-1", "/b".into());
    book.written("host-7-9-1", "/later".into());
    assert_eq!((book.list()[0].bundle.as_deref(), book.list()[0].evidence_at.as_deref()), (Some("/b"), Some("t1")));
}

#[test]
fn what_was_only_a_suspicion_is_forgotten_before_a_stall_and_the_open_episode_never() {
    let mut book = Incidents::default();
    for n in 0..2 * KEPT_MAX as u64 {
        book.begin(&format!("host-{n}"), n, if n % 10 == 0 { "Dead" } else { "Livelock" }, "t");
        if let Some(left) = book.open_mut() {
            left.stage = EpisodeStage::Cleared.name().to_owned();
        }
    }
    assert_eq!((book.list().len(), book.list().iter().filter(|episode| episode.is_stall()).count()), (KEPT_MAX, 10));
    for n in 0..2 * KEPT_MAX as u64 {
        book.begin(&format!("other-{n}"), n, "Dead", "t");
    }
    let newest = (2 * KEPT_MAX - 1).to_string();
    assert!(book.list().len() == KEPT_MAX && book.open().is_some_and(|open| open.id.ends_with(&newest)));
}

#[test]
fn only_the_first_kill_counts() {
    let mut book = Incidents::default();
    book.begin("host-1-9", 1, "Livelock", "t");
    let id = book.list()[0].id.clone();
    assert!(book.killed(&id, 3, "first") && !book.killed(&id, 0, "second") && !book.killed("another", 0, "t"));
    assert_eq!((book.list()[0].killed_at.as_deref(), book.list()[0].requests_lost), (Some("first"), 3));
}

#[test]
fn the_reasons_kept_are_those_of_the_last_moment_before_the_kill() {
    let mut book = Incidents::default();
    let say = |book: &mut Incidents, stage, verdict, text: &str| {
        let reasons = vec![Reason { source: "page".to_owned(), text: text.to_owned() }];
        let (recovery, outcome) = (output(Some(stage), None), Outcome { reasons, ..outcome(verdict) });
        book.tick(&while_fenced(&recovery, &outcome, true));
    };
    let stall = || Verdict::Stalled(StallClass::StepStalled);
    book.begin("host-7-9", 1, "StepStalled", "t0");
    say(&mut book, EpisodeStage::Suspect, Verdict::Suspect(StallClass::StepStalled), "step 9 for 400 ms");
    say(&mut book, EpisodeStage::Stalled, stall(), "step 9 for 2400 ms");
    say(&mut book, EpisodeStage::Killed, stall(), "step 9 for 2600 ms");
    book.killed("host-7-9-1", 0, "t1");
    say(&mut book, EpisodeStage::Killed, stall(), "step 9 for 2700 ms");
    say(&mut book, EpisodeStage::Restarting, Verdict::Dead, "the engine's process is gone");
    assert_eq!(book.list()[0].reasons, ["step 9 for 2600 ms"]);
    say(&mut book, EpisodeStage::Recovered, Verdict::Suspect(StallClass::Livelock), "the successor's");
    assert_eq!(book.list()[0].reasons, ["step 9 for 2600 ms"]);

    book.begin("host-8-9", 2, "Dead", "t2");
    say(&mut book, EpisodeStage::Restarting, Verdict::Dead, "the engine's process is gone");
    assert_eq!(book.list()[0].reasons, ["the engine's process is gone"], "nothing else explains an exit");
}

#[test]
fn fault_f1_an_episode_names_each_xid_once_and_by_the_best_name_it_has() {
    use vitals::xid::{Pci, Xid as Seen};
    let mut book = Incidents::default();
    let pci = Pci::parse("0000:44:00");
    let seen = |code, uuid: Option<&str>, remedy| Seen { code, uuid: uuid.map(str::to_owned), pci, remedy, at_ms: 0 };
    book.on_xids(&[seen(79, None, Some(Remedy::RestartNode))]);
    assert!(book.list().is_empty(), "a Xid alone is no episode (V4)");
    book.begin("host-7-9", 1, "Dead", "t0");
    let told = |book: &Incidents| {
        let xids = book.list()[0].xids.iter();
        xids.map(|xid| (xid.code, xid.gpu.clone(), xid.remedy)).collect::<Vec<_>>()
    };
    book.on_xids(&[seen(79, None, Some(Remedy::RestartNode))]);
    assert_eq!(told(&book), [(79, "0000:44:00".to_owned(), XidRemedy::RestartNode)]);
    book.on_xids(&[seen(79, Some("GPU-1"), Some(Remedy::RestartNode)), seen(200, Some("GPU-1"), None)]);
    book.on_xids(&[]);
    let gpu = || "GPU-1".to_owned();
    assert_eq!(told(&book), [(79, gpu(), XidRemedy::RestartNode), (200, gpu(), XidRemedy::Unknown)]);
    let many: Vec<Seen> = (300..400).map(|code| seen(code, Some("GPU-2"), None)).collect();
    book.on_xids(&many);
    assert_eq!(told(&book).len(), XIDS_MAX);
}

#[test]
fn fault_f1_what_is_asked_for_has_one_name_on_both_sides_of_the_report() {
    let all =
        [Remedy::Nothing, Remedy::RestartApplication, Remedy::ResetGpu, Remedy::RestartNode, Remedy::ContactSupport];
    for told in all {
        assert_eq!(remedy(Some(told)).words(), told.words());
        assert_eq!(remedy(Some(told)).outlasts_a_restart(), told.outlasts_a_restart());
    }
}

#[test]
fn fault_f1_a_death_is_explained_by_what_is_heard_a_moment_after_it() {
    let mut book = Incidents::default();
    let say = |book: &mut Incidents, texts: &[&str]| {
        let reasons = texts.iter().map(|text| Reason { source: "gpu".to_owned(), text: (*text).to_owned() }).collect();
        let recovery = RecoveryOutput { class: Some("Dead".into()), ..output(Some(EpisodeStage::Restarting), None) };
        let outcome = Outcome { reasons, ..outcome(Verdict::Dead) };
        book.tick(&while_fenced(&recovery, &outcome, true));
    };
    book.begin("host-7-9", 1, "Dead", "t0");
    say(&mut book, &["gone"]);
    say(&mut book, &["gone", "Xid 79"]);
    say(&mut book, &["gone"]);
    assert_eq!(book.list()[0].reasons, ["gone", "Xid 79"]);
}

#[test]
fn a_restarted_detector_goes_on_with_the_open_episode_of_the_same_process() {
    let mut book = Incidents::default();
    book.begin("host-7-9", 1, "Livelock", "t0");
    book.begin("host-7-9", 2, "Livelock", "t1");
    assert_eq!(book.list().len(), 1);
    book.begin("host-8-9", 3, "Livelock", "t2");
    assert_eq!(book.list().iter().map(|e| e.stage.as_str()).collect::<Vec<_>>(), ["Suspect", "Recovered"]);
}

#[test]
fn a_left_over_episode_ends_when_the_engine_serves() {
    let mut book = Incidents::default();
    book.begin("host-7-9", 1, "Livelock", "t0");
    tick(&mut book, "t1", None, Verdict::Unknown);
    assert!(book.open().is_some());
    // its fence is held, and the gate was silent for a moment
    book.tick(&while_fenced(&output(None, None), &outcome(Verdict::Progressing), false));
    assert!(book.open().is_some());
    tick(&mut book, "t2", None, Verdict::Progressing);
    assert_eq!(book.list()[0].stage, "Cleared");
}

#[test]
fn one_whose_kill_was_in_hand_has_recovered_and_not_cleared_itself() {
    let mut book = Incidents::default();
    book.begin("host-7-9", 1, "Livelock", "t0");
    tick(&mut book, "t1", Some(EpisodeStage::Killed), Verdict::Stalled(StallClass::Livelock));
    tick(&mut book, "t2", None, Verdict::Progressing);
    assert_eq!(book.list()[0].stage, "Recovered", "its detector ended before it could say whom the kill had reached");
}

#[test]
fn an_id_holds_only_what_the_api_takes() {
    let id = id_base(&"Pod_Ä/x".repeat(40), i32::MAX, u64::MAX);
    assert!(id.len() + 21 <= ID_CHARS_MAX, "{id}");
    assert!(id.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' || c == '-'), "{id}");
}
