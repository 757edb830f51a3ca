//! Healthy engines that owe a byte and send none: a front end waits for a tool that it called itself, or holds an argument back until it is
//! whole, or a grammar is compiled. And what is told from them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::Ms;
use vitals::verdict::Verdict;

fn class(sim: &Sim) -> &'static str {
    sim.last.as_ref().unwrap().verdict.class().unwrap().name()
}

/// Streams, and counts the requests that end.
fn counts_ends() -> Sim {
    let mut sim = Sim::foreign().up();
    sim.metrics.as_mut().unwrap().requests_finished = Some(0.0);
    sim.served(40).busy(10_000)
}

/// A generation ends, its answer does not.
fn ends_a_generation(sim: &mut Sim) {
    if let Some(metrics) = &mut sim.metrics {
        metrics.requests_finished = metrics.requests_finished.map(|ended| ended + 1.0);
        metrics.progress_digest += 1;
    }
    sim.idle();
    sim.cpu = 10;
    sim.tick(100);
}

/// Begun streams whose front end waits for a tool.
fn waits_for_a_tool(mut sim: Sim) -> Sim {
    ends_a_generation(&mut sim);
    sim
}

#[test]
fn a_tool_between_two_generations_has_the_rivals_patience_and_is_killed_after_the_long_one() {
    for mut sim in [waits_for_a_tool(counts_ends()), waits_for_a_tool(Sim::native().up().busy(10_000))] {
        let fenced = sim.silence_until(400_000, suspect).unwrap();
        assert!((295_000..=301_000).contains(&fenced), "{fenced}: {:?}", sim.last);
        let confirmed = fenced + sim.silence_until(700_000, stalled).unwrap();
        assert!((890_000..=905_000).contains(&confirmed), "{confirmed}: {:?}", sim.last);
    }
}

#[test]
fn books_that_hold_work_or_are_not_of_now_leave_the_engine_its_own_rhythm() {
    type Change = fn(&mut Sim);
    let changes: [(&str, Change); 6] = [
        ("one runs", |sim| sim.metrics.as_mut().unwrap().running = Some(1.0)),
        ("one waits", |sim| sim.metrics.as_mut().unwrap().waiting = Some(1.0)),
        ("one has not begun", |sim| sim.gate.as_mut().unwrap().awaiting_first_byte = 1),
        ("nothing has ended since they came", |sim| sim.metrics.as_mut().unwrap().requests_finished = Some(0.0)),
        ("the scrape is older than the last byte", |sim| sim.scraped_at = Some(sim.now - 1_000)),
        ("a process is stopped", |sim| sim.process().stopped = 1),
    ];
    for (name, change) in changes {
        let mut sim = counts_ends();
        sim.deliver_for(100);
        let metrics = sim.metrics.as_mut().unwrap();
        (metrics.running, metrics.requests_finished) = (Some(0.0), metrics.requests_finished.map(|ended| ended + 1.0));
        sim.cpu = 10;
        change(&mut sim);
        let fenced = sim.silence_until(8_000, suspect);
        assert!(fenced.is_some(), "{name}: {:?}", sim.last);
        assert!(sim.silence_until(30_000, stalled).is_some(), "{name}: {:?}", sim.last);
    }
    // a front end that is dead waits for no tool, a loop that is stopped for no front end
    let dead: Change = |sim| {
        let since = sim.now;
        let front = sim.frontend.as_mut().unwrap();
        (front.answers, front.status, front.silent_since_ms) = (false, None, Some(since));
    };
    let stopped: Change = |sim| sim.process().state = Some('T');
    for change in [dead, stopped] {
        let mut sim = waits_for_a_tool(Sim::native().up().busy(10_000));
        change(&mut sim);
        assert!(sim.silence_until(30_000, stalled).is_some(), "{:?}", sim.last);
    }
}

#[test]
fn what_a_front_end_waited_for_teaches_no_patience() {
    let mut sim = waits_for_a_tool(counts_ends());
    for _ in 0..3 {
        assert_eq!(sim.silence_until(60_000, suspect), None, "{:?}", sim.last);
        sim.deliver_for(100);
        sim.deliver_for(100);
        ends_a_generation(&mut sim);
    }
    sim.deliver_for(100);
    sim.cpu = 800;
    let fenced = sim.silence_until(60_000, suspect).unwrap();
    assert!(fenced <= 5_000, "{fenced}");
}

#[test]
fn who_comes_while_a_front_end_waits_for_a_tool_is_silent_since_then_and_no_longer() {
    let comes = |sim: &mut Sim| {
        let gate = sim.gate.as_mut().unwrap();
        (gate.in_flight, gate.awaiting_first_byte, gate.prompt_tokens_owed) = (5, 1, 10);
    };
    let mut sim = waits_for_a_tool(counts_ends());
    sim.silence(60_000);
    comes(&mut sim);
    assert_eq!(sim.silence_until(2_000, suspect), None, "{:?}", sim.last);
    sim.deliver_for(100);
    ends_a_generation(&mut sim);
    sim.silence(60_000);
    comes(&mut sim);
    let fenced = sim.silence_until(20_000, suspect).unwrap();
    assert!((2_000..=5_000).contains(&fenced), "{fenced}");
}

/// An answer whose argument a parser holds back while its tokens are made is silent for as long as it likes: `crawling.rs`. Of a front end
/// that does not answer either there is no such doubt.
#[test]
fn tokens_that_reach_nobody_accuse_a_front_end_that_does_not_answer() {
    let mut sim = Sim::native().up().busy(10_000);
    let now = sim.now;
    let front = sim.frontend.as_mut().unwrap();
    (front.answers, front.silent_since_ms) = (false, Some(now));
    let works = |sim: &mut Sim| {
        let at = sim.now + 100;
        let page = sim.page.as_mut().unwrap();
        page.steps_completed += 2;
        page.tokens_delivered += 8;
        page.step_started_ms = Some(at - 10);
        stalled(&sim.tick(100).verdict)
    };
    let confirmed = (0..600).find(|_| works(&mut sim)).map(|ticks| ticks * 100);
    assert!(confirmed.is_some_and(|ms| ms <= 30_000), "{confirmed:?}: {:?}", sim.last);
    assert_eq!(class(&sim), "FrontendStalled");
}

/// A lone request that the scheduler leaves waiting, and what the tree does meanwhile.
fn waits_to_be_admitted(cpu: u64, state: char) -> Sim {
    let mut sim = Sim::foreign().up().served(40);
    sim.silence(3_000);
    sim = sim.busy(20_000);
    sim.depart();
    sim.silence(3_000);
    sim.admit(1, 40);
    sim.metrics.as_mut().unwrap().waiting = Some(1.0);
    sim.cpu = cpu;
    sim.process().state = Some(state);
    sim
}

#[test]
fn a_grammar_that_is_compiled_for_a_lone_request_has_the_rivals_patience_while_something_works() {
    let told = |mut sim: Sim| -> (Ms, Ms) {
        let fenced = sim.silence_until(10_000, |verdict: &Verdict| suspect(verdict)).unwrap();
        let confirmed = fenced + sim.silence_until(400_000, stalled).unwrap();
        assert_eq!(class(&sim), "AdmissionStalled");
        (fenced, confirmed)
    };
    let (fenced, compiles) = told(waits_to_be_admitted(1_000, 'R'));
    assert!(fenced <= 5_000 && (295_000..=305_000).contains(&compiles), "{fenced} {compiles}");
    let (_, quiet) = told(waits_to_be_admitted(5, 'S'));
    assert!(quiet <= 30_000, "{quiet}");
}
