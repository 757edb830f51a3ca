"""What a step of the engine core costs more with the plugin: `python3 bench.py`, figures as `name value unit goal`.

A decode step of the fake vLLM (tests/fakes) with the scheduler's own work taken out, with and without the hooks, in turns; the
difference of the best of each is the cost, the spread is that of all turns. N outputs a step, one token each.
"""
import os
import statistics
import sys
import tempfile
import time
from types import SimpleNamespace

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "tests"), os.path.dirname(os.path.abspath(__file__))]
import fake  # noqa: E402

STEPS, TURNS = 100, 1000
GOAL_US = 2.0


def engine(core, outputs):
    """An engine in decode whose scheduler does nothing: what is left is the plugin."""
    made = core.EngineCoreProc(fake.config())
    requests = [core.Request(str(i), 1, 1) for i in range(outputs)]
    made.scheduler.running = requests
    out = SimpleNamespace(num_scheduled_tokens={r.request_id: 1 for r in requests}, total_num_scheduled_tokens=outputs,
                          scheduled_spec_decode_tokens={})
    tokens = [SimpleNamespace(new_token_ids=[7]) for _ in requests]
    made.scheduler.schedule = lambda: out
    made.scheduler.update_from_output = lambda output: tokens
    return made


def turn(step):
    began = time.perf_counter_ns()
    for _ in range(STEPS):
        step()
    return (time.perf_counter_ns() - began) / STEPS / 1000


def main():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as pages:
        os.environ.pop("TRUEBEAT_PAGE_DIR", None)
        for outputs in (1, 8, 64, 256):
            plain_dir, pages_dir = "", pages
            _, (_, core, _, _) = fake.load("0.32.0", pages_dir)
            hooked = engine(core, outputs)
            fake.forget()
            os.environ["TRUEBEAT_PAGE_DIR"] = plain_dir
            import importlib
            plain = engine(importlib.import_module("vllm.v1.engine.core"), outputs)
            with_hooks, without = [], []
            for _ in range(TURNS):
                without.append(turn(plain._process_engine_step))
                with_hooks.append(turn(hooked._process_engine_step))
            paired = sorted(a - b for a, b in zip(with_hooks, without))
            cost = min(with_hooks) - min(without)
            print("plugin_step_%d_outputs %.2f us %.1f  (median of %d pairs %.2f, 10th to 90th %.2f to %.2f)" % (
                outputs, cost, GOAL_US, TURNS, statistics.median(paired), paired[TURNS // 10], paired[-TURNS // 10]))


if __name__ == "__main__":
    main()
