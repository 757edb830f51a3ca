//! The end of a `truebeat run` that a test started: the supervisor first, so that it restarts nothing, then its children and the engine's tree.

use std::path::{Path, PathBuf};
use std::process::Child;

use agent::kill::{kill_tree, send};
use agent::launch::EngineFile;
use agent::sources::procs::ProcRoot;
use nix::sys::signal::Signal;

/// Ends all of it; `agent_dir` is what `--agent-dir` named.
pub fn end_run(supervisor: &mut Child, agent_dir: &Path) {
    let me = i32::try_from(supervisor.id()).unwrap();
    let engine = EngineFile::read(agent_dir);
    let pages = engine.as_ref().and_then(|file| page_dir(file.pid));
    let all = ProcRoot::live().all();
    let children: Vec<i32> = all.iter().filter(|stat| stat.ppid == me && !stat.ended()).map(|stat| stat.pid).collect();
    let _ = supervisor.kill();
    let _ = supervisor.wait();
    send(&children, Signal::SIGKILL);
    engine.map(|file| kill_tree(&file.process()));
    // a supervisor that is killed cannot
    pages.map(std::fs::remove_dir_all);
}

/// Where the engine was told to publish its page, if that is a folder of this run in memory.
fn page_dir(pid: i32) -> Option<PathBuf> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0).filter_map(|variable| std::str::from_utf8(variable).ok());
    let told = variables.find_map(|variable| variable.strip_prefix("TRUEBEAT_PAGE_DIR="))?;
    told.starts_with("/dev/shm/truebeat-run-").then(|| PathBuf::from(told))
}
