//! Real processes: the supervisor with its children, the engine's tree, and what survives whose death.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed expectation is how a test speaks")]

#[path = "common/asking.rs"]
mod asking;
#[path = "processes/bad_input.rs"]
mod bad_input;
#[path = "processes/descriptors.rs"]
mod descriptors;
#[path = "processes/disk.rs"]
mod disk;
#[path = "processes/ends.rs"]
mod ends;
#[path = "processes/lies.rs"]
mod lies;
#[path = "processes/no_threads.rs"]
mod no_threads;
#[path = "common/not_run.rs"]
mod not_run;
#[path = "processes/orphans.rs"]
mod orphans;
#[path = "processes/part.rs"]
mod part;
#[path = "processes/pod.rs"]
mod pod;
#[path = "common/run.rs"]
mod run;

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent::kill::{kill_tree, send};
use agent::launch::EngineFile;
use agent::sources::procs::ProcRoot;
use agent::sources::{EngineProcess, process_tree};
use crds::episode::Episode;
use nix::sys::signal::Signal;

use asking::{ask, get, until};
use run::{AGENT, Run};

/// An OpenAI-like server of a few lines, with no code of ours in it. SIGUSR2 freezes its generation for ever while /health goes on
/// saying 200, as engines in the field do.
const ENGINE: &str = r#"
import http.server, signal, sys, threading, time
frozen, state = threading.Event(), {'running': 0, 'tokens': 0}
signal.signal(signal.SIGUSR2, lambda *a: frozen.set())
METRICS = 'vllm:num_requests_running{m="x"} %d.0\nvllm:num_requests_waiting{m="x"} 0.0\nvllm:generation_tokens_total{m="x"} %d.0\n'
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def answer(self, text, kind='application/json'):
        self.send_response(200); self.send_header('content-type', kind)
        self.send_header('content-length', str(len(text))); self.end_headers(); self.wfile.write(text.encode())
    def do_GET(self):
        self.answer(METRICS % (state['running'], state['tokens']), 'text/plain') if self.path == '/metrics' else self.answer('{"ok":true}')
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get('content-length', 0)))
        if b'stream' not in body: return self.answer('{"choices":[]}')
        self.send_response(200); self.send_header('content-type', 'text/event-stream')
        self.send_header('connection', 'close'); self.end_headers(); state['running'] += 1; self.close_connection = True
        for n in range(40):
            while frozen.is_set(): time.sleep(1)
            self.wfile.write(b'data: {"choices":[{"text":"x"}]}\n\n'); self.wfile.flush(); state['tokens'] += 1; time.sleep(0.02)
        state['running'] -= 1; self.wfile.write(b'data: [DONE]\n\n')
    def log_message(self, *a): pass
print('engine up', flush=True)
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()
"#;

const STREAM: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 28\r\n\r\n{\"prompt\":\"a\",\"stream\":true}";

impl Run {
    fn start() -> Self {
        Self::with(&[])
    }

    fn with(options: &[&str]) -> Self {
        Self::with_stderr(options, Stdio::inherit())
    }

    /// Around the little server, ready.
    fn with_stderr(options: &[&str], stderr: Stdio) -> Self {
        let run = Self::begin(Command::new(AGENT).stderr(stderr), options, |dir, engine| {
            let program = dir.join("engine.py");
            std::fs::write(&program, ENGINE).unwrap();
            vec!["python3".into(), program.into(), engine.port().to_string().into()]
        });
        until("ready", || run.ready() == Some(200));
        run
    }

    fn ready(&self) -> Option<u16> {
        status(&self.agent, "/readyz")
    }

    fn engine(&self) -> EngineFile {
        EngineFile::read(&self.dir.path().join("agent")).unwrap()
    }

    /// The live child of the supervisor that runs this role.
    fn child(&self, role: &str) -> Option<i32> {
        let me = i32::try_from(self.supervisor.id()).unwrap();
        children_of(me).into_iter().find(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line.split(|byte| *byte == 0).nth(2) == Some(role.as_bytes()))
        })
    }
}

/// The newest incident of the agent.
fn newest_incident(agent: &str) -> Option<Episode> {
    let text = get(agent, "/incidents")?;
    let list: Vec<Episode> = serde_json::from_str(text.split("\r\n\r\n").nth(1)?).ok()?;
    list.into_iter().next()
}

/// The same, where there is one: a busy machine may be late to say so.
fn an_incident(run: &Run) -> Episode {
    let mut found = None;
    until("an incident", || {
        found = newest_incident(&run.agent);
        found.is_some()
    });
    found.unwrap()
}

fn children_of(pid: i32) -> Vec<i32> {
    ProcRoot::live().all().iter().filter(|stat| stat.ppid == pid && !stat.ended()).map(|stat| stat.pid).collect()
}

fn status(address: &str, path: &str) -> Option<u16> {
    get(address, path)?.get(9..12)?.parse().ok()
}

/// As `top` shows them, and the kernel's word of whom it killed for memory.
#[test]
fn each_process_is_called_by_what_it_does() {
    let run = Run::start();
    for (role, name) in [("detect", "truebeat-detect"), ("gate", "truebeat-gate")] {
        let comm = run.child(role).and_then(|pid| ProcRoot::live().stat(pid)).map(|stat| stat.comm);
        assert_eq!(comm.as_deref(), Some(name));
    }
}

#[test]
fn five_kills_of_detector_and_gate_change_neither_the_supervisor_nor_readiness() {
    let mut run = Run::start();
    let engine = run.engine();
    for round in 0..5 {
        for role in ["detect", "gate"] {
            let mut victim = None;
            until("a child to kill", || {
                victim = run.child(role);
                victim.is_some()
            });
            send(&[victim.unwrap()], Signal::SIGKILL);
            until("its successor", || {
                let ready = get(&run.agent, "/readyz").unwrap();
                assert!(ready.starts_with("HTTP/1.1 200"), "round {round}, after the death of {role}: {ready}");
                run.child(role).is_some_and(|pid| Some(pid) != victim)
            });
        }
        until("a request passes the gate", || {
            let post = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
            ask(&run.gate, post).is_some_and(|text| text.contains("choices"))
        });
    }
    assert!(run.supervisor.try_wait().unwrap().is_none(), "the supervisor lives");
    assert_eq!(run.engine(), engine, "nobody touched the engine");
    let watched = Instant::now();
    while watched.elapsed() < Duration::from_secs(2) {
        assert_eq!(run.ready(), Some(200));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_engine_that_dies_is_started_again_and_the_incident_is_told() {
    let mut run = Run::start();
    let first = run.engine();
    send(&[first.pid], Signal::SIGKILL);
    until("a second engine", || run.engine().starts == 2);
    let second = run.engine();
    assert_ne!((second.pid, second.nonce), (first.pid, first.nonce));
    assert_eq!(second.last_exit.and_then(|exit| exit.signal), Some(9));
    until("ready again", || run.ready() == Some(200));
    until("the incident is closed", || {
        newest_incident(&run.agent).is_some_and(|incident| incident.class == "Dead" && incident.stage == "Recovered")
    });
    let supervisor = i32::try_from(run.supervisor.id()).unwrap();
    send(&[supervisor], Signal::SIGTERM);
    let mut code = None;
    until("the end", || {
        code = run.supervisor.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(0));
    assert!(process_tree(&second_process(&run)).is_empty(), "nothing of the engine is left");
}

fn second_process(run: &Run) -> EngineProcess {
    run.engine().process()
}

/// Fences after a second, and does not confirm.
const FENCES_SOON: &str = "foreign_floor_ms=1000,confirm_strong_ms=600000,confirm_moderate_ms=600000,confirm_weak_ms=600000,\
                           confirm_timer_ms=600000,patience_cap_ms=1000,foreign_warm_ms=1000";

/// Its engine freezes, owes this answer, and is fenced.
fn frozen(run: &Run) -> TcpStream {
    let mut stream = TcpStream::connect(&run.gate).unwrap();
    send(&[run.engine().pid], Signal::SIGUSR2);
    stream.write_all(STREAM.as_bytes()).unwrap();
    until("fenced", || run.ready() == Some(503));
    stream
}

/// Its detector is killed, and the fence holds while the successor looks around.
fn fence_outlives_detector(run: &Run) {
    let victim = run.child("detect").unwrap();
    send(&[victim], Signal::SIGKILL);
    until("its successor", || run.child("detect").is_some_and(|pid| pid != victim));
    // nor does it matter that the gate gets no core for a moment
    let gate = run.child("gate").unwrap();
    send(&[gate], Signal::SIGSTOP);
    std::thread::sleep(Duration::from_millis(700));
    send(&[gate], Signal::SIGCONT);
    let watched = Instant::now();
    while watched.elapsed() < Duration::from_secs(2) {
        assert_eq!(run.ready(), Some(503), "the fence holds");
        assert!(ask(&run.gate, STREAM).is_some_and(|text| text.starts_with("HTTP/1.1 503")));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_fence_outlives_its_detector_and_a_drain_its_caller() {
    let run = Run::with(&["--policy", FENCES_SOON]);
    let stream = frozen(&run);
    let incident = an_incident(&run);
    // what a successor is to know is written by a thread, a moment after the fence
    let left = || std::fs::read_to_string(run.dir.path().join("agent/detector.json")).unwrap_or_default();
    until("the fence is written down", || left().contains(r#""fenced":true"#) && left().contains(&incident.id));
    (0..3).for_each(|_| fence_outlives_detector(&run));
    assert_eq!(an_incident(&run).id, incident.id, "one stall, one episode");
    // on a busy machine the gate's first answer to a new detector is late, and what is in flight is not known before
    until("what is in flight is told", || {
        let drained = get(&run.agent, "/drain?timeout_s=1").unwrap_or_default();
        assert!(!drained.contains("\"drained\":true"), "{drained}");
        drained.contains("\"drained\":false") && drained.contains("\"in_flight\":1")
    });
    drop(stream);
    until("it is drained", || {
        get(&run.agent, "/drain?timeout_s=4").is_some_and(|drained| drained.contains("\"drained\":true"))
    });
}

/// As when it was killed a moment after the fence, before its memory was written.
#[test]
fn d05_a_fence_of_which_the_gate_alone_knows_outlives_its_detector() {
    let run = Run::with(&["--policy", FENCES_SOON]);
    let agent = run.dir.path().join("agent");
    let left = || std::fs::read_to_string(agent.join("detector.json")).unwrap_or_default();
    until("it is written down that it serves", || {
        left().contains(r#""fit":true"#) && left().contains(r#""refusal":"""#)
    });
    // a directory in the way of the file that is renamed into place
    std::fs::create_dir(agent.join("detector.tmp")).unwrap();
    let _stream = frozen(&run);
    assert!(left().contains(r#""fenced":false"#), "{}", left());
    fence_outlives_detector(&run);
}

#[test]
fn nobody_reads_its_words_and_the_supervisor_lives() {
    let mut run = Run::with_stderr(&[], Stdio::piped());
    drop(run.supervisor.stderr.take());
    send(&[run.engine().pid, run.child("detect").unwrap()], Signal::SIGKILL);
    until("a second engine", || run.engine().starts == 2);
    until("ready again", || run.ready() == Some(200));
    assert!(run.supervisor.try_wait().unwrap().is_none());
}

#[test]
fn d09_a_full_pipe_holds_nobody() {
    let (_reader, mut writer) = std::io::pipe().unwrap();
    let size = nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    writer.write_all(&vec![b'x'; usize::try_from(size).unwrap()]).unwrap();
    // from here on whoever writes to it waits for ever
    let run = Run::with_stderr(&[], writer.into());
    send(&[run.engine().pid, run.child("detect").unwrap()], Signal::SIGKILL);
    until("a second engine", || run.engine().starts == 2);
    until("ready again", || run.ready() == Some(200));
}

#[test]
fn d10_an_engine_is_started_again_although_the_disk_is_full() {
    let run = Run::start();
    // whoever tells of a new one there finds no room
    std::os::unix::fs::symlink("/dev/full", run.dir.path().join("agent/engine.tmp")).unwrap();
    send(&[run.engine().pid], Signal::SIGKILL);
    until("a second engine", || run.engine().starts == 2);
    until("ready again", || run.ready() == Some(200));
}

#[test]
fn a_detector_that_hangs_is_replaced_and_readiness_stays() {
    let run = Run::start();
    let victim = run.child("detect").unwrap();
    send(&[victim], Signal::SIGSTOP);
    until("its successor", || {
        assert_eq!(run.ready(), Some(200));
        run.child("detect").is_some_and(|pid| pid != victim)
    });
    assert!(ProcRoot::live().stat(victim).is_none_or(|stat| stat.ended()));
}

/// An engine that knows the file writes its log there, and what it prints is in there already.
#[test]
fn the_engine_is_not_told_of_the_log_that_holds_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("engine.log");
    let engine = |_: &Path, _| ["sh", "-c", "env; echo that is all; exec sleep 600"].map(Into::into).into();
    let _run = Run::begin(Command::new(AGENT).env("TRUEBEAT_LOG_FILE", &log), &[], engine);
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    until("the engine's environment", || said().contains("that is all"));
    assert!(!said().contains("TRUEBEAT_LOG_FILE"), "{}", said());
    // a page that lay on a disk would hold the engine at each write-back
    assert!(said().contains("TRUEBEAT_PAGE_DIR=/dev/shm/"), "{}", said());
}

#[test]
fn a_killed_tree_takes_its_orphans_along() {
    let dir = tempfile::tempdir().unwrap();
    let pids = dir.path().join("pids");
    // a session leader, a child, and a grandchild whose parent is gone
    let script = format!("sleep 600 & (sleep 601 & echo $! > {0}.part) ; mv {0}.part {0}; wait", pids.display());
    let mut root = Command::new(env!("CARGO_BIN_EXE_truebeat-agent"))
        .args(["agent", "exec", "--supervisor", &std::process::id().to_string(), "--", "sh", "-c", &script])
        .spawn()
        .unwrap();
    until("the orphan", || Path::new(&pids).exists());
    let orphan: i32 = std::fs::read_to_string(&pids).unwrap().trim().parse().unwrap();
    let engine = EngineProcess::of(i32::try_from(root.id()).unwrap()).unwrap();
    until("three processes", || process_tree(&engine).len() == 3);
    let killed = kill_tree(&engine);
    assert!(killed.len() == 3 && killed.contains(&orphan), "{killed:?}, orphan {orphan}");
    root.wait().unwrap();
    until("nobody left", || process_tree(&engine).is_empty());
}
