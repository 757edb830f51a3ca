"""TRUEBEAT_LOG_FILE: vLLM's lines reach the agent's file whole, from several processes, and no error of that file reaches vLLM."""
import importlib
import io
import logging
import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import fake
from plugged import Plugged
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


class FollowTest(Plugged):
    """vLLM configures its log again after it has loaded its plugins."""

    def test_the_log_goes_where_the_agent_reads_it_after_vllm_configured_it_again(self):
        path = os.path.join(self.dir, "engine.log")
        self.addCleanup(logging.getLogger("vllm").handlers.clear)
        for imported_before in (True, False):
            with self.subTest(imported_before=imported_before), mock.patch.dict(os.environ, {"TRUEBEAT_LOG_FILE": path}):
                fake.load("0.32.0", self.dir, lambda modules: self.vllm_s_log() if imported_before else None)
                log = self.vllm_s_log()
                for number in range(3):
                    log.configure_logging("INFO")
                    log.init_logger("vllm.v1.engine.core").error("line %d of %s", number, imported_before)
                with open(path, encoding="utf-8") as file:
                    text = file.read()
                self.assertEqual([text.count("line %d of %s" % (number, imported_before)) for number in range(3)], [1, 1, 1])

    def vllm_s_log(self):
        module = importlib.import_module("vllm.logger")
        if not logging.getLogger("vllm").handlers:
            module._configure_vllm_root_logger()  # as it does when it is imported
        return module

    def test_a_forked_process_that_configures_its_log_is_heard(self):
        path = os.path.join(self.dir, "engine.log")
        self.addCleanup(logging.getLogger("vllm").handlers.clear)
        with mock.patch.dict(os.environ, {"TRUEBEAT_LOG_FILE": path}):
            fake.load("0.32.0", self.dir, lambda modules: self.vllm_s_log())
            child = os.fork()
            if child == 0:
                log = sys.modules["vllm.logger"]
                log.configure_logging("INFO")
                log.init_logger("vllm.v1.engine.core").error("EngineCore encountered a fatal error.")
                os._exit(0)
            os.waitpid(child, 0)
        with open(path, encoding="utf-8") as file:
            self.assertRegex(file.read(), r"pid=%d\) ERROR .*EngineCore encountered a fatal error\.\n$" % child)

    def test_an_error_of_vllm_s_is_its_own_and_one_of_ours_is_nobody_s(self):
        self.addCleanup(logging.getLogger("vllm").handlers.clear)
        with mock.patch.dict(os.environ, {"TRUEBEAT_LOG_FILE": os.path.join(self.dir, "engine.log")}):
            fake.load("0.32.0", self.dir)
            log = self.vllm_s_log()
            with self.assertRaises(ValueError):
                log.configure_logging("no such level")
            logfile = sys.modules["truebeat_heartbeat.logfile"]
            with mock.patch.object(logfile, "LogFile", side_effect=KeyError("ours")), mock.patch.object(logfile, "log") as told:
                log.configure_logging("INFO")
        self.assertIn("the log no longer goes to", told.warning.call_args.args[0])

    def test_a_version_that_configures_its_log_otherwise_is_told_where_somebody_reads_it(self):
        def rename(modules):
            del self.vllm_s_log()._configure_vllm_root_logger
            self.listen()  # vLLM's configuration takes our handler away as well
        self.addCleanup(logging.getLogger("vllm").handlers.clear)
        for path, told in ((os.path.join(self.dir, "engine.log"), 1), ("", 0)):
            self.told.clear()
            with mock.patch.dict(os.environ, {"TRUEBEAT_LOG_FILE": path}):
                fake.load("0.32.0", self.dir, rename, register_first=False)
            self.assertEqual(sum("_configure_vllm_root_logger" in line for line in self.told), told)


if __name__ == "__main__":
    unittest.main()
