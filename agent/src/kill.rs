//! Ends an engine's whole process tree, and leaves the explanation where `kubectl describe pod` shows it.
//!
//! Nothing here decides: both keys (I1) were turned before it is called.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crds::episode::Episode;
use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::sources::{EngineProcess, process_tree, process_tree_members};

/// Looks at the tree until no new member shows; a fork bomb ends the looking, not the kill.
const LOOKS_MAX: usize = 8;
/// The kubelet keeps the last 4096 bytes of a termination message: more would lose its head (POD.md §5).
pub const TERMINATION_BYTES_MAX: usize = 4096;

/// SIGKILL for every process of the engine. Returns the pids that it reached.
pub fn kill_tree(root: &EngineProcess) -> Vec<i32> {
    kill_members(root).1
}

/// SIGKILL for every process of the engine: who they were, and the pids that it reached.
///
/// The tree is stopped first, member by member, so that nobody forks or is re-parented out of sight between the look and the
/// kill. The engine's own end is not awaited here: a process in the kernel may outlive the signal (I5).
pub fn kill_members(root: &EngineProcess) -> (Vec<EngineProcess>, Vec<i32>) {
    let mut stopped: Vec<EngineProcess> = Vec::new();
    for _ in 0..LOOKS_MAX {
        let new: Vec<_> = process_tree_members(root).into_iter().filter(|member| !stopped.contains(member)).collect();
        if new.is_empty() {
            break;
        }
        send_to(&new, Signal::SIGSTOP);
        stopped.extend(new);
    }
    let reached = send_to(&stopped, Signal::SIGKILL);
    (stopped, reached)
}

/// The processes of the engine, and the pids of those that a signal would reach: whom another user owns it does not. Sends none.
pub fn reachable(root: &EngineProcess) -> (Vec<EngineProcess>, Vec<i32>) {
    let members = process_tree_members(root);
    let reached =
        members.iter().map(|member| member.pid).filter(|pid| kill(Pid::from_raw(*pid), None).is_ok()).collect();
    (members, reached)
}

/// SIGKILL, then waits until nothing of the tree is left. True when it is gone within `bound`.
pub async fn kill_tree_and_wait(root: &EngineProcess, bound: Duration) -> bool {
    let begun = Instant::now();
    loop {
        // whoever cannot look sees nobody, and knows nothing of the root either: that is no proof that all are gone (P16)
        if process_tree(root).is_empty() && root.is_gone() {
            return true;
        }
        if begun.elapsed() >= bound {
            return false;
        }
        kill_tree(root);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// One signal for several processes, unless their pids have become somebody else's since they were seen. Returns the pids that it
/// reached; one that has ended meanwhile is what was wanted.
pub fn send_to(processes: &[EngineProcess], signal: Signal) -> Vec<i32> {
    let same = |process: &&EngineProcess| EngineProcess::of(process.pid).as_ref() == Some(*process);
    // Each is looked at just before its own signal.
    processes.iter().filter(same).map(|process| process.pid).filter(|pid| send_one(*pid, signal)).collect()
}

/// One signal for several pids that cannot be somebody else's: their ends were not awaited yet.
pub fn send(pids: &[i32], signal: Signal) {
    pids.iter().for_each(|pid| _ = send_one(*pid, signal));
}

fn send_one(pid: i32, signal: Signal) -> bool {
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) => true,
        Err(nix::errno::Errno::ESRCH) => false,
        Err(error) => {
            tracing::error!(pid, %signal, %error, "could not signal a process of the engine");
            false
        }
    }
}

/// What the detector leaves before a granted kill: the launcher starts that engine's successor without a pause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KillNote {
    pub pid: i32,
    pub start_ticks: u64,
    pub episode: String,
}

impl KillNote {
    /// Where it lies.
    pub fn path(agent_dir: &Path) -> PathBuf {
        agent_dir.join("kill.json")
    }

    /// Was this process's end granted?
    pub fn grants(agent_dir: &Path, engine: &EngineProcess) -> bool {
        let note: Option<Self> = crate::files::read_json(&Self::path(agent_dir));
        note.is_some_and(|note| (note.pid, note.start_ticks) == (engine.pid, engine.start_ticks))
    }

    /// For how long, by the file's time: a kill that is repeated writes it anew.
    pub fn age(agent_dir: &Path, engine: &EngineProcess) -> Option<Duration> {
        let written = std::fs::metadata(Self::path(agent_dir)).and_then(|file| file.modified()).ok()?;
        Self::grants(agent_dir, engine).then(|| written.elapsed().unwrap_or_default())
    }
}

/// Writes the summary to the engine container's termination message. `path` is `terminationMessagePath` inside that container.
///
/// # Errors
/// When the process is gone, is another user's, or the file is no plain file.
pub fn write_termination_message(engine: &EngineProcess, path: &Path, summary: &str) -> io::Result<()> {
    let inside = path.strip_prefix("/").unwrap_or(path);
    let full = PathBuf::from(format!("/proc/{}/root", engine.pid)).join(inside);
    // The engine's container is not trusted: no link out of it, no pipe to block on.
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut file = std::fs::OpenOptions::new().write(true).custom_flags(flags.bits()).open(full)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    file.set_len(0)?;
    file.write_all(cut(summary, TERMINATION_BYTES_MAX).as_bytes())
}

/// What the book knows of an episode, for whoever has no summary of its evidence: that one was lost with the detector which had taken it.
pub fn summary_of_book(episode: &Episode) -> String {
    let mut lines = vec![format!("truebeat: {}, episode {}", episode.class, episode.id)];
    lines.extend(episode.reasons.iter().map(|reason| format!("  {reason}")));
    lines.extend(episode.bundle.iter().map(|bundle| format!("bundle: {bundle}")));
    lines.extend(episode.fingerprint.iter().map(|fingerprint| format!("fingerprint: {fingerprint}")));
    lines.iter().map(|line| line.replace(char::is_control, " ") + "\n").collect()
}

/// The longest beginning of at most `bytes_max` bytes that ends between two characters.
fn cut(text: &str, bytes_max: usize) -> &str {
    let mut end = text.len().min(bytes_max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_cut_between_characters() {
        assert_eq!(cut("aé", 2), "a");
        assert_eq!(cut("aé", 3), "aé");
        assert_eq!(cut("", 3), "");
    }

    #[test]
    fn a_pid_that_is_somebody_elses_now_gets_no_signal() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let now = EngineProcess::of(i32::try_from(child.id()).unwrap()).unwrap();
        let before = EngineProcess { start_ticks: now.start_ticks - 1, ..now.clone() };
        assert!(send_to(&[before], Signal::SIGKILL).is_empty() && child.try_wait().unwrap().is_none());
        assert_eq!(reachable(&now), (vec![now.clone()], vec![now.pid]));
        assert!(child.try_wait().unwrap().is_none(), "to ask is to send nothing");
        assert_eq!(send_to(std::slice::from_ref(&now), Signal::SIGKILL), [now.pid]);
        child.wait().unwrap();
        assert!(send_to(&[now], Signal::SIGKILL).is_empty());
    }

    #[test]
    fn a_termination_message_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let me = EngineProcess::of(i32::try_from(std::process::id()).unwrap()).unwrap();
        let file = dir.path().join("message");
        std::fs::write(&file, "old and longer than the new one").unwrap();
        write_termination_message(&me, &file, "stalled").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "stalled");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(write_termination_message(&me, &link, "x").is_err());
    }
}
