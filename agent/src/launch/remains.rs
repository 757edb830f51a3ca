//! What engines leave behind: processes that outlive their root, and whole engines whose supervisor was killed. Nothing is started beside
//! them (I5).
//!
//! Reads `/proc` and folders of earlier runs, and kills what is shown to be an engine's.

use std::path::Path;
use std::time::Instant;

use nix::sys::signal::Signal;
use tokio::sync::watch;

use super::disk::Disk;
use super::{EngineFile, Launcher, UNKILLABLE_LOOK, or_left, run_dirs};
use crate::kill::{kill_tree_and_wait, send_to};
use crate::sources::procs::ProcRoot;
use crate::sources::{EngineProcess, process_tree};
use crate::supervisor::registry::Registry;

impl Launcher {
    /// Ends an engine that a launcher before this one left behind when it was killed: beside the next it would hold port and GPU, and
    /// nobody would look after it. Only for whoever has the agent's directory for himself. Where that is one that each run makes anew, the
    /// same is done for the runs before that did not come to removing theirs.
    pub async fn clear_predecessor(&self, registry: &Registry, stop: watch::Receiver<bool>) {
        for run in run_dirs::abandoned_beside(&self.config.agent_dir) {
            self.end_engine_of(&run.dir, registry, stop.clone()).await;
            // one that cannot be ended is named there
            if EngineFile::read(&run.dir).is_none_or(|file| process_tree(&file.process()).is_empty()) {
                run.remove();
            }
        }
        self.end_engine_of(&self.config.agent_dir, registry, stop).await;
        run_dirs::take_over_pages(&self.config.agent_dir, &self.config.page_dir);
    }

    async fn end_engine_of(&self, agent_dir: &Path, registry: &Registry, mut stop: watch::Receiver<bool>) {
        let Some(file) = EngineFile::read(agent_dir) else { return };
        let process = file.process();
        // a session whose leader has gone may be another's by now: only a living root tells its tree
        let root = EngineProcess::of(process.pid).filter(|now| *now == process && !process_tree(now).is_empty());
        let left = self.left_of(file.nonce, file.start_ticks).await;
        let Some(first) = root.as_ref().or(left.first()) else { return };
        self.say(&format!(
            "an engine runs here that a killed truebeat left behind (pid {}); it is ended first",
            first.pid
        ));
        // no detector is to take it for the engine, and its end for a death
        let path = EngineFile::path(agent_dir);
        let _ = self.disk.within(move || std::fs::remove_file(path)).await;
        let ending = async {
            if let Some(root) = &root {
                self.clear_remains(root, registry).await;
            }
            self.clear_left(&file, registry).await;
        };
        or_left(ending, &mut stop).await;
    }

    /// What came of that start of an engine and lives on, in whatever session; without this process and those above it.
    async fn left_of(&self, nonce: u64, start_ticks: u64) -> Vec<EngineProcess> {
        // an environment may wait for its process's memory, and the launcher's disk shall not wait with it
        Disk::default()
            .within(move || Ok(started_with(&ProcRoot::live(), nonce, start_ticks)))
            .await
            .unwrap_or_default()
    }

    async fn clear_left(&self, file: &EngineFile, registry: &Registry) {
        let mut told = Instant::now();
        loop {
            let left = self.left_of(file.nonce, file.start_ticks).await;
            if left.is_empty() {
                return self.clear_orphans(registry).await;
            }
            send_to(&left, Signal::SIGKILL);
            if told.elapsed() >= UNKILLABLE_LOOK {
                told = Instant::now();
                let pids: Vec<i32> = left.iter().map(|process| process.pid).collect();
                self.say(&format!(
                    "processes of an engine before outlive SIGKILL: {pids:?}; nothing is started beside them"
                ));
            }
            tokio::time::sleep(super::LOOK_EVERY).await;
        }
    }

    /// Kills what is left of the tree and waits until it is gone, however long that takes: a successor beside it would fight for
    /// the port and the GPU. Orphans that came to us are most likely the engine's too; they are waited for within a bound.
    pub(super) async fn clear_remains(&self, process: &EngineProcess, registry: &Registry) {
        loop {
            send_to(&registry.adopted(), Signal::SIGKILL);
            if kill_tree_and_wait(process, super::REMAINS_WAIT).await {
                return self.clear_orphans(registry).await;
            }
            let left = process_tree(process);
            self.say(&format!(
                "processes of the ended engine outlive SIGKILL: {left:?}; nothing is started beside them"
            ));
            // whoever outlives that does so for long: to look all the time would cost a core
            tokio::time::sleep(UNKILLABLE_LOOK).await;
        }
    }

    pub(super) async fn clear_orphans(&self, registry: &Registry) {
        let begun = Instant::now();
        loop {
            let orphans = registry.adopted();
            if orphans.is_empty() {
                return;
            }
            if begun.elapsed() >= UNKILLABLE_LOOK {
                let pids: Vec<i32> = orphans.iter().map(|orphan| orphan.pid).collect();
                return self.say(&format!("orphans outlive SIGKILL: {pids:?}; they are left behind"));
            }
            send_to(&orphans, Signal::SIGKILL);
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }
}

/// Live processes whose environment has this number, which one start of an engine was given; none that began before it. Whoever was
/// started from within such an engine and kept its environment is its.
fn started_with(proc: &ProcRoot, nonce: u64, start_ticks: u64) -> Vec<EngineProcess> {
    let all = proc.all();
    let mut ours = vec![i32::try_from(std::process::id()).unwrap_or(-1)];
    while let Some(stat) = all.iter().find(|stat| ours.last() == Some(&stat.pid)).filter(|stat| stat.ppid > 0) {
        ours.push(stat.ppid);
    }
    let word = format!("TRUEBEAT_NONCE={nonce}");
    let has = |pid: i32| {
        let environ = std::fs::read(proc.path(pid, "environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == word.as_bytes())
    };
    all.iter()
        .filter(|stat| stat.start_ticks >= start_ticks && !stat.ended() && !ours.contains(&stat.pid) && has(stat.pid))
        .map(|stat| EngineProcess { pid: stat.pid, start_ticks: stat.start_ticks })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_known_by_its_number_in_whatever_session_and_a_stranger_never() {
        let start = |nonce: &str| {
            std::process::Command::new("setsid").args(["sleep", "600"]).env("TRUEBEAT_NONCE", nonce).spawn().unwrap()
        };
        let (mut one, mut other) = (start("4242424242"), start("424242424"));
        let pid = one.id().cast_signed();
        let found = || started_with(&ProcRoot::live(), 4_242_424_242, 0);
        let begun = Instant::now();
        while found().is_empty() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(30), "it is not found");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let process = EngineProcess::of(pid).unwrap();
        assert_eq!(found(), std::slice::from_ref(&process));
        let later = started_with(&ProcRoot::live(), 4_242_424_242, process.start_ticks + 1);
        assert!(later.is_empty(), "that number was another's before");
        for child in [&mut one, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(found().is_empty());
    }
}
