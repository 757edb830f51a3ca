//! A day of traffic in virtual time: hours that come and go, conversations that grow, common beginnings, priorities, deadlines, clients
//! that leave, steps that fail or get lost, guesses. `World` asserts EP2, EP3 and EP4 after every step; here it is seen that streams keep
//! flowing and that memory stays what it is.
//!
//! `TRUEBEAT_SIM_HOURS` says how long (default: a quarter of an hour). Prints `name value unit goal`.

use std::collections::VecDeque;

use engine::scheduler::{Limits, NewSeq, ReqId};

use crate::paged::{FIRST, mix};
use crate::world::{Mishap, World};

const MS: u64 = 1_000_000;
const MINUTE: u64 = 60_000 * MS;
/// A step: a floor, and something for each token.
const STEP_NS: u64 = 8 * MS;
const DECODE_NS: u64 = MS / 4;
const PREFILL_NS: u64 = MS / 2;
const SLICE_NS: u64 = 60 * MS;
/// Two steps (one may be lost), each with a full slice of somebody's prompt, and what the learned pace is off by.
const GAP_MS_MAX: u64 = 200;

struct Day {
    world: World,
    chance: u64,
    /// Prompts of conversations that may go on.
    talks: VecDeque<Vec<u32>>,
    next_arrival_ns: u64,
    tokens: u64,
    ended: usize,
    refused: usize,
}

impl Day {
    fn new() -> Self {
        let limits = Limits {
            num_blocks: 1024,
            num_seqs_max: 32,
            waiting_max: 64,
            seq_len_max: 2048,
            prefill_beside_decode_ns: SLICE_NS,
            ..Limits::default()
        };
        let (talks, next_arrival_ns, tokens, ended, refused) = (VecDeque::new(), 0, 0, 0, 0);
        Self { world: World::new(limits), chance: 1, talks, next_arrival_ns, tokens, ended, refused }
    }

    /// A number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.chance = mix(self.chance, 11);
        (self.chance >> 16) % n
    }

    fn run(&mut self, until_ns: u64) {
        while self.world.now_ns < until_ns {
            while self.next_arrival_ns <= self.world.now_ns {
                self.arrive();
            }
            if self.below(200) == 0 {
                self.leave();
            }
            self.guess();
            let mishap = match self.below(2000) {
                0 => Mishap { fails: Some(0), lost: false },
                1 => Mishap { fails: None, lost: true },
                _ => Mishap::default(),
            };
            let cost = |plan: &engine::scheduler::StepPlan| {
                STEP_NS + plan.decode_tokens as u64 * DECODE_NS + plan.prefill_tokens as u64 * PREFILL_NS
            };
            if !self.world.step(mishap, cost) {
                self.world.now_ns = self.world.now_ns.max(self.next_arrival_ns);
            }
            if self.world.requests.len() > 256 {
                self.settle();
            }
        }
    }

    /// Half an hour of ebb follows half an hour of flood; now and then many come at once.
    fn arrive(&mut self) {
        let flood = (self.world.now_ns / (30 * MINUTE)).is_multiple_of(2);
        let mean_ms = if flood { 330 } else { 1200 };
        let burst = if self.below(300) == 0 { 80 } else { 1 };
        for _ in 0..burst {
            let prompt = self.prompt();
            let priority = [-1, 0, 0, 0, 0, 1][self.below(6) as usize];
            let deadline_ns =
                (self.below(4) == 0).then_some(()).map(|()| self.world.now_ns + (200 + self.below(20_000)) * MS);
            let output_max = 1 + self.below(200) as usize;
            let with = |seq: NewSeq| NewSeq { priority, deadline_ns, ..seq };
            match self.world.submit(with, prompt.clone(), output_max) {
                Some(_) => self.talks.push_back(prompt),
                None => self.refused += 1,
            }
            self.talks.drain(..self.talks.len().saturating_sub(50));
        }
        self.next_arrival_ns += (1 + self.below(2 * mean_ms)) * MS;
    }

    /// A new talk that begins as many do, or the next turn of an old one.
    fn prompt(&mut self) -> Vec<u32> {
        let old = self.below(100) as usize;
        let mut prompt = match self.talks.get(old).filter(|talk| talk.len() < 1500) {
            Some(talk) => talk.clone(),
            None => {
                let text = self.below(8) as u32;
                (0..50 + 40 * text).map(|i| FIRST + mix(u64::from(text), i) as u32 % 50).collect()
            }
        };
        let own = 1 + self.below(150);
        prompt.extend((0..own).map(|_| FIRST + self.below(50) as u32));
        prompt
    }

    fn leave(&mut self) {
        let live = self.world.live();
        if !live.is_empty() {
            let at = self.below(live.len() as u64) as usize;
            self.world.cancel(live[at]);
        }
    }

    fn guess(&mut self) {
        let decoding: Vec<ReqId> = self.world.scheduler.running().filter(|seq| seq.decodes).map(|seq| seq.id).collect();
        for id in decoding {
            if self.below(3) == 0 {
                let (count, wrong_at) = (1 + self.below(4), self.below(6));
                self.world.propose(id, count as usize, wrong_at as usize);
            }
        }
    }

    fn settle(&mut self) {
        let ended = self.world.requests.values().filter(|request| request.ends > 0);
        self.tokens += ended.map(|request| request.said.len() as u64).sum::<u64>();
        self.ended += self.world.forget_ended();
    }
}

/// Resident memory of this process in MiB.
fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) / 256
}

#[test]
fn a_day_of_traffic_keeps_every_promise() {
    let asked: Option<f64> = std::env::var("TRUEBEAT_SIM_HOURS").ok().and_then(|h| h.parse().ok());
    let hours = asked.unwrap_or(0.25);
    let end_ns = (hours * 60.0 * MINUTE as f64) as u64;
    let mut day = Day::new();
    // Before the first prompt nothing is known about the pace.
    day.run(MINUTE);
    day.world.gap_ns_max = 0;
    day.run(end_ns / 4);
    let resident_before = resident_mib();
    day.run(end_ns);
    let resident_grown = resident_mib().saturating_sub(resident_before);
    day.next_arrival_ns = u64::MAX;
    day.run(day.world.now_ns + 10 * MINUTE);
    day.settle();
    let (world, counts) = (&day.world, day.world.scheduler.prefix_counts());
    assert_eq!(world.requests.len(), 0, "EP2: everybody has an end");
    assert_eq!(world.scheduler.free_blocks(), world.limits.num_blocks, "EP3");
    let hit_share = counts.hit_tokens as f64 / counts.queried_tokens as f64;
    println!("sim_engine_hours {hours} h 24");
    println!("sim_engine_requests_ended {} requests -", day.ended);
    println!("sim_engine_requests_refused {} requests - # at the door; {} more in the queue", day.refused, world.late);
    println!("sim_engine_tokens {} tokens - # {} by guesses", day.tokens, world.accepted);
    println!("sim_engine_preemptions {} - -", world.preemptions);
    println!("sim_engine_prefix_hits {:.1} % -", hit_share * 100.0);
    println!("sim_engine_token_gap_max {} ms <={GAP_MS_MAX}", world.gap_ns_max / MS);
    println!("sim_engine_memory_grown {resident_grown} MiB <=64");
    assert!(world.gap_ns_max <= GAP_MS_MAX * MS, "somebody's prompt stalled a stream for {} ms", world.gap_ns_max / MS);
    // Only then it has the process for itself.
    assert!(asked.is_none() || resident_grown <= 64, "memory grew by {resident_grown} MiB");
    assert!(day.refused > 0 && world.preemptions > 0 && world.accepted > 0 && hit_share > 0.2, "the day was too quiet");
}
