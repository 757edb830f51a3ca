//! The decision of leader election, pure. A lease is expired when *we* have seen no change of it for its whole duration
//! by our own monotonic clock; the times inside it are other machines' and are never compared with ours.
//!
//! The installation ships a Lease that nobody holds, and whoever finds that one takes it. So a Lease that is not there was
//! deleted, perhaps a moment ago and under a leader that does not know yet. It is claimed: made anew in our name, so that
//! nobody else can renew it, and without the right to write until every older right has run out.

use std::time::Duration;

use super::RENEW_DEADLINE;

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
    /// Nobody has held it since it was made: what an installation ships.
    pub unused: bool,
    /// Its holder has the right to write, or had it: it is more than a claim.
    pub acquired: bool,
}

/// What to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Write it in our name: it is free or expired.
    Take,
    /// Write it anew: it is ours.
    Renew,
    /// Write it in our name and go on waiting: an older right may not have run out yet.
    Claim,
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
    /// When we last asked for what made or kept it ours.
    renewed: Option<Duration>,
    /// Since when our claim is found standing.
    claimed: Option<Duration>,
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

    /// The write that made or kept the lease ours was sent at `sent`, and was heard of.
    pub fn renewed(&mut self, sent: Duration) {
        self.renewed = Some(sent);
    }

    /// Takes in what the API holds at `now` (monotonic) and decides. `None`: there is no lease object.
    pub fn decide(&mut self, record: Option<Record>, now: Duration) -> Decision {
        match record {
            // whoever has seen a holder takes an unused one for what somebody put in the place of the holder's
            Some(record) if !record.unused || self.seen.as_ref().is_none_or(|(seen, _)| seen.unused) => {
                self.with_lease(record, now)
            }
            _ => self.without_lease(now),
        }
    }

    fn with_lease(&mut self, record: Record, now: Duration) -> Decision {
        let inherited = self.inherits(&record);
        let first_seen = match &self.seen {
            Some((seen, at)) if *seen == record => *at,
            _ => now,
        };
        let own = record.holder == self.identity;
        self.renewed = self.renewed.filter(|_| own);
        self.claimed = (own && !record.acquired).then(|| self.claimed.unwrap_or(now));
        let over = |since: Duration| now.saturating_sub(since) >= record.duration.max(LEASE_DURATION);
        let decision = match self.claimed {
            Some(since) if over(since) => Decision::Take,
            Some(_) => Decision::Claim,
            None if own => Decision::Renew,
            None if record.holder.is_empty() || inherited || over(first_seen) => Decision::Take,
            None => Decision::Wait,
        };
        self.seen = Some((record, first_seen));
        decision
    }

    /// Was it held by a forerunner? Only the first look may find that: whoever takes the lease later under such a name is
    /// alive, and no forerunner.
    fn inherits(&self, record: &Record) -> bool {
        self.seen.is_none()
            && record.acquired
            && self.forerunners.as_ref().is_some_and(|prefix| record.holder.starts_with(prefix.as_str()))
    }

    /// There is no Lease any more, and whoever held it may not know yet. Only the last holder takes it anew at once, as long as
    /// nobody else can have followed it: since its last renewal, for one that was merely found in our name may have stood there
    /// for so long that another took it a moment later.
    fn without_lease(&mut self, now: Duration) -> Decision {
        self.claimed = None;
        let own = self.renewed.is_some_and(|at| now.saturating_sub(at) < RENEW_DEADLINE);
        if own { Decision::Take } else { Decision::Claim }
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
        Record {
            holder: holder.to_owned(),
            version: version.to_string(),
            duration: LEASE_DURATION,
            unused: false,
            acquired: true,
        }
    }

    /// What the installation ships.
    fn shipped() -> Record {
        Record { duration: Duration::ZERO, unused: true, acquired: false, ..record("", 1) }
    }

    fn claim(holder: &str, version: u32) -> Record {
        Record { acquired: false, ..record(holder, version) }
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn free_and_own_leases_are_taken_at_once() {
        let mut candidate = Candidate::new("a");
        assert_eq!(candidate.decide(Some(shipped()), s(0)), Decision::Take, "a first installation acts at once");
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
        assert_eq!(candidate.decide(None, s(116)), Decision::Claim, "b may have renewed a moment ago");
        for (at, wanted) in [(117, Decision::Claim), (131, Decision::Claim), (132, Decision::Take)] {
            assert_eq!(candidate.decide(Some(claim("a", 2)), s(at)), wanted, "{at}");
        }
        let mut holder = Candidate::new("b");
        assert_eq!(holder.decide(Some(record("b", 1)), s(100)), Decision::Renew);
        holder.renewed(s(100));
        assert_eq!(holder.decide(None, s(109)), Decision::Take, "its own it makes anew at once");
        assert_eq!(holder.decide(None, s(110)), Decision::Claim, "somebody may have followed it by now");
    }

    /// Seed 18249 of the simulator: the other one saw the same old lease run out, took it, and it was deleted under it.
    #[test]
    fn fault_b4_a_lease_that_was_found_and_not_renewed_may_have_been_followed() {
        let (mut first, mut second) = (Candidate::new("a"), Candidate::new("b"));
        first.renewed(s(100));
        assert_eq!(second.decide(Some(record("a", 1)), s(100)), Decision::Wait);
        assert_eq!(first.decide(Some(record("a", 1)), s(114)), Decision::Renew, "which nobody hears of");
        assert_eq!(second.decide(Some(record("a", 1)), s(115)), Decision::Take);
        assert_eq!(first.decide(None, s(116)), Decision::Claim, "b holds it, or held it a moment ago");
    }

    #[test]
    fn fault_b4_whoever_never_saw_the_lease_claims_it_and_waits() {
        let mut newcomer = Candidate::new("a");
        assert_eq!(newcomer.decide(None, s(100)), Decision::Claim);
        assert_eq!(newcomer.decide(Some(record("b", 1)), s(101)), Decision::Wait, "b was first to make it anew");
        assert_eq!(newcomer.decide(None, s(102)), Decision::Claim);
        assert_eq!(newcomer.decide(Some(claim("a", 2)), s(103)), Decision::Claim);
        assert_eq!(newcomer.decide(None, s(110)), Decision::Claim, "gone once more");
        assert_eq!(newcomer.decide(Some(claim("a", 3)), s(118)), Decision::Claim, "from the beginning");
        assert_eq!(newcomer.decide(Some(claim("a", 4)), s(133)), Decision::Take);
        assert_eq!(newcomer.decide(Some(record("a", 5)), s(134)), Decision::Renew);
    }

    #[test]
    fn fault_b4_a_claim_is_no_lease_to_take_back() {
        let mut successor = Candidate::new("op_uid_2").with_forerunners(container("op", Some("uid"), 1));
        assert_eq!(successor.decide(Some(claim("op_uid_1", 7)), s(0)), Decision::Wait);
    }

    #[test]
    fn fault_b4_a_lease_put_in_the_place_of_a_holders_is_a_deleted_one() {
        let mut candidate = Candidate::new("a");
        assert_eq!(candidate.decide(Some(record("b", 1)), s(100)), Decision::Wait);
        assert_eq!(candidate.decide(Some(shipped()), s(102)), Decision::Claim);
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

    /// Two candidates against one store with versions; each writes only under the version that it read, or where it found none
    /// and there is none.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Read(usize),
        Write(usize),
        /// SIGKILL, and the container's next process.
        Restart(usize),
        /// Somebody deletes the Lease.
        Delete,
        Sleep(u8),
    }

    fn nth_process(place: usize, n: usize) -> Candidate {
        let pod = ["a", "b"][place];
        Candidate::new(&format!("{pod}_uid_{n}")).with_forerunners(container(pod, Some("uid"), 1))
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0..2_usize).prop_map(Step::Read),
            4 => (0..2_usize).prop_map(Step::Write),
            2 => (0..2_usize).prop_map(Step::Restart),
            1 => Just(Step::Delete),
            4 => (0..20_u8).prop_map(Step::Sleep)
        ];
        proptest::collection::vec(step, 1..200)
    }

    /// The world of the property.
    struct World {
        candidates: [Candidate; 2],
        stored: Option<Record>,
        version: u32,
        now: Duration,
        /// What each has read and decided to write, and when: no call lasts longer than its deadline.
        pending: [Option<(Option<Record>, Decision, Duration)>; 2],
        until: [Duration; 2],
    }

    impl World {
        fn step(&mut self, step: Step, processes: &mut usize) {
            match step {
                Step::Sleep(seconds) => self.now += s(u64::from(seconds)),
                Step::Read(i) => {
                    let decision = self.candidates[i].decide(self.stored.clone(), self.now);
                    self.pending[i] = (decision != Decision::Wait).then(|| (self.stored.clone(), decision, self.now));
                }
                Step::Restart(i) => {
                    *processes += 1;
                    self.candidates[i] = nth_process(i, *processes);
                    (self.pending[i], self.until[i]) = (None, s(0));
                }
                Step::Delete => self.stored = None,
                Step::Write(i) => {
                    let Some((read, decision, at)) = self.pending[i].take() else { return };
                    if read == self.stored && self.now - at <= s(3) {
                        self.version += 1;
                        let written = if decision == Decision::Claim { claim } else { record };
                        self.stored = Some(written(&self.candidates[i].identity, self.version));
                        let right = if decision == Decision::Claim { s(0) } else { at + RENEW_DEADLINE };
                        self.until[i] = right;
                        if decision != Decision::Claim {
                            self.candidates[i].renewed(at);
                        }
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn never_two_that_may_write(steps in steps()) {
            let candidates = [nth_process(0, 0), nth_process(1, 0)];
            let (pending, until) = ([None, None], [s(0), s(0)]);
            let mut world = World { candidates, stored: Some(shipped()), version: 1, now: s(0), pending, until };
            let mut processes = 0;
            for step in steps {
                world.step(step, &mut processes);
                let (now, until) = (world.now, world.until);
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
