//! Faults on demand (E8): the hangs of the field as switches of the production binary, so that what catches them can be
//! tested on the very engine that is shipped. Nothing here runs unless `--fault` asks for it.

use std::{
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use heartbeat::monotonic_ns;
use thiserror::Error;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// S0: the engine thread sleeps for ever in the middle of a step (state S).
    StepStall,
    /// S2: it spins for ever, as in a device wait that never ends (state R, wchan 0).
    DeviceWait,
    /// S4: it waits for ever before it is ready, without progress.
    StartupStall,
    /// Steps turn, nothing is delivered.
    Livelock,
    /// The process aborts (SIGABRT).
    Crash,
}

/// When it goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultAfter {
    AtOnce,
    /// So long after the engine was first ready.
    Ready(Duration),
    /// When so many steps are done.
    Steps(u64),
    /// When SIGUSR2 arrives.
    SigUsr2,
}

/// One `--fault KIND[@AFTER]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultSpec {
    pub kind: FaultKind,
    pub after: FaultAfter,
}

/// Why a `--fault` was not understood.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FaultParseError {
    #[error("unknown fault {0:?}; allowed: step-stall, device-wait, startup-stall, livelock, crash")]
    Kind(String),
    #[error(
        "unknown moment {0:?}; allowed after @: a time such as 500ms, 10s or 2m, steps such as 200steps, or sigusr2"
    )]
    After(String),
    #[error("startup-stall happens before the engine is ready: it takes no @ moment")]
    StartupMoment,
}

impl FromStr for FaultSpec {
    type Err = FaultParseError;

    fn from_str(text: &str) -> Result<Self, FaultParseError> {
        let (kind, after) = text.split_once('@').map_or((text, None), |(k, a)| (k, Some(a)));
        let kind = match kind {
            "step-stall" => FaultKind::StepStall,
            "device-wait" => FaultKind::DeviceWait,
            "startup-stall" => FaultKind::StartupStall,
            "livelock" => FaultKind::Livelock,
            "crash" => FaultKind::Crash,
            other => return Err(FaultParseError::Kind(other.into())),
        };
        let after = after.map_or(Ok(FaultAfter::AtOnce), parse_after)?;
        if kind == FaultKind::StartupStall && after != FaultAfter::AtOnce {
            return Err(FaultParseError::StartupMoment);
        }
        Ok(Self { kind, after })
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
    humantime::parse_duration(text).map(FaultAfter::Ready).map_err(|_| wrong())
}

/// Where in its life the engine thread asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Startup,
    Step,
    Idle,
}

/// The faults of one engine, held by its thread.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    specs: Vec<FaultSpec>,
    /// Set by the SIGUSR2 handler.
    pub signalled: Arc<AtomicBool>,
    ready_ns: u64,
}

impl Faults {
    pub fn new(specs: Vec<FaultSpec>) -> Self {
        Self { specs, ..Self::default() }
    }

    /// The engine is ready: times count from here.
    pub fn ready(&mut self) {
        self.ready_ns = monotonic_ns();
    }

    /// Does what is due here. Returns only if nothing is, or for a livelock: true means "discard this step's results".
    pub fn at(&self, place: Place, steps_done: u64) -> bool {
        let now = monotonic_ns();
        let Some(spec) = self.specs.iter().find(|s| self.due(s, place, steps_done, now)) else { return false };
        if spec.kind != FaultKind::Livelock {
            tracing::warn!(fault = ?spec.kind, steps_done, "injected fault fires");
        }
        match spec.kind {
            FaultKind::StepStall | FaultKind::StartupStall => sleep_for_ever(),
            FaultKind::DeviceWait => spin_for_ever(),
            FaultKind::Crash => std::process::abort(),
            FaultKind::Livelock => true,
        }
    }

    fn due(&self, spec: &FaultSpec, place: Place, steps_done: u64, now: u64) -> bool {
        let here = match spec.kind {
            FaultKind::StartupStall => place == Place::Startup,
            FaultKind::Crash => place != Place::Startup,
            FaultKind::StepStall | FaultKind::DeviceWait | FaultKind::Livelock => place == Place::Step,
        };
        here && match spec.after {
            FaultAfter::AtOnce => true,
            FaultAfter::Ready(d) => {
                now.saturating_sub(self.ready_ns) >= u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
            }
            FaultAfter::Steps(n) => steps_done >= n,
            FaultAfter::SigUsr2 => self.signalled.load(Ordering::Relaxed),
        }
    }
}

fn sleep_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn spin_for_ever() -> ! {
    loop {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_and_moment_parses() {
        let parse = |s: &str| s.parse::<FaultSpec>().map(|f| (f.kind, f.after));
        assert_eq!(parse("step-stall"), Ok((FaultKind::StepStall, FaultAfter::AtOnce)));
        assert_eq!(parse("device-wait@10s"), Ok((FaultKind::DeviceWait, FaultAfter::Ready(Duration::from_secs(10)))));
        assert_eq!(parse("livelock@200steps"), Ok((FaultKind::Livelock, FaultAfter::Steps(200))));
        assert_eq!(parse("crash@sigusr2"), Ok((FaultKind::Crash, FaultAfter::SigUsr2)));
        assert_eq!(parse("startup-stall"), Ok((FaultKind::StartupStall, FaultAfter::AtOnce)));
    }

    #[test]
    fn errors_say_what_is_allowed() {
        let error = |s: &str| s.parse::<FaultSpec>().unwrap_err().to_string();
        assert!(error("nap").contains("allowed: step-stall"));
        for moment in ["soon", "10", "s", "xsteps", "-1s", ""] {
            assert!(error(&format!("crash@{moment}")).contains("200steps"), "{moment}");
        }
        assert!(error("startup-stall@10s").contains("before the engine is ready"));
    }

    #[test]
    fn a_fault_fires_at_its_place_and_moment_only() {
        let faults = Faults::new(vec!["livelock@3steps".parse().unwrap()]);
        assert!(!faults.at(Place::Step, 2));
        assert!(!faults.at(Place::Idle, 9));
        assert!(faults.at(Place::Step, 3));
        let armed = Faults::new(vec!["livelock@sigusr2".parse().unwrap()]);
        assert!(!armed.at(Place::Step, 9));
        armed.signalled.store(true, Ordering::Relaxed);
        assert!(armed.at(Place::Step, 9));
    }
}
