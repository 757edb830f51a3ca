//! Log signatures of hung and dying engines, each with the upstream report that made it known.
//!
//! A signature corroborates or excuses; it never makes a stall by itself (V4): a log line can be quoted in a prompt.

/// What a signature tells the detector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meaning {
    /// A rank does not answer the others (S1, S3).
    RankSilent,
    /// The device or the collective library gave up waiting (S2).
    Device,
    /// The engine's core says that it is dead or dying.
    Fatal,
    /// A watchdog of the engine itself saw no progress.
    Stuck,
    /// Generation was paused through the engine's API: silence is intended (V5).
    Paused,
    /// That pause ended.
    Resumed,
}

/// One known line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    pub name: &'static str,
    /// All of these occur in the line.
    pub parts: &'static [&'static str],
    pub meaning: Meaning,
    /// Where the line is reported, and what it corroborates.
    pub origin: &'static str,
}

const fn sign(name: &'static str, parts: &'static [&'static str], meaning: Meaning, origin: &'static str) -> Signature {
    Signature { name, parts, meaning, origin }
}

/// The table; the first match wins, so special lines stand before general ones.
pub static SIGNATURES: &[Signature] = &[
    sign(
        "vllm-shm-broadcast",
        &["No available shared memory broadcast block found"],
        Meaning::RankSilent,
        "vllm #37729 and S1: a rank has not read its step for 60 s; also seen in a single legitimate step of more than 60 s",
    ),
    sign(
        "vllm-sample-tokens-timeout",
        &["RPC call to sample_tokens timed out"],
        Meaning::RankSilent,
        "vllm #40926 (S3): a worker hangs after sampling; the engine dies next",
    ),
    sign(
        "vllm-execute-model-timeout",
        &["RPC call to execute_model timed out"],
        Meaning::RankSilent,
        "vllm: a worker did not finish its step in VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    ),
    sign(
        "vllm-rpc-timeout",
        &["RPC call to ", " timed out"],
        Meaning::RankSilent,
        "vllm multiproc executor: a worker did not answer",
    ),
    sign(
        "vllm-core-fatal",
        &["EngineCore encountered a fatal error"],
        Meaning::Fatal,
        "vllm: the core's loop ended in an exception; the server exits, with status 0",
    ),
    sign("vllm-engine-dead", &["EngineDeadError"], Meaning::Fatal, "vllm: the front end lost its core (vllm #39863)"),
    sign(
        "vllm-core-failed-start",
        &["Engine core initialization failed"],
        Meaning::Fatal,
        "vllm: the core died during start-up",
    ),
    sign("vllm-worker-died", &["Worker proc", "died unexpectedly"], Meaning::Fatal, "vllm: a worker process is gone"),
    sign("vllm-paused", &["setting pause state to PAUSED"], Meaning::Paused, "vllm scheduler, POST /pause"),
    sign("vllm-resumed", &["setting pause state to UNPAUSED"], Meaning::Resumed, "vllm scheduler, POST /resume"),
    sign(
        "nccl-watchdog",
        &["Watchdog caught collective operation timeout"],
        Meaning::Device,
        "PyTorch NCCL watchdog: a collective did not end (vllm #48720)",
    ),
    sign(
        "nccl-heartbeat",
        &["ProcessGroupNCCL's watchdog got stuck"],
        Meaning::Device,
        "PyTorch NCCL heartbeat monitor: the watchdog itself hangs in CUDA",
    ),
    sign(
        "nccl-flight-recorder",
        &["Received a dump signal due to a collective timeout"],
        Meaning::Device,
        "PyTorch: another rank saw a collective time out",
    ),
    sign(
        "cuda-launch-timeout",
        &["CUDA error: the launch timed out"],
        Meaning::Device,
        "CUDA: a kernel ran past the driver's limit",
    ),
    sign("cuda-error", &["CUDA error:"], Meaning::Fatal, "CUDA: a sticky error, the context is lost"),
    sign(
        "cuda-illegal-access",
        &["an illegal memory access was encountered"],
        Meaning::Fatal,
        "CUDA: the context is lost",
    ),
    sign("xid", &["NVRM: Xid"], Meaning::Device, "the driver reports a GPU fault"),
    sign(
        "sglang-watchdog",
        &["Watchdog timeout", "self.watchdog_timeout"],
        Meaning::Stuck,
        "SGLang scheduler watchdog (default 300 s)",
    ),
    sign(
        "sglang-watchdog-plain",
        &["Scheduler watchdog timeout"],
        Meaning::Stuck,
        "SGLang scheduler watchdog, newer text",
    ),
    sign(
        "sglang-health",
        &["Health check failed. Server couldn't get a response from detokenizer"],
        Meaning::Stuck,
        "SGLang /health_generate: no token within the limit (sglang #6624)",
    ),
    sign(
        "sglang-scheduler-exception",
        &["Scheduler hit an exception"],
        Meaning::Fatal,
        "SGLang: the scheduler's loop ended",
    ),
    sign("trtllm-hang", &["Hang detected on rank"], Meaning::RankSilent, "TensorRT-LLM hang detector (300 s)"),
    sign("ggml-abort", &["GGML_ASSERT"], Meaning::Fatal, "llama.cpp: an assertion failed, the process aborts"),
];

/// The signature that a line matches, if any.
pub fn scan(line: &str) -> Option<&'static Signature> {
    SIGNATURES.iter().find(|signature| signature.parts.iter().all(|part| line.contains(part)))
}

/// A signature by its name.
pub fn by_name(name: &str) -> Option<&'static Signature> {
    SIGNATURES.iter().find(|signature| signature.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_as_the_field_writes_them_are_found() {
        let cases = [
            (
                "(EngineCore pid=6945) INFO 11-21 01:04:30 [shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds. This typically happens",
                "vllm-shm-broadcast",
            ),
            ("No available shared memory broadcast block found in 60 second.", "vllm-shm-broadcast"),
            ("TimeoutError: RPC call to sample_tokens timed out.", "vllm-sample-tokens-timeout"),
            ("(EngineCore pid=1) INFO [scheduler.py:2756] setting pause state to PAUSED_ALL", "vllm-paused"),
            ("(EngineCore pid=1) INFO [scheduler.py:2756] setting pause state to UNPAUSED", "vllm-resumed"),
            ("[rank3]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", "nccl-watchdog"),
            ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "cuda-error"),
        ];
        for (line, name) in cases {
            assert_eq!(scan(line).map(|s| s.name), Some(name), "{line}");
        }
        assert_eq!(scan("INFO:     127.0.0.1 - \"GET /health HTTP/1.1\" 200 OK"), None);
    }

    #[test]
    fn names_are_unique() {
        for (i, signature) in SIGNATURES.iter().enumerate() {
            assert!(SIGNATURES.iter().skip(i + 1).all(|other| other.name != signature.name), "{}", signature.name);
        }
    }
}
