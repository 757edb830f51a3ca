//! What a detector is started with, and why it cannot start.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crds::inference_deployment::RecoveryMode;
use crds::recovery_note::RecoveryNote;
use vitals::policy::Policy;
use vitals::recovery::RecoveryPolicy;

use crate::options::Mode;
use crate::report::PodIdentity;
use crate::sources::SourcesConfig;

/// What a detector needs.
#[derive(Debug)]
pub struct WatchConfig {
    pub sources: SourcesConfig,
    pub agent_dir: PathBuf,
    pub bundle_dir: PathBuf,
    pub policy: Policy,
    pub mode: Mode,
    pub unattended_after: Option<Duration>,
    pub unattended_window: Duration,
    pub termination_message_path: PathBuf,
    /// The pod to declare on; `None` outside Kubernetes.
    pub pod: Option<PodIdentity>,
    /// Where the pod's annotations are files; `None` outside Kubernetes.
    pub notes_dir: Option<PathBuf>,
    /// For how long requests that were in flight at two stalls are refused (I7); `None`: they are not.
    pub refuse_poison_for: Option<Duration>,
    /// The gate's address, through which first tokens are asked for before the replica is ready; `None`: none are.
    pub prove_through: Option<http::Uri>,
    /// `truebeat run`.
    pub standalone: bool,
}

/// Why a detector cannot start.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("--policy {entry:?} cannot be used: {why}")]
    Policy { entry: String, why: String },
    #[error("could not make the agent's directory {path}: {source}; choose a writable one with --agent-dir")]
    Directory { path: PathBuf, source: io::Error },
    #[error("the detector's ticks ended, its message is in the log above: {0}")]
    Ticks(tokio::task::JoinError),
    #[error("could not start a thread: {0}")]
    Thread(io::Error),
    #[error("could not make a timer: {0}")]
    Timer(io::Error),
    #[error("the agent's own metrics are wrong: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl WatchConfig {
    /// Who we are, for ids of episodes: the pod, else the host.
    pub fn instance(&self) -> String {
        let pod = self.pod.as_ref().map(|pod| pod.uid.clone().unwrap_or_else(|| pod.name.clone()));
        pod.unwrap_or_else(|| {
            std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
        })
    }

    /// What governs recovery until a note says otherwise.
    pub fn recovery_policy(&self) -> RecoveryPolicy {
        RecoveryPolicy {
            mode: match self.mode {
                Mode::Observe => vitals::recovery::Mode::Observe,
                Mode::Fence => vitals::recovery::Mode::Fence,
                Mode::Recover => vitals::recovery::Mode::Recover,
            },
            unattended_after_ms: unattended(self.unattended_after.map(milliseconds)),
            unattended_window_ms: milliseconds(self.unattended_window).max(WINDOW_MS_MIN),
            self_grant: self.standalone,
            ..RecoveryPolicy::default()
        }
    }

    /// The same with what a note says.
    pub fn policy_told(&self, told: Option<&Told>) -> RecoveryPolicy {
        let policy = self.recovery_policy();
        match told {
            Some(told) => told.over(policy),
            None => policy,
        }
    }
}

/// What an operator says is read once a second, and it is busy or elected anew for seconds: whoever takes that for absence restarts all replicas
/// at once, whatever the budget (I1, I2).
const UNATTENDED_MS_MIN: u64 = 10_000;
const WINDOW_MS_MIN: u64 = 60_000;

/// What a note makes of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    mode: vitals::recovery::Mode,
    unattended_after_ms: Option<u64>,
    unattended_window_ms: Option<u64>,
}

impl Told {
    /// What the operator's note says; `None`: there is none. What of it cannot be read is as the agent was started, but for the mode.
    pub fn read(text: &str) -> Option<Self> {
        let mode = RecoveryNote::mode(text)?;
        let note = RecoveryNote::read(text);
        let duration = |text: &String| humantime::parse_duration(text).ok().map(milliseconds);
        Some(Self {
            mode: match mode {
                RecoveryMode::Observe => vitals::recovery::Mode::Observe,
                RecoveryMode::Fence => vitals::recovery::Mode::Fence,
                RecoveryMode::Recover => vitals::recovery::Mode::Recover,
            },
            unattended_after_ms: note.as_ref().and_then(|note| duration(&note.unattended_after)),
            unattended_window_ms: note.as_ref().and_then(|note| duration(&note.unattended_window)),
        })
    }

    /// `policy` with what was told.
    pub fn over(self, policy: RecoveryPolicy) -> RecoveryPolicy {
        RecoveryPolicy {
            mode: self.mode,
            unattended_after_ms: unattended(self.unattended_after_ms.or(policy.unattended_after_ms)),
            unattended_window_ms: self.unattended_window_ms.unwrap_or(policy.unattended_window_ms).max(WINDOW_MS_MIN),
            ..policy
        }
    }
}

/// Never where it is 0, as all other times that end nothing then; else after long enough that an operator which is there was heard.
fn unattended(after_ms: Option<u64>) -> Option<u64> {
    after_ms.filter(|after_ms| *after_ms > 0).map(|after_ms| after_ms.max(UNATTENDED_MS_MIN))
}

/// As the detector counts.
pub fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_goes_over_what_it_was_started_with() {
        let started_with = RecoveryPolicy { evidence_ms_max: 7, ..RecoveryPolicy::default() };
        let told = Told::read(r#"{"mode":"Fence","unattendedAfter":"90s","unattendedWindow":"7m"}"#).unwrap();
        let wanted = RecoveryPolicy {
            mode: vitals::recovery::Mode::Fence,
            unattended_after_ms: Some(90_000),
            unattended_window_ms: 420_000,
            self_grant: false,
            evidence_ms_max: 7,
        };
        assert_eq!(told.over(started_with.clone()), wanted);
        assert_eq!(Told::read(""), None);
        // what of another version's cannot be read is as it was, and no mode is ever guessed to be one that destroys more
        let recovers = RecoveryPolicy { mode: vitals::recovery::Mode::Recover, ..started_with };
        let over = |text: &str| Told::read(text).unwrap().over(recovers.clone());
        let soon = over(r#"{"mode":"Fence","unattendedAfter":"soon","unattendedWindow":"7m"}"#);
        let fences =
            RecoveryPolicy { mode: vitals::recovery::Mode::Fence, unattended_window_ms: 420_000, ..recovers.clone() };
        assert_eq!(soon, fences);
        let observes = RecoveryPolicy { mode: vitals::recovery::Mode::Observe, ..recovers.clone() };
        assert_eq!([over("Fence"), over(r#"{"mode":"Migrate"}"#)], [observes.clone(), observes]);
    }

    #[test]
    fn no_time_is_never_and_little_time_is_enough_for_an_operator_to_be_heard() {
        let over = |after: &str| {
            let text = format!(r#"{{"mode":"Recover","unattendedAfter":"{after}","unattendedWindow":"0s"}}"#);
            let policy = RecoveryPolicy { unattended_after_ms: Some(90_000), ..RecoveryPolicy::default() };
            let policy = Told::read(&text).unwrap().over(policy);
            (policy.unattended_after_ms, policy.unattended_window_ms)
        };
        assert_eq!(["0s", "1s", "11s"].map(over), [(None, 60_000), (Some(10_000), 60_000), (Some(11_000), 60_000)]);
    }
}
