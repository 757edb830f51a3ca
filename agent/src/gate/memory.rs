//! The last will of the detector in a file: a gate that starts anew stays shut.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use super::ledger::Control;
use crate::files::{WRITE_AGAIN, boot_id};

/// So long the detector's will waits for the disk; then it is obeyed all the same.
const KEEP_MAX: Duration = Duration::from_millis(20);

/// Where a gate with this socket keeps what it was told last.
pub fn kept_beside(socket: &Path) -> PathBuf {
    socket.with_extension("state")
}

/// What is in the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    /// The boot from which the times in it count.
    #[serde(default)]
    boot_id: String,
    #[serde(flatten)]
    control: Control,
}

/// What the last detector wanted of the last gate; open where nobody said anything, or in an earlier boot, whose engine is gone.
pub fn recall(memory: &Path) -> Control {
    let kept: Kept = crate::files::read_json(memory).unwrap_or_default();
    if kept.boot_id == boot_id() { kept.control } else { Control::default() }
}

/// What the detector wants, on its way to a file. A disk that hangs holds one thread, and no client (D10).
#[derive(Debug)]
pub struct Memory {
    path: PathBuf,
    last: Mutex<Option<Writing>>,
}

/// What was written last, or is being written.
#[derive(Debug)]
struct Writing {
    control: Control,
    task: JoinHandle<()>,
    begun: Instant,
    failed: Arc<AtomicBool>,
}

impl Writing {
    /// Is it in the file, on its way there, or was it tried a moment ago?
    fn will_do_for(&self, control: &Control) -> bool {
        let failed = self.failed.load(Ordering::Acquire);
        !self.task.is_finished() || self.control == *control && !(failed && self.begun.elapsed() >= WRITE_AGAIN)
    }
}

impl Memory {
    /// Kept in this file; nothing is written yet.
    pub fn at(path: PathBuf) -> Self {
        Self { path, last: Mutex::default() }
    }

    /// Writes it, unless it was written last. What a write under way keeps from being written now is tried again with the next word.
    pub async fn keep(&self, control: &Control) {
        let mut last = self.last.lock().await;
        if last.as_ref().is_some_and(|writing| writing.will_do_for(control)) {
            return;
        }
        let (path, wanted, failed) = (self.path.clone(), control.clone(), Arc::<AtomicBool>::default());
        let fails = Arc::clone(&failed);
        let write = move || {
            if let Err(error) = crate::files::write_json(&path, &Kept { boot_id: boot_id(), control: wanted }) {
                fails.store(true, Ordering::Release);
                tracing::warn!(%error, "the gate cannot remember its state; a restart will open it until the detector's next word");
            }
        };
        let task = tokio::task::spawn_blocking(write);
        let writing = last.insert(Writing { control: control.clone(), task, begun: Instant::now(), failed });
        if tokio::time::timeout(KEEP_MAX, &mut writing.task).await.is_err() {
            tracing::warn!("the gate's disk is slow; a restart may open it until the detector's next word");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_will_of_an_earlier_boot_is_not_obeyed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gate.state");
        let shut = Control { fenced: true, ..Control::default() };
        for (boot_id, obeyed) in [(boot_id(), true), ("another".to_owned(), false)] {
            crate::files::write_json(&path, &Kept { boot_id, control: shut.clone() }).unwrap();
            assert_eq!(recall(&path), if obeyed { shut.clone() } else { Control::default() });
        }
        crate::files::write_json(&path, &shut).unwrap();
        assert_eq!(recall(&path), Control::default(), "nobody knows of which boot");
    }

    #[tokio::test]
    async fn what_could_not_be_written_is_written_when_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("not/there");
        let memory = Memory::at(path.clone());
        let shut = Control { fenced: true, ..Control::default() };
        memory.keep(&shut).await;
        std::fs::create_dir(dir.path().join("not")).unwrap();
        let kept = async {
            while recall(&path) != shut {
                memory.keep(&shut).await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), kept).await.expect("it is never tried again");
    }
}
