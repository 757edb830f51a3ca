//! The witness finds out an engine that hangs, one that counts what it does not deliver, and one that turns for nothing; it does not blame one
//! that is slow within its word.

use super::*;

fn beat(edit: impl FnOnce(&mut Beat)) -> Beat {
    let mut beat = Beat::of_phase(Phase::Decode, 0);
    (beat.running, beat.lease_ms) = (4, 400);
    edit(&mut beat);
    beat
}

/// Looks every 50 ms for so long at what `at` says of each moment in ms.
fn watch(judge: &mut Judge, from_ms: u64, to_ms: u64, at: impl Fn(u64) -> Beat) -> Vec<String> {
    for ms in (from_ms..to_ms).step_by(50) {
        judge.look(7, &at(ms), ms * MS);
    }
    std::mem::take(&mut judge.seen.lies)
}

/// Steps of 40 ms, each of which brings four tokens.
fn well(ms: u64) -> Beat {
    let step = ms / 40;
    beat(|beat| {
        (beat.steps_completed, beat.tokens_delivered) = (step, 4 * step);
        (beat.step_started_ns, beat.published_ns) = (step * 40 * MS, step * 40 * MS);
    })
}

#[test]
fn an_engine_that_delivers_is_believed() {
    let mut judge = Judge::new(false);
    assert_eq!(watch(&mut judge, 0, 60_000, well), Vec::<String>::new());
    assert_eq!(judge.seen.tokens, well(59_950).tokens_delivered);
    // a step that declared so takes its time, and rest owes nothing
    let slow = |_| beat(|beat| (beat.lease_ms, beat.step_started_ns) = (30_000, 60_000 * MS));
    let slow = |ms| Beat { tokens_delivered: well(59_950).tokens_delivered, ..slow(ms) };
    assert_eq!(watch(&mut judge, 60_000, 85_000, slow), Vec::<String>::new());
}

#[test]
fn a_step_that_nobody_ends_is_seen() {
    let mut judge = Judge::new(false);
    watch(&mut judge, 0, 1_000, well);
    let stuck = well(960);
    assert_eq!(watch(&mut judge, 1_000, 1_900, |_| stuck), Vec::<String>::new(), "its time is not over");
    let lies = watch(&mut judge, 1_900, 6_000, |_| stuck);
    assert!(lies.iter().any(|lie| lie.starts_with("EP1: Decode lasts")), "{lies:?}");
    let mut stopped = Judge::new(true);
    watch(&mut stopped, 0, 1_000, well);
    assert!(!watch(&mut stopped, 1_000, 6_000, |_| stuck).iter().any(|lie| lie.starts_with("EP1")));
}

#[test]
fn a_start_that_stands_is_seen() {
    let mut judge = Judge::new(false);
    let load = |_| Beat { lease_ms: 10_000, ..Beat::of_phase(Phase::Load, 0) };
    assert_eq!(watch(&mut judge, 0, 20_000, load), Vec::<String>::new());
    assert!(!watch(&mut judge, 20_000, 30_000, load).is_empty());
}

#[test]
fn steps_that_bring_nothing_are_seen_and_a_struck_engine_must_count_nothing() {
    let turning = |ms| Beat { tokens_delivered: 100, ..well(ms) };
    let mut judge = Judge::new(false);
    let lies = watch(&mut judge, 0, 20_000, turning);
    assert!(lies.iter().any(|lie| lie.starts_with("EP6: 4 requests are owed")), "{lies:?}");

    let mut struck = Judge::new(false);
    watch(&mut struck, 0, 1_000, well);
    struck.strike(7, 1_000 * MS);
    let livelock = |ms| Beat { tokens_delivered: well(1_200).tokens_delivered, ..well(ms) };
    assert_eq!(watch(&mut struck, 1_200, 5_000, livelock), Vec::<String>::new());
    assert!(struck.seen.barren_steps > 50, "its steps turned");
    let mut counting = Judge::new(false);
    watch(&mut counting, 0, 1_000, well);
    counting.strike(7, 1_000 * MS);
    let lies = watch(&mut counting, 1_000, 3_000, well);
    assert!(lies.iter().any(|lie| lie.contains("after the fault struck")), "{lies:?}");
}

#[test]
fn who_could_not_look_says_nothing() {
    let mut judge = Judge::new(false);
    watch(&mut judge, 0, 1_000, well);
    let stuck = well(960);
    judge.look(7, &stuck, 60_000 * MS);
    assert_eq!(judge.seen.lies, Vec::<String>::new());
}
