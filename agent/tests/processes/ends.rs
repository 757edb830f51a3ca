//! How `truebeat run` ends: by which signals, and with all that came of the engine.

use std::process::Command;
use std::time::Duration;

use agent::kill::send;
use agent::sources::{EngineProcess, process_tree};
use nix::sys::signal::Signal;

use crate::asking::{get, until};
use crate::run::{AGENT, Run};

/// Around an engine that leaves a process of another session to itself, whatever else it does in `script`.
fn with_orphan(options: &[&str], script: &str) -> (Run, EngineProcess) {
    let run = Run::begin(&mut Command::new(AGENT), options, |dir, _| {
        let file = dir.join("orphan");
        let leave = format!("(setsid sleep 600 & echo $! > {0}.part); mv {0}.part {0}", file.display());
        ["sh", "-c", &format!("{leave}; {script}")].map(Into::into).to_vec()
    });
    let mut pid = None;
    until("the orphan", || {
        let text = std::fs::read_to_string(run.dir.path().join("orphan")).unwrap_or_default();
        pid = text.trim().parse::<i32>().ok();
        pid.is_some()
    });
    let orphan = EngineProcess::of(pid.unwrap()).unwrap();
    (run, orphan)
}

fn supervisor(run: &Run) -> i32 {
    run.supervisor.id().cast_signed()
}

fn code(run: &mut Run) -> Option<i32> {
    let mut status = None;
    until("the end", || {
        status = run.supervisor.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap().code()
}

fn lives(process: &EngineProcess) -> bool {
    process_tree(process).contains(&process.pid)
}

#[test]
fn an_engine_that_is_ended_takes_along_what_it_left_to_itself() {
    let (mut run, orphan) = with_orphan(&[], "exec sleep 600");
    assert!(lives(&orphan));
    send(&[supervisor(&run)], Signal::SIGTERM);
    assert_eq!(code(&mut run), Some(0));
    assert!(!lives(&orphan), "it would hold the GPU");
}

#[test]
fn a_second_signal_takes_it_along_too() {
    let (mut run, orphan) = with_orphan(&["--grace", "10m"], "trap '' TERM; exec sleep 600");
    send(&[supervisor(&run)], Signal::SIGTERM);
    send(&[supervisor(&run)], Signal::SIGINT);
    assert_eq!(code(&mut run), Some(137));
    until("nothing is left", || !lives(&orphan));
}

/// Whatever whoever runs the tests ignores.
fn hung_up(env: &str) -> Run {
    let run = Run::begin(Command::new("env").args([env, AGENT]), &[], |_, _| ["sleep", "600"].map(Into::into).to_vec());
    until("it answers", || get(&run.agent, "/livez").is_some() && run.dir.path().join("agent/engine.json").exists());
    send(&[supervisor(&run)], Signal::SIGHUP);
    run
}

#[test]
fn a_terminal_that_is_closed_ends_the_engine_too() {
    let mut run = hung_up("--default-signal=HUP");
    let engine = agent::launch::EngineFile::read(&run.dir.path().join("agent")).unwrap().process();
    assert_eq!(code(&mut run), Some(0));
    assert!(process_tree(&engine).is_empty());
}

#[test]
fn whoever_was_started_with_nohup_stays() {
    let mut run = hung_up("--ignore-signal=HUP");
    std::thread::sleep(Duration::from_secs(1));
    assert!(run.supervisor.try_wait().unwrap().is_none());
    assert!(get(&run.agent, "/livez").is_some_and(|text| text.starts_with("HTTP/1.1 200")));
}
