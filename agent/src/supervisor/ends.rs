//! The signals by which `truebeat run` and the sidecar are told to end, and which of them mean it twice.

use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::SuperviseError;
use crate::signals::{received, unless_ignored};

/// Nobody presses a key twice in less.
const SAME_BREATH: Duration = Duration::from_millis(500);

/// SIGTERM, SIGINT, SIGQUIT and SIGHUP, as one stream: a terminal that is closed ends what runs in it, and so does whoever types `^\`; the
/// engine, which has a session of its own, would be left without anybody. Who starts us with `nohup` wants that otherwise.
pub struct Ends {
    term: Signal,
    int: Signal,
    quit: Option<Signal>,
    hangup: Option<Signal>,
    /// When the first came.
    first: Option<Instant>,
}

impl Ends {
    /// From now on they are taken.
    pub fn new() -> Result<Self, SuperviseError> {
        let take = |kind| signal(kind).map_err(SuperviseError::Signals);
        let quit = unless_ignored(SignalKind::quit()).map_err(SuperviseError::Signals)?;
        let hangup = unless_ignored(SignalKind::hangup()).map_err(SuperviseError::Signals)?;
        Ok(Self {
            term: take(SignalKind::terminate())?,
            int: take(SignalKind::interrupt())?,
            quit,
            hangup,
            first: None,
        })
    }

    /// Returns when any of them has come.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
            () = received(&mut self.quit) => {}
            () = received(&mut self.hangup) => {}
        }
        self.first = Some(Instant::now());
    }

    /// The same again from whoever means it: later than within the same breath, in which a script passes on what the terminal has told us as
    /// well. A terminal that is closed says so twice, by its shell and by the kernel, and a service manager may say
    /// it right behind its SIGTERM: that is nobody's impatience.
    pub async fn insisted(&mut self) {
        loop {
            tokio::select! {
                _ = self.term.recv() => {}
                _ = self.int.recv() => {}
                () = received(&mut self.quit) => {}
            }
            if self.first.is_none_or(|first| first.elapsed() >= SAME_BREATH) {
                return;
            }
        }
    }
}
