//! `engine.json`: what the supervisor tells the detector about the engine that it runs.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::sources::EngineProcess;

/// The engine process of `truebeat run`, running or ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFile {
    pub pid: i32,
    pub start_ticks: u64,
    /// The boot that both count from ([`crate::files::boot_id`]).
    #[serde(default)]
    pub boot_id: String,
    /// What the process was given as `TRUEBEAT_NONCE`.
    pub nonce: u64,
    /// The pipes that take what it says, by inode: whose standard output or error is one of them came of it.
    #[serde(default)]
    pub output: Vec<u64>,
    /// How often an engine was started, this one included.
    pub starts: u64,
    pub command: Vec<String>,
    /// How the process before this one ended; of this one, once it has.
    pub last_exit: Option<Exit>,
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    pub pid: i32,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// RFC 3339.
    pub at: String,
}

impl EngineFile {
    /// Where it lies.
    pub fn path(agent_dir: &Path) -> PathBuf {
        agent_dir.join("engine.json")
    }

    /// Where that of a run before lies until nothing is left of its engine.
    pub fn path_before(agent_dir: &Path) -> PathBuf {
        agent_dir.join("engine.before.json")
    }

    /// Puts that of a run before aside: a detector would follow its engine, and take what has ended for a death. Before one looks.
    pub fn set_aside(agent_dir: &Path) {
        let path = Self::path(agent_dir);
        if path.symlink_metadata().is_ok_and(|meta| meta.is_file())
            && let Err(error) = std::fs::rename(&path, Self::path_before(agent_dir))
        {
            tracing::warn!(%error, path = %path.display(), "the engine of a run before may be taken for ours");
        }
    }

    /// The file as it is now; `None` before the first start of this boot: another boot's process may have its number and its start again,
    /// and is a stranger.
    pub fn read(agent_dir: &Path) -> Option<Self> {
        Self::read_from(&Self::path(agent_dir))
    }

    /// That of a run before, if it was of this boot.
    pub fn read_before(agent_dir: &Path) -> Option<Self> {
        Self::read_from(&Self::path_before(agent_dir))
    }

    fn read_from(path: &Path) -> Option<Self> {
        let file: Self = crate::files::read_json(path)?;
        (file.boot_id.is_empty() || file.boot_id == crate::files::boot_id()).then_some(file)
    }

    /// Which process it names.
    pub fn process(&self) -> EngineProcess {
        EngineProcess { pid: self.pid, start_ticks: self.start_ticks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_another_boot_names_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let file = |boot_id: &str| EngineFile {
            pid: 7,
            start_ticks: 300,
            boot_id: boot_id.to_owned(),
            nonce: 1,
            output: Vec::new(),
            starts: 1,
            command: Vec::new(),
            last_exit: None,
        };
        for (boot_id, names) in [(crate::files::boot_id(), true), ("".into(), true), ("another".into(), false)] {
            crate::files::write_json(&EngineFile::path(dir.path()), &file(&boot_id)).unwrap();
            assert_eq!(EngineFile::read(dir.path()).is_some(), names, "{boot_id:?}");
        }
    }
}
