#!/usr/bin/env python3
"""The order in which the agent's functions lie in the program that pods have (2c): agent/order.txt, made anew from what ran.

    cargo rustc --profile agent --locked -p agent --bin truebeat-agent -- -C strip=none
    tests/agent-order.py target/agent/truebeat-agent target/release/truebeat > agent/order.txt

Runs `truebeat-agent run` around our engine under valgrind's callgrind, which is told to begin anew once all have started: half a minute at
rest, probes, half a minute of streams. What each of the three processes executed from then on is its part, and within it what ran most
often comes first: a tick then touches few pages and few entries of the tables that the processor finds them by. Progress on stderr.
Worth doing after an update of many dependencies or of the compiler, whose names are others then: without it the program is larger in memory,
no more.
"""

import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

HEAD = """\
# The functions that a healthy agent runs once it has started, so that the linker lays them side by side (2c): those of the detector alone
# first, then what it shares with supervisor and gate, then theirs; of each, what runs most often first. Made by tests/agent-order.py from
# what ran; a name that the program no longer has is passed over."""
START_S, REST_S, LOAD_S, CLIENTS = 300, 25, 20, 2


def say(text):
    print(f"agent-order: {text}", file=sys.stderr, flush=True)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def get(port, path):
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10).read()


def wait_ready(port):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            return get(port, "/readyz")
        except OSError:
            time.sleep(0.5)
    sys.exit("agent-order: the agent was not ready in time")


def roles(agent):
    """Pids of the three processes under valgrind, by role."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
        except OSError:
            continue
        if agent in words[2:] and any("callgrind" in word for word in words[:2]):
            first, second = words[words.index(agent) + 1 :][:2]
            found["supervisor" if first == "run" else second] = int(pid)
    return {role: found[role] for role in ("supervisor", "detect", "gate")}


def stream(port, until):
    body = json.dumps({"model": "demo", "prompt": "hello", "max_tokens": 200, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    while time.monotonic() < until:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            while connection.recv(1 << 16):
                pass


def exercise(agent_port, gate_port):
    time.sleep(REST_S)
    for path in ("/readyz", "/livez", "/metrics", "/verdict") * 2:
        try:
            get(agent_port, path)
        except OSError as error:
            say(f"{path}: {error}")
    until = time.monotonic() + LOAD_S
    clients = [threading.Thread(target=stream, args=(gate_port, until)) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


def functions(dump):
    """Names of a dump that were executed, with how often each was called; a name is told once, a number stands for it from then on."""
    names, ran, calls, callee = {}, [], collections.Counter(), None
    for line in open(dump):
        found = re.match(r"^(c?)fn=\((\d+)\) ?(.*)", line)
        if found:
            called, number, name = found.groups()
            if name:
                names[number] = name.strip().split("'")[0]
            if called:
                callee = number
            else:
                ran.append(number)
        elif line.startswith("calls="):
            calls[callee] += int(line[len("calls=") :].split()[0])
    often = collections.Counter()
    for number in set(ran):
        often[names[number]] += calls[number]
    return often


def own(program):
    lines = subprocess.run(["nm", program], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[2] for line in lines if len(line.split()) == 3 and line.split()[1] in "tTwW"}


def record(agent, truebeat, folder):
    gate, probe, engine = free_ports(3)
    model = f"{folder}/model"
    # it makes the model that it measures with, and is stopped before it measures
    making = subprocess.Popen([truebeat, "bench", "--out", folder, "cost"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not os.path.exists(f"{folder}/cost"):
        time.sleep(0.2)
    making.terminate()
    making.wait()
    valgrind = ["valgrind", "--tool=callgrind", "--trace-children=yes", f"--trace-children-skip={truebeat}", "--demangle=no"]
    run = [agent, "run", "--exe", agent, "--no-nvml", "--listen", f"127.0.0.1:{gate}", "--agent-listen", f"127.0.0.1:{probe}"]
    run += ["--engine-url", f"http://127.0.0.1:{engine}", "--bundle-dir", f"{folder}/bundles", "--log", f"{folder}/engine.log", "--"]
    run += [truebeat, "engine", "--model", model, "--listen", f"127.0.0.1:{engine}", "--served-model-name", "demo"]
    with open(f"{folder}/valgrind.log", "w") as log:
        all_of_it = subprocess.Popen(valgrind + [f"--callgrind-out-file={folder}/out.%p"] + run, stdout=log, stderr=log)
    try:
        wait_ready(probe)
        time.sleep(12)
        pids = roles(agent)
        say(f"ready: {pids}")
        for pid in pids.values():
            subprocess.run(["callgrind_control", "-z", str(pid)], stdout=subprocess.DEVNULL, check=True)
        exercise(probe, gate)
        for pid in pids.values():
            subprocess.run(["callgrind_control", "-d", str(pid)], stdout=subprocess.DEVNULL, check=True)
        time.sleep(5)
        known = own(agent)
        ran = {role: functions(f"{folder}/out.{pid}.1") for role, pid in pids.items()}
        return {role: {name: n for name, n in often.items() if name in known} for role, often in ran.items()}
    finally:
        all_of_it.terminate()
        all_of_it.wait()


def main():
    agent, truebeat = (os.path.abspath(path) for path in sys.argv[1:3])
    # whoever ends this ends what it has started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("agent-order: ended"))
    with tempfile.TemporaryDirectory() as folder:
        ran = record(agent, truebeat, folder)
    supervisor, detect, gate = (set(ran[role]) for role in ("supervisor", "detect", "gate"))
    say(", ".join(f"{role}: {len(names)} functions" for role, names in ran.items()))
    groups = [detect - gate - supervisor, (supervisor & detect) - gate, supervisor & detect & gate, (detect & gate) - supervisor]
    groups += [(supervisor & gate) - detect, gate - detect - supervisor, supervisor - detect - gate]
    # by powers of two, so that another recording is much the same
    rarity = {name: -max(often.get(name, 0) for often in ran.values()).bit_length() for group in groups for name in group}
    print("\n".join([HEAD] + [name for group in groups for name in sorted(group, key=lambda name: (rarity[name], name))]))


if __name__ == "__main__":
    main()
