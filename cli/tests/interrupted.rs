//! `truebeat bench` that is told to end takes with it the `truebeat run` and the engine that it started.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const SOON: Duration = Duration::from_secs(90);

/// The processes whose command line names `folder`, which only what the bench of this test started does.
fn naming(folder: &Path) -> Vec<String> {
    let name = folder.to_str().unwrap();
    let entries = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " ")).filter(|line| line.contains(name)).collect()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < SOON, "{what}: not within {SOON:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn start_bench(out: &Path) -> Child {
    let mut bench = Command::new(env!("CARGO_BIN_EXE_truebeat"));
    bench.args(["bench", "--out"]).arg(out).args(["stalls", "--count", "1000"]);
    bench.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_bench_that_is_told_to_end_leaves_no_engine_behind() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().canonicalize().unwrap();
    let bench = start_bench(&out);
    let pid = Pid::from_raw(bench.id().cast_signed());
    let engine_runs = || naming(&out).iter().any(|line| line.contains(" engine ") && !line.contains(" run "));
    wait_until("the engine runs", engine_runs);

    kill(pid, Signal::SIGTERM).unwrap();

    let ended = bench.wait_with_output().unwrap();
    assert!(!ended.status.success(), "{:?}", ended.status);
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.contains("interrupted by SIGTERM"), "{said}");
    wait_until("everything has ended", || naming(&out).is_empty());
}
