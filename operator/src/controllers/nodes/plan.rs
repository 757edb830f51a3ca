//! What should stand on nodes, pure: the union of what the InferenceDeployments avoid, and the condition where recoveries
//! come back. Everything follows from their status, so that any operator after any crash writes the same (P1), and what
//! nobody wishes any more is taken off.

use std::collections::{BTreeMap, BTreeSet};

use crds::{
    Avoided, AvoidedBecause, InferenceDeployment, PastGrant,
    node::{CONDITION_ENGINE_STALLS, LABEL_AVOID_PREFIX, LABEL_SUSPECT},
    xid::{Xid, XidRemedy},
};
use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{
    boot,
    view::{NodeView, StallsCondition},
};
use crate::{
    controllers::inference_deployment::{
        avoid::{span_of, told_for},
        escalate::{window_of, young},
        past::NODE_COUNT_MIN,
    },
    digest::short,
    wall::AHEAD_MAX,
};

/// Engines stall there, and nothing says why.
const REPEATED: &str = "RepeatedStalls";

/// A node is everybody's, and many InferenceDeployments may have had pods on one: it bears no more of their labels than this.
const AVOID_LABELS_MAX: usize = 64;

/// Until when, and by what, the pods of one InferenceDeployment keep away from a node.
type Label = (String, String);

/// What should stand on one node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wish {
    /// Labels by which pods keep away.
    pub avoid: BTreeMap<String, String>,
    /// Why other tools should know of it.
    pub finding: Option<(&'static str, String)>,
    /// There may be a finding that cannot be read.
    pub in_doubt: bool,
    /// How many labels more than a node bears were wished.
    pub left_off: usize,
}

/// The writes that one node needs.
#[derive(Debug, Clone, PartialEq)]
pub struct NodePatch {
    pub name: String,
    /// A merge patch of the labels, with the UID as precondition (P8).
    pub labels: Option<Value>,
    /// Our condition, for a server-side apply of the status.
    pub condition: Option<Value>,
}

/// The label by which the pods of this InferenceDeployment keep away from a node. The hash tells namespaces apart.
pub fn avoid_label(namespace: &str, name: &str) -> String {
    let hash = short(&format!("{namespace}/{name}"), 4);
    format!("{LABEL_AVOID_PREFIX}{name}-{hash}")
}

/// A time as a label's value, which may not hold a colon.
pub fn label_time(until: &str) -> String {
    until.parse::<Timestamp>().map(|at| at.strftime("%Y-%m-%dT%H-%M-%SZ").to_string()).unwrap_or_default()
}

/// What all `infds` wish of nodes, by the node's name. Of `nodes` that were started anew nothing is told that a restart mends.
pub fn wishes(infds: &[InferenceDeployment], nodes: &[NodeView], now: Timestamp) -> BTreeMap<String, Wish> {
    let mut wishes: BTreeMap<String, Wish> = BTreeMap::new();
    let mut avoid: BTreeMap<String, BTreeMap<String, Vec<Label>>> = BTreeMap::new();
    let mut recoveries: BTreeMap<String, (usize, BTreeSet<String>)> = BTreeMap::new();
    let mut unkillable: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut faults: BTreeMap<String, BTreeSet<Xid>> = BTreeMap::new();
    for infd in infds.iter().filter(|infd| infd.metadata.deletion_timestamp.is_none()) {
        let Some(recovery) = infd.status.as_ref().map(|status| &status.recovery) else { continue };
        let (namespace, name) = (infd.namespace().unwrap_or_default(), infd.name_any());
        let owner = format!("{namespace}/{name}");
        let span = span_of(&infd.spec.recovery);
        let left = |place: &Avoided| boot::left_of(place.clone(), boot::of(nodes, &place.node));
        let avoided = recovery.avoid.iter().filter(|place| in_force(&place.until, span, now));
        let avoided: Vec<Avoided> = avoided.filter_map(left).collect();
        for place in &avoided {
            let label = (label_time(&place.until), avoid_label(&namespace, &name));
            avoid.entry(place.node.clone()).or_default().entry(namespace.clone()).or_default().push(label);
        }
        let told = told_for(&infd.spec.recovery);
        let broken = recovery.broken.iter().filter(|place| in_force(&place.until, told, now)).filter_map(left);
        for place in avoided.into_iter().chain(broken) {
            if place.because == AvoidedBecause::Unkillable {
                unkillable.entry(place.node.clone()).or_default().insert(owner.clone());
            }
            faults.entry(place.node.clone()).or_default().extend(place.xids.iter().cloned());
        }
        let window = window_of(&infd.spec.recovery);
        let at = now.to_string();
        let counts = |past: &&PastGrant| {
            let restarted = boot::is_another(&past.boot_id, boot::of(nodes, &past.node));
            !past.node.is_empty() && !restarted && young(past, window, &at)
        };
        for past in recovery.recent.iter().filter(counts) {
            let (count, owners) = recoveries.entry(past.node.clone()).or_default();
            *count += 1;
            owners.insert(owner.clone());
        }
    }
    for (node, (_, owners)) in recoveries.into_iter().filter(|(_, (count, _))| *count >= NODE_COUNT_MIN) {
        let text = format!("engines of {} stall here again and again; GPU or driver may be broken", list(&owners));
        wishes.entry(node).or_default().finding = Some((REPEATED, text));
    }
    for (node, xids) in faults {
        let wish = wishes.entry(node).or_default();
        wish.finding = fault(&xids).or(wish.finding.take());
    }
    for (node, owners) in unkillable {
        let finding = &mut wishes.entry(node).or_default().finding;
        let more = finding.take().filter(|(reason, _)| *reason != REPEATED);
        let more = more.map(|(_, text)| format!("; {text}")).unwrap_or_default();
        let text = format!("an engine of {} outlives SIGKILL here; only the node can end it{more}", list(&owners));
        *finding = Some(("UnkillableEngine", text));
    }
    for (node, of_node) in avoid {
        let wish = wishes.entry(node).or_default();
        (wish.avoid, wish.left_off) = bounded(of_node.into_values());
    }
    wishes
}

/// The labels that a node bears, and how many more were wished. Namespaces take turns, each with what lasts longest first: a tenant with many
/// InferenceDeployments takes nobody else's label off (S16).
fn bounded(of_namespaces: impl Iterator<Item = Vec<Label>>) -> (BTreeMap<String, String>, usize) {
    let in_turn = of_namespaces.flat_map(|mut labels| {
        labels.sort_unstable_by(|a, b| b.cmp(a));
        labels.into_iter().enumerate()
    });
    let mut all: Vec<(usize, Label)> = in_turn.collect();
    all.sort_unstable_by(|(turn, label), (other_turn, other)| turn.cmp(other_turn).then(other.cmp(label)));
    let left_off = all.len().saturating_sub(AVOID_LABELS_MAX);
    let kept = all.into_iter().take(AVOID_LABELS_MAX);
    (kept.map(|(_, (until, label))| (label, until)).collect(), left_off)
}

/// What these Xids ask of whoever looks after nodes: a word for tools, by the one that asks for most, and which Xid asks for what.
fn fault(xids: &BTreeSet<Xid>) -> Option<(&'static str, String)> {
    let reason = match xids.iter().map(|xid| xid.remedy).filter(|remedy| remedy.outlasts_a_restart()).max()? {
        XidRemedy::ContactSupport => "NodeNeedsSupport",
        XidRemedy::RestartNode => "NodeNeedsRestart",
        _ => "GpuNeedsReset",
    };
    let words: BTreeSet<String> = xids.iter().map(Xid::words).collect();
    Some((reason, format!("the driver reports {}", list(&words))))
}

/// Does what lasts until `until` still last? Nothing does for longer than `span`: an end beyond that comes of a former leader's clock, which was
/// wrong, or of a policy that says less by now.
pub fn in_force(until: &str, span: SignedDuration, now: Timestamp) -> bool {
    until
        .parse::<Timestamp>()
        .is_ok_and(|until| until > now && until.duration_since(now) <= span.saturating_add(AHEAD_MAX))
}

/// Some names, and how many more: a condition's message is bounded.
fn list(names: &BTreeSet<String>) -> String {
    let shown: Vec<&str> = names.iter().take(5).map(String::as_str).collect();
    match names.len().saturating_sub(shown.len()) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// The writes that make `node` what is wished; `None`: it is so already (P7).
pub fn patch(node: &NodeView, wish: &Wish, now: Timestamp) -> Option<NodePatch> {
    let wanted = condition(node, wish);
    let suspect = !wish.avoid.is_empty() || wanted.as_ref().is_some_and(|wanted| wanted.is_true);
    let mut labels = BTreeMap::new();
    labels.extend(node.avoid.keys().filter(|key| !wish.avoid.contains_key(*key)).map(|key| (key.clone(), Value::Null)));
    let missing = wish.avoid.iter().filter(|(key, until)| node.avoid.get(*key) != Some(*until));
    labels.extend(missing.map(|(key, until)| (key.clone(), json!(until))));
    if suspect != node.suspect {
        labels.insert(LABEL_SUSPECT.to_owned(), if suspect { json!("true") } else { Value::Null });
    }
    let labels = (!labels.is_empty()).then(|| json!({"metadata": {"uid": node.uid, "labels": labels}}));
    let condition = wanted.filter(|wanted| node.stalls.as_ref() != Some(wanted)).map(|wanted| {
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name},
            "status": {"conditions": [{
                "type": CONDITION_ENGINE_STALLS,
                "status": if wanted.is_true { "True" } else { "False" },
                "reason": wanted.reason,
                "message": wanted.message,
                "lastTransitionTime": wanted.since.unwrap_or_else(|| now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()),
            }]},
        })
    });
    (labels.is_some() || condition.is_some()).then(|| NodePatch { name: node.name.clone(), labels, condition })
}

/// The condition as it should be; `None`: there is none and none is needed. One that is `True` stays so while anybody keeps
/// away: with nobody there nothing can stall, which proves nothing. But what was graver than the stalls for which they keep away, and is over,
/// is told no longer. Another finding is no transition: tools that drain what has been `True` for long enough count from `since`.
fn condition(node: &NodeView, wish: &Wish) -> Option<StallsCondition> {
    if let Some((reason, message)) = &wish.finding {
        let since = node.stalls.as_ref().filter(|before| before.is_true).and_then(|before| before.since.clone());
        return Some(StallsCondition { is_true: true, reason: (*reason).to_owned(), message: message.clone(), since });
    }
    let before = node.stalls.clone()?;
    if before.is_true && wish.avoid.is_empty() {
        let message = "no engine has been recovered here lately".to_owned();
        return Some(StallsCondition { is_true: false, reason: "NoRecentStall".to_owned(), message, since: None });
    }
    if before.is_true && before.reason != REPEATED && !wish.in_doubt {
        let message = "restarts did not cure an engine here, and new pods keep away".to_owned();
        return Some(StallsCondition { is_true: true, reason: REPEATED.to_owned(), message, since: before.since });
    }
    Some(before)
}

/// How long a pass may sleep so that what ends by time ends in time.
pub fn next_end(until: impl Iterator<Item = String>, now: Timestamp) -> Option<SignedDuration> {
    let ends = until.filter_map(|until| until.parse::<Timestamp>().ok());
    ends.map(|end| end.duration_since(now).max(SignedDuration::ZERO)).min()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
