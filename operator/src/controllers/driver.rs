//! Runs the passes: watches every kind that matters, maps each event to the InferenceDeployment it belongs to, and makes
//! a pass over it when it is due, never two at once over the same one.
//!
//! Each watch has its own backoff and each InferenceDeployment its own. kube's controller would merge all watches under
//! one joint backoff, so that one missing right starves every other kind (RELIABILITY §7).

use std::{panic::AssertUnwindSafe, pin::Pin, sync::Arc, time::Duration};

use crds::{EngineIncident, InferenceDeployment, LABEL_DEPLOYMENT};
use futures::{FutureExt, Stream, StreamExt, stream, stream::FuturesUnordered};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::Deployment,
        core::v1::{Pod, Service, ServiceAccount},
        policy::v1::PodDisruptionBudget,
        rbac::v1::{Role, RoleBinding},
    },
};
use kube::Resource;
use tokio::time::{Instant, sleep_until, timeout};

use super::{
    first::{Changed, FirstLook},
    inference_deployment::{PassError, pass},
    metadata::{Seen, Source},
    nodes,
    queue::{CONCURRENT_MAX, Key, Next, Queue},
    watch::{self, Concerned, Watched},
};
use crate::{client::Calls, health::Health, leader::Leadership};

/// No pass needs longer: this is many deadlines in a row.
const PASS_MAX: Duration = Duration::from_secs(60);
/// Events that come in a burst make one pass.
pub(super) const DEBOUNCE: Duration = Duration::from_millis(20);

type Changes = Pin<Box<dyn Stream<Item = Concerned> + Send>>;

/// What every pass gets.
pub struct Context {
    pub calls: Calls,
    pub health: Arc<Health>,
    /// Only this namespace; `None`: all of them.
    pub namespace: Option<String>,
}

/// Runs the controllers while this process leads, and drops them the moment it does not (P14).
pub async fn lead(context: Arc<Context>, leadership: &Arc<Leadership>) {
    let mut changes = leadership.changes();
    loop {
        if changes.wait_for(|leading| *leading).await.is_err() {
            return;
        }
        tracing::info!("leading");
        context.calls.fleet.ledger.close(); // somebody else may have led meanwhile
        context.calls.metrics.leader.set(1);
        tokio::select! {
            biased;
            _ = changes.wait_for(|leading| !*leading) => {}
            () = run(context.clone()) => {}
            () = nodes::keep(&context.calls) => {}
        }
        context.calls.metrics.stops_leading();
        context.health.no_watches();
        tracing::warn!("not leading any more, controllers stopped");
    }
}

/// Runs until dropped. Dropping it stops every pass at its next await: that is how a lost lease ends the controllers.
pub async fn run(context: Arc<Context>) {
    let kinds = watches(&context);
    let mut first = Some(FirstLook::at(kinds.len(), Instant::now()));
    let mut events = stream::select_all(kinds);
    let mut queue = Queue::default();
    let mut passes = FuturesUnordered::new();
    loop {
        if let Some(keys) = first.as_ref().and_then(|first| first.over(Instant::now())) {
            first = None;
            queue.ask_in_order(keys, Instant::now());
        }
        while first.is_none()
            && passes.len() < CONCURRENT_MAX
            && let Some(key) = queue.take(Instant::now())
        {
            passes.push(reconcile(key, context.clone()));
        }
        let due = match &first {
            Some(first) => Some(first.until()),
            None => queue.next_due().filter(|_| passes.len() < CONCURRENT_MAX),
        };
        tokio::select! {
            biased; // a fixed order makes a run repeatable
            Some((key, next)) = passes.next(), if !passes.is_empty() => queue.done(key, next, Instant::now()),
            Some(whom) = events.next() => match (whom, &mut first) {
                (Concerned::One(key), _) => queue.ask(key, Instant::now() + DEBOUNCE),
                (Concerned::First { kind, changed }, Some(first)) => first.heard(kind, changed),
                (Concerned::Unlisted { kind }, Some(first)) => first.heard(kind, Changed::default()),
                (Concerned::First { changed, .. }, None) => queue.ask_all(changed.in_order(), Instant::now() + DEBOUNCE),
                (Concerned::Unlisted { .. }, None) => {}
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            else => return, // the watches are endless
        }
    }
}

fn watches(context: &Arc<Context>) -> Vec<Changes> {
    // what an InferenceDeployment owns is looked at by its passes, which come now and then; of one that nobody has heard of there is none
    let root = Watched { kind: "InferenceDeployment", label: None, list_every: Some(watch::LIST_EVERY) };
    let owned = |kind| Watched { kind, label: Some(LABEL_DEPLOYMENT), list_every: None };
    vec![
        one::<InferenceDeployment>(context, root, of_itself),
        one::<Pod>(context, owned("Pod"), of_owner),
        one::<EngineIncident>(context, owned("EngineIncident"), of_owner),
        one::<Deployment>(context, owned("Deployment"), of_owner),
        one::<Service>(context, owned("Service"), of_owner),
        one::<PodDisruptionBudget>(context, owned("PodDisruptionBudget"), of_owner),
        one::<ServiceAccount>(context, owned("ServiceAccount"), of_owner),
        one::<Role>(context, owned("Role"), of_owner),
        one::<RoleBinding>(context, owned("RoleBinding"), of_owner),
    ]
}

fn one<K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>>(
    context: &Arc<Context>,
    watched: Watched,
    owner: fn(&Seen) -> Option<Key>,
) -> Changes {
    let source = Source::of::<K>(context.calls.client.clone(), context.namespace.as_deref());
    Box::pin(watch::keys(source, watched, context.health.clone(), owner))
}

fn of_itself(object: &Seen) -> Option<Key> {
    Some((object.metadata.namespace.clone()?, object.metadata.name.clone()?))
}

fn of_owner(object: &Seen) -> Option<Key> {
    Some((object.metadata.namespace.clone()?, object.metadata.labels.get(LABEL_DEPLOYMENT)?.clone()))
}

/// One pass. What goes wrong in it, a panic included, is this one InferenceDeployment's own affair (B6).
async fn reconcile(key: Key, context: Arc<Context>) -> (Key, Next) {
    let (namespace, name) = &key;
    let timer = context.calls.metrics.reconcile_seconds.start_timer();
    let pass = AssertUnwindSafe(pass(&context.calls, namespace, name)).catch_unwind();
    let result = timeout(PASS_MAX, pass).await;
    timer.observe_duration();
    let (outcome, next) = match result {
        Ok(Ok(Ok(Some(recheck)))) => ("ok", Next::After(recheck)),
        Ok(Ok(Ok(None))) => ("ok", Next::Forget),
        // The world is newer than the look: no fault, but no hot loop either.
        Ok(Ok(Err(error))) if overtaken(&error) => {
            tracing::debug!(namespace, name, %error, "pass overtaken");
            ("overtaken", Next::Failed)
        }
        Ok(Ok(Err(error))) => {
            tracing::warn!(namespace, name, %error, "pass failed");
            ("error", Next::Failed)
        }
        Ok(Err(_)) => {
            tracing::error!(namespace, name, "pass panicked; this is a bug, please report it");
            ("panic", Next::Failed)
        }
        Err(_) => {
            tracing::warn!(namespace, name, "pass took longer than 60 s");
            ("error", Next::Failed)
        }
    };
    context.calls.metrics.reconciles.with_label_values(&[outcome]).inc();
    (key, next)
}

fn overtaken(error: &PassError) -> bool {
    matches!(error, PassError::Status { source, .. } if source.code() == Some(409))
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
