"""Stacks on a signal, with no capability (H10): on SIGURG this process appends the stacks of its threads to stacks-<pid>.txt.

faulthandler writes from the signal handler itself, so it works while the interpreter's lock is held by a loop that never ends.
Names of functions, files and lines only. SIGURG, because its default action is to be ignored: asking the wrong process harms nobody.
"""
import faulthandler
import os
import signal

from .page import start_ticks

SIGNAL = signal.SIGURG
_file = None


def install(directory):
    """Makes this process answer. In a forked child it must be called again: the file is the process's own. Raises OSError."""
    global _file
    pid = os.getpid()
    _sweep(directory)
    path = os.path.join(directory, "stacks-%d.txt" % pid)
    try:
        os.unlink(path)  # of an earlier process with this pid
    except OSError:
        pass
    old, _file = _file, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)
    faulthandler.register(SIGNAL, file=_file, all_threads=True, chain=False)
    if old is not None:
        os.close(old)
    # the marker comes last: whoever sees it may signal
    marker = os.path.join(directory, "stacks-%d.ready" % pid)
    temp = os.path.join(directory, ".stacks-%d.tmp" % pid)
    with open(temp, "w", encoding="ascii") as file:
        file.write("%d faulthandler\n" % start_ticks())
    os.rename(temp, marker)
    return path


def _sweep(directory):
    """Removes what processes left that are no more: the directory lies in memory and is small, and an engine that forks often fills it."""
    for name in os.listdir(directory):
        stem, _, ending = name.partition(".")
        if not (stem.startswith("stacks-") and ending in ("ready", "txt") and stem[7:].isdecimal()):
            continue
        try:
            os.kill(int(stem[7:]), 0)
        except ProcessLookupError:
            try:
                os.unlink(os.path.join(directory, name))
            except OSError:
                pass  # somebody else was faster
        except (OSError, OverflowError):
            pass
