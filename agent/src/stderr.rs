//! Standard error of the sidecar's processes, which nobody waits for ([`role::stderr`]), by a thread whose words are heard before the turn of
//! whoever runs is over.

use role::stderr::Stderr;

/// Makes a writer; each of its writes is a line.
pub fn writer() -> Stderr {
    Stderr::by(crate::short_slice::ask_or_log)
}
