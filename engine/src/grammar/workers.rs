//! The threads that compute masks while the model runs. A constraint has at most one job here, so the queues cannot overflow.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::grammar::constraint::Turn;
use llguidance::Matcher;

/// Threads; a mask takes well under a millisecond, and the model wants the processors.
const THREADS: usize = 2;
const QUEUE: usize = 1024;
/// How often an idle thread looks whether it is still wanted.
const IDLE_WAIT: Duration = Duration::from_secs(1);
const STACK_BYTES: usize = 16 << 20;

/// A matcher, the token that was chosen, and where the result goes.
pub(super) struct Job {
    pub matcher: Box<Matcher>,
    pub token: u32,
    pub reply: SyncSender<Turn>,
}

/// A handle on the threads, which start with the first job and end with the last handle.
#[derive(Clone, Default)]
pub(super) struct Workers {
    senders: Arc<OnceLock<Vec<SyncSender<Job>>>>,
    next: Arc<AtomicUsize>,
}

impl Workers {
    /// Hands a job over without waiting. False: nobody will do it.
    pub fn submit(&self, job: Job) -> bool {
        let senders = self.senders.get_or_init(|| (0..THREADS).filter_map(start).collect());
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        let sender = senders.get(turn % senders.len().max(1));
        sender.is_some_and(|sender| sender.try_send(job).is_ok())
    }
}

fn start(number: usize) -> Option<SyncSender<Job>> {
    let (sender, jobs) = sync_channel(QUEUE);
    let thread = std::thread::Builder::new().name(format!("grammar-{number}")).stack_size(STACK_BYTES);
    match thread.spawn(move || work(&jobs)) {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::error!(%error, "no thread could be started for grammars");
            None
        }
    }
}

fn work(jobs: &Receiver<Job>) {
    loop {
        match jobs.recv_timeout(IDLE_WAIT) {
            Ok(Job { mut matcher, token, reply }) => {
                let mask = matcher.consume_token(token).and_then(|()| matcher.compute_mask_or_eos());
                let mask = mask.map_err(|error| error.to_string());
                // The request may have ended meanwhile.
                drop(reply.try_send(Turn { matcher, mask }));
            }
            Err(RecvTimeoutError::Timeout) => (),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
