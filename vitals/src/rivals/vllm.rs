//! vLLM's own two: the timeout of `execute_model`, and the warning of its shared-memory ring.

use super::inside::StepAge;
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` (vllm/envs.py, 0.10.1 to 0.32): the engine core waits so long for its workers, then the engine
/// dies. Measured on 0.32.0: 300.2 s from the stop of a worker to the end of `/health`.
///
/// Only the multi-process executor has it. A hang in the core's own code, a core that is stopped, a full broadcast ring and the
/// single-process executor (one GPU) have no timeout at all; an observation cannot tell these apart, so the rule is credited with
/// all of them.
#[derive(Debug, Default)]
pub struct ExecuteTimeout {
    age: StepAge,
}

const EXECUTE_TIMEOUT_MS: Ms = 300_000;

impl Rule for ExecuteTimeout {
    fn name(&self) -> &'static str {
        "vllm-execute-timeout"
    }

    fn about(&self) -> &'static str {
        "vLLM, one execute_model for 300 s, multi-process executor only (vllm/envs.py)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let late = self.age.look(now_ms, obs).is_some_and(|age| age >= EXECUTE_TIMEOUT_MS);
        if late { Alarm::Evict } else { Alarm::Quiet }
    }
}

/// `VLLM_RINGBUFFER_WARNING_INTERVAL` = 60 s (vllm/distributed/device_communicators/shm_broadcast.py): "No available shared memory
/// broadcast block found in 60 seconds", once a minute for as long as it lasts; INFO since 0.12, nobody acts on it. The same limits
/// as [`ExecuteTimeout`]. A legitimate step of a minute prints it as well.
#[derive(Debug, Default)]
pub struct ShmWarning {
    age: StepAge,
}

const RING_WARNING_MS: Ms = 60_000;

impl Rule for ShmWarning {
    fn name(&self) -> &'static str {
        "vllm-shm-warning"
    }

    fn about(&self) -> &'static str {
        "vLLM, log line after 60 s of waiting on the broadcast ring; nobody acts (shm_broadcast.py)"
    }

    fn acts(&self) -> Acts {
        Acts::Warns
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let late = self.age.look(now_ms, obs).is_some_and(|age| age >= RING_WARNING_MS);
        if late { Alarm::Suspect } else { Alarm::Quiet }
    }
}
