"""Writes the Truebeat heartbeat page: layout version 1, rules H1 to H10 of docs/contracts/heartbeat.md.

    from truebeat_heartbeat import Writer, identity_of_this_process, DECODE
    page = Writer(directory, identity_of_this_process(rank=0, world_size=1))
    page.publish(steps_completed=1, phase=DECODE, ...)

An unmodified vLLM needs none of this: installing the package is enough (see vllm_plugin).
"""
from .page import (CAPTURE, COMPILE, DEADLINE_EXCEEDED, DECODE, DRAIN, FAILED, FILE_LEN, IDLE, LOAD, OK, PREFILL, SLEEP, WARM_UP,
                   Identity, Writer, identity_of_this_process, page_dir)

__all__ = ["CAPTURE", "COMPILE", "DEADLINE_EXCEEDED", "DECODE", "DRAIN", "FAILED", "FILE_LEN", "IDLE", "LOAD", "OK", "PREFILL", "SLEEP",
           "WARM_UP", "Identity", "Writer", "identity_of_this_process", "page_dir"]
