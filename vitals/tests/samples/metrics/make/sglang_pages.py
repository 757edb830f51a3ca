"""Pages of SGLang's own definitions: `python3 sglang_pages.py SOURCE VERSION FILE`.

SOURCE holds the unpacked wheel or source distribution of that version. Its collectors are the real ones, what they import is a stub
(`stubs.py`). Each scheduler and the tokenizer is a process of its own, joined through PROMETHEUS_MULTIPROC_DIR, as SGLang does it. A
version that knows them has two data-parallel schedulers of two tensor ranks (`--enable-metrics-for-all-schedulers`) and priorities; before
that (0.4.0) it has one scheduler. Needs prometheus_client and msgspec.
"""
import importlib
import multiprocessing
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import page
import stubs

# where the collectors are, newest first
PLACES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")
# dp_rank, tp_rank; requests running, by priority; in the queue; tokens held; of how many; prompt tokens computed, found, and decoded
SCHEDULERS = [
    (0, 0, {0: 3, 1: 1}, {0: 1}, 2800, 10000, 1280, 256, 84),
    (0, 1, {0: 3, 1: 1}, {0: 1}, 2800, 10000, 1280, 256, 84),
    (1, 0, {0: 2}, {0: 2}, 5000, 10000, 2000, 0, 285),
    (1, 1, {0: 2}, {0: 2}, 5000, 10000, 2000, 0, 285),
]
# a finished request: priority, prompt, generated and cached tokens, streamed
FINISHED = [("0", 1024, 20, 256, True), ("0", 512, 41, 0, True), ("1", 2000, 100, 0, False), (None, 64, 8, 0, False)]


def runtime(dp_rank, tp_rank):
    """What the collectors ask of the process that they are in."""
    rank = SimpleNamespace(
        tp_rank=tp_rank, pp_rank=0, moe_ep_rank=0, dp_rank=dp_rank, attn_tp_rank=tp_rank, attn_cp_rank=0, dcp_rank=0
    )
    settings = dict(
        enable_metrics=True, enable_metrics_for_all_schedulers=True, kv_events_config=None, extra_metric_labels=None,
        tokenizer_metrics_allowed_custom_labels=None, prompt_tokens_buckets=None, generation_tokens_buckets=None, stat_loggers=None,
        enable_mfu_metrics=False, collect_tokens_histogram=False,
    )
    schedule = SimpleNamespace(
        enable_priority_scheduling=True, prefill_delayer_max_delay_passes=30, prefill_delayer_forward_passes_buckets=None,
        prefill_delayer_wait_seconds_buckets=None,
    )
    return {
        "get_context": lambda: SimpleNamespace(is_config_namespace_published=lambda _name: False),
        "get_observability": lambda: SimpleNamespace(**settings),
        "get_parallel": lambda: rank,
        "get_disagg": lambda: SimpleNamespace(enable_pd_role_switch=False, disaggregation_mode="null"),
        "get_serving": lambda: SimpleNamespace(served_model_name="m", enable_streaming_session=False),
        "get_schedule": lambda: schedule,
        "exports_expert_balancedness_to_prometheus": lambda: False,
    }


def stand_in(source, place, dp_rank, tp_rank):
    names = ("sglang.srt.observability.utils", "sglang.srt.utils.gauge_histogram", "sglang.srt.observability.scheduler_stage_metrics")
    real = [place, *names] if "observability" in place else [place]
    mode = SimpleNamespace(to_engine_type=lambda _mode: "unified")
    given = {
        "sglang.srt.runtime_context": runtime(dp_rank, tp_rank),
        "sglang.srt.disaggregation.utils": {"DisaggregationMode": mode},
        "sglang.srt.utils": {"get_bool_env_var": lambda *_name: False},
    }
    stubs.stand_in(source, "sglang", real, also=("torch", "zmq"), given=given)
    return importlib.import_module(place)


def scheduler(source, place, row):
    dp_rank, tp_rank, running, queued, used, total, computed, found, decoded = row
    collectors = stand_in(source, place, dp_rank, tp_rank)
    stats = collectors.SchedulerStats(token_usage=used / total, num_used_tokens=used, gen_throughput=86.5)
    if not hasattr(collectors, "QueueCount"):
        stats.num_running_reqs, stats.num_queue_reqs = sum(running.values()), sum(queued.values())
        collectors.SchedulerMetricsCollector(labels={"model_name": "m"}).log_stats(stats)
        return
    stats.num_running_reqs = collectors.QueueCount(sum(running.values()), running)
    stats.num_queue_reqs = collectors.QueueCount(sum(queued.values()), queued)
    made = collectors.SchedulerMetricsCollector.init_new(
        server_args=None, enable_priority_scheduling=True, enable_lora=False, enable_hierarchical_cache=False
    ).collector
    made.log_stats(stats)
    made.increment_realtime_tokens(None, prefill_compute_tokens=computed, prefill_cache_tokens=found)
    made.increment_prefill_cuda_graph_pass(False)
    for _ in range(decoded):
        made.increment_realtime_tokens(None, decode_tokens=1)
        made.increment_decode_cuda_graph_pass(True)
    made.increment_forward_execution_seconds("extend", 1.5)


def tokenizer(source, place):
    collectors = stand_in(source, place, None, 0)
    if not hasattr(collectors, "tokenizer_metric_labels"):
        made = collectors.TokenizerMetricsCollector(labels={"model_name": "m"})
        for _, prompt, generated, _, _ in FINISHED:
            made.inc_prompt_tokens(prompt)
            made.inc_generation_tokens(generated)
            made.observe_e2e_request_latency(2.0)
        return
    labels = collectors.tokenizer_metric_labels()
    made = collectors.TokenizerMetricsCollector(labels=labels)
    for priority, prompt, generated, cached, streamed in FINISHED:
        of_it = labels if priority is None else labels | {"priority": priority}
        made.observe_one_finished_request(of_it, prompt, generated, cached, 2.0, False, is_streaming=streamed)
    made.observe_one_aborted_request(labels)


def main():
    source, version, path = sys.argv[1:]
    place = next(place for place in PLACES if Path(source, *place.split(".")).with_suffix(".py").exists())
    one = "observability" not in place
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        context = multiprocessing.get_context("spawn")
        jobs = [(scheduler, (source, place, row)) for row in (SCHEDULERS[:1] if one else SCHEDULERS)] + [(tokenizer, (source, place))]
        for job, arguments in jobs:
            child = context.Process(target=job, args=arguments)
            child.start()
            child.join()
            assert child.exitcode == 0
        from prometheus_client import CollectorRegistry, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        text = page.exposition(registry)
    head = [
        f"SGLang {version}, {'one scheduler' if one else 'two schedulers of two ranks, priorities'}: made by make/sglang_pages.py, which",
        f"ran this version's own collectors and merged their files (prometheus_client {metadata.version('prometheus_client')})",
    ]
    page.write(path, head, text, zeros=one)


if __name__ == "__main__":
    main()
