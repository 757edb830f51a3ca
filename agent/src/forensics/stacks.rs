//! Python stacks of the engine's processes, through py-spy in a helper process with a deadline.
//!
//! The helper (`truebeat agent py-stacks PID`) reads the target's memory without stopping it; odd interpreters may make it panic
//! or never end, which costs the helper. Names of functions, files and lines only: never locals, which hold prompts.

use std::process::{ExitCode, Stdio};
use std::time::Duration;

use futures::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::bundle::BundleEntry;
use crate::own_program::{OWN_PROGRAM, is_truebeat};
use crate::sources::procs::ProcRoot;

/// Python processes whose stacks are taken.
const PROCESSES_MAX: usize = 24;
const OUTPUT_BYTES_MAX: u64 = 4 << 20;
/// A running interpreter changes under the reader; a garbled read is tried again.
const TRIES_MAX: u32 = 3;

/// One Python thread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PythonThread {
    pub name: String,
    /// The kernel's thread id, where known.
    pub os_thread: Option<u64>,
    /// Does it run, as far as py-spy can tell?
    pub active: bool,
    pub holds_gil: bool,
    /// Innermost first.
    pub frames: Vec<PythonFrame>,
}

/// One call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PythonFrame {
    pub function: String,
    pub file: String,
    pub line: i32,
}

/// What was found.
#[derive(Debug, Clone, Default)]
pub struct PythonStacks {
    pub entries: Vec<BundleEntry>,
    /// The main thread of each process with its pid.
    pub mains: Vec<(i32, PythonThread)>,
    pub notes: Vec<String>,
}

/// The helper's work: prints the threads of `pid` as one JSON line on stdout; the reason on stderr and status 1 if it cannot.
pub fn py_stacks_main(pid: i32) -> ExitCode {
    // without a parent this process has no purpose
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    let threads = match python_threads(pid) {
        Ok(threads) => threads,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::FAILURE;
        }
    };
    match serde_json::to_writer(std::io::stdout().lock(), &threads) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The threads of a live Python process, read without stopping it. Blocks; may take long on strange processes.
pub fn python_threads(pid: i32) -> Result<Vec<PythonThread>, String> {
    if let Some(why) = no_right(pid) {
        return Err(why);
    }
    let config = py_spy::Config {
        blocking: py_spy::config::LockingStrategy::NonBlocking,
        include_idle: true,
        collect_thread_names: true,
        ..Default::default()
    };
    let describe = |error: &dyn std::fmt::Display| format!("no Python stacks of {pid}: {error:#}");
    let mut spy = py_spy::PythonSpy::new(pid, &config).map_err(|error| describe(&error))?;
    let mut last = String::new();
    for _ in 0..TRIES_MAX {
        match spy.get_stack_traces() {
            Ok(traces) => return Ok(traces.into_iter().map(|trace| thread(pid, trace)).collect()),
            Err(error) => last = describe(&error),
        }
    }
    Err(last)
}

/// The right that reading another process's memory needs is the one that opening its `mem` needs; nothing is read here.
fn no_right(pid: i32) -> Option<String> {
    let error = std::fs::File::open(format!("/proc/{pid}/mem")).err()?;
    (error.kind() == std::io::ErrorKind::PermissionDenied).then(|| {
        format!(
            "no right to read process {pid} (ptrace: same user and ptrace_scope 0, or CAP_SYS_PTRACE); \
             its kernel states are in proc/{pid}/threads.txt"
        )
    })
}

/// Stacks of every Python process of the tree, all at once, each helper killed at the deadline.
pub async fn collect(tree: &[i32], deadline: Duration) -> PythonStacks {
    let proc = ProcRoot::live();
    let pythons: Vec<i32> = tree.iter().copied().filter(|pid| is_python(&proc, *pid)).collect();
    let asked = pythons.iter().take(PROCESSES_MAX).map(|pid| ask_helper(*pid, deadline));
    let mut stacks = PythonStacks::default();
    if pythons.len() > PROCESSES_MAX {
        stacks.notes.push(format!("{} Python processes, the first {PROCESSES_MAX} were asked", pythons.len()));
    }
    for (pid, answer) in pythons.iter().zip(join_all(asked).await) {
        match answer {
            Ok(threads) => {
                stacks.entries.push(BundleEntry { name: format!("stacks/python-{pid}.txt"), text: rendered(&threads) });
                let main = threads.iter().find(|thread| thread.os_thread == u64::try_from(*pid).ok());
                let main = main.or_else(|| threads.iter().find(|thread| thread.name == "MainThread"));
                stacks.mains.extend(main.map(|main| (*pid, main.clone())));
            }
            Err(why) => stacks.notes.push(why),
        }
    }
    stacks
}

async fn ask_helper(pid: i32, deadline: Duration) -> Result<Vec<PythonThread>, String> {
    if !is_truebeat() {
        return Err(format!("no Python stacks of {pid}: this program is not truebeat and has no helper"));
    }
    let mut helper = Command::new(OWN_PROGRAM)
        .args(["agent", "py-stacks", &pid.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("no helper for the Python stacks of {pid}: {error}"))?;
    let (Some(stdout), Some(stderr)) = (helper.stdout.take(), helper.stderr.take()) else {
        return Err(format!("the helper for the Python stacks of {pid} has no output"));
    };
    let (mut said, mut complained) = (Vec::new(), Vec::new());
    let (mut stdout, mut stderr) = (stdout.take(OUTPUT_BYTES_MAX), stderr.take(4_096));
    let both = async { tokio::join!(stdout.read_to_end(&mut said), stderr.read_to_end(&mut complained)) };
    if tokio::time::timeout(deadline, both).await.is_err() {
        return Err(format!("Python stacks of {pid} took longer than {} ms", deadline.as_millis()));
    }
    serde_json::from_slice(&said).map_err(|_| {
        let complaint = String::from_utf8_lossy(&complained);
        let complaint: String = complaint.trim().chars().take(300).collect();
        if complaint.is_empty() { format!("no Python stacks of {pid}: the helper said nothing") } else { complaint }
    })
}

/// By the name of the executable: `python3.11`, `pypy3`. A symbolic link's reading waits for nothing. One that may not be read is
/// taken for one: the helper then says which right is missing.
fn is_python(proc: &ProcRoot, pid: i32) -> bool {
    let exe = match std::fs::read_link(proc.path(pid, "exe")) {
        Ok(exe) => exe,
        Err(error) => return error.kind() == std::io::ErrorKind::PermissionDenied,
    };
    let name = exe.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    name.starts_with("python") || name.starts_with("pypy")
}

fn thread(pid: i32, trace: py_spy::StackTrace) -> PythonThread {
    let main = trace.os_thread_id == u64::try_from(pid).ok();
    PythonThread {
        name: trace.thread_name.unwrap_or_else(|| if main { "MainThread" } else { "?" }.to_owned()),
        os_thread: trace.os_thread_id,
        active: trace.active,
        holds_gil: trace.owns_gil,
        frames: trace
            .frames
            .into_iter()
            .map(|frame| PythonFrame { function: frame.name, file: frame.filename, line: frame.line })
            .collect(),
    }
}

fn rendered(threads: &[PythonThread]) -> String {
    let mut text = String::new();
    for thread in threads {
        let activity = if thread.active { "active" } else { "idle" };
        let gil = if thread.holds_gil { "+gil" } else { "" };
        let id = thread.os_thread.map_or_else(|| "?".to_owned(), |id| id.to_string());
        text.push_str(&format!("Thread {id} ({activity}{gil}): {:?}\n", thread.name));
        for frame in &thread.frames {
            text.push_str(&format!("    {} ({}:{})\n", frame.function, frame.file, frame.line));
        }
    }
    text
}
