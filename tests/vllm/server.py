"""A vLLM behind `truebeat run`: started, asked, signalled and ended. Everything it writes lies in one folder of target/vllm."""
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.dirname(os.path.abspath(__file__))
START_S = 900


class Failure(Exception):
    """What went wrong, in words."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, path, method="GET", timeout=5.0):
    """(status, text), or (None, why)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode("utf-8", "replace")
    except OSError as error:
        return None, repr(error)
    finally:
        connection.close()


class Server:
    """`truebeat run -- vllm serve …` with its own ports and folder."""

    def __init__(self, folder, program, venv, model, plugin_site, tensor_parallel=1, mode="fence", args=()):
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        self.folder = folder
        self.engine_port, self.port, self.agent_port = free_port(), free_port(), free_port()
        self.trigger = os.path.join(folder, "hang")
        self.bundles = os.path.join(folder, "bundles")
        self.log_path = os.path.join(folder, "run.log")
        sites = [os.path.join(HERE, "hang")] + ([plugin_site] if plugin_site else [])
        environment = dict(
            os.environ, PYTHONPATH=":".join(sites), TRUEBEAT_TEST_HANG=self.trigger, VLLM_SERVER_DEV_MODE="1", HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", PYTHONDONTWRITEBYTECODE="1",
            VLLM_CPU_OMP_THREADS_BIND="|".join(str(i % (os.cpu_count() or 1)) for i in range(tensor_parallel)) if tensor_parallel > 1
            else "nobind", LD_PRELOAD="libtcmalloc_minimal.so.4")
        command = [program, "run", "--engine-url", f"http://127.0.0.1:{self.engine_port}", "--listen", f"127.0.0.1:{self.port}",
                   "--agent-listen", f"127.0.0.1:{self.agent_port}", "--bundle-dir", self.bundles, "--no-nvml", "--recovery-mode", mode,
                   "--", os.path.join(venv, "bin", "python"), os.path.join(venv, "bin", "vllm"), "serve", model, "--host", "127.0.0.1",
                   "--port", str(self.engine_port), "--served-model-name", "m", "--load-format", "dummy", "--dtype", "float32",
                   "--enable-server-load-tracking", "-tp", str(tensor_parallel), *args]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGCONT)
            except OSError:
                pass
        if os.path.exists(self.trigger):
            os.unlink(self.trigger)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()

    def verdict(self):
        """The agent's answer, or an empty one."""
        status, text = ask(self.agent_port, "/verdict", timeout=3.0)
        return json.loads(text) if status == 200 else {"verdict": None, "class": None, "fenced": None, "reasons": []}

    def incidents(self):
        status, text = ask(self.agent_port, "/incidents", timeout=3.0)
        return json.loads(text) if status == 200 else []

    def wait(self, what, seconds, until, step_s=0.05):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise Failure(f"truebeat run ended with {self.process.returncode}; see {self.log_path}")
            value = until()
            if value:
                return value
            time.sleep(step_s)
        raise Failure(f"{what}: not within {seconds} s; last verdict {self.verdict()}")

    def wait_serving(self, seconds=START_S):
        """Serving and not fenced; every verdict on the way must be Starting, or one without an alarm."""
        def serving():
            seen = self.verdict()
            if seen["verdict"] in ("Stalled", "Suspect") or (seen["verdict"] == "Dead" and not os.path.exists(self.bundles)):
                raise Failure(f"an alarm while it starts: {seen}")
            return seen["verdict"] in ("Idle", "Progressing") and not seen["fenced"]
        return self.wait("serving", seconds, serving, 0.5)

    def pids(self):
        """All processes of the session below `truebeat run`, the engine's among them."""
        found, children = [], {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stat:
                        parent = int(stat.read().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(name))
                except OSError:
                    continue
        left = [self.process.pid]
        while left:
            for child in children.get(left.pop(), []):
                found.append(child)
                left.append(child)
        return found

    def fresh_detector(self):
        """Ends the agent's detector, which its supervisor starts anew: what the last hang taught it is gone, as after a restart of the
        engine, which in mode `fence` does not happen."""
        for pid in self.pids():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    words = file.read().split(b"\0")
                if words[1:3] == [b"agent", b"detect"]:
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue

    def pid_of(self, who, index=0):
        """`core`, `worker` (index), or `api`."""
        words = {"core": "VLLM::EngineCore", "worker": "VLLM::Worker", "api": f"--port {self.engine_port}"}[who]
        named = []
        for pid in self.pids():
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    line = file.read().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue
            if words in line and "truebeat run" not in line and " agent " not in line:
                named.append((line, pid))
        named.sort()
        if len(named) <= index:
            raise Failure(f"there is no process {who} {index}; named: {named}")
        return named[index][1]
