//! Which process is the engine now? In `truebeat run` the supervisor says so in `engine.json`; in a pod it is found in `/proc`.

use std::path::PathBuf;

use crate::launch::EngineFile;
use crate::sources::procs::ProcRoot;
use crate::sources::{EngineProcess, find_pod_engine};

/// A search over `/proc` is not repeated before this.
const SEARCH_EVERY_MS: u64 = 200;

/// Follows the engine from process to process.
#[derive(Debug)]
pub struct Follow {
    /// `Some`: `truebeat run`, with the directory of `engine.json`.
    agent_dir: Option<PathBuf>,
    engine: Option<EngineProcess>,
    searched_ms: Option<u64>,
}

impl Follow {
    /// `agent_dir` where `engine.json` tells; `None` in a pod.
    pub fn new(agent_dir: Option<PathBuf>) -> Self {
        Self { agent_dir, engine: None, searched_ms: None }
    }

    /// The engine as of now. An engine that ended stays the answer until another one is there.
    pub fn look(&mut self, now_ms: u64) -> Option<EngineProcess> {
        let found = match &self.agent_dir {
            Some(agent_dir) => EngineFile::read(agent_dir).map(|file| file.process()),
            None => self.search(now_ms),
        };
        if found.is_some() {
            self.engine = found;
        }
        self.engine.clone()
    }

    /// The engine's command line, program first.
    pub fn command_line(&self) -> Vec<String> {
        if let Some(file) = self.agent_dir.as_ref().and_then(|agent_dir| EngineFile::read(agent_dir)) {
            return file.command;
        }
        let Some(engine) = &self.engine else { return Vec::new() };
        let words = std::fs::read(format!("/proc/{}/cmdline", engine.pid)).unwrap_or_default();
        words
            .split(|byte| *byte == 0)
            .filter(|word| !word.is_empty())
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect()
    }

    fn search(&mut self, now_ms: u64) -> Option<EngineProcess> {
        let due = self.searched_ms.is_none_or(|at| now_ms.saturating_sub(at) >= SEARCH_EVERY_MS);
        if !due || self.engine.as_ref().is_some_and(lives) {
            return None;
        }
        self.searched_ms = Some(now_ms);
        find_pod_engine()
    }
}

/// Is it the same process still, and not a zombie?
pub fn lives(engine: &EngineProcess) -> bool {
    ProcRoot::live().stat(engine.pid).is_some_and(|stat| stat.start_ticks == engine.start_ticks && !stat.ended())
}
