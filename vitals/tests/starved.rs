//! An agent that is scheduled late, beside an engine that runs and beside one that is paused with it, in virtual time.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Dice, Sim, stalled, suspect};
use vitals::observation::{Ms, ThreadObs};
use vitals::verdict::StallClass;

/// What the engine does with the time it is given.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Work {
    Decode,
    /// Steps turn, nothing is delivered.
    Livelock,
    /// One step that burns a core.
    Spin,
    /// One step that waits for a lock.
    Wait,
}

/// What becomes of the engine while the agent is late.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Meanwhile {
    Runs,
    Paused,
}

struct Machine {
    sim: Sim,
    dice: Dice,
    /// Engine time left until the step under way ends.
    left_ms: Ms,
    late: fn(&mut Dice) -> Ms,
    meanwhile: Meanwhile,
}

impl Machine {
    fn warm(seed: u64, late: fn(&mut Dice) -> Ms, meanwhile: Meanwhile) -> Self {
        let mut sim = Sim::native().up();
        sim.admit(4, 100);
        sim.process().state = Some('R');
        let mut machine = Self { sim, dice: Dice(seed), left_ms: 5, late, meanwhile };
        assert_eq!(machine.run(Work::Decode, 20_000), None, "a healthy engine was fenced: {:?}", machine.sim.last);
        machine
    }

    /// Runs for so long; when it was first suspected, if it was.
    fn run(&mut self, work: Work, ms: Ms) -> Option<Ms> {
        let began = self.sim.now;
        while self.sim.now - began < ms {
            let due = self.sim.last.as_ref().map_or(100, |last| last.check_again_in_ms);
            let late = (self.late)(&mut self.dice);
            self.engine(work, due, self.sim.now);
            let paused = if self.meanwhile == Meanwhile::Paused { late } else { 0 };
            self.engine(work, late - paused, self.sim.now + due + paused);
            // what the agent itself calls a gap
            self.sim.gap = if late >= 150 { late } else { 0 };
            self.sim.cpu = 0;
            if suspect(&self.sim.tick(due + late).verdict) {
                return Some(self.sim.now - began);
            }
        }
        None
    }

    /// The engine gets this much time, from this moment on.
    fn engine(&mut self, work: Work, mut ms: Ms, mut at: Ms) {
        self.sim.process().cpu_ms += if work == Work::Wait { 0 } else { ms };
        while matches!(work, Work::Decode | Work::Livelock) && ms >= self.left_ms {
            at += self.left_ms;
            ms -= self.left_ms;
            self.left_ms = 2 + self.dice.roll(12);
            let page = self.sim.page.as_mut().unwrap();
            page.steps_completed += 1;
            page.step_started_ms = Some(at);
            page.published_ms = at;
            if work == Work::Decode {
                page.tokens_delivered += 4;
                self.sim.deliver(4, at);
            }
        }
        if matches!(work, Work::Decode | Work::Livelock) {
            self.left_ms -= ms;
        }
    }
}

fn often_late(dice: &mut Dice) -> Ms {
    50 + dice.roll(450)
}

fn sometimes_late(dice: &mut Dice) -> Ms {
    if dice.roll(8) == 0 { 50 + dice.roll(450) } else { dice.roll(5) }
}

#[test]
fn a_starved_agent_beside_a_running_engine_fences_a_stall_in_its_own_time() {
    for (work, bound) in [(Work::Livelock, 1_200), (Work::Spin, 1_200), (Work::Wait, 3_000)] {
        let mut late: Vec<Ms> = (0..60)
            .map(|seed| {
                let mut machine = Machine::warm(seed, often_late, Meanwhile::Runs);
                if work == Work::Wait {
                    machine.sim.process().state = Some('S');
                }
                machine.run(work, 30_000).unwrap()
            })
            .collect();
        late.sort_unstable();
        assert!(late[59] <= bound, "{work:?}: p50 {} max {}", late[29], late[59]);
    }
}

#[test]
fn the_class_is_told_as_if_the_agent_were_on_time() {
    for (work, class) in [(Work::Livelock, StallClass::Livelock), (Work::Spin, StallClass::DeviceWait)] {
        let mut machine = Machine::warm(3, often_late, Meanwhile::Runs);
        machine.run(work, 30_000).unwrap();
        assert_eq!(machine.sim.last.unwrap().verdict.class(), Some(&class));
    }
}

#[test]
fn a_machine_that_pauses_everybody_excuses_everybody() {
    for late in [often_late as fn(&mut Dice) -> Ms, sometimes_late] {
        for seed in 0..10 {
            let mut machine = Machine::warm(seed, late, Meanwhile::Paused);
            assert_eq!(machine.run(Work::Decode, 120_000), None, "seed {seed}: {:?}", machine.sim.last);
        }
    }
}

#[test]
fn one_pause_of_everybody_is_excused_however_long_it_is() {
    for pause in [200, 700, 1_500, 5_000, 60_000] {
        for seed in 0..20 {
            let mut machine = Machine::warm(seed, |dice| dice.roll(5), Meanwhile::Paused);
            machine.sim.gap = pause;
            machine.sim.cpu = 0;
            let outcome = machine.sim.tick(pause + 20);
            assert!(!suspect(&outcome.verdict), "{pause} ms: {:?}", outcome.reasons);
            assert_eq!(machine.run(Work::Decode, 5_000), None, "after {pause} ms: {:?}", machine.sim.last);
        }
    }
}

#[test]
fn a_stall_on_a_machine_that_pauses_everybody_is_fenced_all_the_same() {
    for work in [Work::Livelock, Work::Spin, Work::Wait] {
        for seed in 0..20 {
            let mut machine = Machine::warm(seed, sometimes_late, Meanwhile::Paused);
            machine.sim.process().state = Some(if work == Work::Wait { 'S' } else { 'R' });
            let fenced = machine.run(work, 30_000);
            assert!(fenced.is_some_and(|ms| ms <= 6_000), "{work:?} seed {seed}: {fenced:?}");
        }
    }
}

/// A thread as it was found, after a look a second before: what it got of a core, and how long it stood in line for one.
fn thread(state: char, burned_ms: u64, runnable_ms: Option<u64>) -> ThreadObs {
    ThreadObs { tid: 7, state, burned_ms, span_ms: 1_000, runnable_ms, ..ThreadObs::default() }
}

/// The class of a native step that never ends, confirmed, where the tree gets 60 ms of a core a second. `looks`: are the threads looked at
/// again in that silence?
fn class_on_a_crowded_machine(main: char, thread: ThreadObs, looks: bool) -> StallClass {
    let mut sim = Sim::native().up().busy(20_000);
    sim.process().state = Some(main);
    sim.process().threads = vec![thread];
    sim.process().threads_at_ms = Some(sim.now);
    sim.cpu = 60;
    while !sim.last.as_ref().is_some_and(|last| stalled(&last.verdict)) {
        if looks && sim.now.is_multiple_of(1_000) {
            sim.process().threads_at_ms = Some(sim.now);
        }
        sim.tick(100);
        assert!(sim.now < common::T0 + 60_000, "never confirmed: {:?}", sim.last);
    }
    sim.last.unwrap().verdict.class().unwrap().clone()
}

#[test]
fn a_spin_is_told_by_what_the_thread_wants_and_not_by_what_it_gets() {
    let asleep = thread('S', 0, None);
    assert_eq!(class_on_a_crowded_machine('S', asleep.clone(), true), StallClass::StepStalled);
    assert_eq!(class_on_a_crowded_machine('R', asleep, true), StallClass::DeviceWait, "found running at every look");
    // an engine that steps in another thread than its main one, which sleeps
    let spins = thread('R', 50, Some(930));
    assert_eq!(class_on_a_crowded_machine('S', spins.clone(), true), StallClass::DeviceWait);
    assert_eq!(class_on_a_crowded_machine('S', spins, false), StallClass::StepStalled, "it spun before the silence");
    let wakes_up = thread('R', 5, Some(800));
    assert_eq!(
        class_on_a_crowded_machine('S', wakes_up, true),
        StallClass::StepStalled,
        "it stands in line for crumbs"
    );
    let unknown = |burned_ms| class_on_a_crowded_machine('S', thread('R', burned_ms, None), true);
    assert_eq!([unknown(300), unknown(50)], [StallClass::DeviceWait, StallClass::StepStalled]);
}

#[test]
fn one_that_burned_for_what_was_left_and_then_slept_waits_for_no_device() {
    let mut sim = Sim::foreign().up().busy(20_000);
    sim.process().state = Some('R');
    sim.cpu = 900;
    sim.silence(15_000);
    sim.process().state = Some('S');
    sim.cpu = 10;
    let outcome = sim.silence(5_000);
    assert_ne!(outcome.verdict.class(), Some(&StallClass::DeviceWait), "{:?}", outcome.reasons);
}

/// How long a native engine is silent before it is fenced, where the unluckiest thread of its step stands in line for this share of it.
fn fenced_after(queued_permille: Option<u64>) -> Ms {
    let mut sim = Sim::native().up().busy(20_000);
    sim.page.as_mut().unwrap().step_started_ms = Some(sim.now);
    let began = sim.now;
    while !sim.last.as_ref().is_some_and(|last| suspect(&last.verdict)) {
        sim.process().queued_ms = queued_permille.map(|share| 20 * share / 1_000);
        sim.tick(20);
        assert!(sim.now < began + 30_000, "never fenced: {:?}", sim.last);
    }
    sim.now - began
}

#[test]
fn time_in_line_for_a_core_is_not_the_engines_silence_but_no_hang_hides_in_it() {
    let alone = fenced_after(None);
    assert_eq!(fenced_after(Some(0)), alone);
    let half = fenced_after(Some(500));
    assert!(half > 2 * alone - 100 && half <= 2 * alone + 100, "{half} ms, alone {alone} ms");
    let burns = fenced_after(Some(1_000));
    assert!(burns > half && burns <= 4 * alone + 200, "{burns} ms, alone {alone} ms");
}

/// A reading that is looked at again says nothing of the time since.
#[test]
fn a_wait_counts_once() {
    let mut sim = Sim::native().up().busy(20_000);
    let mut obs = sim.observation();
    obs.pages.value.as_mut().unwrap()[0].step_started_ms = Some(sim.now);
    obs.proc.value.as_mut().unwrap().queued_ms = Some(300);
    obs.proc.at_ms = sim.now + 20;
    let began = sim.now;
    while !sim.last.as_ref().is_some_and(|last| suspect(&last.verdict)) {
        sim.now += 20;
        obs.pages.at_ms = sim.now;
        sim.last = Some(sim.detector.step(sim.now, &obs));
        assert!(sim.now < began + 30_000, "never fenced: {:?}", sim.last);
    }
    assert!(sim.now - began <= fenced_after(None) + 100, "{} ms", sim.now - began);
}
