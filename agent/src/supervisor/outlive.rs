//! How long the supervisor of a pod stays after SIGTERM: as long as the engine, whose preStop and last requests need it (POD.md §9).
//!
//! Reads `/proc`, and what the detector has written of the engine.

use std::path::Path;
use std::time::Duration;

use crate::sources::{EngineProcess, Found, find_pod_engine};
use crate::watch::memory;

/// How often an ending supervisor looks whether the engine still lives.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Returns when the engine is gone, after `bound` at the latest.
pub async fn outlive_engine(bound: Duration, agent_dir: &Path, page_dir: &Path) {
    let gone = async {
        let dir = agent_dir.to_owned();
        let known = tokio::task::spawn_blocking(move || memory::known_engine(&dir)).await.ok().flatten();
        let mut named_before = false;
        loop {
            let page_dir = page_dir.to_owned();
            let found = tokio::task::spawn_blocking(move || find_pod_engine(&page_dir, None)).await;
            let known_lives = known.as_ref().map(EngineProcess::lives);
            match found {
                Ok(None) => return,
                Ok(Some(found)) if !is_awaited(&found, known_lives, &mut named_before) => return,
                // a search may hang with the engine, or fail: then it is still there
                Ok(Some(_)) | Err(_) => {}
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    let _ = tokio::time::timeout(bound, gone).await;
}

/// Is what was found the engine? Other sidecars may stay for as long as they like: the kubelet ends them after us, and one that was taken for
/// the engine would be waited for while it waits for us. The kubelet tells us last: the engine may be gone at the first look.
fn is_awaited(found: &Found, known_lives: Option<bool>, named_before: &mut bool) -> bool {
    let was_named = std::mem::replace(named_before, found.named);
    let another = was_named || known_lives == Some(false) || (known_lives.is_none() && !found.hides);
    found.named || !another
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(named: bool, hides: bool) -> Found {
        Found { process: EngineProcess { pid: 7, start_ticks: 1 }, named, hides }
    }

    #[test]
    fn a_sidecar_is_no_engine_and_is_not_waited_for() {
        let of = |found: Found, known_lives| is_awaited(&found, known_lives, &mut false);
        for known_lives in [None, Some(false), Some(true)] {
            assert!(of(found(true, false), known_lives), "it names our directory: {known_lives:?}");
        }
        assert!(!of(found(false, false), Some(false)), "the engine was gone before we were told");
        assert!(!of(found(false, true), Some(false)), "whatever another one hides");
        assert!(of(found(false, false), Some(true)), "an engine that names nothing");
        assert!(of(found(false, true), None), "it may be the engine");
        assert!(!of(found(false, false), None), "the detector knew of none, and it is none");
        let mut named_before = false;
        assert!(is_awaited(&found(true, false), None, &mut named_before));
        assert!(!is_awaited(&found(false, true), None, &mut named_before), "the one that was named is gone");
    }

    #[tokio::test]
    async fn nobody_waits_for_an_engine_that_is_not_there_or_beyond_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let soon = Duration::from_secs(60);
        let ended = outlive_engine(Duration::from_millis(300), dir.path(), dir.path());
        tokio::time::timeout(soon, ended).await.expect("it stays beyond its bound");
    }
}
