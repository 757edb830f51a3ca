//! Tensor parallel over processes: each rank holds a share of every weight and of the cache, all run the same step, and what one
//! computes of a row the others add or append through shared memory (`team`). The first rank is the engine itself, with front end
//! and scheduler; the others do what it broadcasts (`plan`).
//!
//! **Invariant:** before a step is launched every rank has said what it is about to launch, and all say the same (E3).
//! **Invariant:** every collective ends: with all contributions, or with an error that names who did not bring his (S1, S3).

use std::time::Duration;

mod backend;
mod blame;
mod fleet;
mod heart;
mod layout;
mod leader;
mod peer;
mod peers;
mod plan;
mod team;
mod witness;
mod worker;

pub use backend::RankBackend;
pub use fleet::{Fleet, FleetError, RANK_FLAG, RankOf};
pub use leader::LeaderModel;
pub use plan::PlanLimits;
pub use team::Team;
pub use witness::Beside;
pub use worker::{WorkerConfig, WorkerError, run_worker};

/// Ranks of one engine.
pub const RANKS_MAX: usize = 16;
/// Threads of a rank, every one of which the others know.
pub const RANK_THREADS_MAX: usize = layout::HELPERS_MAX;
/// Ranks that load say so at least this often, one of them.
pub const LOAD_SILENCE_MAX: Duration = Duration::from_secs(60);
