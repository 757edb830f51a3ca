//! A service's life: serve until told to shut down or until the engine ends, then drain within a bound.

use std::{
    future::Future,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use thiserror::Error;
use tokio::{
    net::TcpListener,
    sync::oneshot,
    task::{JoinError, JoinHandle},
};

use crate::core::CoreError;
use crate::server::{AppState, router, socket};
use crate::stuck::Stuck;

/// How often a drain looks whether it is done.
const DRAIN_POLL: Duration = Duration::from_millis(10);
/// What closing connections and the engine thread get, each, when everything else is done.
const CLOSE_MAX: Duration = Duration::from_secs(1);
/// What the engine gets to come to the end of the step in which it is stopped, that those who wait for it may hear so.
const STEP_MAX: Duration = Duration::from_secs(5);
/// An engine that gives up, or is stopped, has told its requests so; their answers get this long to leave.
const LAST_WORDS_MAX: Duration = Duration::from_millis(300);

/// Why the service ended otherwise than by a drain.
#[derive(Debug, Error)]
pub enum ServeError {
    #[error(transparent)]
    Core(#[from] CoreError),
    #[error("the HTTP server ended by itself")]
    Server(#[source] Option<JoinError>),
    #[error("{left} requests were not done when the drain timeout of {timeout_ms} ms passed")]
    DrainTimeout { left: usize, timeout_ms: u128 },
}

type Ended = oneshot::Receiver<Result<(), CoreError>>;
type Server = JoinHandle<()>;

/// Serves `app` on `listener` until `shutdown`, then drains: refuses what is new, finishes what is accepted.
///
/// # Errors
/// [`ServeError`]: engine or server ended by themselves, or the drain was not done in time.
pub async fn serve(
    listener: TcpListener,
    app: AppState,
    mut ended: Ended,
    drain_timeout: Duration,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (close, closing) = oneshot::channel::<()>();
    // A dropped sender says the same as a message: close.
    let closing = async { drop(closing.await) };
    let mut server: Server = tokio::spawn(socket::serve(listener, router(app.clone()), app.client_patience, closing));
    let shared = app.handle.shared.clone();
    tokio::select! {
        biased;
        stuck = shared.given_up() => {
            drop(close);
            return Err(given_up(server, &stuck).await);
        }
        () = shutdown => (),
        result = &mut ended => {
            server.abort();
            return Err(ended_early(result).into());
        }
        result = &mut server => return Err(ServeError::Server(result.err())),
    }
    let drain_until = Instant::now() + drain_timeout;
    // an engine that gives up a step while it drains has not drained
    let left = tokio::select! {
        biased;
        stuck = shared.given_up() => {
            drop(close);
            return Err(given_up(server, &stuck).await);
        }
        left = drain(&app, drain_timeout) => left,
    };
    if left == 0 {
        drop(close);
        // a connection that still writes the end of an answer has what is left of the drain's time
        close_within(server, drain_until.saturating_duration_since(Instant::now()).max(CLOSE_MAX)).await;
        return stop(&app, ended, CLOSE_MAX).await;
    }
    // first the engine: only when it has ended does every request know that it will not be done
    let stopped = stop(&app, ended, STEP_MAX).await;
    drop(close);
    close_within(server, LAST_WORDS_MAX).await;
    stopped?;
    Err(ServeError::DrainTimeout { left, timeout_ms: drain_timeout.as_millis() })
}

/// The requests have been ended with a reason; their connections get a moment to say so.
async fn given_up(server: Server, stuck: &Stuck) -> ServeError {
    close_within(server, LAST_WORDS_MAX).await;
    CoreError::Stuck(stuck.clone()).into()
}

/// Waits for the connections to end, for so long.
async fn close_within(mut server: Server, allowed: Duration) {
    if tokio::time::timeout(allowed, &mut server).await.is_err() {
        tracing::warn!("connections were still open when the server closed");
        server.abort();
    }
}

/// Waits for the accepted requests, those whose body is still coming and those whose answer is still leaving too; returns how many are left
/// when time is up.
async fn drain(app: &AppState, timeout: Duration) -> usize {
    let shared = &app.handle.shared;
    shared.draining.store(true, Ordering::Relaxed);
    let since = Instant::now();
    // a request may be several sequences, and a sequence may be asked for by no request
    let left = || app.exchanges.open().max(shared.in_flight());
    tracing::info!(in_flight = left(), timeout_ms = timeout.as_millis(), "draining");
    while left() > 0 && since.elapsed() < timeout {
        tokio::time::sleep(DRAIN_POLL).await;
    }
    tracing::info!(in_flight = left(), took_ms = since.elapsed().as_millis(), "drained");
    left()
}

/// Stops the engine thread, which tells all its requests so. It is not waited for without a bound: a frozen thread is left behind.
///
/// # Errors
/// What the engine thread ended with, if that was an error.
async fn stop(app: &AppState, ended: Ended, allowed: Duration) -> Result<(), ServeError> {
    app.handle.shared.stop.store(true, Ordering::Relaxed);
    match tokio::time::timeout(allowed, ended).await {
        Ok(Ok(Err(error))) => return Err(error.into()),
        Ok(Err(_panicked)) => return Err(CoreError::Died.into()),
        Ok(Ok(Ok(()))) => (),
        Err(_elapsed) => tracing::error!("the engine thread did not stop; the process ends without it"),
    }
    Ok(())
}

fn ended_early(result: Result<Result<(), CoreError>, oneshot::error::RecvError>) -> CoreError {
    match result {
        Ok(Err(error)) => error,
        // The thread ends by itself only when every handle is gone; while one serves, that is a death.
        Ok(Ok(())) | Err(_) => CoreError::Died,
    }
}
