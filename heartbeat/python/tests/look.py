"""Reads a page as a person would: `python3 look.py FILE…`. For tests and for a look at a live engine; agents use heartbeat::Reader."""
import struct
import sys

PHASES = ["?", "load", "compile", "capture", "warm-up", "idle", "prefill", "decode", "sleep", "drain"]
IDENTITY = ["pid", "rank", "world_size", "engines"]
BEAT = ["steps_completed", "tokens_delivered", "requests_finished", "running", "waiting", "prompt_tokens_owed", "phase", "phase_tokens",
        "phase_entered_ns", "lease_ms", "reserved", "step_started_ns", "work_done", "work_total", "published_ns"]
RECORD = ["step", "started_ns", "ended_ns", "requests", "prefill_tokens", "decode_tokens", "outcome", "graph_key"]


def look(path):
    """The page as a dictionary; the phase by name."""
    with open(path, "rb") as file:
        page = file.read()
    seen = dict(zip(IDENTITY, struct.unpack_from("<4I", page, 32)))
    seen["seq"], = struct.unpack_from("<Q", page, 256)
    seen.update(zip(BEAT, struct.unpack_from("<QQQIIQIIQIIQQQQ", page, 264)))
    seen["phase"] = PHASES[seen["phase"]]
    return seen


def records(path):
    """The flight recorder, oldest first."""
    with open(path, "rb") as file:
        page = file.read()
    slots = [struct.unpack_from("<Q", page, at) + struct.unpack_from("<QQQIIIIQ", page, at + 8) for at in range(4096, len(page), 64)]
    return [dict(zip(RECORD, slot[1:])) for slot in sorted(slots) if slot[0]]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, look(name))
