//! The signatures: data alone. Each names who writes the line, how its message begins, and where the field reported it.

use super::{Meaning, Signature, Source};

const fn sign(
    name: &'static str,
    sources: &'static [Source],
    starts: &'static [&'static str],
    meaning: Meaning,
    origin: &'static str,
) -> Signature {
    Signature { name, sources, starts, contains: "", meaning, origin }
}

impl Signature {
    const fn with(mut self, contains: &'static str) -> Self {
        self.contains = contains;
        self
    }
}

use Meaning::{Device, Fatal, Paused, RankSilent, Resumed, Stuck};
use Source::{Access, Bare, Kernel, LlamaCpp, Sglang, TensorRtLlm, Tgi, Torch, Vllm};

/// Files of vLLM whose loggers print tracebacks of the core and its workers.
const CORE: Source = Vllm(&["core.py", "multiproc_executor.py", "async_llm.py", "core_client.py", "ray_executor.py"]);
/// Exceptions: in a traceback of the core's own, or printed without a head (SGLang's scheduler, a dying process).
const RAISED: &[Source] = &[CORE, Bare];
/// Errors of the device, raised as above, or told by llama.cpp before it aborts.
const CUDA: &[Source] = &[CORE, Bare, LlamaCpp];

/// The table; the first match wins, so special lines stand before general ones.
pub static SIGNATURES: &[Signature] = &[
    sign(
        "vllm-shm-broadcast",
        &[Vllm(&["shm_broadcast.py"])],
        &["No available shared memory broadcast block found", "No available block found in"],
        RankSilent,
        "vllm #37729, gonka #1421 (H5) and S1: a rank has not read its step for 60 s; a single legitimate step of 69 s writes it as well",
    ),
    sign(
        "vllm-sample-tokens-timeout",
        RAISED,
        &["TimeoutError: RPC call to sample_tokens timed out"],
        RankSilent,
        "vllm #40926 (S3): a worker hangs after sampling; the engine dies next",
    ),
    sign(
        "vllm-execute-model-timeout",
        RAISED,
        &["TimeoutError: RPC call to execute_model timed out"],
        RankSilent,
        "vllm #37729: a worker did not finish its step in VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    ),
    sign(
        "vllm-rpc-timeout",
        RAISED,
        &["TimeoutError: RPC call to "],
        RankSilent,
        "vllm #40926: a worker did not answer",
    )
    .with(" timed out"),
    sign(
        "vllm-core-fatal",
        &[Vllm(&["core.py"])],
        &[
            "EngineCore encountered a fatal error",
            "CPU EngineCore encountered a fatal error",
            "EngineCore hit an exception",
        ],
        Fatal,
        "vllm #20657 (0.8.x: hit an exception): the core's loop ended in an exception; the server exits, with status 0",
    ),
    sign(
        "vllm-engine-dead",
        RAISED,
        &[
            "vllm.v1.engine.exceptions.EngineDeadError",
            "EngineDeadError: ",
            "vllm.engine.multiprocessing.MQEngineDeadError",
        ],
        Fatal,
        "vllm #39863 (H6): the front end lost its core",
    ),
    sign(
        "vllm-core-failed-start",
        &[CORE, Bare],
        &["RuntimeError: Engine core initialization failed", "EngineCore failed to start"],
        Fatal,
        "vllm #41865 (S4): the core died during start-up",
    ),
    sign(
        "vllm-worker-died",
        &[Vllm(&["multiproc_executor.py", "ray_executor_v2.py"])],
        &["Worker proc ", "RayWorkerProc "],
        Fatal,
        "vllm #20657: a worker process is gone",
    )
    .with(" died unexpectedly"),
    sign(
        "vllm-worker-signal",
        &[Vllm(&["multiproc_executor.py", "core_client.py"])],
        &["MulitprocExecutor got fatal signal from worker processes", "Got fatal signal from worker processes"],
        Fatal,
        "vllm #16777 (0.8.x, spelled so): a worker failed",
    ),
    sign(
        "vllm-paused",
        &[Vllm(&["scheduler.py"])],
        &["setting pause state to PAUSED"],
        Paused,
        "vllm #28037, #32351: its scheduler, POST /pause",
    ),
    sign(
        "vllm-resumed",
        &[Vllm(&["scheduler.py"])],
        &["setting pause state to UNPAUSED"],
        Resumed,
        "vllm #28037, #32351: its scheduler, POST /resume",
    ),
    sign(
        "http-paused",
        &[Access],
        &[
            "\"POST /pause_generation ",
            "\"POST /pause_generation?",
            "\"POST /release_memory_occupation ",
            "\"POST /release_memory_occupation?",
            "\"POST /pause ",
            "\"POST /pause?",
        ],
        Paused,
        "sglang #7419, #7099: SGLang's /pause_generation and /release_memory_occupation, of which no metric tells, and vLLM's /pause before its scheduler said so: the server agreed to it",
    )
    .with("\" 200"),
    sign(
        "http-resumed",
        &[Access],
        &[
            "\"POST /continue_generation ",
            "\"POST /continue_generation?",
            "\"POST /resume_memory_occupation ",
            "\"POST /resume_memory_occupation?",
            "\"POST /resume ",
            "\"POST /resume?",
        ],
        Resumed,
        "sglang #7419, #7099: SGLang's /continue_generation and /resume_memory_occupation, vLLM's /resume",
    )
    .with("\" 200"),
    sign(
        "nccl-watchdog",
        &[Torch],
        &[
            "Watchdog caught collective operation timeout",
            "Process group watchdog thread terminated with exception: [Rank",
        ],
        Device,
        "PyTorch #118369, vllm #48720 (H11), sglang #1693: a collective did not end",
    ),
    sign(
        "nccl-watchdog-cuda",
        &[Torch],
        &["Process group watchdog thread terminated with exception: CUDA error"],
        Fatal,
        "vllm #17098: the context was lost while a collective ran",
    ),
    sign(
        "nccl-heartbeat",
        &[Torch],
        &["ProcessGroupNCCL's watchdog got stuck"],
        Device,
        "sglang #1691, PyTorch #112518: NCCL's heartbeat monitor: the watchdog itself hangs in CUDA",
    ),
    sign(
        "nccl-flight-recorder",
        &[Torch],
        &[
            "Received a dump signal due to a collective timeout",
            "Observed flight recorder dump signal from another rank",
        ],
        Device,
        "vllm #23448, sglang #10216: another rank saw a collective time out",
    ),
    sign(
        "cuda-launch-timeout",
        CUDA,
        &[
            "torch.AcceleratorError: CUDA error: the launch timed out",
            "RuntimeError: CUDA error: the launch timed out",
            "CUDA error: the launch timed out",
        ],
        Device,
        "llama.cpp #24576, #27415: a kernel ran past the driver's limit",
    ),
    sign(
        "cuda-out-of-memory",
        &[CORE, Bare, Sglang, LlamaCpp],
        &[
            "torch.OutOfMemoryError: CUDA out of memory",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
            "CUDA error: out of memory",
        ],
        Device,
        "vllm #15039, #26863: the device's memory is full; the step fails and mostly the engine with it",
    ),
    sign(
        "cuda-error",
        CUDA,
        &["torch.AcceleratorError: CUDA error: ", "RuntimeError: CUDA error: ", "CUDA error: "],
        Fatal,
        "vllm #50880 (H1), llama.cpp: a sticky error, the context is lost",
    ),
    sign(
        "xid",
        &[Kernel, Bare],
        &["NVRM: Xid ("],
        Device,
        "open-gpu-kernel-modules #1150, #1151: the driver reports a fault of a GPU: what it weighs goes by its code, see Xids",
    ),
    sign(
        "gpu-off-bus",
        &[Kernel, Bare],
        &["NVRM: GPU ", "NVRM: The NVIDIA GPU "],
        Device,
        "NVSentinel #155: the GPU fell off the bus, in some drivers without an Xid",
    )
    .with("fallen off the bus"),
    sign(
        "oom-killer",
        &[Kernel],
        &["Out of memory: Killed process ", "Memory cgroup out of memory: Killed process "],
        Fatal,
        "the kernel killed a process of this machine for memory",
    ),
    sign(
        "sglang-watchdog",
        &[Sglang],
        &[
            "Watchdog timeout (self.watchdog_timeout=",
            "Scheduler watchdog timeout",
            "TokenizerManager watchdog timeout",
            "DetokenizerManager watchdog timeout",
        ],
        Stuck,
        "sglang #1816, srt/utils/watchdog.py: no forward pass for 300 s by default; of the other loops a soft one, where it is asked for",
    ),
    sign(
        "sglang-health",
        &[Sglang],
        &["Health check failed. Server couldn't get a response from detokenizer"],
        Stuck,
        "sglang #10856, #22511, #26482: no token within the limit; long chunked prefills write it as well (B3)",
    ),
    sign(
        "sglang-scheduler-exception",
        &[Sglang],
        &[
            "Scheduler hit an exception",
            "DataParallelController hit an exception",
            "TpModelWorkerClient hit an exception",
            "DetokenizerManager hit an exception",
            "TokenizerManager hit an exception",
        ],
        Fatal,
        "sglang #6624 (H7): the loop of the scheduler, or of one that it cannot do without, ended",
    ),
    sign(
        "sglang-child-failed",
        &[Sglang, Bare],
        &["Received sigquit from a child process. It usually means the child failed"],
        Fatal,
        "sglang #6624: a scheduler died and takes the server with it",
    ),
    sign(
        "trtllm-hang",
        &[TensorRtLlm],
        &["Hang detected on rank", "Hang detected, shutting down"],
        RankSilent,
        "TensorRT-LLM #10480, #15612: its hang detector (300 s)",
    ),
    sign(
        "tgi-shard-gone",
        &[Tgi],
        &[
            "Shard process was signaled to shutdown",
            "Shard complete standard error output",
            "Shard terminated",
            "shard terminated",
        ],
        Fatal,
        "text-generation-inference #2238, #2280: a shard ended",
    ),
    sign("ggml-abort", &[Bare], &["/", "ggml"], Fatal, "llama.cpp #9170, #17071: an assertion failed, the process aborts")
        .with(": GGML_ASSERT("),
    sign(
        "ggml-cuda-abort",
        &[Bare],
        &["/", "ggml"],
        Fatal,
        "llama.cpp #8117, #27749: an error of the device, the process aborts; nothing but that begins with a place in this file",
    )
    .with("ggml-cuda.cu:"),
];
