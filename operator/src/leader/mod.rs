//! Leader election by a Lease. [`lease`] decides (pure), [`elector`] talks to the API, [`Leadership`] is what the rest
//! asks: a leader may write for 10 s after its last renewal, the lease lasts 15 s, and no write takes longer than 4 s.

pub mod elector;
pub mod lease;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::{
    sync::watch,
    time::{Duration, Instant},
};

/// Writes stop this long after the last successful renewal.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);

/// Whether this process may write. Uses the monotonic clock, so a process that was frozen wakes up without the right.
#[derive(Debug)]
pub struct Leadership {
    epoch: Instant,
    /// Milliseconds since `epoch` until which writes are allowed; 0: not the leader.
    until_ms: AtomicU64,
    /// Milliseconds since `epoch` when the Lease was last read or written with success; 0: never.
    contact_ms: AtomicU64,
    leading: watch::Sender<bool>,
}

impl Default for Leadership {
    fn default() -> Self {
        // one second in the past, so that 0 means never even at the first moment
        let epoch = Instant::now().checked_sub(Duration::from_secs(1)).unwrap_or_else(Instant::now);
        Leadership {
            epoch,
            until_ms: AtomicU64::new(0),
            contact_ms: AtomicU64::new(0),
            leading: watch::Sender::new(false),
        }
    }
}

impl Leadership {
    /// The lease was won or renewed just now. `at` would be more exact, so the elector calls [`Self::renewed_at`].
    pub fn renewed(&self) {
        self.renewed_at(Instant::now());
    }

    /// The lease was won or renewed by a request sent at `sent`.
    pub fn renewed_at(&self, sent: Instant) {
        self.until_ms.store(self.ms(sent + RENEW_DEADLINE), Ordering::SeqCst);
        self.leading.send_if_modified(|leading| !std::mem::replace(leading, true));
    }

    /// The lease is somebody else's, or could not be renewed in time.
    pub fn lost(&self) {
        self.until_ms.store(0, Ordering::SeqCst);
        self.leading.send_if_modified(|leading| std::mem::replace(leading, false));
    }

    /// The Lease could be read or written.
    pub fn contact(&self) {
        self.contact_ms.store(self.ms(Instant::now()), Ordering::SeqCst);
    }

    /// May a write begin now?
    pub fn may_write(&self) -> bool {
        self.ms(Instant::now()) < self.until_ms.load(Ordering::SeqCst)
    }

    /// How long ago the Lease was last seen; `None`: never.
    pub fn contact_age(&self) -> Option<Duration> {
        let contact_ms = self.contact_ms.load(Ordering::SeqCst);
        (contact_ms > 0).then(|| Duration::from_millis(self.ms(Instant::now()).saturating_sub(contact_ms)))
    }

    /// Tells of wins and losses.
    pub fn changes(self: &Arc<Self>) -> watch::Receiver<bool> {
        self.leading.subscribe()
    }

    fn ms(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.epoch).as_millis()).unwrap_or(u64::MAX)
    }
}
