"""The page itself: identity, beat and flight recorder as bytes in a shared mapping (H1 to H7).

Touches one file in the page directory and reads /proc of its own process. Publishing is two stores of a sequence word around one
packing of the payload: no lock, no system call, and nothing that waits for a reader (H7).
"""
import ctypes
import mmap
import os
import platform
import struct
import sys
import time
from typing import NamedTuple, Tuple

MAGIC = b"TRUEBEAT"
VERSION = 1
HEADER_LEN = 4096
RING_LEN = 256
RECORD_LEN = 64
FILE_LEN = HEADER_LEN + RING_LEN * RECORD_LEN
BEAT_OFFSET = 256
GPUS_MAX = 8
DEFAULT_DIR = "/run/truebeat"

LOAD, COMPILE, CAPTURE, WARM_UP, IDLE, PREFILL, DECODE, SLEEP, DRAIN = range(1, 10)
OK, FAILED, DEADLINE_EXCEEDED = 1, 2, 3

# Native alignment and order: struct then copies each value whole, as H7 wants. The page is little-endian, so is the machine.
BEAT = struct.Struct("@QQQIIQIIQIIQQQQ")
RECORD = struct.Struct("@QQQIIIIQ")
_pack_record = RECORD.pack_into
BEAT_SEQ = BEAT_OFFSET // 8
BEAT_PAYLOAD = BEAT_OFFSET + 8


class Identity(NamedTuple):
    """Whose page it is (H2)."""

    pid: int
    pid_start_ticks: int
    boot_id: bytes
    nonce: int
    rank: int
    world_size: int
    gpu_uuids: Tuple[bytes, ...] = ()
    engines: int = 0  # data-parallel engines that share the ranks out; 0 counts as 1


def page_dir():
    """Where pages go: TRUEBEAT_PAGE_DIR, or the default if it is there, or None: nobody watches."""
    given = os.environ.get("TRUEBEAT_PAGE_DIR")
    if given:
        return given
    return DEFAULT_DIR if os.path.isdir(DEFAULT_DIR) else None


def start_ticks():
    """When this process started (field 22 of its stat), in clock ticks after boot."""
    with open("/proc/self/stat", "rb") as stat:
        # the name in brackets may hold anything, also brackets
        return int(stat.read().rpartition(b")")[2].split()[19])


def identity_of_this_process(rank, world_size, gpu_uuids=(), engines=0):
    """The calling process's identity; the nonce is TRUEBEAT_NONCE, or 0."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
    nonce = int(os.environ.get("TRUEBEAT_NONCE") or 0)
    return Identity(os.getpid(), start_ticks(), boot_id, nonce, rank, world_size, tuple(gpu_uuids), engines)


def memory_fence():
    """What orders the odd sequence before the payload: None where the processor does (x86), else a function.

    Raises OSError where neither is the case: no page is better than one that tears.
    """
    if platform.machine().lower() in ("x86_64", "amd64"):
        return None
    fence = ctypes.PyDLL("libatomic.so.1").atomic_thread_fence
    fence.argtypes, fence.restype = [ctypes.c_int], None
    sequentially_consistent = 5
    return lambda: fence(sequentially_consistent)


class Writer:
    """The one writer of a rank's page. One thread publishes. The file stays when the process ends: it is evidence."""

    # `buffer`, `words`, `seq` and `fence` are for a subclass in a hurry (vllm_core_page), which does what `publish` does in place
    __slots__ = ("path", "buffer", "words", "seq", "records", "fence")

    def __init__(self, directory, identity):
        """Makes rank-<n>.beat in `directory`, over an older one and whole at once (H1). Raises ValueError or OSError."""
        if sys.byteorder != "little":
            raise OSError("the heartbeat page is written on little-endian machines only")
        _check(identity)
        self.fence = memory_fence()
        self.path = os.path.join(directory, "rank-%d.beat" % identity.rank)
        temp = os.path.join(directory, ".rank-%d.beat.%d.tmp" % (identity.rank, os.getpid()))
        _remove(temp)
        file = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            # real bytes: a hole on a full tmpfs is a SIGBUS at the first store, a short write is an error now
            if os.write(file, fresh_page(identity)) != FILE_LEN:
                raise OSError("the page directory %s is full" % directory)
            self.buffer = mmap.mmap(file, FILE_LEN, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            os.rename(temp, self.path)
        except BaseException:
            _remove(temp)
            raise
        finally:
            os.close(file)
        self.words = memoryview(self.buffer).cast("Q")
        self.seq = 0
        self.records = 0

    def publish(self, steps_completed=0, tokens_delivered=0, requests_finished=0, running=0, waiting=0, prompt_tokens_owed=0,
                phase=IDLE, phase_tokens=0, phase_entered_ns=0, lease_ms=0, step_started_ns=0, work_done=0, work_total=0,
                published_ns=None):
        """Makes this the page's state, as one unit. Counters must not go back, and no time may be after `published_ns` (H3, H5)."""
        if published_ns is None:
            published_ns = time.monotonic_ns()
        seq = self.seq + 2
        self.seq = seq
        self.words[BEAT_SEQ] = seq - 1
        if self.fence is not None:
            self.fence()
        BEAT.pack_into(self.buffer, BEAT_PAYLOAD, steps_completed, tokens_delivered, requests_finished, running, waiting,
                       prompt_tokens_owed, phase, phase_tokens, phase_entered_ns, lease_ms, 0, step_started_ns, work_done, work_total,
                       published_ns)
        if self.fence is not None:
            self.fence()
        self.words[BEAT_SEQ] = seq

    def record(self, step, started_ns, ended_ns, requests, prefill_tokens, decode_tokens, outcome=OK, graph_key=0):
        """Adds a line to the flight recorder, over the oldest of the last 256 (H6)."""
        slot = HEADER_LEN + self.records % RING_LEN * RECORD_LEN
        self.records += 1
        seq = 2 * self.records
        words, fence = self.words, self.fence
        words[slot // 8] = seq - 1
        if fence is not None:
            fence()
        _pack_record(self.buffer, slot + 8, step, started_ns, ended_ns, requests, prefill_tokens, decode_tokens, outcome, graph_key)
        if fence is not None:
            fence()
        words[slot // 8] = seq

    def withdraw(self):
        """Takes the page away: no page is better than one that nobody keeps true any more."""
        try:
            same = os.stat(self.path).st_ino and self._is_mine()
        except OSError:
            return
        if same:
            _remove(self.path)

    def _is_mine(self):
        with open(self.path, "rb") as file:
            return file.read(BEAT_OFFSET) == self.buffer[:BEAT_OFFSET]


def fresh_page(identity):
    """The file before its first beat: identity in place, all sequence words 0."""
    page = bytearray(FILE_LEN)
    page[:8] = MAGIC
    struct.pack_into("<10I", page, 8, VERSION, HEADER_LEN, FILE_LEN, RING_LEN, RECORD_LEN, len(identity.gpu_uuids), identity.pid,
                     identity.rank, identity.world_size, identity.engines)
    struct.pack_into("<QQ16s", page, 48, identity.pid_start_ticks, identity.nonce, identity.boot_id)
    for i, uuid in enumerate(identity.gpu_uuids):
        page[80 + 16 * i:96 + 16 * i] = uuid
    return bytes(page)


def _check(identity):
    bad = None
    if not 0 < identity.pid < 2**31:
        bad = "pid"
    elif not 0 <= identity.rank < identity.world_size < 2**32:
        bad = "rank or world_size"
    elif identity.engines < 0 or identity.world_size % max(identity.engines, 1):
        bad = "engines"
    elif len(identity.gpu_uuids) > GPUS_MAX or any(len(uuid) != 16 for uuid in identity.gpu_uuids):
        bad = "gpu_uuids"
    elif len(identity.boot_id) != 16:
        bad = "boot_id"
    if bad:
        raise ValueError("%s of the page's identity is out of bounds (H2): %r" % (bad, identity))


def _remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass
