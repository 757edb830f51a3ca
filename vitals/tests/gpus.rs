//! GPUs that tell less than all, or other ones from reading to reading: what is not told accuses nobody (D7).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled};
use vitals::observation::{GpuObs, Ms};

type Watts = Option<f64>;

fn card(util: u32, memory_util: u32, power_watts: Watts) -> GpuObs {
    GpuObs { util, memory_util, power_watts, power_limit_watts: Some(600.0), ..GpuObs::default() }
}

/// Of an engine that spins in silence: when it is confirmed, and whether a GPU was called cold.
fn hangs(mut sim: Sim, mut look: impl FnMut(&mut Sim)) -> (Ms, bool) {
    let (began, mut cold) = (sim.now, false);
    while sim.now - began < 700_000 {
        look(&mut sim);
        let outcome = sim.tick(100);
        cold |= outcome.reasons.iter().any(|reason| reason.source == "gpu" && reason.text.contains("cold"));
        if stalled(&outcome.verdict) {
            return (sim.now - began, cold);
        }
    }
    panic!("never confirmed: {:?}", sim.last);
}

/// Delivers for twenty seconds, the last ten of them beside this look at its GPUs; spins.
fn worked(mut look: impl FnMut(&mut Sim)) -> Sim {
    let mut sim = Sim::foreign().up().busy(10_000);
    (sim.process().state, sim.cpu) = (Some('R'), 1_000);
    for _ in 0..100 {
        look(&mut sim);
        sim.deliver_for(100);
    }
    sim
}

/// A hang beside a busy card without memory traffic: of this power while it worked, and of this since.
fn cold_hang(worked_at: Watts, hangs_at: Watts) -> (Ms, bool) {
    hangs(worked(|sim| sim.gpus = vec![card(98, 40, worked_at)]), |sim| sim.gpus = vec![card(98, 2, hangs_at)])
}

#[test]
fn d07_a_card_whose_power_is_not_told_is_not_cold() {
    let (told_ms, cold) = cold_hang(Some(450.0), Some(150.0));
    assert!(cold, "a third of what it drew");
    // after a baseline, against the limit alone, and where nothing was ever told
    for (worked_at, hangs_at) in [(Some(450.0), None), (None, None)] {
        let (ms, cold) = cold_hang(worked_at, hangs_at);
        assert!(!cold && ms >= told_ms + 5_000, "{worked_at:?}, {hangs_at:?}: {ms}, told {told_ms}");
    }
    let (_, cold) = cold_hang(None, Some(150.0));
    assert!(cold, "a power that is told by now is held against the limit");
    let unlimited = |sim: &mut Sim| sim.gpus = vec![GpuObs { power_limit_watts: None, ..card(98, 2, Some(150.0)) }];
    let (_, cold) = hangs(worked(|sim| sim.gpus = vec![card(98, 40, None)]), unlimited);
    assert!(!cold, "there is nothing to hold it against");
    // of two cards one alone tells that it is cold
    let both = |sim: &mut Sim| sim.gpus = vec![card(98, 2, Some(150.0)), card(98, 2, None)];
    let (_, cold) = hangs(worked(|sim| sim.gpus = vec![card(98, 40, Some(450.0)); 2]), both);
    assert!(!cold);
}

#[test]
fn a_card_that_moves_memory_works_whether_its_power_is_told_or_not() {
    for hangs_at in [Some(430.0), None] {
        for worked_at in [Some(450.0), None].into_iter().filter(|at| at.is_some() || hangs_at.is_none()) {
            let sim = worked(|sim| sim.gpus = vec![card(98, 40, worked_at)]);
            let (ms, cold) = hangs(sim, |sim| sim.gpus = vec![card(98, 40, hangs_at)]);
            assert!(ms >= 290_000 && !cold, "{worked_at:?}, {hangs_at:?}: {ms}");
        }
    }
}

#[test]
fn d07_cards_that_come_and_go_accuse_nobody() {
    // each reading has another number of cards; the one that idles is now the first and now the last
    let coming_and_going = |at: usize| {
        let count = [4, 1, 0, 8, 2][at % 5];
        let mut gpus = vec![card(98, 40, Some(450.0)); count];
        let idle = GpuObs { uuid: "GPU-idle".to_owned(), ..card(0, 0, Some(80.0)) };
        gpus.insert(if at.is_multiple_of(2) { 0 } else { count }, idle);
        gpus
    };
    let mut at: usize = 0;
    let mut look = |sim: &mut Sim| {
        at += 1;
        sim.gpus = if at.is_multiple_of(7) { Vec::new() } else { coming_and_going(at) };
    };
    let sim = worked(&mut look);
    let (_, cold) = hangs(sim, look);
    assert!(!cold, "the power of one card is not held against the use of another");
    // and where they are all cold, it is said of those that are left
    let sim = worked(|sim| sim.gpus = vec![card(98, 40, Some(450.0)); 4]);
    let (_, cold) = hangs(sim, |sim| sim.gpus = vec![card(98, 2, Some(150.0)); 1 + (sim.now / 100 % 3) as usize]);
    assert!(cold);
}
