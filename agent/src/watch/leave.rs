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
    /// Its number; 0: none is wanted.
    #[serde(rename = "drain")]
    pub id: u64,
    /// How long requests that still arrive are served, in milliseconds.
    #[serde(default)]
    pub open_ms: u64,
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

/// Remembers when a drain began.
#[derive(Debug, Default)]
pub struct Leaving {
    /// Number of the drain, and when it was first seen.
    began: Option<(u64, u64)>,
}

impl Leaving {
    /// Must new requests be refused now?
    pub fn shut(&mut self, now_ms: u64, drain: Option<Drain>) -> bool {
        let Some(drain) = drain else {
            self.began = None;
            return false;
        };
        let (id, since_ms) = *self.began.get_or_insert((drain.id, now_ms));
        if id != drain.id {
            self.began = Some((drain.id, now_ms));
            return drain.open_ms == 0;
        }
        now_ms.saturating_sub(since_ms) >= drain.open_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gate_shuts_only_after_the_news_had_time_to_spread() {
        let drain = Some(Drain { id: 7, open_ms: 2_000 });
        let mut leaving = Leaving::default();
        assert_eq!([0, 1_999, 2_000, 9_000].map(|ms| leaving.shut(ms, drain)), [false, false, true, true]);
        assert!(!leaving.shut(9_100, None), "the drain was lifted");
        assert!(!leaving.shut(9_200, drain) && !leaving.shut(9_300, Some(Drain { id: 8, open_ms: 2_000 })));
        assert!(!leaving.shut(11_200, Some(Drain { id: 8, open_ms: 2_000 })), "each drain has its own moment");
        assert!(leaving.shut(11_300, Some(Drain { id: 8, open_ms: 2_000 })));
    }

    #[test]
    fn an_order_reads_back_and_an_old_one_shuts_at_once() {
        let drain = Drain { id: 7, open_ms: 300 };
        assert_eq!(serde_json::from_str::<Drain>(&serde_json::to_string(&drain).unwrap()).unwrap(), drain);
        let old: Drain = serde_json::from_str(r#"{"drain":7}"#).unwrap();
        assert!(Leaving::default().shut(0, Some(old)));
    }
}
