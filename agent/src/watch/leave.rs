//! The way out: orders to drain as the supervisor gives them, and when a replica that leaves refuses what is new. Pure but for the
//! thread that reads the orders.
//!
//! A pod that is deleted leaves the Service's endpoints at once, but every node hears of it in its own time. Until all have, new
//! requests still come, and a refusal would be a lost request. So the gate stays open for a moment after readiness has gone, and asks
//! each client to close its connection; only then it shuts and waits for what is in flight.
//!
//! Whoever reaches the agent's port can ask for a drain, and the kubelet's call cannot say who it is. But only a pod that is being deleted
//! leaves, and the API server knows of that before its kubelet does: the answer to the agent's own declaration says so. Who asks this of a
//! pod that stays (a neighbour; a kubelet that restarts a container, or shuts its node down) waits until nothing is in flight, and no more.

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
    /// The supervisor itself is about to end the engine, whatever is still in flight.
    #[serde(default)]
    pub ends: bool,
}

impl Drain {
    /// Must new requests be refused at `now_ms`? The number is the moment of the order on the monotonic clock, so a detector that starts in
    /// the middle of a drain does not open the gate again.
    pub fn shuts(&self, now_ms: u64) -> bool {
        now_ms >= (self.id / 1_000_000).saturating_add(self.open_ms)
    }
}

/// So long an answer of the API server is waited for: until the question is sent, and the call's own deadline.
const DOUBT_MS_MAX: u64 = 3_500;
/// The API server is asked this often at most, however often somebody asks for a drain.
const ASK_EVERY_MS: u64 = 1_000;

/// What the API server has said of this pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// When it was asked.
    pub asked_ms: u64,
    /// Is the pod being deleted?
    pub deleted: bool,
}

/// What becomes of an order to drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Nobody knows yet whether the pod leaves.
    Doubted,
    /// It stays.
    Ignored,
    Obeyed(Drain),
}

impl Standing {
    /// The drain, where there is one.
    pub fn drain(self) -> Option<Drain> {
        match self {
            Self::Obeyed(drain) => Some(drain),
            Self::Doubted | Self::Ignored => None,
        }
    }

    /// Up to which order all may go who wait for the end of what is in flight; `shut`: the gate refuses what is new. Before anything is known
    /// of an order nobody goes: the pod may leave, and the gate is open.
    pub fn waited_for(self, order: Option<Drain>, shut: bool) -> Option<u64> {
        let order = order.map(|order| order.id);
        match self {
            Self::Obeyed(drain) => shut.then_some(drain.id).max(order.filter(|_| shut)),
            Self::Ignored => order,
            Self::Doubted => None,
        }
    }
}

/// Which orders are obeyed in a pod.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// A pod that is being deleted never comes back, whatever is asked for or taken back from then on.
    obeyed: Option<Drain>,
    /// When the oldest order came of which nothing is known yet.
    doubted_ms: Option<u64>,
    /// The order that the API server was asked about last, and when.
    asked: Option<(u64, u64)>,
}

impl Trust {
    /// The standing of `order`, the one that is wanted now; `None` where there is none. `said` is what the API server said last. Where it says
    /// nothing the order is obeyed: requests that are lost are worse than a replica that is out for a while.
    pub fn standing(&mut self, now_ms: u64, order: Option<Drain>, said: Option<Said>) -> Option<Standing> {
        if said.is_some_and(|said| said.deleted) {
            self.obeyed = self.obeyed.or(order);
        }
        if let Some(drain) = self.obeyed {
            return Some(Standing::Obeyed(drain));
        }
        let Some(order) = order else {
            self.doubted_ms = None;
            return None;
        };
        let ordered_ms = order.id / 1_000_000;
        let answered = |since_ms: u64| said.is_some_and(|said| said.asked_ms >= since_ms);
        if answered(ordered_ms) {
            self.doubted_ms = None;
            return Some(Standing::Ignored);
        }
        if self.asked.is_none_or(|(id, at_ms)| id != order.id && now_ms.saturating_sub(at_ms) >= ASK_EVERY_MS) {
            self.asked = Some((order.id, now_ms));
        }
        // whoever asks again and again is in doubt for no longer than the API server is silent
        let since_ms = self.doubted_ms.filter(|since_ms| !answered(*since_ms)).unwrap_or(ordered_ms);
        self.doubted_ms = Some(since_ms);
        let silent = now_ms.saturating_sub(since_ms) >= DOUBT_MS_MAX;
        Some(if silent { Standing::Obeyed(order) } else { Standing::Doubted })
    }

    /// The order about which the API server is to be asked: a new number is a new question.
    pub fn question(&self) -> Option<u64> {
        self.asked.map(|(id, _)| id)
    }

    /// Was an order obeyed that may have been taken back since?
    pub fn is_leaving(&self) -> bool {
        self.obeyed.is_some()
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
        let drain = Drain { id: 5_000_000_000, open_ms: 2_000, ends: false };
        assert_eq!([5_000, 6_999, 7_000, 90_000].map(|ms| drain.shuts(ms)), [false, false, true, true]);
    }

    const fn order(at_ms: u64) -> Option<Drain> {
        Some(Drain { id: at_ms * 1_000_000 + 1, open_ms: 300, ends: false })
    }

    const fn said(asked_ms: u64, deleted: bool) -> Option<Said> {
        Some(Said { asked_ms, deleted })
    }

    #[test]
    fn an_order_to_a_pod_that_is_being_deleted_is_obeyed_for_good() {
        let mut trust = Trust::default();
        let obeyed = Some(Standing::Obeyed(order(5_000).unwrap()));
        assert_eq!(trust.standing(5_000, order(5_000), said(900, false)), Some(Standing::Doubted), "that is old");
        assert_eq!(trust.question(), order(5_000).map(|order| order.id));
        assert_eq!(trust.standing(5_040, order(5_000), said(5_001, true)), obeyed);
        assert!(trust.is_leaving());
        assert_eq!(trust.standing(5_100, order(5_090), said(5_001, true)), obeyed, "somebody else asks as well");
        assert_eq!(trust.standing(90_000, None, said(5_001, true)), obeyed, "somebody else's is lifted");
    }

    #[test]
    fn an_order_to_a_pod_that_stays_is_ignored_and_many_orders_are_few_questions() {
        let mut trust = Trust::default();
        assert_eq!(trust.standing(5_000, order(5_000), said(900, false)), Some(Standing::Doubted));
        assert_eq!(trust.standing(5_040, order(5_000), said(5_001, false)), Some(Standing::Ignored));
        let mut questions = std::collections::BTreeSet::new();
        for now_ms in (6_000..16_000).step_by(100) {
            // whoever is asked answers at the next look
            let asked_ms = trust.asked.map_or(0, |(_, at_ms)| at_ms);
            let standing = trust.standing(now_ms, order(now_ms - 50), said(asked_ms, false));
            assert!(matches!(standing, Some(Standing::Doubted | Standing::Ignored)), "{now_ms}: {standing:?}");
            questions.extend(trust.question());
        }
        assert!((9..=11).contains(&questions.len()), "{questions:?}");
        assert_eq!(trust.standing(20_000, None, said(15_000, false)), None);
        assert!(!trust.is_leaving());
    }

    #[test]
    fn who_waits_for_an_empty_replica_waits_for_a_shut_gate_unless_it_stays() {
        let (first, later) = (order(5_000), order(6_000));
        let ids = |number: Option<Drain>| number.map(|order| order.id);
        let obeyed = Standing::Obeyed(first.unwrap());
        assert_eq!([obeyed.waited_for(first, false), obeyed.waited_for(first, true)], [None, ids(first)]);
        assert_eq!([obeyed.waited_for(later, true), obeyed.waited_for(None, true)], [ids(later), ids(first)]);
        assert_eq!(Standing::Ignored.waited_for(later, false), ids(later));
        assert_eq!(Standing::Doubted.waited_for(later, true), None);
    }

    #[test]
    fn where_the_api_server_says_nothing_the_order_is_obeyed() {
        let mut trust = Trust::default();
        let standing = |trust: &mut Trust, now_ms, at_ms| trust.standing(now_ms, order(at_ms), None);
        assert_eq!(standing(&mut trust, 5_000, 5_000), Some(Standing::Doubted));
        assert_eq!(standing(&mut trust, 8_499, 8_000), Some(Standing::Doubted), "a later order begins no new doubt");
        assert_eq!(standing(&mut trust, 8_500, 8_000), Some(Standing::Obeyed(order(8_000).unwrap())));
        let back = trust.standing(9_000, order(8_000), said(8_600, false));
        assert_eq!(back, Some(Standing::Ignored), "it is back, and knows of no end");
    }

    #[test]
    fn an_order_reads_back_and_an_old_one_shuts_at_once() {
        let drain = Drain { id: 7, open_ms: 300, ends: true };
        assert_eq!(serde_json::from_str::<Drain>(&serde_json::to_string(&drain).unwrap()).unwrap(), drain);
        let old: Drain = serde_json::from_str(r#"{"drain":7}"#).unwrap();
        assert!(old.shuts(0) && !old.ends);
    }
}
