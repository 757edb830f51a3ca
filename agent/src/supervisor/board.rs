//! What the supervisor knows: the detector's last word with its time, how often children died, and the drain that was asked for.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use role::pulse::Pulse;
use tokio::sync::watch;

use crate::status::{ALIVE, StatusDoc};
use crate::watch::leave::Drain;

/// So long somebody who may know is waited for: while it drains a detector speaks every second.
const SILENT_WAIT: Duration = Duration::from_secs(2);

/// So long the supervisor's own work may be stuck in one call after a probe has asked it, before `/livez` tells of it.
const STUCK_MAX: Duration = Duration::from_secs(30);

/// A status and when it came; that the detector still means it may have been heard since ([`Board::age`]).
#[derive(Debug)]
pub struct Posted {
    pub doc: StatusDoc,
    pub at: Instant,
}

/// Shared by the HTTP thread, the keepers of the children and the narrator.
#[derive(Debug)]
pub struct Board {
    status: watch::Sender<Option<Arc<Posted>>>,
    /// The last drain request.
    drain: watch::Sender<Drain>,
    /// Until when it stands at most, by all who have asked.
    drain_until: Mutex<Option<tokio::time::Instant>>,
    /// The detector may go.
    dismissal: watch::Sender<bool>,
    /// When the detector was heard last.
    heard: Mutex<Instant>,
    restarts: Mutex<BTreeMap<&'static str, u64>>,
    unreadable_lines: AtomicU64,
    pulse: Pulse,
}

impl Default for Board {
    fn default() -> Self {
        Self::missed_after(STUCK_MAX)
    }
}

impl Board {
    /// A board whose supervisor is missed when it has done nothing for so long.
    pub fn missed_after(silence_max: Duration) -> Self {
        Self {
            status: watch::Sender::new(None),
            drain: watch::Sender::new(Drain::default()),
            drain_until: Mutex::default(),
            dismissal: watch::Sender::new(false),
            heard: Mutex::new(Instant::now()),
            restarts: Mutex::default(),
            unreadable_lines: AtomicU64::new(0),
            pulse: Pulse::new(silence_max),
        }
    }

    /// Of the supervisor's executor.
    pub fn pulse(&self) -> &Pulse {
        &self.pulse
    }

    /// One line of the detector. A line that is no status is counted and changes nothing (I4). True for a status, or the word that it
    /// still holds.
    pub fn post_line(&self, line: &str) -> bool {
        if line == ALIVE {
            *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            return true;
        }
        match serde_json::from_str(line) {
            Ok(doc) => {
                self.post(doc);
                true
            }
            Err(error) => {
                tracing::warn!(%error, "the detector wrote a line that is no status");
                self.unreadable_lines.fetch_add(1, Ordering::Relaxed);
                false
            }
        }
    }

    /// The newest status.
    pub fn post(&self, doc: StatusDoc) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        let drains = doc.draining.is_some();
        let before = self.status.send_replace(Some(Arc::new(Posted { doc, at: Instant::now() })));
        if !drains && before.is_some_and(|before| before.doc.draining.is_some()) {
            // it is over, as when the engine is another one: whoever asks next asks for himself
            *self.drain_until.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// How long ago the detector was heard.
    pub fn age(&self) -> Duration {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// The last status, `None` before the first.
    pub fn latest(&self) -> Option<Arc<Posted>> {
        self.status.borrow().clone()
    }

    /// Tells of every new status.
    pub fn statuses(&self) -> watch::Receiver<Option<Arc<Posted>>> {
        self.status.subscribe()
    }

    /// Asks the detector to drain, after it has served for `open_ms` more. Returns the request's number. Numbers grow over supervisors of one boot, so that a detector's
    /// memory of an old drain never swallows a new one.
    pub fn request_drain(&self, open_ms: u64) -> u64 {
        let id = crate::files::monotonic_ns();
        self.drain.send_if_modified(|wanted| {
            // an end is not taken back, nor put off
            let changes = !wanted.ends;
            if changes {
                *wanted = Drain { id, open_ms, ends: false };
            }
            changes
        });
        id
    }

    /// Tells the detector that the engine is about to be ended, and waits, at most so long, until it says that its gate is shut.
    pub async fn announce_end(&self, wait: Duration) {
        let id = crate::files::monotonic_ns();
        let mut statuses = self.statuses();
        self.drain.send_replace(Drain { id, open_ms: 0, ends: true });
        let heard = statuses
            .wait_for(|status| status.as_ref().and_then(|posted| posted.doc.draining).is_some_and(|at| at >= id));
        let _ = tokio::time::timeout(wait, heard).await;
    }

    /// Waits, at most so long, until the gate holds nothing more that a client has yet to get; hardly at all for a gate of which nothing is heard.
    pub async fn all_is_sent(&self, wait: Duration) {
        let wanted = self.drain.borrow().id;
        let mut statuses = self.statuses();
        // before the order is heard of, clients' connections are not among those that are waited for
        let heard = |doc: &StatusDoc| wanted == 0 || doc.draining.is_some_and(|at| at >= wanted);
        let left = |posted: &Option<Arc<Posted>>| posted.as_ref().filter(|posted| heard(&posted.doc))?.doc.in_flight;
        let told = statuses.wait_for(|status| left(status).is_some());
        if tokio::time::timeout(wait.min(SILENT_WAIT), told).await.is_ok_and(|told| told.is_ok()) {
            let sent = statuses.wait_for(|status| left(status) == Some(0));
            let _ = tokio::time::timeout(wait, sent).await;
        }
    }

    /// The drain shall stand until then at least. Returns the latest time that anybody has asked for: who asks for less cuts no other one short.
    pub fn keep_drain(&self, until: tokio::time::Instant) -> tokio::time::Instant {
        let mut latest = self.drain_until.lock().unwrap_or_else(PoisonError::into_inner);
        let until = latest.map_or(until, |before| before.max(until));
        *latest = Some(until);
        until
    }

    /// Ends the drain with this number, unless another has been asked for since.
    pub fn lift_drain(&self, id: u64) -> bool {
        let lifted =
            self.drain.send_if_modified(|wanted| wanted.id == id && !wanted.ends && std::mem::take(wanted).id != 0);
        if lifted {
            *self.drain_until.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        lifted
    }

    /// The wanted drain, level-triggered.
    pub fn drains(&self) -> watch::Receiver<Drain> {
        self.drain.subscribe()
    }

    /// Lets the detector go, for good.
    pub fn dismiss(&self) {
        self.dismissal.send_replace(true);
    }

    /// May the detector go?
    pub fn has_dismissed(&self) -> bool {
        *self.dismissal.borrow()
    }

    /// Returns when the detector may go.
    pub async fn dismissed(&self) {
        // (the board holds the other end)
        let _ = self.dismissal.subscribe().wait_for(|dismissed| *dismissed).await;
    }

    /// A child was started again.
    pub fn count_restart(&self, child: &'static str) {
        *self.restarts.lock().unwrap_or_else(PoisonError::into_inner).entry(child).or_default() += 1;
    }

    /// The supervisor's own metrics in Prometheus text format, to stand after the detector's.
    pub fn metrics(&self) -> String {
        let mut text = String::from(
            "# HELP truebeat_supervisor_child_restarts_total Times that a child process was started again.\n\
             # TYPE truebeat_supervisor_child_restarts_total counter\n",
        );
        for (child, n) in self.restarts.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            text += &format!("truebeat_supervisor_child_restarts_total{{child=\"{child}\"}} {n}\n");
        }
        let unreadable = self.unreadable_lines.load(Ordering::Relaxed);
        text += &format!(
            "# HELP truebeat_supervisor_unreadable_lines_total Lines of the detector that were no status.\n\
             # TYPE truebeat_supervisor_unreadable_lines_total counter\n\
             truebeat_supervisor_unreadable_lines_total {unreadable}\n"
        );
        if self.latest().is_some() {
            text += &format!(
                "# HELP truebeat_supervisor_status_age_seconds Age of the detector's last word.\n\
                 # TYPE truebeat_supervisor_status_age_seconds gauge\n\
                 truebeat_supervisor_status_age_seconds {:.3}\n",
                self.age().as_secs_f64()
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sign_of_life_is_a_word_and_changes_nothing() {
        let board = Board::default();
        assert!(board.post_line(ALIVE) && board.latest().is_none(), "nothing is known yet");
        *board.heard.lock().unwrap() -= Duration::from_secs(60);
        assert!(board.age() >= Duration::from_secs(60));
        assert!(board.post_line(ALIVE) && board.age() < Duration::from_secs(60));
        assert!(!board.post_line("{\"ready\":1}"), "half a status is none");
    }

    #[test]
    fn a_drain_that_is_over_makes_the_next_one_no_longer() {
        let (board, now) = (Board::default(), tokio::time::Instant::now());
        let (soon, late) = (now + Duration::from_secs(9), now + Duration::from_secs(900));
        let says = |draining| board.post(StatusDoc { draining, ..StatusDoc::default() });
        says(None);
        assert_eq!((board.keep_drain(late), board.keep_drain(soon)), (late, late), "not heard of yet");
        says(Some(1));
        assert_eq!(board.keep_drain(soon), late);
        says(None);
        assert_eq!(board.keep_drain(soon), soon);
    }

    #[tokio::test(start_paused = true)]
    async fn an_end_is_told_waited_for_within_a_bound_and_never_taken_back() {
        let board = Board::default();
        let (began, wait) = (tokio::time::Instant::now(), Duration::from_millis(500));
        board.announce_end(wait).await;
        assert!(began.elapsed() >= wait, "nobody has answered");
        let end = *board.drains().borrow();
        assert!(end.ends && end.shuts(end.id / 1_000_000 + 1));
        board.request_drain(9_000);
        assert!(*board.drains().borrow() == end && !board.lift_drain(end.id));
        let began = tokio::time::Instant::now();
        let answers = async {
            let asked = board.drains().wait_for(|drain| drain.id > end.id).await.unwrap().id;
            board.post(StatusDoc { draining: Some(asked), ..StatusDoc::default() });
        };
        tokio::join!(board.announce_end(wait), answers);
        assert!(began.elapsed() < wait);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_sent_is_waited_for_within_a_bound() {
        let board = Board::default();
        let wait = Duration::from_secs(10);
        let waits = async || {
            let began = tokio::time::Instant::now();
            board.all_is_sent(wait).await;
            began.elapsed().as_secs()
        };
        let says = |draining, in_flight| board.post(StatusDoc { draining, in_flight, ..StatusDoc::default() });
        assert_eq!(waits().await, 2, "there is no detector");
        says(None, Some(0));
        assert_eq!(waits().await, 0, "nobody has ordered anything");
        let id = board.request_drain(0);
        assert_eq!(waits().await, 2, "the order is not heard of");
        says(Some(id), None);
        assert_eq!(waits().await, 2, "the gate is silent");
        says(Some(id), Some(1));
        assert_eq!(waits().await, 10);
        let sends = async {
            tokio::time::sleep(wait / 2).await;
            says(Some(id), Some(0));
        };
        assert_eq!(tokio::join!(waits(), sends).0, 5);
    }

    #[test]
    fn a_drain_is_lifted_by_its_own_number_alone() {
        let board = Board::default();
        let first = board.request_drain(0);
        let second = board.request_drain(0);
        assert!(first < second && !board.lift_drain(first));
        assert_eq!(board.drains().borrow().id, second);
        assert!(board.lift_drain(second) && !board.lift_drain(second));
        assert_eq!(*board.drains().borrow(), Drain::default());
    }
}
