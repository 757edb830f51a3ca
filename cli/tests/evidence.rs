//! The whole way of evidence with the real program: engine, agent and gate; a hang; the bundle, `truebeat bundle` and `truebeat why`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail by panicking")]

#[path = "../../agent/tests/common/end_run.rs"]
mod end_run;
#[path = "../../agent/tests/common/free_addresses.rs"]
mod free_addresses;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent::forensics::bundle::{self, BundleContents};
use agent::kill::send;
use agent::launch::EngineFile;
use nix::sys::signal::Signal;

use end_run::end_run;
use free_addresses::free_addresses;

const SOON: Duration = Duration::from_secs(90);
const TRIES: u32 = 3;
const TRUEBEAT: &str = env!("CARGO_BIN_EXE_truebeat");

/// `truebeat run -- truebeat engine`. Dropped, all of it ends.
struct Run {
    supervisor: Child,
    gate: String,
    agent: String,
    dir: tempfile::TempDir,
}

impl Drop for Run {
    fn drop(&mut self) {
        end_run(&mut self.supervisor, &self.dir.path().join("agent"));
    }
}

impl Run {
    fn start(fault: &str, marker: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("tiny");
        let made = Command::new(TRUEBEAT).arg("demo-model").arg(&model).stdout(Stdio::null()).status().unwrap();
        assert!(made.success());
        let [gate, agent, engine] = free_addresses().map(|address| address.to_string());
        let supervisor = Command::new(TRUEBEAT)
            .args([
                "run",
                "--no-nvml",
                "--listen",
                &gate,
                "--agent-listen",
                &agent,
                "--engine-url",
                &format!("http://{engine}"),
            ])
            .arg("--agent-dir")
            .arg(dir.path().join("agent"))
            .arg("--bundle-dir")
            .arg(dir.path().join("bundles"))
            .args([
                "--",
                TRUEBEAT,
                "engine",
                "--lie",
                "--fault",
                &format!("{fault}@sigusr2"),
                "--listen",
                &engine,
                "--model",
            ])
            .arg(&model)
            .env("HF_TOKEN", marker)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let run = Self { supervisor, gate, agent, dir };
        until("ready", || {
            ask(&run.agent, "GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").contains(" 200 ")
        });
        run
    }

    fn bundles(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path().join("bundles")).into_iter().flatten().flatten();
        let whole = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.ends_with(".tar.zst") && !name.starts_with('.')
        };
        entries.map(|entry| entry.path()).filter(whole).collect()
    }

    /// Hangs the engine under load and waits for the evidence.
    fn hang(&self, marker: &str) -> PathBuf {
        let body = format!(r#"{{"prompt":"{marker} abc","max_tokens":200,"ignore_eos":true,"stream":true}}"#);
        let post = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {marker}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let engine = EngineFile::read(&self.dir.path().join("agent")).unwrap().pid;
        let open = || {
            let mut stream = TcpStream::connect(&self.gate).unwrap();
            stream.write_all(post.as_bytes()).unwrap();
            stream
        };
        let mut streams: Vec<TcpStream> = (0..4).map(|_| open()).collect();
        std::thread::sleep(Duration::from_millis(500));
        send(&[engine], Signal::SIGUSR2);
        let mut at = Instant::now();
        until("a bundle", || {
            // a step must be due for the fault to fire
            if at.elapsed() > Duration::from_millis(200) && streams.len() < 64 {
                at = Instant::now();
                streams.push(open());
            }
            !self.bundles().is_empty()
        });
        self.bundles().remove(0)
    }
}

fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let since = Instant::now();
    while !wanted() {
        assert!(since.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ask(address: &str, request: &str) -> String {
    let Ok(mut stream) = TcpStream::connect(address) else { return String::new() };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
    let _ = stream.write_all(request.as_bytes());
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

fn said(args: &[&str]) -> String {
    let output = Command::new(TRUEBEAT).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn own_stacks(contents: &BundleContents) -> &str {
    let entry = contents.entries.iter().find(|entry| entry.name.starts_with("stacks/own-"));
    entry.map(|entry| entry.text.as_str()).unwrap_or_else(|| panic!("{:#?}", contents.manifest))
}

/// The bundle, what was printed of it, and what `why` says.
type Told = (BundleContents, String, String);

/// One hang. The engine's thread has 50 ms to take the signal for its stacks: where a busy machine did not give it those, the bundle lacks
/// the place, and another engine hangs.
fn story(fault: &str) -> Told {
    let mut told = one_hang(fault);
    for _ in 1..TRIES {
        if told.0.manifest.top_frames.iter().any(|place| place.contains("_for_ever (")) {
            break;
        }
        told = one_hang(fault);
    }
    told
}

fn one_hang(fault: &str) -> Told {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    let marker = format!("w{}", uuid.trim().replace('-', "q"));
    let run = Run::start(fault, &marker);
    let path = run.hang(&marker);
    let contents = bundle::read(&path).unwrap();
    let file = path.to_str().unwrap();
    let shown = said(&["bundle", file]);
    let mut why = String::new();
    until("the incident knows its fingerprint", || {
        why = said(&["why", "--agent", &run.agent]);
        why.contains(&contents.manifest.fingerprint)
    });
    let raw = zstd::decode_all(std::fs::File::open(&path).unwrap()).unwrap();
    let all =
        [String::from_utf8_lossy(&raw).as_ref(), &shown, &why, &said(&["bundle", file, "--output", "json"])].concat();
    assert!(!all.contains(&marker), "neither prompt nor header nor token leaves");
    assert_eq!(Path::new(file).extension().unwrap(), "zst");
    (contents, shown, why)
}

#[test]
fn a_hang_is_explained_by_its_own_stacks_and_known_again_by_its_fingerprint() {
    let (first, shown, why) = story("step-stall");
    assert!(own_stacks(&first).contains("sleep_for_ever"), "{}", own_stacks(&first));
    let place = &first.manifest.top_frames;
    assert!(
        place[0].starts_with("sleep_for_ever (strike.rs) < ") && place[0].contains(" < step (step.rs)"),
        "{place:?}"
    );
    let fast = first.manifest.pieces.iter().find(|piece| piece.name == "fast part").unwrap();
    assert!(fast.took_ms < 10_000, "{fast:?}");
    assert!(shown.contains("StepStalled, fingerprint ") && shown.contains("sleep_for_ever (strike.rs)"), "{shown}");
    assert!(shown.contains("steps ") && shown.lines().count() <= 60, "{shown}");
    assert!(why.contains("stood in sleep_for_ever"), "{why}");
    let (again, ..) = story("step-stall");
    assert_eq!(again.manifest.top_frames, first.manifest.top_frames);
    assert_eq!(again.manifest.fingerprint, first.manifest.fingerprint, "the same disease in another run");
    let (other, ..) = story("device-wait");
    assert!(other.manifest.top_frames[0].starts_with("spin_for_ever (event.rs) < "), "{:?}", other.manifest.top_frames);
    assert_ne!(other.manifest.fingerprint, first.manifest.fingerprint, "another cause");
    println!("{shown}\n{why}");
}
