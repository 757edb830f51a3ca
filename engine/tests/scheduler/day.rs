//! A day of traffic in virtual time: a day's ebb and flood with bursts on top, conversations that grow, common beginnings, prompts of a heavy
//! tail, priorities, deadlines, clients that leave one by one and all at once, poisoned requests, steps that fail, get lost or stand
//! still, steps that turn for nothing, guesses. `World` asserts EP1 to EP6, and that who ranks first moves, after every step; here it is seen that
//! streams keep flowing and that nothing is kept of who is gone: every so often all of it ends, and the scheduler must hold what it held before, to some bytes.
//!
//! `TRUEBEAT_SIM_HOURS` and `TRUEBEAT_SIM_SEED` say how long (default: a quarter of an hour) and which. Prints `name value unit goal`.

use std::collections::VecDeque;

use engine::scheduler::{Limits, NewSeq, ReqId, StepPlan};

use crate::held::held_bytes;
use crate::paged::{FIRST, NAN, REFUSED, mix};
use crate::world::{Mishap, World};

const MS: u64 = 1_000_000;
const MINUTE: u64 = 60_000 * MS;
/// A step: a floor, and something for each token.
const STEP_NS: u64 = 8 * MS;
const DECODE_NS: u64 = MS / 4;
const PREFILL_NS: u64 = MS / 2;
const SLICE_NS: u64 = 60 * MS;
/// A step with a full slice of somebody's prompt, and what the learned pace is off by.
const GAP_MS_MAX: u64 = 120;
/// The engine's `--request-timeout`: whoever names no deadline has this one.
const TIMEOUT_NS: u64 = 300_000 * MS;
const TALKS_MAX: usize = 50;
/// Floods and ebbs of a day, and the moments at which all traffic ends for once.
const TIDES: u64 = 48;
const QUIETS: u64 = 6;
/// What a scheduler at rest may hold more than the last time it was at rest: trees have nodes that are more or less full.
const HELD_GROWN_BYTES_MAX: i64 = 10 * 1024;

struct Day {
    world: World,
    chance: u64,
    length_ns: u64,
    /// What was said in conversations that may go on.
    talks: VecDeque<Vec<u32>>,
    /// `None`: nobody comes any more.
    next_arrival_ns: Option<u64>,
    tokens: u64,
    ended: usize,
    refused: usize,
    timed_out: usize,
    longest_ns: u64,
    /// Steps turn for nothing until that is seen.
    livelock: bool,
    livelocks: usize,
}

impl Day {
    fn new(seed: u64, length_ns: u64) -> Self {
        let limits = Limits {
            num_blocks: 448,
            num_seqs_max: 32,
            waiting_max: 64,
            seq_len_max: 4096,
            prefill_beside_decode_ns: SLICE_NS,
            ..Limits::default()
        };
        let (chance, talks, next_arrival_ns) = (mix(seed, 11), VecDeque::new(), Some(0));
        let (tokens, ended, refused, timed_out, longest_ns, world) = (0, 0, 0, 0, 0, World::new(limits));
        let (livelock, livelocks) = (false, 0);
        Self {
            world,
            chance,
            length_ns,
            talks,
            next_arrival_ns,
            tokens,
            ended,
            refused,
            timed_out,
            longest_ns,
            livelock,
            livelocks,
        }
    }

    /// A number below `n`.
    fn below(&mut self, n: u64) -> u64 {
        self.chance = mix(self.chance, 11);
        (self.chance >> 16) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn run(&mut self, until_ns: u64) {
        while self.world.now_ns < until_ns {
            while self.next_arrival_ns.is_some_and(|at_ns| at_ns <= self.world.now_ns) {
                self.arrive();
            }
            if !self.turn() {
                self.world.now_ns = self.next_arrival_ns.unwrap_or(until_ns).max(self.world.now_ns);
            }
        }
    }

    /// A step, and what clients do before it; false where nobody is left to step for.
    fn turn(&mut self) -> bool {
        self.time_out();
        self.leave();
        self.guess();
        let mishap = self.mishap();
        let ran = self.world.step(mishap, cost_ns);
        if self.world.requests.len() > 256 {
            self.settle();
        }
        ran
    }

    fn mishap(&mut self) -> Mishap {
        self.livelock &= !self.world.pulse.is_stalled(self.world.now_ns);
        match self.below(8000) {
            _ if self.livelock => Mishap { lost: true, ..Mishap::default() },
            0..4 => Mishap { fails: Some(0), ..Mishap::default() },
            4 => Mishap { all_fail: true, ..Mishap::default() },
            5..9 => Mishap { lost: true, ..Mishap::default() },
            9..11 => Mishap { stall_ns: (200 + self.below(3000)) * MS, ..Mishap::default() },
            11..31 => Mishap { leaves: Some(self.below(32) as usize), ..Mishap::default() },
            31 => {
                self.livelock = true;
                self.livelocks += 1;
                Mishap { lost: true, ..Mishap::default() }
            }
            _ => Mishap::default(),
        }
    }

    /// Arrivals of a Poisson process, whose mean is that of the hour; now and then many come at once.
    fn arrive(&mut self) {
        let burst = if self.one_in(300) { 80 } else { 1 };
        for _ in 0..burst {
            let prompt = self.prompt();
            let priority = [-1, 0, 0, 0, 0, 1][self.below(6) as usize];
            let own_ns = (200 + self.below(20_000)) * MS;
            let left_ns = if self.one_in(4) { own_ns } else { TIMEOUT_NS };
            let deadline_ns = Some(self.world.now_ns + left_ns);
            let output_max = 1 + self.below(300) as usize;
            let with = |seq: NewSeq| NewSeq { priority, deadline_ns, ..seq };
            self.refused += usize::from(self.world.submit(with, prompt, output_max).is_none());
        }
        let unit = (self.below(1 << 30) + 1) as f64 / (1_u64 << 30) as f64;
        let wait_ms = -unit.ln() * self.mean_ms();
        self.next_arrival_ns = self.next_arrival_ns.map(|at_ns| at_ns + (wait_ms as u64 + 1) * MS);
    }

    /// Between two arrivals: a third as many come at night as at noon, and of the tides every second one is an ebb.
    fn mean_ms(&self) -> f64 {
        let of_day = (self.world.now_ns % self.length_ns) as f64 / self.length_ns as f64;
        let light = 1.0 - (2.0 * of_day - 1.0).abs();
        let ebb = self.world.now_ns * TIDES / self.length_ns % 2 == 1;
        (if ebb { 800.0 } else { 250.0 }) / (1.0 / 3.0 + light * 2.0 / 3.0)
    }

    /// A new talk that begins as many do, or the next turn of an old one.
    fn prompt(&mut self) -> Vec<u32> {
        let old = self.below(2 * TALKS_MAX as u64) as usize;
        let mut prompt = match self.talks.get(old).filter(|talk| talk.len() < 3000) {
            Some(talk) => talk.clone(),
            None => {
                let text = self.below(8) as u32;
                (0..50 + 40 * text).map(|i| FIRST + mix(u64::from(text), i) as u32 % 50).collect()
            }
        };
        let own = self.own_tokens();
        prompt.extend((0..own).map(|_| FIRST + self.below(50) as u32));
        if self.one_in(200) {
            let at = self.below(prompt.len() as u64) as usize;
            prompt[at] = [NAN, REFUSED][self.below(2) as usize];
        }
        prompt
    }

    /// Twice as long is a little more than half as likely; beyond the longest sequence too, which is refused.
    fn own_tokens(&mut self) -> u64 {
        let mut least = 8;
        while least < 4096 && self.below(20) < 11 {
            least *= 2;
        }
        least + self.below(least)
    }

    /// The front end ends those whose deadline has come, wherever they are.
    fn time_out(&mut self) {
        let now_ns = self.world.now_ns;
        let of = &self.world.requests;
        let due = of.iter().filter(|(_, r)| r.ends == 0 && r.deadline_ns.is_some_and(|at_ns| at_ns <= now_ns));
        for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.timed_out += 1;
            self.world.cancel(id);
        }
    }

    /// Somebody, seldom everybody.
    fn leave(&mut self) {
        let count = match self.below(40_000) {
            0 => usize::MAX,
            1..200 => 1,
            _ => return,
        };
        let live = self.world.live();
        for _ in 0..live.len().min(count) {
            let at = self.below(live.len() as u64) as usize;
            if self.world.requests[&live[at]].ends == 0 {
                self.world.cancel(live[at]);
            }
        }
        if count == usize::MAX {
            self.world.live().into_iter().for_each(|id| self.world.cancel(id));
            assert_eq!(self.world.scheduler.free_blocks(), self.world.limits.num_blocks, "EP3: all at once");
        }
    }

    fn guess(&mut self) {
        let decoding: Vec<ReqId> = self.world.scheduler.running().filter(|seq| seq.decodes).map(|seq| seq.id).collect();
        for id in decoding {
            if self.one_in(3) {
                let (count, wrong_at) = (1 + self.below(4), self.below(6));
                self.world.propose(id, count as usize, wrong_at as usize);
            }
        }
    }

    fn settle(&mut self) {
        for request in self.world.forget_ended() {
            self.ended += 1;
            self.tokens += request.said.len() as u64;
            let served = !request.expected.is_empty() && request.said == request.expected;
            if served {
                self.longest_ns = self.longest_ns.max(request.ended_ns - request.arrived_ns);
                self.talks.push_back([request.prompt, request.said].concat());
            }
        }
        self.talks.drain(..self.talks.len().saturating_sub(TALKS_MAX));
    }

    /// Everybody comes to an end, and nobody is remembered: what is held then is the same each time.
    fn held_at_rest_bytes(&mut self) -> i64 {
        let came_ns = self.next_arrival_ns.take();
        while self.turn() {}
        self.forget();
        // Prompts of their own take the place of all that was cached.
        let limits = self.world.limits;
        let own = limits.block_size * 128;
        for _ in 0..4 * limits.num_blocks / 128 {
            let prompt = (0..own).map(|_| FIRST + self.below(50) as u32).collect();
            self.world.submit(|seq| seq, prompt, 1);
            while self.world.step(Mishap::default(), cost_ns) {}
        }
        self.forget();
        self.next_arrival_ns = came_ns.map(|_| self.world.now_ns);
        held_bytes()
    }

    fn forget(&mut self) {
        self.settle();
        self.talks = VecDeque::new();
        assert_eq!(self.world.requests.len(), 0, "EP2: everybody has an end");
        assert_eq!(self.world.scheduler.free_blocks(), self.world.limits.num_blocks, "EP3");
        let beat = self.world.pulse.view().beat;
        assert_eq!(beat.tokens_delivered, self.tokens, "EP6: what was said is what the heart counts");
        assert_eq!(beat.requests_finished, self.ended as u64, "EP6: and so are the ends");
    }
}

fn cost_ns(plan: &StepPlan) -> u64 {
    STEP_NS + plan.decode_tokens as u64 * DECODE_NS + plan.prefill_tokens as u64 * PREFILL_NS
}

/// Resident memory of this process in MiB.
fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) / 256
}

fn asked<T: std::str::FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn a_day_of_traffic_keeps_every_promise() {
    let (hours, seed) = (asked::<f64>("TRUEBEAT_SIM_HOURS"), asked("TRUEBEAT_SIM_SEED").unwrap_or(1));
    let length_ns = (hours.unwrap_or(0.25) * 60.0 * MINUTE as f64) as u64;
    let mut day = Day::new(seed, length_ns);
    // Before the first prompt nothing is known about the pace.
    day.run(MINUTE);
    day.world.gap_ns_max = 0;
    let held = |day: &mut Day, part: u64| {
        day.run(length_ns * part / QUIETS);
        day.held_at_rest_bytes()
    };
    let held_before = held(&mut day, 1);
    let resident_before = resident_mib();
    let grown = (2..=QUIETS).map(|part| held(&mut day, part) - held_before).max().unwrap_or(0);
    let resident_grown = resident_mib().saturating_sub(resident_before);
    let (world, tally, counts) = (&day.world, day.world.tally, day.world.scheduler.prefix_counts());
    let hit_share = counts.hit_tokens as f64 / counts.queried_tokens as f64;
    println!("sim_engine_hours {} h 24", length_ns as f64 / 60.0 / MINUTE as f64);
    println!("sim_engine_seed {seed} - - # log {:016x}", world.log);
    println!("sim_engine_requests_ended {} requests -", day.ended);
    println!("sim_engine_requests_refused {} requests - # at the door; {} more in the queue", day.refused, tally.late);
    println!(
        "sim_engine_requests_left {} requests - # {} in their prompt",
        tally.cancelled - day.timed_out,
        tally.cancelled_prefilling
    );
    println!("sim_engine_requests_timed_out {} requests -", day.timed_out);
    println!("sim_engine_requests_failed {} requests -", tally.failed);
    println!("sim_engine_request_longest {} s <={}", day.longest_ns / 1000 / MS, TIMEOUT_NS / 1000 / MS);
    println!("sim_engine_steps {} - -", tally.steps);
    println!("sim_engine_tokens {} tokens - # {} by guesses", day.tokens, tally.accepted);
    println!("sim_engine_preemptions {} - -", tally.preemptions);
    println!("sim_engine_blocks_peak {} blocks - # of {}", tally.blocks_peak, world.limits.num_blocks);
    println!("sim_engine_prefix_hits {:.1} % -", hit_share * 100.0);
    println!("sim_engine_token_gap_max {} ms <={GAP_MS_MAX}", world.gap_ns_max / MS);
    println!("sim_engine_steps_overdue {} - - # each seen when its lease was over", world.pulse.overdue);
    println!("sim_engine_livelocks {} - - # each seen after two leases", day.livelocks);
    println!("sim_engine_held_grown {grown} bytes <={HELD_GROWN_BYTES_MAX}");
    println!("sim_engine_memory_grown {resident_grown} MiB <=64");
    assert!(world.gap_ns_max <= GAP_MS_MAX * MS, "somebody's prompt stalled a stream for {} ms", world.gap_ns_max / MS);
    assert!(grown <= HELD_GROWN_BYTES_MAX, "{grown} bytes are kept of {} requests that are gone", day.ended);
    // Only then it has the process for itself.
    assert!(hours.is_none() || resident_grown <= 64, "memory grew by {resident_grown} MiB");
    let busy = day.refused > 0 && tally.preemptions > 0 && tally.accepted > 0 && tally.failed > 0 && day.timed_out > 0;
    assert!(busy && hit_share > 0.2, "the day was too quiet");
    assert!(world.pulse.overdue > 0 && world.pulse.barren >= 1, "nothing stood still, or turned for nothing");
    // What the document has of 24 hours is of the scheduler that is here as long as it has this.
    let (told, log) = (include_str!("../../../docs/engine-scheduler.md"), format!("`{:016x}`", world.log));
    let usual = hours.is_none() && seed == 1;
    assert!(!usual || told.contains(&log), "the day is another one: `make sim-engine`, and {log} into the document");
}

#[test]
fn the_same_seed_is_the_same_day_and_another_one_is_not() {
    let log = |seed| {
        let mut day = Day::new(seed, 4 * MINUTE);
        day.run(4 * MINUTE);
        day.world.log
    };
    assert_eq!(log(7), log(7));
    assert_ne!(log(7), log(8));
}
