//! A supervisor that cannot tell anybody of its engine.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use agent::kill::send;
use agent::sources::procs::ProcRoot;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;

use crate::asking::until;
use crate::run::{AGENT, Run};

/// Two engines, `sleep` for so many seconds, are given up for this reason; then the supervisor ends in order and leaves none. In a process
/// of its own: a launcher ends all children that it does not know, and a test has others beside it.
fn gives_up(seconds: &str, why: &str, prepare: impl FnOnce(&Path)) {
    let words = tempfile::NamedTempFile::new().unwrap();
    let stderr = std::fs::File::create(words.path()).unwrap();
    let mut run = Run::begin(Command::new(AGENT).stderr(stderr), &[], |dir, _| {
        std::fs::create_dir(dir.join("agent")).unwrap();
        prepare(&dir.join("agent"));
        ["sleep", seconds].map(Into::into).to_vec()
    });
    let said = || std::fs::read_to_string(words.path()).unwrap_or_default();
    until("two engines are given up", || said().matches(why).count() >= 2);
    send(&[run.supervisor.id().cast_signed()], Signal::SIGTERM);
    let mut status = None;
    until("the end", || {
        status = run.supervisor.try_wait().unwrap();
        status.is_some()
    });
    assert_eq!(status.unwrap().code(), Some(0));
    let left = sleeping(seconds);
    assert!(left.is_empty(), "{left:?}");
}

/// Who sleeps for so many seconds, or is about to; no supervisor of theirs, which has read that after its options.
fn sleeping(seconds: &str) -> Vec<i32> {
    let word = format!("{seconds}\0");
    let sleeps = |pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.ends_with(word.as_bytes()) && !line.windows(10).any(|part| part == b"--no-nvml\0"))
    };
    ProcRoot::live().all().iter().map(|stat| stat.pid).filter(|pid| sleeps(*pid)).collect()
}

#[test]
fn an_engine_that_nobody_can_be_told_of_is_not_left_running() {
    // a directory in the way of engine.json: it cannot be renamed into place
    let prepare = |dir: &Path| std::fs::create_dir_all(dir.join("engine.json/x")).unwrap();
    gives_up("600.25", "could not start the engine", prepare);
}

#[test]
fn d10_a_disk_that_hangs_holds_neither_the_supervisor_nor_its_end() {
    // whoever opens it to write waits until somebody reads, as on a disk that hangs
    let prepare = |dir: &Path| nix::unistd::mkfifo(&dir.join("engine.tmp"), Mode::S_IRWXU).unwrap();
    gives_up("600.75", "the disk does not answer", prepare);
}

/// It has just started, its file is not written yet, and it does not heed that its supervisor is gone.
#[test]
fn a_second_signal_ends_an_engine_that_nobody_has_been_told_of() {
    let seconds = "600.5";
    let run = Run::begin(&mut Command::new(AGENT), &[], |dir, _| {
        std::fs::create_dir(dir.join("agent")).unwrap();
        nix::unistd::mkfifo(&dir.join("agent/engine.tmp"), Mode::S_IRWXU).unwrap();
        ["env", "--ignore-signal=TERM", "sleep", seconds].map(Into::into).to_vec()
    });
    let supervisor = run.supervisor.id().cast_signed();
    until("an engine has started", || !sleeping(seconds).is_empty());
    send(&[supervisor], Signal::SIGTERM);
    // the disk is given up a second after the start, and two signals within half a second are one
    std::thread::sleep(Duration::from_millis(550));
    send(&[supervisor], Signal::SIGINT);
    until("nothing is left", || sleeping(seconds).is_empty());
}
