//! What the gate remembers for the day of a stall (I7): which requests were answered lately, which broke off, and which it must refuse.
//! Bounded, no clock.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use vitals::observation::Ms;

use super::print::Print;

/// Different requests whose last success is remembered.
const ANSWERED_MAX: usize = 1_024;
/// Requests that broke off, and how long they are remembered at least.
const BROKEN_MAX: usize = 128;
const BROKEN_MS: Ms = 10_000;
/// Who comes after an engine broke off its requests, and so soon, was not with it then: a front end that outlives its engine ends all of these
/// by a 500 as well.
pub(super) const BREAK_MS: Ms = 10_000;

/// A request that must not reach the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Poison {
    /// Its fingerprint, 16 hex digits.
    pub request: String,
    /// `CLOCK_MONOTONIC`, so long before the last stall as it stays refused after it: one that succeeded here since is not refused.
    pub since_ms: Ms,
}

/// A request that was in flight when it was asked for, or had just broken off.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspect {
    pub request: String,
    /// When such a request was last answered whole here.
    pub answered_ms: Option<Ms>,
}

/// The gate's memory of prints.
#[derive(Debug, Default)]
pub struct Memory {
    /// Oldest first; each print once.
    answered: VecDeque<(Print, Ms)>,
    broken: VecDeque<(Print, Ms)>,
    /// When the engine began to break requests off, the last time that it did.
    broke_ms: Option<Ms>,
}

impl Memory {
    /// The engine answered such a request whole.
    pub fn answered(&mut self, print: Print, now_ms: Ms) {
        if let Some(at) = self.answered.iter().position(|(known, _)| *known == print) {
            self.answered.remove(at);
        } else if self.answered.len() == ANSWERED_MAX {
            self.answered.pop_front();
        }
        self.answered.push_back((print, now_ms));
    }

    /// The engine broke off such a request, or its client gave it up.
    pub fn broke(&mut self, print: Print, now_ms: Ms) {
        if self.broken.len() == BROKEN_MAX {
            self.broken.pop_front();
        }
        self.broken.push_back((print, now_ms));
    }

    /// The engine broke off a request that had gone to it at `forwarded_ms`, when it had last delivered at `delivered_ms`. One that came only
    /// behind such a break is nobody's suspect, and would push those out that were there.
    pub fn broke_off(&mut self, print: Option<Print>, forwarded_ms: Ms, delivered_ms: Option<Ms>, now_ms: Ms) {
        let goes_on =
            |began: &Ms| delivered_ms.is_none_or(|at| at <= *began) && forwarded_ms.saturating_sub(*began) < BREAK_MS;
        let began = *self.broke_ms.insert(self.broke_ms.filter(goes_on).unwrap_or(now_ms));
        if let Some(print) = print.filter(|_| forwarded_ms <= began) {
            self.broke(print, now_ms);
        }
    }

    fn answered_ms(&self, print: Print) -> Option<Ms> {
        self.answered.iter().find(|(known, _)| *known == print).map(|(_, at_ms)| *at_ms)
    }

    /// Must such a request be refused?
    pub fn refuses(&self, print: Print, poison: &[Poison]) -> bool {
        let listed = poison.iter().find(|one| Print::read(&one.request) == Some(print));
        listed.is_some_and(|one| self.answered_ms(print).is_none_or(|at_ms| at_ms < one.since_ms))
    }

    /// Who could have stalled the engine: what is in flight (newest first), and what broke off since it last delivered. Those that never
    /// succeeded here come first, for not all may be told.
    pub fn suspects(&self, open: impl Iterator<Item = Print>, delivered_ms: Option<Ms>, now_ms: Ms) -> Vec<Suspect> {
        let since_ms = delivered_ms.unwrap_or(0).min(now_ms.saturating_sub(BROKEN_MS));
        let broken = self.broken.iter().rev().filter(|(_, at_ms)| *at_ms >= since_ms).map(|(print, _)| *print);
        let mut prints: Vec<Print> = Vec::new();
        for print in open.chain(broken) {
            if !prints.contains(&print) {
                prints.push(print);
            }
        }
        let told = |print: Print| Suspect { request: print.to_string(), answered_ms: self.answered_ms(print) };
        let mut suspects: Vec<Suspect> = prints.into_iter().map(told).collect();
        suspects.sort_by_key(|suspect| suspect.answered_ms);
        suspects.truncate(crds::poison::IN_FLIGHT_MAX);
        suspects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poison(print: u64, since_ms: Ms) -> [Poison; 1] {
        [Poison { request: Print(print).to_string(), since_ms }]
    }

    fn prints(suspects: &[Suspect]) -> Vec<u64> {
        suspects.iter().map(|one| Print::read(&one.request).unwrap().0).collect()
    }

    #[test]
    fn what_succeeded_here_since_the_stalls_is_served() {
        let mut memory = Memory::default();
        assert!(memory.refuses(Print(1), &poison(1, 500)) && !memory.refuses(Print(2), &poison(1, 500)));
        memory.answered(Print(1), 499);
        assert!(memory.refuses(Print(1), &poison(1, 500)));
        memory.answered(Print(1), 500);
        assert!(!memory.refuses(Print(1), &poison(1, 500)));
    }

    #[test]
    fn suspects_are_in_flight_or_broke_off_in_the_stall_and_strangers_come_first() {
        let mut memory = Memory::default();
        memory.answered(Print(3), 7);
        memory.broke(Print(8), 39_999);
        memory.broke(Print(9), 40_000);
        let open = || [3, 4, 3].map(Print).into_iter();
        assert_eq!(prints(&memory.suspects(open(), Some(45_000), 50_000)), [4, 9, 3], "broken in the last 10 s");
        assert_eq!(prints(&memory.suspects(open(), Some(20_000), 50_000)), [4, 9, 8, 3], "since it last delivered");
        assert_eq!(memory.suspects(open(), None, 50_000).pop().unwrap().answered_ms, Some(7));
    }

    #[test]
    fn nothing_grows_without_bound_and_the_oldest_goes_first() {
        let mut memory = Memory::default();
        (0..5_000).for_each(|n| memory.answered(Print(n), n));
        (0..5_000).for_each(|n| memory.broke(Print(n), n));
        memory.answered(Print(4_000), 6_000);
        assert_eq!((memory.answered.len(), memory.broken.len()), (ANSWERED_MAX, BROKEN_MAX));
        assert_eq!((memory.answered_ms(Print(0)), memory.answered_ms(Print(4_000))), (None, Some(6_000)));
        let open = (0..500).map(Print);
        assert_eq!(memory.suspects(open, Some(0), 9_000).len(), crds::poison::IN_FLIGHT_MAX);
    }
}
