//! How `truebeat run` ends: by which signals, and with all that came of the engine.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use agent::kill::send;
use agent::launch::EngineFile;
use agent::sources::procs::ProcRoot;
use agent::sources::{EngineProcess, process_tree};
use nix::sys::signal::Signal;

use crate::asking::{SOON, get, until};
use crate::children_of;
use crate::run::free_addresses::free_addresses;
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
    std::thread::sleep(Duration::from_secs(2));
    send(&[supervisor(&run)], Signal::SIGINT);
    assert_eq!(code(&mut run), Some(137));
    until("nothing is left", || !lives(&orphan));
}

/// Around an engine that ends by this script; `env` is what becomes of signals that whoever runs the tests may ignore.
fn with_signals(env: &str, script: &str) -> Run {
    let words = ["sh", "-c", script].map(Into::into).to_vec();
    let run = Run::begin(Command::new("env").args([env, AGENT]), &[], |_, _| words);
    until("it answers", || get(&run.agent, "/livez").is_some() && engine_file(&run).exists());
    run
}

/// Waits until the engine has said that it runs.
fn says_up(run: &Run) {
    let log = run.dir.path().join("agent/engine.log");
    until("the engine runs", || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("up")));
}

fn engine_file(run: &Run) -> PathBuf {
    run.dir.path().join("agent/engine.json")
}

fn hung_up(env: &str) -> Run {
    let run = with_signals(env, "exec sleep 600");
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

/// A terminal tells all of a script's processes, and the script's trap tells them again.
#[test]
fn what_is_said_twice_in_one_breath_is_said_once() {
    let mut run = with_signals("--default-signal=INT", "trap 'sleep 2; exit 0' TERM; echo up; sleep 600 & wait");
    says_up(&run);
    send(&[supervisor(&run)], Signal::SIGINT);
    send(&[supervisor(&run)], Signal::SIGTERM);
    assert_eq!(code(&mut run), Some(0), "it was killed in the middle of its end");
}

/// Whoever stops it now and then would have it refuse, in the end, the requests that were broken off twice (I7).
#[test]
fn an_engine_that_is_ended_has_not_died() {
    let mut run = with_signals("--default-signal=TERM", "echo up; exec sleep 600");
    until("the detector watches", || get(&run.agent, "/verdict").is_some_and(|text| text.contains("Starting")));
    send(&[supervisor(&run)], Signal::SIGTERM);
    assert_eq!(code(&mut run), Some(0));
    let book = std::fs::read_to_string(run.dir.path().join("agent/detector.json")).unwrap();
    assert!(!book.contains("Dead"), "{book}");
}

/// A service manager signals every process of a unit (systemd's `KillMode=control-group`): who serves and who watches stay until the engine
/// has ended.
#[test]
fn a_signal_to_all_processes_of_a_unit_ends_the_engine_first() {
    let server = "trap 'sleep 3; exit 0' TERM; echo up; while :; do sleep 0.1; done";
    let mut run = with_signals("--default-signal=TERM", server);
    says_up(&run);
    let children = || -> Vec<i32> {
        let ours = ProcRoot::live().all().into_iter().filter(|stat| stat.ppid == supervisor(&run));
        ours.filter(|stat| !stat.ended()).map(|stat| stat.pid).collect()
    };
    until("all three run", || children().len() == 3 && get(&run.gate, "/").is_some());
    // (before that it may not have heard of signals)
    until("the detector watches", || get(&run.agent, "/verdict").is_some_and(|text| text.contains("Starting")));
    let before = children();
    send(&before, Signal::SIGTERM);
    let engine = EngineFile::read(&run.dir.path().join("agent")).unwrap().pid;
    let ours: Vec<i32> = before.iter().copied().filter(|pid| *pid != engine).collect();
    assert_eq!(ours.len(), 2);
    send(&ours, Signal::SIGHUP);
    send(&[supervisor(&run)], Signal::SIGTERM);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(children(), before, "clients lost their gate before the engine could answer them");
    assert_eq!(code(&mut run), Some(0));
}

/// Both its shell and the kernel tell.
#[test]
fn a_terminal_that_is_closed_says_so_twice_and_the_engine_has_its_time() {
    let mut run = with_signals("--default-signal=HUP", "trap 'sleep 2; exit 0' TERM; echo up; sleep 600 & wait");
    says_up(&run);
    send(&[supervisor(&run)], Signal::SIGHUP);
    std::thread::sleep(Duration::from_millis(500));
    send(&[supervisor(&run)], Signal::SIGHUP);
    assert_eq!(code(&mut run), Some(0), "it was killed in the middle of its end");
}

#[test]
fn an_engine_behind_a_shell_has_the_same_time_to_end() {
    let script = "(trap 'sleep 4; echo orderly; exit 0' TERM; echo up; while :; do sleep 0.1; done) & wait";
    let words = ["sh", "-c", script].map(Into::into).to_vec();
    let kept = tempfile::NamedTempFile::new().unwrap();
    let stdout = std::fs::File::create(kept.path()).unwrap();
    let mut run = Run::begin(Command::new(AGENT).stdout(stdout), &[], |_, _| words);
    let said = |word| std::fs::read_to_string(kept.path()).is_ok_and(|text| text.contains(word));
    until("the engine runs", || said("up"));
    send(&[supervisor(&run)], Signal::SIGTERM);
    assert_eq!(code(&mut run), Some(0));
    assert!(said("orderly"), "it was killed in the middle of its end");
}

/// A server that says that it is well, and answers the first work at length.
const SENDS_AND_WAITS: &str = r"
import signal, socket, sys
server = socket.create_server(('127.0.0.1', int(sys.argv[1])))
while True:
    client, _ = server.accept()
    if b'POST' in client.recv(65536): break
    client.sendall(b'HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}')
    client.close()
head = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7000000\r\n\r\n'
client.sendall(head + b' ' * 7000000)
print('sent', flush=True)
signal.pause()
";

/// An engine that ends with its answer, which its client is still taking.
#[test]
fn an_answer_that_the_gate_holds_outlives_its_engine() {
    let mut run = Run::begin(&mut Command::new(AGENT), &[], |_, engine| {
        ["python3", "-c", SENDS_AND_WAITS, &engine.port().to_string()].map(Into::into).to_vec()
    });
    let log = run.dir.path().join("agent/engine.log");
    let body = "{\"prompt\":\"a\"}";
    let request = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    // (before the engine serves its gate answers otherwise)
    let mut client = None;
    until("the gate holds the answer", || {
        let Ok(mut stream) = std::net::TcpStream::connect(&run.gate) else { return false };
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut status = [0; 12];
        let told = stream.write_all(request.as_bytes()).and_then(|()| stream.read_exact(&mut status));
        client = (told.is_ok() && status.ends_with(b"200")).then_some(stream);
        client.is_some()
    });
    until("the engine has sent it", || std::fs::read_to_string(&log).is_ok_and(|text| text.contains("sent")));
    send(&[supervisor(&run)], Signal::SIGTERM);
    until("the engine has ended", || {
        EngineFile::read(&run.dir.path().join("agent")).is_none_or(|file| !lives(&file.process()))
    });
    std::thread::sleep(Duration::from_millis(1_500));
    let mut rest = Vec::new();
    let mut client = client.unwrap();
    client.read_to_end(&mut rest).unwrap();
    assert!(rest.len() >= 7_000_000, "{} bytes", rest.len());
    assert_eq!(code(&mut run), Some(0), "and nobody waits for more");
}

/// More than a pipe holds, to a reader that has not come yet.
#[test]
fn what_the_engine_says_last_is_passed_on_before_the_end() {
    let say = "head -c 300000 /dev/zero | tr '\\0' x; echo; echo last";
    let script = format!("trap \"{say}; exit 0\" TERM; echo up; while :; do sleep 0.1; done");
    let (mut reader, stdout) = std::io::pipe().unwrap();
    let words = ["sh", "-c", &script].map(Into::into).to_vec();
    let mut run = Run::begin(Command::new(AGENT).stdout(stdout), &[], |_, _| words);
    let log = run.dir.path().join("agent/engine.log");
    let logged = move |word| std::fs::read_to_string(&log).is_ok_and(|text| text.ends_with(word));
    until("the engine runs", || logged("up\n"));
    let (tell, told) = std::sync::mpsc::channel();
    // it is there beforehand, for the supervisor does not wait for long, and comes when the engine has said its last
    std::thread::spawn(move || {
        until("the engine ends", || logged("last\n"));
        let mut text = String::new();
        tell.send(reader.read_to_string(&mut text).map(|_| text))
    });
    send(&[supervisor(&run)], Signal::SIGTERM);
    assert_eq!(code(&mut run), Some(0));
    let heard = told.recv_timeout(SOON).unwrap().unwrap();
    assert!(heard.len() > 300_000 && heard.ends_with("\nlast\n"), "{} bytes", heard.len());
}

#[test]
fn an_engine_that_goes_into_the_background_is_told_to_stay() {
    let words = tempfile::NamedTempFile::new().unwrap();
    let stderr = std::fs::File::create(words.path()).unwrap();
    let command = ["sh", "-c", "setsid sleep 600 & exit 0"].map(Into::into).to_vec();
    let _run = Run::begin(Command::new(AGENT).stderr(stderr), &[], |_, _| command);
    let said = |word| std::fs::read_to_string(words.path()).is_ok_and(|text| text.contains(word));
    until("it is told", || said("keep it in the foreground"));
}

#[test]
fn a_person_who_quits_leaves_no_engine_behind() {
    let mut run = with_signals("--default-signal=QUIT", "trap '' TERM; echo up; sleep 600 & wait; sleep 600");
    says_up(&run);
    let engine = agent::launch::EngineFile::read(&run.dir.path().join("agent")).unwrap().process();
    send(&[supervisor(&run)], Signal::SIGQUIT);
    std::thread::sleep(Duration::from_secs(2));
    send(&[supervisor(&run)], Signal::SIGQUIT);
    assert_eq!(code(&mut run), Some(137));
    until("nothing is left", || process_tree(&engine).is_empty());
}

/// Its session goes on without it: an engine that nobody listens to would hang, and be killed for it.
#[test]
fn a_terminal_that_would_stop_it_is_answered_in_words() {
    let words = tempfile::NamedTempFile::new().unwrap();
    let stderr = std::fs::File::create(words.path()).unwrap();
    let command = ["sh", "-c", "exec sleep 600"].map(Into::into).to_vec();
    let mut start = Command::new("env");
    start.args(["--default-signal=TSTP", AGENT]).stderr(stderr);
    let run = Run::begin(&mut start, &[], |_, _| command);
    until("it answers", || get(&run.agent, "/livez").is_some());
    send(&[supervisor(&run)], Signal::SIGTSTP);
    until("it says so", || std::fs::read_to_string(words.path()).is_ok_and(|text| text.contains("Ctrl-Z")));
    assert!(get(&run.agent, "/livez").is_some_and(|text| text.starts_with("HTTP/1.1 200")));
}

#[test]
fn whoever_was_started_with_nohup_stays() {
    let mut run = hung_up("--ignore-signal=HUP");
    std::thread::sleep(Duration::from_secs(1));
    assert!(run.supervisor.try_wait().unwrap().is_none());
    assert!(get(&run.agent, "/livez").is_some_and(|text| text.starts_with("HTTP/1.1 200")));
}

/// Another supervisor begins in the directory of one that was killed.
fn take_over(run: &mut Run, agent_dir: &Path) {
    let [gate, agent] = free_addresses();
    let mut next = Command::new(AGENT);
    next.args(["run", "--no-nvml", "--listen", &gate.to_string(), "--agent-listen", &agent.to_string(), "--agent-dir"]);
    run.supervisor = next.arg(agent_dir).args(["--", "sleep", "600"]).spawn().unwrap();
}

/// Its parent's death tells the root alone, here a shell, which ends; what it had started goes on: in a session of its own, or with its
/// environment gone, as a worker that has written its title over it.
#[test]
fn what_a_killed_supervisors_engine_left_is_ended_before_the_next() {
    for (nth, how) in ["setsid", "env -i"].into_iter().enumerate() {
        left_is_ended(nth, how);
    }
}

fn left_is_ended(nth: usize, how: &str) {
    // (no other's)
    let seconds = format!("60{nth}.{}", std::process::id());
    let words = ["sh", "-c", &format!("{how} sleep {seconds} & wait")].map(Into::into).to_vec();
    let mut run = Run::begin(&mut Command::new(AGENT), &[], |_, _| words);
    let agent_dir = run.dir.path().join("agent");
    let left = || -> Vec<EngineProcess> {
        let has = |pid| {
            std::fs::read(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|line| line == format!("sleep\0{seconds}\0").as_bytes())
        };
        ProcRoot::live()
            .all()
            .iter()
            .filter(|stat| has(stat.pid))
            .filter_map(|stat| EngineProcess::of(stat.pid))
            .collect()
    };
    until("the engine runs", || left().len() == 1 && EngineFile::read(&agent_dir).is_some());
    let root = EngineFile::read(&agent_dir).unwrap().process();
    run.supervisor.kill().unwrap();
    run.supervisor.wait().unwrap();
    until("the shell has ended", || !lives(&root));
    assert_eq!(left().len(), 1);
    take_over(&mut run, &agent_dir);
    until("the next runs", || EngineFile::read(&agent_dir).is_some_and(|file| file.process() != root));
    assert!(left().is_empty(), "it would hold port and GPU beside the next");
}

/// Killed, a supervisor cannot end its engine; whoever takes over its directory does.
#[test]
fn an_engine_that_a_killed_supervisor_left_is_ended_before_the_next() {
    // (its parent's death asks it to end, and it does not)
    let words = ["sh", "-c", "trap '' TERM; exec sleep 600"].map(Into::into).to_vec();
    let mut run = Run::begin(&mut Command::new(AGENT), &[], |_, _| words);
    let agent_dir = run.dir.path().join("agent");
    let engine = || EngineFile::read(&agent_dir).map(|file| file.process());
    until("the engine runs", || engine().is_some());
    let left = engine().unwrap();
    // (before that it does not ignore it yet)
    until("it sleeps", || {
        std::fs::read_to_string(format!("/proc/{}/comm", left.pid)).is_ok_and(|name| name == "sleep\n")
    });
    let ours = || -> Vec<i32> {
        let pids = children_of(supervisor(&run)).into_iter();
        pids.filter(|pid| *pid != left.pid).collect()
    };
    until("gate and detector run", || ours().len() == 2);
    let ours: Vec<EngineProcess> = ours().into_iter().filter_map(EngineProcess::of).collect();
    run.supervisor.kill().unwrap();
    run.supervisor.wait().unwrap();
    assert!(lives(&left));
    until("gate and detector have left", || ours.iter().all(EngineProcess::is_gone));
    let pages = || std::fs::read_to_string(agent_dir.join("page-dir")).map(std::path::PathBuf::from).unwrap();
    let before = pages();
    assert!(before.starts_with("/dev/shm") && before.is_dir(), "{}", before.display());
    take_over(&mut run, &agent_dir);
    until("the next runs", || engine().is_some_and(|next| next != left));
    assert!(!lives(&left));
    assert!(!before.exists() && pages().is_dir(), "its pages are gone, and the next has its own");
}
