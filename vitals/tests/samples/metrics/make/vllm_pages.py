"""Pages of vLLM's own definitions: `python3 vllm_pages.py SOURCE VERSION SHAPE FILE`.

SOURCE is an unpacked source distribution of that version. Its stat logger, its stats and its registry are the real ones; the
configuration is a namespace, everything else of vLLM and torch a stub (`stubs.py`). Needs prometheus_client, msgspec and numpy.

SHAPE is `one` (engine), `dp2` (two engines, one API server), `dp2-api2` (two engines, two API servers in processes of their own, through
PROMETHEUS_MULTIPROC_DIR) or `v0` (the engine before V1, of versions that still have it). The recorded sequence is SEQUENCE.
"""
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from importlib import metadata
from types import SimpleNamespace

import page
import stubs

MODEL = "m"
# Of each engine, in order: requests running and waiting, cache used, tokens looked up in the prefix cache and found there, and what came
# out: prompt tokens, generated tokens, preemptions, requests finished by reason. A step without output is the last: a chunk of a prefill.
STEP = ("running", "waiting", "usage", "queries", "hits", "prompt", "generated", "preempted", "finished")
SEQUENCE = {
    0: [
        (1, 1, 0.10, 1024, 256, 1024, 1, 0, ()),
        *[(2, 0, 0.20, 0, 0, 0, 2, 0, ())] * 40,
        (2, 0, 0.20, 0, 0, 0, 2, 0, ("stop", "length")),
        (1, 0, 0.15, 512, 0, 512, 1, 0, ("stop", "abort")),
        (3, 1, 0.25, 2048, 128, None, None, None, None),
    ],
    1: [
        (2, 0, 0.30, 2000, 0, 2000, 2, 0, ()),
        *[(4, 0, 0.50, 0, 0, 0, 4, 0, ())] * 70,
        (4, 2, 0.90, 0, 0, 0, 3, 1, ("stop", "stop", "length")),
        (4, 2, 0.40, 96, 96, None, None, None, None),
    ],
}
REAL = [
    "vllm.v1.metrics.loggers",
    "vllm.v1.metrics.stats",
    "vllm.v1.metrics.prometheus",
    "vllm.v1.metrics.buckets",
    "vllm.v1.metrics.utils",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.spec_decode.metrics",
    "vllm.v1.engine",
    "vllm.engine.metrics",
    "vllm.engine.metrics_types",
]


def settings():
    """What the stat loggers ask of the configuration."""
    return SimpleNamespace(
        observability_config=SimpleNamespace(
            show_hidden_metrics=False, kv_cache_metrics=False, custom_histogram_buckets=None, enable_mfu_metrics=False
        ),
        model_config=SimpleNamespace(served_model_name=MODEL, max_model_len=32768, is_diffusion=False),
        cache_config=SimpleNamespace(metrics_info=lambda: {"block_size": "16", "num_gpu_blocks": "1000"}, num_gpu_blocks=1000),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        watermark_config=None,
    )


def scheduler_stats(stats, step):
    made = stats.SchedulerStats(num_running_reqs=step["running"], num_waiting_reqs=step["waiting"])
    name = "kv_cache_usage" if hasattr(made, "kv_cache_usage") else "gpu_cache_usage"
    setattr(made, name, step["usage"])
    made.prefix_cache_stats.requests = 1
    made.prefix_cache_stats.queries, made.prefix_cache_stats.hits = step["queries"], step["hits"]
    return made


def iteration_stats(stats, reasons, step):
    if step["prompt"] is None:
        return None
    made = stats.IterationStats()
    made.num_generation_tokens, made.num_preempted_reqs = step["generated"], step["preempted"]
    if hasattr(made, "prompt_token_stats"):
        made.prompt_token_stats.computed = step["prompt"] - step["hits"]
        made.prompt_token_stats.local_cache_hit = made.prompt_token_stats.cached_tokens = step["hits"]
        made.prompt_token_stats.total = step["prompt"]
    else:
        made.num_prompt_tokens = step["prompt"]
    for reason in step["finished"]:
        done = dict(e2e_latency=2.0, num_prompt_tokens=512, num_generation_tokens=20, max_tokens_param=64)
        made.finished_requests.append(stats.FinishedRequestStats(finish_reason=reasons[reason.upper()], **done))
    return made


def recorder(engines):
    """One API server: what it does with the output of a step."""
    from vllm.v1.engine import FinishReason

    loggers, stats = (importlib.import_module(f"vllm.v1.metrics.{name}") for name in ("loggers", "stats"))
    alone = hasattr(loggers, "setup_default_loggers")  # 0.8: a logger for each engine, and each takes its predecessor's series away
    made = [loggers.PrometheusStatLogger(settings(), engine if alone else engines) for engine in (engines if alone else [0])]
    if not alone:
        made[0].log_engine_initialized()

    def record(engine, values):
        step = dict(zip(STEP, values))
        which, logger = ({}, made[engine]) if alone else ({"engine_idx": engine}, made[0])
        logger.record(scheduler_stats(stats, step), iteration_stats(stats, FinishReason, step), **which)

    return record


def turns(engines):
    """The engines' steps by turns, as they would come: (number, engine, values)."""
    for at in range(max(len(SEQUENCE[engine]) for engine in engines)):
        yield from ((at, engine, SEQUENCE[engine][at]) for engine in engines if at < len(SEQUENCE[engine]))


def of_one(engines):
    from prometheus_client import REGISTRY

    record = recorder(engines)
    for _, engine, values in turns(engines):
        record(engine, values)
    return page.exposition(REGISTRY)


def serve(engines, pipe):
    record = recorder(engines)
    for engine, values in iter(pipe.recv, None):
        record(engine, values)
        pipe.send("recorded")


def of_two(engines):
    """Two API servers, each a process; an output goes to the one whose request it is, here to each by turns."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        servers = []
        for _ in range(2):
            here, there = multiprocessing.Pipe()
            child = multiprocessing.get_context("fork").Process(target=serve, args=(engines, there), daemon=True)
            child.start()
            servers.append((here, child))
        for at, engine, values in turns(engines):
            pipe, child = servers[at % 2]
            pipe.send((engine, values))
            assert child.is_alive() and pipe.poll(60) and pipe.recv() == "recorded"
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        text = page.exposition(get_prometheus_registry())
        for pipe, child in servers:
            pipe.send(None)
            child.join()
        return text


def of_v0():
    from prometheus_client import REGISTRY
    from vllm.engine.metrics import PrometheusStatLogger
    from vllm.engine.metrics_types import Stats

    logger = PrometheusStatLogger(local_interval=5, labels={"model_name": MODEL}, vllm_config=settings())
    for values in SEQUENCE[0]:
        step = dict(zip(STEP, values))
        prompt, generated = step["prompt"] or 0, step["generated"] or 0
        known = dict(
            num_running_sys=step["running"],
            num_waiting_sys=step["waiting"],
            gpu_cache_usage_sys=step["usage"],
            num_prompt_tokens_iter=prompt,
            num_generation_tokens_iter=generated,
            num_tokens_iter=prompt + generated,
            num_preemption_iter=step["preempted"] or 0,
            finished_reason_requests=list(step["finished"] or ()),
            max_lora="0",
        )
        lists = ("_requests", "lora_adapters", "first_tokens_iter", "output_tokens_iter")
        empty = {name: [] if name.endswith(lists) else 0 for name in Stats.__dataclass_fields__}
        logger.log(Stats(**(empty | {"now": time.time()} | known)))
    return page.exposition(REGISTRY)


def main():
    source, version, shape, path = sys.argv[1:]
    if shape == "dp2-api2":
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = "set"  # before prometheus_client is imported: it chooses its values then
    given = {"vllm.envs": {"VLLM_COMPUTE_NANS_IN_LOGITS": False}, "vllm.executor.ray_utils": {"ray": None}}
    stubs.stand_in(source, "vllm", REAL, also=("torch", "zmq", "ray"), given=given)
    text = {"one": lambda: of_one([0]), "dp2": lambda: of_one([0, 1]), "dp2-api2": lambda: of_two([0, 1]), "v0": of_v0}[shape]()
    client = metadata.version("prometheus_client")
    head = [
        f"vLLM {version}, {shape}: made by make/vllm_pages.py, which ran this version's own PrometheusStatLogger",
        f"over its SEQUENCE and rendered its registry for the agent's Accept header (prometheus_client {client})",
    ]
    page.write(path, head, text)


if __name__ == "__main__":
    main()
