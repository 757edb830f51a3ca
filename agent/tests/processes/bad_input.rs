//! What can never work is named before anything is started.

use std::net::TcpListener;
use std::process::Command;

use crate::asking::until;
use crate::run::{AGENT, Run};

/// What `truebeat run` says of these options, and whether the engine was started all the same.
struct Refusal {
    words: String,
    started: bool,
}

fn run(options: &[&str], command: &[&str]) -> Refusal {
    let dir = tempfile::tempdir().unwrap();
    // whoever is not refused runs on
    let run = Command::new("timeout")
        .args(["30", AGENT, "run"])
        .args(options)
        .args(command)
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(!run.status.success(), "{options:?}");
    let words = String::from_utf8_lossy(&run.stderr).into_owned();
    Refusal { words, started: dir.path().join("started").exists() }
}

#[test]
fn bad_input_is_named() {
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = busy.local_addr().unwrap().to_string();
    let taken = run(&["--listen", &address, "--agent-listen", "127.0.0.1:0"], &["--", "true"]).words;
    assert!(taken.contains(&address) && taken.contains("--listen"), "{taken}");
    let free = ["--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"];
    let missing = run(&free, &["--", "no-such-program"]).words;
    assert!(missing.contains("no-such-program"), "{missing}");
    assert!(run(&[], &[]).words.contains("CMD"));
    let policy = Command::new(AGENT).args(["agent", "detect", "--policy", "x=1"]).output().unwrap();
    assert!(String::from_utf8_lossy(&policy.stderr).contains("x=1"));
}

#[test]
fn what_can_never_work_is_refused_before_the_engine_is_started() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (listen, own) = (free.to_string(), format!("http://localhost:{}", free.port()));
    let long = format!("agent-{}", "x".repeat(107));
    let cases: [(&[&str], &[&str]); 5] = [
        (&["--engine-url", "https://127.0.0.1:8000"], &["https://127.0.0.1:8000", "--engine-url"]),
        (&["--engine-url", "/v1"], &["/v1", "--engine-url"]),
        (&["--engine-url", &own], &[&own, "--engine-url", "--listen"]),
        (&["--agent-dir", &long], &[&long, "107", "--agent-dir"]),
        (&["--policy", "no_such_number=1"], &["no_such_number=1", "native_floor_ms"]),
    ];
    for (options, named) in cases {
        let all = [&["--listen", &listen, "--agent-listen", "127.0.0.1:0"], options].concat();
        let refusal = run(&all, &["--", "touch", "started"]);
        assert!(named.iter().all(|word| refusal.words.contains(word)), "{options:?}: {}", refusal.words);
        assert!(!refusal.started, "{options:?}: the engine was started");
    }
}

#[test]
fn a_directory_where_another_truebeat_works_is_refused() {
    let first = Run::begin(&mut Command::new(AGENT), &[], |_, _| ["sleep", "600"].map(Into::into).to_vec());
    let agent_dir = first.dir.path().join("agent");
    until("it runs", || agent_dir.join("engine.json").exists());
    let engine = std::fs::read(agent_dir.join("engine.json")).unwrap();
    let dir = agent_dir.to_str().unwrap();
    let options = ["--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--agent-dir", dir];
    let refusal = run(&options, &["--", "touch", "started"]);
    assert!(refusal.words.contains(dir) && refusal.words.contains("another truebeat"), "{}", refusal.words);
    assert!(!refusal.started, "its engine would be taken for the first one's");
    assert_eq!(std::fs::read(agent_dir.join("engine.json")).unwrap(), engine);
}
