//! A live engine of ours, supervised by `truebeat run`, is recorded by `truebeat record` and judged by `truebeat replay`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

#[path = "../../agent/tests/common/free_addresses.rs"]
mod free_addresses;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use free_addresses::free_addresses;

const TRUEBEAT: &str = env!("CARGO_BIN_EXE_truebeat");

/// A process of ours, told to end when the test is over.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

fn truebeat(args: &[&str]) -> Output {
    Command::new(TRUEBEAT).args(args).env_remove("TRUEBEAT_PAGE_DIR").output().unwrap()
}

/// The whole answer to one request.
fn ask(addr: SocketAddr, request: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&addr, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn get(agent: SocketAddr, path: &str) -> std::io::Result<String> {
    ask(agent, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
}

fn ready(agent: SocketAddr) -> bool {
    get(agent, "/readyz").is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

fn complete(gate: SocketAddr) -> std::io::Result<String> {
    let body = r#"{"model":"demo","prompt":"once upon a time","max_tokens":64,"ignore_eos":true,"stream":true}"#;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n";
    ask(gate, &format!("{head}content-length: {}\r\n\r\n{body}", body.len()))
}

/// `truebeat run` around our engine with a tiny model, ready to serve.
fn start(dir: &Path, gate: SocketAddr, engine: SocketAddr, agent: SocketAddr) -> Running {
    let model = dir.join("model");
    assert!(truebeat(&["demo-model", model.to_str().unwrap()]).status.success());
    let mut command = Command::new(TRUEBEAT);
    command.args(["run", "--listen", &gate.to_string(), "--agent-listen", &agent.to_string()]);
    command.args(["--engine-url", &format!("http://{engine}"), "--no-nvml", "--agent-dir"]).arg(dir.join("agent"));
    command.arg("--bundle-dir").arg(dir.join("bundles")).args(["--", TRUEBEAT, "engine", "--model"]).arg(&model);
    command.args(["--served-model-name", "demo", "--listen", &engine.to_string()]);
    let running = Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let begun = Instant::now();
    while !ready(agent) {
        assert!(begun.elapsed() < Duration::from_secs(180), "the engine was not ready");
        std::thread::sleep(Duration::from_millis(50));
    }
    running
}

#[test]
fn a_live_engine_is_recorded_and_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let [gate, engine, agent] = free_addresses();
    let _running = start(dir.path(), gate, engine, agent);
    let out = dir.path().join("live.jsonl.gz");
    let mut record = Command::new(TRUEBEAT);
    record.args(["record", "--seconds", "12", "--no-nvml", "--engine-url", &format!("http://{engine}"), "--agent-dir"]);
    record.arg(dir.path().join("agent")).arg("--out").arg(&out);
    let recorder = record.stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(3)); // nobody asks anything: a stretch of idleness
    let (begun, mut served, mut refused) = (Instant::now(), 0, 0);
    while begun.elapsed() < Duration::from_secs(5) {
        // where the machine is so busy that the engine's lease runs out, it refuses for a moment; anything else is no answer
        match complete(gate) {
            Ok(answer) if answer.starts_with("HTTP/1.1 200") => served += 1,
            Ok(answer) if answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after") => {
                refused += 1;
                std::thread::sleep(Duration::from_millis(50));
            }
            other => panic!("{other:?}; the agent says {:?}; {:?}", get(agent, "/verdict"), get(agent, "/incidents")),
        }
    }
    assert!(served > 0, "the agent says {:?}; {:?}", get(agent, "/verdict"), get(agent, "/incidents"));
    let recorded = recorder.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&recorded.stderr);
    assert!(recorded.status.success(), "{said}");
    assert!(said.contains("samples in") && !said.contains("gate 0") && !said.contains("pages 0"), "{said}");

    let replayed = truebeat(&["replay", out.to_str().unwrap(), "--rules", "all", "--output", "json"]);
    assert!(replayed.status.success(), "{}", String::from_utf8_lossy(&replayed.stderr));
    let lines: Vec<serde_json::Value> =
        String::from_utf8(replayed.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() > 10 && lines.iter().all(|line| line["trace"] == "live"), "{lines:?}");
    let ours = lines.iter().find(|line| line["rule"] == "truebeat").unwrap();
    let changes = ours["timeline"].as_array().unwrap();
    let verdicts: Vec<_> = changes.iter().filter_map(|change| change["verdict"].as_str()).collect();
    assert!(verdicts.contains(&"Idle") && verdicts.contains(&"Progressing"), "{verdicts:?}");
    // what has refused for a moment may have been suspect for it
    let calm = |change: &serde_json::Value| change["class"].is_null() || refused > 0 && change["verdict"] == "Suspect";
    assert!(changes.iter().all(calm), "a healthy engine: {changes:?}");

    let again = truebeat(&["record", "--seconds", "1", "--no-nvml", "--out", out.to_str().unwrap()]);
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("never overwritten"));
}

#[test]
fn an_engine_that_is_not_there_is_an_error_that_says_what_to_give() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("nothing.jsonl.gz");
    let [nobody] = free_addresses();
    let url = format!("http://{nobody}");
    let recorded = truebeat(&[
        "record",
        "--seconds",
        "1",
        "--no-nvml",
        "--page-dir",
        dir.path().to_str().unwrap(),
        "--engine-url",
        &url,
        "--out",
        out.to_str().unwrap(),
    ]);
    let said = String::from_utf8_lossy(&recorded.stderr);
    assert!(!recorded.status.success() && said.contains(&url) && said.contains("--agent-dir"), "{said}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}
