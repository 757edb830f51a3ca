//! A detector that starts anew, between a gate that the test plays and an engine that only sleeps: what its forerunner knew still holds.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use agent::gate::ledger::{Control, GateReply};
use agent::launch::EngineFile;
use agent::sources::EngineProcess;
use agent::sources::clock::monotonic_ms;
use agent::status::StatusDoc;
use heartbeat::Writer;
use heartbeat::page::{Beat, Identity, Phase};
use serde_json::json;

const SOON: Duration = Duration::from_secs(40);
const FENCE: &str = r#"{"by":"ann","at":"2026-01-01T00:00:00Z","why":"a look"}"#;

/// Directories, the engine, and the gate's end of the line.
struct Scene {
    dir: tempfile::TempDir,
    engine: Child,
    orders: Receiver<Control>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.engine.kill();
        let _ = self.engine.wait();
    }
}

/// One life of the detector; it ends with this.
struct Life {
    detector: Child,
    statuses: Receiver<StatusDoc>,
    _stdin: ChildStdin,
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.detector.kill();
        let _ = self.detector.wait();
    }
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["agent", "notes", "pages"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let engine = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let EngineProcess { pid, start_ticks } = EngineProcess::of(engine.id().cast_signed()).unwrap();
        let file = EngineFile {
            pid,
            start_ticks,
            boot_id: String::new(),
            nonce: 7,
            starts: 1,
            command: Vec::new(),
            last_exit: None,
        };
        let agent_dir = dir.path().join("agent");
        std::fs::write(EngineFile::path(&agent_dir), serde_json::to_vec(&file).unwrap()).unwrap();
        let (tell, orders) = channel();
        let gate = UnixListener::bind(agent_dir.join("gate.sock")).unwrap();
        std::thread::spawn(move || gate.incoming().flatten().for_each(|line| answer(&line, &tell)));
        Self { dir, engine, orders }
    }

    /// A page that proves progress: eight tokens, and nothing owed.
    fn page(&self) -> Writer {
        let engine = EngineProcess::of(self.engine.id().cast_signed()).unwrap();
        let mut identity = Identity::of_this_process(0, 1, 7).unwrap();
        (identity.pid, identity.pid_start_ticks) = (self.engine.id(), engine.start_ticks);
        let mut writer = Writer::create(&self.dir.path().join("pages"), &identity).unwrap();
        writer.publish(&idle());
        writer
    }

    fn note(&self, name: &str, text: &str) {
        std::fs::write(self.dir.path().join("notes").join(name), text).unwrap();
    }

    fn detect(&self) -> Life {
        self.detect_in_mode("Observe")
    }

    fn detect_in_mode(&self, mode: &str) -> Life {
        let path = |name: &str| self.dir.path().join(name);
        let option = |name: &str, path: &Path| format!("--{name}={}", path.display());
        let mut detector = Command::new(env!("CARGO_BIN_EXE_truebeat-agent"))
            .args(["agent", "detect", "--standalone", "--no-nvml", "--recovery-mode", mode])
            // nobody is there to be asked for tokens, and nothing answers for the engine
            .args(["--prove-through=http://127.0.0.1:1", "--engine-url=http://127.0.0.1:1"])
            .args([option("agent-dir", &path("agent")), option("notes-dir", &path("notes"))])
            .args([option("page-dir", &path("pages")), option("bundle-dir", &path("bundles"))])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (detector.stdin.take().unwrap(), detector.stdout.take().unwrap());
        let (tell, statuses) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.filter_map(|line| serde_json::from_str(&line).ok()).for_each(|status| _ = tell.send(status))
        });
        Life { detector, statuses, _stdin: stdin }
    }
}

/// What an engine says that has delivered eight tokens and owes nothing.
fn idle() -> Beat {
    let now_ns = heartbeat::monotonic_ns();
    let beat = Beat::of_phase(Phase::Idle, now_ns);
    Beat { steps_completed: 8, tokens_delivered: 8, requests_finished: 1, lease_ms: 500, ..beat }
}

impl Life {
    fn until(&self, what: &str, wanted: impl Fn(&StatusDoc) -> bool) -> StatusDoc {
        until(&self.statuses, what, wanted)
    }
}

/// The first of these that is as wanted.
fn until<T>(from: &Receiver<T>, what: &str, wanted: impl Fn(&T) -> bool) -> T {
    let begun = Instant::now();
    loop {
        let left = SOON.saturating_sub(begun.elapsed());
        let one = from.recv_timeout(left).unwrap_or_else(|error| panic!("never: {what} ({error})"));
        if wanted(&one) {
            return one;
        }
    }
}

/// The gate's end of one connection: tells what it hears, and owes nothing.
fn answer(mut line: &std::os::unix::net::UnixStream, tell: &Sender<Control>) {
    let read = BufReader::new(line.try_clone().unwrap());
    for (heard, order) in read.lines().map_while(Result::ok).enumerate() {
        let _ = tell.send(serde_json::from_str(&order).unwrap());
        let reply = json!({ "heard": heard + 1, "at_ms": monotonic_ms(), "reply": GateReply::default() });
        if writeln!(line, "{reply}").is_err() {
            return;
        }
    }
}

#[test]
fn a_new_detector_keeps_proof_reason_and_readiness_over_a_persons_fence() {
    let scene = Scene::new();
    let page = scene.page();
    let first = scene.detect();
    first.until("ready, for it has delivered", |status| status.ready);
    scene.note("fence", FENCE);
    first.until("fenced", |status| !status.ready && status.verdict.fenced);
    // the memory is written by a thread of its own
    let memory = scene.dir.path().join("agent/detector.json");
    let begun = Instant::now();
    while !std::fs::read_to_string(&memory).is_ok_and(|text| text.contains("fenced by ann")) {
        assert!(begun.elapsed() < SOON, "never written");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(first);
    // from here nothing tells anything of the engine any more
    drop(page);
    std::fs::remove_file(scene.dir.path().join("pages/rank-0.beat")).unwrap();
    while scene.orders.try_recv().is_ok() {}

    let second = scene.detect();
    let order = until(&scene.orders, "the first order", |_| true);
    assert!(order.fenced && order.reason.contains("fenced by ann: a look"), "{order:?}");
    second.until("still fenced", |status| !status.ready && status.verdict.fenced);
    scene.note("fence", "");
    let status = second.until("ready as before the fence", |status| status.ready);
    assert!(matches!(status.verdict.verdict.as_str(), "Starting" | "Unknown"), "{status:?}");
}

#[test]
fn maintenance_that_is_declared_ends_a_suspicion_and_what_follows_it_is_judged_again() {
    let scene = Scene::new();
    let mut page = scene.page();
    let life = scene.detect();
    life.until("ready, for it has delivered", |status| status.ready);
    let step = idle();
    page.publish(&Beat { running: 1, phase: Phase::Decode, step_started_ns: step.published_ns, ..step });
    let accused = |status: &StatusDoc| matches!(status.verdict.verdict.as_str(), "Suspect" | "Stalled");
    life.until("accused of a step that does not end", accused);
    scene.note("maintenance", r#"{"by":"ann","why":"weights"}"#);
    let status = life.until("left alone", |status| !accused(status));
    let said =
        |status: &StatusDoc| status.verdict.reasons.iter().any(|why| why.text.contains("maintenance is declared"));
    assert!(said(&status) && !status.verdict.fenced, "{status:?}");
    scene.note("maintenance", "");
    let status = life.until("accused again", accused);
    assert!(!said(&status), "{status:?}");
}

#[test]
fn a_fence_that_a_new_detector_holds_ends_with_the_wish_that_nothing_be_fenced() {
    let scene = Scene::new();
    let mut page = scene.page();
    // an operator's note, which a run does not heed
    scene.note("recovery", r#"{"mode":"Observe"}"#);
    let first = scene.detect_in_mode("Fence");
    first.until("ready, for it has delivered", |status| status.ready);
    let step = idle();
    page.publish(&Beat { running: 1, phase: Phase::Decode, step_started_ns: step.published_ns, ..step });
    first.until("fenced", |status| status.verdict.fenced);
    let memory = scene.dir.path().join("agent/detector.json");
    let begun = Instant::now();
    while !std::fs::read_to_string(&memory).is_ok_and(|text| text.contains(r#""fenced":true"#)) {
        assert!(begun.elapsed() < SOON, "never written");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(first);

    let second = scene.detect_in_mode("Fence");
    let accused = |status: &StatusDoc| matches!(status.verdict.verdict.as_str(), "Suspect" | "Stalled");
    second.until("fenced as before", |status| status.verdict.fenced && accused(status));
    drop(second);
    let third = scene.detect_in_mode("Observe");
    third.until("open again, whatever is thought of it", |status| !status.verdict.fenced && accused(status));
}
