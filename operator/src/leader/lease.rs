//! The decision of leader election, pure. A lease is expired when *we* have seen no change of it for its whole duration
//! by our own monotonic clock; the times inside it are other machines', and nothing is taken because of them. (At a first look a
//! time that is long past is a reason to wait for longer.)
//!
//! The installation ships a Lease that nobody holds, and whoever finds that one takes it. So a Lease that is not there was
//! deleted, perhaps a moment ago and under a leader that does not know yet. It is claimed: made anew in our name, so that
//! nobody else can renew it, and without the right to write until every older right has run out.

use std::time::Duration;

use crds::episode::REPEATED_EVERY;
use jiff::{SignedDuration, Timestamp};

use super::RENEW_DEADLINE;

/// How long a lease lasts after its last renewal.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// How often a leader renews; each pause is jittered by 20 %.
pub const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// How often a candidate looks: a lease that is given back has a new holder within this.
pub const WAIT_PERIOD: Duration = Duration::from_secs(1);
/// Nobody leads for so long after the API server's store went back in time (A21): by then every agent has repeated its word, and what
/// the operator would act on is no word of the past any more.
pub const WENT_BACK_PAUSE: Duration = REPEATED_EVERY.saturating_add(LEASE_DURATION);

/// A Lease that is found, and was not renewed for longer than this, tells of a time in which nobody led, or is a state of the past. No backup that
/// anybody restores is much younger; and a container that crashed is back sooner, until its pauses have grown to this.
const SILENT_MAX: SignedDuration = SignedDuration::from_mins(5);

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
    /// What tells an older state of it from a younger one.
    pub age: Age,
}

/// How far a Lease has come in its life.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Age {
    /// Of the object: one that was deleted and made anew begins again.
    pub uid: String,
    /// How often it has changed hands.
    pub transitions: i32,
    /// When it was renewed last, by its holder's own clock.
    pub renewed: Option<Timestamp>,
}

impl Record {
    /// Is this a state of the same Lease that `later` followed? A store that is read with a quorum never shows one again, unless it was
    /// restored from a backup. (So does a holder whose clock is set back, which costs a pause and nothing else.)
    fn precedes(&self, later: &Record) -> bool {
        let (ours, theirs) = (&self.age, &later.age);
        ours.uid == theirs.uid && (ours.transitions, ours.renewed) < (theirs.transitions, theirs.renewed)
    }
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
    /// The last state that was read or written, whichever is later.
    newest: Option<Record>,
    /// Until when nobody leads because the store went back, or may have.
    paused_until: Option<Duration>,
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

    /// The API took this from us.
    pub fn wrote(&mut self, record: Record) {
        self.newest = Some(record);
    }

    /// Does it pause at `now`, because the store went back, or may have?
    pub fn paused(&self, now: Duration) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// The first look, at `now` (monotonic) and at `wall` by our own clock: we have seen nothing that this record could be older than. Where it was
    /// not renewed for long the store may have gone back before we came, and whoever only claims it may have seen that, and may not live to
    /// the end of the pause. So nobody leads for as long as agents take to repeat their word. Gives whether that is so; no further look does
    /// anything. A clock that is wrong makes the pause be one too many, or be missed; it never gives anybody a right.
    pub fn meet(&mut self, record: &Record, now: Duration, wall: Timestamp) -> bool {
        let claimed = !record.acquired && !record.holder.is_empty();
        let silent = record.age.renewed.is_some_and(|renewed| wall.duration_since(renewed) > SILENT_MAX);
        let doubtful = self.newest.is_none() && (claimed || silent);
        if doubtful {
            self.paused_until = Some(now + WENT_BACK_PAUSE);
        }
        doubtful
    }

    /// Takes in what the API holds at `now` (monotonic) and decides. `None`: there is no lease object.
    pub fn decide(&mut self, record: Option<Record>, now: Duration) -> Decision {
        if let Some(record) = &record {
            if self.newest.as_ref().is_some_and(|newest| record.precedes(newest)) {
                self.paused_until = Some(now + WENT_BACK_PAUSE);
            }
            self.newest = Some(record.clone());
        }
        match self.elect(record, now) {
            Decision::Take | Decision::Renew if self.paused(now) => Decision::Claim,
            decision => decision,
        }
    }

    fn elect(&mut self, record: Option<Record>, now: Duration) -> Decision {
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
#[path = "lease_tests.rs"]
mod tests;
