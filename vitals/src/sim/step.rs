//! One step of an engine, and what may be wrong with its loop.

use super::profile::Us;

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
