//! Every recording of a real vLLM, with and without its page, against the truth of its labels (what must be seen, 1).
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use vitals::policy::Policy;
use vitals::replay::{Timeline, replay};

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces")
}

/// The samples of a recording; `with_page` keeps what the plugin inside the engine published.
fn lines(name: &str, with_page: bool) -> Vec<String> {
    let file = std::fs::File::open(dir().join(format!("{name}.jsonl.gz"))).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let strip = |line: &str| {
        let mut value: serde_json::Value = serde_json::from_str(line).unwrap();
        if !with_page {
            value.as_object_mut().unwrap().remove("hb");
        }
        value.to_string()
    };
    text.lines().map(strip).collect()
}

/// A span of the labels: state, from, to.
type Span = (String, f64, f64);

fn truth(name: &str) -> Vec<Span> {
    let text = std::fs::read_to_string(dir().join(format!("{name}.labels.json"))).unwrap();
    let labels: serde_json::Value = serde_json::from_str(&text).unwrap();
    let number = |span: &serde_json::Value, key: &str| span[key].as_f64().unwrap();
    let read = |span: &serde_json::Value| {
        (span["state"].as_str().unwrap().to_owned(), number(span, "from"), number(span, "to"))
    };
    labels["truth"].as_array().unwrap().iter().map(read).collect()
}

fn names() -> Vec<String> {
    let files = std::fs::read_dir(dir()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = files.filter_map(|file| file.strip_suffix(".jsonl.gz").map(str::to_owned)).collect();
    names.sort();
    names
}

/// The classes that a hang of this recording may be called.
fn classes(name: &str) -> &'static [&'static str] {
    match name {
        "i_api_sigstop" => &["FrontendStalled"],
        "k1_core_spin" | "k4_worker_native_spin" => &["DeviceWait"],
        // one rank of two is stopped, which nothing but its own page or NCCL could name
        "p_worker_sigstop_tp2" => &["StepStalled", "RankSilent"],
        _ => &["StepStalled"],
    }
}

/// A sample is taken over seconds where a probe runs into its timeout: what is said at its end is of its beginning as well.
const SAMPLE_S: f64 = 2.5;

/// What is wrong with this timeline, in words.
fn faults(name: &str, timeline: &Timeline, spans: &[Span]) -> Vec<String> {
    let mut found = Vec::new();
    let ends = timeline.timeline.iter().skip(1).map(|change| change.t).chain([f64::INFINITY]);
    let said: Vec<_> = timeline.timeline.iter().zip(ends).collect();
    for (state, from, to) in spans {
        let during = |verdict: &str, slack: f64| {
            said.iter().find(|(change, end)| change.verdict == verdict && change.t < *to && *end > from + slack)
        };
        match state.as_str() {
            "hang" | "hang_api" => {
                let confirmed = said.iter().find(|(c, _)| c.verdict == "Stalled" && c.t > *from && c.t < *to);
                let class = confirmed.and_then(|(change, _)| change.class.clone()).unwrap_or_default();
                let known = classes(name).iter().any(|known| class.starts_with(known));
                let fenced = said.iter().find(|(c, _)| c.verdict == "Suspect" && c.t > *from).map(|(c, _)| c.t);
                // what the slowest signal allows: a probe's timeout, its own second, and the learned floor
                if confirmed.is_none() || !known || fenced.is_none_or(|t| t > from + 7.0) {
                    found.push(format!("{state} from {from}: fenced {fenced:?}, confirmed {confirmed:?}"));
                }
            }
            "dead" if during("Dead", 0.0).is_none() => found.push(format!("dead from {from} and never called so")),
            "progress" | "slow_step" | "paused" | "asleep" | "startup" | "idle" => {
                for verdict in ["Suspect", "Stalled", "Dead"] {
                    let slow_step = state == "slow_step" && verdict == "Suspect";
                    if let Some(wrong) = during(verdict, SAMPLE_S).filter(|_| !slow_step) {
                        found.push(format!("{verdict} in {state} from {from} to {to}: {wrong:?}"));
                    }
                }
            }
            _ => {}
        }
    }
    found
}

/// `with_page`: does what the plugin published count?
fn check(with_page: bool) {
    let mut wrong = BTreeMap::new();
    for name in names() {
        let lines = lines(&name, with_page);
        let timeline = replay(&name, lines.iter().map(String::as_str), &Policy::default()).unwrap();
        let found = faults(&name, &timeline, &truth(&name));
        if !found.is_empty() {
            wrong.insert(name, found);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_hang_of_an_unpatched_engine_is_confirmed_and_nothing_healthy_is_even_fenced() {
    check(false);
}

#[test]
fn the_same_with_the_page_of_a_plugin() {
    check(true);
}

/// A freeze of 40 s that ends by itself is the one healthy silence that is fenced: the clients of a frozen engine are better off
/// elsewhere, and the fence lifts with the first token. It is not confirmed, because the stepping thread sleeps on a timer (V6).
#[test]
fn a_freeze_that_ends_by_itself_is_fenced_and_not_confirmed() {
    let name = "c0_slow_step_40s_sleep";
    for with_page in [false, true] {
        let lines = lines(name, with_page);
        let timeline = replay(name, lines.iter().map(String::as_str), &Policy::default()).unwrap();
        let verdicts: Vec<&str> = timeline.timeline.iter().map(|change| change.verdict.as_str()).collect();
        assert!(verdicts.contains(&"Suspect") && !verdicts.contains(&"Stalled"), "{verdicts:?}");
    }
}
