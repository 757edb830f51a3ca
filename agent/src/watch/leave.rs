//! The way out: orders to drain as the supervisor gives them, and when a replica that leaves refuses what is new. Pure but for the
//! thread that reads the orders.
//!
//! A pod that is deleted leaves the Service's endpoints at once, but every node hears of it in its own time. Until all have, new
//! requests still come, and a refusal would be a lost request. So the gate stays open for a moment after readiness has gone, and asks
//! each client to close its connection; only then it shuts and waits for what is in flight.

use std::io::{self, BufRead};

use serde::{Deserialize, Serialize};
use tokio::sync::watch as channel;

/// A drain that is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    /// Its number, the moment of the order in ns of the monotonic clock; 0: none is wanted.
    #[serde(rename = "drain")]
    pub id: u64,
    /// How long requests that still arrive are served, in milliseconds.
    #[serde(default)]
    pub open_ms: u64,
}

impl Drain {
    /// Must new requests be refused at `now_ms`? The number is the moment of the order on the monotonic clock, so a detector that starts in
    /// the middle of a drain does not open the gate again.
    pub fn shuts(&self, now_ms: u64) -> bool {
        now_ms >= (self.id / 1_000_000).saturating_add(self.open_ms)
    }
}

/// Takes the supervisor's orders, one JSON line each, in a thread of its own (standard input cannot be read without blocking). The
/// channel closes when the supervisor's end of the pipe does.
pub fn listen(orders: channel::Sender<Drain>) -> io::Result<()> {
    let read = move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(drain) => _ = orders.send_replace(drain),
                Err(error) => tracing::warn!(%line, %error, "the supervisor said something that is no order"),
            }
        }
    };
    std::thread::Builder::new().name("orders".to_owned()).spawn(read).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_shuts_only_after_the_news_had_time_to_spread() {
        let drain = Drain { id: 5_000_000_000, open_ms: 2_000 };
        assert_eq!([5_000, 6_999, 7_000, 90_000].map(|ms| drain.shuts(ms)), [false, false, true, true]);
    }

    #[test]
    fn an_order_reads_back_and_an_old_one_shuts_at_once() {
        let drain = Drain { id: 7, open_ms: 300 };
        assert_eq!(serde_json::from_str::<Drain>(&serde_json::to_string(&drain).unwrap()).unwrap(), drain);
        let old: Drain = serde_json::from_str(r#"{"drain":7}"#).unwrap();
        assert!(old.shuts(0));
    }
}
