//! A wait that did not end in time: what it was, for the requests that fail by it, for the evidence, and for the exit status (E1).
//! A stuck engine answers what it owes and ends within a second; whoever supervises it starts another. Writes one file.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use thiserror::Error;

/// Exit status of an engine that gave up a wait: known, and no other failure's.
pub const EXIT_STUCK: u8 = 85;

/// What did not come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StuckKind {
    /// An event of the device queue (S2).
    DeviceWait,
    /// Ranks that did not come to a collective or to the agreement before a step (S1, S3).
    RankSilent { ranks: Vec<usize> },
    /// A rank whose process has ended.
    RankGone { rank: usize },
    /// Ranks that were about to launch different steps (E3).
    PlanMismatch,
    /// The step loop itself, seen from outside it (S0).
    Loop,
    /// No wait at all: the engine thread panicked, and whoever waits for it would wait for ever.
    Panic,
}

impl StuckKind {
    /// A short name, for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::DeviceWait => "device-wait",
            Self::RankSilent { .. } => "rank-silent",
            Self::RankGone { .. } => "rank-gone",
            Self::PlanMismatch => "plan-mismatch",
            Self::Loop => "loop",
            Self::Panic => "panic",
        }
    }
}

/// A wait that was given up.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct Stuck {
    pub kind: StuckKind,
    /// Who waited for what, for how long: one line for a person.
    pub text: String,
    pub waited: Duration,
}

impl Stuck {
    /// What the engine leaves behind beside its page: `stuck-<pid>.json`, whole or not at all.
    ///
    /// # Errors
    /// What the file system says; the engine ends all the same.
    pub fn write(&self, dir: &Path, details: &Value) -> io::Result<PathBuf> {
        let path = dir.join(format!("stuck-{}.json", std::process::id()));
        let beside = path.with_extension("part");
        let waited_ms = u64::try_from(self.waited.as_millis()).unwrap_or(u64::MAX);
        let ranks = match &self.kind {
            StuckKind::RankSilent { ranks } => ranks.clone(),
            StuckKind::RankGone { rank } => vec![*rank],
            _ => Vec::new(),
        };
        let doc = json!({
            "kind": self.kind.name(), "text": self.text, "waited_ms": waited_ms, "ranks": ranks, "details": details,
        });
        std::fs::write(&beside, format!("{doc:#}\n"))?;
        std::fs::rename(&beside, &path)?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_evidence_names_the_ranks_and_the_wait() {
        let dir = tempfile::tempdir().unwrap();
        let kind = StuckKind::RankSilent { ranks: vec![1, 3] };
        let stuck = Stuck { kind, text: "ranks 1 and 3 are silent".into(), waited: Duration::from_millis(700) };
        let path = stuck.write(dir.path(), &json!({"step": 9})).unwrap();
        let doc: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!((doc["kind"].as_str(), &doc["ranks"]), (Some("rank-silent"), &json!([1, 3])));
        assert_eq!((doc["waited_ms"].as_u64(), doc["details"]["step"].as_u64()), (Some(700), Some(9)));
        assert!(stuck.write(Path::new("/dev/null/x"), &Value::Null).is_err());
    }
}
