//! Which budget a stall waits for, and who holds it, in words, pure. Without them nothing on an InferenceDeployment tells why its stall is not
//! repaired while the slots of the fleet, of a node or of a failure domain are somebody else's (I2).

use std::collections::BTreeSet;

use crds::{Grant, inference_deployment::RecoveryMode};

use super::{
    escalate::{Hold, Terms},
    fleet::Fleet,
    grants,
    observed::PodView,
};

/// So many holders are named.
const NAMED_MAX: usize = 5;

/// What the first pod that may have a recovery and has no slot waits for; `None`: nobody waits, or something else is told (a common cause,
/// under which only a trial that is due and those whom a person wants restarted wait for a budget).
pub fn why(
    grants: &[Grant],
    pods: &[PodView],
    (terms, fleet): (&Terms<'_>, Option<&Fleet>),
    now: &str,
) -> Option<String> {
    if terms.mode != RecoveryMode::Recover {
        return None;
    }
    let free = |pod: &PodView| terms.hold == Hold::No || terms.trial || pod.asked().is_some();
    let has_slot = |pod: &PodView| grants.iter().any(|grant| grant.pod_uid == pod.uid);
    let Some(waiting) = pods.iter().find(|pod| free(pod) && terms.may_restart(pod, now) && !has_slot(pod)) else {
        let goes = pods.iter().any(|pod| grants::wants_slot(pod) && terms.taken_back(pod) && !has_slot(pod));
        return goes.then(|| format!("is not granted: revision {} goes with its replicas", terms.revision_taken_back));
    };
    let taken = grants::taken(grants, pods, terms, now);
    if taken >= usize::try_from(terms.max_unavailable).unwrap_or(0) {
        let own = names(grants.iter().map(|grant| grant.pod.as_str()));
        return Some(format!("waits for recovery.maxUnavailable{}", held_by("pod ", &own)));
    }
    let fleet = fleet?;
    let of_fleet = || fleet.holders.iter().zip(&fleet.grants_at);
    if fleet.unseen.is_some() {
        return Some("waits until the fleet can be listed".to_owned());
    }
    if taken >= terms.fleet.count {
        let holders = names(of_fleet().map(|(owner, _)| owner.as_str()));
        let kept = if terms.fleet.one_is_kept { ", of which one slot is kept for other namespaces" } else { "" };
        return Some(format!("waits for the fleet's budget{kept}{}", held_by("", &holders)));
    }
    let (node, domain) = (waiting.node.as_str(), terms.places.domain(&waiting.node));
    let on_node = grants.iter().filter(|grant| grant.node == node).count();
    let others = names(of_fleet().filter(|(_, at)| at.0 == node).map(|(owner, _)| owner.as_str()));
    let of_node = of_fleet().filter(|(_, at)| at.0 == node).count() + on_node;
    if fleet.place_max.0 > 0 && of_node >= fleet.place_max.0 {
        return Some(format!("waits for the budget of node {node}{}", held_by("", &others)));
    }
    if domain.is_empty() {
        return Some(format!("waits until it is known in which failure domain node {node} is"));
    }
    let others = names(of_fleet().filter(|(_, at)| at.1 == domain).map(|(owner, _)| owner.as_str()));
    Some(format!("waits for the budget of failure domain {domain}{}", held_by("", &others)))
}

/// Some names, each once, and how many more.
fn names<'a>(all: impl Iterator<Item = &'a str>) -> String {
    let all: BTreeSet<&str> = all.filter(|name| !name.is_empty()).collect();
    let named: Vec<&str> = all.iter().take(NAMED_MAX).copied().collect();
    match all.len().saturating_sub(named.len()) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}

fn held_by(what: &str, names: &str) -> String {
    if names.is_empty() { String::new() } else { format!(", held by {what}{names}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controllers::{
        inference_deployment::testing::{infd, pod},
        nodes::view::NodeView,
    };

    const NOW: &str = "2026-01-01T00:02:00Z";

    /// What `b` waits for, on node n1 of zone z1, where the fleet looks so; `own` are the grants of its own pods.
    fn told(own: &[&str], fleet: Option<Fleet>) -> Option<String> {
        let mut object = infd("chat");
        object.spec.recovery.max_unavailable = if own.is_empty() { 2 } else { 1 };
        let grant = |name: &&str| Grant { pod: (*name).to_owned(), pod_uid: format!("uid-{name}"), ..Grant::default() };
        let grants: Vec<Grant> = own.iter().map(grant).collect();
        let pods: Vec<PodView> = own.iter().chain(&["b"]).map(|name| pod(name, "Stalled", 1)).collect();
        let zone = NodeView { name: "n1".into(), domain: Some("z1".into()), ..NodeView::default() };
        let terms = Terms::of(&object, &pods, fleet.as_ref()).with_places(&[zone], &pods, fleet.as_ref(), 100);
        why(&grants, &pods, (&terms, fleet.as_ref()), NOW)
    }

    /// Others hold a grant each, at this node and zone.
    fn fleet(owners: &[(&str, &str, &str)], replicas: usize, place_max: (usize, usize)) -> Option<Fleet> {
        let owned = |text: &str| text.to_owned();
        Some(Fleet {
            replicas,
            granted: owners.len(),
            restarts_percent: 10,
            hold_percent: 100,
            grants_at: owners.iter().map(|(_, node, zone)| (owned(node), owned(zone))).collect(),
            holders: owners.iter().map(|(owner, ..)| owned(owner)).collect(),
            place_max,
            ..Fleet::default()
        })
    }

    #[test]
    fn whose_budget_it_is_and_who_holds_it() {
        let says = |own: &[&str], fleet: Option<Fleet>, wanted: &str| {
            assert_eq!(told(own, fleet).as_deref(), Some(wanted));
        };
        says(&["a"], None, "waits for recovery.maxUnavailable, held by pod a");
        let (small, large) = (8, 98);
        let other = [("ns/other", "n2", "z2")];
        says(&[], fleet(&other, small, (0, 0)), "waits for the fleet's budget, held by ns/other");
        let kept = fleet(&other, 28, (0, 0)).map(|fleet| Fleet { granted_beside: 1, neighbours: true, ..fleet });
        says(
            &[],
            kept,
            "waits for the fleet's budget, of which one slot is kept for other namespaces, held by ns/other",
        );
        let here = [("ns/x", "n1", "z1"), ("ns/x", "n1", "z1"), ("ns/y", "n2", "z1")];
        says(&[], fleet(&here, large, (2, 0)), "waits for the budget of node n1, held by ns/x");
        says(&[], fleet(&here, large, (0, 3)), "waits for the budget of failure domain z1, held by ns/x, ns/y");
    }

    #[test]
    fn under_a_common_cause_waits_who_is_asked_for_or_tried() {
        let mut object = infd("chat");
        object.spec.recovery.max_unavailable = 0;
        let asked = |pod: PodView| {
            let episode = "e-c".to_owned();
            PodView { wish: Some(crds::restart::RestartWish { episode, ..Default::default() }), ..pod }
        };
        let told = |pods: &[PodView], trial| {
            let terms = Terms::of(&object, pods, None).with_trial(trial);
            assert!(matches!(terms.hold, Hold::Deployment(_)));
            why(&[], pods, (&terms, None), NOW)
        };
        let all = ["a", "b", "c"].map(|name| pod(name, "Stalled", 1));
        let one_asked = [all[0].clone(), all[1].clone(), asked(all[2].clone())];
        let budget = Some("waits for recovery.maxUnavailable".to_owned());
        assert_eq!((told(&all, false), told(&all, true), told(&one_asked, false)), (None, budget.clone(), budget));
    }

    #[test]
    fn who_waits_for_nothing_is_told_nothing() {
        let mut object = infd("chat");
        let pods = [pod("a", "Suspect", 1)];
        let of = |object: &crds::InferenceDeployment, pods: &[PodView]| {
            why(&[], pods, (&Terms::of(object, pods, None), None), NOW)
        };
        assert_eq!(of(&object, &pods), None);
        object.spec.recovery.mode = RecoveryMode::Fence;
        object.spec.recovery.max_unavailable = 0;
        assert_eq!(of(&object, &[pod("a", "Stalled", 1)]), None, "nothing is granted at all");
    }

    #[test]
    fn a_few_are_named_and_the_others_counted() {
        let all = ["a", "b", "c", "d", "e", "f", "g", "a", ""];
        assert_eq!(names(all.into_iter()), "a, b, c, d, e and 2 more");
    }
}
