"""WorkerBase, and the wrapper that (in newer versions) is called for each step."""
from vllm import VERSION


class WorkerBase:
    def __init__(self, vllm_config, local_rank, rank):
        self.vllm_config, self.local_rank, self.rank = vllm_config, local_rank, rank

    def compile_or_warm_up_model(self):
        raise NotImplementedError


class WorkerWrapperBase:
    def __init__(self, worker):
        self.worker = worker

    def __getattr__(self, name):
        return getattr(self.worker, name)


if VERSION >= (0, 12):
    def _sample_tokens(self, grammar_output):
        raise NotImplementedError

    WorkerBase.sample_tokens = _sample_tokens

if VERSION >= (0, 10):
    def _execute_model(self, scheduler_output, *args, **kwargs):
        return self.worker.execute_model(scheduler_output, *args, **kwargs)

    WorkerWrapperBase.execute_model = _execute_model
