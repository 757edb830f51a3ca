//! One step of an engine, and what may be wrong with its loop.

use super::chance::{Chance, mix};
use super::profile::{MS, Us};

/// A step under way.
#[derive(Debug, Clone, Copy)]
pub struct Step {
    pub start: Us,
    /// [`Us::MAX`]: it never ends.
    pub end: Us,
    pub prefill: u32,
    pub decoding: u32,
    pub lease_ms: u64,
    pub prefill_units: u64,
}

/// What is wrong with it, or done to it. All false and 1000 in a healthy engine.
#[derive(Debug, Clone, Copy)]
pub struct Mood {
    /// Steps take this many thousandths of their time.
    pub pace_milli: u64,
    /// What the host's cores do for them takes this many thousandths, because others want the same cores.
    pub host_milli: u64,
    /// Steps turn and hand nothing out.
    pub mute: bool,
    /// The scheduler admits nobody.
    pub shut: bool,
    /// Everybody is preempted and prefilled again, for ever.
    pub thrash: bool,
    /// The next step never ends.
    pub doomed: bool,
    /// The front end is stopped: nothing comes in, nothing goes out.
    pub front_dead: bool,
}

impl Default for Mood {
    fn default() -> Self {
        Self {
            pace_milli: 1_000,
            host_milli: 1_000,
            mute: false,
            shut: false,
            thrash: false,
            doomed: false,
            front_dead: false,
        }
    }
}

/// What deserves a close look: steps out of proportion to those before them, and deliveries that end a silence.
#[derive(Debug, Clone)]
pub struct Watch {
    /// A slow average of the steps' lengths.
    usual: Us,
    /// What the gate had heard, and when that last grew.
    heard: u64,
    heard_at: Us,
}

/// Shorter steps and silences than these are within what any look takes for granted.
const LONG_MIN: Us = 100 * MS;
const SILENCE_MIN: Us = 500 * MS;

impl Watch {
    pub fn new(usual: Us, now: Us) -> Self {
        Self { usual, heard: 0, heard_at: now }
    }

    /// Is this step out of proportion?
    pub fn is_long(&self, step: &Step) -> bool {
        step.end.saturating_sub(step.start) >= (self.usual * 3).max(LONG_MIN)
    }

    /// So many equal steps of this length have ended.
    pub fn ended(&mut self, steps: u64, length: Us) {
        let weight = steps.min(16);
        self.usual = (self.usual * (16 - weight) + length * weight) / 16;
    }

    /// The gate has heard this much by now. True where that ends a silence.
    pub fn hears(&mut self, heard: u64, now: Us) -> bool {
        if self.heard == heard {
            return false;
        }
        self.heard = heard;
        let since = std::mem::replace(&mut self.heard_at, now);
        now.saturating_sub(since) >= SILENCE_MIN
    }

    /// Is the gate in a silence?
    pub fn is_silent(&self, now: Us) -> bool {
        now.saturating_sub(self.heard_at) >= SILENCE_MIN
    }
}

/// How much longer or shorter than planned steps are: a function of the step's number alone, so that it does not matter in how many
/// pieces time is run.
#[derive(Debug, Clone)]
pub struct Luck(u64);

/// Neighbouring steps that share their luck.
const ALIKE: u64 = 64;

impl Luck {
    pub fn new(mut chance: Chance) -> Self {
        Self(chance.bits())
    }

    /// The length of this step, planned to be `planned` long.
    pub fn length(&self, step: u64, planned: Us) -> Us {
        let mut chance = Chance::new(self.0 ^ mix(step / ALIKE));
        let length = (planned as f64 * chance.around_one(60)) as Us;
        // now and then one is late by itself: an allocator, a garbage collection, a graph that must be captured
        if self.late(step / ALIKE) == Some(step % ALIKE) { length + chance.heavy(15 * MS, 400 * MS) } else { length }
    }

    /// How many steps from this one on are equally long.
    pub fn alike(&self, step: u64) -> u64 {
        let place = step % ALIKE;
        match self.late(step / ALIKE) {
            Some(late) if late == place => 1,
            Some(late) if late > place => late - place,
            _ => ALIKE - place,
        }
    }

    /// Which of these neighbours is late, if one is: about one step in 4000.
    fn late(&self, neighbours: u64) -> Option<u64> {
        let drawn = mix(self.0.wrapping_add(mix(neighbours ^ 0x6c61_7465)));
        drawn.is_multiple_of(62).then_some((drawn >> 32) % ALIKE)
    }
}
