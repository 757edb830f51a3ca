//! What a detector knows beside its sources: maintenance that somebody declares, a drain, and a kill under way. A trace without them shows an
//! engine that is silent on purpose as one that hangs. Reads the notes, the agent's files and what the gate said; tells nobody anything.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use vitals::observation::{Ms, Observation};

use crate::gate::ledger::GateReply;
use crate::kill::KillNote;
use crate::sources::EngineProcess;
use crate::watch::notes::Notes;

/// The first sample waits for the notes, so long at most.
const NOTES_MAX: Duration = Duration::from_secs(1);
/// The note of a kill is looked for this often.
const KILL_EVERY_MS: Ms = 500;

#[derive(Debug)]
pub struct Beside {
    notes: Notes,
    agent_dir: Option<PathBuf>,
    draining: bool,
    /// Whose end was granted, and when first.
    killed: Option<(EngineProcess, Ms)>,
    looked_ms: Option<Ms>,
}

impl Beside {
    pub fn new(agent_dir: Option<PathBuf>, notes_dir: Option<PathBuf>) -> Self {
        let notes = Notes::new(notes_dir.as_deref(), false);
        Self { notes, agent_dir, draining: false, killed: None, looked_ms: None }
    }

    /// Adds it to what the sources saw. `gate`: what the gate has said now; while it is silent, what it said last of a drain holds.
    pub async fn lay_over(
        &mut self,
        now_ms: Ms,
        engine: Option<&EngineProcess>,
        gate: Option<&GateReply>,
        obs: &mut Observation,
    ) {
        let says = match self.looked_ms {
            None => self.notes.look_first(now_ms, NOTES_MAX).await,
            Some(_) => self.notes.look(now_ms),
        };
        obs.maintenance = says.maintenance_at(Timestamp::now()).is_some();
        self.draining = gate.map_or(self.draining, |gate| gate.draining);
        obs.draining = self.draining;
        if self.looked_ms.is_none_or(|at| now_ms.saturating_sub(at) >= KILL_EVERY_MS) {
            self.looked_ms = Some(now_ms);
            self.look_for_a_kill(now_ms, engine);
        }
        if let (Some(proc), Some((killed, at_ms))) = (&mut obs.proc.value, &self.killed) {
            proc.kill_sent_ms = (Some(killed) == engine).then_some(*at_ms);
        }
    }

    fn look_for_a_kill(&mut self, now_ms: Ms, engine: Option<&EngineProcess>) {
        let Some((dir, engine)) = self.agent_dir.as_ref().zip(engine) else { return };
        if self.killed.as_ref().is_some_and(|(killed, _)| killed == engine) {
            return;
        }
        if let Some(age) = KillNote::age(dir, engine) {
            let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
            self.killed = Some((engine.clone(), now_ms.saturating_sub(age_ms)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vitals::observation::{ProcObs, Signal};

    async fn seen(
        beside: &mut Beside,
        now_ms: Ms,
        engine: &EngineProcess,
        gate: Option<&GateReply>,
    ) -> (bool, bool, Option<Ms>) {
        let mut obs = Observation { proc: Signal::at(now_ms, ProcObs::default()), ..Observation::default() };
        beside.lay_over(now_ms, Some(engine), gate, &mut obs).await;
        (obs.maintenance, obs.draining, obs.proc.value.unwrap().kill_sent_ms)
    }

    #[tokio::test]
    async fn maintenance_a_drain_and_a_kill_are_seen_and_end() {
        let dir = tempfile::tempdir().unwrap();
        let (agent_dir, notes_dir) = (dir.path().join("agent"), dir.path().join("notes"));
        std::fs::create_dir_all(&agent_dir).unwrap();
        std::fs::create_dir_all(&notes_dir).unwrap();
        let note = notes_dir.join("maintenance");
        std::fs::write(&note, r#"{"by":"ann","why":"weights"}"#).unwrap();
        let mut beside = Beside::new(Some(agent_dir.clone()), Some(notes_dir));
        let engine = EngineProcess { pid: 7, start_ticks: 1 };
        let drains = GateReply { draining: true, ..GateReply::default() };
        assert_eq!(seen(&mut beside, 100_000, &engine, Some(&drains)).await, (true, true, None));
        std::fs::remove_file(&note).unwrap();
        let killed = KillNote { pid: 7, start_ticks: 1, episode: "e".to_owned() };
        crate::files::write_json(&KillNote::path(&agent_dir), &killed).unwrap();
        let mut now_ms = 100_000;
        let sent_ms = loop {
            now_ms += 1_000;
            tokio::time::sleep(Duration::from_millis(10)).await;
            match seen(&mut beside, now_ms, &engine, None).await {
                (false, true, Some(sent_ms)) => break sent_ms,
                told => assert!(now_ms < 3_000_000, "{told:?}"),
            }
        };
        assert!((40_000..=102_000).contains(&sent_ms), "{sent_ms}");
        // a kill that is repeated began when it did
        crate::files::write_json(&KillNote::path(&agent_dir), &killed).unwrap();
        assert_eq!(seen(&mut beside, now_ms + 9_000, &engine, None).await, (false, true, Some(sent_ms)));
        let successor = EngineProcess { pid: 8, start_ticks: 2 };
        let open = GateReply::default();
        assert_eq!(seen(&mut beside, now_ms + 10_000, &successor, Some(&open)).await, (false, false, None));
    }
}
