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

/// Confines this process as a gate, and says so in the log.
pub fn confine(own: &Path) {
    let left =
        format!("{} to write in; the resolver's files, the system's libraries, its parent in /proc", own.display());
    left_to(own, std::os::unix::process::parent_id()).confine("a gate", &left);
}
