//! What the agent does about a verdict: episodes begun, evidence taken, the kill. Each act runs in a task of its own and reports
//! back; the tick only starts it.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use vitals::observation::Observation;
use vitals::recovery::{Effect, RecoveryOutput};
use vitals::verdict::Outcome;

use super::WatchConfig;
use super::follow::lives;
use crate::forensics::{CaptureRequest, Captured, capture};
use crate::gate::ledger::GateReply;
use crate::incidents::{Incidents, id_base};
use crate::kill::{KillNote, kill_tree, write_termination_message};
use crate::metrics::Metrics;
use crate::sources::{EngineProcess, Sources, find_pod_engine};

/// The kill is repeated for a process that is still there.
const KILL_AGAIN_MS: u64 = 1_000;
/// The termination message must not hold the kill: the engine's file system may hang with it (I6).
const MESSAGE_MAX: Duration = Duration::from_millis(500);
/// Nor must the launcher's note: the agent's own disk may hang. Without it the launcher pauses before the next start, and no more.
const NOTE_MAX: Duration = Duration::from_millis(500);
/// Nor must a last look for a better one than a guess.
const SEARCH_MAX: Duration = Duration::from_millis(500);

/// What a task has done.
#[derive(Debug)]
enum News {
    Captured {
        episode: String,
        captured: Captured,
    },
    Killed {
        episode: String,
        lost: u64,
        pids: Vec<i32>,
        at: String,
    },
    /// No signal was sent to it.
    Spared {
        guess: EngineProcess,
    },
}

/// What a tick knows when it acts.
#[derive(Debug, Clone, Copy)]
pub struct Scene<'a> {
    pub now_ms: u64,
    pub outcome: &'a Outcome,
    /// What the verdict was made of.
    pub observation: Option<&'a Observation>,
    pub engine: Option<&'a EngineProcess>,
    pub in_flight: u64,
    pub config: &'a WatchConfig,
    pub command_line: &'a [String],
    /// Is the engine known by its age alone (in a pod)?
    pub is_guess: bool,
}

/// The acts under way and the book of what they did.
#[derive(Debug)]
pub struct Acts {
    pub incidents: Incidents,
    news: mpsc::UnboundedReceiver<News>,
    tell: mpsc::UnboundedSender<News>,
    /// The episode whose evidence is being taken.
    capturing: Option<String>,
    /// The summary of an episode's evidence, for the termination message.
    summary: Option<(String, String)>,
    killed: Option<Killed>,
    /// The gate's epoch and its count of refusals at the last look; refusals since the last tick.
    refused_seen: Option<(u64, u64)>,
    refused: u64,
}

#[derive(Debug)]
struct Killed {
    engine: EngineProcess,
    first_ms: u64,
    last_ms: u64,
    /// It was a guess that proved wrong the last time.
    spared: bool,
}

impl Acts {
    /// Goes on with a book.
    pub fn new(incidents: Incidents) -> Self {
        let (tell, news) = mpsc::unbounded_channel();
        Self { incidents, news, tell, capturing: None, summary: None, killed: None, refused_seen: None, refused: 0 }
    }

    /// Books what tasks have done since the last tick.
    pub fn take_news(&mut self, metrics: &Metrics) {
        while let Ok(news) = self.news.try_recv() {
            match news {
                News::Captured { episode, captured } => {
                    captured.notes.iter().for_each(|note| tracing::info!(note, "evidence"));
                    let bundle = captured.bundle.map(|path| path.display().to_string());
                    self.incidents.captured(&episode, bundle, &captured.fingerprint, &crate::files::wall_clock());
                    self.summary = Some((episode, captured.summary));
                    self.capturing = None;
                }
                News::Spared { guess } => {
                    self.killed
                        .iter_mut()
                        .filter(|killed| killed.engine == guess)
                        .for_each(|killed| killed.spared = true);
                }
                News::Killed { episode, pids, .. } if pids.is_empty() => {
                    tracing::warn!(episode, "nothing was left to kill, or nothing could be signalled");
                }
                News::Killed { episode, lost, pids, at } => {
                    tracing::warn!(episode, ?pids, "the engine's process tree was killed");
                    metrics.kills.inc();
                    self.incidents.killed(&episode, lost, &at);
                }
            }
        }
    }

    /// When SIGKILL was first sent to this process.
    pub fn kill_sent_ms(&self, engine: &EngineProcess) -> Option<u64> {
        self.killed.as_ref().filter(|killed| killed.engine == *engine && !killed.spared).map(|killed| killed.first_ms)
    }

    /// Adds up refusals; a gate that started anew counts from zero.
    pub fn count_refused(&mut self, reply: &GateReply) {
        let now = (reply.obs.epoch, reply.requests_refused);
        let before = self.refused_seen.replace(now).unwrap_or(now);
        let base = if before.0 == now.0 { before.1 } else { 0 };
        self.refused += now.1.saturating_sub(base);
    }

    /// Refusals since the last call.
    pub fn take_refused(&mut self) -> u64 {
        std::mem::take(&mut self.refused)
    }

    /// Begins an episode where the state machine says so.
    pub fn begin_if_asked(
        &mut self,
        now_ms: u64,
        now: &str,
        recovery: &RecoveryOutput,
        subject: (Option<&EngineProcess>, &str),
        metrics: &Metrics,
    ) {
        if !recovery.effects.contains(&Effect::OpenEpisode) {
            return;
        }
        let (engine, instance) = subject;
        let class = recovery.class.as_deref().unwrap_or("Unknown");
        let (pid, ticks) = engine.map_or((0, 0), |engine| (engine.pid, engine.start_ticks));
        self.incidents.begin(&id_base(instance, pid, ticks), now_ms, class, now);
        metrics.episodes.with_label_values(&[class]).inc();
    }

    /// Starts what is wanted and not yet under way.
    pub fn obey(&mut self, recovery: &RecoveryOutput, scene: &Scene<'_>, sources: &mut Sources) {
        for effect in &recovery.effects {
            match effect {
                Effect::CaptureEvidence => self.capture(scene, sources),
                // An engine that died by itself leaves what it left; nothing waits for it.
                Effect::OpenEpisode if recovery.class.as_deref() == Some("Dead") => self.capture(scene, sources),
                Effect::Kill => self.kill(scene),
                Effect::EscalateToNode => self.escalate(scene),
                // The fence is the tick's own affair, the rest is in the book and in what is published of it.
                Effect::Fence | Effect::Unfence | Effect::OpenEpisode | Effect::RequestGrant | Effect::CloseEpisode => {
                }
            }
        }
    }

    fn capture(&mut self, scene: &Scene<'_>, sources: &mut Sources) {
        let Some(episode) = self.incidents.open().filter(|open| open.evidence_at.is_none()).cloned() else { return };
        if self.capturing.as_ref() == Some(&episode.id) {
            return;
        }
        self.capturing = Some(episode.id.clone());
        let request = CaptureRequest {
            outcome: scene.outcome.clone(),
            engine: scene.engine.filter(|engine| lives(engine)).cloned(),
            steps: sources.page_steps(),
            metrics_before: sources.last_metrics_text(),
            metrics_path: sources.metrics_path(),
            engine_url: scene.config.sources.engine_url.clone(),
            log_tail: sources.log_tail(),
            gpu_note: sources.gpu_note(),
            observation: scene.observation.cloned(),
            page_dir: scene.config.sources.page_dir.clone(),
            bundle_dir: scene.config.bundle_dir.clone(),
            command_line: scene.command_line.to_vec(),
            episode: episode.clone(),
        };
        let tell = self.tell.clone();
        // on a thread of its own: redacting a long log must not hold the ticks of a runtime that has but one
        let runtime = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || {
            let captured = runtime.block_on(capture(request));
            let _ = tell.send(News::Captured { episode: episode.id, captured });
        });
    }

    /// I1: the state machine asks only with both keys turned; the book must say so too.
    fn kill(&mut self, scene: &Scene<'_>) {
        let Some(engine) = scene.engine.filter(|engine| lives(engine)) else { return };
        let Some(episode) = self.incidents.open().filter(|open| open.granted_at.is_some()) else { return };
        let before = self.killed.as_ref().filter(|killed| killed.engine == *engine);
        if before.is_some_and(|killed| scene.now_ms.saturating_sub(killed.last_ms) < KILL_AGAIN_MS) {
            return;
        }
        let first_ms = before.filter(|killed| !killed.spared).map_or(scene.now_ms, |killed| killed.first_ms);
        let job = Job {
            engine: engine.clone(),
            episode: episode.id.clone(),
            lost: scene.in_flight,
            summary: self.summary.clone().filter(|(id, _)| *id == episode.id).map(|(_, text)| text),
            doubt: scene.is_guess.then(|| scene.config.sources.page_dir.clone()),
        };
        self.killed = Some(Killed { engine: engine.clone(), first_ms, last_ms: scene.now_ms, spared: false });
        let agent_dir = scene.config.agent_dir.clone();
        let message_path = (!scene.config.standalone).then(|| scene.config.termination_message_path.clone());
        tokio::spawn(execute(job, agent_dir, message_path, self.tell.clone()));
    }

    fn escalate(&self, scene: &Scene<'_>) {
        // The declaration says `Unkillable`: whoever can drain the node reads it there (I5).
        let pid = scene.engine.map(|engine| engine.pid);
        tracing::error!(pid, "the engine outlives SIGKILL: only its node can end it");
    }
}

#[derive(Debug)]
struct Job {
    engine: EngineProcess,
    episode: String,
    lost: u64,
    summary: Option<String>,
    /// The engine is a guess: it is spared where another process names this page directory.
    doubt: Option<PathBuf>,
}

async fn execute(job: Job, agent_dir: PathBuf, message_path: Option<PathBuf>, tell: mpsc::UnboundedSender<News>) {
    if let Some(page_dir) = job.doubt {
        // An engine that hangs may not be searchable; then there is nothing to better the guess.
        let search = tokio::task::spawn_blocking(move || find_pod_engine(&page_dir));
        let found = tokio::time::timeout(SEARCH_MAX, search).await.ok().and_then(Result::ok).flatten();
        if let Some(found) = found.filter(|found| found.named && found.process != job.engine) {
            tracing::error!(guess = ?job.engine, engine = ?found.process, "the guess was not the engine; it is spared");
            let _ = tell.send(News::Spared { guess: job.engine });
            return;
        }
    }
    if let (Some(path), Some(summary)) = (message_path, job.summary) {
        let engine = job.engine.clone();
        let write = tokio::task::spawn_blocking(move || write_termination_message(&engine, &path, &summary));
        match tokio::time::timeout(MESSAGE_MAX, write).await {
            Ok(Ok(Ok(()))) => {}
            failed => tracing::warn!(?failed, "the termination message was not written"),
        }
    }
    let note = KillNote { pid: job.engine.pid, start_ticks: job.engine.start_ticks, episode: job.episode.clone() };
    let write = tokio::task::spawn_blocking(move || crate::files::write_json(&KillNote::path(&agent_dir), &note));
    match tokio::time::timeout(NOTE_MAX, write).await {
        Ok(Ok(Ok(()))) => {}
        failed => tracing::warn!(
            ?failed,
            "the launcher is not told that this end was granted; it will pause before the next start"
        ),
    }
    let killed = tokio::task::spawn_blocking(move || kill_tree(&job.engine));
    let pids = killed.await.unwrap_or_default();
    let _ = tell.send(News::Killed { episode: job.episode, lost: job.lost, pids, at: crate::files::wall_clock() });
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::unix::process::ExitStatusExt;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn whoever_was_spared_has_outlived_no_kill() {
        let mut acts = Acts::new(Incidents::default());
        let guess = EngineProcess { pid: 7, start_ticks: 1 };
        acts.killed = Some(Killed { engine: guess.clone(), first_ms: 5, last_ms: 5, spared: false });
        assert_eq!(acts.kill_sent_ms(&guess), Some(5));
        acts.tell.send(News::Spared { guess: guess.clone() }).unwrap();
        acts.take_news(&Metrics::new().unwrap());
        assert_eq!(acts.kill_sent_ms(&guess), None, "it would be called unkillable");
    }

    #[tokio::test]
    async fn d10_a_note_that_cannot_be_written_holds_no_kill() {
        let dir = tempfile::tempdir().unwrap();
        // whoever opens it to write waits until somebody reads, as on a disk that hangs
        let hangs = KillNote::path(dir.path()).with_extension("tmp");
        nix::unistd::mkfifo(&hangs, Mode::S_IRWXU).unwrap();
        let mut child = tokio::process::Command::new("sleep").arg("600").kill_on_drop(true).spawn().unwrap();
        let engine = EngineProcess::of(child.id().unwrap().cast_signed()).unwrap();
        let (pid, (tell, mut told)) = (engine.pid, mpsc::unbounded_channel());
        let job = Job { engine, episode: "a".to_owned(), lost: 0, summary: None, doubt: None };
        let executed = tokio::time::timeout(SOON, execute(job, dir.path().to_owned(), None, tell)).await;
        // lets the writer go, whatever came of it: the runtime waits for it at its end
        let reader = std::fs::File::open(&hangs);
        executed.expect("the kill waits for a note");
        assert_eq!(child.wait().await.unwrap().signal(), Some(9));
        let News::Killed { pids, .. } = told.recv().await.unwrap() else { panic!("another word") };
        assert_eq!(pids, [pid]);
        drop(reader);
    }
}
