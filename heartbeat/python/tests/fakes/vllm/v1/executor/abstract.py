"""Executor: hands batches to the workers, here by a call."""


class Executor:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        self.worker = None
        self.is_sleeping = False

    def execute_model(self, scheduler_output, non_block=False):
        return self.worker.execute_model(scheduler_output) if self.worker else "output"


class MultiprocExecutor(Executor):
    pass


class UniProcExecutor(Executor):
    pass
