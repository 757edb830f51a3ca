"""A platform of its own: a worker that derives from vLLM's base class alone, and calls none of the GPU's."""
from vllm import VERSION
from vllm.v1.worker.worker_base import WorkerBase


class NPUWorker(WorkerBase):
    def load_model(self):
        pass

    def determine_available_memory(self):
        return 1

    def compile_or_warm_up_model(self):
        pass

    def execute_model(self, scheduler_output):
        return None if VERSION >= (0, 12) else "output"

    def sample_tokens(self, grammar_output):
        return "output"

    def sleep(self, level=1):
        pass

    def wake_up(self, tags=None):
        pass


class OtherNPUWorker(NPUWorker):
    """Starts up by itself, without its base."""

    def compile_or_warm_up_model(self):
        pass


class Renamed(WorkerBase):
    """Of a version that calls the warm-up something else."""

    def warm_up(self):
        pass
