//! NVIDIA Resiliency Extension's two. Both were made for training, where there is no idleness: here their clocks stand while the
//! engine has no work.

use super::inside::{Inside, Poll, StepAge};
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// Rank heartbeats (fault_tolerance/config.py, commit 00eb812, and timeouts_calc.py, commit 0c8637d): the monitor looks every 5 s
/// (`workload_check_interval`) and kills a rank whose last heartbeat is older than its time-out. As shipped there is none
/// (`rank_heartbeat_timeout` is `None`, which never ends): what is shown is the rule with time-outs that the workload had calculated, which are
/// `safety_factor` = 5 times the longest interval seen; here after five steps, as `num_warmup_iterations` leaves out of its sections'. A
/// heartbeat is a completed step; of many steps between two observations the interval
/// is the observations' own, so that coarse sampling makes the rule more patient, not less.
#[derive(Debug)]
pub struct Heartbeat {
    poll: Poll,
    steps: Option<u64>,
    beats: u64,
    /// When the last heartbeat was seen, or work began.
    since_ms: Option<Ms>,
    longest_ms: Ms,
    fired: bool,
}

const CHECK_MS: Ms = 5_000;
const SAFETY_FACTOR: Ms = 5;
const WARM_UP: u64 = 5;

impl Default for Heartbeat {
    fn default() -> Self {
        Self { poll: Poll::every(CHECK_MS), steps: None, beats: 0, since_ms: None, longest_ms: 0, fired: false }
    }
}

impl Heartbeat {
    fn learn(&mut self, now_ms: Ms, inside: &Inside) {
        let before = std::mem::replace(&mut self.steps, inside.steps);
        let turned = match (before, inside.steps) {
            (Some(before), Some(now)) => now.saturating_sub(before),
            _ => 0,
        };
        if turned > 0 {
            let gap_ms = self.since_ms.map_or(0, |since| now_ms.saturating_sub(since));
            if self.beats >= WARM_UP {
                self.longest_ms = self.longest_ms.max(gap_ms);
            }
            self.beats = self.beats.saturating_add(turned);
            self.fired = false;
        }
        if turned > 0 || !inside.busy {
            self.since_ms = Some(now_ms);
        }
    }
}

impl Rule for Heartbeat {
    fn name(&self) -> &'static str {
        "nvrx-heartbeat"
    }

    fn about(&self) -> &'static str {
        "NVRx with calculated time-outs (shipped: none), no step for 5 x the longest interval seen, looked at every 5 s"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let inside = Inside::read(obs);
        self.learn(now_ms, &inside);
        if self.poll.due(now_ms) && self.longest_ms > 0 {
            let silent_ms = self.since_ms.map_or(0, |since| now_ms.saturating_sub(since));
            self.fired = inside.busy && silent_ms > self.longest_ms.saturating_mul(SAFETY_FACTOR);
        }
        if self.fired { Alarm::Evict } else { Alarm::Quiet }
    }
}

/// The in-process wrapper (inprocess/wrap.py): no progress for `soft_timeout` = 60 s aborts and restarts in the process, for
/// `hard_timeout` = 90 s kills it; looked at every second.
#[derive(Debug)]
pub struct InProcess {
    poll: Poll,
    age: StepAge,
    alarm: Alarm,
}

const LOOK_MS: Ms = 1_000;
const SOFT_MS: Ms = 60_000;
const HARD_MS: Ms = 90_000;

impl Default for InProcess {
    fn default() -> Self {
        Self { poll: Poll::every(LOOK_MS), age: StepAge::default(), alarm: Alarm::Quiet }
    }
}

impl Rule for InProcess {
    fn name(&self) -> &'static str {
        "nvrx-in-process"
    }

    fn about(&self) -> &'static str {
        "NVRx in-process, no progress for 60 s restarts the function, for 90 s kills (inprocess/wrap.py)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let age_ms = self.age.look(now_ms, obs).unwrap_or(0);
        if self.poll.due(now_ms) {
            self.alarm = match age_ms {
                HARD_MS.. => Alarm::Evict,
                SOFT_MS.. => Alarm::Suspect,
                _ => Alarm::Quiet,
            };
        }
        self.alarm
    }
}
