//! An engine whose core dies beside a front end that lives, from its death to the next engine (H6).

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use agent::kill::send;
use agent::sources::procs::ProcRoot;
use nix::sys::signal::Signal;

use crate::asking::until;
use crate::run::{AGENT, Run};
use crate::{ENGINE, children_of, newest_incident};

/// A core that has a title and does nothing, and the little server as its front end. The pause is a start-up, in which the agent looks
/// closely enough to meet the core.
fn with_core(dir: &Path, port: u16) -> Vec<OsString> {
    let (core, server) = (dir.join("VLLM::EngineCore_DP0"), dir.join("engine.py"));
    std::fs::copy("/bin/sleep", &core).unwrap();
    std::fs::write(&server, ENGINE).unwrap();
    let script = format!("'{}' 1000 & sleep 2; exec python3 '{}' {port}", core.display(), server.display());
    vec!["sh".into(), "-c".into(), script.into()]
}

fn core_of(engine: i32) -> Option<i32> {
    let named = |pid: &i32| ProcRoot::live().stat(*pid).is_some_and(|stat| stat.comm == "VLLM::EngineCor");
    children_of(engine).into_iter().find(named)
}

#[test]
fn a_front_end_that_has_lost_its_core_is_fenced_and_replaced_although_nobody_waits() {
    let run = Run::begin(&mut Command::new(AGENT), &[], |dir, engine| with_core(dir, engine.port()));
    until("ready", || run.ready() == Some(200));
    let first = run.engine();
    send(&[core_of(first.pid).unwrap()], Signal::SIGKILL);
    until("it is fenced", || run.ready() == Some(503));
    until("the incident is over", || newest_incident(&run.agent).is_some_and(|incident| incident.closed()));
    let incident = newest_incident(&run.agent).unwrap();
    assert_eq!((incident.stage.as_str(), incident.class.as_str()), ("Recovered", "ProcessDied"), "{incident:?}");
    for words in ["VLLM::EngineCor", "it lies"] {
        assert!(incident.reasons.iter().any(|reason| reason.contains(words)), "{words}: {:?}", incident.reasons);
    }
    until("the next engine has a core", || core_of(run.engine().pid).is_some());
    assert_eq!((run.engine().starts, run.ready()), (first.starts + 1, Some(200)));
}
