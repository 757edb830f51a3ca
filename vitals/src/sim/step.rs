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
        Self { pace_milli: 1_000, mute: false, shut: false, thrash: false, doomed: false, front_dead: false }
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
