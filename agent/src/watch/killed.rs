//! Whom a granted kill was sent to, and what is left of them: a worker that cannot be ended owns its GPU although the engine's first process is
//! gone (I5), and whoever comes must not serve beside it (P16).
//!
//! May look at `/proc`; signals nobody.

use vitals::observation::ProcObs;

use crate::sources::EngineProcess;

/// The kill is repeated for a process that is still there.
const KILL_AGAIN_MS: u64 = 1_000;
/// One that was spared is looked at again after this.
const SPARED_AGAIN_MS: u64 = 10_000;
/// A worker that ends gives back hundreds of gigabytes of pinned memory, and its GPU: seconds, and it can be ended.
const GIVING_BACK_MS: u64 = 20_000;
/// A kill that has not said by then whom it reached never will.
const KILLING_MS_MAX: u64 = 5_000;

/// The last kill, if there was one.
#[derive(Debug, Default)]
pub struct Killed {
    last: Option<Kill>,
    left: bool,
}

#[derive(Debug)]
struct Kill {
    engine: EngineProcess,
    first_ms: u64,
    last_ms: u64,
    /// It was a guess that proved wrong the last time.
    spared: bool,
    /// The signals may not have been sent yet.
    under_way: bool,
    /// Who else was killed with it, and has not been seen to be gone.
    others: Vec<EngineProcess>,
}

impl Killed {
    /// May this engine be killed now, or is its last kill too young?
    pub fn is_due(&self, engine: &EngineProcess, now_ms: u64) -> bool {
        self.of(engine).is_none_or(|kill| {
            let again_ms = if kill.spared { SPARED_AGAIN_MS } else { KILL_AGAIN_MS };
            now_ms.saturating_sub(kill.last_ms) >= again_ms
        })
    }

    /// A kill of this engine begins, for the first time or again.
    pub fn begins(&mut self, engine: &EngineProcess, now_ms: u64) {
        let before = self.last.take_if(|kill| kill.engine == *engine);
        let first_ms = before.as_ref().filter(|kill| !kill.spared).map_or(now_ms, |kill| kill.first_ms);
        let others = before.map(|kill| kill.others).unwrap_or_default();
        let engine = engine.clone();
        self.last = Some(Kill { engine, first_ms, last_ms: now_ms, spared: false, under_way: true, others });
    }

    /// No signal was sent to it.
    pub fn was_spared(&mut self, guess: &EngineProcess) {
        self.last.iter_mut().filter(|kill| kill.engine == *guess).for_each(|kill| kill.spared = true);
    }

    /// Who was spared, the last time that somebody was to be killed.
    pub fn spared(&self) -> Option<&EngineProcess> {
        self.last.as_ref().filter(|kill| kill.spared).map(|kill| &kill.engine)
    }

    /// Its kill was sent, to these of the engine.
    pub fn reached(&mut self, engine: &EngineProcess, members: Vec<EngineProcess>) {
        let Some(kill) = self.last.as_mut().filter(|kill| kill.engine == *engine) else { return };
        kill.under_way = false;
        if members.is_empty() {
            // it is gone, or nobody could be seen: nothing has outlived a signal that was not sent
            self.last.take_if(|kill| kill.others.is_empty());
            return;
        }
        for member in members {
            if member != *engine && !kill.others.contains(&member) {
                kill.others.push(member);
            }
        }
    }

    /// Looks whether anything [is left](Self::is_left) of the engine that is followed.
    pub fn look(&mut self, now_ms: u64, engine: Option<&EngineProcess>) -> bool {
        let left = |kill: &mut Kill| {
            kill.others.retain(|other| !other.is_gone());
            kill.under_way &= now_ms.saturating_sub(kill.last_ms) < KILLING_MS_MAX;
            kill.under_way || !kill.others.is_empty()
        };
        let followed = |kill: &&mut Kill| !kill.spared && engine == Some(&kill.engine);
        self.left = self.last.as_mut().filter(followed).is_some_and(left);
        self.left
    }

    /// Was it there still at the last look, although its first process may be gone? True as well while it is being killed.
    pub fn is_left(&self) -> bool {
        self.left
    }

    /// What is left of it is the engine, which lives for as long.
    pub fn show(&self, engine: &EngineProcess, proc: &mut ProcObs) {
        proc.kill_sent_ms = self.sent_ms(engine);
        proc.alive |= self.left;
    }

    /// Since when this engine outlives SIGKILL; where its first process is gone, the others have their time to give back what they hold.
    fn sent_ms(&self, engine: &EngineProcess) -> Option<u64> {
        let kill = self.of(engine).filter(|kill| !kill.spared)?;
        let others_alone = self.left && engine.is_gone();
        Some(kill.first_ms + if others_alone { GIVING_BACK_MS } else { 0 })
    }

    /// The pids of those who were killed with it and are left.
    pub fn others(&self) -> Vec<i32> {
        self.last.iter().flat_map(|kill| &kill.others).map(|other| other.pid).collect()
    }

    fn of(&self, engine: &EngineProcess) -> Option<&Kill> {
        self.last.as_ref().filter(|kill| kill.engine == *engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_was_spared_has_outlived_no_kill() {
        let (mut killed, guess) = (Killed::default(), EngineProcess { pid: 7, start_ticks: 1 });
        killed.begins(&guess, 5);
        assert_eq!(killed.sent_ms(&guess), Some(5));
        killed.was_spared(&guess);
        assert_eq!(killed.sent_ms(&guess), None, "it would be called unkillable");
    }

    /// An API server and its worker, which holds the GPU: the first is gone at once, the second is in the driver.
    #[tokio::test]
    async fn what_outlives_the_first_process_is_the_engine_that_was_killed() {
        let mut worker = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let worker_now = EngineProcess::of(worker.id().unwrap().cast_signed()).unwrap();
        let root = EngineProcess { pid: i32::MAX, start_ticks: 1 };
        let look = |killed: &mut Killed, now_ms, engine: &EngineProcess| killed.look(now_ms, Some(engine));
        let mut killed = Killed::default();
        assert!(!look(&mut killed, 5, &root), "nobody was killed");
        killed.begins(&root, 5);
        assert!(look(&mut killed, 6, &root), "it is being killed");
        assert!(!look(&mut killed, 5 + KILLING_MS_MAX, &root), "nobody knows what came of it");
        killed = Killed::default();
        killed.begins(&root, 5);
        killed.reached(&root, vec![root.clone(), worker_now]);
        assert!(look(&mut killed, 9_000, &root), "its worker lives");
        assert_eq!(killed.sent_ms(&root), Some(5 + GIVING_BACK_MS), "a worker has longer than who answers requests");
        let successor = EngineProcess { pid: 1, start_ticks: 1 };
        assert!(!look(&mut killed, 9_000, &successor), "a launcher that gave them up has started another");
        assert!(look(&mut killed, 9_000, &root));
        killed.reached(&root, Vec::new());
        assert!(look(&mut killed, 9_000, &root), "a second kill that finds nobody forgets nobody");
        worker.kill().await.unwrap();
        assert!(!look(&mut killed, 9_001, &root), "proven gone");
    }
}
