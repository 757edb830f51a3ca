//! Waiting on predicates with a bound: the only way a test of this crate lets time pass. A wait that lasts says what it waits for,
//! and one that fails says what it last saw. Touches the clock and standard error, nothing else.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

const POLL: Duration = Duration::from_millis(50);
const PROGRESS: Duration = Duration::from_secs(5);

/// An error of a probe that no further waiting can mend (any other error is remembered and the probe tried again).
#[derive(Debug)]
pub struct GiveUp(pub String);

impl fmt::Display for GiveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for GiveUp {}

/// Calls `probe` until it gives a value; `Ok(None)` and errors mean "not yet".
///
/// # Errors
/// After `bound`, naming `what` and the last error; at once when the probe says [`GiveUp`].
pub fn until<T>(what: &str, bound: Duration, mut probe: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let mut wait = Wait::new(what, bound);
    loop {
        if let Some(value) = wait.judge(probe())? {
            return Ok(value);
        }
        std::thread::sleep(POLL);
    }
}

/// [`until`] for probes that are futures.
///
/// # Errors
/// As [`until`].
pub async fn until_async<T, F>(what: &str, bound: Duration, mut probe: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    let mut wait = Wait::new(what, bound);
    loop {
        let answer = match tokio::time::timeout(wait.left(), probe()).await {
            Ok(answer) => answer,
            Err(_) => Err(anyhow!("the probe itself did not return in time")),
        };
        if let Some(value) = wait.judge(answer)? {
            return Ok(value);
        }
        tokio::time::sleep(POLL).await;
    }
}

struct Wait<'a> {
    what: &'a str,
    bound: Duration,
    started: Instant,
    told: Instant,
    last: Option<anyhow::Error>,
}

impl<'a> Wait<'a> {
    fn new(what: &'a str, bound: Duration) -> Self {
        let now = Instant::now();
        Self { what, bound, started: now, told: now, last: None }
    }

    /// What is left of the bound; never zero, so that a last probe can still answer.
    fn left(&self) -> Duration {
        self.bound.saturating_sub(self.started.elapsed()).max(POLL)
    }

    fn judge<T>(&mut self, answer: Result<Option<T>>) -> Result<Option<T>> {
        match answer {
            Ok(Some(value)) => return Ok(Some(value)),
            Ok(None) => {}
            Err(error) if error.is::<GiveUp>() => return Err(error.context(format!("waiting for {}", self.what))),
            Err(error) => self.last = Some(error),
        }
        let waited = self.started.elapsed();
        if waited >= self.bound {
            let last =
                self.last.take().map_or_else(|| "not yet, without an error".to_owned(), |error| format!("{error:#}"));
            return Err(anyhow!("{} did not come within {:.1} s (last: {last})", self.what, self.bound.as_secs_f64()));
        }
        if self.told.elapsed() >= PROGRESS {
            self.told = Instant::now();
            eprintln!("  … {:.0} s: waiting for {}", waited.as_secs_f64(), self.what);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ends_the_wait_and_errors_before_it_do_not() {
        let mut calls = 0;
        let value = until("three calls", Duration::from_secs(10), || {
            calls += 1;
            if calls < 3 { Err(anyhow!("not ready")) } else { Ok(Some(calls)) }
        });
        assert_eq!(value.unwrap(), 3);
    }

    #[test]
    fn the_bound_names_the_thing_and_the_last_error() {
        let error = until::<()>("the moon", Duration::ZERO, || Err(anyhow!("still night"))).unwrap_err().to_string();
        assert!(error.contains("the moon") && error.contains("still night"), "{error}");
    }

    #[test]
    fn giving_up_does_not_wait() {
        let started = Instant::now();
        let error =
            until::<()>("a dead thing", Duration::from_secs(600), || Err(GiveUp("it died".into()).into())).unwrap_err();
        assert!(format!("{error:#}").contains("it died"));
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}
