//! One page, many writers (H9): the C header and the Python package make the golden bytes, and what they publish live, from
//! another process, is what the reader of this crate reads.
//!
//! Needs `cc` and `python3`, which `tests/tools/prerequisites.sh` asks for: without one of them a test fails and says so.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test's helper may stop the test")]
#![allow(clippy::disallowed_methods, reason = "a test may wait: its runner has a deadline")]

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use heartbeat::layout::{FILE_LEN, file_name};
use heartbeat::page::{Beat, Page, Phase, StepOutcome};
use heartbeat::{Reader, Stale, Unknown};

/// Longer than any machine needs to start a process and make its steps.
const PATIENCE: Duration = Duration::from_secs(60);
const NONCE: u64 = 0x7eac_1234;
const STEPS: u64 = 600;
/// Runs, of which one must show a step.
const TRIES: u32 = 5;

#[test]
fn c_makes_the_golden_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for standard in ["c99", "c11"] {
        let program = compiled(dir.path(), "golden.c", standard);
        succeeds(Command::new(program).arg(dir.path()));
        assert_golden(&dir.path().join(file_name(1)));
    }
}

#[test]
fn the_header_is_cpp_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("engine.cpp");
    let text = "#include \"truebeat_heartbeat.h\"\nint main() {\n  tb_identity who;\n  tb_writer page;\n  tb_beat beat{};\n  \
        const int err = tb_identity_of_this_process(&who, 0, 1);\n  if (err != 0) return err;\n  tb_open(&page, nullptr, &who);\n  \
        tb_publish(&page, &beat);\n}\n";
    fs::write(&source, text).unwrap();
    for standard in ["c++11", "c++20"] {
        let mut cxx = Command::new("c++");
        cxx.args([&format!("-std={standard}"), "-Wall", "-Wextra", "-Werror", "-pedantic", "-I"]).arg(here("c"));
        succeeds(cxx.arg("-o").arg(dir.path().join("engine")).arg(&source));
    }
    succeeds(Command::new(dir.path().join("engine")).env("TRUEBEAT_PAGE_DIR", dir.path()));
}

#[test]
fn python_makes_the_golden_bytes() {
    let dir = tempfile::tempdir().unwrap();
    succeeds(python().arg(here("python/tests/golden.py")).arg(dir.path()));
    assert_golden(&dir.path().join(file_name(1)));
}

#[test]
fn what_c_publishes_live_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let program = compiled(dir.path(), "example.c", "c99");
    watch_live(Command::new(program).args([&STEPS.to_string(), "1"]), dir.path());
}

#[test]
fn what_python_publishes_live_is_read() {
    let dir = tempfile::tempdir().unwrap();
    watch_live(python().arg(here("python/tests/live.py")).args([&STEPS.to_string(), "1"]), dir.path());
}

/// Watches until something was seen: the steps may be over before a busy machine lets this process read.
fn watch_live(command: &mut Command, dir: &Path) {
    let seen = (0..TRIES).any(|run| {
        let pages = dir.join(format!("pages-{run}"));
        fs::create_dir(&pages).unwrap();
        sees_live(command, &pages)
    });
    assert!(seen, "of {TRIES} runs no step was seen, or none while it lasted");
}

/// Reads while another process publishes: every beat is whole and none goes back; the last one is the one that was meant; and once
/// the process is gone the page is stale, but its flight recorder can be read. Was one of its steps seen, and one while it lasted?
fn sees_live(command: &mut Command, dir: &Path) -> bool {
    let mut writer = Engine::start(command, dir);
    let mut reader = Reader::open(dir, 0).with_nonce(NONCE);
    let begun = Instant::now();
    let (mut last, mut seen, mut in_step) = (0, 0, 0);
    let page = loop {
        assert!(begun.elapsed() < PATIENCE, "no idle page after {seen} beats: {}", writer.complaint());
        match reader.read() {
            Ok(page) if page.beat.phase == Phase::Idle => break page,
            Ok(page) => {
                assert_eq!(page.beat.phase, Phase::Decode);
                // four tokens a step, published as one unit
                assert_eq!(page.beat.tokens_delivered, 4 * page.beat.steps_completed);
                assert!(page.beat.steps_completed >= last, "steps went back from {last}");
                seen += u64::from(page.beat.steps_completed > last);
                in_step += u64::from(page.beat.step_started_ns != 0);
                last = page.beat.steps_completed;
            }
            // Torn: a writer that lost its core in the middle of a beat is rightly no witness (H7)
            Err(Unknown::Missing { .. } | Unknown::NoBeat | Unknown::Torn { .. }) => {
                thread::sleep(Duration::from_millis(1))
            }
            Err(unknown) => panic!("{unknown}"),
        }
    };
    assert_last(&page, writer.child.id());
    writer.end();
    let pid = page.identity.pid;
    assert_eq!(reader.read(), Err(Unknown::Stale(Stale::NoProcess { pid })));
    let records = reader.steps().unwrap();
    assert_eq!(records.len(), 256);
    assert_eq!(records.last().map(|line| (line.step, line.outcome)), Some((STEPS, StepOutcome::Ok)));
    assert!(records.windows(2).all(|pair| pair[1].step == pair[0].step + 1 && pair[1].started_ns >= pair[0].ended_ns));
    seen > 0 && in_step > 0
}

fn assert_last(page: &Page, pid: u32) {
    assert_eq!((page.identity.pid, page.identity.rank, page.identity.world_size), (pid, 0, 1));
    let beat = Beat { phase_entered_ns: 0, published_ns: 0, ..page.beat };
    let meant = Beat {
        steps_completed: STEPS,
        tokens_delivered: 4 * STEPS,
        requests_finished: 4,
        running: 0,
        waiting: 0,
        prompt_tokens_owed: 0,
        phase: Phase::Idle,
        phase_tokens: 0,
        phase_entered_ns: 0,
        lease_ms: 1_000,
        step_started_ns: 0,
        work_done: 0,
        work_total: 0,
        published_ns: 0,
    };
    assert_eq!(beat, meant);
}

/// Another process with a page of its own; it ends when its standard input does.
struct Engine {
    child: Child,
}

impl Engine {
    fn start(command: &mut Command, dir: &Path) -> Self {
        command.env("TRUEBEAT_PAGE_DIR", dir).env("TRUEBEAT_NONCE", NONCE.to_string());
        let child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Self { child: child.unwrap_or_else(|error| panic!("{command:?}: {error}")) }
    }

    fn end(&mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success(), "{}", self.complaint());
    }

    fn complaint(&mut self) -> String {
        let _ = self.child.kill();
        let mut text = String::new();
        let _ = self.child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut text));
        text
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compiles one program of `heartbeat/c` without a warning.
fn compiled(dir: &Path, source: &str, standard: &str) -> PathBuf {
    let program = dir.join(Path::new(source).with_extension(standard));
    let mut cc = Command::new("cc");
    cc.args([&format!("-std={standard}"), "-Wall", "-Wextra", "-Werror", "-pedantic", "-O2", "-o"]);
    succeeds(cc.arg(&program).arg(here("c").join(source)));
    program
}

fn python() -> Command {
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", here("python")).env("PYTHONDONTWRITEBYTECODE", "1");
    python
}

fn here(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn succeeds(command: &mut Command) {
    let output = command.output();
    let output = output.unwrap_or_else(|error| panic!("{command:?} does not start ({error}); is it installed?"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn assert_golden(path: &Path) {
    let made = fs::read(path).unwrap();
    let mut golden = vec![0; FILE_LEN];
    for line in
        fs::read_to_string(here("tests/golden/page-v1.hex")).unwrap().lines().filter(|line| !line.starts_with('#'))
    {
        let (offset, hex) = line.split_once(' ').unwrap();
        let offset = usize::from_str_radix(offset, 16).unwrap();
        for i in 0..16 {
            golden[offset + i] = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap();
        }
    }
    assert_eq!(made.len(), FILE_LEN);
    let differing: Vec<usize> = (0..FILE_LEN).filter(|at| made[*at] != golden[*at]).collect();
    assert!(differing.is_empty(), "bytes differ at {differing:?}");
}
