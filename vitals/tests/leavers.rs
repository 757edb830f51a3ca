//! Clients who give up beside an engine that hangs: it may take them off its books and give their room back, which is no work. What tells
//! that from a page that works, and whom that must not accuse.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::detector::{Detector, Policy};
use vitals::observation::Ms;

/// An engine that counts its steps, with answers that come whole: 8 are in work, 122 wait; nobody has got anything since it began.
fn hung(iterations: Option<f64>) -> Sim {
    let mut sim = Sim::foreign().up().busy(10_000);
    sim.depart();
    sim.admit(130, 70_000);
    sim.gate.as_mut().unwrap().unstreamed = Some(130);
    let metrics = sim.metrics.as_mut().unwrap();
    (metrics.running, metrics.waiting, metrics.kv_usage) = (Some(8.0), Some(122.0), Some(0.9));
    metrics.iterations = iterations;
    sim
}

/// A client gives up, as its gate sees it.
fn leaves(sim: &mut Sim) {
    let gate = sim.gate.as_mut().unwrap();
    gate.requests_done += 1;
    gate.requests_abandoned += 1;
    gate.in_flight -= 1;
    gate.awaiting_first_byte -= 1;
    gate.unstreamed = Some(gate.in_flight);
}

/// The engine takes one off its books, who had waited and for whom it kept what was found of the prompt in its cache.
fn forgets(sim: &mut Sim) {
    let metrics = sim.metrics.as_mut().unwrap();
    metrics.waiting = metrics.waiting.map(|waiting| waiting - 1.0);
}

/// The use of the cache changes by so much.
fn room(sim: &mut Sim, by: f64) {
    let metrics = sim.metrics.as_mut().unwrap();
    metrics.kv_usage = metrics.kv_usage.map(|used| used + by);
    metrics.progress_digest += 1;
}

/// All of it at once.
fn leaves_and_gives_back(sim: &mut Sim) {
    leaves(sim);
    forgets(sim);
    room(sim, -0.01);
}

/// Seconds until the fence, where at the beginning of each `each` happens.
fn fenced(sim: &mut Sim, most_s: u32, each: impl Fn(&mut Sim, u32)) -> Option<u32> {
    (1..=most_s).find(|s| {
        each(sim, *s);
        sim.silence_until(1_000, suspect).is_some()
    })
}

/// Every 20 s one leaves and gives its room back, until `until_s`.
fn leavers_until(until_s: u32) -> impl Fn(&mut Sim, u32) {
    move |sim, s| {
        if s.is_multiple_of(20) && s <= until_s {
            leaves_and_gives_back(sim);
        }
    }
}

fn within(after: Option<u32>, from_s: u32, to_s: u32, sim: &Sim) {
    assert!(after.is_some_and(|s| (from_s..=to_s).contains(&s)), "{after:?}: {:?}", sim.last);
}

#[test]
fn the_last_who_left_does_not_begin_the_silence_anew() {
    let mut sim = hung(Some(1_000.0));
    let after = fenced(&mut sim, 900, leavers_until(280));
    within(after, 299, 315, &sim);
    let told = &sim.last.as_ref().unwrap().reasons[0].text;
    assert!(told.contains("but clients who left"), "{told}");
}

#[test]
fn a_fence_stays_when_no_more_clients_leave() {
    let mut sim = hung(None);
    let each = leavers_until(400);
    let after = fenced(&mut sim, 900, &each);
    within(after, 299, 315, &sim);
    for s in after.unwrap() + 1..800 {
        each(&mut sim, s);
        // answers that come whole are confirmed after 900 s
        let let_out = sim.silence_until(1_000, |verdict| !suspect(verdict));
        assert_eq!(let_out, None, "at {s} s: {:?}", sim.last);
    }
}

/// Steps are counted each second until 330 s, and `each` happens; until when the fence stays that is put up at 300 s.
fn fenced_for_turning(each: impl Fn(&mut Sim, u32)) -> Option<u32> {
    let mut sim = hung(Some(1_000.0));
    let turns = |sim: &mut Sim, s: u32| {
        if s < 330 {
            let metrics = sim.metrics.as_mut().unwrap();
            metrics.iterations = metrics.iterations.map(|steps| steps + 1.0);
            metrics.progress_digest += 1;
        }
        each(sim, s);
    };
    let after = fenced(&mut sim, 600, turns);
    within(after, 299, 315, &sim);
    (after.unwrap() + 1..800).find(|s| {
        turns(&mut sim, *s);
        sim.silence_until(1_000, |verdict| !suspect(verdict) && !stalled(verdict)).is_some()
    })
}

#[test]
fn a_loop_that_turned_for_nobody_is_not_let_out_because_it_ceases_to_turn() {
    assert_eq!(fenced_for_turning(|_, _| {}), None);
}

#[test]
fn a_loop_that_turned_and_takes_room_again_is_let_out_on_trial() {
    let let_out = fenced_for_turning(|sim, s| {
        if s == 340 {
            room(sim, 0.05);
        }
    });
    assert!(let_out.is_some_and(|s| (369..400).contains(&s)), "{let_out:?}");
}

#[test]
fn who_is_about_to_be_proven_hung_is_not_let_out_on_trial() {
    let mut sim = hung(None);
    let confirmed = (1..1_500).find(|s| {
        if *s == 400 {
            // the agent did not run: its clock says ten minutes after the fence before 900 s of silence have counted
            sim.gap = 5_000;
            sim.tick(5_000);
            sim.gap = 0;
        }
        sim.metrics.as_mut().unwrap().progress_digest += 1;
        sim.silence_until(1_000, stalled).is_some()
    });
    within(confirmed, 899, 905, &sim);
}

#[test]
fn an_engine_that_crawls_is_not_killed_for_clients_who_left() {
    // gauges of each 40th step, 3.5 s a step; and at each of them somebody has left who held more than was taken
    let mut sim = hung(None);
    let (mut fenced_at, began) = (None, sim.now);
    for s in 1..850 {
        match s % 140 {
            135 => leaves(&mut sim),
            0 => {
                forgets(&mut sim);
                room(&mut sim, -0.01);
            }
            _ => {}
        }
        let confirmed = sim.silence_until(1_000, stalled);
        assert_eq!(confirmed, None, "at {s} s: {:?}", sim.last);
        let is_fenced = sim.last.as_ref().is_some_and(|outcome| suspect(&outcome.verdict));
        fenced_at = fenced_at.or(is_fenced.then(|| sim.now - began));
    }
    assert!(fenced_at.is_some_and(|ms| (300_000..320_000).contains(&ms)), "{fenced_at:?}");
}

#[test]
fn room_that_was_taken_is_work() {
    let mut sim = hung(Some(1_000.0));
    let after = fenced(&mut sim, 900, |sim, s| {
        leavers_until(280)(sim, s);
        if s == 250 {
            room(sim, 0.02);
        }
    });
    within(after, 549, 600, &sim);
}

#[test]
fn a_fall_of_room_while_nobody_is_taken_off_the_books_is_movement() {
    let mut sim = hung(Some(1_000.0));
    let after = fenced(&mut sim, 900, |sim, s| {
        if s == 200 {
            leaves(sim);
            room(sim, -0.01);
        }
    });
    within(after, 499, 520, &sim);
}

#[test]
fn a_fall_that_no_client_explains_is_movement() {
    let mut sim = hung(Some(1_000.0));
    let after = fenced(&mut sim, 900, |sim, s| {
        if s == 200 {
            forgets(sim);
            room(sim, -0.01);
        }
    });
    within(after, 499, 520, &sim);
}

#[test]
fn a_client_explains_what_comes_within_a_quarter_of_a_minute_and_no_more() {
    for (later_s, from_s) in [(5, 299), (20, 519)] {
        let mut sim = hung(Some(1_000.0));
        let after = fenced(&mut sim, 900, |sim, s| {
            if s == 200 {
                leaves(sim);
            }
            if s == 200 + later_s {
                forgets(sim);
                room(sim, -0.01);
            }
        });
        within(after, from_s, from_s + 20, &sim);
    }
}

#[test]
fn one_client_explains_one_fall() {
    let mut sim = hung(Some(1_000.0));
    let after = fenced(&mut sim, 900, |sim, s| match s {
        200 => leaves_and_gives_back(sim),
        205 => {
            forgets(sim);
            room(sim, -0.01);
        }
        _ => {}
    });
    within(after, 504, 525, &sim);
}

#[test]
fn an_answer_that_came_is_no_client_who_left() {
    let mut sim = hung(Some(1_000.0));
    let after = fenced(&mut sim, 900, |sim, s| match s {
        200 => {
            let at: Ms = sim.now;
            let gate = sim.gate.as_mut().unwrap();
            (gate.requests_done, gate.chunks_delivered) = (gate.requests_done + 1, gate.chunks_delivered + 1);
            gate.last_delivery_ms = Some(at);
        }
        210 => {
            forgets(sim);
            room(sim, -0.01);
        }
        _ => {}
    });
    within(after, 509, 525, &sim);
}

#[test]
fn a_counter_that_rises_beside_the_fall_is_work() {
    let mut sim = hung(None);
    let after = fenced(&mut sim, 900, |sim, s| {
        if s == 200 {
            leaves_and_gives_back(sim);
            sim.metrics.as_mut().unwrap().counters_digest += 1;
        }
    });
    within(after, 499, 520, &sim);
}

#[test]
fn what_the_books_held_before_they_were_lost_from_sight_is_compared_with_nothing() {
    let mut sim = hung(None);
    let after = fenced(&mut sim, 900, |sim, s| {
        if s == 200 {
            let seen = sim.metrics.take();
            sim.silence_until(11_000, |_| false);
            sim.metrics = seen;
            leaves_and_gives_back(sim);
        }
    });
    within(after, 489, 520, &sim);
}

#[test]
fn who_sees_a_fall_first_has_not_seen_what_was_before_it() {
    let mut sim = hung(None);
    let after = fenced(&mut sim, 900, |sim, s| match s {
        // another agent looks from here on, and its gate remembers when something was last handed out
        250 => sim.detector = Detector::new(Policy::default(), sim.now),
        260 => leaves_and_gives_back(sim),
        _ => {}
    });
    within(after, 549, 565, &sim);
}

#[test]
fn a_page_is_read_more_seldom_than_the_gate() {
    let mut sim = hung(None);
    let mut scraped = sim.metrics.clone().unwrap();
    let began = sim.now;
    let mut fenced_at = None;
    for tick in 0..4_000_u64 {
        if tick % 200 == 150 && tick <= 2_800 {
            leaves_and_gives_back(&mut sim);
        }
        // once in 2 s
        if tick % 20 == 0 {
            scraped = sim.metrics.clone().unwrap();
            sim.scraped_at = Some(sim.now + 100);
        }
        let written = sim.metrics.replace(scraped.clone());
        let outcome = sim.tick(100);
        sim.metrics = written;
        fenced_at = fenced_at.or(suspect(&outcome.verdict).then(|| sim.now - began));
    }
    assert!(fenced_at.is_some_and(|ms| (299_000..315_000).contains(&ms)), "{fenced_at:?}");
}

#[test]
fn an_engine_that_counts_whole_answers_alone_shows_its_work_in_its_cache() {
    let mut sim = hung(None);
    let after = fenced(&mut sim, 900, leavers_until(280));
    within(after, 299, 315, &sim);
}

#[test]
fn falls_at_scrape_after_scrape_may_hide_what_is_taken_beside_them() {
    let mut sim = hung(None);
    let after = fenced(&mut sim, 900, |sim, s| {
        if s == 200 {
            for _ in 0..5 {
                leaves_and_gives_back(sim);
                sim.tick(100);
            }
        }
    });
    within(after, 499, 520, &sim);
}

#[test]
fn data_parallel_ranks_behind_one_page_are_judged_by_all_that_moves() {
    let mut sim = hung(Some(1_000.0));
    let rank = |rank| vitals::observation::RankMetrics { rank, ..Default::default() };
    sim.metrics.as_mut().unwrap().ranks = vec![rank(0), rank(1)];
    let after = fenced(&mut sim, 900, leavers_until(280));
    within(after, 579, 600, &sim);
}

#[test]
fn long_prompts_in_chunks_are_accused_by_nobody_who_leaves() {
    let mut sim = hung(None);
    sim.metrics.as_mut().unwrap().kv_usage = Some(0.2);
    let after = fenced(&mut sim, 1_500, |sim, s| {
        // a chunk is a step of 30 s
        match s % 30 {
            0 => room(sim, 0.015),
            10 => leaves(sim),
            20 => {
                forgets(sim);
                room(sim, -0.01);
            }
            _ => {}
        }
    });
    assert_eq!(after, None, "{:?}", sim.last);
}
