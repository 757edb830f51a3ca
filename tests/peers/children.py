"""The two engines as children: a model each, cells timed on command, servers. Everything that starts or ends a process is here."""
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What `make test` builds: with another list cargo would choose other features and build the world once more.
PACKAGES = (ROOT / "tests/packages.txt").read_text().split()
# Loading, and filling 8192 positions, take minutes on a busy machine.
START_S_MAX = 600


def built(name, *how):
    """The program `name` of the engine, which cargo makes with the settings of a release."""
    packages = [f"--package={package}" for package in PACKAGES]
    command = ["cargo", *how, name, "--locked", *packages, "--message-format=json"]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    made = [message for line in lines if (message := json.loads(line)).get("executable")]
    return next(Path(message["executable"]) for message in made if message["target"]["name"] == name)


class Cells:
    """A process that times cells: `ask("decode", setting, depth, tokens)` gives wall and CPU seconds."""

    def __init__(self, program, model, threads, context):
        self.process = subprocess.Popen([program, model, str(threads), str(context)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdout.readline() != "ready\n":
            raise SystemExit(f"{program} cannot load {model}")

    def ask(self, *words):
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if len(answer) != 2:
            raise SystemExit(f"no answer to {words}")
        return float(answer[0]), float(answer[1])

    def end(self):
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def server(command, port, log_path, environment=None):
    """A running server, and the seconds until it said that it is ready. It leads a process group, which ends as a whole."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with open(log_path, "wb") as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | (environment or {}), start_new_session=True)
        try:
            while not healthy(port):
                if process.poll() is not None or time.monotonic() - began > START_S_MAX:
                    raise SystemExit(f"{command[0]} did not start; see {log_path}")
                time.sleep(0.01)
            yield time.monotonic() - began
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def healthy(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
