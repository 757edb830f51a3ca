//! A timer of the kernel's: the clock of the ticks, and of whatever else waits again and again. The runtime's own timers wake a thread up to
//! three times for one wait of 100 ms (a turn of their wheel, the end, and the thread's own call that there is a new one), which was half of
//! what an idle detector cost (2d).

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// A wait of nothing would disarm the timer.
const WAIT_MIN: Duration = Duration::from_micros(1);

/// Waits, again and again.
#[derive(Debug)]
pub struct Ticker {
    timer: TimerFd,
    /// The same timer. No socket: the runtime's one safe form of a descriptor that is awaited, and found ready no more without a read. How
    /// often it ran out nobody needs to know, and setting it anew forgets that: a system call less a tick.
    ready: UnixStream,
}

impl Ticker {
    /// Needs a runtime.
    ///
    /// # Errors
    /// When the kernel gives no timer.
    pub fn new() -> io::Result<Self> {
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
        let same = std::os::unix::net::UnixStream::from(timer.as_fd().try_clone_to_owned()?);
        let ready = UnixStream::from_std(same)?;
        Ok(Self { timer, ready })
    }

    /// Returns after this long. A wait that was given up may end the next one early.
    pub async fn wait(&mut self, length: Duration) {
        let once = Expiration::OneShot(TimeSpec::from_duration(length.max(WAIT_MIN)));
        let set = self.timer.set(once, TimerSetTimeFlags::empty());
        if set.is_err() || self.ready.readable().await.is_err() {
            // neither fails with these arguments; should one, the ticks go on by the runtime's timers
            return tokio::time::sleep(length).await;
        }
        let heard: io::Result<()> = self.ready.try_io(Interest::READABLE, || Err(io::ErrorKind::WouldBlock.into()));
        debug_assert!(heard.is_err(), "what ran out is over, until the timer is set anew");
    }
}

/// What a task in the background waits by: a ticker, or where the kernel gives none the runtime's timers.
#[derive(Debug)]
pub struct Timer(Option<Ticker>);

impl Timer {
    /// Needs a runtime.
    pub fn start() -> Self {
        Self(Ticker::new().ok())
    }

    /// As [`Ticker::wait`].
    pub async fn wait(&mut self, length: Duration) {
        match &mut self.0 {
            Some(ticker) => ticker.wait(length).await,
            None => tokio::time::sleep(length).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[tokio::test]
    async fn each_wait_lasts_as_long_as_it_was_set_to() {
        let mut ticker = Ticker::new().unwrap();
        let began = Instant::now();
        for _ in 0..5 {
            ticker.wait(Duration::from_millis(20)).await;
        }
        ticker.wait(Duration::ZERO).await;
        assert!(began.elapsed() >= Duration::from_millis(100), "{:?}", began.elapsed());
        let given_up = tokio::time::timeout(Duration::from_millis(1), ticker.wait(Duration::from_secs(600))).await;
        assert!(given_up.is_err());
        tokio::time::timeout(Duration::from_secs(60), ticker.wait(Duration::from_millis(1))).await.unwrap();
    }
}
