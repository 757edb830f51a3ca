//! Scenes of a common cause that holds restarts until one is tried (I2): nobody serves, and nobody comes.

use serde_json::json;

use super::{
    act::Act,
    rows::{Row, row},
    said::Log,
    story::{FleetTerms, Story, edit, freeze, plain, spec},
    world::NODES,
};

/// Each with what is expected of it.
pub fn rows() -> Vec<Row> {
    vec![
        row("i2-hold-is-tried", tried, heals_by_itself),
        row("i2-hold-of-a-cause-that-lasts", lasts, pauses_grow),
        row("i2-hold-of-the-fleet", fleet, one_in_the_fleet),
        row("i2-hold-of-a-fleet-of-singles", fleet_of_singles, singles_in_turn),
        row("i2-hold-of-singles-whose-cause-lasts", singles_whose_cause_lasts, one_pause_in_the_fleet),
        row("i2-hold-that-widens", widens, waits_as_widely),
        row("i2-hold-and-other-leaders", other_leaders, heals_by_itself),
        row("i2-hold-and-another-mode", another_mode, counts_for_nothing),
        row("i2-hold-and-a-person", asked, by_a_person),
    ]
}

/// So many replicas that are held, and tried after a minute.
fn held(replicas: u64, hold_percent: u64) -> serde_json::Value {
    let mut spec = spec(replicas, "Recover");
    spec["recovery"]["holdPercent"] = json!(hold_percent);
    spec["recovery"]["trialAfter"] = json!("1m");
    spec
}

/// Three of three freeze at the same moment, for good.
pub fn all_stall() -> Vec<(u64, Act)> {
    let create = (0, Act::Create { name: "chat", spec: held(3, 60) });
    std::iter::once(create).chain((0..3).map(|nth| freeze(30_000, nth))).collect()
}

fn tried() -> Story {
    plain(all_stall(), Vec::new())
}

/// Whoever leads dies while the hold stands, in the middle of the trial, and while the replica that came back proves itself.
fn other_leaders() -> Story {
    let mut acts = all_stall();
    acts.extend([60_000, 97_000, 130_000].map(|at_ms| (at_ms, Act::Kill { operator: 0 })));
    plain(acts, Vec::new())
}

/// The mode is Observe while one of four is on trial and proves itself, and for long enough that it would have.
fn another_mode() -> Story {
    let mode = |mode: &str| json!({"recovery": {"mode": mode}});
    let create = (0, Act::Create { name: "chat", spec: held(4, 60) });
    let acts = std::iter::once(create).chain((0..4).map(|nth| freeze(30_000, nth)));
    let changes = [edit(110_000, mode("Observe")), edit(240_000, mode("Recover"))];
    Story { settle_ms: 300_000, ..plain(acts.chain(changes).collect(), Vec::new()) }
}

/// Of what the mode ended nothing is known, and after a minute of the hold that comes back the next one is tried.
fn counts_for_nothing(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn = matches!(grants[..], [first, second, ..]
        if (90_000..110_000).contains(&first) && (300_000..330_000).contains(&second));
    vec![(!in_turn).then(|| format!("grants at {grants:?}")), log.has("TrialHelped")]
}

/// Three of three stall, and fifty seconds later three of another deployment: then it is the fleet.
fn widens() -> Story {
    let create = |name| (0, Act::Create { name, spec: held(3, 60) });
    let frozen = (0..6).map(|nth| freeze(if nth < 3 { 30_000 } else { 80_000 }, nth));
    let acts = [create("chat"), create("other")].into_iter().chain(frozen);
    Story { fleet: FleetTerms::held_at(30), settle_ms: 400_000, ..plain(acts.collect(), Vec::new()) }
}

/// Nothing is tried before the fleet has been held for a minute.
fn waits_as_widely(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn =
        matches!(grants[..], [first, second, ..] if (140_000..175_000).contains(&first) && second >= first + 60_000);
    vec![(!in_turn || grants.len() != 6).then(|| format!("grants at {grants:?}")), log.has("widenedAt")]
}

/// One after a minute, none before it has served for another, and the rest as the budget allows.
fn heals_by_itself(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn = matches!(grants[..], [first, second, third]
        if (90_000..125_000).contains(&first) && second >= first + 60_000 && third > second);
    vec![
        (!in_turn).then(|| format!("grants at {grants:?}")),
        log.has("on trial, while all others are held"),
        log.has("TrialHelped"),
    ]
}

/// Engines freeze eight seconds after they serve, wherever they are, for more than six minutes.
fn lasts() -> Story {
    let sick = |at_ms, sick| (0..NODES).map(move |node| (at_ms, Act::Sick { node, sick }));
    let create = (0, Act::Create { name: "chat", spec: held(3, 60) });
    let acts = std::iter::once(create).chain(sick(20_000, true)).chain(sick(400_000, false));
    Story { settle_ms: 300_000, ..plain(acts.collect(), Vec::new()) }
}

/// A minute, two, and four; the third one helps.
fn pauses_grow(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let grown = matches!(grants[..], [first, second, third, ..]
        if first >= 80_000 && second >= first + 120_000 && third >= second + 240_000 && third > 400_000);
    let one = grants.iter().filter(|at_ms| **at_ms < 400_000).count() == 2;
    vec![
        (!grown || !one).then(|| format!("grants at {grants:?}")),
        log.has("TrialFailed"),
        log.has("in vain (so far 2)"),
        log.has("TrialHelped"),
    ]
}

/// Two deployments of three, none of which is held by itself; together they are the fleet.
fn fleet() -> Story {
    let create = |name| (0, Act::Create { name, spec: held(3, 100) });
    let acts = [create("chat"), create("other")].into_iter().chain((0..6).map(|nth| freeze(30_000, nth)));
    Story { fleet: FleetTerms::held_at(30), settle_ms: 300_000, ..plain(acts.collect(), Vec::new()) }
}

/// The second one in the whole fleet waits until the first has proven itself; then the two that are left beside the other deployment are no
/// common cause.
fn one_in_the_fleet(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn =
        matches!(grants[..], [first, second, ..] if (90_000..125_000).contains(&first) && second >= first + 60_000);
    vec![
        (!in_turn || grants.len() != 6).then(|| format!("grants at {grants:?}")),
        log.has("FleetCommonCause"),
        log.has("one at a time in the whole fleet"),
    ]
}

/// Six deployments of one, of which each has nobody else to wait: together they are the fleet.
fn singles() -> impl Iterator<Item = (u64, Act)> {
    ["a", "b", "c", "d", "e", "f"].into_iter().map(|name| (0, Act::Create { name, spec: held(1, 100) }))
}

fn fleet_of_singles() -> Story {
    let acts = singles().chain((0..6).map(|nth| freeze(30_000, nth)));
    Story { fleet: FleetTerms::held_at(30), settle_ms: 300_000, ..plain(acts.collect(), Vec::new()) }
}

/// The first is granted its restart before so many stall that they are held. Then one is tried, and the next one waits for its proof; of four
/// that are left each has its turn.
fn singles_in_turn(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn = matches!(grants[..], [before, first, second, _, _, _]
        if before < 60_000 && (90_000..125_000).contains(&first) && second >= first + 60_000);
    vec![(!in_turn).then(|| format!("grants at {grants:?}")), log.has("FleetCommonCause"), log.has("TrialHelped")]
}

/// Engines freeze eight seconds after they serve, wherever they are, for more than six minutes.
fn singles_whose_cause_lasts() -> Story {
    let sick = |at_ms, sick| (0..NODES).map(move |node| (at_ms, Act::Sick { node, sick }));
    let acts = singles().chain(sick(20_000, true)).chain(sick(400_000, false));
    Story { fleet: FleetTerms::held_at(30), settle_ms: 400_000, ..plain(acts.collect(), Vec::new()) }
}

/// While it lasts the whole fleet has no more trials than one deployment would have.
fn one_pause_in_the_fleet(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let few = grants.iter().filter(|at_ms| **at_ms < 400_000).count();
    vec![(!(1..=3).contains(&few)).then(|| format!("grants at {grants:?}")), log.has("TrialFailed")]
}

/// Nothing is tried; half a minute later a person asks for the restart of the first one that stalls, on whatever pod the word stands.
fn asked() -> Story {
    let mut acts = all_stall();
    if let Some((_, Act::Create { spec, .. })) = acts.first_mut() {
        spec["recovery"]["trialAfter"] = json!("0s");
    }
    let wish = json!({"by": "ann", "episode": FIRST_EPISODE}).to_string();
    let patch = json!({"metadata": {"annotations": {"truebeat.io/restart": wish}}});
    acts.push((60_000, Act::PatchPods { patch }));
    plain(acts, Vec::new())
}

/// UIDs are given one after another; the first engine's first stall has this one.
const FIRST_EPISODE: &str = "00000000-0000-4000-8000-000000000014-1";

/// It is granted at once, and alone; then two are no common cause.
fn by_a_person(log: &Log<'_>) -> Vec<Option<String>> {
    let grants = log.grants();
    let in_turn = matches!(grants[..], [first, second, _]
        if (60_000..64_000).contains(&first) && second >= first + 5_000);
    vec![(!in_turn).then(|| format!("grants at {grants:?}")), log.has("asked for by ann")]
}
