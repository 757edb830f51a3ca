//! Nodes: the last step of the escalation. The sweep makes true what the status of all InferenceDeployments wishes
//! ([`plan`]); a pass that replaces a pod writes its own mark first ([`mark`]), so that the successor cannot land there.
//!
//! Only an operator that sees the whole cluster touches nodes: they belong to everybody. Where the right is missing the
//! rest goes on without (A14).

pub mod boot;
pub mod fits;
pub mod plan;
pub mod unmarked;
pub mod view;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crds::{InferenceDeployment, node::LABEL_SUSPECT};
use futures::{FutureExt, StreamExt, stream};
use jiff::Timestamp;
use kube::{
    Api,
    core::{ApiResource, DynamicObject},
};
use serde_json::json;
use tokio::{
    sync::{Mutex, Notify},
    time::{Instant, sleep, timeout},
};

use self::{
    plan::{NodePatch, Wish},
    unmarked::Unmarked,
    view::{ListedNode, NodeView, view},
};
use crate::{
    client::{CallError, Calls},
    controllers::inference_deployment::execute::AT_ONCE,
};

/// What ends by time ends within this.
const SWEEP_EVERY: Duration = Duration::from_secs(30);
/// News come in bursts, and each sweep of a burst would write the same nodes again. Who replaces a pod does not wait: it has its own mark.
const NEWS_SETTLE: Duration = Duration::from_secs(1);
/// Facts about nodes (ready, devices, domain) change slowly.
const KNOWN_FOR: Duration = Duration::from_secs(30);
/// A list that failed is asked for again after this: passes that wait in line must not each wait for a deadline of their own.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// What is known of nodes, shared by all passes.
#[derive(Debug, Default)]
pub struct Known {
    seen: Mutex<Seen>,
    unmarked: Unmarked,
    /// Something is wished of a node that was not before.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Seen {
    nodes: Arc<[NodeView]>,
    /// When to ask again; `None`: nobody has asked yet.
    until: Option<Instant>,
}

impl Known {
    /// The sweep should not wait for its time.
    pub fn changed(&self) {
        self.changed.notify_one();
    }
}

/// All nodes, at most 30 s old where the server answers, and else as they were seen last; none where the operator may not know them, or has
/// not yet. A failure is logged: who asks does without, but for a budget of failure domains, which grants nothing on nodes that are not known.
pub async fn all(calls: &Calls) -> Arc<[NodeView]> {
    if calls.fleet.namespace.is_some() {
        return Arc::default();
    }
    let mut seen = calls.fleet.nodes.seen.lock().await;
    if seen.until.is_some_and(|until| Instant::now() < until) {
        return seen.nodes.clone();
    }
    let api: Api<ListedNode> = Api::all(calls.client.clone());
    let known_for = match calls.list_each(&api, "", |node| view(node, &calls.fleet.domain_key)).await {
        Ok(nodes) => {
            seen.nodes = nodes.into();
            KNOWN_FOR
        }
        Err(error) => {
            tracing::warn!(%error, known = seen.nodes.len(), "nodes are not listed: what is not known of them is not gone by");
            ASK_AGAIN
        }
    };
    seen.until = Some(Instant::now() + known_for);
    seen.nodes.clone()
}

/// Puts this InferenceDeployment's label on the nodes of `marks` (name and time until which), now. Returns, by node, what failed and a later
/// try may heal: until then no pod there may be replaced. For a while only ([`unmarked`]), and elsewhere nobody waits for it.
pub async fn mark(calls: &Calls, label: &str, marks: &[(String, String)]) -> BTreeMap<String, CallError> {
    let known = calls.fleet.nodes.seen.lock().await.nodes.clone();
    let mark = |(node, until): &'_ (String, String)| {
        let seen = known.iter().find(|seen| seen.name == *node);
        mark_one(calls, label, (node.clone(), seen.map(|seen| seen.uid.clone())), until.clone()).boxed()
    };
    let writes: Vec<_> = marks.iter().map(mark).collect();
    stream::iter(writes).buffered(AT_ONCE).filter_map(std::future::ready).collect().await
}

/// The node and why it must be waited for; `None`: it is marked, or nobody waits for that any more. By its UID where that is known (P8): another
/// machine of its name is suspected of nothing, and is left alone (409).
async fn mark_one(
    calls: &Calls,
    label: &str,
    (node, uid): (String, Option<String>),
    until: String,
) -> Option<(String, CallError)> {
    let api: Api<ListedNode> = Api::all(calls.client.clone());
    let labels = json!({label: plan::label_time(&until), LABEL_SUSPECT: "true"});
    let metadata = match uid {
        Some(uid) => json!({"uid": uid, "labels": labels}),
        None => json!({"labels": labels}),
    };
    let unmarked = &calls.fleet.nodes.unmarked;
    let error = match calls.merge(&api, &node, &json!({"metadata": metadata})).await {
        Ok(_) => {
            unmarked.settled(&node);
            tracing::warn!(node, label, until, "new pods keep away from this node");
            return None;
        }
        Err(error) => error,
    };
    let in_vain = error.lasting() || matches!(error.code(), Some(404 | 409));
    if in_vain {
        unmarked.settled(&node);
    } else if unmarked.waits(&node, Instant::now()) {
        return Some((node, error));
    }
    tracing::warn!(node, %error, "the node is not marked; the new pod may land there again");
    None
}

/// Sweeps for ever; waits for ever where nodes are not this operator's.
pub async fn keep(calls: &Calls) {
    if calls.fleet.namespace.is_some() {
        return std::future::pending().await;
    }
    loop {
        if let Err(error) = sweep(calls).await {
            tracing::warn!(%error, "the marks on nodes are not up to date");
        }
        if timeout(SWEEP_EVERY, calls.fleet.nodes.changed.notified()).await.is_ok() {
            sleep(NEWS_SETTLE).await;
        }
    }
}

#[tracing::instrument(level = "debug", skip_all)]
async fn sweep(calls: &Calls) -> Result<(), CallError> {
    let nodes: Api<ListedNode> = Api::all(calls.client.clone());
    let now = calls.wall.now();
    // Nodes first: a pass stores what it avoids before it marks a node, so whoever sees a mark finds its reason as well. The other way
    // round the mark of a moment ago would be taken for a leftover.
    let mut seen = calls.list_each(&nodes, LABEL_SUSPECT, |node| view(node, &calls.fleet.domain_key)).await?;
    let (infds, whole) = infds(calls).await?;
    let said = plan::wishes(&infds, &[], now);
    for name in said.keys().filter(|name| !seen.iter().any(|node| node.name == **name)).collect::<Vec<_>>() {
        seen.extend(calls.get(&nodes, name).await?.map(|node| view(&node, &calls.fleet.domain_key)));
    }
    // and what is left of it by when these nodes were started
    let wishes = plan::wishes(&infds, &seen, now);
    let mut hung = false;
    for node in &seen {
        let mut wish = wishes.get(&node.name).cloned().unwrap_or_default();
        if wish.left_off > 0 {
            let (node, left_off) = (node.name.as_str(), wish.left_off);
            tracing::warn!(
                node,
                left_off,
                "more InferenceDeployments avoid this node than it bears labels: their new pods may land there"
            );
        }
        if !whole {
            // what stands there may be the wish of one that cannot be read
            wish.in_doubt = !node.avoid.is_empty();
            node.avoid
                .iter()
                .for_each(|(key, until)| _ = wish.avoid.entry(key.clone()).or_insert_with(|| until.clone()));
        }
        match write(calls, &nodes, node, &wish, now).await {
            Ok(asked) => hung &= !asked,
            // What is refused for one node, by somebody's policy or webhook or because it has gone meanwhile, keeps no other node from its marks,
            // nor does what hangs there. Two in a row hang in the server.
            Err(error) if error.code().is_some() || matches!(error, CallError::Deadline { .. }) && !hung => {
                tracing::warn!(node = node.name, %error, "the marks of this node are not up to date");
                hung = error.code().is_none();
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// All InferenceDeployments that this version of the operator can read, and whether that is all there are: one that it cannot read must
/// not keep the others' nodes from being marked (B7, B8).
async fn infds(calls: &Calls) -> Result<(Vec<InferenceDeployment>, bool), CallError> {
    let api: Api<DynamicObject> = Api::all_with(calls.client.clone(), &ApiResource::erase::<InferenceDeployment>(&()));
    let all = calls.list(&api, "").await?.items;
    let count = all.len();
    let read: Vec<InferenceDeployment> = all.into_iter().filter_map(|object| object.try_parse().ok()).collect();
    let whole = read.len() == count;
    Ok((read, whole))
}

/// False: the node is as it shall be, and nobody was asked.
async fn write(
    calls: &Calls,
    api: &Api<ListedNode>,
    node: &NodeView,
    wish: &Wish,
    now: Timestamp,
) -> Result<bool, CallError> {
    let Some(NodePatch { name, labels, condition }) = plan::patch(node, wish, now) else { return Ok(false) };
    // The label of suspicion is how the next sweep finds the node again: it comes first and goes last.
    let (first, last) = if *wish == Wish::default() { (None, labels) } else { (labels, None) };
    if let Some(labels) = first {
        calls.merge(api, &name, &labels).await?;
    }
    if let Some(condition) = condition {
        calls.apply_status(api, &name, &condition).await?;
        let said = &condition["status"]["conditions"][0];
        tracing::warn!(node = name, status = %said["status"], reason = %said["reason"], "node condition written");
    }
    if let Some(labels) = last {
        calls.merge(api, &name, &labels).await?;
    }
    Ok(true)
}

#[cfg(test)]
#[path = "known_tests.rs"]
mod tests;
