//! One node of several is drained: whoever stands there leaves, one after another, nobody else is touched, and a stall that falls into it is
//! recovered as ever. Eight replicas stand on four nodes, the second and the sixth on the one that is drained.

use super::{
    act::Act,
    said::Log,
    story::{Story, create, freeze, plain},
};

const NODE: usize = 1;
const LEAVE: [&str; 2] = ["-0002", "-0006"];
const STAY: [&str; 6] = ["-0001", "-0003", "-0004", "-0005", "-0007", "-0008"];
/// All serve, and the first rollout is over.
const CALM_MS: u64 = 28_000;
const DELETE: &str = "DELETE /api/v1/namespaces/serving/pods/";

/// The node is drained at `at_ms` while at every step `least` replicas serve, and nothing is left on it in the end.
fn drained(at_ms: u64, least: usize, more: Vec<(u64, Act)>) -> Story {
    let end = [(90_000, Act::ExpectFree { node: NODE }), (90_000, Act::ExpectServing { count: 8 })];
    let drain = [(CALM_MS, Act::LeastServing { count: least }), (at_ms, Act::Drain { node: NODE, ms: 65_000 })];
    let mut acts = [vec![create(8)], drain.to_vec(), more, end.to_vec()].concat();
    acts.sort_by_key(|(at, _)| *at);
    plain(acts, Vec::new())
}

pub fn alone() -> Story {
    drained(30_000, 7, Vec::new())
}

/// A replica of another node freezes when the first one has just left.
pub fn stall_elsewhere() -> Story {
    drained(30_000, 6, vec![freeze(30_500, 0)])
}

/// One that is in the middle of its restart leaves with its slot, for which one of another node waits.
pub fn stall_on_it() -> Story {
    drained(35_500, 6, vec![freeze(30_000, 1), freeze(33_000, 0)])
}

/// Whoever leaves is no stall: nothing is granted and nothing recorded for it.
pub fn one_by_one(log: &Log<'_>) -> Vec<Option<String>> {
    let nothing = vec![log.grants_at_most(0), log.incidents(0), log.leaves_alone(CALM_MS, &STAY)];
    [only_those(log), nothing].concat()
}

/// A slot of the recovery is no place in the disruption budget, and the other way round: the stall has its key while one is away by the
/// drain, and the next one leaves only when the stalled one is back.
pub fn the_stall_first(log: &Log<'_>) -> Vec<Option<String>> {
    let back = log.times(&["POST ", "\"action\":\"Close\""]);
    let last = evicted(log).last().copied();
    let order = (back.len() != 1 || last < back.first().copied())
        .then(|| format!("it was back at {back:?}, and the second left at {last:?}"));
    let once = vec![log.granted_by(36_000), log.grants_at_most(1), log.incidents(1), order];
    [only_those(log), once, vec![log.leaves_alone(CALM_MS, &STAY[1..])]].concat()
}

/// The slot is free when its pod is gone, and not before.
pub fn the_slot_goes_along(log: &Log<'_>) -> Vec<Option<String>> {
    let gone = log.times(&["-0002 is gone"]);
    let grants = log.times(&["PATCH /api/v1/namespaces/serving/pods/", "truebeat.io/restart-grant"]);
    let soon = match (gone.as_slice(), grants.as_slice()) {
        ([gone], [first, second]) => first < gone && gone < second && *second <= gone + 3_000,
        _ => false,
    };
    let slot = (!soon).then(|| format!("its pod was gone at {gone:?}, and keys were handed out at {grants:?}"));
    [only_those(log), vec![log.incidents(2), slot, log.leaves_alone(CALM_MS, &STAY[1..])]].concat()
}

/// Both leave, by an eviction each, of which one had to wait; nobody else does, and the operator deletes nobody.
fn only_those(log: &Log<'_>) -> Vec<Option<String>> {
    let gone = log.times(&[" is gone"]).len();
    let of_those: usize = LEAVE.iter().map(|name| log.times(&[name, " is gone"]).len()).sum();
    let (evicted, refused) = (evicted(log).len(), log.times(&["drain of node-1", " 429"]).len());
    let wrong = (gone, of_those, evicted) != (2, 2, 2) || refused == 0;
    let what =
        format!("{gone} are gone, {of_those} of them of the node, by {evicted} evictions, {refused} were refused");
    vec![wrong.then_some(what), log.says_at_most(0, DELETE, "")]
}

fn evicted(log: &Log<'_>) -> Vec<u64> {
    log.times(&["drain of node-1", " 201"])
}
