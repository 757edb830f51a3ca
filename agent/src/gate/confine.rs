//! What a gate takes from its own process (S4). Of all that stands beside an engine it alone reads what strangers send, so it is left with what
//! a gate does anyway: it takes connections, passes them on, and remembers in a folder of its own what the detector wants. It starts no
//! program, signals and traces nobody, and reads neither evidence nor logs nor the agent's token.

use std::path::{Path, PathBuf};

use role::confine::{Files, ITSELF, RESOLVER, Reads};

/// Held open, to be closed when no descriptor is left; and what tells one boot from the next.
const KERNEL: [&str; 2] = ["/dev/null", "/proc/sys/kernel/random/boot_id"];

/// What is left to a gate that writes in the folder `own`. It looks at the process `parent` until that is gone.
pub fn left_to(own: &Path, parent: u32) -> Files {
    let known = [RESOLVER.as_slice(), &ITSELF, &KERNEL].concat();
    let reads = known.into_iter().map(PathBuf::from).chain([format!("/proc/{parent}").into()]);
    Files { reads: Reads::Only(reads.collect()), writes: Some(own.to_owned()) }
}

/// Confines this process as a gate, as far as its kernel can. Never a reason not to start: a gate that is less confined is better than none.
/// From a process of one thread, or those that are there already go on writing.
pub fn confine(own: &Path) {
    let files = left_to(own, std::os::unix::process::parent_id());
    match files.restrict() {
        Ok(true) => {
            tracing::info!(folder = %own.display(), "landlock: files are written in one folder alone from now on")
        }
        Ok(false) => tracing::info!("no landlock is to be had here: the gate's files are restricted by nothing"),
        Err(error) => tracing::warn!(%error, "the gate is not confined by landlock"),
    }
    match files.restrict_calls() {
        Ok(()) => tracing::info!("seccomp: system calls that a gate never needs are refused from now on"),
        Err(error) => tracing::warn!(%error, "the gate is not confined by seccomp, or only in part"),
    }
}
