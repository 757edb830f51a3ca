"""A pretend engine with a page, as heartbeat/c/example.c: STEPS steps of MS milliseconds, then idle until end of file on stdin."""
import sys
import time

from truebeat_heartbeat import DECODE, IDLE, Writer, identity_of_this_process, page_dir


def main(steps, step_ms):
    page = Writer(page_dir(), identity_of_this_process(0, 1))
    now = time.monotonic_ns
    entered = now()
    for step in range(1, steps + 1):
        before = dict(running=4, phase=DECODE, phase_entered_ns=entered, lease_ms=1000)
        started = now()
        page.publish(step - 1, 4 * (step - 1), step_started_ns=started, published_ns=started, **before)
        time.sleep(step_ms / 1000)
        ended = now()
        page.record(step, started, ended, 4, 0, 4)
        page.publish(step, 4 * step, published_ns=ended, **before)
    entered = now()
    page.publish(steps, 4 * steps, requests_finished=4, phase=IDLE, phase_entered_ns=entered, lease_ms=1000)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
