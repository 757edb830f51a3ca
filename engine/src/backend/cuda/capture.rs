//! The thread that makes graphs, beside the steps: it is asked and never waited for. It ends with its owner.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use super::driver::{Driver, Launch};
use super::fuse::fused;

/// Steps that may wait to become graphs.
const WAITING_MAX: usize = 8;
/// An idle thread turns at least this often.
const IDLE: Duration = Duration::from_millis(500);

/// A step's shape and launches.
type Wanted = (u64, Vec<Launch>);
/// The same with its graph, if one could be made.
type Made<G> = (u64, Vec<Launch>, Option<G>);
type Ends<G> = (SyncSender<Wanted>, Receiver<Made<G>>);

/// Both ends of that thread; `None`: not started yet, or not to be had.
pub struct Capture<D: Driver> {
    ends: Option<Ends<D::Graph>>,
}

impl<D: Driver> Default for Capture<D> {
    fn default() -> Self {
        Self { ends: None }
    }
}

impl<D: Driver> Capture<D> {
    /// Asks for a graph. False: too many are asked for already, or there is no thread to be had.
    pub fn want(&mut self, driver: &Arc<D>, shape: u64, launches: Vec<Launch>) -> bool {
        if self.ends.is_none() {
            let started = start(driver.clone());
            self.ends = started.inspect_err(|error| tracing::warn!(%error, "no thread for the device's graphs")).ok();
        }
        self.ends.as_ref().is_some_and(|(wanted, _)| wanted.try_send((shape, launches)).is_ok())
    }

    /// A graph that was made, if there is one. Never waits.
    pub fn made(&mut self) -> Option<Made<D::Graph>> {
        self.ends.as_ref()?.1.try_recv().ok()
    }
}

fn start<D: Driver>(driver: Arc<D>) -> std::io::Result<Ends<D::Graph>> {
    let (wanted, asked) = sync_channel::<Wanted>(WAITING_MAX);
    let (give, made) = sync_channel(2 * WAITING_MAX);
    let body = move || {
        loop {
            match asked.recv_timeout(IDLE) {
                Ok((shape, launches)) => {
                    let graph = driver.graph(&fused(&launches));
                    let graph = graph.inspect_err(|error| tracing::warn!(%error, "a graph could not be made")).ok();
                    drop(give.try_send((shape, launches, graph)));
                }
                Err(RecvTimeoutError::Timeout) => (),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    };
    thread::Builder::new().name("graphs".into()).spawn(body)?;
    Ok((wanted, made))
}
