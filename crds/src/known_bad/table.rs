//! The entries: data alone. Each is what an upstream issue says, no more: versions are those that it names, or that were tried there; where a
//! release has the fix, it is the first that is none of them. An entry whose fix is out in the oldest version that anybody runs can go.

use super::Clue::{Env, Flag, Many, Setting, Word};
use super::{Clue, KnownBad, Version, Versions};
use crate::inference_deployment::EngineKind;

const ANY: Versions = Versions { from: None, before: None };

const fn from(from: Version) -> Versions {
    Versions { from: Some(from), before: None }
}

const fn before(before: Version) -> Versions {
    Versions { from: None, before: Some(before) }
}

const fn between(from: Version, before: Version) -> Versions {
    Versions { from: Some(from), before: Some(before) }
}

/// Speculation by a model's own heads, under each name that it has.
const MTP: &[Clue] = &[Setting(
    "method",
    &[
        "mtp",
        "deepseek_mtp",
        "qwen3_next_mtp",
        "qwen3_5_mtp",
        "glm4_moe_mtp",
        "mimo_mtp",
        "ernie_mtp",
        "longcat_flash_mtp",
    ],
)];
/// vLLM's, over more than one.
const TENSOR: &[Clue] = &[Many(&["--tensor-parallel-size", "-tp"])];
const DATA: &[Clue] = &[Many(&["--data-parallel-size", "-dp"])];
/// SGLang's.
const SGLANG_TENSOR: &[Clue] = &[Many(&["--tensor-parallel-size", "--tp-size", "--tp"])];
const FULL_AND_PIECEWISE: &[Clue] = &[Setting("cudagraph_mode", &["full_and_piecewise"])];
const HICACHE: &[Clue] = &[Flag(&["--enable-hierarchical-cache"], &[])];
const DP_ATTENTION: &[Clue] = &[Flag(&["--enable-dp-attention"], &[])];
const NOTHING: &[Clue] = &[];

/// All of them, by engine and then by what they are about.
pub static ENTRIES: &[KnownBad] = &[
    KnownBad {
        name: "vllm-mtp-async-scheduling",
        engine: EngineKind::Vllm,
        versions: from([0, 14, 0, 0]),
        when: &[MTP],
        unless: &[Flag(&["--no-async-scheduling"], &[])],
        flags: "MTP speculation with async scheduling, which is on by itself",
        happens: "under sustained traffic the workers hang and generation stands still while /health says 200",
        instead: "--no-async-scheduling, or no speculation",
        issue: "https://github.com/vllm-project/vllm/issues/40926",
    },
    KnownBad {
        name: "vllm-mtp-full-and-piecewise",
        engine: EngineKind::Vllm,
        versions: from([0, 20, 1, 0]),
        when: &[MTP, FULL_AND_PIECEWISE],
        unless: NOTHING,
        flags: "MTP speculation with cudagraph_mode FULL_AND_PIECEWISE",
        happens: "the engine core deadlocks in batched decode, at steps where every request has its bonus token alone",
        instead: "cudagraph_mode FULL_DECODE_ONLY",
        issue: "https://github.com/vllm-project/vllm/issues/42271",
    },
    KnownBad {
        name: "vllm-deepseek-v4-full-and-piecewise",
        engine: EngineKind::Vllm,
        versions: ANY,
        when: &[&[Word(&["deepseek-v4"])], FULL_AND_PIECEWISE],
        unless: NOTHING,
        flags: "DeepSeek-V4 with cudagraph_mode FULL_AND_PIECEWISE",
        happens: "on GB10 (SM 12.x) the engine hangs after some ten requests",
        instead: "cudagraph_mode FULL_DECODE_ONLY, as quick there",
        issue: "https://github.com/vllm-project/vllm/issues/40969",
    },
    KnownBad {
        name: "vllm-mtp-grammar",
        engine: EngineKind::Vllm,
        versions: between([0, 25, 0, 0], [0, 28, 0, 0]),
        when: &[MTP, &[Setting("backend", &["xgrammar"]), Flag(&["--enable-auto-tool-choice"], &[])]],
        unless: NOTHING,
        flags: "MTP speculation with grammars of xgrammar (structured outputs, tool calls)",
        happens: "the engine core spins on a grammar that has ended and delivers nothing more",
        instead: "no speculation, or a release with vllm#52805",
        issue: "https://github.com/vllm-project/vllm/issues/49210",
    },
    KnownBad {
        name: "vllm-mtp-kv-connector",
        engine: EngineKind::Vllm,
        versions: before([0, 28, 1, 0]),
        when: &[MTP, &[Flag(&["--kv-transfer-config"], &[])]],
        unless: NOTHING,
        flags: "MTP speculation with a KV connector",
        happens: "when the KV cache runs short the scheduler admits nobody any more, for ever",
        instead: "no speculation on this replica, or a release with this change",
        issue: "https://github.com/vllm-project/vllm/pull/57104",
    },
    KnownBad {
        name: "vllm-kv-offloading",
        engine: EngineKind::Vllm,
        versions: ANY,
        when: &[&[Word(&["offloadingconnector"]), Flag(&["--kv-offloading-size"], &[])]],
        unless: &[Flag(&["--kv-offloading-backend"], &["lmcache"])],
        flags: "KV offloading by the OffloadingConnector",
        happens: "when the KV cache runs short a request that does not fit blocks those behind it that would: none runs, all wait",
        instead: "no KV offloading, or a release with this change",
        issue: "https://github.com/vllm-project/vllm/pull/57841",
    },
    KnownBad {
        name: "vllm-tensor-and-data-parallel",
        engine: EngineKind::Vllm,
        versions: between([0, 22, 0, 0], [0, 24, 0, 0]),
        when: &[TENSOR, DATA],
        unless: &[Setting("fuse_allreduce_rms", &["false"])],
        flags: "tensor and data parallelism together",
        happens: "start-up hangs in warm-up: FlashInfer's fused all-reduce waits for ranks of the other groups",
        instead: r#"--compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}', or another release"#,
        issue: "https://github.com/vllm-project/vllm/pull/45917",
    },
    KnownBad {
        name: "vllm-qwen3.5-expert-parallel",
        engine: EngineKind::Vllm,
        versions: between([0, 20, 0, 0], [0, 22, 0, 0]),
        when: &[&[Word(&["qwen3.5"])], &[Flag(&["--enable-expert-parallel", "-ep"], &[])], DATA],
        unless: NOTHING,
        flags: "Qwen3.5 with data and expert parallelism",
        happens: "the workers hang some hundred requests into load, with FlashInfer 0.6.8.post1",
        instead: "tensor parallelism alone, or a release with another FlashInfer",
        issue: "https://github.com/vllm-project/vllm/issues/42186",
    },
    KnownBad {
        name: "vllm-async-eplb-over-nccl",
        engine: EngineKind::Vllm,
        versions: ANY,
        when: &[&[Setting("communicator", &["torch_nccl", "pynccl"])], &[Setting("use_async", &["true"])]],
        unless: NOTHING,
        flags: "asynchronous EPLB with an NCCL communicator",
        happens: "two streams wait for each other and every rank hangs; newer releases refuse to start",
        instead: "no communicator in --eplb-config: vLLM then takes nixl or gloo",
        issue: "https://github.com/vllm-project/vllm/pull/44978",
    },
    KnownBad {
        name: "vllm-flashinfer-gdn-prefill",
        engine: EngineKind::Vllm,
        versions: between([0, 21, 0, 0], [0, 26, 0, 0]),
        when: &[&[Flag(&["--gdn-prefill-backend"], &["flashinfer"]), Word(&["qwen3.5", "qwen3-next"])]],
        unless: &[Flag(&["--gdn-prefill-backend"], &["triton"])],
        flags: "prefill of gated delta nets (Qwen3.5, Qwen3-Next) by FlashInfer, which is the default on Hopper",
        happens: "a prefill kernel never ends under many requests at once, after minutes or hours",
        instead: "--gdn-prefill-backend triton",
        issue: "https://github.com/flashinfer-ai/flashinfer/issues/3986",
    },
    KnownBad {
        name: "vllm-flashinfer-sampler",
        engine: EngineKind::Vllm,
        versions: between([0, 21, 0, 0], [0, 27, 0, 0]),
        when: &[&[Env("VLLM_USE_FLASHINFER_SAMPLER", &["1"])]],
        unless: NOTHING,
        flags: "VLLM_USE_FLASHINFER_SAMPLER=1",
        happens: "on GB10 and other SM 12.x the sampler's kernel never ends: GPU at 96 %, hardly any power, no token",
        instead: "VLLM_USE_FLASHINFER_SAMPLER=0",
        issue: "https://github.com/vllm-project/vllm/issues/43885",
    },
    KnownBad {
        name: "vllm-ple-cpu-offload",
        engine: EngineKind::Vllm,
        versions: ANY,
        when: &[&[Env("VLLM_PLE_CPU_OFFLOAD", &["1"])]],
        unless: NOTHING,
        flags: "VLLM_PLE_CPU_OFFLOAD=1",
        happens: "start-up can deadlock while kernels are warmed up",
        instead: "no offload, or an image built after vllm#53899",
        issue: "https://github.com/vllm-project/vllm/issues/53960",
    },
    KnownBad {
        name: "vllm-qwen3-coder-parser",
        engine: EngineKind::Vllm,
        versions: between([0, 10, 0, 0], [0, 10, 1, 1]),
        when: &[&[Flag(&["--tool-call-parser"], &["qwen3_coder"])]],
        unless: NOTHING,
        flags: "--tool-call-parser qwen3_coder",
        happens: "tool arguments are evaluated as Python: whoever gets the model to write code runs it in the server",
        instead: "0.10.1.1 or later",
        issue: "https://nvd.nist.gov/vuln/detail/CVE-2025-9141",
    },
    KnownBad {
        name: "sglang-hicache-write-through",
        engine: EngineKind::SGLang,
        versions: before([0, 5, 16, 0]),
        when: &[HICACHE, SGLANG_TENSOR],
        unless: NOTHING,
        flags: "--enable-hierarchical-cache over more than one rank",
        happens: "one rank skips the all-reduce of its writes and all hang until the watchdog kills them",
        instead: "no hierarchical cache, or a newer release",
        issue: "https://github.com/sgl-project/sglang/issues/28429",
    },
    KnownBad {
        name: "sglang-hicache-prefetch",
        engine: EngineKind::SGLang,
        versions: ANY,
        when: &[HICACHE, &[Flag(&["--hicache-storage-backend"], &[])], SGLANG_TENSOR],
        unless: &[Flag(&["--hicache-storage-prefetch-policy"], &["best_effort"])],
        flags: "--hicache-storage-backend over more than one rank",
        happens: "ranks disagree on whose prefetch they ask about and all hang, with the GPU at 0 %",
        instead: "no storage backend behind the hierarchical cache",
        issue: "https://github.com/sgl-project/sglang/issues/30760",
    },
    KnownBad {
        name: "sglang-dp-attention-eagle",
        engine: EngineKind::SGLang,
        versions: ANY,
        when: &[
            DP_ATTENTION,
            &[Flag(&["--speculative-algorithm", "--speculative-algo"], &["eagle", "nextn"])],
            &[Word(&["deepseek-v4"])],
        ],
        unless: NOTHING,
        flags: "DeepSeek-V4 with --enable-dp-attention and EAGLE or NEXTN",
        happens: "an idle rank leaves the draft's collective out and all hang until the watchdog kills them",
        instead: "one of the two alone",
        issue: "https://github.com/sgl-project/sglang/issues/29144",
    },
    KnownBad {
        name: "sglang-dp-attention-tilelang",
        engine: EngineKind::SGLang,
        versions: from([0, 5, 14, 0]),
        when: &[DP_ATTENTION, &[Flag(&["--dsa-prefill-backend"], &["tilelang"])]],
        unless: NOTHING,
        flags: "--enable-dp-attention with --dsa-prefill-backend tilelang",
        happens: "on ROCm (MI355X) prefill never ends, without a word in the log",
        instead: "one of the two alone",
        issue: "https://github.com/sgl-project/sglang/issues/33978",
    },
];
