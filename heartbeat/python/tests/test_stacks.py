"""H10: stacks on SIGURG, also while the interpreter's lock is held by native code that never returns."""
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
PRELUDE = "import ctypes, os, sys, time, threading\nfrom truebeat_heartbeat import stacks\nstacks.install(sys.argv[1])\n"
PATIENCE_S = 30


class StacksTest(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.dir = kept.name

    def start(self, body):
        env = dict(os.environ, PYTHONPATH=os.path.join(HERE, ".."))
        child = subprocess.Popen([sys.executable, "-c", PRELUDE + body, self.dir], env=env, stdout=subprocess.PIPE, text=True)
        self.addCleanup(child.stdout.close)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        return child

    def wait(self, what):
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            value = what()
            if value:
                return value
            time.sleep(0.01)
        self.fail("nothing came within %d s" % PATIENCE_S)

    def dump_of(self, pid, name):
        path = os.path.join(self.dir, "stacks-%d.txt" % pid)

        def read():
            # asked again each time: the process answers before it has come to where it will stand
            os.kill(pid, signal.SIGURG)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            return text if name in text else None
        return self.wait(read)

    def marker(self, pid):
        path = os.path.join(self.dir, "stacks-%d.ready" % pid)
        self.wait(lambda: os.path.exists(path))
        with open(path, encoding="ascii") as file:
            return file.read()

    def test_what_processes_that_are_no_more_left_is_removed(self):
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        names = ["stacks-%d.%s" % (pid, ending) for pid in (gone.pid, os.getpid()) for ending in ("ready", "txt")]
        for name in names + ["stacks-x.txt", "rank-0.beat"]:
            with open(os.path.join(self.dir, name), "w", encoding="ascii"):
                pass
        child = self.start("time.sleep(600)\n")
        self.marker(child.pid)
        left = sorted(name for name in os.listdir(self.dir) if str(child.pid) not in name)
        self.assertEqual(left, sorted(names[2:] + ["stacks-x.txt", "rank-0.beat"]))

    def test_a_lock_that_is_never_given(self):
        child = self.start("def waits_for_ever(): lock.acquire()\n"
                           "lock = threading.Lock(); lock.acquire(); waits_for_ever()\n")
        with open("/proc/%d/stat" % child.pid, encoding="ascii") as stat:
            ticks = stat.read().rpartition(")")[2].split()[19]
        self.assertEqual(self.marker(child.pid), "%s faulthandler\n" % ticks)
        self.assertIn("line", self.dump_of(child.pid, "waits_for_ever"))
        self.assertIsNone(child.poll(), "asking must not end the process")

    def test_native_code_that_holds_the_interpreter_s_lock(self):
        child = self.start("def holds_the_lock(): ctypes.PyDLL(None).sleep(10**6)\nholds_the_lock()\n")
        self.marker(child.pid)
        self.dump_of(child.pid, "holds_the_lock")

    def test_a_forked_child_has_a_file_of_its_own(self):
        child = self.start("def parent(): time.sleep(10**6)\n"
                           "def child(): time.sleep(10**6)\n"
                           "if os.fork() == 0:\n    stacks.install(sys.argv[1])\n    print(os.getpid(), flush=True)\n    child()\n"
                           "parent()\n")
        pid = int(child.stdout.readline())
        self.addCleanup(os.kill, pid, signal.SIGKILL)
        self.marker(pid)
        self.assertNotIn("in parent", self.dump_of(pid, "in child"))
        self.assertNotIn("in child", self.dump_of(child.pid, "in parent"))


if __name__ == "__main__":
    unittest.main()
