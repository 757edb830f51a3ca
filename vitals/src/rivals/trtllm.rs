//! TensorRT-LLM's `HangDetector`.

use super::inside::StepAge;
use super::{Acts, Alarm, Rule};
use crate::observation::{Ms, Observation};

/// `HangDetector` (tensorrt_llm/_torch/pyexecutor/hang_detector.py, commit 06c5e53): every turn of the executor's loop calls
/// `checkpoint()`, which restarts a timer of 300 s; when it runs out, stacks are dumped and all ranks are killed (`MPI_Abort(137)`,
/// else SIGKILL to itself). The loop waits for requests under `pause()`, so that idleness does not count.
///
/// The timer lives in an asyncio thread of the same process, which needs the GIL; it is given to run.
#[derive(Debug, Default)]
pub struct HangDetector {
    age: StepAge,
}

const TIMEOUT_MS: Ms = 300_000;

impl Rule for HangDetector {
    fn name(&self) -> &'static str {
        "tensorrt-llm-hang-detector"
    }

    fn about(&self) -> &'static str {
        "TensorRT-LLM, no checkpoint() of the executor's loop for 300 s (hang_detector.py)"
    }

    fn acts(&self) -> Acts {
        Acts::Evicts
    }

    fn step(&mut self, now_ms: Ms, obs: &Observation) -> Alarm {
        let late = self.age.look(now_ms, obs).is_some_and(|age| age >= TIMEOUT_MS);
        if late { Alarm::Evict } else { Alarm::Quiet }
    }
}
