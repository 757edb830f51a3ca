//! Evidence of real processes into real files: round trip, caps, redaction, and disks that refuse.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

#[path = "forensics/disk.rs"]
mod disk;
#[path = "forensics/hostile.rs"]
mod hostile;
#[path = "forensics/leaks.rs"]
mod leaks;
#[path = "common/not_run.rs"]
mod not_run;
#[path = "forensics/poison.rs"]
mod poison;
#[path = "forensics/ras.rs"]
mod ras;
#[path = "common/ras_server.rs"]
mod ras_server;
#[path = "forensics/rows.rs"]
mod rows;
#[path = "common/run.rs"]
mod run;
#[path = "forensics/stacks.rs"]
mod stacks;

use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use agent::forensics::bundle::{self, BundleEntry, BundleError};
use agent::forensics::{CaptureRequest, Captured, capture};
use agent::sources::haste::Haste;
use agent::sources::log::{Follower, LogTail};
use agent::sources::{EngineProcess, RankSteps, Scraper};
use crds::episode::Episode;
use heartbeat::page::{StepOutcome, StepRecord};
use http::Uri;
use vitals::verdict::{Outcome, Reason, StallClass, Verdict};

/// Unlike anything that a log, a process or this file's other text holds.
const MARKER: &str = "zq7-wombat-zq7";

/// A process in a session of its own that ends with its test.
struct Running(std::process::Child);

impl Running {
    fn start(program: &str, args: &[&str]) -> Self {
        let child = std::process::Command::new(program).args(args).stdin(Stdio::null()).spawn();
        Self(child.unwrap_or_else(|error| panic!("{program}, which the tests need: {error}")))
    }

    fn pid(&self) -> i32 {
        self.0.id().try_into().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn request(bundle_dir: &Path, engine: Option<EngineProcess>) -> CaptureRequest {
    let (log, step) = (format!(r#"POST body={{"prompt": "{MARKER}", "n": 1}} took 3 ms"#), 1_000_000);
    CaptureRequest {
        episode: Episode { id: "host-7-42.1".to_owned(), class: "StepStalled".to_owned(), ..Default::default() },
        outcome: Outcome {
            verdict: Verdict::Stalled(StallClass::StepStalled),
            since_ms: 5,
            reasons: vec![Reason { source: "gate".to_owned(), text: "5 requests owed and no byte".to_owned() }],
            actions: Vec::new(),
            check_again_in_ms: 100,
            fenced: true,
            health_lies: true,
        },
        engine,
        steps: vec![RankSteps {
            rank: 0,
            pid: None,
            steps: (1..=3)
                .map(|n| StepRecord {
                    step: n,
                    started_ns: n * step,
                    ended_ns: n * step + 500_000,
                    requests: 2,
                    prefill_tokens: 0,
                    decode_tokens: 2,
                    graph_key: 0xabc,
                    outcome: StepOutcome::Ok,
                })
                .collect(),
        }],
        metrics_before: Some((77, "vllm:num_requests_running 5\n".to_owned())),
        // a port that nothing listens on: the last scrape fails and is a note
        engine_url: "http://127.0.0.1:1".parse().unwrap(),
        metrics_path: "/metrics",
        ras_before: None,
        ras_address: None,
        log_tail: vec!["started".to_owned(), log, format!("Received request: prompt: '{MARKER}', params: n=1")].into(),
        gpu_note: "NVML absent: no driver".to_owned(),
        observation: None,
        page_dir: bundle_dir.join("pages"),
        bundle_dir: bundle_dir.to_owned(),
        command_line: ["vllm", "serve", "--api-key", MARKER, "--tp=8"].map(str::to_owned).to_vec(),
        image: String::new(),
    }
}

/// The disk answers at once, or the bundle is all that is asked for.
fn unheard(_: Captured) {}

#[tokio::test]
async fn a_capture_of_a_live_process_is_whole_bounded_and_free_of_prompts() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Running::start("sleep", &["1000"]);
    let began = Instant::now();
    let captured = capture(request(directory.path(), EngineProcess::of(engine.pid())), unheard).await;
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let path = captured.bundle.clone().expect("a bundle");
    assert_eq!(path, directory.path().join("host-7-42.1.tar.zst"));
    let contents = bundle::read(&path).unwrap();
    let names: Vec<&str> = contents.entries.iter().map(|entry| entry.name.as_str()).collect();
    let pid = engine.pid();
    for name in
        ["summary.txt", "verdict.json", "steps.json", "steps.txt", "log-tail.txt", "metrics-before.txt", "gpu.txt"]
    {
        assert!(names.contains(&name), "{name} is not in {names:?}");
    }
    for name in ["status", "stat", "wchan", "limits", "cgroup", "threads.txt"] {
        assert!(names.contains(&format!("proc/{pid}/{name}").as_str()), "{name} of {pid} is not in {names:?}");
    }
    let everything: String = contents.entries.iter().map(|entry| entry.text.as_str()).collect();
    assert!(!everything.contains(MARKER) && !captured.summary.contains(MARKER));
    assert!(everything.contains("took 3 ms") && everything.contains("--tp=8") && everything.contains("TracerPid"));
    let fast = contents.manifest.pieces.iter().find(|piece| piece.name == "fast part").unwrap();
    assert!(fast.took_ms < 10_000);
    assert!(contents.manifest.notes.iter().any(|note| note.contains("metrics after")), "{:?}", contents.manifest.notes);
    assert_eq!(
        (contents.manifest.class.as_str(), &contents.manifest.fingerprint),
        ("StepStalled", &captured.fingerprint)
    );
    assert!(captured.summary.len() <= 4_096 && captured.summary.contains("5 requests owed"), "{}", captured.summary);
    assert!(captured.summary.contains(&path.display().to_string()));
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
}

/// Its end is heard at once; in calm its log is read every other second.
#[tokio::test]
async fn what_a_dead_engine_said_last_is_in_the_bundle() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("engine.log");
    std::fs::write(&path, "engine up\n").unwrap();
    let haste = Haste::default();
    haste.set(false);
    let tail = LogTail::spawn(Follower::new(&path), haste).unwrap();
    let begun = Instant::now();
    while tail.reader().lines().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(30), "the log is not read");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    std::fs::write(&path, "engine up\nRuntimeError: CUDA error: an illegal memory access was encountered\n").unwrap();
    // (a machine that gives the log's thread no core for half a second costs the words: the second bundle has them)
    let mut text = String::new();
    for _ in 0..2 {
        let captured =
            capture(CaptureRequest { log_tail: tail.reader(), ..request(directory.path(), None) }, unheard).await;
        let contents = bundle::read(&captured.bundle.unwrap()).unwrap();
        text = contents.entries.into_iter().find(|entry| entry.name == "log-tail.txt").unwrap().text;
        if text.contains("illegal memory access") {
            return;
        }
    }
    panic!("{text}");
}

#[tokio::test]
async fn the_last_scrape_is_of_the_page_that_the_scraper_found() {
    let page = || async { "trtllm_num_requests_running 5.0\n" };
    let router = axum::Router::new()
        .route("/metrics", axum::routing::get(|| async { "[{\"iter\": 1}]" }))
        .route("/prometheus/metrics", axum::routing::get(page));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine_url: Uri = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    let scraper = Scraper::spawn(&engine_url, Haste::default());
    let begun = Instant::now();
    while scraper.text().is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "never scraped");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let directory = tempfile::tempdir().unwrap();
    let request = CaptureRequest { engine_url, metrics_path: scraper.path(), ..request(directory.path(), None) };
    let contents = bundle::read(&capture(request, unheard).await.bundle.unwrap()).unwrap();
    let after = contents.entries.iter().find(|entry| entry.name == "metrics-after.txt").unwrap();
    assert!(after.text.contains("trtllm_num_requests_running"), "{}", after.text);
}

#[tokio::test]
async fn the_same_disease_has_the_same_fingerprint_in_another_process() {
    let directory = tempfile::tempdir().unwrap();
    let mut seen: Vec<Captured> = Vec::new();
    for _ in 0..2 {
        let engine = Running::start("sleep", &["1000"]);
        // asleep, and not still on its way there
        let until = Instant::now() + Duration::from_secs(60);
        let asleep = || std::fs::read_to_string(format!("/proc/{}/wchan", engine.pid())).unwrap_or_default();
        while !asleep().contains("nanosleep") && Instant::now() < until {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        seen.push(capture(request(directory.path(), EngineProcess::of(engine.pid())), unheard).await);
    }
    assert_eq!(seen[0].fingerprint, seen[1].fingerprint);
}

/// Of an engine that died, and of one whose environment cannot be read in time, it is known from before.
#[tokio::test]
async fn what_was_known_of_the_program_before_is_in_the_fingerprint() {
    let directory = tempfile::tempdir().unwrap();
    let of = |image: &str| CaptureRequest { image: image.to_owned(), ..request(directory.path(), None) };
    let mut seen = Vec::new();
    for image in ["vllm:1", "vllm:2", "vllm:1"] {
        let captured = capture(of(image), unheard).await;
        assert_eq!(bundle::read(&captured.bundle.unwrap()).unwrap().manifest.image, image);
        seen.push(captured.fingerprint);
    }
    assert!(seen[0] == seen[2] && seen[0] != seen[1], "{seen:?}");
}

#[tokio::test]
async fn a_directory_that_cannot_be_costs_the_bundle_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    // below a file, and where nobody may write whoever he is
    for bundle_dir in [file.join("bundles"), Path::new("/proc/bundles").to_owned()] {
        let captured = capture(request(&bundle_dir, None), unheard).await;
        assert_eq!(captured.bundle, None);
        assert!(captured.notes.iter().any(|note| note.starts_with("no bundle: ")), "{:?}", captured.notes);
        assert!(captured.notes.iter().any(|note| note.contains("no engine process")), "{:?}", captured.notes);
        assert!(captured.summary.contains("bundle: none could be written"), "{}", captured.summary);
        assert_eq!(captured.fingerprint.len(), 16);
    }
}

fn entry(name: &str, text: String) -> BundleEntry {
    BundleEntry { name: name.to_owned(), text }
}

fn write(directory: &Path, id: &str, entries: Vec<BundleEntry>) -> Result<std::path::PathBuf, BundleError> {
    bundle::write(directory, id, bundle::manifest(id, "StepStalled", "f"), entries, &AtomicBool::new(false))
}

#[test]
fn the_largest_entries_are_cut_to_the_cap_and_the_manifest_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let entries = vec![
        entry("small", "s".repeat(100)),
        entry("large", "ü".repeat(bundle::BYTES_MAX)),
        entry("middle", "m".repeat(bundle::BYTES_MAX / 4)),
    ];
    let contents = bundle::read(&write(directory.path(), "a", entries).unwrap()).unwrap();
    let lengths: Vec<usize> = contents.entries.iter().map(|entry| entry.text.len()).collect();
    assert_eq!((lengths[0], lengths[2]), (100, bundle::BYTES_MAX / 4));
    let total: usize = lengths.iter().sum();
    assert!(total <= bundle::BYTES_MAX && total > bundle::BYTES_MAX - 8, "{total}");
    assert_eq!(contents.manifest.notes.len(), 1);
    assert!(contents.manifest.notes[0].starts_with("large was cut from 33554432"), "{:?}", contents.manifest.notes);
    assert_eq!(contents.manifest.entries[1].bytes, 2 * bundle::BYTES_MAX, "the whole length is told");
}

#[test]
fn only_the_newest_are_kept_and_other_peoples_files_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("backup.tar.zst"), "not ours").unwrap();
    let made = bundle::KEPT_MAX + 5;
    for n in 0..made {
        let path = write(directory.path(), &format!("e-{n:03}"), vec![entry("x", n.to_string())]).unwrap();
        // file times are as coarse as the kernel's tick; the order must not hang on it
        let at = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000 + n as u64);
        std::fs::File::open(&path).unwrap().set_modified(at).unwrap();
    }
    assert!(directory.path().join("backup.tar.zst").exists());
    let kept = |n: usize| directory.path().join(format!("e-{n:03}.tar.zst")).exists();
    assert_eq!((0..made).filter(|n| kept(*n)).count(), bundle::KEPT_MAX);
    assert!(kept(made - 1) && !kept(0));
}

#[test]
fn one_stall_outlives_many_deaths_that_are_alike() {
    let directory = tempfile::tempdir().unwrap();
    let add = |n: usize, class: &str, fingerprint: &str| {
        let (id, manifest) = (format!("e-{n:03}"), bundle::manifest(&format!("e-{n:03}"), class, fingerprint));
        let never = std::sync::atomic::AtomicBool::new(false);
        let path = bundle::write(directory.path(), &id, manifest, Vec::new(), &never).unwrap();
        let at = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000 + n as u64);
        std::fs::File::open(&path).unwrap().set_modified(at).unwrap();
        path
    };
    let stall = add(0, "StepStalled", "00aa");
    let deaths: Vec<_> = (1..=2 * bundle::KEPT_MAX).map(|n| add(n, "Dead", "00bb")).collect();
    assert!(stall.exists());
    assert_eq!(deaths.iter().filter(|path| path.exists()).count(), bundle::KEPT_MAX - 1);
    assert!(deaths.last().unwrap().exists());
    // many diseases of one bundle each: what comes again is the news, and they are old
    let singles: Vec<_> = (100..130).map(|n| add(n, "StepStalled", &format!("{n:04x}"))).collect();
    let again: Vec<_> = (200..203).map(|n| add(n, "DeviceWait", "00cc")).collect();
    assert!(again.iter().all(|path| path.exists()));
    assert!(singles.last().unwrap().exists() && !singles[0].exists());
}

#[test]
fn an_id_cannot_leave_the_directory_and_a_given_up_bundle_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path(), "../../etc/x", Vec::new()).unwrap();
    assert_eq!(path.parent(), Some(directory.path()));
    let empty = tempfile::tempdir().unwrap();
    let manifest = bundle::manifest("a", "c", "f");
    let result = bundle::write(empty.path(), "a", manifest, vec![entry("x", "y".to_owned())], &AtomicBool::new(true));
    assert!(matches!(result, Err(BundleError::GivenUp { .. })));
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
}

#[test]
fn a_file_that_is_no_bundle_is_refused_with_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let whole = write(directory.path(), "a", vec![entry("x", "y".repeat(10_000))]).unwrap();
    let bytes = std::fs::read(&whole).unwrap();
    let path = directory.path().join("b");
    for bad in [&b""[..], b"no zstd at all", &bytes[..bytes.len() / 2], &bytes[..10]] {
        std::fs::write(&path, bad).unwrap();
        let error = bundle::read(&path).unwrap_err();
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
    let mut archive = tar::Builder::new(zstd::Encoder::new(Vec::new(), 1).unwrap());
    let mut header = tar::Header::new_gnu();
    header.set_size(2);
    archive.append_data(&mut header, "manifest.json", &b"{}"[..]).unwrap();
    std::fs::write(&path, archive.into_inner().unwrap().finish().unwrap()).unwrap();
    assert!(matches!(bundle::read(&path), Err(BundleError::NoManifest { .. })));
    assert!(matches!(bundle::read(&directory.path().join("none")), Err(BundleError::Open { .. })));
}
