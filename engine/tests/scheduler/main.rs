//! The scheduler and the engine thread around it, against a model that reads everything back from the paged cache.
//!
//! `properties` are the engine's properties EP2 to EP4 over random histories, `rules` the single rules, `thread` EP2 to EP6 through the
//! engine thread, with real models too, `mtp` guesses of a model's own head there, `day` long traffic in virtual time (`make sim-engine`: 24
//! hours).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's helpers fail the test")]

mod day;
mod headed;
mod held;
mod mtp;
mod paged;
mod properties;
mod pulse;
mod rules;
mod thread;
mod world;
