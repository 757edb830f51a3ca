//! A native engine on a bad machine, in virtual time: how late is the fence, and does anything healthy get fenced (V6, budgets)?
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Dice, Sim, suspect};
use vitals::observation::{Ms, PagePhase};

/// A step of healthy decode on a machine that pauses everybody: mostly short, now and then a quarter of a second.
fn step_ms(dice: &mut Dice) -> Ms {
    match dice.roll(200) {
        0 => 200 + dice.roll(60),
        1..10 => 60 + dice.roll(60),
        _ => 4 + dice.roll(30),
    }
}

/// Runs steps of these lengths under ticks of 100 ms until the time is over or a prompt is through; false as soon as something is suspected.
fn run(sim: &mut Sim, dice: &mut Dice, ms: Ms, mut step: impl FnMut(&mut Dice, &mut Sim) -> Ms) -> bool {
    let end = sim.now + ms;
    let mut step_end = sim.now + step(dice, sim);
    while sim.now < end {
        let tick = 90 + dice.roll(30);
        let upto = sim.now + tick;
        while step_end <= upto {
            let page = sim.page.as_mut().unwrap();
            page.steps_completed += 1;
            let prefill = page.phase == PagePhase::Prefill;
            page.prompt_tokens_owed = page.prompt_tokens_owed.saturating_sub(u64::from(page.phase_tokens));
            if !prefill {
                page.tokens_delivered += u64::from(page.running);
                sim.deliver(4, step_end);
            }
            sim.page.as_mut().unwrap().step_started_ms = Some(step_end);
            step_end += step(dice, sim);
        }
        if suspect(&sim.tick(tick).verdict) {
            return false;
        }
        let page = sim.page.as_ref().unwrap();
        if page.phase == PagePhase::Prefill && page.prompt_tokens_owed == 0 {
            return true;
        }
    }
    true
}

#[test]
fn thirty_minutes_of_mixed_healthy_work_raise_no_alarm() {
    let mut sim = Sim::native().up();
    let mut dice = Dice(7);
    for round in 0..60u64 {
        sim.admit(1 + u32::try_from(dice.roll(8)).unwrap(), 100);
        assert!(run(&mut sim, &mut dice, 12_000, |dice, _| step_ms(dice)), "round {round}, decode: {:?}", sim.last);
        if round % 10 == 3 {
            let page = sim.page.as_mut().unwrap();
            (page.phase, page.phase_tokens, page.prompt_tokens_owed, page.lease_ms) =
                (PagePhase::Prefill, 512, 40_000, 30_000);
            let grows = |dice: &mut Dice, sim: &mut Sim| {
                30 + (40_000 - sim.page.as_ref().unwrap().prompt_tokens_owed.min(40_000)) / 30 + dice.roll(20)
            };
            assert!(run(&mut sim, &mut dice, 600_000, grows), "round {round}, one very long prefill: {:?}", sim.last);
            let now = sim.now;
            let page = sim.page.as_mut().unwrap();
            (page.phase, page.phase_tokens, page.lease_ms, page.step_started_ms) =
                (PagePhase::Decode, page.running, 2_000, Some(now));
            assert!(
                run(&mut sim, &mut dice, 3_000, |dice, _| step_ms(dice)),
                "round {round}, after the prefill: {:?}",
                sim.last
            );
        }
        sim.leave();
        sim.idle();
        assert!(!suspect(&sim.silence(10_000).verdict), "round {round}, idle");
    }
}

#[test]
fn two_hundred_stalls_are_fenced_with_p99_half_a_second_and_at_most_a_second() {
    let mut dice = Dice(11);
    let mut late: Vec<Ms> = (0..200)
        .map(|_| {
            let mut sim = Sim::native().up();
            sim.admit(4, 100);
            let warm = 5_000 + dice.roll(3_000);
            assert!(run(&mut sim, &mut dice, warm, |dice, _| 4 + dice.roll(20)));
            sim.cpu = 0;
            // it froze somewhere in the tick before
            let before = dice.roll(100);
            let frozen = sim.now - before;
            sim.page.as_mut().unwrap().step_started_ms = Some(frozen);
            let mut next = 100;
            while !suspect(&sim.tick(next).verdict) {
                next = sim.last.as_ref().unwrap().check_again_in_ms;
                assert!(sim.now - frozen < 5_000, "never fenced");
            }
            sim.now - frozen
        })
        .collect();
    late.sort_unstable();
    assert!(late[197] <= 500 && late[199] <= 1_000, "p50 {} p99 {} max {}", late[99], late[197], late[199]);
}
