//! What others want of this replica, as files that the kubelet keeps equal to annotations of the pod (downward API): a person's fence
//! (`kubectl truebeat fence`), maintenance that somebody declares, what the operator has refused (I7), and how far
//! recovery goes. So it needs no right and no API
//! server, and it is there again after every restart of the agent. In `truebeat run` people write the files of a fence and of maintenance, and
//! there are no others.

use std::path::{Path, PathBuf};

/// A note lies in memory; it is read this often all the same, not at every tick.
const LOOK_EVERY_MS: u64 = 500;
/// A person's fence.
pub const FENCE: &str = "fence";
/// Silence that is intended.
pub const MAINTENANCE: &str = "maintenance";
/// Requests that are refused.
pub const POISON: &str = "poison";

/// How far recovery goes.
pub const RECOVERY: &str = "recovery";
/// What the kubelet writes a minute late is read no more often than this.
pub const SELDOM_MS: u64 = 5_000;

/// One note, read now and then.
#[derive(Debug)]
pub struct Note<T> {
    path: Option<PathBuf>,
    read: fn(&str) -> Option<T>,
    look_every_ms: u64,
    looked_ms: Option<u64>,
    says: Option<T>,
}

impl<T> Note<T> {
    /// `dir` is where the kubelet puts the annotations; `None` outside a pod.
    pub fn new(dir: Option<&Path>, name: &str, read: fn(&str) -> Option<T>) -> Self {
        let path = dir.map(|dir| dir.join(name));
        Self { path, read, look_every_ms: LOOK_EVERY_MS, looked_ms: None, says: None }
    }

    /// The same, read every so often.
    pub fn every(self, look_every_ms: u64) -> Self {
        Self { look_every_ms, ..self }
    }

    /// The note as of now. A file that cannot be read changes nothing (I4); one that is not there says nothing.
    pub fn look(&mut self, now_ms: u64) -> Option<&T> {
        let due = self.looked_ms.is_none_or(|at| now_ms.saturating_sub(at) >= self.look_every_ms);
        if let Some(path) = self.path.as_ref().filter(|_| due) {
            self.looked_ms = Some(now_ms);
            match std::fs::read_to_string(path) {
                Ok(text) => self.says = (self.read)(&text),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.says = None,
                Err(error) => tracing::debug!(%error, path = %path.display(), "a note cannot be read"),
            }
        }
        self.says.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crds::fence::Fence;

    #[test]
    fn a_fence_is_seen_held_and_taken_off() {
        let dir = tempfile::tempdir().unwrap();
        let mut by_hand = Note::new(Some(dir.path()), FENCE, Fence::read);
        assert_eq!(by_hand.look(0), None, "no file: an older pod");
        let file = dir.path().join(FENCE);
        std::fs::write(&file, r#"{"by":"ann","why":"a look"}"#).unwrap();
        assert_eq!(by_hand.look(499), None, "not every tick");
        assert_eq!(by_hand.look(500).map(Fence::words).as_deref(), Some("fenced by ann: a look"));
        std::fs::write(&file, [0xff, 0xfe]).unwrap();
        assert!(by_hand.look(1_000).is_some(), "unreadable for the moment");
        std::fs::write(&file, "").unwrap();
        assert_eq!(by_hand.look(1_500), None);
        assert_eq!(Note::new(None, FENCE, Fence::read).look(0), None);
    }
}
