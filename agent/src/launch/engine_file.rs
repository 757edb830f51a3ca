//! `engine.json`: what the supervisor tells the detector about the engine that it runs.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::sources::EngineProcess;

/// The engine process of `truebeat run`, running or ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFile {
    pub pid: i32,
    pub start_ticks: u64,
    /// What the process was given as `TRUEBEAT_NONCE`.
    pub nonce: u64,
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

    /// The file as it is now; `None` before the first start.
    pub fn read(agent_dir: &Path) -> Option<Self> {
        std::fs::read(Self::path(agent_dir)).ok().and_then(|text| serde_json::from_slice(&text).ok())
    }

    /// Which process it names.
    pub fn process(&self) -> EngineProcess {
        EngineProcess { pid: self.pid, start_ticks: self.start_ticks }
    }
}
