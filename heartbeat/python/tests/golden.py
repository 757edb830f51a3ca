"""Makes rank-1.beat in the directory of its argument from the golden values of heartbeat/tests/golden.rs (H9)."""
import sys

from truebeat_heartbeat import DEADLINE_EXCEEDED, FAILED, OK, PREFILL, Identity, Writer


def run_of(first):
    return bytes(range(first, first + 16))


def make(directory):
    page = Writer(directory, Identity(4242, 123456789, run_of(0), 0x1122334455667788, 1, 2, (run_of(0xA0), run_of(0xC0)), 2))
    beat = dict(tokens_delivered=20002, requests_finished=303, running=4, waiting=5, prompt_tokens_owed=60006, phase=PREFILL,
                phase_tokens=7007, lease_ms=9009, work_done=11, work_total=12)
    page.publish(steps_completed=1, published_ns=1, **beat)
    page.publish(steps_completed=1001, phase_entered_ns=8000000008, step_started_ns=8000000010, published_ns=8000000013, **beat)
    for i in range(256):
        if i == 1:
            page.record(1000, 7000000001, 7000000002, 4, 0, 4, OK, 0xFEEDFACE)
        else:
            page.record(999 + i, 7000000001 + i, 7000000002 + i, 1, 0, 1, FAILED)
    page.record(1256, 7900000001, 7900000002, 4, 7007, 3, DEADLINE_EXCEEDED)


if __name__ == "__main__":
    make(sys.argv[1])
