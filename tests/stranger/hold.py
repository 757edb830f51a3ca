#!/usr/bin/env python3
"""Holds a process as a debugger does: attaches to every thread of it, waits, and lets it go. For proving that a debugged engine is not
taken for a hung one. Linux, standard library only; needs the right to trace (an ancestor has it, root too).

    python3 hold.py PID SECONDS
"""
import ctypes
import os
import sys
import time

PTRACE_ATTACH, PTRACE_DETACH, WALL = 16, 17, 0x40000000


def main():
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    held = []
    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
        if libc.ptrace(PTRACE_ATTACH, tid, None, None) == 0:
            os.waitpid(tid, WALL)
            held.append(tid)
    if pid not in held:
        sys.exit(f"could not attach to {pid}: {os.strerror(ctypes.get_errno())}")
    time.sleep(seconds)
    for tid in held:
        libc.ptrace(PTRACE_DETACH, tid, None, None)


if __name__ == "__main__":
    main()
