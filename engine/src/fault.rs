//! Faults on demand (E8): the hangs of the field, and NVRx's list, as switches of the production binary, so that what catches or
//! prevents them can be tested on the very engine that is shipped. Nothing here runs unless `--fault` asks for it.

use std::{str::FromStr, time::Duration};

use thiserror::Error;

pub use strike::{Faults, burn_for_ever};

mod strike;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// S0: the engine thread sleeps for ever in the middle of a step (state S).
    StepStall,
    /// S1: worker ranks find a larger program for each step, whose gather waits for rows that nobody sends.
    PaddedGraph,
    /// S2: the device finishes, and its event never says so: the waiting thread burns (state R, wchan 0).
    DeviceWait,
    /// S3: a worker rank sleeps for ever before it enters a step.
    RankHang,
    /// S4: the engine waits for ever before it is ready, without progress.
    StartupStall,
    /// S4: the first owner of the lease on what is prepared at start-up is killed (SIGKILL) when half of it is done.
    CompileKill,
    /// A rank is about to launch another step than the one that was agreed on (E3).
    PlanDrift,
    /// Steps turn, nothing is delivered.
    Livelock,
    /// The computation raises: a panic on the device's thread.
    Exception,
    /// The computation sleeps for ever.
    Sleep,
    /// The computation wants a lock that its holder never gives back.
    LockHeld,
    /// The process aborts (SIGABRT).
    Crash,
    /// The process dies of SIGSEGV.
    Segfault,
    /// The process stops itself (SIGSTOP).
    Sigstop,
}

/// Where in its life an engine asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Startup,
    /// The owner of the lease on start-up work, in the middle of it.
    Compile,
    /// The engine thread, at the beginning of a step.
    Step,
    Idle,
    /// The thread that computes.
    Device,
    /// The device's event.
    Event,
    /// A worker rank, before it enters a step.
    Rank,
    /// A worker rank's search for the program of a step.
    Program,
}

impl FaultKind {
    const NAMED: [(&'static str, Self); 15] = [
        ("step-stall", Self::StepStall),
        ("padded-graph", Self::PaddedGraph),
        ("device-wait", Self::DeviceWait),
        ("rank-hang", Self::RankHang),
        ("startup-stall", Self::StartupStall),
        ("compile-kill", Self::CompileKill),
        ("plan-drift", Self::PlanDrift),
        ("livelock", Self::Livelock),
        ("exception", Self::Exception),
        ("sleep", Self::Sleep),
        ("lock-held", Self::LockHeld),
        ("crash", Self::Crash),
        ("abort", Self::Crash),
        ("segfault", Self::Segfault),
        ("sigstop", Self::Sigstop),
    ];

    /// Where it strikes.
    pub fn place(self) -> Place {
        match self {
            Self::StartupStall => Place::Startup,
            Self::CompileKill => Place::Compile,
            Self::StepStall | Self::Livelock => Place::Step,
            Self::Exception | Self::Sleep | Self::LockHeld => Place::Device,
            Self::DeviceWait => Place::Event,
            Self::RankHang | Self::PlanDrift => Place::Rank,
            Self::PaddedGraph => Place::Program,
            // of the first rank also between steps; of any other before it enters one
            Self::Crash | Self::Segfault | Self::Sigstop => Place::Rank,
        }
    }

    /// Does it strike worker ranks alone?
    fn of_workers(self) -> bool {
        matches!(self, Self::PaddedGraph | Self::RankHang | Self::PlanDrift)
    }

    /// Does it strike what the first rank alone does: the loop, and requests that fail?
    fn of_leader(self) -> bool {
        matches!(self, Self::StepStall | Self::Livelock | Self::Exception)
    }

    /// Does it end or stop the whole process, so that it can strike anywhere?
    fn of_process(self) -> bool {
        matches!(self, Self::Crash | Self::Segfault | Self::Sigstop)
    }
}

/// When it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultAfter {
    AtOnce,
    /// So long after the engine was first ready.
    Ready(Duration),
    /// When so many steps are done.
    Steps(u64),
    /// When so many tokens were decoded, in however many steps: a share of a load, whatever its batches were.
    Tokens(u64),
    /// At the first step that decodes one token for each of exactly so many requests.
    Requests(usize),
    /// When SIGUSR2 arrives.
    SigUsr2,
}

/// One `--fault KIND[:RANK][@AFTER]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultSpec {
    pub kind: FaultKind,
    /// None: the first rank, or for a fault of workers all of those.
    pub rank: Option<usize>,
    pub after: FaultAfter,
}

impl FaultSpec {
    /// The lowest rank that it can strike.
    pub fn rank_min(&self) -> usize {
        self.rank.unwrap_or(usize::from(self.kind.of_workers()))
    }
}

/// Why a `--fault` was not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FaultParseError {
    #[error("unknown fault {0:?}; allowed: {names}", names = names())]
    Kind(String),
    #[error("unknown rank {0:?}; after : stands the number of a rank, from 0 on")]
    Rank(String),
    #[error(
        "unknown moment {0:?}; allowed after @: a time such as 500ms, 10s or 2m, steps such as 200steps, decoded tokens such as 700tokens, a decode step of so many requests such as 15reqs, or sigusr2"
    )]
    After(String),
    #[error("{0} happens before the engine is ready: it takes no @ moment")]
    StartupMoment(String),
    #[error("{kind} strikes worker ranks, which begin at 1, not rank {rank}")]
    NoWorker { kind: String, rank: usize },
    #[error("{kind} strikes rank 0 alone, which schedules for all, not rank {rank}")]
    NoLeader { kind: String, rank: usize },
}

fn names() -> String {
    FaultKind::NAMED.map(|(name, _)| name).join(", ")
}

impl FromStr for FaultSpec {
    type Err = FaultParseError;

    fn from_str(text: &str) -> Result<Self, FaultParseError> {
        let (what, after) = text.split_once('@').map_or((text, None), |(k, a)| (k, Some(a)));
        let (name, rank) = what.split_once(':').map_or((what, None), |(k, r)| (k, Some(r)));
        let kind = FaultKind::NAMED.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind);
        let kind = kind.ok_or_else(|| FaultParseError::Kind(name.into()))?;
        let number = |r: &str| r.parse().map_err(|_| FaultParseError::Rank(r.into()));
        let rank = rank.map(number).transpose()?;
        if let Some(rank) = rank.filter(|rank| *rank == 0 && kind.of_workers()) {
            return Err(FaultParseError::NoWorker { kind: name.into(), rank });
        }
        if let Some(rank) = rank.filter(|rank| *rank > 0 && kind.of_leader()) {
            return Err(FaultParseError::NoLeader { kind: name.into(), rank });
        }
        let after = after.map_or(Ok(FaultAfter::AtOnce), parse_after)?;
        if matches!(kind.place(), Place::Startup | Place::Compile) && after != FaultAfter::AtOnce {
            return Err(FaultParseError::StartupMoment(name.into()));
        }
        Ok(Self { kind, rank, after })
    }
}

fn parse_after(text: &str) -> Result<FaultAfter, FaultParseError> {
    if text == "sigusr2" {
        return Ok(FaultAfter::SigUsr2);
    }
    let wrong = || FaultParseError::After(text.into());
    if let Some(number) = text.strip_suffix("steps") {
        return number.parse().map(FaultAfter::Steps).map_err(|_| wrong());
    }
    if let Some(number) = text.strip_suffix("tokens") {
        return number.parse().map(FaultAfter::Tokens).map_err(|_| wrong());
    }
    if let Some(number) = text.strip_suffix("reqs") {
        return number.parse().map(FaultAfter::Requests).map_err(|_| wrong());
    }
    humantime::parse_duration(text).map(FaultAfter::Ready).map_err(|_| wrong())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_rank_and_moment_parses() {
        let parse = |s: &str| s.parse::<FaultSpec>().map(|f| (f.kind, f.rank, f.after));
        assert_eq!(parse("step-stall"), Ok((FaultKind::StepStall, None, FaultAfter::AtOnce)));
        let ten = FaultAfter::Ready(Duration::from_secs(10));
        assert_eq!(parse("device-wait@10s"), Ok((FaultKind::DeviceWait, None, ten)));
        assert_eq!(parse("livelock@200steps"), Ok((FaultKind::Livelock, None, FaultAfter::Steps(200))));
        assert_eq!(parse("livelock@700tokens"), Ok((FaultKind::Livelock, None, FaultAfter::Tokens(700))));
        assert_eq!(parse("abort@sigusr2"), Ok((FaultKind::Crash, None, FaultAfter::SigUsr2)));
        assert_eq!(parse("padded-graph@15reqs"), Ok((FaultKind::PaddedGraph, None, FaultAfter::Requests(15))));
        assert_eq!(parse("sigstop:3@2s").unwrap().1, Some(3));
        for (name, kind) in FaultKind::NAMED {
            assert_eq!(parse(name).unwrap().0, kind);
        }
    }

    #[test]
    fn errors_say_what_is_allowed() {
        let error = |s: &str| s.parse::<FaultSpec>().unwrap_err().to_string();
        assert!(error("nap").contains("allowed: step-stall"));
        for moment in ["soon", "10", "s", "xsteps", "-1s", "", "xreqs", "tokens"] {
            assert!(error(&format!("crash@{moment}")).contains("200steps"), "{moment}");
        }
        assert!(error("startup-stall@10s").contains("before the engine is ready"));
        assert!(error("crash:x").contains("number of a rank"));
        assert!(error("rank-hang:0").contains("begin at 1"));
        assert!(error("livelock:2@9steps").contains("rank 0 alone"));
    }
}
