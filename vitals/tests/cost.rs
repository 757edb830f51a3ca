//! What a healthy tick costs: no allocation (1f), counted by an allocator of this test's own, one count a thread.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use common::Sim;
use vitals::observation::{Ms, Observation};
use vitals::verdict::{Outcome, Verdict};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator as it came; counting touches a plain cell of this thread.
#[allow(unsafe_code, reason = "an allocator cannot be written otherwise")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // a thread that ends may have lost its cell already
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are the ones asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Healthy observations of a warm engine, one each 100 ms from `sim.now` on.
fn healthy(sim: &mut Sim, count: u64) -> Vec<(Ms, Observation)> {
    let one = |_| {
        sim.deliver_for(100);
        (sim.now, sim.observation())
    };
    (0..count).map(one).collect()
}

/// Allocations and nanoseconds of these ticks, on a detector as warm as the sim's was.
fn cost(mut sim: Sim, idle: bool) -> (u64, u128) {
    let mut detector = sim.detector.clone();
    let observations = if idle {
        sim.idle();
        sim.leave();
        let one = |_| {
            sim.tick(100);
            (sim.now, sim.observation())
        };
        (0..2_000).map(one).collect::<Vec<_>>()
    } else {
        healthy(&mut sim, 2_000)
    };
    let mut outcome = Outcome::default();
    for (now, obs) in &observations[..20] {
        detector.step_into(*now, obs, &mut outcome);
    }
    let (before, began) = (ALLOCATIONS.get(), Instant::now());
    for (now, obs) in &observations[20..] {
        detector.step_into(*now, obs, &mut outcome);
    }
    let ns = began.elapsed().as_nanos() / 1_980;
    let allocations = ALLOCATIONS.get() - before;
    assert!(matches!(outcome.verdict, Verdict::Progressing | Verdict::Idle), "{outcome:?}");
    assert!(!outcome.reasons.is_empty());
    (allocations, ns)
}

#[test]
fn a_healthy_tick_allocates_nothing() {
    for idle in [false, true] {
        for (kind, sim) in [("native", Sim::native().up().busy(20_000)), ("foreign", Sim::foreign().up().busy(20_000))]
        {
            let (allocations, ns) = cost(sim, idle);
            assert_eq!(allocations, 0, "{kind}, idle {idle}");
            println!("detector_tick_{kind}{} {ns} ns <=2000", if idle { "_idle" } else { "" });
        }
    }
}

#[test]
fn the_counter_counts() {
    let before = ALLOCATIONS.get();
    let some = std::hint::black_box(vec![1u8; 8]);
    assert_eq!((ALLOCATIONS.get() - before, some.len()), (1, 8));
}

#[test]
fn words_are_never_of_another_verdict_and_figures_at_most_a_second_old() {
    let mut sim = Sim::foreign().up().busy(20_000);
    let mut detector = sim.detector.clone();
    let mut kept = Outcome::default();
    let mut newest = 4;
    for round in 0..400u32 {
        if round % 7 == 0 {
            sim.admit(1, 10);
            newest += 1;
        }
        if round % 120 == 119 {
            sim.leave();
            newest = 0;
        }
        sim.maintenance = round % 50 > 40;
        let fresh = if newest > 0 { sim.deliver_for(100) } else { sim.tick(100) };
        detector.step_into(sim.now, &sim.observation(), &mut kept);
        let figures = |outcome: &Outcome| -> Vec<String> {
            outcome.reasons.iter().map(|reason| reason.text.replace(char::is_numeric, "")).collect()
        };
        assert_eq!((&fresh.verdict, &fresh.actions, figures(&fresh)), (&kept.verdict, &kept.actions, figures(&kept)));
    }
}
