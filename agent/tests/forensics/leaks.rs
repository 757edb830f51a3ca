//! What users wrote and what keys are worth never leaves with the evidence (H3, S12): random markers in prompts, headers, variables,
//! command lines, scripts and log lines, through the real gate to a real process that logs all of it, and then everything that comes out.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use agent::forensics::redact::{redact_environment, redact_log};
use agent::kill::send;
use agent::launch::EngineFile;
use nix::sys::signal::Signal;

use crate::run::{AGENT, Run};

const SOON: Duration = Duration::from_secs(60);
/// Hangs of which one must leave all of its evidence.
const TRIES: u32 = 3;
/// How notes tell of pieces that did not come in time.
const LATE: [&str; 3] = ["in time", "took longer than", "told none"];
/// A server that prints what it is asked and who asks, announces its stacks, answers until SIGUSR2 or a deadly word, and then hangs with
/// the prompt in its locals.
const ENGINE: &str = r#"
import faulthandler, http.server, os, signal, sys, threading, time
frozen, running = threading.Event(), [0]
signal.signal(signal.SIGUSR2, lambda *a: frozen.set())
pages, ticks = os.environ['TRUEBEAT_PAGE_DIR'], open('/proc/self/stat').read().rsplit(') ', 1)[1].split(' ')[19]
name = f'{pages}/stacks-{os.getpid()}'
faulthandler.register(signal.SIGURG, file=open(name + '.txt', 'a'), all_threads=True, chain=False)
open(name + '.part', 'w').write(f'{ticks} faulthandler\n'); os.rename(name + '.part', name + '.ready')
METRICS = 'vllm:num_requests_running{m="x"} %d.0\nvllm:num_requests_waiting{m="x"} 0.0\nvllm:generation_tokens_total{m="x"} 5.0\n'
class H(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def answer(self, text, kind='application/json'):
        self.send_response(200); self.send_header('content-type', kind)
        self.send_header('content-length', str(len(text))); self.end_headers(); self.wfile.write(text.encode())
    def do_GET(self):
        self.answer(METRICS % running[0], 'text/plain') if self.path == '/metrics' else self.answer('{"ok":true}')
    def do_POST(self):
        prompt = self.rfile.read(int(self.headers.get('content-length', 0))).decode()
        if 'deadly' in prompt: frozen.set()
        # in one piece: requests come at the same time, and print writes its words one by one
        sys.stdout.write(f'Received request: {prompt}\n'); print(prompt.replace('"', ' ')); print('headers', dict(self.headers))
        print('a user called', sys.argv[2], 'with', os.environ['NOTE'], 'and', os.environ['HF_TOKEN'], flush=True)
        self.send_response(200); self.send_header('content-type', 'text/event-stream')
        self.send_header('connection', 'close'); self.end_headers(); self.close_connection = True; running[0] += 1
        for n in range(20):
            while frozen.is_set(): time.sleep(1)
            self.wfile.write(b'data: {"choices":[{"text":"x"}]}\n\n'); self.wfile.flush(); time.sleep(0.02)
        running[0] -= 1; self.wfile.write(b'data: [DONE]\n\n')
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()
"#;

/// A marker for each place where a secret can be, all different, so that a leak has a name.
pub struct Markers(Vec<(&'static str, String)>);

impl Markers {
    pub fn new() -> Self {
        let places = ["prompt", "header", "variable", "note", "script", "flag", "argument", "bearer"];
        let uuid = || std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().replace('-', "q");
        Self(places.map(|place| (place, format!("w{}", uuid()))).to_vec())
    }

    fn of(&self, place: &str) -> &str {
        &self.0.iter().find(|(name, _)| *name == place).unwrap().1
    }

    fn assert_absent(&self, where_to: &str, text: &str) {
        for (place, marker) in &self.0 {
            // also not a piece of it
            for piece in [marker.as_str(), &marker[..12], &marker[marker.len() - 12..]] {
                let at = text.find(piece).map(|at| text.get(at.saturating_sub(80)..at + 60).unwrap_or("?"));
                assert_eq!(at, None, "the {place} leaks into {where_to}");
            }
        }
    }
}

/// As the defaults but for the patience of a person at a terminal.
pub const QUICK: &str = "foreign_floor_ms=1000,foreign_warm_ms=1000,patience_cap_ms=1000,confirm_strong_ms=500,confirm_moderate_ms=500,\
                     confirm_weak_ms=500,confirm_timer_ms=500";

/// `truebeat run` around it. `limits` is a line of shell that goes before.
pub fn launch(markers: &Markers, policy: &str, limits: &str, output: fn() -> Stdio) -> Run {
    let mut agent = Command::new("sh");
    agent
        .args(["-c", &format!("{limits}; exec \"$@\""), "sh", AGENT])
        .envs([
            ("HF_TOKEN", markers.of("variable")),
            ("NOTE", markers.of("note")),
            ("VLLM_HOST_IP", markers.of("note")),
        ])
        .stdout(output())
        .stderr(output());
    Run::begin(&mut agent, &["--policy", policy], |dir, engine| {
        let program = dir.join("engine.py");
        std::fs::write(&program, ENGINE).unwrap();
        let script = format!(
            "OWN={} python3 {} {} {} --api-key {} --ssl-password={}; true",
            markers.of("script"),
            program.display(),
            engine.port(),
            markers.of("argument"),
            markers.of("flag"),
            markers.of("flag")
        );
        ["sh", "-c", &script].map(Into::into).to_vec()
    })
}

pub fn ask(address: &str, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    Some(text)
}

pub fn get(address: &str, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).unwrap_or_default()
}

/// What never became ready says why it did not.
pub fn until_ready(run: &Run) {
    let since = Instant::now();
    loop {
        let answer = get(&run.agent, "/readyz");
        if answer.starts_with("HTTP/1.1 200") {
            return;
        }
        let log = || std::fs::read_to_string(run.dir.path().join("agent/engine.log")).unwrap_or_default();
        assert!(since.elapsed() < SOON, "never ready: {answer}\n{}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn until(what: &str, mut wanted: impl FnMut() -> bool) {
    let since = Instant::now();
    while !wanted() {
        assert!(since.elapsed() < SOON, "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn post(markers: &Markers) -> String {
    let body = format!(r#"{{"prompt":"tell me of {0} and {0}","stream":true}}"#, markers.of("prompt"));
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\nx-own: {}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        markers.of("bearer"),
        markers.of("header"),
        body.len()
    )
}

fn bundles(dir: &Path) -> Vec<PathBuf> {
    let found = std::fs::read_dir(dir.join("bundles")).into_iter().flatten().flatten().map(|entry| entry.path());
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    found.filter(|path| name(path).ends_with(".tar.zst") && !name(path).starts_with('.')).collect()
}

#[test]
fn h3_no_marker_leaves_with_the_evidence_of_a_real_hang() {
    let whole = (0..TRIES).any(|_| evidence_leaves_alone());
    assert!(whole, "of {TRIES} hangs some piece was late each time");
}

/// A hang whose evidence has no marker. False where a piece of it was late: on a busy machine it may be that, and what is left is not all.
fn evidence_leaves_alone() -> bool {
    let markers = Markers::new();
    let run = launch(&markers, QUICK, "true", Stdio::null);
    until_ready(&run);
    let request = post(&markers);
    for _ in 0..3 {
        until("it serves", || ask(&run.gate, &request).is_some_and(|answer| answer.contains("[DONE]")));
    }
    let engine = EngineFile::read(&run.dir.path().join("agent")).unwrap().process();
    let log = || std::fs::read_to_string(run.dir.path().join("agent/engine.log")).unwrap_or_default();
    for place in ["prompt", "header", "bearer", "variable", "note", "argument"] {
        until(&format!("the engine logs the {place}, else this proves nothing"), || log().contains(markers.of(place)));
    }
    // the server itself, not the shell that started it
    let server = *agent::sources::process_tree(&engine).last().unwrap();
    send(&[server], Signal::SIGUSR2);
    let mut hanging = Vec::new();
    until("a bundle", || {
        if hanging.len() < 8 {
            let mut stream = TcpStream::connect(&run.gate).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            hanging.push(stream);
        }
        !bundles(run.dir.path()).is_empty()
    });
    let path = bundles(run.dir.path()).remove(0);
    let raw = zstd::decode_all(std::fs::File::open(&path).unwrap()).unwrap();
    markers.assert_absent("the bundle", &String::from_utf8_lossy(&raw));
    for path in ["/incidents", "/verdict", "/metrics", "/readyz"] {
        markers.assert_absent(path, &get(&run.agent, path));
    }
    let contents = agent::forensics::bundle::read(&path).unwrap();
    let text =
        |name: &str| contents.entries.iter().find(|entry| entry.name.contains(name)).map(|entry| entry.text.as_str());
    let late = |note: &String| LATE.iter().any(|words| note.contains(words));
    let parts = [("commands.txt", "python3"), ("environment.txt", "HF_TOKEN=[redacted"), ("stacks/own-", "do_POST")];
    let whole = parts.iter().all(|(name, words)| text(name).is_some_and(|text| text.contains(words)));
    if !whole && contents.manifest.notes.iter().any(late) {
        return false;
    }
    // what is left is still evidence
    assert!(text("log-tail.txt").unwrap().contains("Received request"), "{:?}", text("log-tail.txt"));
    assert!(text("commands.txt").unwrap().contains("python3"), "{:?}", text("commands.txt"));
    assert!(text("environment.txt").unwrap().contains("HF_TOKEN=[redacted"), "{:?}", text("environment.txt"));
    assert!(text("stacks/own-").unwrap().contains("do_POST"), "{:?}", contents.manifest.notes);
    true
}

#[test]
fn h3_no_random_word_passes_in_any_shape_of_a_log_line() {
    let shapes = [
        "MARK",
        "INFO 11-21 06:30:28 [core.py:12] MARK",
        "prompt: 'MARK'",
        "{\"prompt\": \"MARK\"}",
        "error MARK failed",
        "a=MARK;b=1",
        "\u{1b}[31mMARK\u{1b}[0m",
        "MARK\u{e9}",
        "\u{4e2d}MARK",
        "File \"/x/MARK.py\", line 3, in MARK",
        "KeyError: 'MARK'",
        "x.MARK.y",
        "Authorization: Bearer MARK",
        "error_MARK",
        "errorMARK",
        "MARK_request",
        "http://h/MARK?q=MARK",
        "b'MARK'",
        "MARK\tMARK\tMARK",
    ];
    let mut state = 0x1234_5678_9abc_def1_u64;
    for round in 0..10_000_usize {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        // letters alone, or with digits; long enough to be nobody's word
        let alphabet: &[u8] = if round % 2 == 0 { b"bcdfghjkvwxz" } else { b"bcdfghjkvwxz0123456789BCDF" };
        let marker: String = (0..10 + next() % 8).map(|_| char::from(alphabet[next() % alphabet.len()])).collect();
        let marker = format!("q{marker}");
        let line = shapes[round % shapes.len()].replace("MARK", &marker);
        let kept = redact_log(&line);
        assert!(!kept.contains(&marker), "{line}\n{kept}");
        let variables = [format!("A_NAME={marker}"), format!("VLLM_OPTION={marker}"), format!("NCCL_DEBUG={marker}")];
        assert!(!redact_environment(&variables).join("\n").contains(&marker));
    }
}
