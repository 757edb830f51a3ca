//! Whom a granted kill was sent to, or who was there when the engine ended by itself, and what is left of them: a worker that cannot be ended
//! owns its GPU although the engine's first process is gone (I5), and whoever comes must not serve beside it (P16).
//!
//! May look at `/proc`; signals nobody.

use serde::{Deserialize, Serialize};
use vitals::observation::ProcObs;

use crate::sources::{EngineProcess, left_of};

/// The kill is repeated for a process that is still there.
const KILL_AGAIN_MS: u64 = 1_000;
/// One that was spared is looked at again after this.
const SPARED_AGAIN_MS: u64 = 10_000;
/// A worker that ends gives back hundreds of gigabytes of pinned memory, and its GPU: seconds, and it can be ended.
const GIVING_BACK_MS: u64 = 20_000;
/// What is waited for and not ended is told of after this: by then one that was ended would have been called unkillable.
const IN_VAIN_MS: u64 = GIVING_BACK_MS + 10_000;
/// So many pids are told of what is left.
const PIDS_TOLD_MAX: usize = 8;
/// A kill that has not said by then whom it reached never will.
const KILLING_MS_MAX: u64 = 5_000;

/// The last end of an engine, if there was one.
#[derive(Debug, Default)]
pub struct Killed {
    last: Option<End>,
    left: bool,
    /// Its first process was there still at the last look, although SIGKILL was sent.
    outlives: bool,
    /// Whose remains the log has told of, because nobody here ends them.
    told: Option<EngineProcess>,
}

/// A kill, or an end without one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    engine: EngineProcess,
    /// When the kill began, or the end was seen.
    first_ms: u64,
    last_ms: u64,
    /// When the first SIGKILL was sent; `None`: none was.
    sent_ms: Option<u64>,
    /// It was a guess that proved wrong the last time.
    spared: bool,
    /// The signals may not have been sent yet.
    under_way: bool,
    /// Who else was the engine's, and has not been seen to be gone.
    others: Vec<EngineProcess>,
    /// They may be sent SIGKILL, although no kill of the engine was granted: it has ended, and it was the engine for sure.
    remains_only: bool,
    /// Nobody here holds a case against it: it ended by itself, or it was a forerunner who had it killed. It is dead to whoever judges.
    #[serde(skip)]
    mourned: bool,
}

impl End {
    fn of(engine: &EngineProcess, now_ms: u64) -> Self {
        Self {
            engine: engine.clone(),
            first_ms: now_ms,
            last_ms: now_ms,
            sent_ms: None,
            spared: false,
            under_way: false,
            others: Vec::new(),
            remains_only: false,
            mourned: false,
        }
    }
}

impl Killed {
    /// What a forerunner left: of its kill, or of an end that it saw. Where it did not live to say whom it killed, or saw no end and the engine
    /// that it followed has gone, whoever is left in that engine's session and in its `container`.
    pub fn recalled(end: Option<End>, known: Option<&EngineProcess>, container: Option<&str>, now_ms: u64) -> Self {
        let unseen = || {
            let engine = known.filter(|engine| engine.is_gone())?;
            Some(End { others: left_of(engine, container), ..End::of(engine, now_ms) })
        };
        let last = end.filter(|end| Some(&end.engine) == known && !end.under_way).or_else(unseen);
        Self { last: last.map(|end| End { mourned: true, ..end }), ..Self::default() }
    }

    /// May this engine be killed now, or is its last kill too young?
    pub fn is_due(&self, engine: &EngineProcess, now_ms: u64) -> bool {
        self.of(engine).is_none_or(|end| {
            let again_ms = if end.spared { SPARED_AGAIN_MS } else { KILL_AGAIN_MS };
            now_ms.saturating_sub(end.last_ms) >= again_ms
        })
    }

    /// A kill of this engine begins, for the first time or again.
    pub fn begins(&mut self, engine: &EngineProcess, now_ms: u64) {
        let before = self.last.take_if(|end| end.engine == *engine);
        let first_ms = before.as_ref().filter(|end| !end.spared).map_or(now_ms, |end| end.first_ms);
        let others = before.map(|end| end.others).unwrap_or_default();
        let begun = End { first_ms, sent_ms: Some(first_ms), under_way: true, others, ..End::of(engine, now_ms) };
        self.last = Some(begun);
    }

    /// No signal was sent to it.
    pub fn was_spared(&mut self, guess: &EngineProcess) {
        self.last.iter_mut().filter(|end| end.engine == *guess).for_each(|end| end.spared = true);
    }

    /// Who was spared, the last time that somebody was to be killed.
    pub fn spared(&self) -> Option<&EngineProcess> {
        self.last.as_ref().filter(|end| end.spared).map(|end| &end.engine)
    }

    /// Its kill was sent, to these of the engine.
    pub fn reached(&mut self, engine: &EngineProcess, members: Vec<EngineProcess>) {
        let Some(end) = self.last.as_mut().filter(|end| end.engine == *engine) else { return };
        end.under_way = false;
        if members.is_empty() {
            // it is gone, or nobody could be seen: nothing has outlived a signal that was not sent
            self.last.take_if(|end| end.others.is_empty());
            return;
        }
        for member in members {
            if member != *engine && !end.others.contains(&member) {
                end.others.push(member);
            }
        }
    }

    /// Is it known already how this engine ended?
    pub fn knows(&self, engine: &EngineProcess) -> bool {
        self.of(engine).is_some_and(|end| !end.spared)
    }

    /// It has ended, and nobody had it killed; `others` of it lived on then. `sure`: it was more than a guess.
    pub fn ended(&mut self, engine: &EngineProcess, now_ms: u64, others: Vec<EngineProcess>, sure: bool) {
        self.last = Some(End { others, remains_only: sure, mourned: true, ..End::of(engine, now_ms) });
    }

    /// Looks whether anything [is left](Self::is_left) of the engine that is followed.
    pub fn look(&mut self, now_ms: u64, engine: Option<&EngineProcess>) -> bool {
        let left = |end: &mut End| {
            end.others.retain(|other| !other.is_gone());
            end.under_way &= now_ms.saturating_sub(end.last_ms) < KILLING_MS_MAX;
            end.under_way || !end.others.is_empty()
        };
        let followed = |end: &&mut End| !end.spared && engine == Some(&end.engine);
        let end = self.last.as_mut().filter(followed);
        self.outlives = end.as_ref().is_some_and(|end| end.sent_ms.is_some() && !end.engine.is_gone());
        self.left = end.is_some_and(left);
        self.left
    }

    /// Was it there still at the last look, although its first process may be gone? True as well while it is being killed.
    pub fn is_left(&self) -> bool {
        self.left
    }

    /// Who is to be sent SIGKILL now of what an engine left that ended by itself. Its container's runtime has done so long ago, as a rule; where
    /// none does, they would hold the GPU for ever.
    pub fn remains_due(&mut self, now_ms: u64) -> Vec<EngineProcess> {
        let since = |at_ms: u64| now_ms.saturating_sub(at_ms);
        let is_due = |end: &&mut End| {
            end.remains_only && since(end.first_ms) >= GIVING_BACK_MS && since(end.last_ms) >= KILL_AGAIN_MS
        };
        let Some(end) = self.last.as_mut().filter(|_| self.left).filter(is_due) else { return Vec::new() };
        end.sent_ms.get_or_insert(now_ms);
        end.last_ms = now_ms;
        end.others.clone()
    }

    /// What is left of it is the engine. One that was killed lives for as long: nobody else is to be judged by what was held against it. To
    /// whoever knows of nothing that is held against it, it is dead until it outlives SIGKILL by so much.
    pub fn show(&self, engine: &EngineProcess, now_ms: u64, unkillable_ms: u64, proc: &mut ProcObs) {
        proc.kill_sent_ms = self.sent_ms(engine);
        let outlives = proc.kill_sent_ms.is_some_and(|at_ms| now_ms.saturating_sub(at_ms) > unkillable_ms);
        let mourned = self.last.as_ref().is_some_and(|end| end.mourned);
        proc.alive |= self.left && (outlives || !mourned);
    }

    /// Since when this engine outlives SIGKILL; where its first process is gone, the others have their time to give back what they hold.
    fn sent_ms(&self, engine: &EngineProcess) -> Option<u64> {
        let end = self.of(engine).filter(|end| !end.spared)?;
        let others_alone = self.left && engine.is_gone();
        let given_back_ms = if others_alone { end.first_ms + GIVING_BACK_MS } else { 0 };
        end.sent_ms.map(|sent_ms| sent_ms.max(given_back_ms))
    }

    /// The pids of those who were the engine's and are left.
    pub fn others(&self) -> Vec<i32> {
        self.last.iter().flat_map(|end| &end.others).map(|other| other.pid).collect()
    }

    /// How many of the engine are left.
    pub fn count_left(&self) -> usize {
        self.last.as_ref().filter(|_| self.left).map_or(0, |end| end.others.len())
    }

    /// What a person must know of what an engine left, where it has been waited for in vain and nobody here ends it: what is but a guess, or
    /// what nobody saw end, is not killed, and neither is anything while recovery may not. Nothing else would ever end the wait.
    pub fn plea(&self, now_ms: u64) -> Option<String> {
        let (end, seconds) = self.in_vain(now_ms)?;
        let (count, pids) = (end.others.len(), end.others.iter().take(PIDS_TOLD_MAX));
        let pids = pids.map(|other| other.pid.to_string()).collect::<Vec<_>>().join(", ");
        let why = match end.remains_only {
            true => "recovery may not end them now (its mode, or maintenance)",
            false => "that they are the engine's is not certain, so nothing here ends them",
        };
        Some(format!(
            "{count} of its processes are left after {seconds} s (pids {pids}), and no other engine is followed before they have gone; {why}: \
             to delete the pod ends them"
        ))
    }

    /// Is there something to plead for?
    pub fn is_in_vain(&self, now_ms: u64) -> bool {
        self.in_vain(now_ms).is_some()
    }

    /// The end whose remains are waited for in vain, and for how many seconds.
    fn in_vain(&self, now_ms: u64) -> Option<(&End, u64)> {
        let end = self.last.as_ref().filter(|end| self.left && !end.under_way && end.sent_ms.is_none())?;
        let left_ms = now_ms.saturating_sub(end.first_ms);
        (left_ms >= IN_VAIN_MS).then_some((end, left_ms / 1_000))
    }

    /// Is the log to be told? Once of each end.
    pub fn is_to_be_told(&mut self) -> bool {
        let engine = self.last.as_ref().map(|end| end.engine.clone());
        let news = self.told != engine;
        self.told = engine;
        news
    }

    /// What a successor must know: that something is left, or that the engine was sent SIGKILL and may be there still.
    pub fn kept(&self) -> Option<&End> {
        self.last.as_ref().filter(|end| !end.spared && (self.left || self.outlives))
    }

    fn of(&self, engine: &EngineProcess) -> Option<&End> {
        self.last.as_ref().filter(|end| end.engine == *engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: EngineProcess = EngineProcess { pid: i32::MAX, start_ticks: 1 };

    fn worker() -> (tokio::process::Child, EngineProcess) {
        let worker = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let process = EngineProcess::of(worker.id().unwrap().cast_signed()).unwrap();
        (worker, process)
    }

    /// What whoever judges is shown at `now_ms`: whether it lives, and since when it outlives SIGKILL.
    fn shown(killed: &Killed, now_ms: u64) -> (bool, Option<u64>) {
        let mut proc = ProcObs::default();
        killed.show(&ROOT, now_ms, 10_000, &mut proc);
        (proc.alive, proc.kill_sent_ms)
    }

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
        let (mut worker, worker_now) = worker();
        let root = ROOT;
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
        let sent_ms = Some(5 + GIVING_BACK_MS);
        assert_eq!(shown(&killed, 9_000), (true, sent_ms), "a worker has longer than who answers requests");
        let successor = EngineProcess { pid: 1, start_ticks: 1 };
        assert!(!look(&mut killed, 9_000, &successor), "a launcher that gave them up has started another");
        assert!(look(&mut killed, 9_000, &root));
        killed.reached(&root, Vec::new());
        assert!(look(&mut killed, 9_000, &root), "a second kill that finds nobody forgets nobody");
        worker.kill().await.unwrap();
        assert!(!look(&mut killed, 9_001, &root), "proven gone");
    }

    /// Its API server has crashed, and a worker is in the driver: whoever comes would find the GPU taken.
    #[tokio::test]
    async fn what_outlives_an_engine_that_died_by_itself_is_waited_for_and_then_ended() {
        let (mut worker, worker_now) = worker();
        let mut killed = Killed::default();
        assert!(!killed.knows(&ROOT));
        killed.ended(&ROOT, 1_000, vec![worker_now.clone()], true);
        assert!(killed.knows(&ROOT) && killed.look(1_001, Some(&ROOT)), "nobody else is followed");
        assert_eq!(shown(&killed, 1_001), (false, None), "it is dead all the same");
        let due_ms = 1_000 + GIVING_BACK_MS;
        assert!(killed.remains_due(due_ms - 1).is_empty(), "its container's runtime ends it");
        assert_eq!(killed.remains_due(due_ms), std::slice::from_ref(&worker_now));
        assert!(killed.remains_due(due_ms + KILL_AGAIN_MS - 1).is_empty());
        assert_eq!(killed.remains_due(due_ms + KILL_AGAIN_MS), std::slice::from_ref(&worker_now));
        assert_eq!(shown(&killed, due_ms + 10_000), (false, Some(due_ms)));
        assert_eq!(shown(&killed, due_ms + 10_001), (true, Some(due_ms)), "now it is one that cannot be ended");
        worker.kill().await.unwrap();
        assert!(!killed.look(due_ms + 11_000, Some(&ROOT)) && killed.remains_due(u64::MAX).is_empty());
        let (_guest, guest_now) = self::worker();
        killed.ended(&ROOT, 1_000, vec![guest_now], false);
        assert!(killed.look(1_001, Some(&ROOT)) && killed.remains_due(u64::MAX).is_empty(), "it was but a guess");
    }

    /// Nobody ends what a guess left, and to wait for it in silence would be to wait for ever.
    #[tokio::test]
    async fn what_is_left_and_ended_by_nobody_is_told_of() {
        let (mut worker, worker_now) = worker();
        let mut killed = Killed::default();
        killed.ended(&ROOT, 1_000, vec![worker_now.clone()], false);
        assert!(killed.look(1_001, Some(&ROOT)) && killed.count_left() == 1);
        let due_ms = 1_000 + IN_VAIN_MS;
        assert_eq!(killed.plea(due_ms - 1), None, "its container's runtime may end it");
        let plea = killed.plea(due_ms).unwrap();
        for word in [format!("pids {}", worker_now.pid), "after 30 s".into(), "not certain".into()] {
            assert!(plea.contains(&word), "{word}: {plea}");
        }
        assert!(killed.is_to_be_told() && !killed.is_to_be_told(), "the log has it once");
        let mut next = Killed::recalled(killed.kept().cloned(), Some(&ROOT), None, 90_000);
        assert!(next.look(90_000, Some(&ROOT)) && next.plea(90_000).is_some(), "a successor says so too");
        // what is known to be the engine's is ended, unless that may not be
        killed.ended(&ROOT, 1_000, vec![worker_now], true);
        assert!(killed.look(1_001, Some(&ROOT)) && killed.plea(due_ms).unwrap().contains("maintenance"));
        assert_eq!((killed.remains_due(due_ms).len(), killed.plea(due_ms)), (1, None), "what is ended");
        worker.kill().await.unwrap();
        killed.ended(&ROOT, 1_000, killed.last.clone().unwrap().others, false);
        assert!(!killed.look(due_ms, Some(&ROOT)) && killed.plea(due_ms).is_none() && killed.count_left() == 0);
    }

    /// The supervisor has started another detector in the middle.
    #[tokio::test]
    async fn a_successor_knows_what_is_left_and_sees_a_dead_engine() {
        let (mut worker, worker_now) = worker();
        let mut killed = Killed::default();
        killed.begins(&ROOT, 5);
        killed.reached(&ROOT, vec![ROOT, worker_now]);
        assert!(killed.look(100, Some(&ROOT)));
        let written = serde_json::to_string(&killed.kept()).unwrap();
        let recall = || Killed::recalled(serde_json::from_str(&written).unwrap(), Some(&ROOT), None, 200);
        let mut next = recall();
        assert!(next.look(200, Some(&ROOT)), "it would follow whoever comes");
        // (what was held against it is forgotten: were it alive, the front end of whoever comes would speak for it)
        let sent_ms = 5 + GIVING_BACK_MS;
        assert_eq!(shown(&next, sent_ms + 10_000), (false, Some(sent_ms)));
        assert_eq!(shown(&next, sent_ms + 10_001), (true, Some(sent_ms)));
        assert!(next.remains_due(u64::MAX).is_empty(), "a kill is repeated by whoever has the grant");
        let another = EngineProcess { start_ticks: 2, ..ROOT };
        assert!(!Killed::recalled(next.kept().cloned(), Some(&another), None, 200).look(200, Some(&another)));
        worker.kill().await.unwrap();
        let mut late = recall();
        assert!(!late.look(300, Some(&ROOT)) && late.kept().is_none());
    }

    /// It died while no detector was there to see whom it left.
    #[test]
    fn where_nobody_saw_the_end_the_session_tells_who_is_left() {
        use std::process::{Command, Stdio};
        // what is left ends with what it reads, which ends with this test, whatever comes of it
        let mut leader = Command::new("setsid");
        leader.args(["sh", "-c", "exec 3<&0; cat <&3 & wait"]).stdin(Stdio::piped());
        let mut leader = leader.spawn().unwrap();
        let _ends_with_this = leader.stdin.take();
        let pid = leader.id().cast_signed();
        let begun = std::time::Instant::now();
        let session = || {
            let all = crate::sources::procs::ProcRoot::live().all();
            all.into_iter().filter(|stat| stat.session == pid && stat.pid != pid).collect::<Vec<_>>()
        };
        while !session().iter().any(|stat| stat.comm == "cat") {
            assert!(begun.elapsed() < std::time::Duration::from_secs(40), "it does not start");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let engine = EngineProcess::of(pid).unwrap();
        assert!(!Killed::recalled(None, Some(&engine), None, 7).look(7, Some(&engine)), "it lives");
        leader.kill().unwrap();
        leader.wait().unwrap();
        let mut killed = Killed::recalled(None, Some(&engine), None, 7);
        assert!(killed.look(7, Some(&engine)) && killed.remains_due(u64::MAX).is_empty());
        crate::kill::send(&killed.others(), nix::sys::signal::Signal::SIGKILL);
        while killed.look(8, Some(&engine)) {
            assert!(begun.elapsed() < std::time::Duration::from_secs(40), "it does not end");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
