//! What a detector leaves for its successor: a restart of the detector must not forget a fence, an open episode or a spent grant.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use vitals::detector::Detector;
use vitals::learned::{Learned, WRITTEN_EVERY_MS};
use vitals::recovery::EpisodeStage;
use vitals::verdict::Verdict;

use super::ear::told_last;
use super::hold::refusal;
use super::kept::KeptFile;
use super::killed::End;
use super::latest::Written;
use crate::files::{boot_id, read_json};
use crate::gate::ledger::Control;
use crate::incidents::Incidents;
use crate::sources::EngineProcess;

/// The state that outlives one detector process (not the boot: times are `CLOCK_MONOTONIC`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// pid and start ticks of the engine that all of this is about.
    pub engine: Option<(i32, u64)>,
    /// What names the container that the engine is in, where that is known: what is in there once it has ended is its own, and no engine.
    pub container: Option<String>,
    /// Would the replica serve, by what its engine does alone?
    pub fit: bool,
    /// This engine has delivered tokens, or needs not show that it does.
    pub proven: bool,
    pub fenced: bool,
    /// The API said that no other replica of its deployment serves (I3).
    pub last_serving: bool,
    /// What refused clients were told; empty while the gate was open.
    pub refusal: String,
    pub incidents: Incidents,
    /// What is left of an engine that was killed, or has ended.
    #[serde(deserialize_with = "whole_or_nothing")]
    pub left: Option<End>,
    pub last_unattended_ms: Option<u64>,
    /// Since when the engine is paused, where only its log said so.
    pub paused_ms: Option<u64>,
    /// The last drain request that an engine's restart has ended.
    pub drain_ended: u64,
    /// What is usual of this engine: without it a hang would be known after minutes (V3).
    #[serde(deserialize_with = "whole_or_nothing")]
    pub learned: Learned,
    pub boot_id: String,
    /// The fence is known from the gate alone (see [`Memory::heed`]).
    #[serde(skip)]
    pub by_gate: bool,
}

/// What an agent of another version learned or saw may read otherwise: it is lost then, and never the fence or the grant beside it.
fn whole_or_nothing<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + DeserializeOwned,
{
    let written = serde_json::Value::deserialize(from)?;
    Ok(serde_json::from_value(written).unwrap_or_default())
}

impl Memory {
    fn path(agent_dir: &Path) -> PathBuf {
        agent_dir.join("detector.json")
    }

    /// What was left, if it is of this boot; of an earlier one only the incidents.
    pub fn recall(agent_dir: &Path) -> Self {
        let left: Self = read_json(&Self::path(agent_dir)).unwrap_or_default();
        let boot_id = boot_id();
        if left.boot_id == boot_id { left } else { Self { incidents: left.incidents, boot_id, ..Self::default() } }
    }

    /// The gate keeps what it was told before it refuses anybody, and this memory is written a moment later, by a thread. A fence of which
    /// the gate alone knows came in that moment, and whoever knew why has died.
    pub fn heed(mut self, gate: &Control) -> Self {
        // words that are written down: it was shut already, by a person or while its engine started
        if gate.fenced && !self.fenced && self.refusal.is_empty() {
            (self.fenced, self.fit, self.by_gate) = (true, false, true);
            self.refusal.clone_from(&gate.reason);
        }
        self
    }

    /// Was the fence there because of an episode of this engine? (One that starts is fenced too; that needs no proof to end.)
    pub fn fence_is_held(&self) -> bool {
        let restarting = EpisodeStage::Restarting.name();
        self.by_gate || self.fenced && self.incidents.open().is_some_and(|open| open.stage != restarting)
    }

    /// What refused clients are told until the new detector has a verdict: whose fence it is, else what they were told so far.
    pub fn words(&self, by_hand: Option<&str>) -> String {
        if by_hand.is_some() { refusal(&Verdict::Unknown, by_hand) } else { self.refusal.clone() }
    }

    /// A detector of the same process that knows what the one before it did.
    pub fn instruct(&self, detector: Detector) -> Detector {
        detector.with_pause(self.paused_ms).with_learned(self.learned.clone())
    }

    /// Was it about this process?
    pub fn is_about(&self, engine: Option<&EngineProcess>) -> bool {
        engine.is_some() && self.engine == engine.map(|engine| (engine.pid, engine.start_ticks))
    }
}

/// What a forerunner left, and what it told the gate last.
pub type Left = (Memory, Control);

/// Makes the agent's directory where it is not there, and reads in it what a forerunner left.
///
/// # Errors
/// When the directory cannot be made.
pub fn left_in(agent_dir: &Path) -> io::Result<Left> {
    std::fs::create_dir_all(agent_dir)?;
    Ok((Memory::recall(agent_dir), told_last(agent_dir)))
}

/// The same, waited for so long at most: on a disk that hangs nobody knows what was before, and what is now is judged all the same.
///
/// # Errors
/// As `read`.
pub async fn recalled(max: Duration, read: impl FnOnce() -> io::Result<Left> + Send + 'static) -> io::Result<Left> {
    let reading = tokio::task::spawn_blocking(read);
    match tokio::time::timeout(max, reading).await {
        Ok(read) => read.map_err(io::Error::other)?,
        Err(_) => {
            tracing::warn!("the disk does not tell what an earlier detector knew; this one begins anew");
            Ok((Memory { boot_id: boot_id(), ..Memory::default() }, Control::default()))
        }
    }
}

/// The engine that a detector of this boot followed last.
pub fn known_engine(agent_dir: &Path) -> Option<EngineProcess> {
    let (pid, start_ticks) = Memory::recall(agent_dir).engine?;
    Some(EngineProcess { pid, start_ticks })
}

/// What the detector knows now; with the boot it makes a [`Memory`].
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    pub engine: Option<(i32, u64)>,
    pub container: Option<&'a str>,
    pub fit: bool,
    pub proven: bool,
    pub fenced: bool,
    pub last_serving: bool,
    pub refusal: &'a str,
    pub incidents: &'a Incidents,
    pub left: Option<&'a End>,
    pub last_unattended_ms: Option<u64>,
    pub paused_ms: Option<u64>,
    pub drain_ended: u64,
}

impl Memory {
    fn holds(&self, now: &Known<'_>) -> bool {
        let Known { engine, fit, proven, fenced, last_serving, refusal, incidents, left, .. } = *now;
        let Known { container, last_unattended_ms, paused_ms, drain_ended, .. } = *now;
        (self.engine, self.fit, self.proven) == (engine, fit, proven)
            && (self.fenced, self.last_serving) == (fenced, last_serving)
            && (self.last_unattended_ms, self.drain_ended) == (last_unattended_ms, drain_ended)
            && (self.paused_ms, self.container.as_deref()) == (paused_ms, container)
            && self.refusal == refusal
            && self.incidents == *incidents
            && self.left.as_ref() == left
    }
}

/// Writes the memory when it changed, from a thread of its own.
#[derive(Debug)]
pub struct Keeper {
    written: Memory,
    /// When it was last asked what was learned.
    learned_ms: u64,
    file: KeptFile,
}

impl Keeper {
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(agent_dir: &Path, known: Memory) -> io::Result<Self> {
        Ok(Self { written: known, learned_ms: 0, file: KeptFile::start("memory", Memory::path(agent_dir))? })
    }

    /// Writes what is known unless it is what was written last. Most ticks end here without a copy, and without asking what was learned.
    pub fn keep(&mut self, now_ms: u64, now: &Known<'_>, learned: impl FnOnce() -> Learned) {
        // of another process nothing was learned yet, or that it is not warm
        let due = now.engine != self.written.engine || now_ms.saturating_sub(self.learned_ms) >= WRITTEN_EVERY_MS;
        let learned = due.then(learned).filter(|learned| *learned != self.written.learned);
        if due {
            self.learned_ms = now_ms;
        }
        if self.written.holds(now) && learned.is_none() && !self.file.wants_it_again() {
            return;
        }
        let learned = learned.unwrap_or_else(|| std::mem::take(&mut self.written.learned));
        let Known { engine, fit, proven, fenced, last_serving, refusal, incidents, left, .. } = *now;
        let Known { container, last_unattended_ms, paused_ms, drain_ended, .. } = *now;
        let (refusal, incidents, left) = (refusal.to_owned(), incidents.clone(), left.cloned());
        let boot_id = std::mem::take(&mut self.written.boot_id);
        self.written = Memory {
            engine,
            container: container.map(str::to_owned),
            fit,
            proven,
            fenced,
            last_serving,
            refusal,
            incidents,
            left,
            last_unattended_ms,
            paused_ms,
            drain_ended,
            learned,
            boot_id,
            by_gate: false,
        };
        if let Ok(text) = serde_json::to_vec(&self.written) {
            self.file.put(text);
        }
    }

    /// Waits until it is written, for `max` at most.
    pub async fn settled(&self, max: Duration) {
        if !self.written().settled(max).await {
            tracing::warn!("the detector's memory is late; were it to end now, its successor would know less");
        }
    }

    /// How far the writing is.
    pub fn written(&self) -> &Written {
        self.file.written()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_without_an_episode_is_not_held() {
        let mut memory = Memory { fenced: true, ..Memory::default() };
        assert!(!memory.fence_is_held());
        memory.incidents.begin("a-1-1", 1, "Livelock", "t");
        assert!(memory.fence_is_held());
        memory.fenced = false;
        assert!(!memory.fence_is_held());
    }

    #[test]
    fn a_fence_that_only_the_gate_knows_is_held_unless_it_was_shut_before() {
        let shut = Control { fenced: true, reason: "no progress".into(), ..Control::default() };
        let serving = Memory { fit: true, ..Memory::default() };
        let heeded = serving.clone().heed(&shut);
        assert!(heeded.fence_is_held() && !heeded.fit && heeded.refusal == "no progress");
        assert_eq!(serving.clone().heed(&Control::default()), serving);
        let by_hand = Memory { refusal: "fenced by ann".into(), ..serving };
        assert_eq!(by_hand.clone().heed(&shut), by_hand, "who shut it is known, and may have opened it since");
    }

    #[test]
    fn whoever_is_refused_is_told_why_also_by_a_new_detector() {
        let told = refusal(&Verdict::Dead, None);
        let memory = Memory { fenced: true, refusal: told.clone(), ..Memory::default() };
        assert_eq!(memory.words(None), told);
        let by_hand = memory.words(Some("fenced by ann: a look"));
        assert!(by_hand.contains("fenced by ann: a look"), "{by_hand}");
    }

    #[test]
    fn what_could_not_be_written_is_written_when_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let agent_dir = dir.path().join("not");
        let mut keeper = Keeper::start(&agent_dir, Memory { boot_id: boot_id(), ..Memory::default() }).unwrap();
        let (incidents, begun) = (Incidents::default(), std::time::Instant::now());
        let known = Known {
            engine: Some((1, 2)),
            container: Some("0::/../a"),
            fit: true,
            proven: true,
            fenced: false,
            last_serving: true,
            refusal: "",
            incidents: &incidents,
            left: None,
            last_unattended_ms: None,
            paused_ms: Some(7),
            drain_ended: 0,
        };
        let learned = || Learned { counters_live: true, ..Learned::default() };
        keeper.keep(1, &known, learned);
        while !keeper.file.wants_it_again() {
            assert!(begun.elapsed() < Duration::from_secs(20), "its folder is not there");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::fs::create_dir(&agent_dir).unwrap();
        while !std::fs::exists(Memory::path(&agent_dir)).unwrap() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it is never tried again");
            keeper.keep(2, &known, || panic!("a moment later nothing was learned"));
            std::thread::sleep(Duration::from_millis(5));
        }
        let recalled = Memory::recall(&agent_dir);
        assert_eq!((recalled.last_serving, recalled.paused_ms), (true, Some(7)), "and known to whoever comes after");
        assert_eq!(recalled.container.as_deref(), Some("0::/../a"));
        assert_eq!(recalled.learned, learned());
        let (mut later, later_ms) = (Learned { tokens_live: true, ..Learned::default() }, WRITTEN_EVERY_MS + 1);
        keeper.keep(later_ms, &known, || later.clone());
        let settles = async || keeper.settled(Duration::from_secs(20)).await;
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(settles());
        assert_eq!(Memory::recall(&agent_dir).learned, later, "what is usual is written each minute");
        later = Learned::default();
        keeper.keep(later_ms + 1, &Known { engine: Some((3, 4)), ..known }, || later.clone());
        assert_eq!(keeper.written.learned, later, "and at once of another process");
    }

    #[tokio::test]
    async fn d10_a_disk_that_hangs_costs_what_was_known_and_no_start() {
        let (free, held) = std::sync::mpsc::channel::<()>();
        let left = || Ok((Memory { fit: true, ..Memory::default() }, Control { fenced: true, ..Control::default() }));
        let hangs = move || {
            let _ = held.recv();
            left()
        };
        let begins = recalled(Duration::from_millis(5), hangs);
        let begins = tokio::time::timeout(Duration::from_secs(40), begins).await.expect("it is waited for");
        drop(free);
        assert_eq!(begins.unwrap(), (Memory { boot_id: boot_id(), ..Memory::default() }, Control::default()));
        assert_eq!(recalled(Duration::from_secs(40), left).await.unwrap(), left().unwrap());
    }

    #[test]
    fn what_is_kept_is_recalled_and_another_boot_keeps_the_incidents_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut memory = Memory { fit: true, engine: Some((1, 2)), boot_id: boot_id(), ..Memory::default() };
        memory.incidents.begin("a-1-1", 1, "Livelock", "t");
        crate::files::write_json(&Memory::path(dir.path()), &memory).unwrap();
        assert_eq!(Memory::recall(dir.path()), memory);
        let mut newer = serde_json::to_value(&memory).unwrap();
        newer["learned"] = serde_json::json!({"rhythm": {"decode_step_ms": "of another shape"}});
        newer["left"] = serde_json::json!({"engine": "of another shape"});
        crate::files::write_json(&Memory::path(dir.path()), &newer).unwrap();
        assert_eq!(Memory::recall(dir.path()), memory, "all but what was learned or left");
        memory.boot_id = "another".into();
        crate::files::write_json(&Memory::path(dir.path()), &memory).unwrap();
        let recalled = Memory::recall(dir.path());
        assert!(!recalled.fit && recalled.engine.is_none() && recalled.incidents == memory.incidents);
    }
}
