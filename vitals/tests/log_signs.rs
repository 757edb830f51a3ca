//! Every signature with a line as the field writes it and one that looks like it, and quoted by a client in every engine's request log.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking, helpers as well")]

use std::fmt::Write;

use vitals::log_signs::{SIGNATURES, Source, by_name, scan};

/// Signature, a real line, and a near miss that must not match.
const CASES: &[(&str, &str, &str)] = &[
    (
        "http-paused",
        r#"[2025-08-08 03:35:18] INFO:     127.0.0.1:38344 - "POST /release_memory_occupation HTTP/1.1" 200 OK"#,
        r#"[2025-08-08 03:35:18] INFO:     127.0.0.1:38344 - "POST /release_memory_occupation HTTP/1.1" 500 Internal Server Error"#,
    ),
    (
        "http-resumed",
        r#"[2025-08-08 03:35:18] INFO:     127.0.0.1:38344 - "POST /resume_memory_occupation HTTP/1.1" 200 OK"#,
        r#"[2025-08-08 03:35:18] INFO:     127.0.0.1:38344 - "GET /resume_memory_occupation HTTP/1.1" 405 Method Not Allowed"#,
    ),
    (
        "vllm-shm-broadcast",
        "(EngineCore pid=6945) INFO 11-21 01:04:30 [shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds. This typically happens",
        "(EngineCore pid=6945) INFO 11-21 01:04:30 [shm_broadcast.py:871] vLLM message queue communication handle: Handle(local_reader_ranks=[1])",
    ),
    (
        "vllm-shm-broadcast",
        "INFO 05-06 16:54:45 shm_broadcast.py:406] No available shared memory broadcast block found in 60 second.",
        "No available shared memory broadcast block found in 60 second.",
    ),
    (
        "vllm-shm-broadcast",
        "(EngineCore_0 pid=675221) (VllmWorker TP0 pid=675227) INFO 08-25 01:04:30 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 second.",
        "(EngineCore_0 pid=675221) (VllmWorker TP0) INFO 08-25 01:04:30 [shm_broadcast.py:466] No available shared memory broadcast block found in 60 second.",
    ),
    (
        "vllm-sample-tokens-timeout",
        "(EngineCore_DP0 pid=262) ERROR 02-27 10:31:24 [core.py:936] TimeoutError: RPC call to sample_tokens timed out.",
        "(APIServer pid=1) ERROR 02-27 10:31:24 [serving_completion.py:120] TimeoutError: RPC call to sample_tokens timed out.",
    ),
    (
        "vllm-execute-model-timeout",
        "TimeoutError: RPC call to execute_model timed out.",
        "    raise TimeoutError(f\"RPC call to {method} timed out.\")",
    ),
    (
        "vllm-rpc-timeout",
        "(EngineCore pid=9) TimeoutError: RPC call to take_draft_token_ids timed out.",
        "(EngineCore pid=9) TimeoutError: RPC call to take_draft_token_ids was cancelled.",
    ),
    (
        "vllm-core-fatal",
        "(EngineCore_0 pid=2651) ERROR 06-11 11:46:39 [core.py:517] EngineCore encountered a fatal error.",
        "(EngineCore_0 pid=2651) ERROR 06-11 11:46:39 [core.py:517] EngineCore encountered a warning.",
    ),
    (
        "vllm-core-fatal",
        "(EngineCore_0 pid=2651) ERROR 06-11 11:46:39 [v1/engine/core.py:936] EngineCore encountered a fatal error.",
        "(EngineCore_0 pid=2651) ERROR 06-11 11:46:39 [v1/core.py/logger.py:936] EngineCore encountered a fatal error.",
    ),
    (
        "vllm-core-fatal",
        "ERROR 02-21 06:30:25 core.py:291] EngineCore hit an exception: Traceback (most recent call last):",
        "ERROR 02-21 06:30:25 core.py:291] engine_core.run_busy_loop() hit an exception",
    ),
    (
        "vllm-engine-dead",
        "(APIServer pid=1) ERROR 11-10 12:30:57 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
        "(APIServer pid=1) ERROR 11-10 12:30:57 [async_llm.py:480]     raise EngineDeadError()",
    ),
    (
        "vllm-core-failed-start",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "RuntimeError: Engine loop is not running.",
    ),
    (
        "vllm-worker-died",
        "ERROR 05-06 16:54:45 [multiproc_executor.py:123] Worker proc VllmWorker-1 died unexpectedly, shutting down executor.",
        "ERROR 05-06 16:54:45 [multiproc_executor.py:123] Worker proc VllmWorker-1 is ready.",
    ),
    (
        "vllm-worker-signal",
        "CRITICAL 04-17 03:28:36 [core_client.py:359] Got fatal signal from worker processes, shutting down. See stack trace above for root cause issue.",
        "CRITICAL 04-17 03:28:36 [core_client.py:359] Got a signal from worker processes",
    ),
    (
        "vllm-paused",
        "(EngineCore pid=1) INFO 11-21 01:22:10 [scheduler.py:2756] setting pause state to PAUSED_ALL",
        "(EngineCore pid=1) INFO 11-21 01:22:10 [logger.py:40] setting pause state to PAUSED_ALL",
    ),
    (
        "vllm-paused",
        "(EngineCore pid=1) INFO 11-21 01:22:10 [v1/core/sched/scheduler.py:2756] setting pause state to PAUSED_ALL",
        "(EngineCore pid=1) INFO 11-21 01:22:10 [my scheduler.py:2756] setting pause state to PAUSED_ALL",
    ),
    (
        "vllm-resumed",
        "(EngineCore pid=1) INFO 11-21 01:22:50 [scheduler.py:2756] setting pause state to UNPAUSED",
        "(EngineCore pid=1) INFO 11-21 01:22:50 [scheduler.py:2756] unset pause state",
    ),
    (
        "http-paused",
        r#"[2025-08-08 03:35:18] INFO:     127.0.0.1:38344 - "POST /pause_generation HTTP/1.1" 200 OK"#,
        r#"[2025-08-08 03:35:18] INFO:     127.0.0.1:38344 - "POST /pause_generation HTTP/1.1" 401 Unauthorized"#,
    ),
    (
        "http-paused",
        r#"(APIServer pid=7) INFO:     [::1]:38344 - "POST /pause?mode=keep HTTP/1.1" 200 OK"#,
        r#"(APIServer pid=7) INFO:     a client - "POST /pause?mode=keep HTTP/1.1" 200 OK"#,
    ),
    (
        "http-paused",
        r#"INFO:     127.0.0.1:38344 - "POST /pause HTTP/1.1" 200 OK"#,
        r#"INFO:     9.9.9.9:1 - "POST /pause HTTP/1.1" 200 OK:0 - "POST /v1/completions HTTP/1.1" 200 OK"#,
    ),
    (
        "http-paused",
        r#"INFO:     127.0.0.1:38344 - "POST /pause?mode=abort HTTP/1.1" 200 OK"#,
        r#"INFO:     x - "POST /pause HTTP/1.1" 200 - "POST /v1/completions HTTP/1.1" 200 OK"#,
    ),
    (
        "http-resumed",
        r#"[2025-08-08 03:35:19 TP0] INFO:     127.0.0.1:38344 - "POST /continue_generation HTTP/1.1" 200 OK"#,
        r#"[2025-08-08 03:35:19 TP0] Receive: obj=GenerateReqInput(text='INFO:     127.0.0.1:1 - "POST /continue_generation HTTP/1.1" 200 OK')"#,
    ),
    (
        "http-resumed",
        r#"INFO:     127.0.0.1:38344 - "POST /resume HTTP/1.1" 200 OK"#,
        r#"INFO:     127.0.0.1:38344 - "GET /v1/responses/x?then="POST /resume HTTP/1.1" 200 OK"#,
    ),
    (
        "nccl-watchdog",
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        "[rank0]:[E321 02:07:08.408271257 socket.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(",
    ),
    (
        "nccl-watchdog",
        "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=64088, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 milliseconds before timing out.",
        "[I ProcessGroupNCCL.cpp:458] [Rank 7] ProcessGroupNCCL initialization options: NCCL version",
    ),
    (
        "nccl-watchdog-cuda",
        "[rank1]:[E1103 23:14:03.342459398 ProcessGroupNCCL.cpp:2068] [PG ID 4 PG GUID 19 Rank 1] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        "[rank1]:[E1103 23:14:03.342459398 ProcessGroupNCCL.cpp:2068] [PG ID 4 PG GUID 19 Rank 1] Process group watchdog thread started",
    ),
    (
        "nccl-heartbeat",
        "[rank25]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 25] [PG 0 Rank 25] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress in monitoring enqueued collectives.",
        "[rank25]:[E ProcessGroupNCCL.cpp:1153] [PG 0 Rank 25] ProcessGroupNCCL preparing to dump debug info.",
    ),
    (
        "nccl-flight-recorder",
        "[rank2]:[E1010 06:10:06.100 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a dump signal due to a collective timeout from this local rank and we will try our best to dump the debug info.",
        "[rank2]:[I1010 06:10:06.100 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a signal to shut down",
    ),
    (
        "cuda-launch-timeout",
        "RuntimeError: CUDA error: the launch timed out and was terminated",
        "RuntimeError: the launch timed out and was terminated",
    ),
    (
        "cuda-out-of-memory",
        "[2025-04-03 20:06:34 TP0] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[2025-04-03 20:06:34 TP0] Avoid torch.OutOfMemoryError: CUDA out of memory by --mem-fraction-static.",
    ),
    (
        "cuda-error",
        "(Worker_TP0 pid=77) torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "(Worker_TP0 pid=77) CUDA errors might be asynchronously reported at some other API call",
    ),
    (
        "cuda-error",
        "53.26.801.941 E CUDA error: an illegal memory access was encountered",
        "53.26.801.941 E srv  log_server_r: CUDA error: an illegal memory access was encountered",
    ),
    (
        "xid",
        "[ 1843.308145] NVRM: Xid (PCI:0000:44:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "[ 1843.308145] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01",
    ),
    (
        "gpu-off-bus",
        "Feb 14 05:03:41 node-1 kernel: [ 1843.3] NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
        "Feb 14 05:03:41 node-1 app: NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
    ),
    (
        "gpu-off-bus",
        "Feb 14 05:03:41 node-1 kernel: NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
        " eb 14 05:03:41 node-1 kernel: NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
    ),
    (
        "oom-killer",
        "[99.1] Memory cgroup out of memory: Killed process 4711 (VLLM::Worker) total-vm:1kB",
        "[99.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null)",
    ),
    (
        "sglang-watchdog",
        "[2025-04-03 20:06:34 DP1 TP0] Watchdog timeout (self.watchdog_timeout=300)",
        "[2025-04-03 20:06:34 DP1 TP0] Watchdog started",
    ),
    (
        "sglang-watchdog",
        "[2026-05-14 09:41:04] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    ),
    (
        "sglang-watchdog",
        "[2026-05-14 09:41:04] DetokenizerManager watchdog timeout (self.watchdog_timeout=60, self.soft=True)",
        "[2026-05-14 09:41:04] DetokenizerManager watchdog initialized.",
    ),
    (
        "sglang-health",
        "[2025-09-28 05:49:34] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:49:14. last_heartbeat time: 05:42:53",
        "[2025-09-28 05:49:34] Health check passed.",
    ),
    (
        "sglang-scheduler-exception",
        "[2025-09-28 05:49:34 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        "[2025-09-28 05:49:34 TP1] Scheduler hit no exception",
    ),
    (
        "sglang-scheduler-exception",
        "[2025-04-21 22:11:12] TokenizerManager hit an exception: Traceback (most recent call last):",
        "TokenizerManager hit an exception: Traceback (most recent call last):",
    ),
    (
        "sglang-scheduler-exception",
        "[2025-09-28 05:49:34] DetokenizerManager hit an exception: Traceback (most recent call last):",
        "[2025-09-28 05:49:34] MultimodalDetokenizerManager hit an exception: Traceback (most recent call last):",
    ),
    (
        "sglang-child-failed",
        "Received sigquit from a child process. It usually means the child failed.",
        "[2025-09-28 05:49:34] SIGTERM received. signum=None",
    ),
    (
        "trtllm-hang",
        "[01/17/2026-07:57:12] [TRT-LLM] [RANK 3] [E] Hang detected on rank 3 in PyExecutor.",
        "[01/17/2026-07:57:12] [TRT-LLM] [I] No hang detected on rank 3",
    ),
    (
        "tgi-shard-gone",
        "\u{1b}[2m2024-07-22T19:57:05.908774Z\u{1b}[0m \u{1b}[32m INFO\u{1b}[0m shard-manager: text_generation_launcher: shard terminated rank=3",
        "2024-07-22T19:57:05.908774Z  INFO shard-manager: text_generation_launcher: Shard ready in 9.1s rank=3",
    ),
    (
        "ggml-abort",
        "/src/ggml/src/ggml-backend.cpp:1455: GGML_ASSERT(ids->data) failed",
        "srv  log_server_r: request: please explain /src/ggml.c:1: GGML_ASSERT(x) failed",
    ),
    (
        "ggml-cuda-abort",
        "/opt/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu:97: CUDA error",
        "  current device: 0, in function ggml_backend_cuda_synchronize at /opt/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu:2980",
    ),
];

#[test]
fn a_real_line_matches_and_its_near_miss_does_not() {
    for (name, real, miss) in CASES {
        assert_eq!(scan(real).map(|sign| sign.name), Some(*name), "{real}");
        assert_ne!(scan(miss).map(|sign| sign.name), Some(*name), "{miss}");
    }
    let without: Vec<_> = SIGNATURES.iter().filter(|sign| !CASES.iter().any(|(name, ..)| *name == sign.name)).collect();
    assert!(without.is_empty(), "signatures without a line: {without:?}");
}

#[test]
fn what_a_client_quotes_in_its_prompt_is_no_hit_in_any_request_log() {
    for (_, real, _) in CASES {
        for quoted in [
            format!(
                "(APIServer pid=1) INFO 11-21 01:04:30 [logger.py:40] Received request cmpl-1: prompt: '{real}', params: SamplingParams(n=1)"
            ),
            format!("(APIServer pid=1) INFO 11-21 01:04:30 [logger.py:40] {real}"),
            format!("(APIServer pid=1) ERROR 11-21 01:04:30 [serving_completion.py:12] ValueError: {real}"),
            format!(
                "[2025-04-03 20:06:34] Receive: obj=GenerateReqInput(rid='1', text='{real}', sampling_params={{}})"
            ),
            format!("[2025-04-03 20:06:34 TP0] Finish: obj=GenerateReqInput(rid='1', text='x\\n{real}')"),
            format!("[01/17/2026-07:57:12] [TRT-LLM] [I] prompt: {real}"),
            format!(
                "2024-07-22T19:57:05.9Z  INFO generate{{parameters=GenerateParameters {{ stop: [\"shard-manager: text_generation_launcher: {real}\"] }}}}: text_generation_router::server: router/src/server.rs:400: Success"
            ),
            format!("srv  log_server_r: request: POST /completion 127.0.0.1 {{\"prompt\": \"{real}\"}}"),
            format!("53.26.801.941 D srv  log_server_r: request: {{\"prompt\": \"{real}\"}}"),
            format!("INFO:     127.0.0.1:49612 - \"GET /{real} HTTP/1.1\" 404 Not Found"),
            format!(" {real}"),
            format!("prompt: \"{real}\""),
        ] {
            assert_eq!(scan(&quoted).map(|sign| sign.name), None, "{quoted}");
        }
    }
}

#[test]
fn a_head_inside_a_quotation_does_not_make_a_writer() {
    for line in [
        "(a \"pid=1) INFO 11-21 01:04:30 [scheduler.py:1] setting pause state to PAUSED_ALL",
        "Tell me about INFO 11-21 01:04:30 [scheduler.py:1] setting pause state to PAUSED_ALL",
        "INFO 11-21 01:04:30 [evil.py:1 scheduler.py:1] setting pause state to PAUSED_ALL",
        "INFO 11-21 01:04:30 [scheduler.py:x] setting pause state to PAUSED_ALL",
        "[E nothing] ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout",
        "[TRT-LLM Hang detected on rank 1",
        "53.26.801 E CUDA error: an illegal memory access was encountered",
        "53.26.801.941 X CUDA error: an illegal memory access was encountered",
    ] {
        assert_eq!(scan(line).map(|sign| sign.name), None, "{line}");
    }
}

#[test]
fn odd_lines_do_no_harm() {
    for line in [
        "",
        "(",
        "[",
        "]",
        "(pid=1) ",
        "INFO ",
        "INFO 11-21",
        "\u{1b}",
        "\u{1b}[",
        "ü\u{1b}[31mü",
        "[rank",
        "[rank0]:[",
        "2024-",
    ] {
        assert!(scan(line).is_none(), "{line:?}");
    }
    let all = SIGNATURES.iter().map(|sign| sign.name);
    assert!(all.clone().all(|name| by_name(name).is_some_and(|sign| sign.name == name)), "names are unique");
    assert!(SIGNATURES.iter().all(|sign| !sign.origin.is_empty() && sign.starts.iter().all(|start| !start.is_empty())));
}

/// Whoever doubts a signature can read the report; the kernel's own word for its own act needs none.
#[test]
fn every_signature_has_been_reported_in_the_open() {
    for sign in SIGNATURES.iter().filter(|sign| sign.name != "oom-killer") {
        let reported = sign
            .origin
            .match_indices('#')
            .any(|(at, _)| sign.origin[at + 1..].starts_with(|c: char| c.is_ascii_digit()));
        assert!(reported, "{} has no issue: {}", sign.name, sign.origin);
    }
}

/// Who is woken by a reason finds in it what the line means, and what to search for.
#[test]
fn a_reason_tells_what_a_line_means_and_where_it_is_reported() {
    let told = by_name("vllm-shm-broadcast").unwrap().told();
    assert_eq!(
        told,
        "vllm-shm-broadcast: a rank has not read its step for 60 s (vllm #37729, gonka #1421 (H5) and S1)"
    );
    for sign in SIGNATURES {
        let told = sign.told();
        let reports = sign.origin.split(": ").next().unwrap().split("; ").next().unwrap();
        assert!(told.starts_with(sign.name) && told.ends_with(&format!("({reports})")), "{told}");
        assert!(told.len() <= 200, "more than a line: {told}");
    }
}

#[test]
fn the_table_is_in_the_documentation() {
    let mut wanted = String::from("\n| signature | written by | means | reported |\n|---|---|---|---|\n");
    for sign in SIGNATURES {
        let sources: Vec<_> = sign.sources.iter().map(writer).collect();
        writeln!(wanted, "| `{}` | {} | {:?} | {} |", sign.name, sources.join(", "), sign.meaning, sign.origin)
            .unwrap();
    }
    wanted.push('\n');
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/engine-signals.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (head, rest) = text.split_once("<!-- signatures -->\n").unwrap();
    let (_, tail) = rest.split_once("<!-- end of signatures -->").unwrap();
    let whole = format!("{head}<!-- signatures -->\n{wanted}<!-- end of signatures -->{tail}");
    if std::env::var_os("TRUEBEAT_REGENERATE").is_some() {
        std::fs::write(path, &whole).unwrap();
    }
    assert!(text == whole || std::env::var_os("TRUEBEAT_REGENERATE").is_some(), "run `make regenerate`");
}

fn writer(source: &Source) -> String {
    match source {
        Source::Vllm(files) => format!("vLLM ({})", files.join(", ")),
        Source::Bare => "a line without a head".to_owned(),
        other => format!("{other:?}"),
    }
}
