//! Folders of one run: its own where nobody names one, and its pages'; and those of runs that were killed. Pages are stored to at every step, and on a disk's file system a
//! write-back would hold the engine (DESIGN §4.4), so they lie in memory where that can be.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::unistd::{AccessFlags, access};

use crate::sources::EngineProcess;

const MEMORY: &str = "/dev/shm";
const PREFIX: &str = "truebeat-run-";
/// Held by a supervisor for as long as it lives.
pub const LOCK: &str = "lock";
/// Beside the agent's other files: where the pages of the run lie that has the folder.
const NOTE: &str = "page-dir";

/// A folder that no other run has, not yet made.
pub fn fresh(base: &Path) -> PathBuf {
    base.join(format!("{PREFIX}{}-{}", std::process::id(), crate::files::monotonic_ns()))
}

/// Younger ones may belong to a run that is about to take its lock, which it does as soon as the file is there; where that run has ended, none does.
const ABANDONED_AGE_MIN: Duration = Duration::from_secs(5);

/// The folder of a run whose supervisor has gone without removing it; held against others for as long as this lives.
#[derive(Debug)]
pub struct Abandoned {
    pub dir: PathBuf,
    _lock: File,
}

impl Abandoned {
    /// Removes it, and its pages.
    pub fn remove(self) {
        remove_pages(&pages_of(&self.dir).unwrap_or_default());
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Folders of this user's that lie beside `agent_dir` and were made as it was, by [`fresh`], whose runs have ended; none where somebody has
/// named the folder.
pub fn abandoned_beside(agent_dir: &Path) -> Vec<Abandoned> {
    let is_fresh = |dir: &Path| dir.file_name().is_some_and(|name| is_fresh(&name.to_string_lossy()));
    let Some(base) = agent_dir.parent().filter(|_| is_fresh(agent_dir)) else { return Vec::new() };
    let others = std::fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path());
    others.filter(|dir| is_fresh(dir) && dir != agent_dir).filter_map(abandoned).collect()
}

/// As [`fresh`] makes it, and nobody by hand.
fn is_fresh(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).is_some_and(|(pid, ns)| number(pid) && number(ns))
}

fn abandoned(dir: PathBuf) -> Option<Abandoned> {
    let meta = dir.symlink_metadata().ok()?;
    if !meta.is_dir() || meta.uid() != nix::unistd::geteuid().as_raw() {
        return None;
    }
    let lock = File::open(dir.join(LOCK)).ok()?;
    let is_old = lock.metadata().ok()?.modified().ok()?.elapsed().is_ok_and(|age| age >= ABANDONED_AGE_MIN);
    let is_old = is_old || !maker_lives(&dir);
    (is_old && lock.try_lock().is_ok()).then_some(Abandoned { dir, _lock: lock })
}

/// Does the process live that made this folder, as far as can be seen?
fn maker_lives(dir: &Path) -> bool {
    let name = dir.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).and_then(|(pid, _)| pid.parse().ok());
    pid.is_none_or(|pid| EngineProcess::of(pid).is_some_and(|process| process.lives()))
}

/// Where the pages of the run lie that has this folder, as it has noted.
pub fn pages_of(agent_dir: &Path) -> Option<PathBuf> {
    let noted = std::fs::read_to_string(agent_dir.join(NOTE)).ok()?;
    (!noted.is_empty()).then(|| PathBuf::from(noted))
}

/// Where the pages of a run are to lie that has this folder.
pub fn for_pages(agent_dir: &Path) -> PathBuf {
    let memory = Path::new(MEMORY);
    let is_writable = access(memory, AccessFlags::W_OK | AccessFlags::X_OK).is_ok();
    if is_writable { fresh(memory) } else { agent_dir.join("pages") }
}

/// Removes pages that lie in memory; others go with the folder that they are in, or stay in it.
pub fn remove_pages(page_dir: &Path) {
    let name = page_dir.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    if page_dir.parent() == Some(Path::new(MEMORY)) && name.starts_with(PREFIX) {
        let _ = std::fs::remove_dir_all(page_dir);
    }
}

/// Removes the pages of the run before in the same folder, for a supervisor that was killed could not, and notes where those of this run lie.
pub fn take_over_pages(agent_dir: &Path, page_dir: &Path) {
    let note = agent_dir.join(NOTE);
    let before = pages_of(agent_dir).unwrap_or_default();
    if before != page_dir {
        remove_pages(&before);
    }
    if let Err(error) = std::fs::write(&note, page_dir.as_os_str().as_encoded_bytes()) {
        tracing::info!(%error, "a run after this one will not know where its pages lie");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn a_run_that_has_gone_is_known_by_its_lock_and_its_age() {
        let base = tempfile::tempdir().unwrap();
        let make = |name: &str, age_s: u64| {
            let dir = base.path().join(name);
            std::fs::create_dir(&dir).unwrap();
            let lock = File::create(dir.join(LOCK)).unwrap();
            lock.set_modified(SystemTime::now() - Duration::from_secs(age_s)).unwrap();
            (dir, lock)
        };
        let (own, _lock) = make("truebeat-run-1-1", 900);
        let (gone, _) = make("truebeat-run-2-2", 10);
        let (lives, held) = make("truebeat-run-3-3", 900);
        held.try_lock().unwrap();
        make(&format!("truebeat-run-{}-4", std::process::id()), 0);
        make("somebody-elses", 900);
        make("truebeat-run-mine", 900);
        std::os::unix::fs::symlink(&gone, base.path().join("truebeat-run-5-5")).unwrap();
        let found = abandoned_beside(&own);
        assert_eq!(found.iter().map(|one| &one.dir).collect::<Vec<_>>(), [&gone]);
        assert!(abandoned_beside(&own).is_empty(), "another that looks now leaves it to us");
        found.into_iter().for_each(Abandoned::remove);
        assert!(!gone.exists() && lives.exists());
        assert!(abandoned_beside(&base.path().join("somebody-elses")).is_empty(), "a folder that was named");
    }
}
