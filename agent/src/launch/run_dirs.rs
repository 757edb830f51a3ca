//! Folders of one run: its own where nobody names one, and its pages'. Pages are stored to at every step, and on a disk's file system a
//! write-back would hold the engine (DESIGN §4.4), so they lie in memory where that can be.

use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

const MEMORY: &str = "/dev/shm";
const PREFIX: &str = "truebeat-run-";
/// Beside the agent's other files: where the pages of the run lie that has the folder.
const NOTE: &str = "page-dir";

/// A folder that no other run has, not yet made.
pub fn fresh(base: &Path) -> PathBuf {
    base.join(format!("{PREFIX}{}-{}", std::process::id(), crate::files::monotonic_ns()))
}

/// Where the pages of a run are to lie that has this folder.
pub fn for_pages(agent_dir: &Path) -> PathBuf {
    let memory = Path::new(MEMORY);
    let is_writable = access(memory, AccessFlags::W_OK | AccessFlags::X_OK).is_ok();
    if is_writable { fresh(memory) } else { agent_dir.join("pages") }
}

/// Removes pages that lie in memory; others go with the folder that they are in, or stay in it.
pub fn remove_pages(page_dir: &Path) {
    let name = page_dir.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    if page_dir.parent() == Some(Path::new(MEMORY)) && name.starts_with(PREFIX) {
        let _ = std::fs::remove_dir_all(page_dir);
    }
}

/// Removes the pages of the run before in the same folder, for a supervisor that was killed could not, and notes where those of this run lie.
pub fn take_over_pages(agent_dir: &Path, page_dir: &Path) {
    let note = agent_dir.join(NOTE);
    let before = std::fs::read_to_string(&note).map(PathBuf::from).unwrap_or_default();
    if before != page_dir {
        remove_pages(&before);
    }
    if let Err(error) = std::fs::write(&note, page_dir.as_os_str().as_encoded_bytes()) {
        tracing::info!(%error, "a run after this one will not know where its pages lie");
    }
}
