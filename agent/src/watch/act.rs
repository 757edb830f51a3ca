//! What the agent does about a verdict: episodes begun, evidence taken, the kill. Each act runs in a task of its own and reports
//! back; the tick only starts it.

use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::sync::mpsc;
use vitals::observation::Observation;
use vitals::recovery::{Effect, RecoveryOutput};
use vitals::verdict::{Outcome, StallClass};

use super::WatchConfig;
use super::follow::Program;
use super::killed::Killed;
use crate::forensics::{CaptureRequest, Captured, capture};
use crate::gate::ledger::GateReply;
use crate::incidents::{Incidents, id_base};
use crate::kill::{KillNote, kill_members, reachable, send_to, summary_of_book, write_termination_message};
use crate::metrics::Metrics;
use crate::shared_memory::SharedMemory;
use crate::sources::{EngineProcess, Found, Sources, find_pod_engine};

/// The termination message must not hold the kill: the engine's file system may hang with it (I6).
const MESSAGE_MAX: Duration = Duration::from_millis(500);
/// Nor must the launcher's note: the agent's own disk may hang. Without it the launcher pauses before the next start, and no more.
const NOTE_MAX: Duration = Duration::from_millis(500);
/// Nor must a last look for a better one than a guess.
const SEARCH_MAX: Duration = Duration::from_millis(500);

/// What a task has done.
#[derive(Debug)]
enum News {
    /// A kill loses nothing any more. Without a bundle either none could be written, or a slow disk may take it yet.
    Captured { episode: String, captured: Captured },
    /// What a slow disk made of the bundle of such evidence.
    Written { episode: String, captured: Captured },
    Killed {
        episode: String,
        lost: u64,
        engine: EngineProcess,
        /// All that were the engine's.
        members: Vec<EngineProcess>,
        /// Whom the signal reached.
        pids: Vec<i32>,
        at: String,
    },
    /// No signal was sent to it, or none could be.
    Spared { guess: EngineProcess },
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
    pub program: Program<'a>,
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
    pub killed: Killed,
    /// The engine that was said to outlive its SIGKILL.
    outlives: Option<EngineProcess>,
    /// The gate's epoch and its count of refusals at the last look; refusals since the last tick.
    refused_seen: Option<(u64, u64)>,
    refused: u64,
}

impl Acts {
    /// Goes on with a book, and with what is known of an engine's end.
    pub fn new(incidents: Incidents, killed: Killed) -> Self {
        let (tell, news) = mpsc::unbounded_channel();
        Self {
            incidents,
            news,
            tell,
            capturing: None,
            summary: None,
            killed,
            outlives: None,
            refused_seen: None,
            refused: 0,
        }
    }

    /// Books what tasks have done since the last tick.
    pub fn take_news(&mut self, metrics: &Metrics) {
        while let Ok(news) = self.news.try_recv() {
            match news {
                News::Captured { episode, captured } => {
                    log_notes(&captured);
                    let bundle = captured.bundle.map(|path| path.display().to_string());
                    self.incidents.captured(&episode, bundle, &captured.fingerprint, &crate::files::wall_clock());
                    // a slow disk's word of an episode before may come while another's evidence is taken
                    self.capturing.take_if(|capturing| *capturing == episode);
                    self.summary = Some((episode, captured.summary));
                }
                News::Written { episode, captured } => {
                    log_notes(&captured);
                    if let Some(path) = captured.bundle {
                        self.incidents.written(&episode, path.display().to_string());
                    }
                    if self.summary.as_ref().is_some_and(|(id, _)| *id == episode) {
                        self.summary = Some((episode, captured.summary));
                    }
                }
                News::Spared { guess } => self.killed.was_spared(&guess),
                News::Killed { episode, lost, engine, members, pids, at } => {
                    self.killed.reached(&engine, members);
                    if pids.is_empty() {
                        // one that may not be signalled is as good as one that outlives its signal: only its node ends it
                        tracing::warn!(episode, "nothing was left to kill, or nothing could be signalled");
                        continue;
                    }
                    tracing::warn!(episode, ?pids, "the engine's process tree was killed");
                    if self.incidents.killed(&episode, lost, &at) {
                        metrics.kills.inc();
                    }
                }
            }
        }
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
            // what lives where one has died is its successor
            engine: scene.engine.filter(|engine| episode.class != "Dead" && engine.lives()).cloned(),
            steps: sources.page_steps(),
            metrics_before: sources.last_metrics_text(),
            metrics_path: sources.metrics_path(),
            ras_before: sources.last_ras_answer(),
            ras_address: scene.config.sources.ras_address.clone(),
            engine_url: scene.config.sources.engine_url.clone(),
            log_tail: sources.log_tail(),
            gpu_note: sources.gpu_note(),
            observation: scene.observation.cloned(),
            page_dir: scene.config.sources.page_dir.clone(),
            bundle_dir: scene.config.bundle_dir.clone(),
            command_line: scene.program.command_line.to_vec(),
            image: scene.program.image.to_owned(),
            episode: episode.clone(),
        };
        let tell = self.tell.clone();
        // on a thread of its own: redacting a long log must not hold the ticks of a runtime that has but one
        let runtime = tokio::runtime::Handle::current();
        tokio::task::spawn_blocking(move || {
            let (early, id, mut told) = (tell.clone(), episode.id.clone(), false);
            let taking = capture(request, |captured| {
                told = early.send(News::Captured { episode: id, captured }).is_ok();
            });
            // where nobody is left to hear of it the runtime ends, and with it the clock of whoever still waits by it
            let captured = runtime.block_on(async {
                tokio::select! {
                    biased;
                    () = tell.closed() => None,
                    captured = taking => Some(captured),
                }
            });
            let Some(captured) = captured else { return };
            let episode = episode.id;
            let news = if told { News::Written { episode, captured } } else { News::Captured { episode, captured } };
            let _ = tell.send(news);
        });
    }

    /// I1: the state machine asks only with both keys turned; the book must say so too.
    fn kill(&mut self, scene: &Scene<'_>) {
        let Some(engine) = scene.engine.filter(|engine| engine.lives()) else { return };
        let Some(episode) = self.incidents.open().filter(|open| open.granted_at.is_some()) else { return };
        if !self.killed.is_due(engine, scene.now_ms) {
            return;
        }
        let taken = self.summary.clone().filter(|(id, _)| *id == episode.id).map(|(_, text)| text);
        let job = Job {
            engine: engine.clone(),
            episode: episode.id.clone(),
            lost: scene.in_flight,
            summary: taken.unwrap_or_else(|| summary_of_book(episode)),
            doubt: scene.is_guess.then(|| scene.config.sources.page_dir.clone()),
            never_served: scene.outcome.verdict.class() == Some(&StallClass::StartupStalled),
            reachable,
        };
        self.killed.begins(engine, scene.now_ms);
        let agent_dir = scene.config.agent_dir.clone();
        let message_path = (!scene.config.standalone).then(|| scene.config.termination_message_path.clone());
        tokio::spawn(execute(job, agent_dir, message_path, self.tell.clone()));
    }

    /// What an engine that died by itself has left is ended with it, if it is still there. No key is turned for that (I1): nothing serves any more.
    pub fn end_remains(&mut self, now_ms: u64) {
        let remains = self.killed.remains_due(now_ms);
        if !remains.is_empty() {
            let pids = send_to(&remains, Signal::SIGKILL);
            tracing::warn!(?pids, "the engine has ended and left processes behind; they are ended too");
        }
    }

    /// The declaration says `Unkillable`: whoever can drain the node reads it there (I5). The log has it once.
    fn escalate(&mut self, scene: &Scene<'_>) {
        if self.outlives.as_ref() != scene.engine {
            let pid = scene.engine.map(|engine| engine.pid);
            let others = self.killed.others();
            tracing::error!(pid, ?others, "the engine outlives SIGKILL: only its node can end it");
            self.outlives = scene.engine.cloned();
        }
    }
}

#[derive(Debug)]
struct Job {
    engine: EngineProcess,
    episode: String,
    lost: u64,
    summary: String,
    /// The engine is a guess: it is spared where another process names this page directory.
    doubt: Option<PathBuf>,
    /// It was never seen to serve: that it is the engine rests on its age alone.
    never_served: bool,
    /// Who belongs to a process, and whom of them a signal would reach.
    reachable: fn(&EngineProcess) -> (Vec<EngineProcess>, Vec<i32>),
}

impl Job {
    /// Is the guess wrong, by what a last search has found? Another process names the page directory; or nobody does, this one for
    /// sure, and it was never seen to serve: a sidecar, while the engine's image is on its way.
    fn is_no_engine(&self, found: &Found) -> bool {
        let another = found.named && found.process != self.engine;
        another || (self.never_served && !found.named && !found.hides && found.process == self.engine)
    }

    /// It is another user's, whom this agent may signal as little as look at, and rests on its age alone: a sidecar perhaps. That a process
    /// of which nobody knows that it is the engine cannot be ended is no reason to give a node up (I5).
    ///
    /// Asked before anything is written or sent: the note of a kill that was spared would tell whoever reads it later of an engine that
    /// outlived its SIGKILL.
    async fn is_out_of_reach(&self) -> bool {
        if self.doubt.is_none() || !self.never_served {
            return false;
        }
        let (engine, reachable) = (self.engine.clone(), self.reachable);
        let (members, reached) = tokio::task::spawn_blocking(move || reachable(&engine)).await.unwrap_or_default();
        reached.is_empty() && !members.is_empty()
    }

    /// Is there a better one than the guess, or none at all?
    async fn is_spared(&self) -> bool {
        let Some(page_dir) = self.doubt.clone() else { return false };
        // An engine that hangs may not be searchable; then there is nothing to better the guess.
        let search = tokio::task::spawn_blocking(move || find_pod_engine(&page_dir, None));
        let found = tokio::time::timeout(SEARCH_MAX, search).await.ok().and_then(Result::ok).flatten();
        if let Some(found) = found.filter(|found| self.is_no_engine(found)) {
            let engine = found.named.then_some(found.process);
            tracing::error!(guess = ?self.engine, ?engine, "the guess was not the engine; it is spared");
            return true;
        }
        let is_out_of_reach = self.is_out_of_reach().await;
        if is_out_of_reach {
            tracing::error!(guess = ?self.engine, "the oldest process of the pod has not served, and is another user's: if it is the engine, it and the agent must run as one user");
        }
        is_out_of_reach
    }
}

async fn execute(mut job: Job, agent_dir: PathBuf, message_path: Option<PathBuf>, tell: mpsc::UnboundedSender<News>) {
    if job.is_spared().await {
        let _ = tell.send(News::Spared { guess: job.engine });
        return;
    }
    if let Some(path) = message_path {
        let (engine, summary) = (job.engine.clone(), std::mem::take(&mut job.summary));
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
    let engine = job.engine.clone();
    let kill = tokio::task::spawn_blocking(move || (SharedMemory::of(&engine), kill_members(&engine)));
    let (memory, (members, pids)) = kill.await.unwrap_or_default();
    if let Some(memory) = memory {
        tokio::spawn(memory.remove_after(members.clone()));
    }
    let (episode, lost, engine, at) = (job.episode, job.lost, job.engine, crate::files::wall_clock());
    let _ = tell.send(News::Killed { episode, lost, engine, members, pids, at });
}

/// What cost the bundle is said to whoever looks for it; the rest is for whoever asks.
fn log_notes(captured: &Captured) {
    for note in &captured.notes {
        let is_lost = note.starts_with("no bundle");
        if is_lost { tracing::warn!(note, "evidence") } else { tracing::info!(note, "evidence") }
    }
}

#[cfg(test)]
#[path = "act_tests.rs"]
mod tests;
