//! Small files that processes of the agent leave for each other: written whole or not at all.

use std::io;
use std::path::Path;

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// Writes `value` as JSON beside `path` and renames it into place, so that no reader sees half of it.
///
/// # Errors
/// When the directory is not writable or full.
pub fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let beside = path.with_extension("tmp");
    std::fs::write(&beside, serde_json::to_vec(value)?)?;
    std::fs::rename(&beside, path)
}

/// Nanoseconds of `CLOCK_MONOTONIC`: differs between any two starts on one boot.
pub fn monotonic_ns() -> u64 {
    let Ok(time) = clock_gettime(ClockId::CLOCK_MONOTONIC) else { return 0 };
    let seconds = u64::try_from(time.tv_sec()).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec()).unwrap_or(0))
}

/// The wall clock as people and the API read it: RFC 3339, UTC, milliseconds.
pub fn wall_clock() -> String {
    format!("{:.3}", jiff::Timestamp::now())
}
