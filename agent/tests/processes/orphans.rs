//! What becomes of a supervisor's children whose supervisor is killed: they go with it, in whatever state they are. And of children that it
//! inherits.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use agent::kill::send;
use agent::sources::EngineProcess;
use agent::sources::procs::ProcRoot;
use nix::sys::signal::Signal;

use crate::asking::until;
use crate::not_run::without_right;
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

/// In a container, where it is pid 1, whatever a person's shell leaves there comes to it as well: `docker exec` and a debugger in the background.
#[test]
fn pid_1_ends_what_an_engine_leaves_and_no_persons_work() {
    let apart = ["--pid", "--fork", "--kill-child", "--mount-proc"];
    let may = Command::new("unshare").args(apart).arg("true").stderr(Stdio::null()).status().unwrap();
    if !may.success() {
        return without_right("no pid namespace may be made here");
    }
    let [engines, leaves, persons] = [1, 2, 3].map(|number| format!("86399.{}{number}", std::process::id()));
    let command = format!("setsid sleep {leaves} & exec sleep {engines}");
    let mut run = Run::begin(Command::new("unshare").args(apart).arg(AGENT), &[], |_, _| {
        ["sh", "-c", &command].map(Into::into).to_vec()
    });
    let found = |what: &str| {
        let word = what.as_bytes();
        let sleeps = |pid: &i32| {
            let line = std::fs::read(ProcRoot::live().path(*pid, "cmdline")).unwrap_or_default();
            line.starts_with(b"sleep\0") && line.split(|byte| *byte == 0).any(|argument| argument == word)
        };
        ProcRoot::live().pids().find(sleeps).and_then(EngineProcess::of)
    };
    let one = |what: &str| {
        let mut one = None;
        until(what, || {
            one = found(what);
            one.is_some()
        });
        one.unwrap()
    };
    let (engine, left) = (one(&engines), one(&leaves));
    let first = ProcRoot::live().stat(engine.pid).unwrap().ppid.to_string();
    let person = format!("setsid sleep {persons} > /dev/null 2>&1 &");
    let entered = Command::new("nsenter").args(["--target", &first, "--pid", "--mount", "sh", "-c", &person]).status();
    assert!(entered.unwrap().success());
    let persons = one(&persons);
    until("pid 1 has inherited it", || ProcRoot::live().stat(persons.pid).unwrap().ppid.to_string() == first);

    send(&[engine.pid], Signal::SIGKILL);
    until("another engine", || found(&engines).is_some_and(|now| now != engine));
    assert!(left.is_gone() && persons.lives(), "the engine's: {left:?}, a person's: {persons:?}");
    run.supervisor.kill().unwrap();
    run.supervisor.wait().unwrap();
    until("all of it has gone with pid 1", || persons.is_gone());
}
