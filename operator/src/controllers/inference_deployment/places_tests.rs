//! Budgets and holds of nodes and failure domains, both ways.

use super::*;
use crate::controllers::inference_deployment::{
    escalate::{Hold, Terms},
    fleet::Fleet,
    grants,
    testing::{self, healthy, infd, pod},
};
use crds::xid::XidRemedy;

const NOW: &str = "2026-01-01T01:00:00Z";

/// Node `a1` is in zone `a`, and so on.
fn nodes() -> Vec<NodeView> {
    ["a1", "a2", "b1", "b2"]
        .map(|name| NodeView { name: name.into(), domain: Some(name[..1].to_owned()), ..NodeView::default() })
        .into()
}

fn on(node: &str, name: &str, stage: &str) -> PodView {
    let pod = if stage.is_empty() { healthy(name) } else { pod(name, stage, 1) };
    PodView { node: node.to_owned(), ..pod }
}

/// The pods that are granted, and the hold.
fn granted(pods: &[PodView], held: &[Grant], fleet: &Fleet) -> (Vec<String>, Hold) {
    let mut object = infd("chat");
    object.spec.recovery.max_unavailable = 9;
    object.spec.recovery.hold_percent = 60;
    object.spec.replicas = i32::try_from(pods.len()).unwrap();
    let terms = Terms::of(&object, pods, Some(fleet)).with_places(&nodes(), pods, Some(fleet), 60);
    let fresh = grants::next(held, pods, &terms, NOW).into_iter().filter(|grant| !held.contains(grant));
    (fresh.map(|grant| format!("{}@{}/{}", grant.pod, grant.node, grant.domain)).collect(), terms.hold)
}

fn fleet(place_max: (usize, usize)) -> Fleet {
    Fleet { replicas: 900, restarts_percent: 10, hold_percent: 30, place_max, ..Fleet::default() }
}

#[test]
fn a_node_and_a_domain_bear_only_so_many_at_once() {
    let mut pods =
        vec![on("a1", "p", "Stalled"), on("a1", "q", "Stalled"), on("a2", "r", "Stalled"), on("b1", "s", "Stalled")];
    pods.extend((0..3).map(|n| on("a2", &format!("g{n}"), "")));
    pods.extend((0..8).map(|n| on("b2", &format!("h{n}"), "")));
    let all = |max| granted(&pods, &[], &fleet(max)).0;
    assert_eq!(all((0, 0)).len(), 4, "no limit");
    assert_eq!(all((1, 0)), ["p@a1/a", "r@a2/a", "s@b1/b"], "whoever waits for a full node lets the next one pass");
    assert_eq!(all((0, 1)), ["p@a1/a", "s@b1/b"]);
    let other = Fleet { grants_at: vec![("a2".into(), "a".into())], granted: 1, ..fleet((0, 2)) };
    assert_eq!(granted(&pods, &[], &other).0, ["p@a1/a", "s@b1/b"], "another deployment's grant counts");
    let held = Grant {
        pod_uid: "uid-p".into(),
        episode: "e-p".into(),
        node: "a1".into(),
        domain: "a".into(),
        ..Grant::default()
    };
    assert_eq!(granted(&pods, &[held], &fleet((1, 2))).0, ["r@a2/a", "s@b1/b"], "and so does our own, as it is stored");
}

#[test]
fn a_budget_of_failure_domains_grants_nothing_on_a_node_that_is_not_known() {
    let mut bare = nodes();
    bare.push(NodeView { name: "c1".into(), ..NodeView::default() });
    let granted = |nodes: &[NodeView], max| {
        let pods = [on("a1", "p", "Stalled"), on("c1", "q", "Stalled"), on("d1", "r", "Stalled"), on("a1", "s", "")];
        let object = infd("chat");
        let terms = Terms { max_unavailable: 9, ..Terms::of(&object, &pods, None) };
        let fleet = fleet(max);
        let terms = terms.with_places(nodes, &pods, Some(&fleet), 100);
        grants::next(&[], &pods, &Terms { hold: Hold::No, ..terms }, NOW).len()
    };
    assert_eq!((granted(&[], (0, 0)), granted(&bare, (0, 0))), (3, 3), "no limit, nothing to know");
    assert_eq!(granted(&[], (0, 1)), 0, "the list of nodes failed");
    assert_eq!(granted(&bare, (0, 1)), 2, "d1 joined a moment ago, and c1 is in no domain");
}

#[test]
fn a_grant_that_is_renewed_while_no_node_can_be_listed_keeps_its_domain() {
    let held = Grant { pod_uid: "uid-p".into(), node: "a1".into(), domain: "a".into(), ..Grant::default() };
    let doomed = testing::with_xid(on("a1", "p", "Restarting"), 79, XidRemedy::RestartNode);
    for (pod, before) in [(on("a1", "p", "Stalled"), "another"), (doomed, "e-p")] {
        let held = Grant { episode: before.into(), ..held.clone() };
        let domain = |nodes: &[NodeView], held: &Grant| {
            let (object, pods, fleet) = (infd("chat"), [pod.clone()], fleet((0, 1)));
            let terms = Terms::of(&object, &pods, Some(&fleet)).with_places(nodes, &pods, Some(&fleet), 60);
            let grant = grants::next(std::slice::from_ref(held), &pods, &terms, NOW).remove(0);
            assert_eq!((grant.episode.as_str(), grant.granted_at.as_str()), ("e-p", NOW), "it is a new key");
            grant.domain
        };
        assert_eq!(domain(&[], &held), "a", "nodes are not listed");
        assert_eq!(domain(&nodes(), &Grant { domain: String::new(), ..held.clone() }), "a", "and now they are");
        assert_eq!(domain(&[], &Grant { node: "b1".into(), ..held.clone() }), "", "another node's is not its own");
    }
}

#[test]
fn a_domain_that_stalls_as_a_whole_is_held_and_the_others_are_not() {
    let mut pods: Vec<PodView> = (0..3).map(|n| on("a1", &format!("a{n}"), "Stalled")).collect();
    pods.extend((0..6).map(|n| on("b1", &format!("b{n}"), if n == 0 { "Stalled" } else { "" })));
    let (grants, hold) = granted(&pods, &[], &fleet((0, 0)));
    assert_eq!(grants, ["b0@b1/b"]);
    let Hold::Place(why) = hold else { panic!("{hold:?}") };
    assert_eq!(why, "3 of 3 replicas in failure domain a stall at once, 3 of 3 replicas in node a1 stall at once");
    pods[0] = on("a1", "a0", "Restarting");
    assert_eq!(granted(&pods, &[], &fleet((0, 0))).0, ["b0@b1/b"], "one of them has its restart already");
    pods[0] = on("a1", "a0", "");
    assert_eq!(
        granted(&pods, &[], &fleet((0, 0))),
        (vec!["a1@a1/a".into(), "a2@a1/a".into(), "b0@b1/b".into()], Hold::No)
    );
}

#[test]
fn while_one_place_is_held_a_restart_that_is_in_vain_elsewhere_is_followed_on_its_slot() {
    let mut pods: Vec<PodView> = (0..3).map(|n| on("a1", &format!("a{n}"), "Stalled")).collect();
    pods.extend((0..6).map(|n| on("b1", &format!("b{n}"), "")));
    for (node, wanted) in [("b1", vec!["p@b1/b".to_owned()]), ("a1", vec![])] {
        let stalled = on(node, "p", "Stalled");
        let held = Grant {
            pod_uid: stalled.uid.clone(),
            pod: stalled.name.clone(),
            episode: stalled.open_episode().unwrap().id.clone(),
            node: node.into(),
            granted_at: "2026-01-01T00:30:00Z".into(),
            ..Grant::default()
        };
        let mut all = pods.clone();
        all.push(PodView { agent_away: true, ..stalled });
        let (grants, hold) = granted(&all, &[held], &fleet((0, 0)));
        assert!(matches!(hold, Hold::Place(_)), "{hold:?}");
        assert_eq!(grants, wanted, "{node}");
    }
}

#[test]
fn where_there_is_one_place_the_deployments_own_hold_speaks() {
    let pods: Vec<PodView> = (0..4).map(|n| on("a1", &format!("a{n}"), "Stalled")).collect();
    assert!(matches!(granted(&pods, &[], &fleet((0, 0))).1, Hold::Deployment(_)));
}
