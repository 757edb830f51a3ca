//! Runs the election: reads the Lease, decides, writes it under its resourceVersion (a 409 means that somebody else was
//! first). No forced apply: two forced appliers would both win. Nothing here is retried; the next round is the retry.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ObjectMeta, PostParams},
};
use tokio::time::{Instant, sleep, timeout};

use super::{
    Leadership,
    lease::{Age, Candidate, Decision, LEASE_DURATION, RETRY_PERIOD, Record, WAIT_PERIOD, WENT_BACK_PAUSE, jittered},
};

use crate::wall::Wall;

/// Name of the Lease.
pub const LEASE_NAME: &str = "truebeat-operator";
const CALL_DEADLINE: Duration = Duration::from_secs(3);

/// One candidate for the lease.
pub struct Elector {
    api: Api<Lease>,
    identity: String,
    leadership: Arc<Leadership>,
    candidate: Candidate,
    epoch: Instant,
    wall: Wall,
}

impl Elector {
    /// A candidate of this identity for the Lease in `namespace`.
    pub fn new(client: Client, namespace: &str, identity: &str, leadership: Arc<Leadership>) -> Self {
        let api = Api::namespaced(client, namespace);
        Elector {
            api,
            identity: identity.to_owned(),
            leadership,
            candidate: Candidate::new(identity),
            epoch: Instant::now(),
            wall: Wall::system(),
        }
    }

    /// The same with another wall clock; it dates the Lease, and tells a first look how old that is.
    pub fn with_wall(self, wall: Wall) -> Self {
        Elector { wall, ..self }
    }

    /// The same with the right to take over at once what holders of this prefix left behind (`lease::container`).
    pub fn with_forerunners(self, prefix: Option<String>) -> Self {
        Elector { candidate: self.candidate.with_forerunners(prefix), ..self }
    }

    /// Campaigns and renews for ever.
    pub async fn run(&mut self) {
        let mut seed =
            self.identity.bytes().fold(0, |seed: u64, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        loop {
            if let Err(error) = self.round().await {
                tracing::warn!(%error, "leader election: this round failed");
            }
            if !self.leadership.may_write() {
                self.leadership.lost();
            }
            seed = seed.wrapping_add(1);
            let period = if self.leadership.may_write() { RETRY_PERIOD } else { WAIT_PERIOD };
            sleep(jittered(period, seed)).await;
        }
    }

    /// Gives the lease back, so that a successor need not wait for it to expire.
    pub async fn release(&mut self) {
        let held = self.leadership.may_write();
        self.leadership.lost();
        if !held {
            return;
        }
        let released = async {
            let mut lease = self.api.get(LEASE_NAME).await?;
            if let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_ref() == Some(&self.identity))
            {
                spec.holder_identity = Some(String::new());
                self.api.replace(LEASE_NAME, &PostParams::default(), &lease).await?;
            }
            Ok::<(), kube::Error>(())
        };
        match timeout(CALL_DEADLINE, released).await {
            Ok(Ok(())) => tracing::info!("leader election: lease released"),
            Ok(Err(error)) => tracing::warn!(%error, "leader election: the lease was not released and will expire"),
            Err(_) => tracing::warn!("leader election: no answer in time, the lease will expire"),
        }
    }

    async fn round(&mut self) -> Result<(), RoundError> {
        let read = timeout(CALL_DEADLINE, self.api.get_opt(LEASE_NAME)).await.map_err(|_| RoundError::Deadline)?;
        let lease = read.map_err(|e| RoundError::Read(Box::new(e)))?;
        self.leadership.contact();
        let (found, now, pause_s) = (lease.as_ref().map(record), self.epoch.elapsed(), WENT_BACK_PAUSE.as_secs());
        if let Some(found) = found.as_ref().filter(|found| self.candidate.meet(found, now, self.wall.now())) {
            tracing::warn!(
                pause_s,
                renewed = found.age.renewed.map(tracing::field::display),
                "Lease {LEASE_NAME} was not renewed for long, or only claimed: no operator was there, or the API server's store was restored \
                 from a backup. Nothing is written meanwhile, until every agent has said anew how its engine is"
            );
        }
        let paused = self.candidate.paused(now);
        let decision = self.candidate.decide(found, now);
        if !paused && self.candidate.paused(now) {
            tracing::error!(
                pause_s,
                "Lease {LEASE_NAME} is older than it was: the API server's store was restored from a backup. Nobody leads and nothing is \
                 written meanwhile, until every agent has said anew how its engine is"
            );
        }
        match decision {
            Decision::Wait => {
                self.leadership.lost();
                Ok(())
            }
            decision => {
                if decision == Decision::Claim {
                    self.leadership.lost(); // whatever becomes of the request
                }
                if decision == Decision::Claim && lease.is_none() {
                    tracing::warn!("there is no Lease {LEASE_NAME}: claimed, and whoever held it is waited for, 15 s");
                }
                self.write(lease, decision).await
            }
        }
    }

    async fn write(&mut self, lease: Option<Lease>, decision: Decision) -> Result<(), RoundError> {
        // The right to write counts from before the request, whenever the answer comes.
        let sent = Instant::now();
        let wanted = renewed(lease.as_ref(), &self.identity, decision, self.wall.now());
        let params = PostParams::default();
        let written = async {
            match lease {
                Some(_) => self.api.replace(LEASE_NAME, &params, &wanted).await,
                None => self.api.create(&params, &wanted).await,
            }
        };
        match timeout(CALL_DEADLINE, written).await.map_err(|_| RoundError::Deadline)? {
            Ok(written) => {
                self.leadership.contact();
                self.candidate.wrote(record(&written));
                if decision != Decision::Claim {
                    self.candidate.renewed(sent.saturating_duration_since(self.epoch));
                    self.leadership.renewed_at(sent);
                }
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 409 => {
                self.leadership.lost();
                Ok(())
            }
            Err(error) => Err(RoundError::Write(Box::new(error))),
        }
    }
}

/// One round of the election came to nothing.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error("no answer within 3 s")]
    Deadline,
    #[error("read Lease {LEASE_NAME}: {0}")]
    Read(Box<kube::Error>),
    #[error("write Lease {LEASE_NAME}: {0}")]
    Write(Box<kube::Error>),
}

fn record(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).unwrap_or_default();
    Record {
        // one that was given back has an empty holder and the time of its last renewal
        unused: spec.holder_identity.is_none() && spec.renew_time.is_none(),
        acquired: spec.acquire_time.is_some(),
        age: Age {
            uid: lease.uid().unwrap_or_default(),
            transitions: spec.lease_transitions.unwrap_or_default(),
            renewed: spec.renew_time.map(|time| time.0),
        },
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.resource_version().unwrap_or_default(),
        duration: Duration::from_secs(seconds.min(60)),
    }
}

/// The lease in our name, under the resourceVersion of the one that was read.
fn renewed(lease: Option<&Lease>, identity: &str, decision: Decision, now: Timestamp) -> Lease {
    let mut spec = lease.and_then(|l| l.spec.clone()).unwrap_or_default();
    match decision {
        Decision::Take => {
            spec.acquire_time = Some(MicroTime(now));
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or_default().saturating_add(1));
        }
        Decision::Claim => spec.acquire_time = None, // what tells a claim from a lease
        Decision::Renew | Decision::Wait => {}
    }
    let metadata = lease.map_or_else(
        || ObjectMeta { name: Some(LEASE_NAME.to_owned()), ..ObjectMeta::default() },
        |l| l.metadata.clone(),
    );
    let spec = LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
        renew_time: Some(MicroTime(now)),
        ..spec
    };
    Lease { metadata, spec: Some(spec) }
}

#[cfg(test)]
#[path = "elector_tests.rs"]
mod tests;
