"""AsyncModelRunnerOutput (from 0.12): a promise of a step's output, which a thread of its own collects, of one rank alone."""
import threading
from abc import ABC, abstractmethod


class AsyncModelRunnerOutput(ABC):
    @abstractmethod
    def get_output(self):
        pass


class AsyncOutput(AsyncModelRunnerOutput):
    """`done`: the device is through with the step; `fault`: with an error."""

    def __init__(self):
        self.done, self.fault = threading.Event(), None

    def get_output(self):
        self.done.wait()
        if self.fault is not None:
            raise self.fault
        return "output"
