"""A vLLM plugin for tests alone: hangs the engine core or a worker when a file appears, until the file is gone.

The file is named by TRUEBEAT_TEST_HANG and holds WHO HOW: `core spin`, `core lock`, `core held` (native code that keeps the
interpreter's lock most of the time), `worker lock`, `worker native` (gives it up) or `worker nap` (a step of 40 s that ends by
itself). The hung process writes its CLOCK_MONOTONIC to FILE.hung. Of several workers the last one hangs. Nothing of Truebeat is in
here or needed by it.
"""
import ctypes
import os
import threading
import time

FILE = os.environ.get("TRUEBEAT_TEST_HANG", "")
NAP_S = 40


def register():
    if not FILE:
        return
    import vllm.v1.engine.core as core
    for name in ("step", "step_with_batch_queue"):
        _wrap(core.EngineCore, name, lambda self: True, "core")
    # workers load plugins before their class is looked up
    import vllm.v1.worker.gpu_worker as worker
    _wrap(worker.Worker, "execute_model", lambda self: self.rank == self.parallel_config.world_size - 1, "worker")


def _wrap(cls, name, is_it, who):
    original = getattr(cls, name)

    def wrapped(self, *args, **kwargs):
        if os.path.exists(FILE) and is_it(self):
            _hang(who)
        return original(self, *args, **kwargs)
    setattr(cls, name, wrapped)


def _hang(who):
    try:
        with open(FILE, encoding="ascii") as file:
            wanted, how = file.read().split()
    except (OSError, ValueError):
        return
    if wanted != who:
        return
    with open(FILE + ".tmp", "w", encoding="ascii") as file:
        file.write(str(time.monotonic()))
    os.rename(FILE + ".tmp", FILE + ".hung")
    HOW[how]()


def hangs_in_python():
    while os.path.exists(FILE):
        pass


def hangs_on_a_lock():
    lock = threading.Lock()
    lock.acquire()

    def give_back():
        while os.path.exists(FILE):
            time.sleep(0.2)
        lock.release()
    threading.Thread(target=give_back, daemon=True).start()
    lock.acquire()


def hangs_in_native_code(library):
    """Inverts the bits of 64 MiB in C, over and over."""
    library.memfrob.restype = None
    block = ctypes.create_string_buffer(64 << 20)
    while os.path.exists(FILE):
        for _ in range(20):
            library.memfrob(block, len(block))


def naps():
    time.sleep(NAP_S)
    os.unlink(FILE)


HOW = {"spin": hangs_in_python, "lock": hangs_on_a_lock, "native": lambda: hangs_in_native_code(ctypes.CDLL(None)),
       "held": lambda: hangs_in_native_code(ctypes.PyDLL(None)), "nap": naps}
