//! Runs the passes: watches every kind that matters, maps each event to the InferenceDeployment it belongs to, and lets
//! kube's applier call `pass` for it, never twice at once for the same one.
//!
//! Each watch has its own backoff and starts over with a list after an error. kube's own controller would merge all
//! watches under one joint backoff, so that one missing right starves every other kind (RELIABILITY §7).

use std::{pin::Pin, sync::Arc, time::Duration};

use crds::{EngineIncident, InferenceDeployment, LABEL_DEPLOYMENT};
use futures::{Stream, StreamExt, future, stream};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::Deployment,
        core::v1::{Pod, Service, ServiceAccount},
        rbac::v1::{Role, RoleBinding},
    },
};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::PartialObjectMeta,
    runtime::{
        applier,
        controller::{Action, Config},
        reflector::{self, ObjectRef},
        watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{sleep, timeout};

use super::inference_deployment::{PassError, pass};
use crate::{client::Calls, health::Health};

/// No pass needs longer: this is many deadlines in a row.
const PASS_MAX: Duration = Duration::from_secs(60);
const BACKOFF_MIN: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(30);

type Requests = Pin<Box<dyn Stream<Item = ObjectRef<InferenceDeployment>> + Send>>;

/// What every pass gets.
pub struct Context {
    pub calls: Calls,
    pub health: Arc<Health>,
    /// Only this namespace; `None`: all of them.
    pub namespace: Option<String>,
}

/// Runs until dropped. Dropping it stops every pass at its next await: that is how a lost lease ends the controllers.
pub async fn run(context: Arc<Context>) {
    let (store, writer) = reflector::store();
    let labelled = || watcher::Config::default().labels(LABEL_DEPLOYMENT);
    let primary = events::<InferenceDeployment>(&context, "InferenceDeployment", watcher::Config::default());
    let primary =
        reflector::reflector(writer, primary.map(Ok)).filter_map(|event| future::ready(event.ok().and_then(touched)));
    let primary: Requests = Box::pin(primary.map(|infd| ObjectRef::from_obj(&infd)));
    let queue = stream::select_all([
        primary,
        members::<Pod>(&context, "Pod", labelled()),
        members::<EngineIncident>(&context, "EngineIncident", labelled()),
        members_meta::<Deployment>(&context, "Deployment", labelled()),
        members_meta::<Service>(&context, "Service", labelled()),
        members_meta::<ServiceAccount>(&context, "ServiceAccount", labelled()),
        members_meta::<Role>(&context, "Role", labelled()),
        members_meta::<RoleBinding>(&context, "RoleBinding", labelled()),
    ])
    .map(Ok::<_, std::convert::Infallible>);
    let config = Config::default().concurrency(8).debounce(Duration::from_millis(20));
    let reconcile = |infd, context| Box::pin(reconcile(infd, context));
    let results = applier(reconcile, again, context, store, queue, config);
    results.for_each(|_| future::ready(())).await;
}

/// Several InferenceDeployments at once, each in its own pass.
async fn reconcile(infd: Arc<InferenceDeployment>, context: Arc<Context>) -> Result<Action, PassError> {
    let (namespace, name) = (infd.namespace().unwrap_or_default(), infd.name_any());
    let timer = context.calls.metrics.reconcile_seconds.start_timer();
    let result = timeout(PASS_MAX, pass(&context.calls, &namespace, &name)).await;
    timer.observe_duration();
    let outcome = match &result {
        Ok(Ok(_)) => "ok",
        Ok(Err(_)) | Err(_) => "error",
    };
    context.calls.metrics.reconciles.with_label_values(&[outcome]).inc();
    match result {
        Ok(Ok(recheck)) => Ok(Action::requeue(recheck)),
        Ok(Err(error)) => Err(error),
        Err(_) => Ok(Action::requeue(Duration::from_secs(1))),
    }
}

/// After a conflict the world is simply newer than the look: again at once. After anything else a little later.
fn again(infd: Arc<InferenceDeployment>, error: &PassError, _: Arc<Context>) -> Action {
    let conflict = matches!(error, PassError::Status { source, .. } if source.code() == Some(409));
    if conflict {
        tracing::debug!(infd = infd.name_any(), %error, "pass overtaken");
        return Action::requeue(Duration::from_millis(50));
    }
    tracing::warn!(infd = infd.name_any(), %error, "pass failed");
    Action::requeue(Duration::from_secs(5))
}

/// Requests for the owners of `K`s, by label.
fn members<K>(context: &Arc<Context>, kind: &'static str, config: watcher::Config) -> Requests
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    Box::pin(
        events::<K>(context, kind, config).filter_map(|event| future::ready(touched(event).as_ref().and_then(owner))),
    )
}

/// The same where the metadata is all that is needed.
fn members_meta<K>(context: &Arc<Context>, kind: &'static str, config: watcher::Config) -> Requests
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + std::fmt::Debug + Send + Sync + 'static,
{
    members::<PartialObjectMeta<K>>(context, kind, config)
}

fn owner<K: Resource>(object: &K) -> Option<ObjectRef<InferenceDeployment>> {
    let name = object.labels().get(LABEL_DEPLOYMENT)?;
    Some(ObjectRef::new(name).within(&object.namespace()?))
}

fn touched<K>(event: watcher::Event<K>) -> Option<K> {
    match event {
        watcher::Event::Apply(object) | watcher::Event::InitApply(object) | watcher::Event::Delete(object) => {
            Some(object)
        }
        watcher::Event::Init | watcher::Event::InitDone => None,
    }
}

/// One watch as an endless stream of events. After an error it waits (0.5 s, doubling, 30 s at most, since the last time
/// that it was in step) and starts over with a list, so that "in step" is known and never guessed.
fn events<K>(
    context: &Arc<Context>,
    kind: &'static str,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Event<K>> + Send + use<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    context.health.watch(kind, false);
    let health = context.health.clone();
    let api: Api<K> = scoped(context.calls.client.clone(), context.namespace.as_deref());
    let start = move || Box::pin(watcher::watcher(api.clone(), config.clone()));
    let first = start();
    stream::unfold((first, start, health, 0_u32), move |(mut inner, start, health, mut failures)| async move {
        loop {
            match inner.next().await {
                Some(Ok(event)) => {
                    if matches!(event, watcher::Event::InitDone) {
                        failures = 0;
                        health.watch(kind, true);
                    }
                    return Some((event, (inner, start, health, failures)));
                }
                broken => {
                    health.watch(kind, false);
                    if let Some(Err(error)) = broken {
                        tracing::warn!(kind, %error, "watch broken, starting over");
                    }
                    sleep((BACKOFF_MIN * 2_u32.saturating_pow(failures.min(6))).min(BACKOFF_MAX)).await;
                    failures = failures.saturating_add(1);
                    inner = start();
                }
            }
        }
    })
}

fn scoped<K>(client: Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client, namespace),
        None => Api::all(client),
    }
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
