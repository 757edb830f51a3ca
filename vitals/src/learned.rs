//! What a detector has learned of its engine, for one that comes after it: whoever restarts the agent must not wait for minutes, as for an engine
//! of which nothing is known (V3).

use crate::observation::Ms;
use crate::rhythm::Rhythm;
use serde::{Deserialize, Serialize};

/// An agent writes it down this often: to know a minute less costs nothing.
pub const WRITTEN_EVERY_MS: Ms = 60_000;

/// Of no moment in time: all of it is as true after a pause of any length.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Learned {
    pub rhythm: Rhythm,
    /// It counts as it goes ([`Signs::counters_live`](crate::signs::Signs)).
    pub counters_live: bool,
    /// It counts tokens as it makes them.
    pub tokens_live: bool,
}
