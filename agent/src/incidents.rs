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
        self.list.truncate(KEPT_MAX);
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
        if let Some(class) = &moment.recovery.class {
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

    /// The evidence of an episode is in, or given up.
    pub fn captured(&mut self, id: &str, bundle: Option<String>, fingerprint: &str, now: &str) {
        // what was taken first is the evidence: what comes later has seen a killed engine
        if let Some(episode) = self.list.iter_mut().find(|episode| episode.id == id && episode.evidence_at.is_none()) {
            episode.evidence_at = Some(now.to_owned());
            episode.bundle = bundle;
            episode.fingerprint = Some(fingerprint.to_owned()).filter(|text| !text.is_empty());
        }
    }

    /// SIGKILL was sent to the engine's tree; `lost` requests were in flight. Only the first kill counts.
    pub fn killed(&mut self, id: &str, lost: u64, now: &str) {
        if let Some(episode) = self.list.iter_mut().find(|episode| episode.id == id && episode.killed_at.is_none()) {
            episode.killed_at = Some(now.to_owned());
            episode.requests_lost = lost;
        }
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
        let killed = episode.killed_at.is_some() || episode.stage == EpisodeStage::Restarting.name();
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
mod tests {
    use super::*;
    use vitals::verdict::Reason;

    fn outcome(verdict: Verdict) -> Outcome {
        Outcome { verdict, ..Outcome::default() }
    }

    fn output(stage: Option<EpisodeStage>, granted_by: Option<GrantedBy>) -> RecoveryOutput {
        RecoveryOutput { stage, class: Some("Livelock".into()), granted_by, effects: vec![] }
    }

    #[test]
    fn an_engine_that_outlives_its_kill_is_known_by_the_class_of_its_episode() {
        let class = StallClass::Unkillable.name().to_owned();
        assert!(Episode { class, ..Episode::default() }.unkillable(), "the operator reads no other word");
    }

    fn while_fenced<'a>(recovery: &'a RecoveryOutput, outcome: &'a Outcome, shut: bool) -> Moment<'a> {
        Moment { now: "t", recovery, outcome, shut, fenced: true, refused: 0 }
    }

    fn tick(book: &mut Incidents, now: &str, stage: Option<EpisodeStage>, verdict: Verdict) {
        let by = stage.filter(|stage| *stage >= EpisodeStage::Granted).map(|_| GrantedBy::Itself);
        let (recovery, outcome) = (output(stage, by), outcome(verdict));
        let shut = outcome.verdict.class().is_some();
        book.tick(&Moment { now, recovery: &recovery, outcome: &outcome, shut, fenced: shut, refused: 1 });
    }

    #[test]
    fn an_episode_gets_each_time_once() {
        let mut book = Incidents::default();
        let stall = || Verdict::Stalled(StallClass::Livelock);
        book.begin("host-7-9", 1, "Livelock", "t0");
        tick(&mut book, "t1", Some(EpisodeStage::Suspect), Verdict::Suspect(StallClass::Livelock));
        tick(&mut book, "t2", Some(EpisodeStage::Stalled), stall());
        tick(&mut book, "t3", Some(EpisodeStage::Stalled), stall());
        book.captured("host-7-9-1", Some("/b".into()), "f", "t4");
        tick(&mut book, "t5", Some(EpisodeStage::Killed), stall());
        book.killed("host-7-9-1", 3, "t5");
        book.killed("host-7-9-1", 0, "t6");
        tick(&mut book, "t7", Some(EpisodeStage::Restarting), Verdict::Starting);
        tick(&mut book, "t8", Some(EpisodeStage::Recovered), Verdict::Idle);
        let e = &book.list()[0];
        let times =
            [&e.suspect_at, &e.fenced_at, &e.confirmed_at, &e.evidence_at, &e.granted_at, &e.killed_at, &e.serving_at];
        assert_eq!(times.map(|at| at.as_deref().unwrap()), ["t0", "t1", "t2", "t4", "t5", "t5", "t8"]);
        assert_eq!((e.requests_lost, e.requests_refused, e.granted_by.as_deref()), (3, 6, Some("self")));
        assert!(e.closed() && book.open().is_none());
    }

    #[test]
    fn the_reasons_kept_are_those_of_the_last_moment_before_the_kill() {
        let mut book = Incidents::default();
        let say = |book: &mut Incidents, stage, verdict, text: &str| {
            let reasons = vec![Reason { source: "page".to_owned(), text: text.to_owned() }];
            let (recovery, outcome) = (output(Some(stage), None), Outcome { reasons, ..outcome(verdict) });
            book.tick(&while_fenced(&recovery, &outcome, true));
        };
        let stall = || Verdict::Stalled(StallClass::StepStalled);
        book.begin("host-7-9", 1, "StepStalled", "t0");
        say(&mut book, EpisodeStage::Suspect, Verdict::Suspect(StallClass::StepStalled), "step 9 for 400 ms");
        say(&mut book, EpisodeStage::Stalled, stall(), "step 9 for 2400 ms");
        say(&mut book, EpisodeStage::Killed, stall(), "step 9 for 2600 ms");
        book.killed("host-7-9-1", 0, "t1");
        say(&mut book, EpisodeStage::Killed, stall(), "step 9 for 2700 ms");
        say(&mut book, EpisodeStage::Restarting, Verdict::Dead, "the engine's process is gone");
        assert_eq!(book.list()[0].reasons, ["step 9 for 2600 ms"]);
        say(&mut book, EpisodeStage::Recovered, Verdict::Suspect(StallClass::Livelock), "the successor's");
        assert_eq!(book.list()[0].reasons, ["step 9 for 2600 ms"]);

        book.begin("host-8-9", 2, "Dead", "t2");
        say(&mut book, EpisodeStage::Restarting, Verdict::Dead, "the engine's process is gone");
        assert_eq!(book.list()[0].reasons, ["the engine's process is gone"], "nothing else explains an exit");
    }

    #[test]
    fn fault_f1_an_episode_names_each_xid_once_and_by_the_best_name_it_has() {
        use vitals::xid::{Pci, Xid as Seen};
        let mut book = Incidents::default();
        let pci = Pci::parse("0000:44:00");
        let seen =
            |code, uuid: Option<&str>, remedy| Seen { code, uuid: uuid.map(str::to_owned), pci, remedy, at_ms: 0 };
        book.on_xids(&[seen(79, None, Some(Remedy::RestartNode))]);
        assert!(book.list().is_empty(), "a Xid alone is no episode (V4)");
        book.begin("host-7-9", 1, "Dead", "t0");
        let told = |book: &Incidents| {
            let xids = book.list()[0].xids.iter();
            xids.map(|xid| (xid.code, xid.gpu.clone(), xid.remedy)).collect::<Vec<_>>()
        };
        book.on_xids(&[seen(79, None, Some(Remedy::RestartNode))]);
        assert_eq!(told(&book), [(79, "0000:44:00".to_owned(), XidRemedy::RestartNode)]);
        book.on_xids(&[seen(79, Some("GPU-1"), Some(Remedy::RestartNode)), seen(200, Some("GPU-1"), None)]);
        book.on_xids(&[]);
        let gpu = || "GPU-1".to_owned();
        assert_eq!(told(&book), [(79, gpu(), XidRemedy::RestartNode), (200, gpu(), XidRemedy::Unknown)]);
        let many: Vec<Seen> = (300..400).map(|code| seen(code, Some("GPU-2"), None)).collect();
        book.on_xids(&many);
        assert_eq!(told(&book).len(), XIDS_MAX);
    }

    #[test]
    fn fault_f1_what_is_asked_for_has_one_name_on_both_sides_of_the_report() {
        let all = [
            Remedy::Nothing,
            Remedy::RestartApplication,
            Remedy::ResetGpu,
            Remedy::RestartNode,
            Remedy::ContactSupport,
        ];
        for told in all {
            assert_eq!(remedy(Some(told)).words(), told.words());
            assert_eq!(remedy(Some(told)).outlasts_a_restart(), told.outlasts_a_restart());
        }
    }

    #[test]
    fn fault_f1_a_death_is_explained_by_what_is_heard_a_moment_after_it() {
        let mut book = Incidents::default();
        let say = |book: &mut Incidents, texts: &[&str]| {
            let reasons =
                texts.iter().map(|text| Reason { source: "gpu".to_owned(), text: (*text).to_owned() }).collect();
            let recovery =
                RecoveryOutput { class: Some("Dead".into()), ..output(Some(EpisodeStage::Restarting), None) };
            let outcome = Outcome { reasons, ..outcome(Verdict::Dead) };
            book.tick(&while_fenced(&recovery, &outcome, true));
        };
        book.begin("host-7-9", 1, "Dead", "t0");
        say(&mut book, &["gone"]);
        say(&mut book, &["gone", "Xid 79"]);
        say(&mut book, &["gone"]);
        assert_eq!(book.list()[0].reasons, ["gone", "Xid 79"]);
    }

    #[test]
    fn a_restarted_detector_goes_on_with_the_open_episode_of_the_same_process() {
        let mut book = Incidents::default();
        book.begin("host-7-9", 1, "Livelock", "t0");
        book.begin("host-7-9", 2, "Livelock", "t1");
        assert_eq!(book.list().len(), 1);
        book.begin("host-8-9", 3, "Livelock", "t2");
        assert_eq!(book.list().iter().map(|e| e.stage.as_str()).collect::<Vec<_>>(), ["Suspect", "Recovered"]);
    }

    #[test]
    fn a_left_over_episode_ends_when_the_engine_serves() {
        let mut book = Incidents::default();
        book.begin("host-7-9", 1, "Livelock", "t0");
        tick(&mut book, "t1", None, Verdict::Unknown);
        assert!(book.open().is_some());
        // its fence is held, and the gate was silent for a moment
        book.tick(&while_fenced(&output(None, None), &outcome(Verdict::Progressing), false));
        assert!(book.open().is_some());
        tick(&mut book, "t2", None, Verdict::Progressing);
        assert_eq!(book.list()[0].stage, "Cleared");
    }

    #[test]
    fn an_id_holds_only_what_the_api_takes() {
        let id = id_base(&"Pod_Ä/x".repeat(40), i32::MAX, u64::MAX);
        assert!(id.len() + 21 <= ID_CHARS_MAX, "{id}");
        assert!(id.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.' || c == '-'), "{id}");
    }
}
