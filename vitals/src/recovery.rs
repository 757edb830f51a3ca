//! The way from a verdict to a restart, as a pure state machine: what the agent may do, in which order, with whose keys.
//!
//! I1: a kill needs the confirmed verdict *and* a grant (the operator's, or the agent's own: at once in `truebeat run`, or after
//! `unattended_after_ms` and at most once a window). I6: evidence comes before destruction, but never delays it by more than its
//! bound. Effects are level-triggered: the agent may see one again until its input says that it is done.

use serde::{Deserialize, Serialize};

use crate::observation::Ms;
use crate::verdict::{Action, Outcome, StallClass, Verdict};

/// How far the agent may go.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Say, and save the evidence of a confirmed stall; fence and kill nothing.
    Observe,
    /// Fence and unfence.
    Fence,
    /// Fence, and restart with two keys.
    #[default]
    Recover,
}

/// What governs recovery. Times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecoveryPolicy {
    pub mode: Mode,
    /// Without an answer for this long the agent may grant itself; `None`: never.
    pub unattended_after_ms: Option<Ms>,
    /// At most one unattended grant in this window.
    pub unattended_window_ms: Ms,
    /// `truebeat run`: there is no operator, the agent grants itself as soon as the evidence is in.
    pub self_grant: bool,
    /// Evidence may hold up the kill for this long at most.
    pub evidence_ms_max: Ms,
}

impl Default for RecoveryPolicy {
    fn default() -> Self {
        Self {
            mode: Mode::Recover,
            unattended_after_ms: None,
            unattended_window_ms: 3_600_000,
            self_grant: false,
            evidence_ms_max: 22_000,
        }
    }
}

/// Stages, named as in the episode of the pod condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum EpisodeStage {
    Suspect,
    Stalled,
    Granted,
    Killed,
    Restarting,
    /// Ended: serving again after a restart.
    Recovered,
    /// Ended by itself.
    Cleared,
}

impl EpisodeStage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Suspect => "Suspect",
            Self::Stalled => "Stalled",
            Self::Granted => "Granted",
            Self::Killed => "Killed",
            Self::Restarting => "Restarting",
            Self::Recovered => "Recovered",
            Self::Cleared => "Cleared",
        }
    }

    pub fn closed(self) -> bool {
        matches!(self, Self::Recovered | Self::Cleared)
    }
}

/// Who turned the second key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GrantedBy {
    Operator,
    #[serde(rename = "self")]
    Itself,
}

/// What the agent is to do now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    /// Shut or open the gate and `/readyz`.
    Fence,
    Unfence,
    /// A new episode begins: give it an id.
    OpenEpisode,
    /// Start the evidence bundle (once; the agent answers with `evidence_done`).
    CaptureEvidence,
    /// Publish the episode as awaiting its grant.
    RequestGrant,
    /// SIGKILL the engine's process tree.
    Kill,
    /// The process outlives SIGKILL: tell the node.
    EscalateToNode,
    /// The episode ended; publish its last stage.
    CloseEpisode,
}

/// What the agent knows at this tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveryInput<'a> {
    pub outcome: &'a Outcome,
    /// The bundle of this episode is written, or given up (a full disk drops the bundle, never the recovery).
    pub evidence_done: bool,
    /// The operator's grant names this episode.
    pub granted: bool,
    /// When the operator is last known to have looked at this very episode and left it waiting (queued or refused): an operator that
    /// answers is not absent, so the unattended clock begins anew.
    pub operator_answered_ms: Option<Ms>,
    /// Changes when the engine is another process (pid and start time, hashed or counted); `None` while there is none.
    pub process: Option<u64>,
    /// The process whose kill was held back, of the last that was asked for: it was a guess, and may be no engine.
    pub spared: Option<u64>,
    /// The replica was asked to leave and owes nothing any more: that its engine ends then is no death.
    pub leaves: bool,
}

impl RecoveryInput<'_> {
    fn spares(&self, process: Option<u64>) -> bool {
        self.spared.is_some() && self.spared == process
    }
}

/// The answer of one tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecoveryOutput {
    /// The stage of the episode, open or just closed; `None`: there is none.
    pub stage: Option<EpisodeStage>,
    /// Its class by name, or `Dead`.
    pub class: Option<String>,
    pub granted_by: Option<GrantedBy>,
    pub effects: Vec<Effect>,
}

#[derive(Debug, Clone)]
struct Open {
    stage: EpisodeStage,
    class: String,
    /// The process that the episode is about.
    process: Option<u64>,
    confirmed_ms: Option<Ms>,
    granted_by: Option<GrantedBy>,
}

/// The class of an episode whose engine ended by itself.
const DEAD: &str = "Dead";

/// The state machine. One episode is open at a time.
#[derive(Debug, Clone)]
pub struct Recovery {
    policy: RecoveryPolicy,
    open: Option<Open>,
    now_ms: Ms,
    last_process: Option<u64>,
    unattended_ms: Option<Ms>,
}

impl Recovery {
    pub fn new(policy: RecoveryPolicy) -> Self {
        Self { policy, open: None, now_ms: 0, last_process: None, unattended_ms: None }
    }

    /// The agent was restarted: what it had written down (its last unattended grant) still counts.
    pub fn with_last_unattended(mut self, at_ms: Option<Ms>) -> Self {
        self.unattended_ms = at_ms;
        self
    }

    /// How far recovery goes.
    pub fn mode(&self) -> Mode {
        self.policy.mode
    }

    /// From now on it goes by this. `true`: that is something else than before.
    ///
    /// What is under way goes on as far as the new policy lets it: a fence that nobody wants any more is lifted, and a key that was
    /// turned and not used is turned back.
    pub fn set_policy(&mut self, policy: RecoveryPolicy) -> bool {
        let changed = self.policy != policy;
        self.policy = policy;
        changed
    }

    /// When the agent last granted itself unattended; to be kept over its own restarts.
    pub fn last_unattended_ms(&self) -> Option<Ms> {
        self.unattended_ms
    }

    /// One tick.
    pub fn step(&mut self, now_ms: Ms, input: &RecoveryInput<'_>) -> RecoveryOutput {
        self.now_ms = self.now_ms.max(now_ms);
        let mut effects = Vec::new();
        self.fence(input.outcome, &mut effects);
        if self.open.is_none() {
            self.open_episode(input, &mut effects);
        }
        if input.process.is_some() {
            self.last_process = input.process;
        }
        let Some(mut open) = self.open.take() else {
            return RecoveryOutput { stage: None, class: None, granted_by: None, effects };
        };
        self.advance(&mut open, input, &mut effects);
        if open.stage.closed() {
            effects.push(Effect::CloseEpisode);
        }
        let output = RecoveryOutput {
            stage: Some(open.stage),
            class: Some(open.class.clone()),
            granted_by: open.granted_by,
            effects,
        };
        self.open = Some(open).filter(|open| !open.stage.closed());
        output
    }

    fn fence(&self, outcome: &Outcome, effects: &mut Vec<Effect>) {
        let says = |action| outcome.actions.contains(&action);
        if says(Action::Fence) && self.policy.mode != Mode::Observe {
            effects.push(Effect::Fence);
        } else if says(Action::Fence) || says(Action::Unfence) {
            // who only observes lifts what an earlier policy has fenced
            effects.push(Effect::Unfence);
        }
    }

    fn open_episode(&mut self, input: &RecoveryInput<'_>, effects: &mut Vec<Effect>) {
        let (stage, class, process) = match &input.outcome.verdict {
            // it has not served: until it does nothing is asked for it
            Verdict::Suspect(class) | Verdict::Stalled(class)
                if input.spares(input.process) && *class == StallClass::StartupStalled =>
            {
                return;
            }
            Verdict::Suspect(class) => (EpisodeStage::Suspect, class.name(), input.process),
            Verdict::Stalled(class) => (EpisodeStage::Suspect, class.name(), input.process),
            Verdict::Dead if input.leaves => return,
            // it ended by itself: nothing is left to kill, and the next process is its successor
            Verdict::Dead => (EpisodeStage::Restarting, DEAD, input.process.or(self.last_process)),
            _ => return,
        };
        effects.push(Effect::OpenEpisode);
        self.open = Some(Open { stage, class: class.to_owned(), process, confirmed_ms: None, granted_by: None });
    }

    fn advance(&mut self, open: &mut Open, input: &RecoveryInput<'_>, effects: &mut Vec<Effect>) {
        if open.process.is_none() && open.stage < EpisodeStage::Restarting {
            // whoever opened the episode did not know the process yet
            open.process = input.process;
        }
        if open.stage == EpisodeStage::Killed && input.spares(open.process) {
            // nobody was killed: what the grant was for may be no engine, and whoever gave it has it back
            self.unattended_ms.take_if(|_| open.granted_by == Some(GrantedBy::Itself));
            open.stage = EpisodeStage::Cleared;
            return;
        }
        let killed = open.stage == EpisodeStage::Killed && input.process.is_none() && open.process.is_some();
        let gone = killed
            || matches!(input.outcome.verdict, Verdict::Dead)
            || (input.process.is_some() && input.process != open.process);
        if gone && open.stage == EpisodeStage::Suspect {
            died(open, input.leaves, effects);
        } else if gone && open.stage < EpisodeStage::Restarting {
            open.stage = EpisodeStage::Restarting;
        }
        if open.stage == EpisodeStage::Granted && self.policy.mode != Mode::Recover {
            (open.stage, open.granted_by) = (EpisodeStage::Stalled, None);
        }
        match open.stage {
            EpisodeStage::Suspect => self.suspect(open, input, effects),
            EpisodeStage::Stalled => self.stalled(open, input, effects),
            EpisodeStage::Granted | EpisodeStage::Killed => self.kill(open, input, effects),
            EpisodeStage::Restarting => restarting(open, input, effects),
            EpisodeStage::Recovered | EpisodeStage::Cleared => {}
        }
    }

    fn suspect(&mut self, open: &mut Open, input: &RecoveryInput<'_>, effects: &mut Vec<Effect>) {
        match &input.outcome.verdict {
            Verdict::Stalled(class) => {
                open.stage = EpisodeStage::Stalled;
                open.class = class.name().to_owned();
                open.confirmed_ms = Some(self.now_ms);
                self.stalled(open, input, effects);
            }
            Verdict::Suspect(_) | Verdict::Unknown => {}
            _ => open.stage = EpisodeStage::Cleared,
        }
    }

    fn stalled(&mut self, open: &mut Open, input: &RecoveryInput<'_>, effects: &mut Vec<Effect>) {
        match &input.outcome.verdict {
            Verdict::Stalled(StallClass::Unkillable) => return escalate(open, effects),
            Verdict::Stalled(_) => {}
            // blind is not healed: hold, and do nothing (I4)
            Verdict::Unknown => return,
            _ => {
                open.stage = EpisodeStage::Cleared;
                return;
            }
        }
        // whoever only observes restarts it by hand, and it is gone then as well (I6)
        if !input.evidence_done {
            effects.push(Effect::CaptureEvidence);
        }
        if self.policy.mode != Mode::Recover {
            return;
        }
        let waited = self.now_ms.saturating_sub(open.confirmed_ms.unwrap_or(self.now_ms));
        let evidence_over = input.evidence_done || waited >= self.policy.evidence_ms_max;
        open.granted_by = self.grant(input, waited, evidence_over);
        if open.granted_by.is_none() {
            effects.push(Effect::RequestGrant);
            return;
        }
        open.stage = EpisodeStage::Granted;
        // evidence first, but only within its bound (I6)
        if evidence_over {
            self.kill(open, input, effects);
        }
    }

    fn grant(&mut self, input: &RecoveryInput<'_>, waited: Ms, evidence_over: bool) -> Option<GrantedBy> {
        if input.granted {
            return Some(GrantedBy::Operator);
        }
        if self.policy.self_grant {
            return evidence_over.then_some(GrantedBy::Itself);
        }
        let alone = input.operator_answered_ms.map_or(waited, |at| waited.min(self.now_ms.saturating_sub(at)));
        let due = self.policy.unattended_after_ms.is_some_and(|after| alone >= after);
        let free =
            self.unattended_ms.is_none_or(|last| self.now_ms.saturating_sub(last) >= self.policy.unattended_window_ms);
        (due && free && evidence_over).then(|| {
            self.unattended_ms = Some(self.now_ms);
            GrantedBy::Itself
        })
    }

    /// Both keys are turned. The verdict must still stand: an engine that delivers again is not killed.
    fn kill(&mut self, open: &mut Open, input: &RecoveryInput<'_>, effects: &mut Vec<Effect>) {
        let waited = self.now_ms.saturating_sub(open.confirmed_ms.unwrap_or(self.now_ms));
        match &input.outcome.verdict {
            Verdict::Stalled(StallClass::Unkillable) => escalate(open, effects),
            Verdict::Stalled(_) if input.evidence_done || waited >= self.policy.evidence_ms_max => {
                open.stage = EpisodeStage::Killed;
                effects.push(Effect::Kill);
            }
            Verdict::Stalled(_) => effects.push(Effect::CaptureEvidence),
            Verdict::Unknown => {}
            _ if open.stage == EpisodeStage::Granted => open.stage = EpisodeStage::Cleared,
            // the kill is under way and the tree not gone yet
            _ => {}
        }
    }
}

/// It was only suspected, and ended by itself: that is a death and no stall, and its evidence is what it left (I6).
fn died(open: &mut Open, leaves: bool, effects: &mut Vec<Effect>) {
    if leaves {
        open.stage = EpisodeStage::Cleared;
        return;
    }
    DEAD.clone_into(&mut open.class);
    open.stage = EpisodeStage::Restarting;
    effects.push(Effect::CaptureEvidence);
}

/// Until a process serves again; a stall of the successor is an episode of its own, so this one must end first.
fn restarting(open: &mut Open, input: &RecoveryInput<'_>, effects: &mut Vec<Effect>) {
    match input.outcome.verdict {
        Verdict::Idle | Verdict::Progressing | Verdict::Slow | Verdict::Sleeping | Verdict::Draining => {
            open.stage = EpisodeStage::Recovered
        }
        Verdict::Suspect(_) | Verdict::Stalled(_) if input.process.is_some() && input.process != open.process => {
            open.stage = EpisodeStage::Recovered
        }
        Verdict::Stalled(StallClass::Unkillable) => escalate(open, effects),
        _ => {}
    }
}

/// It outlives its kill. The class says so from now on: by that word the operator learns that the place is bad and no restart is to come (I5).
fn escalate(open: &mut Open, effects: &mut Vec<Effect>) {
    StallClass::Unkillable.name().clone_into(&mut open.class);
    effects.push(Effect::EscalateToNode);
}
