//! Scenes of budgets that several deployments share: the fleet's, with a tenant who asks for much (S15), a node's and a failure domain's (P15).

use serde_json::json;

use super::{
    act::Act,
    rows::{Row, row},
    said::Log,
    story::{FleetTerms, Story, freeze, gpus, plain, spec},
};

/// Each with what is expected of it.
pub fn rows() -> Vec<Row> {
    vec![
        row("s15-a-tenant-asks-for-much", greedy_budget, one_after_another),
        row("s15-a-tenant-dilutes-the-hold", greedy_hold, held_all_the_same),
        row("s15-a-tenant-stalls-by-itself", stalls_alone, |log| {
            let held = log.says_at_most(0, "/inferencedeployments/", "FleetCommonCause");
            vec![held, granted_to_a(log, (70_000, 80_000)), log.has("CommonCause")]
        }),
        row("s15-a-tenant-keeps-its-slots", keeps_slots, |log| {
            let told = log.has("of which one slot is kept for other namespaces");
            vec![granted_to_a(log, (74_000, 84_000)), told]
        }),
        row("p15-one-at-a-time-on-a-node", one_node, |log| spaced(log, 3)),
        row("p15-one-at-a-time-in-a-domain", one_domain, |log| spaced(log, 2)),
    ]
}

/// More than all others have, and far more than there are GPUs.
const ASKED: u64 = 100;
/// When the tenant is content with what there is; the world could not be in order before.
const CONTENT_MS: u64 = 150_000;

/// Four deployments of three, and in a namespace of its own one that asks for much and gets as many as there are GPUs.
fn beside_a_greedy_tenant(stalls: impl Iterator<Item = (u64, Act)>) -> Vec<(u64, Act)> {
    let honest = ["a", "b", "c", "d"].map(|name| (0, Act::Create { name, spec: spec(3, "Recover") }));
    let greedy = (0, Act::Create { name: "tenant/greedy", spec: gpus(ASKED) });
    let content = Act::Edit { name: "tenant/greedy", patch: json!({"spec": {"replicas": 2}}) };
    honest.into_iter().chain([greedy]).chain(stalls).chain([(CONTENT_MS, content)]).collect()
}

/// One replica of each freezes. By what is there one of the fleet is restarted at a time; by what is asked for it would be all four.
fn greedy_budget() -> Story {
    plain(beside_a_greedy_tenant((0..4).map(|nth| freeze(60_000, 3 * nth))), Vec::new())
}

fn one_after_another(log: &Log<'_>) -> Vec<Option<String>> {
    let apart = spaced(log, 4);
    [apart, vec![log.has("waits for the fleet's budget")]].concat()
}

/// Two of each of three freeze: six of sixteen, and of a hundred more they would be few.
fn greedy_hold() -> Story {
    let stalls = [0, 1, 3, 4, 6, 7].into_iter().map(|nth| freeze(60_000, nth));
    let story = plain(beside_a_greedy_tenant(stalls), Vec::new());
    Story { fleet: FleetTerms::held_at(30), settle_ms: 900_000, ..story }
}

fn held_all_the_same(log: &Log<'_>) -> Vec<Option<String>> {
    vec![log.has("FleetCommonCause"), log.grants_at_most(6)]
}

/// Two deployments of three, and beside them a tenant with more than both, whose replicas all freeze.
fn beside_a_hostile_tenant(spec: serde_json::Value, freezes_ms: u64, count: usize) -> Vec<(u64, Act)> {
    let honest = ["a", "b"].map(|name| (0, Act::Create { name, spec: super::story::spec(3, "Recover") }));
    let hostile = (0, Act::Create { name: "tenant/hostile", spec });
    let stalls = (6..6 + count).map(|nth| freeze(60_000, nth));
    honest.into_iter().chain([hostile]).chain(stalls).chain([freeze(freezes_ms, 0)]).collect()
}

/// By a count of all replicas that is the fleet's cause, and nobody else would be recovered.
fn stalls_alone() -> Story {
    let mut spec = spec(8, "Recover");
    (spec["recovery"]["holdPercent"], spec["recovery"]["trialAfter"]) = (json!(30), json!("1m"));
    let story = plain(beside_a_hostile_tenant(spec, 62_000, 8), Vec::new());
    Story { fleet: FleetTerms::held_at(30), settle_ms: 900_000, ..story }
}

/// Two slots, and restarts that take a minute each.
fn keeps_slots() -> Story {
    let mut spec = spec(12, "Recover");
    spec["recovery"]["maxUnavailable"] = json!(12);
    let mut acts = beside_a_hostile_tenant(spec, 66_000, 12);
    acts.push((50_000, Act::Unkillable { exit_ms: 60_000 }));
    acts.sort_by_key(|(at_ms, _)| *at_ms);
    let fleet = FleetTerms { restarts_percent: 12, place_max: (0, 0), ..FleetTerms::default() };
    Story { fleet, settle_ms: 900_000, ..plain(acts, Vec::new()) }
}

fn granted_to_a(log: &Log<'_>, (from_ms, to_ms): (u64, u64)) -> Option<String> {
    let told = log.times(&["/pods/a-", "truebeat.io/restart-grant"]);
    (!told.iter().any(|at| (from_ms - 10_000..to_ms).contains(at))).then(|| format!("a has its key at {told:?}"))
}

/// Eight stand on four nodes, and all may be away at once but for where they stand.
fn eight(place_max: (usize, usize), frozen: &[usize]) -> Story {
    let mut spec = spec(8, "Recover");
    spec["recovery"]["maxUnavailable"] = json!(8);
    let stalls = frozen.iter().map(|nth| freeze(40_000, *nth));
    let acts = std::iter::once((0, Act::Create { name: "chat", spec })).chain(stalls).collect();
    let fleet = FleetTerms { restarts_percent: 100, place_max, ..FleetTerms::default() };
    Story { fleet, ..plain(acts, Vec::new()) }
}

/// Both replicas of one node freeze, and one of another, which waits for nobody.
fn one_node() -> Story {
    eight((1, 0), &[0, 4, 1])
}

/// One freezes on each of the two nodes of a failure domain.
fn one_domain() -> Story {
    eight((0, 1), &[0, 1])
}

/// So many grants in all. (Which of them may stand beside each other P15 tells at every step.)
fn spaced(log: &Log<'_>, count: usize) -> Vec<Option<String>> {
    let grants = log.grants();
    vec![(grants.len() != count).then(|| format!("grants at {grants:?}"))]
}
