//! The wall clock as a value: the times that the operator writes into the API come from here and from nowhere else, so
//! that a test can own them. Decisions about leases and deadlines have tokio's monotonic clock, but for one that can only make a
//! candidate wait for longer (`leader::lease`).

use std::{fmt, sync::Arc};

use crds::poison::AHEAD_MS_MAX;
use jiff::{SignedDuration, Timestamp, Unit};

/// Clocks of a cluster differ by no more than this, as far as anybody goes by them.
pub const AHEAD_MAX: SignedDuration = SignedDuration::from_millis(AHEAD_MS_MAX);

/// Is `at` further ahead than clocks differ? Such a time was told by a clock that was wrong, and says nothing of when it was.
pub fn ahead(at: Timestamp, now: Timestamp) -> bool {
    at.duration_since(now) > AHEAD_MAX
}

/// A source of wall time. Cheap to clone.
#[derive(Clone)]
pub struct Wall(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Wall {
    /// The machine's own.
    pub fn system() -> Self {
        Wall(Arc::new(Timestamp::now))
    }

    /// Whatever `read` says.
    pub fn new(read: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Wall(Arc::new(read))
    }

    /// Now, in milliseconds like every time of the API.
    pub fn now(&self) -> Timestamp {
        let now = (self.0)();
        now.round(Unit::Millisecond).unwrap_or(now)
    }
}

impl fmt::Debug for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wall")
    }
}
