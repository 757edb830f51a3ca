#!/usr/bin/env bash
# What the agent costs beside one engine: resident memory of its three processes and CPU time a second at 10 Hz.
#   tests/measure-agent.sh [PROGRAM [SECONDS]]
# PROGRAM is target/release/truebeat-agent or target/release/truebeat. Prints `name value unit goal`, one figure a line.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${1:-target/release/truebeat-agent}
seconds=${2:-60}
port=${PORT:-18765}
dir=$(mktemp -d)
log=$dir/run.log

"$program" run --listen "127.0.0.1:$((port + 1))" --agent-listen "127.0.0.1:$((port + 2))" \
    --engine-url "http://127.0.0.1:$port" --no-nvml -- \
    python3 tests/stranger/server.py --port "$port" --rate 50 >"$log" 2>&1 &
runner=$!
end() {
    kill -TERM "$runner" 2>/dev/null || true
    wait "$runner" 2>/dev/null || true
    rm -rf "$dir"
}
trap end EXIT

ready() { python3 - "$((port + 2))" <<'PY'
import sys, urllib.request
try:
    sys.exit(urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/readyz", timeout=2).status != 200)
except OSError:
    sys.exit(1)
PY
}
for _ in $(seq 120); do
    if ready; then break; fi
    kill -0 "$runner" || { cat "$log" >&2; exit 1; }
    sleep 0.5
done
ready || { echo "the engine did not become ready" >&2; cat "$log" >&2; exit 1; }
sleep 10 # what start-up needed once is not what the agent costs

python3 - "$runner" "$seconds" <<'PY'
import os, pathlib, sys, time

def words(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")

def children(pid):
    text = "".join(path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for child in text.split()]

supervisor, seconds = int(sys.argv[1]), float(sys.argv[2])
roles = {"supervisor": supervisor}
for child in children(supervisor):
    for role in (b"detect", b"gate"):
        if role in words(child):
            roles[role.decode()] = child
assert len(roles) == 3, f"supervisor, detector and gate are there: {roles}"

def memory(pid):
    lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines}

def cpu_ns():
    total = dict.fromkeys(roles, 0)
    for role, pid in roles.items():
        for path in pathlib.Path(f"/proc/{pid}/task").glob("*/schedstat"):
            try:
                total[role] += int(path.read_text().split()[0])
            except OSError:
                pass
    return total

before, began = cpu_ns(), time.monotonic()
time.sleep(seconds)
after, took = cpu_ns(), time.monotonic() - began
rss = pss = anonymous = 0
for role, pid in roles.items():
    m = memory(pid)
    rss, pss, anonymous = rss + m["Rss"], pss + m["Pss"], anonymous + m["Anonymous"]
    threads = len(os.listdir(f"/proc/{pid}/task"))
    print(f"agent_{role}_rss {m['Rss']:.1f} MiB - (own {m['Anonymous']:.1f} MiB, {threads} threads)")
    print(f"agent_{role}_cpu {(after[role] - before[role]) / took / 1e6:.2f} ms/s -")
print(f"agent_rss {rss:.1f} MiB 6 (three processes added up, shared program text thrice)")
print(f"agent_pss {pss:.1f} MiB - (shared pages counted once)")
print(f"agent_anonymous {anonymous:.1f} MiB - (what no file backs)")
print(f"agent_cpu {sum(after.values()) / took / 1e6 - sum(before.values()) / took / 1e6:.2f} ms/s 1.0")
PY
