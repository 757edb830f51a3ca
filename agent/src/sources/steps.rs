//! The flight recorder of one rank, with whose it is.

use heartbeat::Reader;
use heartbeat::page::StepRecord;

/// What one rank's page tells of its last steps, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankSteps {
    pub rank: u32,
    /// The process that wrote the page: a page outlives it, and fewer ranks after a restart leave those of the others behind.
    pub pid: Option<i32>,
    pub steps: Vec<StepRecord>,
}

impl RankSteps {
    /// Works on the page of a dead process too; `None` where there is none.
    pub(super) fn read(rank: u32, reader: &mut Reader) -> Option<Self> {
        let steps = reader.steps().ok()?;
        let pid = reader.read_unverified().ok().and_then(|page| i32::try_from(page.identity.pid).ok());
        Some(Self { rank, pid, steps })
    }
}
