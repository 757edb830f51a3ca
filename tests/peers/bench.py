"""`make bench-peers`: this engine against llama.cpp and vLLM on this machine, the same model files, in pairs that run in turn.

Prints `name value unit goal # spread`. Each pair gives one ratio of ours to theirs; the ratio printed is the median, with the 10th and 90th
percentile, and beside it the same of CPU seconds, which neighbours disturb less. llama.cpp gets the better of its settings in every cell.
"""
import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import children
import models
import serving

HERE = Path(__file__).resolve().parent
# name: kind, numbers of the command, tokens a run, goal of the ratio by format
DECODES = {"decode_d0": (0, 1.1), "decode_d2048": (2048, 1.6), "decode_d8192": (8192, 2.0)}
TOKENS = 12
# A deeper cell takes the setting that is faster here: to fill 8192 positions twice takes ten minutes and more
DEPTH_OF_CHOICE_MAX = 2048
BATCH, BATCH_DEPTH = 8, 128
PROMPT = 512
CONTEXT = 8192 + PROMPT


class Cell:
    """One thing that both engines are timed at."""

    def __init__(self, name, kind):
        self.name = name
        if name in DECODES:
            depth, self.goal = DECODES[name]
            self.command, self.tokens = ("decode", (depth, TOKENS)), TOKENS
            self.choice = ("decode", (min(depth, DEPTH_OF_CHOICE_MAX), TOKENS))
            return
        if name == "batch8":
            self.command, self.tokens, self.goal = ("batch", (BATCH, BATCH_DEPTH, TOKENS)), BATCH * TOKENS, 3.0
        else:
            self.command, self.tokens, self.goal = ("prefill", (PROMPT,)), PROMPT, 1.0 if kind == "bf16" else 2.0
        self.choice = self.command

    def run(self, side, setting):
        return ask(side, setting, self.command)

    def run_to_choose(self, side, setting):
        return ask(side, setting, self.choice)


def ask(side, setting, command):
    word, numbers = command
    return side.ask(word, setting, *numbers)


ALL_CELLS = [f"prefill_{PROMPT}", "batch8", *DECODES]
PARTS = ["cells", "server", "vllm"]


def quantile(values, share):
    values = sorted(values)
    return values[round((len(values) - 1) * share)]


def report(name, values, unit, goal, note=""):
    low, high = quantile(values, 0.1), quantile(values, 0.9)
    print(f"{name} {statistics.median(values):.3f} {unit} {goal} # {low:.3f} to {high:.3f} in {len(values)}{note}", flush=True)


def better_setting(cell, theirs):
    """Of flash attention off and on, the one that is faster here: the better of two runs each, after one that is not counted."""
    def best(setting):
        return min([cell.run_to_choose(theirs, setting) for _ in range(3)][1:])
    return min(("fa1", "fa0"), key=best)


def compare(name, cell, ours, theirs, args):
    """Pairs in turn, the first of each pair by turns; nothing is left out."""
    ends = time.monotonic() + args.cell_seconds
    setting = better_setting(cell, theirs)
    cell.run(ours, setting)
    pairs = []
    while len(pairs) < args.pairs and (len(pairs) < 3 or time.monotonic() < ends):
        if len(pairs) % 2 == 0:
            mine, other = cell.run(ours, setting), cell.run(theirs, setting)
        else:
            other, mine = cell.run(theirs, setting), cell.run(ours, setting)
        pairs.append((mine, other))
    report(f"{name}_ours", [cell.tokens / mine[0] for mine, _ in pairs], "tok/s", "-")
    report(f"{name}_theirs", [cell.tokens / other[0] for _, other in pairs], "tok/s", "-", f", {setting}")
    load = f", load {os.getloadavg()[0]:.1f}"
    report(f"{name}_ratio", [other[0] / mine[0] for mine, other in pairs], "x", f">={cell.goal}", load)
    report(f"{name}_cpu_ratio", [other[1] / mine[1] for mine, other in pairs], "x", "-")
    return statistics.median(cell.tokens / mine[0] for mine, _ in pairs)


def roofline_of(name, cell, speed, shape, path, before, after):
    """What share of the machine that is: of its read bandwidth for decode, of its dot products for prefill."""
    read_bytes, dot_ops = (max(pair) for pair in zip(before, after))
    s = models.SHAPES[shape]
    if cell.command[0] == "prefill":
        layers = sum(dims[0] * dims[1] for tensor, dims, _ in models.tensors_of(s) if len(dims) == 2 and tensor.startswith("blk"))
        print(f"{name}_share_of_dot_peak {200 * layers * speed / dot_ops:.1f} % - # {dot_ops / 1e9:.0f} Gop/s")
        return
    seqs, depth = (BATCH, BATCH_DEPTH) if cell.command[0] == "batch" else (1, cell.command[1][0])
    per_token = 2 * 2 * s["layers"] * s["kv_heads"] * s["head_dim"]
    step_bytes = path.stat().st_size + seqs * depth * per_token
    print(f"{name}_share_of_read_bandwidth {100 * step_bytes * speed / seqs / read_bytes:.1f} % - # {read_bytes / 1e9:.1f} GB/s")


def measure(args, programs):
    ours_program = children.built("cells", "bench", "--no-run", "--bench")
    for shape in args.shapes:
        for kind in args.formats:
            path = models.file_of(args.models, shape, kind, programs)
            for threads in args.threads:
                ours = children.Cells(ours_program, path, threads, CONTEXT)
                theirs = children.Cells(Path(programs) / "llama_cell", path, threads, CONTEXT)
                for cell in (Cell(cell, kind) for cell in args.cells):
                    name = f"{shape}_{kind}_t{threads}_{cell.name}"
                    before = ours.ask("roofline")
                    speed = compare(name, cell, ours, theirs, args)
                    roofline_of(name, cell, speed, shape, path, before, ours.ask("roofline"))
                ours.end()
                theirs.end()


def words(text):
    return text.split(",")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cache = os.environ.get("TRUEBEAT_CACHE", Path.home() / ".cache/truebeat")
    parser.add_argument("--models", default=Path(cache) / "peer-models", type=Path)
    parser.add_argument("--shapes", type=words, default=["qwen3", "llama"])
    parser.add_argument("--formats", type=words, default=["q8_0", "q4_k_m", "bf16"])
    parser.add_argument("--threads", type=lambda text: [int(word) for word in words(text)], default=[2, 1])
    parser.add_argument("--cells", type=words, default=ALL_CELLS, help="some of " + ",".join(ALL_CELLS))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--cell-seconds", type=float, default=60, help="no further pair begins after so long in a cell (three at least)")
    parser.add_argument("--parts", type=words, default=["cells", "server"],
                        help="some of " + ",".join(PARTS) + ": cells and servers under Poisson load of llama.cpp, a real vLLM (6 GB once)")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=8, help="requests that llama-server runs at once")
    args = parser.parse_args()
    unknown = set(args.cells) - set(ALL_CELLS) | set(args.parts) - set(PARTS)
    return parser.error(f"no such cells or parts: {unknown}") if unknown else args


def installed(script):
    """What an installer's one line says."""
    return subprocess.run([script], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def main():
    # whoever ends this ends what it started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args = arguments()
    print(f"# {os.cpu_count()} CPUs, load {os.getloadavg()}")
    if {"cells", "server"} & set(args.parts):
        programs = installed(HERE / "install.sh")
        print(f"# {programs.rsplit('/', 2)[-2]}")
    if "cells" in args.parts:
        measure(args, programs)
    if "server" in args.parts:
        serving.compare_llama(args, programs, report)
    if "vllm" in args.parts:
        serving.compare_vllm(args, installed(HERE.parent / "vllm/install.sh"), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
