//! Data-parallel engines behind one front end, a page each (H1.7): each is judged by its own.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]
mod common;

use common::{Sim, stalled, suspect};
use vitals::observation::{LogHit, Ms, PageObs, PagePhase};
use vitals::verdict::{Action, StallClass, Verdict};

/// What a prefill step of [`CHUNK`] tokens takes, and how many ticks of 100 ms that is.
const CHUNK_MS: Ms = 1_000;
const CHUNK: u32 = 2_048;

/// Two engines of one process each; the second has no work yet.
fn two() -> Sim {
    let mut sim = Sim::native().up();
    let page = sim.page.as_mut().unwrap();
    (page.world_size, page.engines) = (2, 2);
    sim.peers = vec![PageObs { rank: 1, ..page.clone() }];
    sim
}

/// The engine of this rank begins a step.
fn begins(page: &mut PageObs, now: Ms, phase: PagePhase, tokens: u32) {
    if page.phase != phase {
        page.phase_entered_ms = now;
    }
    (page.phase, page.phase_tokens, page.running) = (phase, tokens, page.running.max(1));
    page.lease_ms = 120_000 + u64::from(tokens) * 10;
    page.step_started_ms = Some(now);
}

fn ends(page: &mut PageObs, tokens: u64) {
    page.steps_completed += 1;
    page.tokens_delivered += tokens;
    page.step_started_ms = None;
}

/// 100 ms in which the first engine decodes; `other` is what the second does with its page.
fn decodes(sim: &mut Sim, other: impl FnOnce(&mut PageObs, Ms)) -> Verdict {
    let at = sim.now + 100;
    other(&mut sim.peers[0], at);
    let verdict = sim.deliver_for(100).verdict;
    assert_eq!(sim.page.as_ref().unwrap().phase, PagePhase::Decode);
    verdict
}

/// A chunk of a long prompt, as many ticks as it takes; the verdicts.
fn chunk(sim: &mut Sim, to_go: u64) -> Vec<Verdict> {
    (0..CHUNK_MS / 100)
        .map(|tick| {
            decodes(sim, |page, at| {
                if tick == 0 {
                    ends(page, 0);
                    page.prompt_tokens_owed = to_go;
                    begins(page, at, PagePhase::Prefill, CHUNK);
                }
            })
        })
        .collect()
}

/// Both have decoded, and the second has taken two long prompts: what is usual is known of both.
fn warm() -> Sim {
    let mut sim = two();
    sim.admit(4, 200);
    for _ in 0..600 {
        decodes(&mut sim, |page, at| {
            ends(page, 1);
            begins(page, at, PagePhase::Decode, 0);
        });
    }
    for _ in 0..2 {
        prompt(&mut sim, 8);
    }
    sim
}

/// The second engine takes a prompt of so many chunks and decodes a little; the verdicts.
fn prompt(sim: &mut Sim, chunks: u64) -> Vec<Verdict> {
    let mut verdicts: Vec<Verdict> = (0..chunks).rev().flat_map(|left| chunk(sim, left * u64::from(CHUNK))).collect();
    verdicts.extend((0..20).map(|_| {
        decodes(sim, |page, at| {
            ends(page, 1);
            page.prompt_tokens_owed = 0;
            begins(page, at, PagePhase::Decode, 0);
        })
    }));
    verdicts
}

#[test]
fn a_prefill_of_one_engine_is_not_measured_by_the_decode_of_another() {
    let mut sim = warm();
    // longer than decode may starve: no request that has begun is the second engine's
    let verdicts = prompt(&mut sim, 80);
    assert_eq!(verdicts.len(), 820);
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Progressing), "{verdicts:?}");
}

#[test]
fn an_idle_engine_does_not_make_the_prefill_of_another_an_admission() {
    let mut sim = two();
    sim.admit(1, 400_000);
    sim.idle();
    let now = sim.now;
    let peer = &mut sim.peers[0];
    peer.prompt_tokens_owed = 400_000;
    begins(peer, now, PagePhase::Prefill, 100_000);
    for _ in 0..600 {
        let verdict = sim.tick(100).verdict;
        assert_eq!(verdict, Verdict::Progressing, "after {} ms", sim.now - now);
    }
}

#[test]
fn an_engine_that_hangs_beside_an_idle_one_is_found_by_its_own_rhythm() {
    let mut sim = warm();
    let peer = &mut sim.peers[0];
    begins(peer, sim.now, PagePhase::Decode, 0);
    sim.idle();
    sim.cpu = 10;
    assert!(sim.silence_until(1_000, suspect).is_some(), "{:?}", sim.last);
    assert!(sim.silence_until(30_000, stalled).is_some(), "{:?}", sim.last);
    assert_eq!(sim.last.unwrap().verdict, Verdict::Stalled(StallClass::StepStalled));
}

#[test]
fn what_one_engine_delivers_does_not_lift_the_fence_of_another() {
    let mut sim = warm();
    let now = sim.now;
    begins(&mut sim.peers[0], now, PagePhase::Decode, 0);
    let verdicts: Vec<Verdict> = (0..1_500).map(|_| decodes(&mut sim, |_, _| {})).collect();
    let fenced = verdicts.iter().position(suspect).unwrap();
    assert!(fenced <= 10, "{fenced}");
    assert!(verdicts.iter().skip(fenced).all(|verdict| verdict.class().is_some()), "it was let out");
    assert!(verdicts.iter().any(stalled), "never confirmed");
    // its step ends: that is its life, and nobody else's
    let after = decodes(&mut sim, |page, _| ends(page, 1));
    assert_eq!(after, Verdict::Progressing);
}

#[test]
fn an_engine_that_is_slower_than_another_has_no_silent_ranks() {
    let mut sim = two();
    let page = sim.page.as_mut().unwrap();
    (page.world_size, page.engines) = (4, 2);
    let of = |rank: u32, page: &PageObs| PageObs { rank, ..page.clone() };
    sim.peers = (1..4).map(|rank| of(rank, page)).collect();
    sim.admit(4, 200);
    for _ in 0..100 {
        // ranks 0 and 1 are the first engine's, and twice as quick
        let (at, steps) = (sim.now + 100, sim.page.as_ref().unwrap().steps_completed + 2);
        for peer in &mut sim.peers {
            (peer.phase, peer.lease_ms, peer.running) = (PagePhase::Decode, 120_000, 4);
            peer.steps_completed = if peer.rank == 1 { steps } else { steps / 2 };
            peer.tokens_delivered = peer.steps_completed * 4;
            peer.step_started_ms = Some(at - 10);
        }
        sim.deliver_for(100);
    }
    sim.cpu = 10;
    let mut one_behind = sim.clone();
    assert!(sim.silence_until(10_000, suspect).is_some());
    assert_eq!(sim.last.unwrap().verdict, Verdict::Suspect(StallClass::StepStalled));
    one_behind.peers[2].steps_completed -= 1;
    assert!(one_behind.silence_until(10_000, suspect).is_some());
    one_behind.silence_until(30_000, stalled).unwrap();
    assert_eq!(one_behind.last.unwrap().verdict, Verdict::Stalled(StallClass::RankSilent { ranks: vec![3] }));
}

#[test]
fn ranks_are_of_the_engine_that_they_follow() {
    let page = |rank, world_size, engines| {
        let page = Sim::native().page.unwrap();
        PageObs { rank, world_size, engines, ..page }.engine()
    };
    assert_eq!([page(0, 6, 2), page(2, 6, 2), page(3, 6, 2), page(5, 6, 2)], [0, 0, 1, 1]);
    assert_eq!([page(3, 4, 0), page(3, 4, 1), page(3, 4, 4)], [0, 0, 3]);
    // of a page that lies about its world
    assert_eq!([page(7, 0, 5), page(7, 1, 0)], [7, 0]);
}

/// The first engine decodes on, the second stands in a step from now on; how long until that is confirmed.
fn second_hangs(sim: &mut Sim, mut each: impl FnMut(&mut Sim, Ms)) -> Option<Ms> {
    let began = sim.now;
    begins(&mut sim.peers[0], began, PagePhase::Decode, 0);
    while sim.now - began < 400_000 {
        each(sim, sim.now - began);
        if stalled(&decodes(sim, |_, _| {})) {
            return Some(sim.now - began);
        }
    }
    None
}

#[test]
fn the_engine_that_hangs_while_another_serves_is_confirmed_and_named() {
    let mut sim = warm();
    let took = second_hangs(&mut sim, |_, _| {}).unwrap();
    assert!(took <= 30_000, "{took}");
    let last = sim.last.unwrap();
    assert_eq!(last.verdict, Verdict::Stalled(StallClass::RankSilent { ranks: vec![1] }));
    assert!(last.actions.contains(&Action::WantRestart));
    assert!(last.reasons[0].text.contains("data-parallel engine 1 (rank 1)"), "{:?}", last.reasons);
}

#[test]
fn what_is_gathered_against_one_engine_is_not_wiped_by_what_another_delivers() {
    let plain = second_hangs(&mut warm(), |_, _| {}).unwrap();
    let mut sim = warm();
    let told = second_hangs(&mut sim, |sim, age_ms| {
        let hit = |at_ms| LogHit { signature: "vllm-core-fatal".into(), at_ms, line: String::new() };
        sim.log = if age_ms == 2_000 { vec![hit(sim.now)] } else { Vec::new() };
    });
    let reasons = &sim.last.as_ref().unwrap().reasons;
    assert!(reasons.iter().any(|reason| reason.text.contains("vllm-core-fatal")), "{reasons:?}");
    assert!(told.unwrap() < plain, "{told:?} {plain}");
    // its own delivery does wipe it
    decodes(&mut sim, |page, at| {
        ends(page, 1);
        begins(page, at, PagePhase::Decode, 0);
    });
    assert!(second_hangs(&mut sim, |_, _| {}).is_some());
    let reasons = &sim.last.as_ref().unwrap().reasons;
    assert!(!reasons.iter().any(|reason| reason.text.contains("vllm-core-fatal")), "{reasons:?}");
}

#[test]
fn what_the_others_burn_is_no_sign_of_the_one_that_hangs() {
    for cpu in [10, 2_000] {
        let mut sim = warm();
        sim.cpu = cpu;
        second_hangs(&mut sim, |_, _| {}).unwrap();
        let last = sim.last.unwrap();
        assert!(!last.reasons.iter().any(|reason| reason.text.contains("whole process tree")), "{:?}", last.reasons);
    }
}

#[test]
fn an_engine_that_sleeps_excuses_no_other() {
    let mut sim = warm();
    sim.idle();
    let page = sim.page.as_mut().unwrap();
    (page.phase, page.lease_ms) = (PagePhase::Sleep, 0);
    begins(&mut sim.peers[0], sim.now, PagePhase::Decode, 0);
    sim.cpu = 10;
    assert!(sim.silence_until(60_000, stalled).is_some(), "{:?}", sim.last);
    // where all sleep, what is owed waits by their wish
    let mut sim = warm();
    sim.idle();
    for page in sim.page.iter_mut().chain(&mut sim.peers) {
        (page.phase, page.lease_ms, page.step_started_ms, page.waiting) = (PagePhase::Sleep, 0, None, 3);
    }
    sim.silence(60_000);
    assert_eq!(sim.last.unwrap().verdict, Verdict::Sleeping);
}

#[test]
fn a_compiler_excuses_the_hang_beside_it_no_longer_than_it_burns() {
    let mut sim = warm();
    let took = second_hangs(&mut sim, |sim, age_ms| {
        let proc = sim.process();
        proc.compilers = u32::from(age_ms < 60_000);
        proc.compilers_cpu_ms += 100;
    });
    assert!((60_000..100_000).contains(&took.unwrap()), "{took:?}");
}

#[test]
fn an_engine_without_work_is_never_held_against_a_pod_that_serves() {
    let mut sim = warm();
    sim.peers[0] = PageObs { running: 0, phase: PagePhase::Idle, step_started_ms: None, ..sim.peers[0].clone() };
    // ten minutes of nothing, then a little work, then nothing again
    for round in 0..3 {
        for tick in 0..6_000_u32 {
            let verdict = decodes(&mut sim, |page, at| match tick {
                0..50 => {
                    ends(page, 1);
                    begins(page, at, PagePhase::Decode, 0);
                }
                50 => {
                    ends(page, 1);
                    (page.running, page.phase) = (0, PagePhase::Idle);
                }
                _ => {}
            });
            assert_eq!(verdict, Verdict::Progressing, "round {round}, tick {tick}: {:?}", sim.last);
        }
    }
}

#[test]
fn prompts_that_came_to_another_engine_are_none_of_one_whose_prefill_goes_round() {
    let mut sim = warm();
    // 2048 tokens of prompts, prefilled again and again; more than that takes come to the first engine meanwhile, and are prefilled there
    let peer = &mut sim.peers[0];
    (peer.running, peer.waiting) = (2, 0);
    let caught = (0..3_000_u64).find(|tick| {
        sim.gate.as_mut().unwrap().prompt_tokens_taken += 600;
        let page = sim.page.as_mut().unwrap();
        page.prompt_tokens_owed = if tick % 2 == 0 { 1_200 } else { 0 };
        let verdict = decodes(&mut sim, |page, at| {
            ends(page, 0);
            page.prompt_tokens_owed = u64::from(CHUNK) - u64::from(CHUNK) / 4 * (tick % 4);
            begins(page, at, PagePhase::Prefill, CHUNK / 4);
        });
        verdict.class().is_some()
    });
    assert!(caught.is_some(), "{:?}", sim.last);
}

#[test]
fn requests_that_another_engine_preempted_are_none_that_this_one_starves() {
    let mut sim = warm();
    let page = sim.page.as_mut().unwrap();
    (page.running, page.waiting) = (2, 2);
    // longer than decode may starve, and long enough to be confirmed
    let verdicts = prompt(&mut sim, 120);
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Progressing), "{:?}", sim.last);
}
