//! The scheduler against a model that reads everything back from the paged cache.
//!
//! `properties` are the engine's properties EP2 to EP4 over random histories, `rules` the single rules.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test's helpers fail the test")]

mod paged;
mod properties;
mod rules;
mod world;
