//! A person's fence (`kubectl truebeat fence`). It comes as a file that the kubelet keeps equal to an annotation of the pod
//! (downward API), so it needs no right and no API server, and it is there again after every restart of the agent.

use std::path::PathBuf;

use crds::fence::Fence;

/// The file lies in memory; it is read this often all the same, not at every tick.
const LOOK_EVERY_MS: u64 = 500;
const FILE: &str = "fence";

/// Reads the file now and then.
#[derive(Debug, Default)]
pub struct ByHand {
    path: Option<PathBuf>,
    looked_ms: Option<u64>,
    fence: Option<Fence>,
}

impl ByHand {
    /// `notes_dir` is where the kubelet puts the annotations; `None` outside a pod.
    pub fn new(notes_dir: Option<PathBuf>) -> Self {
        Self { path: notes_dir.map(|dir| dir.join(FILE)), ..Self::default() }
    }

    /// The fence as of now. A file that cannot be read changes nothing (I4); one that is not there is no fence.
    pub fn look(&mut self, now_ms: u64) -> Option<&Fence> {
        let due = self.looked_ms.is_none_or(|at| now_ms.saturating_sub(at) >= LOOK_EVERY_MS);
        if let Some(path) = self.path.as_ref().filter(|_| due) {
            self.looked_ms = Some(now_ms);
            match std::fs::read_to_string(path) {
                Ok(text) => self.fence = Fence::read(&text),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.fence = None,
                Err(error) => tracing::debug!(%error, "the note of a person's fence cannot be read"),
            }
        }
        self.fence.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_is_seen_held_and_taken_off() {
        let dir = tempfile::tempdir().unwrap();
        let mut by_hand = ByHand::new(Some(dir.path().to_owned()));
        assert_eq!(by_hand.look(0), None, "no file: an older pod");
        let file = dir.path().join(FILE);
        std::fs::write(&file, r#"{"by":"ann","why":"a look"}"#).unwrap();
        assert_eq!(by_hand.look(499), None, "not every tick");
        assert_eq!(by_hand.look(500).map(Fence::words).as_deref(), Some("fenced by ann: a look"));
        std::fs::write(&file, [0xff, 0xfe]).unwrap();
        assert!(by_hand.look(1_000).is_some(), "unreadable for the moment");
        std::fs::write(&file, "").unwrap();
        assert_eq!(by_hand.look(1_500), None);
        assert_eq!(ByHand::new(None).look(0), None);
    }
}
