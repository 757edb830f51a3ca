//! A tree without CPU time that waits for its disk: it may be swapping, or load what its step needs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled};

#[test]
fn a_tree_that_waits_for_its_disk_may_be_swapping() {
    let confirm = |state| {
        let mut sim = Sim::native().up().busy(10_000);
        sim.cpu = 10;
        sim.process().state = Some(state);
        sim.silence_until(60_000, stalled).unwrap()
    };
    let (disk, lock) = (confirm('D'), confirm('S'));
    assert!(disk >= 6_000 && lock <= 5_000, "{disk} {lock}");
}

#[test]
fn a_tree_that_reads_may_be_loading_what_its_step_needs() {
    let confirm = |bytes_a_tick: u64| {
        let mut sim = Sim::native().up().busy(10_000);
        sim.cpu = 10;
        (0..600).find(|tick| {
            sim.process().read_chars = Some(tick * bytes_a_tick);
            stalled(&sim.tick(100).verdict)
        })
    };
    let (loads, crumbs, metrics) = (confirm(10 << 20).unwrap(), confirm(300).unwrap(), confirm(40 << 10).unwrap());
    assert!(loads >= 60 && crumbs <= 50 && metrics <= 50, "{loads} {crumbs} {metrics}");
}
