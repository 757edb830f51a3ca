//! Who asks for what: loads, request sizes, patience, slow readers.

use super::book::{At, Request};
use super::chance::Chance;
use super::profile::{HOUR, MINUTE, MS, Profile, SECOND, Us};
use super::waits::Asks;

/// A load; lasts some minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    #[default]
    Idle,
    /// A request now and then.
    Light,
    /// Poisson at a good part of what the engine can do.
    Steady,
    /// Many at once, then nothing.
    Bursts,
    /// A few clients with long prompts, each waiting for its answer.
    Agents,
    /// Hundreds waiting.
    Full,
}

/// The clients of one replica.
#[derive(Debug, Clone)]
pub struct Clients {
    pub mode: Mode,
    /// What a mode may change into.
    pub modes: Vec<Mode>,
    pub next: Us,
    pub mode_ends: Us,
    /// Permille of clients that give up early, and that read slowly.
    pub hasty_permille: u64,
    pub slow_permille: u64,
    pub asks: Asks,
    target: u32,
    gap: Us,
    burst: u32,
    chance: Chance,
}

impl Clients {
    pub fn new(modes: &[Mode], chance: Chance) -> Self {
        Self {
            mode: Mode::Idle,
            modes: modes.to_vec(),
            next: 0,
            mode_ends: 0,
            hasty_permille: 20,
            slow_permille: 3,
            asks: Asks::Nothing,
            target: 0,
            gap: SECOND,
            burst: 0,
            chance,
        }
    }

    /// Changes the mode when its time is over.
    pub fn turn(&mut self, now: Us, profile: &Profile) {
        if now < self.mode_ends {
            return;
        }
        self.mode = self.chance.pick(&self.modes);
        let night = self.mode == Mode::Idle;
        self.mode_ends =
            now + if night { self.chance.scale(MINUTE, 8 * HOUR) } else { self.chance.scale(MINUTE, HOUR) };
        let service = profile.service_us(400, 100).max(50 * MS);
        (self.target, self.gap) = match self.mode {
            Mode::Idle => (0, HOUR),
            Mode::Light => (8, service.max(self.chance.scale(2 * SECOND, 2 * MINUTE))),
            Mode::Steady => {
                let at_once = self.chance.scale(1, u64::from(profile.seqs_max / 2).clamp(2, 24));
                (profile.seqs_max, service / at_once)
            }
            Mode::Bursts => (400, self.chance.scale(20 * SECOND, 5 * MINUTE)),
            Mode::Agents => (self.chance.scale(1, 6) as u32, self.chance.scale(100 * MS, 5 * SECOND)),
            Mode::Full => {
                let queue = self.chance.scale(20, 300) as u32;
                ((profile.seqs_max + queue).min(420), self.chance.scale(5 * MS, 100 * MS))
            }
        };
        // a queue of more than two minutes is nobody's plan: autoscalers and clients' time-outs are there before
        let each =
            profile.prefill_us(300, 0) + profile.seq_us * 200 + profile.step_us * 200 / u64::from(profile.seqs_max);
        self.target = self.target.min((2 * MINUTE / each.max(1)) as u32 + 1);
        self.next = now + self.chance.exponential(self.gap);
    }

    /// The clock says [`Self::next`]: how many come now.
    pub fn come(&mut self, now: Us, in_flight: u32) -> u32 {
        let closed = matches!(self.mode, Mode::Agents | Mode::Full);
        let room = self.target.saturating_sub(in_flight);
        if self.mode == Mode::Bursts {
            self.next = now + self.chance.exponential(self.gap).max(MS);
            self.burst = self.chance.scale(2, 200) as u32;
            return self.burst.min(room);
        }
        let full = closed && room == 0;
        // a client of a closed loop looks again when somebody's answer may have come
        self.next = now + if full { 200 * MS } else { self.chance.exponential(self.gap).max(MS) };
        room.min(1)
    }

    /// One request.
    pub fn request(&mut self, now: Us, profile: &Profile) -> Request {
        let (prompt, out) = self.size(profile);
        let chance = &mut self.chance;
        let stream = chance.permille(profile.stream_permille);
        let patience = if chance.permille(self.hasty_permille) {
            chance.exponential(20 * SECOND).max(200 * MS)
        } else if chance.permille(300) {
            chance.scale(10 * MINUTE, HOUR)
        } else {
            4 * HOUR
        };
        let unread =
            if stream && chance.permille(self.slow_permille) { chance.heavy(2 * SECOND, 5 * MINUTE) } else { 0 };
        let out = self.asks.length(out, profile, chance);
        let wait = self.asks.draw(out, chance);
        let front = profile.front_us + chance.exponential(profile.front_us) + u64::from(prompt) / 2;
        Request {
            at: At::Front(now + front),
            prompt,
            context: prompt,
            prefilled: 0,
            out,
            generated: 0,
            stream,
            forwarded: now,
            answered: false,
            read_at: 0,
            leaves: now + patience,
            gone: false,
            wait,
            compiled_at: 0,
            unread_until: if unread > 0 { now + profile.service_us(prompt, 4) + unread } else { 0 },
        }
    }

    fn size(&mut self, profile: &Profile) -> (u32, u32) {
        let chance = &mut self.chance;
        let most = u64::from(profile.prompt_max);
        let prompt = match self.mode {
            Mode::Agents => chance.scale(1_000, most),
            _ if chance.permille(30) => chance.scale(1_000, most.min(32_768)),
            _ => chance.scale(16, 1_500),
        };
        // what nobody would wait for is not asked: ten minutes of decode at most
        let patience = (10 * MINUTE / profile.step_us.max(1)).clamp(20, 2_000);
        let out = chance.scale(4, if self.mode == Mode::Agents { patience.min(800) } else { patience.min(1_200) });
        // an engine refuses what its KV cache could never hold
        let room = (profile.kv_tokens / 2).min(most - 1);
        (prompt.min(room.saturating_sub(out).max(16)) as u32, out.max(2) as u32)
    }
}
