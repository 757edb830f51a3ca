//! A detector that starts anew, between a gate that the test plays and an engine that only sleeps: what its forerunner knew still holds.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use agent::gate::control::socket_in;
use agent::gate::ledger::{Control, GateReply};
use agent::launch::EngineFile;
use agent::sources::EngineProcess;
use agent::sources::clock::monotonic_ms;
use agent::status::StatusDoc;
use crds::episode::Episode;
use heartbeat::Writer;
use heartbeat::page::{Beat, Identity, Phase};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::stat::Mode;
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
    stdin: Option<ChildStdin>,
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
        for name in ["agent/gate", "notes", "pages"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let engine = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let EngineProcess { pid, start_ticks } = EngineProcess::of(engine.id().cast_signed()).unwrap();
        let file = EngineFile {
            pid,
            start_ticks,
            boot_id: String::new(),
            nonce: 7,
            output: Vec::new(),
            starts: 1,
            command: Vec::new(),
            last_exit: None,
        };
        let agent_dir = dir.path().join("agent");
        std::fs::write(EngineFile::path(&agent_dir), serde_json::to_vec(&file).unwrap()).unwrap();
        let (tell, orders) = channel();
        let gate = UnixListener::bind(socket_in(&agent_dir)).unwrap();
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

    /// Whoever opens this waits for somebody at its other end, as on a disk that hangs.
    fn fifo(&self, name: &str) -> std::path::PathBuf {
        let path = self.dir.path().join(name);
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        path
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
        Life { detector, statuses, stdin: Some(stdin) }
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

    /// Its supervisor lets it go.
    fn dismiss(&mut self) {
        self.stdin = None;
    }

    fn ends(&mut self) {
        let begun = Instant::now();
        while self.detector.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < SOON, "it never ends");
            std::thread::sleep(Duration::from_millis(10));
        }
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

#[test]
fn d10_a_detector_begins_judges_and_ends_whatever_lies_where_its_files_should() {
    let scene = Scene::new();
    for name in
        ["agent/detector.json", "agent/detector.tmp", "agent/gate/gate.state", "notes/fence", "notes/maintenance"]
    {
        scene.fifo(name);
    }
    let _page = scene.page();
    let mut life = scene.detect();
    life.until("ready, for it has delivered", |status| status.ready);
    life.dismiss();
    life.ends();
}

/// The disk takes a tenth of a second for what it is given.
#[test]
fn a_detector_that_is_let_go_ends_when_what_it_knows_is_written() {
    let scene = Scene::new();
    let long = Episode {
        id: "host-1-1-1".into(),
        stage: "Recovered".into(),
        reasons: vec!["x".repeat(80 << 10)],
        ..Episode::default()
    };
    let left = json!({ "incidents": { "list": [long] } });
    std::fs::write(scene.dir.path().join("agent/detector.json"), left.to_string()).unwrap();
    let path = scene.fifo("agent/detector.tmp");
    let mut first = File::options().read(true).write(true).open(&path).unwrap();
    fcntl(&first, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let _page = scene.page();
    let mut life = scene.detect();
    life.until("ready, for it has delivered", |status| status.ready);
    let (mut text, mut piece) = (Vec::new(), [0; 4096]);
    let bytes = first.read(&mut piece).unwrap();
    text.extend_from_slice(&piece[..bytes]);
    let mut disk = File::open(&path).unwrap();
    // from here on nobody but the detector can write to it
    drop(first);
    life.dismiss();
    loop {
        std::thread::sleep(Duration::from_millis(5));
        let bytes = disk.read(&mut piece).unwrap();
        if bytes == 0 {
            break;
        }
        text.extend_from_slice(&piece[..bytes]);
    }
    let written =
        serde_json::from_slice::<serde_json::Value>(&text).map(|memory| memory["incidents"]["list"][0]["id"].clone());
    assert_eq!(written.unwrap(), "host-1-1-1");
    life.ends();
}
