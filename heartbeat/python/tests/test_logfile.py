"""TRUEBEAT_LOG_FILE: vLLM's lines reach the agent's file whole, from several processes, and no error of that file reaches vLLM."""
import io
import logging
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from truebeat_heartbeat import logfile

HERE = os.path.dirname(os.path.abspath(__file__))
WRITER = """
import logging, sys
from truebeat_heartbeat import logfile
logging.getLogger("vllm").addHandler(logging.NullHandler())
logfile.install()
for n in range(int(sys.argv[1])):
    logging.getLogger("vllm.engine").error("line %d %s", n, "x" * 500)
"""


class LogFileTest(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.path = os.path.join(kept.name, "engine.log")
        given = mock.patch.dict(os.environ, {logfile.VARIABLE: self.path})
        given.start()
        self.addCleanup(given.stop)
        self.console = io.StringIO()
        self.logger = logging.getLogger("vllm.test-%d" % id(self))
        self.logger.propagate = False
        self.logger.addHandler(logging.StreamHandler(self.console))
        self.addCleanup(self.forget)

    def forget(self):
        for handler in list(self.logger.handlers):
            self.logger.removeHandler(handler)
            handler.close()

    def install(self):
        logfile.install(self.logger.name)

    def lines(self):
        with open(self.path, encoding="utf-8") as file:
            return file.read().splitlines()

    def test_a_line_has_the_head_of_its_writer_once(self):
        self.install()
        self.install()
        self.logger.warning("No available %s\u2028block\nfound in 60 seconds", "shm")
        lines = self.lines()
        self.assertEqual(len(lines), 3, lines)
        head = r"^\(MainProcess pid=%d\) WARNING \d\d-\d\d \d\d:\d\d:\d\d \[test_logfile.py:\d+\] " % os.getpid()
        for line, end in zip(lines, ("No available shm", "block", "found in 60 seconds")):
            self.assertRegex(line, head + end + "$")
        self.assertIn("No available shm", self.console.getvalue())

    def test_an_exception_is_told_whole(self):
        self.install()
        try:
            raise TimeoutError("RPC call to execute_model timed out.")
        except TimeoutError:
            self.logger.exception("EngineCore encountered a fatal error.")
        self.assertRegex(self.lines()[-1], r"\] TimeoutError: RPC call to execute_model timed out\.$")

    def test_nobody_is_read_for_where_nobody_asks_and_python_s_own_words_stay(self):
        del os.environ[logfile.VARIABLE]
        self.install()
        self.assertEqual(len(self.logger.handlers), 1)
        os.environ[logfile.VARIABLE] = self.path
        bare = logging.getLogger("vllm.bare-%d" % id(self))
        bare.propagate = False
        logfile.install(bare.name)
        self.assertEqual(bare.handlers, [], "its warnings go to stderr by themselves")

    def test_no_error_reaches_who_logs(self):
        directory = os.path.dirname(self.path)
        pipe = os.path.join(directory, "pipe")
        os.mkfifo(pipe)
        for path in (os.path.join(directory, "away", "engine.log"), directory, pipe, "/dev/full"):
            with self.subTest(path=path), mock.patch.dict(os.environ, {logfile.VARIABLE: path}):
                self.install()
                with mock.patch("sys.stderr", io.StringIO()) as told:
                    self.logger.error("lost")
                    self.assertEqual(told.getvalue(), "")
                self.logger.removeHandler(self.logger.handlers[-1])
        self.install()
        with mock.patch("sys.stderr", io.StringIO()), mock.patch("os.write", side_effect=OSError(28, "No space left on device")):
            self.logger.error("lost")
        self.logger.error("there is room again")
        self.assertRegex(self.lines()[-1], "there is room again$")
        self.assertEqual(self.console.getvalue().count("lost"), 5)

    def test_a_file_that_is_taken_away_is_made_anew(self):
        self.install()
        self.logger.error("one")
        os.unlink(self.path)
        self.logger.error("two")
        self.logger.error("three")
        self.assertEqual(len(self.lines()), 1)

    def test_several_processes_write_whole_lines_and_the_file_is_bounded(self):
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.path.join(HERE, "..")}):
            writers = [subprocess.Popen([sys.executable, "-B", "-c", WRITER, "500"]) for _ in range(3)]
        self.assertEqual([writer.wait() for writer in writers], [0, 0, 0])
        lines = self.lines()
        self.assertEqual(len(lines), 1500)
        self.assertTrue(all(line.startswith("(MainProcess pid=") and line.endswith("x" * 500) for line in lines))
        self.install()
        with mock.patch.object(logfile, "BYTES_MAX", 64 << 10):
            for n in range(1000):
                self.logger.error("line %d %s", n, "x" * 500)
                self.assertLessEqual(os.stat(self.path).st_size, 64 << 10 if n else 1 << 20)
        self.assertTrue(self.lines()[-1].endswith("x" * 500))

    def test_a_forked_child_goes_on_in_the_same_file(self):
        self.install()
        self.logger.error("parent")
        child = os.fork()
        if child == 0:
            self.logger.error("child")
            os._exit(0)
        os.waitpid(child, 0)
        self.logger.error("parent again")
        pids = [line.partition("pid=")[2].partition(")")[0] for line in self.lines()]
        self.assertEqual(pids, [str(os.getpid()), str(child), str(os.getpid())])


if __name__ == "__main__":
    unittest.main()
