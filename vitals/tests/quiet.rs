//! A fast engine on a quiet machine and on noisy ones, in virtual time: how soon is a stall fenced (1b), and is the price a false fence?
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Dice, Sim, suspect};
use proptest::prelude::*;
use vitals::detector::{Detector, Policy};
use vitals::observation::Ms;

/// A machine: how late it wakes the agent, and the pauses of the engine's steps (when the next begins, how long it is).
#[derive(Debug, Clone)]
struct Noise {
    late: fn(&mut Dice) -> Ms,
    pause: fn(&mut Dice) -> (Ms, Ms),
}

const QUIET: Noise = Noise { late: |dice| dice.roll(4), pause: |dice| (2_000 + dice.roll(9_000), dice.roll(12)) };

/// What loaded machines do: from frequent small pauses to rare ones just under the floor that does not come down.
const NOISY: [Noise; 4] = [
    Noise { late: |dice| dice.roll(60), pause: |dice| (200 + dice.roll(2_000), dice.roll(90)) },
    Noise { late: |dice| dice.roll(30), pause: |dice| (1_000 + dice.roll(8_000), 30 + dice.roll(200)) },
    Noise { late: |dice| dice.roll(140), pause: |dice| (500 + dice.roll(20_000), dice.roll(240)) },
    Noise {
        late: |dice| if dice.roll(30) == 0 { 80 } else { 2 },
        pause: |dice| (3_000 + dice.roll(30_000), 100 + dice.roll(140)),
    },
];

/// An engine with steps of a millisecond.
struct Fast {
    sim: Sim,
    dice: Dice,
    noise: Noise,
    pause_at: Ms,
    pause_until: Ms,
    fences: Vec<Ms>,
}

impl Fast {
    fn new(seed: u64, noise: Noise, policy: Policy) -> Self {
        let mut sim = Sim::native();
        sim.detector = Detector::new(policy, sim.now);
        let mut sim = sim.up();
        sim.admit(8, 100);
        let pause_at = sim.now + 1_000;
        Self { sim, dice: Dice(seed), noise, pause_at, pause_until: 0, fences: Vec::new() }
    }

    /// One look, when it was asked for or a little later; is the engine fenced?
    fn look(&mut self, frozen: bool, turning: bool) -> bool {
        let due = self.sim.last.as_ref().map_or(100, |last| last.check_again_in_ms);
        let (from, late) = (self.sim.now, (self.noise.late)(&mut self.dice));
        let now = from + due + late;
        if !frozen {
            self.engine(from, now, turning);
        }
        let before = self.sim.last.as_ref().is_some_and(|last| suspect(&last.verdict));
        let fenced = suspect(&self.sim.tick(due + late).verdict);
        if fenced && !before {
            self.fences.push(now);
        }
        fenced
    }

    fn engine(&mut self, from: Ms, now: Ms, turning: bool) {
        let (mut busy, mut last_end) = (0, None);
        for at in from + 1..=now {
            if at >= self.pause_at && at >= self.pause_until {
                let (next, length) = (self.noise.pause)(&mut self.dice);
                self.pause_until = at + length;
                self.pause_at = self.pause_until + next;
            }
            if at >= self.pause_until {
                (busy, last_end) = (busy + 1, Some(at));
            }
        }
        let Some(at) = last_end else { return };
        let page = self.sim.page.as_mut().unwrap();
        page.steps_completed += busy;
        page.step_started_ms = Some(at);
        page.published_ms = at;
        if !turning {
            page.tokens_delivered += busy * 8;
            self.sim.deliver(busy, at);
        }
    }

    fn healthy(&mut self, ms: Ms) {
        let end = self.sim.now + ms;
        while self.sim.now < end {
            self.look(false, false);
        }
    }
}

#[test]
fn a_thousand_stalls_on_a_quiet_machine_are_fenced_at_200_500_and_1000_ms() {
    let mut late: Vec<Ms> = (0..1_000)
        .map(|seed| {
            let mut fast = Fast::new(seed, QUIET, Policy::default());
            let warm = 12_000 + fast.dice.roll(5_000);
            fast.healthy(warm);
            assert!(fast.fences.is_empty(), "seed {seed}: {:?}", fast.sim.last);
            let stuck = fast.sim.now;
            fast.sim.cpu = if seed % 3 == 0 { 0 } else { 1_000 };
            while !fast.look(seed % 2 == 0, true) {
                assert!(fast.sim.now - stuck < 5_000, "seed {seed} was never fenced");
            }
            fast.sim.now - stuck
        })
        .collect();
    late.sort_unstable();
    assert!(late[499] <= 200 && late[989] <= 500 && late[999] <= 1_000, "{} {} {}", late[499], late[989], late[999]);
}

#[test]
fn half_an_hour_on_a_noisy_machine_has_no_false_fence_nor_had_it_before() {
    for (kind, noise) in NOISY.iter().enumerate() {
        for seed in 0..4 {
            let fixed = Policy { native_floor_calm_ms: 300, ..Policy::default() };
            let mut before = Fast::new(seed, noise.clone(), fixed);
            let mut fast = Fast::new(seed, noise.clone(), Policy::default());
            before.healthy(1_800_000);
            fast.healthy(1_800_000);
            assert_eq!(
                (before.fences.len(), fast.fences.len()),
                (0, 0),
                "noise {kind}, seed {seed}: {:?}",
                fast.fences
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// A machine that was quiet until now pauses the engine alone, for longer than the low floor: that costs one fence, which the
    /// next look lifts, and none for ten minutes; never more than the fixed floor's fences and those few.
    #[test]
    fn a_pause_out_of_the_blue_costs_one_short_fence_and_then_none_for_ten_minutes(
        seed in any::<u64>(),
        pauses in proptest::collection::vec((1_000u64..240_000, 20u64..290), 1..12),
    ) {
        let mut fast = Fast::new(seed, QUIET, Policy::default());
        // it pauses when it is told to and at no other time
        fast.pause_at = Ms::MAX;
        fast.healthy(15_000);
        for (quiet, length) in &pauses {
            fast.healthy(*quiet);
            fast.pause_until = fast.sim.now + length;
            let mut fenced_for = 0;
            for _ in 0..8 {
                let before = fast.sim.now;
                if fast.look(false, false) {
                    fenced_for += fast.sim.now - before;
                }
            }
            prop_assert!(fenced_for <= 400, "fenced for {fenced_for} ms");
            prop_assert!(!suspect(&fast.sim.last.as_ref().unwrap().verdict));
        }
        let apart = fast.fences.windows(2).map(|pair| pair[1] - pair[0]).min();
        prop_assert!(apart.is_none_or(|ms| ms >= 600_000), "{:?}", fast.fences);
    }
}
