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
# Of what the other server does with all slots busy: most of it, and more than it can
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


class Side:
    """How one of the two servers is started: `command` of a port."""

    def __init__(self, command, environment=None):
        self.command, self.environment = command, environment

    @classmethod
    def ours(cls, path):
        program = children.built("truebeat-engine", "build", "--release", "--bin")
        return cls(lambda port: [program, "engine", "--model", path, "--listen", f"127.0.0.1:{port}", "--served-model-name", "m",
                                 "--max-model-len", "1024"])

    @classmethod
    def llama(cls, path, programs, args):
        threads, context = str(max(args.threads)), str(args.slots * 512)
        return cls(lambda port: [f"{programs}/llama-server", "-m", path, "--port", str(port), "-t", threads, "-np", str(args.slots),
                                 "-c", context, "-fa", "on"])

    @classmethod
    def vllm(cls, path, venv, args):
        """It keeps a core for itself unless it is told not to, and is given all; what it computes is compiled, as it is by default. Where the
        processor has no products of BF16, its library emulates them, and F32 is the faster of its two."""
        threads = max(args.threads)
        dtype = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else "float32"
        environment = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
                       "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "LD_PRELOAD": "libtcmalloc_minimal.so.4"}
        return cls(lambda port: [f"{venv}/bin/python", f"{venv}/bin/vllm", "serve", path, "--host", "127.0.0.1", "--port", str(port),
                                 "--served-model-name", "m", "--dtype", dtype, "--max-model-len", "1024"], environment)


def compare_llama(args, programs, report):
    """Throughput, p99 of first tokens and of gaps, each as a ratio of ours to theirs by seed."""
    for shape in args.shapes[:1]:
        for kind in args.formats:
            path = models.file_of(args.models, shape, kind, programs)
            sides = {"ours": Side.ours(path), "theirs": Side.llama(path, programs, args)}
            of_format(f"{shape}_{kind}_server", sides, models.SHAPES[shape]["vocab"], args, report)


def compare_vllm(args, venv, report):
    """The same against vLLM, which reads a folder in BF16."""
    for shape in args.shapes[:1]:
        path = models.folder_of(args.models, shape)
        sides = {"ours": Side.ours(path), "theirs": Side.vllm(path, venv, args)}
        of_format(f"{shape}_bf16_vllm", sides, models.SHAPES[shape]["vocab"], args, report)


def of_format(name, sides, vocab, args, report):
    rate, ready = None, {"ours": [], "theirs": []}
    seen = {(side, load_name): [] for side in sides for load_name in LOADS}
    for seed in range(args.seeds):
        for side in ("theirs", "ours") if seed % 2 == 0 else ("ours", "theirs"):
            port = children.free_port()
            log = children.ROOT / f"target/peers/{name}-{side}-{seed}.log"
            with children.server(sides[side].command(port), port, log, sides[side].environment) as seconds:
                ready[side].append(seconds)
                run(port, None, 1000, args.slots, vocab)
                if rate is None:
                    rate = run(port, None, 1001, 2 * args.slots, vocab)[0] / OUTPUT
                    print(f"# the other server answers {rate:.2f} requests a second with {args.slots} at once, after {seconds:.1f} s of start")
                for load_name, share in LOADS.items():
                    # other prompts for each load: what a server has seen before it answers from its cache
                    seen[side, load_name].append(run(port, share * rate, f"{seed} {load_name}", args.requests, vocab))
    report(f"{name}_ready_ours", ready["ours"], "s", "-")
    report(f"{name}_ready_theirs", ready["theirs"], "s", "-")
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
