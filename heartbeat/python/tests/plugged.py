"""A test with a page directory, what the plugin logs, and a fake vLLM that is forgotten afterwards."""
import logging
import os
import tempfile
import unittest

import fake
from look import look


class Plugged(unittest.TestCase):
    def setUp(self):
        kept = tempfile.TemporaryDirectory()
        self.addCleanup(kept.cleanup)
        self.dir = kept.name
        self.told = []
        self.listen()
        self.addCleanup(fake.forget)

    def listen(self):
        handler = logging.Handler()
        handler.emit = lambda record: self.told.append(record.getMessage())
        logger = logging.getLogger("vllm.truebeat")
        logger.addHandler(handler)
        logger.propagate = False
        self.addCleanup(logger.removeHandler, handler)

    def page(self, rank=0):
        return look(os.path.join(self.dir, "rank-%d.beat" % rank))

    def pages(self):
        return sorted(name for name in os.listdir(self.dir) if name.endswith(".beat"))
