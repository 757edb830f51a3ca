"""Both servers under the same Poisson load: the same prompts at the same moments, by turns. What a client sees: tokens a second, the time
to the first token, the gaps between tokens."""
import random
import statistics
import sys
import threading
import time
from pathlib import Path

import children
import models

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vllm"))
import load  # noqa: E402

PROMPT, OUTPUT = 128, 64
# Of what llama-server does with all slots busy: most of it, and more than it can
LOADS = {"steady": 0.8, "full": 2.0}


class Request(threading.Thread):
    """One request, sent `at` seconds after the start, and when its tokens came."""

    def __init__(self, port, began, at, tokens):
        super().__init__(daemon=True)
        self.port, self.began, self.at, self.tokens, self.times = port, began, at, tokens, []
        self.start()

    def run(self):
        time.sleep(max(0.0, self.began + self.at - time.monotonic()))
        self.sent = time.monotonic()
        body = {"model": "m", "prompt": self.tokens, "max_tokens": OUTPUT, "temperature": 0, "stream": True, "ignore_eos": True}
        for line in load.stream(self.port, body):
            if line.startswith(b"data: {") and b'"text":""' not in line.replace(b" ", b""):
                self.times.append(time.monotonic())


def run(port, rate, seed, count, vocab):
    """Tokens a second, times to first tokens, gaps: of `count` requests at `rate` a second; all at once where `rate` is None."""
    chance = random.Random(seed)
    began, at, requests = time.monotonic() + 0.2, 0.0, []
    for _ in range(count):
        at += chance.expovariate(rate) if rate else 0.0
        tokens = [chance.randrange(256, vocab - 1) for _ in range(PROMPT)]
        requests.append(Request(port, began, at, tokens))
    for request in requests:
        request.join()
    failed = [request for request in requests if not request.times]
    if failed:
        raise SystemExit(f"{len(failed)} of {count} requests got no answer")
    last = max(request.times[-1] for request in requests)
    seconds = last - min(request.sent for request in requests)
    first = [request.times[0] - request.sent for request in requests]
    gaps = [b - a for request in requests for a, b in zip(request.times, request.times[1:])]
    return count * OUTPUT / seconds, first, gaps


def compare(args, programs, report):
    """Throughput, p99 of first tokens and of gaps, each as a ratio of ours to theirs by seed."""
    ours_program = children.built("truebeat-engine", "build", "--release", "--bin")
    for shape in args.shapes[:1]:
        for kind in args.formats:
            path = models.file_of(args.models, shape, kind, programs)
            commands = {
                "ours": lambda port, path=path: [ours_program, "engine", "--model", path, "--listen", f"127.0.0.1:{port}",
                                                 "--max-model-len", "1024"],
                "theirs": lambda port, path=path: [f"{programs}/llama-server", "-m", path, "--port", str(port), "-t", str(max(args.threads)),
                                                   "-np", str(args.slots), "-c", str(args.slots * 512), "-fa", "on"],
            }
            of_format(f"{shape}_{kind}_server", commands, models.SHAPES[shape]["vocab"], args, report)


def of_format(name, commands, vocab, args, report):
    rate, ready = None, {"ours": [], "theirs": []}
    seen = {(side, load_name): [] for side in commands for load_name in LOADS}
    for seed in range(args.seeds):
        for side in ("theirs", "ours") if seed % 2 == 0 else ("ours", "theirs"):
            port = children.free_port()
            with children.server(commands[side](port), port) as seconds:
                ready[side].append(seconds)
                run(port, None, 1000, args.slots, vocab)
                if rate is None:
                    rate = run(port, None, 1001, 2 * args.slots, vocab)[0] / OUTPUT
                    print(f"# llama-server answers {rate:.2f} requests a second with {args.slots} at once")
                for load_name, share in LOADS.items():
                    seen[side, load_name].append(run(port, share * rate, seed, args.requests, vocab))
    report(f"{name}_ready", [b / a for a, b in zip(ready["ours"], ready["theirs"])], "x", "-")
    for load_name in LOADS:
        pairs = list(zip(seen["ours", load_name], seen["theirs", load_name]))
        measures = {"throughput": (lambda r: r[0], "tok/s", ">=1.3" if load_name == "full" else "-"),
                    "ttft_p99": (lambda r: p99(r[1]), "s", "<=0.5"), "gap_p99": (lambda r: p99(r[2]), "s", "<=0.3"),
                    "gap_p50": (lambda r: statistics.median(r[2]), "s", "-")}
        for measure, (of, unit, goal) in measures.items():
            full = f"{name}_{load_name}_{measure}"
            report(f"{full}_ours", [of(mine) for mine, _ in pairs], unit, "-")
            report(f"{full}_theirs", [of(other) for _, other in pairs], unit, "-")
            report(f"{full}_ratio", [of(mine) / of(other) for mine, other in pairs], "x", goal)


def p99(values):
    return sorted(values)[min(len(values) - 1, round(len(values) * 0.99))]
