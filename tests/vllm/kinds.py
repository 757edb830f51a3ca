"""What is done to a real vLLM, and what must be said of it. `python3 kinds.py` lists the kinds.

Hangs: `signal` stops or kills a process; `hang` goes to the trigger file of the test-only plugin. `classes`: one of them must be the
class of the `Stalled` (where a process is killed, `ProcessDied`, or the verdict is Dead as soon as the front end has ended as well). Benign
kinds must pass without `Suspect`, `Stalled` and `Dead`; `slow_step` says that a fence is allowed (a single step that outlasts all that was
learned), a confirmation is not.
"""
from typing import NamedTuple, Optional, Tuple

STEP = ("StepStalled", "DeviceWait", "AdmissionStalled")


class Kind(NamedTuple):
    """One thing that happens to a server."""

    key: str
    what: str
    group: str  # which server: a name of GROUPS
    signal: Optional[Tuple[str, int, str]] = None  # process, index, STOP or KILL
    first: Optional[Tuple[str, int]] = None  # who is stopped just before, and wakes when all is over
    hang: Optional[str] = None
    idle: bool = False  # no load before; requests come afterwards
    classes: Tuple[str, ...] = ()
    benign: Optional[str] = None  # how the benign thing is done (run.py)
    slow_step: bool = False


KINDS = (
    Kind("idle", "idle for 20 s, then requests", "basic", benign="idle"),
    Kind("pause", "POST /pause for 20 s with requests waiting", "basic", benign="pause"),
    Kind("sleep", "POST /sleep for 20 s with requests waiting", "basic", benign="sleep"),
    Kind("f", "core SIGSTOP under load", "basic", signal=("core", 0, "STOP"), classes=STEP),
    Kind("g", "core SIGSTOP while idle, then requests", "basic", signal=("core", 0, "STOP"), idle=True, classes=STEP),
    Kind("k1", "Python spin in EngineCore.step", "basic", hang="core spin", classes=STEP),
    Kind("k2", "lock in EngineCore.step", "basic", hang="core lock", classes=STEP),
    Kind("k3", "lock in the worker's execute_model", "basic", hang="worker lock", classes=STEP + ("RankSilent",)),
    Kind("k4", "native spin in the worker's execute_model", "basic", hang="worker native", classes=STEP + ("RankSilent",)),
    Kind("k5", "native code in the core that keeps the GIL", "basic", hang="core held", classes=STEP),
    Kind("p1", "the only worker SIGSTOP", "basic", signal=("worker", 0, "STOP"), classes=STEP + ("RankSilent",)),
    Kind("i", "API server SIGSTOP", "basic", signal=("api", 0, "STOP"), classes=("FrontendStalled",)),
    Kind("h", "core SIGKILL", "basic", signal=("core", 0, "KILL"), classes=("Dead", "ProcessDied")),
    Kind("h3", "the only worker SIGKILL", "basic", signal=("worker", 0, "KILL"), classes=("Dead", "ProcessDied")),
    Kind("n", "core SIGKILL behind an API server that stands still", "basic", signal=("core", 0, "KILL"), first=("api", 0),
         classes=("ProcessDied",)),
    Kind("p2", "one of two workers SIGSTOP", "tp2", signal=("worker", 1, "STOP"), classes=STEP + ("RankSilent",)),
    Kind("k3-tp2", "lock in one of two workers", "tp2", hang="worker lock", classes=STEP + ("RankSilent",)),
    Kind("k1-tp2", "Python spin in EngineCore.step above two workers", "tp2", hang="core spin", classes=STEP),
    Kind("f-tp2", "core SIGSTOP above two workers", "tp2", signal=("core", 0, "STOP"), classes=STEP),
    Kind("h3-tp2", "one of two workers SIGKILL", "tp2", signal=("worker", 1, "KILL"), classes=("Dead", "ProcessDied")),
    Kind("c1", "a prompt of 14 000 tokens in a single step", "long", benign="long", slow_step=True),
    Kind("c3", "a prompt of 14 000 tokens in chunks of 512", "chunked", benign="long"),
    Kind("d", "start-up with compilation", "compiled", benign="start"),
    Kind("e", "a cache too small for all requests: preemption", "tight", benign="preempt"),
)

# vllm serve's arguments of each group, and how many ranks
GROUPS = {
    "basic": (1, ["--enforce-eager", "--max-model-len", "4096"]),
    "tp2": (2, ["--enforce-eager", "--max-model-len", "4096"]),
    "long": (1, ["--enforce-eager", "--max-model-len", "16384", "--max-num-batched-tokens", "16384"]),
    "chunked": (1, ["--enforce-eager", "--max-model-len", "16384", "--max-num-batched-tokens", "512", "--enable-chunked-prefill"]),
    "compiled": (1, ["--max-model-len", "4096"]),
    # 24 blocks of 32 tokens (what the attention for processors takes): a quarter of what six requests need in the end
    "tight": (1, ["--enforce-eager", "--max-model-len", "512", "--block-size", "32", "--num-gpu-blocks-override", "24"]),
}

if __name__ == "__main__":
    for kind in KINDS:
        print(f"{kind.key:8} {kind.group:9} {kind.what}")
