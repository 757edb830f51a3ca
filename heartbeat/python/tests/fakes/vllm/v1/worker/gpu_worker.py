"""Worker: owns a model runner; samples in a call of its own from 0.12 on, and promises the outcome where scheduling is asynchronous."""
from vllm import VERSION
from vllm.v1.worker.worker_base import WorkerBase

if VERSION >= (0, 32):
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
else:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Worker(WorkerBase):
    def __init__(self, *args):
        super().__init__(*args)
        self.model_runner = GPUModelRunner()

    def load_model(self):
        pass

    def determine_available_memory(self):
        return 1

    def compile_or_warm_up_model(self):
        self.model_runner.capture_model()

    def execute_model(self, scheduler_output):
        output = self.model_runner.execute_model(scheduler_output)
        return None if VERSION >= (0, 12) and scheduler_output.total_num_scheduled_tokens else output

    def sleep(self, level=1):
        pass

    def wake_up(self, tags=None):
        pass


if VERSION >= (0, 12):
    from vllm.v1.outputs import AsyncOutput

    def _sample_tokens(self, grammar_output):
        output = self.model_runner.sampled(grammar_output)
        return AsyncOutput() if self.vllm_config.scheduler_config.async_scheduling else output

    Worker.sample_tokens = _sample_tokens
