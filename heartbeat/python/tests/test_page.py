"""The writer alone: the golden bytes, the ring, what it refuses, and a step's cost."""
import os
import subprocess
import sys
import tempfile
import unittest

import golden
from look import look, records
from truebeat_heartbeat import DECODE, FILE_LEN, Identity, Writer, identity_of_this_process

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "..", "..", "tests", "golden", "page-v1.hex")


def golden_bytes():
    page = bytearray(FILE_LEN)
    with open(GOLDEN, encoding="ascii") as file:
        for line in file:
            if not line.startswith("#"):
                offset, digits = line.split()
                page[int(offset, 16):int(offset, 16) + 16] = bytes.fromhex(digits)
    return bytes(page)


class PageTest(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.dir = kept.name

    def test_golden_bytes(self):
        golden.make(self.dir)
        with open(os.path.join(self.dir, "rank-1.beat"), "rb") as file:
            made = file.read()
        self.assertEqual(len(made), FILE_LEN)
        differing = [at for at, (a, b) in enumerate(zip(made, golden_bytes())) if a != b]
        self.assertEqual(differing, [])

    def test_the_page_is_this_process_s_and_replaces_an_older_one_whole(self):
        first = Writer(self.dir, identity_of_this_process(0, 2))
        first.publish(steps_completed=5)
        inode = os.stat(first.path).st_ino
        second = Writer(self.dir, identity_of_this_process(0, 2))
        self.assertNotEqual(os.stat(second.path).st_ino, inode)
        self.assertEqual(os.listdir(self.dir), ["rank-0.beat"])
        seen = look(second.path)
        self.assertEqual((seen["pid"], seen["seq"], seen["world_size"]), (os.getpid(), 0, 2))

    def test_the_ring_keeps_the_last_256(self):
        page = Writer(self.dir, identity_of_this_process(0, 1))
        for step in range(300):
            page.record(step, step, step + 1, 1, 0, 1)
        self.assertEqual([line["step"] for line in records(page.path)], list(range(44, 300)))

    def test_withdraw_takes_only_its_own_page(self):
        page = Writer(self.dir, Identity(1, 1, bytes(16), 1, 0, 1))
        other = Writer(self.dir, Identity(1, 2, bytes(16), 1, 0, 1))
        page.withdraw()
        self.assertTrue(os.path.exists(other.path))
        other.withdraw()
        self.assertFalse(os.path.exists(other.path))
        other.publish(steps_completed=1, phase=DECODE)  # harmless: nobody reads it any more

    def test_bad_identities_and_directories_are_errors_and_leave_nothing(self):
        good = identity_of_this_process(0, 1)
        for wrong in (dict(pid=0), dict(rank=1), dict(world_size=0), dict(engines=3), dict(boot_id=b"x"), dict(gpu_uuids=(b"x" * 16,) * 9)):
            with self.assertRaises(ValueError):
                Writer(self.dir, good._replace(**wrong))
        with self.assertRaises(OSError):
            Writer(os.path.join(self.dir, "none"), good)
        self.assertEqual(os.listdir(self.dir), [])

    def test_a_full_directory_is_an_error_before_the_first_store(self):
        # a file-size limit stands for a full file system: the write is short, and there must be no page
        code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
                "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192));"
                "from truebeat_heartbeat import *; Writer(sys.argv[1], identity_of_this_process(0, 1))")
        run = subprocess.run([sys.executable, "-c", code, self.dir], env=dict(os.environ, PYTHONPATH=os.path.join(HERE, "..")),
                             capture_output=True, text=True, check=False)
        self.assertIn("full", run.stderr)
        self.assertEqual(os.listdir(self.dir), [])


if __name__ == "__main__":
    unittest.main()
