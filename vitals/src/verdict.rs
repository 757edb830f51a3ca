//! What the detector says: verdict, reasons that a person can read, and what it wants done (V1, V7).

use serde::{Deserialize, Serialize};

use crate::observation::Ms;

/// V1. `Suspect` means fenced and reversible; `Stalled` means confirmed: evidence is taken and a restart is wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    Starting,
    Idle,
    Progressing,
    Suspect(StallClass),
    Stalled(StallClass),
    Slow,
    Sleeping,
    Draining,
    Dead,
    Unknown,
}

/// The classes of V1.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StallClass {
    StepStalled,
    RankSilent { ranks: Vec<u32> },
    DeviceWait,
    StartupStalled,
    AdmissionStalled,
    DecodeStalled,
    Livelock,
    FrontendStalled,
    Unkillable,
    ProcessDied,
}

impl Verdict {
    /// The verdict's name as `/verdict`, conditions, metrics and traces write it (`Suspect`, `Stalled`, …).
    pub fn name(&self) -> &'static str {
        match self {
            Self::Starting => "Starting",
            Self::Idle => "Idle",
            Self::Progressing => "Progressing",
            Self::Suspect(_) => "Suspect",
            Self::Stalled(_) => "Stalled",
            Self::Slow => "Slow",
            Self::Sleeping => "Sleeping",
            Self::Draining => "Draining",
            Self::Dead => "Dead",
            Self::Unknown => "Unknown",
        }
    }

    /// The stall class, where there is one.
    pub fn class(&self) -> Option<&StallClass> {
        match self {
            Self::Suspect(class) | Self::Stalled(class) => Some(class),
            _ => None,
        }
    }
}

impl StallClass {
    /// What [`StallClass::name`] may be.
    pub const NAMES: [&'static str; 10] = [
        "StepStalled",
        "RankSilent",
        "DeviceWait",
        "StartupStalled",
        "AdmissionStalled",
        "DecodeStalled",
        "Livelock",
        "FrontendStalled",
        "Unkillable",
        "ProcessDied",
    ];

    /// The class's name without its ranks: one of [`StallClass::NAMES`].
    pub fn name(&self) -> &'static str {
        match self {
            Self::StepStalled => "StepStalled",
            Self::RankSilent { .. } => "RankSilent",
            Self::DeviceWait => "DeviceWait",
            Self::StartupStalled => "StartupStalled",
            Self::AdmissionStalled => "AdmissionStalled",
            Self::DecodeStalled => "DecodeStalled",
            Self::Livelock => "Livelock",
            Self::FrontendStalled => "FrontendStalled",
            Self::Unkillable => "Unkillable",
            Self::ProcessDied => "ProcessDied",
        }
    }
}

/// What the detector wants done; the agent executes. Each is level-triggered: it is repeated while it is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Action {
    /// Shut the gate, `/readyz` 503: reversible.
    Fence,
    /// Open the gate again.
    Unfence,
    /// Save the evidence (once an episode; before any kill, I6).
    CaptureEvidence,
    /// A restart is wanted; the agent needs the second key to do it (I1).
    WantRestart,
    /// The process outlives SIGKILL: tell the node (I5).
    EscalateToNode,
}

/// One sentence of the explanation, with the signal that it rests on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// `gate`, `page`, `metrics`, `proc`, `log`, `gpu`, `frontend`, `policy`.
    pub source: String,
    /// E.g. `5 requests owed (gate) and no byte for 412 ms; this phase allows 300 ms`.
    pub text: String,
}

/// The answer of one tick.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    pub verdict: Verdict,
    /// Since when the verdict has been this one.
    pub since_ms: Ms,
    pub reasons: Vec<Reason>,
    pub actions: Vec<Action>,
    /// Call again no later than this.
    pub check_again_in_ms: Ms,
    /// Is the replica fenced by this verdict?
    pub fenced: bool,
    /// `Stalled`, while the engine's own `/health` answers 200: whoever believes it sends clients into a hang (G6).
    #[serde(default)]
    pub health_lies: bool,
}

impl Default for Outcome {
    /// What is known before the first tick: nothing.
    fn default() -> Self {
        let verdict = Verdict::Unknown;
        Self {
            verdict,
            since_ms: 0,
            reasons: Vec::new(),
            actions: Vec::new(),
            check_again_in_ms: 100,
            fenced: false,
            health_lies: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StallClass::{self, *};

    #[test]
    fn every_class_has_a_name_of_the_list() {
        let silent = RankSilent { ranks: vec![1] };
        let steps = [StepStalled, silent, DeviceWait].map(|class| class.name());
        let others =
            [StartupStalled, AdmissionStalled, DecodeStalled, Livelock, FrontendStalled, Unkillable, ProcessDied];
        assert_eq!([steps.as_slice(), others.map(|class| class.name()).as_slice()].concat(), StallClass::NAMES);
    }
}
