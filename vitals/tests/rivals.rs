//! The rivals on recordings of a real vLLM: what they are known to have said there, and what they would have said.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
use std::io::Read;
use std::path::{Path, PathBuf};

use vitals::policy::Policy;
use vitals::replay::Timeline;
use vitals::replay::rules::History;
use vitals::rivals::judge::{Judged, Kind, Labels, Span, account, judge};
use vitals::rivals::score::RuleScore;
use vitals::rivals::{Ours, Rule, all, by_name};
use vitals::sim::kinds::KINDS;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces")
}

fn names() -> Vec<String> {
    let entries = std::fs::read_dir(dir()).unwrap().flatten();
    let name = |entry: std::fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".jsonl.gz").map(str::to_owned);
    let mut names: Vec<String> = entries.filter_map(name).collect();
    names.sort();
    names
}

fn history(name: &str) -> History {
    let file = std::fs::File::open(dir().join(format!("{name}.jsonl.gz"))).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    History::read(name, text.lines()).unwrap()
}

fn truth(name: &str) -> Vec<Span> {
    let text = std::fs::read_to_string(dir().join(format!("{name}.labels.json"))).unwrap();
    serde_json::from_str::<Labels>(&text).unwrap().truth
}

fn rival(rule: &str, history: &History) -> Timeline {
    history.rival(by_name(rule).unwrap().as_mut())
}

fn first(judged: &[Judged], kind: Kind) -> Option<f64> {
    judged.iter().find(|one| one.kind == kind).unwrap().alarm_s
}

#[test]
fn vllm_itself_died_in_this_recording_when_its_rule_says_so() {
    // one of two workers was stopped; the engine's own TimeoutError came 300.2 s later
    let (whole, truth) = (history("p_worker_sigstop_tp2"), truth("p_worker_sigstop_tp2"));
    let hang = truth.iter().find(|span| span.kind() == Kind::Hang).unwrap().clone();
    assert!((hang.to - hang.from - 300.2).abs() < 0.5, "the recording: {hang:?}");
    // the last sample before its death lies a moment before the 300 s
    let (history, truth) = whole.with_hang_held(&truth, 400.0).unwrap();
    let fired = first(&judge(&rival("vllm-execute-timeout", &history), &truth), Kind::Hang).unwrap();
    assert!((298.0..=302.0).contains(&fired), "{fired}");
    let logged = history
        .samples
        .iter()
        .find(|(_, obs)| obs.log.iter().any(|hit| hit.line.contains("No available shared memory broadcast block")))
        .map(|(now_ms, _)| *now_ms as f64 / 1000.0 - hang.from)
        .unwrap();
    let warned = first(&judge(&rival("vllm-shm-warning", &history), &truth), Kind::Hang).unwrap();
    assert!((warned - logged).abs() < 3.0, "the log says {logged}, the rule {warned}");
}

#[test]
fn the_rule_that_everybody_writes_misses_the_hangs_whose_gauges_froze_at_zero() {
    let caught = |name: &str| {
        let (held, truth) = history(name).with_hang_held(&truth(name), 600.0).unwrap();
        first(&judge(&rival("running-no-rate", &held), &truth), Kind::Hang).is_some()
    };
    for name in ["f_core_sigstop_load", "g_core_sigstop_idle", "k3_worker_lock", "k4_worker_native_spin"] {
        assert!(!caught(name), "{name}");
    }
    for name in ["k1_core_spin", "k2_core_lock", "p_worker_sigstop_tp2"] {
        assert!(caught(name), "{name}");
    }
    let chunked =
        judge(&rival("running-no-rate", &history("c3_chunked_prefill_alone")), &truth("c3_chunked_prefill_alone"));
    assert!(chunked.iter().any(|one| one.kind == Kind::Benign && one.evict_s.is_some()), "36 s of healthy prefill");
}

#[test]
fn a_held_hang_goes_on_as_it_was() {
    let name = "k1_core_spin";
    let (whole, truth) = (history(name), truth(name));
    let (held, truth) = whole.with_hang_held(&truth, 600.0).unwrap();
    let hang = truth.last().unwrap();
    assert_eq!((hang.kind(), hang.to - hang.from), (Kind::Hang, 600.0));
    let (last_ms, last) = held.samples.last().unwrap();
    assert!((*last_ms as f64 / 1000.0 - hang.to).abs() < 3.0, "{last_ms} {hang:?}");
    assert!(last_ms - last.gate.at_ms <= 3_000 && last_ms - last.metrics.at_ms <= 5_000, "sources stay fresh");
    let (before_ms, before) = &held.samples[held.samples.len() - 100];
    assert_eq!(
        last.gate.value.as_ref().unwrap().chunks_delivered,
        before.gate.value.as_ref().unwrap().chunks_delivered
    );
    let cpu = last.proc.value.as_ref().unwrap().cpu_ms - before.proc.value.as_ref().unwrap().cpu_ms;
    assert!(cpu * 2 > last_ms - before_ms, "a spinning core burns CPU: {cpu} ms");
    assert!(whole.with_hang_held(&truth, 10.0).is_none(), "it is longer already");
}

#[test]
fn ours_catches_every_recorded_hang_and_destroys_nothing_healthy() {
    let mut score = RuleScore::new("truebeat");
    for name in names() {
        let (history, truth) = (history(&name), truth(&name));
        let judged = judge(&history.ours(&Policy::default()).unwrap(), &truth);
        let wrong = judged.iter().find(|one| one.kind == Kind::Hang && one.alarm_s.is_none());
        assert!(wrong.is_none(), "{name}: {wrong:?}");
        let wrong = judged.iter().find(|one| {
            let fence_is_wrong = one.kind == Kind::Benign && one.span.state != "slow_step";
            (one.kind == Kind::Benign && one.evict_s.is_some()) || (fence_is_wrong && one.alarm_s.is_some())
        });
        assert!(wrong.is_none(), "{name}: {wrong:?}");
        account(&mut score, &judged);
    }
    assert_eq!((score.hangs, score.caught, score.false_evictions), (8, 8, 0), "{score:?}");
}

#[test]
fn no_rival_catches_them_all_within_a_minute_without_a_false_alarm() {
    let histories: Vec<(History, Vec<Span>)> = names()
        .iter()
        .map(|name| {
            let (history, truth) = (history(name), truth(name));
            history.with_hang_held(&truth, 600.0).unwrap_or((history, truth))
        })
        .collect();
    for rule in all() {
        let mut score = RuleScore::new(rule.name());
        for (history, truth) in &histories {
            account(&mut score, &judge(&rival(rule.name(), history), truth));
        }
        assert_eq!(score.hangs, 8, "{score:?}");
        let clean = score.caught == score.hangs && score.false_fences == 0;
        let slow = score.latency_quantile_ms(990).is_none_or(|p99| p99 >= 60_000);
        assert!(!clean || slow, "{score:?}");
    }
}

/// The numbers are those of the run that wrote them (`make rivals`); rules and kinds are today's.
#[test]
fn the_table_of_kinds_in_the_docs_has_every_rule_and_every_kind_of_the_corpus() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/rivals-kinds.txt");
    let text = std::fs::read_to_string(path).unwrap();
    let has =
        |line: &str| assert!(text.lines().any(|l| l == line), "docs/rivals-kinds.txt lacks {line:?}: make rivals");
    let ours = Ours::new(Policy::default());
    let everybody = std::iter::once((ours.name(), ours.about()))
        .chain(all().iter().map(|rule| (rule.name(), rule.about())).collect::<Vec<_>>());
    for (i, (name, about)) in everybody.enumerate() {
        has(&format!("{:>4}  {name:<27} {about}", i + 1));
    }
    let corpus = KINDS.iter().filter(|kind| kind.name.starts_with(['H', 'B']));
    corpus.for_each(|kind| has(&format!("{:<4} {}", kind.name, kind.what)));
    assert!(text.trim_end().ends_with(" 0 failed"), "a history of ours failed in it");
}
