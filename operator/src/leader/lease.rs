//! The decision of leader election, pure. A lease is expired when *we* have seen no change of it for its whole duration
//! by our own monotonic clock; the times inside it are other machines' and are never compared with ours.

use std::time::Duration;

/// How long a lease lasts after its last renewal.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// How often a leader renews and a candidate looks; each pause is jittered by 20 %.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);

/// The parts of a Lease object that matter.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// Empty: nobody.
    pub holder: String,
    /// Changes with every renewal.
    pub version: String,
    /// How long the holder wants it to last.
    pub duration: Duration,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Write it in our name: it is free or expired.
    Take,
    /// Write it anew: it is ours.
    Renew,
    /// Somebody else has it.
    Wait,
}

/// What one candidate remembers of the lease: the last record and when it was first seen.
#[derive(Debug, Default)]
pub struct Candidate {
    identity: String,
    seen: Option<(Record, Duration)>,
    /// When a record was there last.
    looked: Duration,
}

impl Candidate {
    /// `identity` must be unique among the candidates, across restarts as well.
    pub fn new(identity: &str) -> Self {
        Candidate { identity: identity.to_owned(), seen: None, looked: Duration::ZERO }
    }

    /// Takes in what the API holds at `now` (monotonic) and decides. `None`: there is no lease object.
    pub fn decide(&mut self, record: Option<Record>, now: Duration) -> Decision {
        let Some(record) = record else { return self.without_lease(now) };
        let first_seen = match &self.seen {
            Some((seen, at)) if *seen == record => *at,
            _ => now,
        };
        let decision = if record.holder == self.identity {
            Decision::Renew
        } else if record.holder.is_empty() || now.saturating_sub(first_seen) >= record.duration.max(LEASE_DURATION) {
            Decision::Take
        } else {
            Decision::Wait
        };
        self.seen = Some((record, first_seen));
        self.looked = now;
        decision
    }

    /// There is no Lease. Its holder may not know yet that somebody deleted it, so whoever saw it in another's name waits
    /// until that right has run out, counted from the last look.
    fn without_lease(&mut self, now: Duration) -> Decision {
        let other = self
            .seen
            .as_ref()
            .map(|(record, _)| record)
            .filter(|record| !record.holder.is_empty() && record.holder != self.identity);
        match other {
            Some(record) if now.saturating_sub(self.looked) < record.duration.max(LEASE_DURATION) => Decision::Wait,
            _ => Decision::Take,
        }
    }
}

/// A pause of `period` ± 20 %, by `seed`, so that candidates do not march in step.
pub fn jittered(period: Duration, seed: u64) -> Duration {
    // splitmix64: one multiplication chain is all the randomness that a pause needs
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let permille = 800 + (z ^ (z >> 31)) % 401;
    Duration::from_millis(u64::try_from(period.as_millis()).unwrap_or(u64::MAX).saturating_mul(permille) / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(holder: &str, version: u32) -> Record {
        Record { holder: holder.to_owned(), version: version.to_string(), duration: LEASE_DURATION }
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn free_and_own_leases_are_taken_at_once() {
        let mut candidate = Candidate::new("a");
        assert_eq!(candidate.decide(None, s(0)), Decision::Take);
        assert_eq!(candidate.decide(Some(record("", 1)), s(0)), Decision::Take);
        assert_eq!(candidate.decide(Some(record("a", 2)), s(0)), Decision::Renew);
    }

    #[test]
    fn a_foreign_lease_expires_by_our_own_clock_alone() {
        let mut candidate = Candidate::new("a");
        assert_eq!(candidate.decide(Some(record("b", 1)), s(100)), Decision::Wait);
        assert_eq!(candidate.decide(Some(record("b", 1)), s(114)), Decision::Wait);
        assert_eq!(candidate.decide(Some(record("b", 2)), s(114)), Decision::Wait, "renewed: the clock starts anew");
        assert_eq!(candidate.decide(Some(record("b", 2)), s(128)), Decision::Wait);
        assert_eq!(candidate.decide(Some(record("b", 2)), s(129)), Decision::Take);
    }

    #[test]
    fn fault_b4_a_deleted_lease_is_not_up_for_grabs() {
        let mut candidate = Candidate::new("a");
        assert_eq!(candidate.decide(Some(record("b", 1)), s(100)), Decision::Wait);
        assert_eq!(candidate.decide(None, s(102)), Decision::Wait, "b does not know yet");
        assert_eq!((candidate.decide(None, s(114)), candidate.decide(None, s(115))), (Decision::Wait, Decision::Take));
        let mut holder = Candidate::new("b");
        assert_eq!(holder.decide(Some(record("b", 1)), s(100)), Decision::Renew);
        assert_eq!(holder.decide(None, s(102)), Decision::Take, "its own it makes anew at once");
    }

    #[test]
    fn a_holder_cannot_ask_for_less_than_the_safe_time() {
        let mut candidate = Candidate::new("a");
        let hasty = Record { duration: s(1), ..record("b", 1) };
        assert_eq!(candidate.decide(Some(hasty.clone()), s(0)), Decision::Wait);
        assert_eq!(candidate.decide(Some(hasty), s(14)), Decision::Wait);
    }

    /// Two candidates against one store with versions; each writes only under the version that it read.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Read(usize),
        Write(usize),
        Sleep(u8),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..2_usize).prop_map(Step::Read),
            (0..2_usize).prop_map(Step::Write),
            (0..20_u8).prop_map(Step::Sleep)
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn never_two_that_may_write(steps in steps()) {
            let mut candidates = [Candidate::new("a"), Candidate::new("b")];
            let (mut stored, mut now) = (record("", 0), s(0));
            let mut pending: [Option<Record>; 2] = [None, None];
            let mut until = [s(0), s(0)];
            for step in steps {
                match step {
                    Step::Sleep(seconds) => now += s(u64::from(seconds)),
                    Step::Read(i) => {
                        let decision = candidates[i].decide(Some(stored.clone()), now);
                        pending[i] = (decision != Decision::Wait).then(|| stored.clone());
                    }
                    Step::Write(i) => {
                        let Some(read) = pending[i].take() else { continue };
                        if read.version == stored.version {
                            stored = record(["a", "b"][i], stored.version.parse::<u32>().unwrap() + 1);
                            until[i] = now + crate::leader::RENEW_DEADLINE;
                        }
                    }
                }
                prop_assert!(!(now < until[0] && now < until[1]), "two leaders at {now:?}");
            }
        }

        #[test]
        fn jitter_stays_within_a_fifth(seed: u64) {
            let pause = jittered(RETRY_PERIOD, seed);
            prop_assert!(pause >= Duration::from_millis(1600) && pause <= Duration::from_millis(2400));
        }
    }
}
