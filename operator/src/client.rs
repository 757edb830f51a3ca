//! Every call to the API server goes through here, with its own deadline and its own retry policy.
//!
//! kube's client as it comes would (RELIABILITY §7): repeat any verb, POST included, on 429/503/504 up to 15 times with a
//! `Retry-After` that it obeys without limit, and wait for ever for an answer that never comes. So `default_retry` is off;
//! a verb has a deadline over all its tries; only idempotent verbs are tried again, and `Retry-After` is capped.
//! A write needs leadership at each try (P14): it begins while the lease is safe and its deadline ends before expiry.

use std::{fmt::Debug, future::Future, sync::Arc, time::Duration};

use kube::{
    Api, Client, Resource,
    api::{DeleteParams, GetParams, ListParams, Patch, PatchParams, PostParams, Preconditions},
    core::{ApiResource, DynamicObject, ObjectList, Request},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout_at};

use crate::{
    controllers::{
        inference_deployment::{elsewhere::Elsewhere, ledger::Ledger, proofs::Proofs, repairs::Repairs},
        nodes::Known,
    },
    leader::Leadership,
    metrics::Metrics,
    wall::Wall,
};

/// Field manager of everything that the operator applies.
pub const FIELD_MANAGER: &str = "truebeat-operator";
const TRIES_MAX: u32 = 3;
/// Objects of a list that is read page by page.
const PAGE: u32 = 500;
const PAUSE_MIN: Duration = Duration::from_millis(200);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What a call does; decides deadline, retries, and whether it needs leadership.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Get,
    List,
    /// Of a name that the caller chose: a repeat is a 409 and creates nothing.
    Create,
    /// Server-side apply, or a patch that sets values: repeating it changes nothing.
    Patch,
    /// Carries a resourceVersion. Never repeated: after a lost answer the repeat would be a 409 and be misread.
    Replace,
    /// Carries a UID, where something was decided by a look its version as well; a repeat finds nothing to do.
    Delete,
}

impl Verb {
    /// Over all tries. Writes end well before a lease that was safe at their start can expire.
    pub fn deadline(self) -> Duration {
        match self {
            Verb::List => Duration::from_secs(10),
            Verb::Get | Verb::Create | Verb::Patch | Verb::Replace | Verb::Delete => Duration::from_secs(4),
        }
    }

    fn writes(self) -> bool {
        matches!(self, Verb::Create | Verb::Patch | Verb::Replace | Verb::Delete)
    }

    /// The label in metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Create => "create",
            Verb::Patch => "patch",
            Verb::Replace => "replace",
            Verb::Delete => "delete",
        }
    }
}

/// Why a call gave no result.
#[derive(Debug, Error)]
pub enum CallError {
    #[error("{verb} {subject}: no answer within {deadline_s} s")]
    Deadline { verb: &'static str, subject: String, deadline_s: u64 },
    #[error("{verb} {subject}: not the leader (any more)")]
    NotLeader { verb: &'static str, subject: String },
    #[error("{verb} {subject}: {}", brief(source))]
    Api { verb: &'static str, subject: String, source: Box<kube::Error> },
}

impl CallError {
    /// The HTTP status that the server answered, if it did.
    pub fn code(&self) -> Option<u16> {
        match self {
            CallError::Api { source, .. } => status_of(source).map(|status| status.code),
            _ => None,
        }
    }

    /// Was another object meant than the one that is there: gone, changed or replaced meanwhile? The server says 409 where a UID does not
    /// fit; one that says 422 names the field, for by that code policies of admission refuse what is sent.
    pub fn missed(&self) -> bool {
        let CallError::Api { source, .. } = self else { return false };
        let Some(status) = status_of(source) else { return false };
        let causes = status.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
        match status.code {
            404 | 409 => true,
            422 => !causes.is_empty() && causes.iter().all(|cause| cause.field == "metadata.uid"),
            _ => false,
        }
    }

    /// Will trying again alone not help? A refusal by rights, admission or schema.
    pub fn lasting(&self) -> bool {
        matches!(self.code(), Some(400 | 403 | 405 | 422))
    }
}

/// The API server with deadlines. Cheap to clone.
#[derive(Clone)]
pub struct Calls {
    pub client: Client,
    pub leadership: Arc<Leadership>,
    pub metrics: Arc<Metrics>,
    /// Times that are written into the API.
    pub wall: Wall,
    /// What holds for all deployments together.
    pub fleet: Arc<FleetPolicy>,
}

/// What holds for all deployments together (I2). The figures that it is compared with stand in the API.
#[derive(Debug)]
pub struct FleetPolicy {
    /// Whoever holds this may grant.
    pub turn: tokio::sync::Mutex<()>,
    /// What all hold, between two looks at all.
    pub ledger: Ledger,
    /// Where something waits for a record that the API refuses.
    pub proofs: Proofs,
    /// Who comes up again from a restart that stands in no budget.
    pub elsewhere: Elsewhere,
    /// What somebody changes back each time.
    pub repairs: Repairs,
    /// Only this namespace; `None`: all of them.
    pub namespace: Option<String>,
    /// At most so many percent of all replicas, but always one, in a granted recovery at once.
    pub restarts_percent: usize,
    /// No grant while more than so many percent of all replicas, and at least five, are fenced.
    pub hold_percent: usize,
    /// At most so many granted recoveries at once on one node; 0: no limit.
    pub node_restarts_max: usize,
    /// At most so many in one failure domain; 0: no limit.
    pub domain_restarts_max: usize,
    /// The node label that names a failure domain.
    pub domain_key: String,
    /// What is known of nodes.
    pub nodes: Known,
}

impl Default for FleetPolicy {
    fn default() -> Self {
        FleetPolicy {
            turn: tokio::sync::Mutex::new(()),
            ledger: Ledger::default(),
            proofs: Proofs::default(),
            elsewhere: Elsewhere::default(),
            repairs: Repairs::default(),
            namespace: None,
            restarts_percent: 10,
            hold_percent: 30,
            node_restarts_max: 2,
            domain_restarts_max: 0,
            domain_key: "topology.kubernetes.io/zone".to_owned(),
            nodes: Known::default(),
        }
    }
}

impl Calls {
    /// Calls by `client`, with the machine's own wall clock.
    pub fn new(client: Client, leadership: Arc<Leadership>, metrics: Arc<Metrics>) -> Self {
        Calls { client, leadership, metrics, wall: Wall::system(), fleet: Arc::default() }
    }

    /// One object; `None`: there is none.
    pub async fn get<K>(&self, api: &Api<K>, name: &str) -> Result<Option<K>, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        self.call(Verb::Get, name, || api.get_opt(name)).await
    }

    /// One object of any kind, as the server writes it: what is compared field by field needs no type.
    pub async fn get_json(&self, of: &ApiResource, namespace: &str, name: &str) -> Result<Option<Value>, CallError> {
        let requests = Request::new(DynamicObject::url_path(of, Some(namespace)));
        let send = || async {
            let request = requests.get(name, &GetParams::default()).map_err(kube::Error::BuildRequest)?;
            match self.client.request::<Value>(request).await {
                Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
                answer => answer.map(Some),
            }
        };
        self.call(Verb::Get, name, send).await
    }

    /// All objects with these labels. A list without a resourceVersion is as fresh as the store.
    pub async fn list<K>(&self, api: &Api<K>, labels: &str) -> Result<ObjectList<K>, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let params = ListParams::default().labels(labels);
        self.call(Verb::List, labels, || api.list(&params)).await
    }

    /// What `take` makes of each object with these labels, page by page: what a whole list weighs (5,000 nodes are a hundred megabytes) is never
    /// held at once.
    pub async fn list_each<K, T>(&self, api: &Api<K>, labels: &str, take: impl Fn(&K) -> T) -> Result<Vec<T>, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let mut params = ListParams::default().labels(labels).limit(PAGE);
        let mut all = Vec::new();
        loop {
            let page = self.call(Verb::List, labels, || api.list(&params)).await?;
            all.extend(page.items.iter().map(&take));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(all),
            }
        }
    }

    /// Creates `object` under the name that it bears; one of that name that is there already is fine.
    pub async fn create<K>(&self, api: &Api<K>, name: &str, object: &K) -> Result<(), CallError>
    where
        K: Clone + DeserializeOwned + Debug + Serialize,
    {
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        match self.call(Verb::Create, name, || api.create(&params, object)).await {
            Err(error) if error.code() != Some(409) => Err(error),
            _ => Ok(()),
        }
    }

    /// Server-side apply of the fields in `body`.
    pub async fn apply<K>(&self, api: &Api<K>, name: &str, body: &impl Body) -> Result<K, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(body);
        self.call(Verb::Patch, name, || api.patch(name, &params, &patch)).await
    }

    /// Server-side apply of a status.
    pub async fn apply_status<K>(&self, api: &Api<K>, name: &str, body: &impl Body) -> Result<K, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(body);
        self.call(Verb::Patch, name, || api.patch_status(name, &params, &patch)).await
    }

    /// Merge patch; `body` names the UID of the object it means.
    pub async fn merge<K>(&self, api: &Api<K>, name: &str, body: &impl Body) -> Result<K, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(body);
        self.call(Verb::Patch, name, || api.patch(name, &params, &patch)).await
    }

    /// Replaces the status under the resourceVersion in `object`: 409 if anybody wrote in between.
    pub async fn replace_status<K>(&self, api: &Api<K>, name: &str, object: &K) -> Result<K, CallError>
    where
        K: Resource + Clone + DeserializeOwned + Debug + Serialize,
    {
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        self.call(Verb::Replace, name, || api.replace_status(name, &params, object)).await
    }

    /// Deletes exactly the object with this UID (P8), and where a version is named only as long as nobody has changed it since. `false`: that
    /// one is not there any more, or on its way already.
    pub async fn delete<K>(&self, api: &Api<K>, name: &str, exactly: (&str, Option<&str>)) -> Result<bool, CallError>
    where
        K: Clone + DeserializeOwned + Debug,
    {
        let (uid, version) = exactly;
        let exactly = Preconditions { uid: Some(uid.to_owned()), resource_version: version.map(str::to_owned) };
        let params = DeleteParams::background().preconditions(exactly);
        match self.call(Verb::Delete, name, || api.delete(name, &params)).await {
            Err(error) if matches!(error.code(), Some(404 | 409)) => Ok(false),
            other => other.map(|_| true),
        }
    }

    async fn call<T, Fut>(&self, verb: Verb, subject: &str, send: impl Fn() -> Fut) -> Result<T, CallError>
    where
        Fut: Future<Output = kube::Result<T>>,
    {
        let result = self.tries(verb, subject, send).await;
        let outcome = match &result {
            Ok(_) => "ok",
            Err(CallError::Deadline { .. }) => "deadline",
            Err(CallError::NotLeader { .. }) => "not_leader",
            Err(CallError::Api { .. }) => "error",
        };
        self.metrics.api_calls.with_label_values(&[verb.as_str(), outcome]).inc();
        result
    }

    async fn tries<T, Fut>(&self, verb: Verb, subject: &str, send: impl Fn() -> Fut) -> Result<T, CallError>
    where
        Fut: Future<Output = kube::Result<T>>,
    {
        let (name, deadline) = (verb.as_str(), Instant::now() + verb.deadline());
        let mut failures = 0;
        loop {
            if verb.writes() && !self.leadership.may_write() {
                return Err(CallError::NotLeader { verb: name, subject: subject.to_owned() });
            }
            let source = match timeout_at(deadline, send()).await {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(source)) => source,
                Err(_) => {
                    let deadline_s = verb.deadline().as_secs();
                    return Err(CallError::Deadline { verb: name, subject: subject.to_owned(), deadline_s });
                }
            };
            failures += 1;
            match pause_after(verb, failures, &source) {
                Some(pause) if Instant::now() + pause < deadline => sleep(pause).await,
                _ => return Err(CallError::Api { verb: name, subject: subject.to_owned(), source: Box::new(source) }),
            }
        }
    }
}

/// What a patch may carry.
pub trait Body: Serialize + Debug {}
impl<T: Serialize + Debug> Body for T {}

/// How long to wait before the next try; `None`: no further try.
fn pause_after(verb: Verb, failures: u32, error: &kube::Error) -> Option<Duration> {
    if verb == Verb::Replace || failures >= TRIES_MAX {
        return None;
    }
    let asked = match status_of(error) {
        Some(status) if matches!(status.code, 429 | 500 | 502 | 503 | 504) => {
            Duration::from_secs(status.details.as_ref().map_or(0, |d| u64::from(d.retry_after_seconds)))
        }
        Some(_) => return None,
        None => match error {
            kube::Error::HyperError(_) | kube::Error::Service(_) => Duration::ZERO, // the connection broke
            _ => return None,
        },
    };
    Some(asked.max(PAUSE_MIN * 2_u32.pow(failures - 1)).min(PAUSE_MAX))
}

/// The server's own words; kube's text would repeat them as a debug print.
fn brief(error: &kube::Error) -> String {
    match status_of(error) {
        Some(status) => format!("{} ({})", status.message, status.code),
        None => error.to_string(),
    }
}

fn status_of(error: &kube::Error) -> Option<&kube::core::Status> {
    match error {
        kube::Error::Api(status) => Some(status),
        _ => None,
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
