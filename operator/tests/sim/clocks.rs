//! Clocks that are wrong (B4, C1), and an executor that is starved (B9): who leads, and what it may cost where two believe that they do.

use super::{
    act::Act,
    rows::{Row, row, scene},
    said::Log,
    story::{Story, create, freeze, plain},
};

/// What is wrong with the clocks of an operator's machine, for all processes that run there.
#[derive(Debug, Clone)]
pub enum Clock {
    /// The wall clock is so far ahead, or behind.
    Off { ms: i64 },
    /// The monotonic clock all but stands still for so long: to that operator its lease does not run out, and its elector's pauses do not end.
    Stands { ms: u64 },
}

/// Whoever has the Lease, and whoever has not.
const LEADER: usize = 0;
const OTHER: usize = 1;
const STATUS: &str = "/inferencedeployments/chat/status 409";

pub fn rows() -> Vec<Row> {
    vec![
        row("b4-two-leaders", two_leaders, two_write_and_one_is_refused),
        row("b4-clocks-apart", || apart(120_000), |log| vec![log.granted_by(45_000), log.incidents(3)]),
        row("b4-clocks-hours-apart", || apart(3_600_000), |log| vec![log.granted_by(45_000), log.incidents(3)]),
        row("b9-starved-executor", starved, |log| vec![log.granted_by(45_000), log.incidents(1)]),
    ]
}

/// The leader's clock stands for a minute: for most of it two lead, and everything stalls meanwhile. Then it knows, and one leads.
fn two_leaders() -> Story {
    let stands = Act::Clock { operator: LEADER, clock: Clock::Stands { ms: 60_000 } };
    let stalls = [freeze(45_000, 0), freeze(45_000, 1), freeze(46_000, 2), freeze(90_000, 0)];
    plain([vec![create(3), (20_000, stands)], stalls.to_vec()].concat(), Vec::new())
}

/// Both are at work at the same time, and it is the precondition of a write that keeps the budget. (P15 is asked at every step.)
fn two_write_and_one_is_refused(log: &Log<'_>) -> Vec<Option<String>> {
    let refused = log.times(&["PUT /apis/", STATUS]).into_iter().any(|at_ms| (45_000..80_000).contains(&at_ms));
    vec![
        log.writers_between((45_000, 80_000), 2),
        (!refused).then(|| "no write of the one was refused for the other's".to_owned()),
        log.granted_by(55_000),
        log.incidents(4),
        log.writers_between((90_000, 120_000), 1),
    ]
}

/// The wall clocks of the two differ by twice as much, and the one takes over from the other in the middle of a recovery, and back.
fn apart(ms: i64) -> Story {
    let off = |operator, ms| (0, Act::Clock { operator, clock: Clock::Off { ms } });
    let dies = |at_ms| (at_ms, Act::Kill { operator: LEADER });
    let clocks = vec![create(3), off(LEADER, ms), off(OTHER, -ms)];
    let story = vec![freeze(20_000, 0), dies(23_500), freeze(90_000, 1), dies(93_500), freeze(170_000, 2)];
    let mut story = plain([clocks, story].concat(), Vec::new());
    story.settle_ms = 400_000;
    story
}

/// One call blocks the leader's executor for a minute, in the middle of a recovery: neither a pass nor the elector runs, nor a deadline.
fn starved() -> Story {
    scene(vec![(23_250, Act::Pause { operator: LEADER, ms: 60_000 })], Vec::new())
}
