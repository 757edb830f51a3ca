"""vLLM's log once more, into the file that an agent beside it follows (TRUEBEAT_LOG_FILE): in a pod it reads no container's output.

Every process appends whole lines to one file (O_APPEND), with the head that vLLM's own console has, so that a line is known by its writer.
The agent takes out what it has read; where none does, whoever finds the file too large empties it. A line that finds no room is lost: an
error of this file is nobody's, and no line is written about it.
"""
import logging
import os
import stat
import time

from .hooks import around, log, missing, on_import

VARIABLE = "TRUEBEAT_LOG_FILE"
BYTES_MAX = 8 << 20
LINE_CHARS_MAX = 64 << 10
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


def install(logger_name="vllm"):
    """Adds the file to vLLM's logger, once. Where nobody has configured that logger nothing is added: Python prints the warnings of a
    logger without a handler, and one of ours would end that."""
    path = os.environ.get(VARIABLE)
    logger = logging.getLogger(logger_name)
    if not path or not logger.hasHandlers() or any(getattr(handler, "truebeat", False) for handler in logger.handlers):
        return
    logger.addHandler(LogFile(path))


def follow():
    """vLLM configures its logger again later (its options name a level or a file; a forked process does so first of all), which strips it
    of our handler, and a process loads its plugins once: so the file is added after each time."""
    if os.environ.get(VARIABLE):
        on_import("vllm.logger", _hook)


def _hook(module):
    if not around(module, "_configure_vllm_root_logger", _configured):
        missing("vllm.logger._configure_vllm_root_logger", "where vLLM configures its log again, %s ends there" % VARIABLE)


def _configured(original):
    def configure(*args, **kwargs):
        result = original(*args, **kwargs)
        try:
            install()
        except Exception as error:  # noqa: BLE001: vLLM must not notice
            log.warning("truebeat: the log no longer goes to %s: %r", os.environ.get(VARIABLE), error)
        return result
    return configure


class LogFile(logging.Handler):
    truebeat = True

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.fd = None
        self.setFormatter(Lines())

    def emit(self, record):
        try:
            text = self.format(record).encode("utf-8", "replace")
            if self.fd is None:
                self.fd = _open(self.path)
            os.write(self.fd, text)
            self._bound()
        except Exception:  # noqa: BLE001: whoever logs must not notice
            pass

    def _bound(self):
        """What the agent took out counts no more; whoever appends goes on at the new end."""
        now = os.fstat(self.fd)
        if now.st_blocks * 512 > BYTES_MAX:
            os.ftruncate(self.fd, 0)
        if now.st_nlink == 0:  # somebody took it away
            old, self.fd = self.fd, None
            os.close(old)

    def close(self):
        with self.lock:
            old, self.fd = self.fd, None
            if old is not None:
                os.close(old)
        super().close()


class Lines(logging.Formatter):
    """`(EngineCore pid=7) INFO 11-21 01:04:30 [core.py:871] message`, before each line of it: nothing that a client sent begins one."""

    def format(self, record):
        text = super().format(record)[:LINE_CHARS_MAX]
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
        head = "(%s pid=%d) %s %s [%s:%d] " % (
            record.processName, record.process, record.levelname, at, record.filename, record.lineno)
        return "".join(head + line + "\n" for line in text.splitlines() or [""])


def _open(path):
    fd = os.open(path, _FLAGS, 0o600)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("not a file")
    return fd
