//! The decision of leader election, pure. A lease is expired when *we* have seen no change of it for its whole duration
//! by our own monotonic clock; the times inside it are other machines' and are never compared with ours.

use std::time::Duration;

/// How long a lease lasts after its last renewal.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// How often a leader renews; each pause is jittered by 20 %.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// How often a candidate looks: a lease that is given back has a new holder within this.
pub const WAIT_PERIOD: Duration = Duration::from_secs(1);

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
    /// What the identities of its forerunners begin with: earlier processes of the same container, dead for certain.
    forerunners: Option<String>,
    seen: Option<(Record, Duration)>,
    /// When a record was there last.
    looked: Duration,
}

impl Candidate {
    /// `identity` must be unique among the candidates, across restarts as well.
    pub fn new(identity: &str) -> Self {
        Candidate { identity: identity.to_owned(), ..Candidate::default() }
    }

    /// Whose lease it may take over at once: of holders whose name begins with `prefix`.
    pub fn with_forerunners(self, prefix: Option<String>) -> Self {
        Candidate { forerunners: prefix, ..self }
    }

    /// Takes in what the API holds at `now` (monotonic) and decides. `None`: there is no lease object.
    pub fn decide(&mut self, record: Option<Record>, now: Duration) -> Decision {
        let Some(record) = record else { return self.without_lease(now) };
        let inherited = self.inherits(&record);
        let first_seen = match &self.seen {
            Some((seen, at)) if *seen == record => *at,
            _ => now,
        };
        let decision = if record.holder == self.identity {
            Decision::Renew
        } else if record.holder.is_empty()
            || inherited
            || now.saturating_sub(first_seen) >= record.duration.max(LEASE_DURATION)
        {
            Decision::Take
        } else {
            Decision::Wait
        };
        self.seen = Some((record, first_seen));
        self.looked = now;
        decision
    }

    /// Was it held by a forerunner? Only the first look may find that: whoever takes the lease later under such a name is
    /// alive, and no forerunner.
    fn inherits(&self, record: &Record) -> bool {
        self.seen.is_none()
            && self.forerunners.as_ref().is_some_and(|prefix| record.holder.starts_with(prefix.as_str()))
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

/// What the identities of one container's processes begin with, if it is certain that there is one at a time: the process
/// is the first of its PID namespace (`pid` 1), so whatever the container ran before was ended by the kernel with its own
/// first process, and the UID names the pod among all that ever had its name.
pub fn container(pod: &str, pod_uid: Option<&str>, pid: u32) -> Option<String> {
    pod_uid.filter(|uid| pid == 1 && !uid.is_empty()).map(|uid| format!("{pod}_{uid}_"))
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

    #[test]
    fn a_restarted_container_takes_its_own_lease_back_at_once() {
        let place = || container("op-x", Some("uid-1"), 1);
        assert_eq!(place().as_deref(), Some("op-x_uid-1_"));
        let mut successor = Candidate::new("op-x_uid-1_2").with_forerunners(place());
        assert_eq!(successor.decide(Some(record("op-x_uid-1_1", 7)), s(0)), Decision::Take);
        // the same name later belongs to somebody who lives
        assert_eq!(successor.decide(Some(record("op-x_uid-1_3", 9)), s(2)), Decision::Wait);
        for stranger in ["op-x_uid-2_1", "op-y_uid-1_1"] {
            let mut candidate = Candidate::new("op-x_uid-1_2").with_forerunners(place());
            assert_eq!(candidate.decide(Some(record(stranger, 7)), s(0)), Decision::Wait, "{stranger}");
        }
        assert_eq!(container("op-x", Some("uid-1"), 40), None, "somebody's shell in the container");
        assert_eq!((container("op-x", None, 1), container("op-x", Some(""), 1)), (None, None));
        let mut laptop = Candidate::new("truebeat-operator_40-5");
        assert_eq!(laptop.decide(Some(record("truebeat-operator_39-4", 7)), s(0)), Decision::Wait);
    }

    /// Two candidates against one store with versions; each writes only under the version that it read.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Read(usize),
        Write(usize),
        /// SIGKILL, and the container's next process.
        Restart(usize),
        Sleep(u8),
    }

    fn nth_process(place: usize, n: usize) -> Candidate {
        let pod = ["a", "b"][place];
        Candidate::new(&format!("{pod}_uid_{n}")).with_forerunners(container(pod, Some("uid"), 1))
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..2_usize).prop_map(Step::Read),
            (0..2_usize).prop_map(Step::Write),
            (0..2_usize).prop_map(Step::Restart),
            (0..20_u8).prop_map(Step::Sleep)
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn never_two_that_may_write(steps in steps()) {
            let mut candidates = [nth_process(0, 0), nth_process(1, 0)];
            let mut processes = 0;
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
                    Step::Restart(i) => {
                        processes += 1;
                        candidates[i] = nth_process(i, processes);
                        (pending[i], until[i]) = (None, s(0));
                    }
                    Step::Write(i) => {
                        let Some(read) = pending[i].take() else { continue };
                        if read.version == stored.version {
                            stored = record(&candidates[i].identity, stored.version.parse::<u32>().unwrap() + 1);
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
