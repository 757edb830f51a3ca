//! The book of episodes: what happened when, newest first. Pure: times come as RFC 3339 text.
//!
//! The state machine of `vitals::recovery` says which stage an episode is in; this file writes down when it got there.

use crds::episode::Episode;
use crds::poison::InFlight;
use crds::xid::{XIDS_MAX, Xid, XidRemedy};
use serde::{Deserialize, Serialize};
use vitals::recovery::{EpisodeStage, GrantedBy, RecoveryOutput};
use vitals::verdict::{Outcome, StallClass, Verdict};
use vitals::xid::Remedy;

/// Episodes that are kept.
const KEPT_MAX: usize = 50;
/// Reasons of one episode that are kept.
const REASONS_MAX: usize = 8;
const ID_CHARS_MAX: usize = 128;

/// All episodes that this replica remembers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incidents {
    /// Newest first.
    list: Vec<Episode>,
}

/// What one tick adds to the open episode.
#[derive(Debug, Clone, Copy)]
pub struct Moment<'a> {
    pub now: &'a str,
    pub recovery: &'a RecoveryOutput,
    pub outcome: &'a Outcome,
    /// The gate said that it is shut.
    pub shut: bool,
    /// It shall be, for the engine's sake; a gate that is silent for a moment is no other.
    pub fenced: bool,
    /// Requests refused since the last tick.
    pub refused: u64,
}

impl Incidents {
    /// Newest first.
    pub fn list(&self) -> &[Episode] {
        &self.list
    }

    /// The episode that is not closed, if there is one. Only the newest can be.
    pub fn open(&self) -> Option<&Episode> {
        self.list.first().filter(|episode| !episode.closed())
    }

    /// Begins an episode, or goes on with the open one of the same engine process (this detector was restarted meanwhile).
    pub fn begin(&mut self, id_base: &str, number: u64, class: &str, now: &str) {
        if self.open().is_some_and(|open| open.id.starts_with(&format!("{id_base}-"))) {
            return;
        }
        // An episode of another process that nobody could close: its engine was replaced.
        if let Some(left) = self.open_mut() {
            left.stage = EpisodeStage::Recovered.name().to_owned();
        }
        let episode = Episode {
            id: format!("{id_base}-{number}"),
            class: class.to_owned(),
            stage: EpisodeStage::Suspect.name().to_owned(),
            suspect_at: Some(now.to_owned()),
            ..Episode::default()
        };
        self.list.insert(0, episode);
        self.forget();
    }

    /// What goes first is what was only a suspicion: by the stalls a request is known that stalls engines (I7).
    fn forget(&mut self) {
        while self.list.len() > KEPT_MAX {
            let oldest = self.list.iter().rposition(|episode| episode.closed() && !episode.is_stall());
            self.list.remove(oldest.unwrap_or(KEPT_MAX));
        }
    }

    /// Takes one tick's news.
    pub fn tick(&mut self, moment: &Moment<'_>) {
        let Some(stage) = moment.recovery.stage else {
            self.close_left_over(moment);
            return;
        };
        let Some(episode) = self.open_mut() else { return };
        let mark = |at: &mut Option<String>| _ = at.get_or_insert_with(|| moment.now.to_owned());
        episode.requests_refused += moment.refused;
        stage.name().clone_into(&mut episode.stage);
        // a detector that begins anew after the kill sees a dead engine alone: what hung is in the book
        let is_known = episode.killed_at.is_some();
        if let Some(class) = moment.recovery.class.as_ref().filter(|class| !(is_known && *class == "Dead")) {
            episode.class.clone_from(class);
        }
        if explains(episode, stage, moment.outcome) {
            episode.reasons =
                moment.outcome.reasons.iter().take(REASONS_MAX).map(|reason| reason.text.clone()).collect();
        }
        if moment.shut {
            mark(&mut episode.fenced_at);
        }
        if matches!(stage, EpisodeStage::Stalled | EpisodeStage::Granted | EpisodeStage::Killed) {
            mark(&mut episode.confirmed_at);
        }
        if let Some(by) = moment.recovery.granted_by {
            mark(&mut episode.granted_at);
            episode.granted_by = Some(if by == GrantedBy::Operator { "operator" } else { "self" }.to_owned());
        }
        if stage == EpisodeStage::Recovered {
            mark(&mut episode.serving_at);
        }
    }

    /// The evidence of an episode is in, or given up; without `bundle` it is gathered, and no file lies on the disk (yet).
    pub fn captured(&mut self, id: &str, bundle: Option<String>, fingerprint: &str, now: &str) {
        // what was taken first is the evidence: what comes later has seen a killed engine
        if let Some(episode) = self.list.iter_mut().find(|episode| episode.id == id && episode.evidence_at.is_none()) {
            episode.evidence_at = Some(now.to_owned());
            episode.bundle = bundle;
            episode.fingerprint = Some(fingerprint.to_owned()).filter(|text| !text.is_empty());
        }
    }

    /// A slow disk has taken the bundle whose evidence was gathered before.
    pub fn written(&mut self, id: &str, bundle: String) {
        if let Some(episode) = self.list.iter_mut().find(|episode| episode.id == id && episode.evidence_at.is_some()) {
            episode.bundle.get_or_insert(bundle);
        }
    }

    /// SIGKILL was sent to the engine's tree; `lost` requests were in flight. Only the first kill counts; false: it was not that.
    pub fn killed(&mut self, id: &str, lost: u64, now: &str) -> bool {
        let first = self.list.iter_mut().find(|episode| episode.id == id && episode.killed_at.is_none());
        let Some(episode) = first else { return false };
        episode.killed_at = Some(now.to_owned());
        episode.requests_lost = lost;
        true
    }

    /// Which requests were in flight when the open episode began (I7).
    pub fn suspects(&mut self, in_flight: Vec<InFlight>) {
        if let Some(episode) = self.open_mut() {
            episode.in_flight = in_flight;
        }
    }

    /// Which GPUs the open episode is about.
    pub fn on_gpus(&mut self, uuids: impl Iterator<Item = String>) {
        if let Some(episode) = self.open_mut().filter(|episode| episode.gpu_uuids.is_empty()) {
            episode.gpu_uuids = uuids.collect();
        }
    }

    /// Which Xids may have to do with the open episode. What was told once stays; nothing that a restart brings unsays it.
    pub fn on_xids(&mut self, xids: &[vitals::xid::Xid]) {
        let Some(episode) = self.open_mut().filter(|_| !xids.is_empty()) else { return };
        for xid in xids {
            let (code, pci) = (i32::try_from(xid.code).unwrap_or_default(), xid.pci.map(|pci| pci.to_string()));
            let gpu = xid.uuid.clone().or_else(|| pci.clone()).unwrap_or_default();
            let same = |known: &Xid| {
                let named = known.gpu.is_empty() || known.gpu == gpu || pci.as_deref() == Some(known.gpu.as_str());
                known.code == code && named
            };
            let told = Xid { code, gpu: gpu.clone(), remedy: remedy(xid.remedy) };
            match episode.xids.iter().position(same) {
                Some(at) => episode.xids[at] = told,
                None if episode.xids.len() < XIDS_MAX => episode.xids.push(told),
                None => {}
            }
        }
    }

    fn open_mut(&mut self) -> Option<&mut Episode> {
        self.list.first_mut().filter(|episode| !episode.closed())
    }

    /// The state machine of a restarted detector knows nothing of an episode that the book still has open: it ends when the
    /// engine serves.
    fn close_left_over(&mut self, moment: &Moment<'_>) {
        let serves = matches!(moment.outcome.verdict, Verdict::Idle | Verdict::Progressing | Verdict::Slow);
        let Some(episode) = self.open_mut().filter(|_| serves && !moment.fenced) else { return };
        // whoever had the kill in hand and did not live to say so
        let begun = [EpisodeStage::Killed, EpisodeStage::Restarting].iter().any(|stage| episode.stage == stage.name());
        let killed = episode.killed_at.is_some() || begun;
        let stage = if killed { EpisodeStage::Recovered } else { EpisodeStage::Cleared };
        stage.name().clone_into(&mut episode.stage);
        if killed {
            episode.serving_at.get_or_insert_with(|| moment.now.to_owned());
        }
    }
}

/// Do the words of this tick explain the episode? Those of the last moment before the kill do; that a killed process is gone, or what
/// its successor does, does not. A process that outlives its SIGKILL is news all the same.
fn explains(episode: &Episode, stage: EpisodeStage, outcome: &Outcome) -> bool {
    let before_kill = episode.killed_at.is_none() && stage <= EpisodeStage::Killed;
    match outcome.verdict {
        Verdict::Stalled(StallClass::Unkillable) => true,
        Verdict::Suspect(_) | Verdict::Stalled(_) => before_kill,
        // what a death came with may be heard a moment after it
        Verdict::Dead => {
            let more = episode.reasons.len() < outcome.reasons.len().min(REASONS_MAX);
            episode.reasons.is_empty() || (episode.class == "Dead" && more)
        }
        _ => false,
    }
}

fn remedy(remedy: Option<Remedy>) -> XidRemedy {
    match remedy {
        Some(Remedy::Nothing) => XidRemedy::Nothing,
        Some(Remedy::RestartApplication) => XidRemedy::RestartApplication,
        Some(Remedy::ResetGpu) => XidRemedy::ResetGpu,
        Some(Remedy::RestartNode) => XidRemedy::RestartNode,
        Some(Remedy::ContactSupport) => XidRemedy::ContactSupport,
        None => XidRemedy::Unknown,
    }
}

/// The part of an id that names the engine process: `[a-z0-9.-]`, short enough that a number still fits behind it.
pub fn id_base(instance: &str, pid: i32, start_ticks: u64) -> String {
    let tail = format!("-{pid}-{start_ticks}");
    let room = ID_CHARS_MAX - 24 - tail.len();
    let name = instance.to_ascii_lowercase();
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).take(room).collect();
    format!("{name}{tail}")
}

#[cfg(test)]
#[path = "incidents_tests.rs"]
mod tests;
