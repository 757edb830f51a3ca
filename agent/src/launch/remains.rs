//! What engines leave behind: processes that outlive their root, and whole engines whose supervisor was killed. Nothing is started beside
//! them (I5).
//!
//! Reads `/proc` and folders of earlier runs, and kills what is shown to be an engine's.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::sync::watch;
use tokio::time::Instant;

use super::disk::Disk;
use super::{EngineFile, LOOK_EVERY, Launcher, UNKILLABLE_LOOK, or_left, run_dirs};
use crate::kill::{kill_tree_and_wait, send_to};
use crate::sources::procs::{ProcRoot, Stat};
use crate::sources::tree::{add_descendants, ancestors};
use crate::sources::{EngineProcess, process_tree};
use crate::supervisor::registry::Registry;

/// Failed looks for what is left, each of a second; then an engine is started all the same, for one that hangs need not be of an engine.
const LOOKS_MAX: u32 = 3;
/// For so long one that ends may give back what it has pinned, and its GPU (as the detector waits, `watch/killed.rs`).
const GIVING_BACK: Duration = Duration::from_secs(20);

impl Launcher {
    /// Ends an engine that a launcher before this one left behind when it was killed: beside the next it would hold port and GPU, and
    /// nobody would look after it. Only for whoever has the agent's directory for himself. Where that is one that each run makes anew, the
    /// same is done for the runs before that did not come to removing theirs. What names an engine stays until nothing is left of it.
    pub async fn clear_predecessor(&self, registry: &Registry, stop: watch::Receiver<bool>) {
        for run in run_dirs::abandoned_beside(&self.config.agent_dir) {
            if self.end_engine_of(&run.dir, registry, stop.clone()).await {
                run.remove();
            }
        }
        if self.end_engine_of(&self.config.agent_dir, registry, stop).await {
            let path = EngineFile::path_before(&self.config.agent_dir);
            let _ = self.disk.within(move || std::fs::remove_file(path)).await;
        }
        run_dirs::take_over_pages(&self.config.agent_dir, &self.config.page_dir);
    }

    /// True: nothing is left of it.
    async fn end_engine_of(&self, agent_dir: &Path, registry: &Registry, mut stop: watch::Receiver<bool>) -> bool {
        for file in [EngineFile::read_before(agent_dir), EngineFile::read(agent_dir)].into_iter().flatten() {
            if or_left(self.end_engine(&file, agent_dir, registry), &mut stop).await.is_none() {
                return false;
            }
        }
        true
    }

    async fn end_engine(&self, file: &EngineFile, agent_dir: &Path, registry: &Registry) {
        let process = file.process();
        let say = |pid| {
            self.say(&format!("an engine runs here that a killed truebeat left behind (pid {pid}); it is ended first"))
        };
        // a session whose leader has gone may be another's by now: only a living root tells its tree
        let root = EngineProcess::of(process.pid).filter(|now| *now == process && !process_tree(now).is_empty());
        if let Some(root) = &root {
            say(root.pid);
        }
        // who is whose child is known before anybody is killed
        let disk = Disk::default();
        let mut left = look(&disk, file).await.unwrap_or_default().ours;
        if let Some(root) = &root {
            self.clear_remains(root, registry).await;
        } else if let Some(first) = left.first() {
            say(first.pid);
        }
        let outlives = |pids: &[i32]| {
            let dir = agent_dir.display();
            self.say(&format!(
                "processes of an engine before outlive SIGKILL: {pids:?}; nothing is started beside them. The driver may need the machine \
                 started anew; if they hold nothing that this engine needs (another GPU, say), remove {dir}, which names them, and start again"
            ));
        };
        clear_left(&mut left, || look(&disk, file), outlives).await;
        self.clear_orphans(registry).await;
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

/// Kills who is left, and whoever else `look` finds, until all of them have gone. A process that ends has no environment any more long before
/// it lets go of its GPU: who was found once is waited for.
async fn clear_left<F>(left: &mut Vec<EngineProcess>, look: impl Fn() -> F, outlives_kill: impl Fn(&[i32]))
where
    F: Future<Output = std::io::Result<Remains>>,
{
    let (begun, mut failed) = (Instant::now(), 0);
    loop {
        left.retain(EngineProcess::lives);
        let mut ending = false;
        match look().await {
            Ok(found) => {
                failed = 0;
                ending = !found.ending.is_empty() && begun.elapsed() < GIVING_BACK;
                left.extend(found.ours);
            }
            Err(error) => {
                failed += 1;
                tracing::warn!(%error, "could not look for what an engine before has left behind");
            }
        }
        left.sort_by_key(|process| process.pid);
        left.dedup();
        if left.is_empty() && !ending && (failed == 0 || failed >= LOOKS_MAX) {
            return;
        }
        send_to(left, Signal::SIGKILL);
        // as in [`Launcher::clear_remains`]: whoever outlives that does so for long
        let outlives = !left.is_empty() && begun.elapsed() >= UNKILLABLE_LOOK;
        if outlives {
            let pids: Vec<i32> = left.iter().map(|process| process.pid).collect();
            outlives_kill(&pids);
        }
        tokio::time::sleep(if outlives { UNKILLABLE_LOOK } else { LOOK_EVERY }).await;
    }
}

/// What came of that start of an engine and lives on. An environment may wait for its process's memory, and the launcher's disk shall not wait
/// with it.
async fn look(disk: &Disk, file: &EngineFile) -> std::io::Result<Remains> {
    let file = file.clone();
    disk.within(move || Ok(started_with(&ProcRoot::live(), &file))).await
}

/// What a look finds.
#[derive(Debug, Default)]
struct Remains {
    /// They came of it.
    ours: Vec<EngineProcess>,
    /// On their way out, in a session of its number: environment and pipes are gone, and a GPU may be held for seconds yet. They are waited for and
    /// not killed: the session may be a stranger's by now.
    ending: Vec<EngineProcess>,
}

/// Live processes whose environment has the number that one start of an engine was given, or that write into a pipe that it was given (workers
/// write their titles over their environment), with what descends from them and, where one of them is still in it, all of that engine's session.
/// None that began before it, and neither this process nor its own family.
fn started_with(proc: &ProcRoot, file: &EngineFile) -> Remains {
    let me = i32::try_from(std::process::id()).unwrap_or(-1);
    let word = format!("TRUEBEAT_NONCE={}", file.nonce);
    let has = |pid: i32| {
        let environ = std::fs::read(proc.path(pid, "environ")).unwrap_or_default();
        environ.split(|byte| *byte == 0).any(|variable| variable == word.as_bytes())
    };
    let pipes: Vec<PathBuf> = file.output.iter().map(|inode| format!("pipe:[{inode}]").into()).collect();
    let says = |pid: i32, fd: &str| std::fs::read_link(proc.path(pid, fd)).is_ok_and(|file| pipes.contains(&file));
    let came_of_it = |pid: &i32| has(*pid) || says(*pid, "fd/1") || says(*pid, "fd/2");
    let mut candidates: Vec<Stat> = proc.all().into_iter().filter(|stat| !stat.ended()).collect();
    let mut spared = ancestors(&candidates, me);
    let mut ours = HashSet::from([me]);
    add_descendants(&candidates, &mut ours);
    spared.extend(ours);
    candidates.retain(|stat| stat.start_ticks >= file.start_ticks && !spared.contains(&stat.pid));
    let mut found: HashSet<i32> = candidates.iter().map(|stat| stat.pid).filter(came_of_it).collect();
    let session = || candidates.iter().filter(|stat| stat.session == file.pid);
    // an id is not given away while anybody is left in the session
    if session().any(|stat| found.contains(&stat.pid)) {
        found.extend(session().map(|stat| stat.pid));
    }
    add_descendants(&candidates, &mut found);
    let ending = session().filter(|stat| stat.exits && !found.contains(&stat.pid)).map(EngineProcess::from).collect();
    let ours = candidates.iter().filter(|stat| found.contains(&stat.pid)).map(EngineProcess::from).collect();
    Remains { ours, ending }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(pid: i32, start_ticks: u64, nonce: u64) -> EngineFile {
        let (boot_id, command) = (String::new(), Vec::new());
        EngineFile { pid, start_ticks, boot_id, nonce, output: vec![77], starts: 1, command, last_exit: None }
    }

    /// A `/proc` of this process (`me`, below 4) and what stands in rows of pid, parent, session and environment.
    fn world(rows: &[(i32, i32, i32, &str)]) -> (tempfile::TempDir, ProcRoot) {
        let dir = tempfile::tempdir().unwrap();
        for (pid, ppid, session, environ) in rows {
            let folder = dir.path().join(pid.to_string());
            std::fs::create_dir(&folder).unwrap();
            let stat =
                format!("{pid} (x) S {ppid} {pid} {session} 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 {} 0 0\n", 100 + pid);
            std::fs::write(folder.join("stat"), stat).unwrap();
            std::fs::write(folder.join("environ"), environ).unwrap();
        }
        let proc = ProcRoot::at(dir.path());
        (dir, proc)
    }

    #[test]
    fn a_start_is_known_by_its_number_its_session_and_its_children_and_a_stranger_never() {
        let me = std::process::id().cast_signed();
        let ours = "PATH=/bin\0TRUEBEAT_NONCE=42\0";
        let (_dir, proc) = world(&[
            (4, 1, 4, ours), // our own shell, from a tmux that the engine began
            (me, 4, 4, ours),
            (me + 1, me, 4, ours),              // our gate
            (20, 1, 10, "TRUEBEAT_NONCE=42\0"), // the engine's server, whose shell (10) has gone
            (21, 20, 10, "\0\0\0"),             // a worker with a title
            (22, 21, 22, "\0"),                 // and what that began, in a session of its own
            (23, 1, 10, "\0"),                  // an orphan of the session
            (24, 1, 24, ours),                  // who left the session
            (30, 1, 30, "TRUEBEAT_NONCE=421\0"),
            (31, 1, 31, "NOT_TRUEBEAT_NONCE=42\0"),
            (32, 1, 32, "\0"), // it says what it says to somebody else
        ]);
        says_into(&proc, 32, "pipe:[78]");
        let found = |start_ticks| pids(&started_with(&proc, &file(10, start_ticks, 42)).ours);
        assert_eq!(found(0), [20, 21, 22, 23, 24]);
        assert_eq!(found(100 + 24), [24], "those began before it");
        assert!(started_with(&proc, &file(10, 0, 43)).ours.is_empty(), "a session alone may be another's by now");
    }

    #[test]
    fn whoever_has_lost_its_environment_is_known_by_where_it_speaks_and_waited_for_while_it_ends() {
        let (_dir, proc) = world(&[
            (20, 1, 20, "\0\0"), // a worker with a title, in a session of its own
            (21, 20, 21, "\0"),
            (30, 1, 10, ""), // on its way out, of the engine's session
            (31, 30, 31, ""),
            (40, 1, 40, ""), // of another
            (41, 1, 10, "HOME=/\0"),
        ]);
        says_into(&proc, 20, "pipe:[77]");
        for pid in [30, 40] {
            let stat = std::fs::read_to_string(proc.path(pid, "stat")).unwrap();
            std::fs::write(proc.path(pid, "stat"), stat.replacen("-1 0 ", "-1 4194308 ", 1)).unwrap();
        }
        let found = started_with(&proc, &file(10, 0, 42));
        assert_eq!((pids(&found.ours), pids(&found.ending)), (vec![20, 21], vec![30]), "nobody is killed for a number");
    }

    /// One that ends is waited for, and not for ever.
    #[tokio::test(start_paused = true)]
    async fn what_gives_back_its_gpu_is_waited_for() {
        for (looks, waits) in [(3, Duration::ZERO), (u32::MAX, GIVING_BACK)] {
            let (made, began) = (std::cell::Cell::new(0), Instant::now());
            let look = || {
                made.set(made.get() + 1);
                let ending = (made.get() <= looks).then_some(EngineProcess { pid: 7, start_ticks: 1 });
                std::future::ready(Ok(Remains { ours: Vec::new(), ending: ending.into_iter().collect() }))
            };
            clear_left(&mut Vec::new(), look, |_| ()).await;
            let waited = began.elapsed();
            assert!(made.get() > looks.min(3) && waited >= waits && waited < waits + UNKILLABLE_LOOK, "{waited:?}");
        }
    }

    fn pids(found: &[EngineProcess]) -> Vec<i32> {
        let mut pids: Vec<i32> = found.iter().map(|process| process.pid).collect();
        pids.sort_unstable();
        pids
    }

    fn says_into(proc: &ProcRoot, pid: i32, pipe: &str) {
        std::fs::create_dir(proc.path(pid, "fd")).unwrap();
        std::os::unix::fs::symlink(pipe, proc.path(pid, "fd/2")).unwrap();
    }

    /// A look that failed once is made again; one that never comes back holds nobody for ever.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_left_where_a_look_says_so_or_none_succeeds() {
        for (looks, failures) in [(1, 0), (2, 1), (3, 2), (LOOKS_MAX, u32::MAX)] {
            let made = std::cell::Cell::new(0);
            let look = || {
                made.set(made.get() + 1);
                let fails = made.get() <= failures;
                let found = if fails { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(Remains::default()) };
                std::future::ready(found)
            };
            let mut left = Vec::new();
            let cleared = clear_left(&mut left, look, |_| ());
            tokio::time::timeout(UNKILLABLE_LOOK, cleared).await.expect("it ends");
            assert_eq!(made.get(), looks, "{failures} looks fail");
        }
    }
}
