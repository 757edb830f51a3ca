//! What becomes of a supervisor's children whose supervisor is killed: they go with it, in whatever state they are.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use agent::kill::send;
use agent::sources::EngineProcess;
use nix::sys::signal::Signal;

use crate::asking::until;
use crate::run::{AGENT, Run};

/// What was started by a supervisor that is killed before it runs: its parent is another by then.
#[test]
fn whoever_comes_after_its_supervisor_leaves() {
    let another = i32::try_from(std::process::id()).unwrap() + 1;
    let dir = tempfile::tempdir().unwrap();
    let ends = |words: &[&str], stdin: Stdio| {
        let mut command = Command::new(AGENT);
        command.arg("agent").args(words).stdin(stdin);
        let mut child = command.spawn().unwrap();
        let mut status = None;
        until("its end", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    };
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = door.local_addr().unwrap();
    let of = ["--supervisor", &another.to_string(), "--agent-dir", dir.path().to_str().unwrap()];
    let gate = ends(&[&["gate"], &of[..]].concat(), OwnedFd::from(door).into());
    assert_eq!(gate.signal(), Some(Signal::SIGKILL as i32), "{gate}");
    assert!(TcpListener::bind(address).is_ok(), "the next may listen there");
    let mark = dir.path().join("engine");
    let engine = ends(&["exec", of[0], of[1], "--", "touch", mark.to_str().unwrap()], Stdio::null());
    assert!(engine.code() == Some(1) && !mark.exists(), "{engine}");
}

/// It would hold the port against the next run until somebody found it.
#[test]
fn a_gate_that_is_stopped_goes_with_its_supervisor() {
    let mut run = Run::begin(&mut Command::new(AGENT), &[], |_, _| ["sleep", "600"].map(Into::into).to_vec());
    let mut gate = None;
    until("the gate answers", || {
        gate = run.child("gate").filter(|_| crate::asking::get(&run.gate, "/").is_some());
        gate.is_some()
    });
    let gate = EngineProcess::of(gate.unwrap()).unwrap();
    send(&[gate.pid], Signal::SIGSTOP);
    run.supervisor.kill().unwrap();
    run.supervisor.wait().unwrap();
    until("it has gone", || gate.is_gone());
}
