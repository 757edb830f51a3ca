//! The end of a `truebeat run` that a test started: the supervisor first, so that it restarts nothing, then its children and the engine's tree.

use std::path::{Path, PathBuf};
use std::process::Child;

use agent::kill::{kill_tree, send};
use agent::launch::{EngineFile, run_dirs};
use agent::sources::procs::ProcRoot;
use nix::sys::signal::Signal;

/// Ends all of it; `agent_dir` is what `--agent-dir` named.
pub fn end_run(supervisor: &mut Child, agent_dir: &Path) {
    let me = i32::try_from(supervisor.id()).unwrap();
    let engine = EngineFile::read(agent_dir);
    let all = ProcRoot::live().all();
    let children: Vec<i32> = all.iter().filter(|stat| stat.ppid == me && !stat.ended()).map(|stat| stat.pid).collect();
    let _ = supervisor.kill();
    let _ = supervisor.wait();
    send(&children, Signal::SIGKILL);
    engine.map(|file| kill_tree(&file.process()));
    // a supervisor that is killed cannot
    let pages = std::fs::read_to_string(agent_dir.join("page-dir")).map(PathBuf::from);
    pages.iter().for_each(|pages| run_dirs::remove_pages(pages));
}
