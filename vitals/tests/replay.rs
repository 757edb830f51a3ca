//! Recordings of a real vLLM, replayed: every hang is fenced and confirmed, nothing healthy is.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
use std::io::Read;
use std::path::{Path, PathBuf};

use vitals::observation::{GpuObs, ProcObs};
use vitals::policy::Policy;
use vitals::replay::sample::Reader;
use vitals::replay::{ReplayError, Timeline, replay};

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces")
}

fn run(name: &str) -> Timeline {
    let file = std::fs::File::open(dir().join(format!("{name}.jsonl.gz"))).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    replay(name, text.lines(), &Policy::default()).unwrap()
}

/// The interval of the labels whose state begins with `state`.
fn truth(name: &str, state: &str) -> (f64, f64) {
    let labels: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dir().join(format!("{name}.labels.json"))).unwrap()).unwrap();
    let found = labels["truth"].as_array().unwrap().iter().find(|span| span["state"] == state).unwrap();
    (found["from"].as_f64().unwrap(), found["to"].as_f64().unwrap())
}

fn first(timeline: &Timeline, verdict: &str) -> Option<f64> {
    timeline.timeline.iter().find(|change| change.verdict == verdict).map(|change| change.t)
}

#[test]
fn hangs_are_fenced_in_five_seconds_and_confirmed_before_they_end() {
    for name in ["f_core_sigstop_load", "g_core_sigstop_idle", "k1_core_spin", "k2_core_lock"] {
        let timeline = run(name);
        let (from, to) = truth(name, "hang");
        let suspect = first(&timeline, "Suspect").unwrap_or(f64::INFINITY);
        let stalled = first(&timeline, "Stalled").unwrap_or(f64::INFINITY);
        assert!(suspect >= from && suspect <= from + 5.0, "{name}: hung at {from}, fenced at {suspect}");
        assert!(stalled > suspect && stalled < to, "{name}: hung from {from} to {to}, confirmed at {stalled}");
        let classes: Vec<_> = timeline.timeline.iter().filter_map(|change| change.class.as_deref()).collect();
        assert!(
            classes.iter().all(|class| ["StepStalled", "DeviceWait", "RankSilent"].contains(class)),
            "{name}: {classes:?}"
        );
        let last = timeline.timeline.last().unwrap();
        assert!(
            last.t >= to && ["Idle", "Progressing"].contains(&last.verdict.as_str()),
            "{name}: did not come back: {last:?}"
        );
    }
}

#[test]
fn healthy_silence_is_never_suspected() {
    for name in ["c1_long_prefill_alone", "c3_chunked_prefill_alone", "l1_pause_keep"] {
        let timeline = run(name);
        let wrong = timeline.timeline.iter().find(|change| change.class.is_some());
        assert!(wrong.is_none(), "{name}: {wrong:?}");
    }
}

#[test]
fn a_pause_is_called_sleeping_and_says_why() {
    let timeline = run("l1_pause_keep");
    let asleep = timeline.timeline.iter().find(|change| change.verdict == "Sleeping").unwrap();
    assert!(asleep.reasons.iter().any(|reason| reason.contains("paused")), "{:?}", asleep.reasons);
}

#[test]
fn our_own_form_is_read_and_bad_lines_say_what_is_wrong() {
    let gate = r#""gate":{"epoch":1,"in_flight":0,"awaiting_first_byte":0,"prompt_tokens_owed":0,"chunks_delivered":0,"bytes_delivered":0,"requests_done":0,"client_blocked":0,"oldest_in_flight_ms":null,"last_delivery_ms":null}"#;
    let line =
        format!(r#"{{"t":1.5,{gate},"health":{{"status":200,"ms":1}},"metrics":"vllm:num_requests_running 0\n"}}"#);
    let timeline = replay("own", [line.as_str(), ""], &Policy::default()).unwrap();
    assert_eq!(
        (timeline.timeline.len(), timeline.timeline[0].t, timeline.timeline[0].verdict.as_str()),
        (1, 1.501, "Idle")
    );
    let fails = |lines: &[&str]| replay("bad", lines.iter().copied(), &Policy::default()).unwrap_err();
    assert!(matches!(fails(&["{"]), ReplayError::Json { line: 1, .. }));
    assert!(matches!(fails(&["{}"]), ReplayError::NoTime { line: 1 }));
    assert!(matches!(
        fails(&[r#"{"t":1,"metrics":{"delta":[[3,"x 1"]]}}"#]),
        ReplayError::Delta { line: 1, index: 3, lines: 0 }
    ));
    assert!(matches!(fails(&[""]), ReplayError::Empty));
}

/// The front end of a process that was started anew has answered nobody, whatever the one before it did.
#[test]
fn another_process_has_a_front_end_of_its_own() {
    let sample = |t: f64, started_ms: u64, answers: bool| {
        let proc = ProcObs { alive: true, started_ms, ..ProcObs::default() };
        serde_json::json!({"t": t, "proc": proc, "health": {"answers": answers, "status": answers.then_some(200)}})
    };
    let mut reader = Reader::default();
    let mut seen = |t, started_ms, answers| {
        let (_, obs) = reader.read(1, &sample(t, started_ms, answers)).unwrap();
        let frontend = obs.frontend.value.unwrap();
        (frontend.ever_answered, frontend.silent_since_ms)
    };
    assert_eq!(seen(1.0, 0, true), (true, None));
    assert_eq!(seen(20.0, 0, false), (true, Some(20_000)));
    assert_eq!(seen(30.0, 25_000, false), (false, Some(30_000)));
    assert_eq!(seen(40.0, 25_000, false), (false, Some(30_000)));
    assert_eq!(seen(50.0, 25_000, true), (true, None));
}

/// Recordings of before had 0 where a card tells no power.
#[test]
fn d07_a_power_that_a_recording_does_not_tell_is_unknown() {
    let read = |power: &str| {
        let gpu = format!(r#"{{"uuid":"GPU-1","util":97,"memory_util":2,{power}"silent_since_ms":null}}"#);
        let line = serde_json::from_str(&format!(r#"{{"t":1.5,"gpu":[{gpu}]}}"#)).unwrap();
        let (_, obs) = Reader::default().read(1, &line).unwrap();
        let gpus = obs.gpus.value.expect(power);
        (gpus[0].power_watts, gpus[0].power_limit_watts)
    };
    assert_eq!(read(r#""power_watts":142.0,"power_limit_watts":600.0,"#), (Some(142.0), Some(600.0)));
    assert_eq!(read(r#""power_watts":0.0,"power_limit_watts":600,"#), (None, Some(600.0)));
    assert_eq!(read(r#""power_watts":null,"power_limit_watts":0,"#), (None, None));
    assert_eq!(read(""), (None, None));
    for power_watts in [None, Some(142.5)] {
        let gpu = GpuObs { power_watts, ..GpuObs::default() };
        let written = serde_json::json!({"t": 1, "gpu": [gpu]});
        assert_eq!(Reader::default().read(1, &written).unwrap().1.gpus.value.unwrap(), [gpu], "as it was written");
    }
}
