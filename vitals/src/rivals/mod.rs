//! Everybody else's rule for "this engine hangs", beside ours (V8), so that one command prints latency and false alarms of all of
//! them on the same histories.
//!
//! Pure: time and observation in, alarm out. Each rule is written anew from the file that its doc names, with that file's numbers,
//! and has a test that proves it faithful. Three liberties are taken, all in favour of the rival and said where they are taken: a
//! watchdog inside the engine is given the truth of the page where there is one (its own counters); it is given to be running
//! although the process that it lives in may be stopped; and a rule that was made for another engine is run on every engine.

mod accrual;
pub mod corpus;
mod counters;
mod dynamo;
mod inside;
pub mod judge;
mod kubelet;
mod nvrx;
mod ours;
pub mod score;
mod sglang;
mod trtllm;
mod vllm;
pub mod watch;

use crate::observation::{Ms, Observation};

pub use self::ours::{OUR_NAME, Ours, SWEEP, scaled, swept};

/// What a rule says at one moment. Level-triggered: it is repeated while it holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Alarm {
    /// Nothing is wrong as far as this rule can see.
    #[default]
    Quiet,
    /// Something is wrong: a warning, or the replica leaves traffic. Undone by itself.
    Suspect,
    /// The engine is to be destroyed and started anew.
    Evict,
}

impl Alarm {
    /// The word of V1 for it. A rule that knows nothing but "healthy" and "not" says `Progressing` when it is quiet.
    pub fn verdict(self) -> &'static str {
        match self {
            Self::Quiet => "Progressing",
            Self::Suspect => "Suspect",
            Self::Evict => "Stalled",
        }
    }
}

/// The worst that a rule ever does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acts {
    /// Writes a line, and nobody acts.
    Warns,
    /// Takes the replica out of traffic.
    Fences,
    /// Kills, or has the engine killed.
    Evicts,
}

impl Acts {
    pub fn name(self) -> &'static str {
        match self {
            Self::Warns => "warns",
            Self::Fences => "fences",
            Self::Evicts => "evicts",
        }
    }
}

/// One rule with its state.
pub trait Rule: std::fmt::Debug {
    /// Lower case, words joined by hyphens: what `--rules` takes.
    fn name(&self) -> &'static str;
    /// One line for people: the numbers, and where they come from.
    fn about(&self) -> &'static str;
    fn acts(&self) -> Acts;
    /// Sees one more observation. `now_ms` never goes back.
    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm;
}

/// Every rival with its defaults, in the order of tables.
pub fn all() -> Vec<Box<dyn Rule>> {
    vec![
        Box::new(vllm::ExecuteTimeout::default()),
        Box::new(vllm::ShmWarning::default()),
        Box::new(sglang::Watchdog::default()),
        Box::new(sglang::HealthGenerate::default()),
        Box::new(trtllm::HangDetector::default()),
        Box::new(dynamo::Canary::default()),
        Box::new(dynamo::Liveness::default()),
        Box::new(kubelet::Liveness::default()),
        Box::new(counters::Gonka::default()),
        Box::new(counters::RunningNoRate::default()),
        Box::new(accrual::PhiAccrual::default()),
        Box::new(nvrx::Heartbeat::default()),
        Box::new(nvrx::InProcess::default()),
    ]
}

/// The rival of this name, with its defaults.
pub fn by_name(name: &str) -> Option<Box<dyn Rule>> {
    all().into_iter().find(|rule| rule.name() == name)
}

#[cfg(test)]
mod tests;
