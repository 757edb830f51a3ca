//! An agent whose kernel makes neither threads nor processes for it any more (D8). The limit of a user's processes does not hold for root, nor
//! for whoever may raise limits: there the agent runs as somebody else.

use std::process::{Command, Stdio};
use std::time::Duration;

use agent::kill::send;
use nix::sys::signal::Signal;

use super::{ENGINE, until};
use crate::asking::{ask, get};
use crate::run::{AGENT, Run};

/// Longer than threads of the agent's runtimes live that have nothing to do, unless somebody sees to it that one does.
const RUNTIME_AT_REST: Duration = Duration::from_secs(35);

/// As one for whom the limit holds, who reads and writes what root does.
fn as_somebody(program: &str) -> Command {
    if !nix::unistd::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command.args(["--inh-caps=+dac_override", "--ambient-caps=+dac_override", program]);
    command
}

/// From now on the process may have so many beside it; `None`: as many as it ever might.
fn limit(pid: i32, most: Option<u32>) {
    let hard = || {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = limits.lines().find_map(|line| line.strip_prefix("Max processes")).unwrap().to_owned();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    let most = most.map_or_else(hard, |most| most.to_string());
    let told = as_somebody("prlimit").args(["--pid", &pid.to_string(), &format!("--nproc={most}:")]).status().unwrap();
    assert!(told.success(), "the limit of {pid} cannot be set");
}

/// How often the supervisor has started its detector again, or tried to.
fn tries(run: &Run) -> u64 {
    let text = get(&run.agent, "/metrics").unwrap_or_default();
    let name = "truebeat_supervisor_child_restarts_total{child=\"detector\"} ";
    text.lines().find_map(|line| line.strip_prefix(name)).map_or(0, |count| count.trim().parse().unwrap())
}

#[test]
fn d08_where_neither_thread_nor_process_is_to_be_had_the_agent_serves_and_lives() {
    let mut agent = as_somebody(AGENT);
    let mut run = Run::begin(agent.stderr(Stdio::null()), &[], |dir, engine| {
        let program = dir.join("engine.py");
        std::fs::write(&program, ENGINE).unwrap();
        vec!["python3".into(), program.into(), engine.port().to_string().into()]
    });
    until("ready", || run.ready() == Some(200));
    let supervisor = i32::try_from(run.supervisor.id()).unwrap();
    let (detector, gate) = (run.child("detect").unwrap(), run.child("gate").unwrap());
    [supervisor, detector, gate].into_iter().for_each(|pid| limit(pid, Some(1)));
    std::thread::sleep(RUNTIME_AT_REST);
    // one that the gate counts beside the runtime
    let prompt = format!(r#"{{"prompt":"{}","stream":true}}"#, "x ".repeat(300 << 10));
    let post = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{prompt}",
        prompt.len()
    );
    let serves = |run: &Run| ask(&run.gate, &post).is_some_and(|text| text.contains("[DONE]"));
    until("a long prompt is served", || serves(&run));
    assert_eq!((run.ready(), run.child("detect"), run.child("gate")), (Some(200), Some(detector), Some(gate)));
    let first = run.engine();
    send(&[first.pid], Signal::SIGKILL);
    until("its end is written down", || run.engine().last_exit.is_some());
    until("its end is told", || run.ready() == Some(503));
    let before = tries(&run);
    send(&[detector], Signal::SIGKILL);
    until("its detector is tried again and again", || tries(&run) > before + 2);
    assert_eq!((run.child("detect"), run.engine().starts), (None, first.starts), "nobody can be started");
    assert_eq!((run.supervisor.try_wait().unwrap(), super::status(&run.agent, "/livez")), (None, Some(200)));
    [supervisor, gate].into_iter().for_each(|pid| limit(pid, None));
    until("a second engine", || run.engine().starts > first.starts);
    until("ready again", || run.ready() == Some(200));
    until("it serves", || serves(&run));
}
