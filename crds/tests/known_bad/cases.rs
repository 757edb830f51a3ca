//! For each entry an engine that it is about, as people write it, and engines that look like it.

/// Entry, engine, near misses.
pub const CASES: &[(&str, &str, &[&str])] = &[
    (
        "vllm-mtp-async-scheduling",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.23.0", command: [vllm, serve],
            args: [/models/a, --speculative-config, '{"method":"qwen3_next_mtp","num_speculative_tokens":1}']}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.23.0",
                args: [--no-async-scheduling, --speculative-config, '{"method":"mtp","num_speculative_tokens":1}']}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.13.0", args: ["--speculative_config={\"method\": \"mtp\"}"]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.23.0", args: [--speculative-config, '{"method":"ngram"}']}"#,
            r#"{kind: Custom, image: "vllm/vllm-openai:v0.23.0", args: [--spec-method, mtp]}"#,
        ],
    ),
    (
        "vllm-mtp-full-and-piecewise",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.20.1@sha256:0123", args: [--spec-method=mtp,
            '--compilation-config={"cudagraph_mode":"FULL_AND_PIECEWISE","custom_ops":["all"]}']}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.20.1", args: [--spec-method=mtp, -cc.cudagraph_mode=FULL_DECODE_ONLY]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.20.0", args: [--spec-method=mtp, -cc.cudagraph_mode=FULL_AND_PIECEWISE]}"#,
        ],
    ),
    (
        "vllm-deepseek-v4-full-and-piecewise",
        r#"{kind: VLLM, image: "registry.example:5000/vllm", command: [bash, -c],
            args: ["exec vllm serve deepseek-ai/DeepSeek-V4-Flash \\\n   --compilation-config.cudagraph_mode=FULL_AND_PIECEWISE"]}"#,
        &[
            r#"{kind: VLLM, image: vllm, args: [deepseek-ai/DeepSeek-V4-Flash, -cc.cudagraph_mode, FULL_DECODE_ONLY]}"#,
            r#"{kind: VLLM, image: vllm, args: [deepseek-ai/DeepSeek-V3.2, -cc.cudagraph_mode, FULL_AND_PIECEWISE]}"#,
        ],
    ),
    (
        "vllm-mtp-grammar",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.25.1", args: [--no-async-scheduling, "-sc={\"method\": \"mtp\"}",
            --structured-outputs-config, '{"backend": "xgrammar", "disable_any_whitespace": true}']}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.28.0", args: [--spec-method=mtp, --enable-auto-tool-choice]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.24.0", args: [--spec-method=mtp, --enable-auto-tool-choice]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:latest", args: [--spec-method=mtp, --enable-auto-tool-choice]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.25.1", args: [--enable-auto-tool-choice]}"#,
        ],
    ),
    (
        "vllm-mtp-kv-connector",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.28.0", args: [--speculative-config.method, mtp,
            --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.28.1", args: [--spec-method, mtp, --kv-transfer-config, "{}"]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.28.0", args: [--kv-transfer-config, "{}"]}"#,
        ],
    ),
    (
        "vllm-kv-offloading",
        r#"{kind: VLLM, image: vllm, args: [--kv_transfer_config, '{"kv_connector":"OffloadingConnector"}']}"#,
        &[
            r#"{kind: VLLM, image: vllm, args: [--kv-offloading-size, "8", --kv-offloading-backend, lmcache]}"#,
            r#"{kind: VLLM, image: vllm, args: [--cpu-offload-gb, "8"]}"#,
        ],
    ),
    (
        "vllm-tensor-and-data-parallel",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.22.1-cu130", args: [--data-parallel-size=2], tensorParallel: 4}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", args: [-dp, "2", -tp, "4"]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.24.0rc1", args: [-dp, "2", -tp, "4"]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.23.0", args: [-dp, "2", -tp, "1"]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.23.0", args: [-dp, "1"], tensorParallel: 4}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.23.0", args: [-dp, "2", -tp, "4",
                --compilation-config, '{"pass_config": {"fuse_allreduce_rms": false}}']}"#,
        ],
    ),
    (
        "vllm-qwen3.5-expert-parallel",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.20.0", args: [Qwen/Qwen3.5-397B-A17B-FP8, --enable-expert-parallel, -dp, "8"]}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.20.0", args: [Qwen/Qwen3.5-397B-A17B-FP8, -tp, "8"]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.22.0", args: [Qwen/Qwen3.5-397B-A17B-FP8, -ep, -dp, "8"]}"#,
        ],
    ),
    (
        "vllm-async-eplb-over-nccl",
        r#"{kind: VLLM, image: vllm, args: [--enable-eplb, --eplb-config, '{"use_async": true, "communicator": "torch_nccl"}']}"#,
        &[
            r#"{kind: VLLM, image: vllm, args: [--enable-eplb, --eplb-config, '{"use_async": true, "communicator": "nixl"}']}"#,
            r#"{kind: VLLM, image: vllm, args: [--eplb-config.use_async=false, --eplb-config.communicator=pynccl]}"#,
        ],
    ),
    (
        "vllm-flashinfer-gdn-prefill",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", args: [--model=Qwen/Qwen3-Next-80B-A3B-Instruct]}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", args: [Qwen/Qwen3.5-27B, --gdn-prefill-backend=triton]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", args: [Qwen/Qwen3-8B]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.26.0", args: [--gdn-prefill-backend, flashinfer]}"#,
        ],
    ),
    (
        "vllm-flashinfer-sampler",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", env: [{name: A}, {name: VLLM_USE_FLASHINFER_SAMPLER, value: "1"}]}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", env: [{name: VLLM_USE_FLASHINFER_SAMPLER, value: "0"}]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.27.1", env: [{name: VLLM_USE_FLASHINFER_SAMPLER, value: "1"}]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.21.0", env: [{name: VLLM_USE_FLASHINFER_SAMPLER,
                valueFrom: {configMapKeyRef: {name: a, key: b}}}]}"#,
        ],
    ),
    (
        "vllm-ple-cpu-offload",
        r#"{kind: VLLM, image: "vllm/vllm-openai:qwen38-flash-next", env: [{name: VLLM_PLE_CPU_OFFLOAD, value: "1"}]}"#,
        &[r#"{kind: SGLang, image: a, env: [{name: VLLM_PLE_CPU_OFFLOAD, value: "1"}]}"#],
    ),
    (
        "vllm-qwen3-coder-parser",
        r#"{kind: VLLM, image: "vllm/vllm-openai:v0.10.1", args: [--tool-call-parser=qwen3_coder]}"#,
        &[
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.10.1.1", args: [--tool-call-parser=qwen3_coder]}"#,
            r#"{kind: VLLM, image: "vllm/vllm-openai:v0.10.0", args: [--tool-call-parser, hermes]}"#,
        ],
    ),
    (
        "sglang-hicache-write-through",
        r#"{kind: SGLang, image: "lmsysorg/sglang:v0.5.13.post1-cu129", args: [--enable-hierarchical-cache, --tp, "8"]}"#,
        &[
            r#"{kind: SGLang, image: "lmsysorg/sglang:v0.5.13", args: [--enable-hierarchical-cache]}"#,
            r#"{kind: SGLang, image: "lmsysorg/sglang:v0.5.16", args: [--enable-hierarchical-cache], tensorParallel: 8}"#,
        ],
    ),
    (
        "sglang-hicache-prefetch",
        r#"{kind: SGLang, image: "lmsysorg/sglang:latest", tensorParallel: 4, args: [--enable-hierarchical-cache,
            --hicache-storage-backend=mooncake, --hicache-storage-prefetch-policy=timeout]}"#,
        &[
            r#"{kind: SGLang, image: "lmsysorg/sglang:latest", tensorParallel: 4, args: [--enable-hierarchical-cache,
                --hicache-storage-backend=mooncake, --hicache-storage-prefetch-policy=best_effort]}"#,
            r#"{kind: SGLang, image: "lmsysorg/sglang:latest", tensorParallel: 4, args: [--enable-hierarchical-cache]}"#,
        ],
    ),
    (
        "sglang-dp-attention-eagle",
        r#"{kind: SGLang, image: a, args: [--model-path=deepseek-ai/DeepSeek-V4-Flash, --enable-dp-attention, --speculative-algorithm=EAGLE]}"#,
        &[
            r#"{kind: SGLang, image: a, args: [--model-path=deepseek-ai/DeepSeek-V4-Flash, --speculative-algorithm=EAGLE]}"#,
            r#"{kind: SGLang, image: a, args: [--model-path=a, --enable-dp-attention, --speculative-algorithm=EAGLE]}"#,
        ],
    ),
    (
        "sglang-dp-attention-tilelang",
        r#"{kind: SGLang, image: "lmsysorg/sglang-rocm:v0.5.16-rocm720-mi35x-20260729",
            args: [--enable-dp-attention, --dsa-prefill-backend, tilelang]}"#,
        &[
            r#"{kind: SGLang, image: "lmsysorg/sglang:v0.5.16", args: [--dsa-prefill-backend, tilelang]}"#,
            r#"{kind: SGLang, image: "lmsysorg/sglang:v0.5.13.post1", args: [--enable-dp-attention, --dsa-prefill-backend, tilelang]}"#,
        ],
    ),
];
