"""EngineCore and EngineCoreProc with a scheduler that does one chunk of a prompt, or one token, a step."""
import queue
from collections import deque
from types import SimpleNamespace

from vllm import VERSION
from vllm.v1.executor.abstract import MultiprocExecutor

CHUNK = 512
# how the core calls its executor
NON_BLOCK = {"non_block": True} if VERSION >= (0, 12) else {}


class Request:
    def __init__(self, request_id, prompt, tokens):
        self.request_id, self.num_prompt_tokens, self.left = request_id, prompt, tokens
        self.num_computed_tokens = 0


class Scheduler:
    def __init__(self):
        self.requests, self.waiting, self.running = {}, deque(), []
        self.paused = None  # or "new": nothing is taken in, "all": nothing is given a step
        if (0, 18) <= VERSION < (0, 32):
            self.skipped_waiting = deque()
        if VERSION >= (0, 32):
            self.kv_holding_waiting = deque()
            self.num_waiting_for_streaming_input = 0

    def has_unfinished_requests(self):
        return bool(self.running if self.paused == "new" else self.paused is None and self.requests)

    def schedule(self):
        new = list(self.waiting) if self.paused is None else []
        self.running += new
        if new:
            self.waiting.clear()
        counts = {r.request_id: min(CHUNK, max(1, r.num_prompt_tokens - r.num_computed_tokens)) for r in self.running}
        return SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
                               scheduled_spec_decode_tokens={}, scheduled_new_reqs=new)

    def update_from_output(self, output):
        outputs = []
        for request in list(self.running):
            request.num_computed_tokens += output.num_scheduled_tokens[request.request_id]
            if request.num_computed_tokens >= request.num_prompt_tokens:
                request.left -= 1
                outputs.append(SimpleNamespace(new_token_ids=[7]))
            if request.left <= 0:
                self.finish(request.request_id)
        return outputs

    def finish(self, request_id):
        request = self.requests.pop(request_id, None)
        if request in self.running:
            self.running.remove(request)
        elif request is not None:
            self.waiting.remove(request)


class Batches(queue.Queue if VERSION < (0, 11) else deque):
    """The queue of batches: of that kind, and one of its own for the fake."""

    def add(self, batch):
        self.put_nowait(batch) if VERSION < (0, 11) else self.appendleft(batch)

    def take(self):
        return self.get_nowait() if VERSION < (0, 11) else self.pop()

    def count(self):
        return self.qsize() if VERSION < (0, 11) else len(self)


class EngineCore:
    def __init__(self, vllm_config, executor_class=MultiprocExecutor, batch_queue=False):
        self.model_executor = executor_class(vllm_config)
        self._initialize_kv_caches(vllm_config)
        self.scheduler = Scheduler()
        self.batch_queue = Batches() if batch_queue else None
        self.step_fn = self.step_with_batch_queue if batch_queue else self.step

    def _initialize_kv_caches(self, vllm_config):
        pass

    def add_request(self, request, request_wave=0):
        self.scheduler.requests[request.request_id] = request
        self.scheduler.waiting.append(request)

    def abort_requests(self, request_ids):
        for request_id in request_ids:
            self.scheduler.finish(request_id)

    def step(self):
        output = self.scheduler.schedule()
        self.model_executor.execute_model(output, **NON_BLOCK)
        outputs = SimpleNamespace(outputs=self.scheduler.update_from_output(output))
        return outputs if VERSION < (0, 10) else ({0: outputs}, True)

    def step_with_batch_queue(self):
        if self.scheduler.has_unfinished_requests() and not self.batch_queue.count():
            output = self.scheduler.schedule()
            self.model_executor.execute_model(output, **NON_BLOCK)
            self.batch_queue.add(output)
            return None if VERSION < (0, 10) else (None, True)
        outputs = SimpleNamespace(outputs=self.scheduler.update_from_output(self.batch_queue.take()))
        return outputs if VERSION < (0, 10) else ({0: outputs}, True)

    def sleep(self, level=1):
        self.model_executor.is_sleeping = True

    def wake_up(self, tags=None):
        self.model_executor.is_sleeping = False

    def is_sleeping(self):
        return self.model_executor.is_sleeping

    def shutdown(self):
        pass


class EngineCoreProc(EngineCore):
    def _process_engine_step(self):
        self.step_fn()
        return None if VERSION < (0, 10) else True

    def run_busy_loop(self):
        pass

    def _handle_client_request(self, request_type, request):
        if request_type.name == "UTILITY":
            name, args = request
            return getattr(self, name)(*args)
        return self.add_request(request)

    def add_lora(self, load):
        load()


if VERSION >= (0, 10):
    def _preprocess_add_request(self, request):
        return request, 0

    EngineCore.preprocess_add_request = _preprocess_add_request

if VERSION >= (0, 18):
    def _pause_scheduler(self, mode="abort"):
        self.scheduler.paused = "all" if mode == "keep" else "new"

    def _resume_scheduler(self):
        self.scheduler.paused = None

    EngineCoreProc.pause_scheduler = _pause_scheduler
    EngineCore.resume_scheduler = _resume_scheduler
    EngineCore.is_scheduler_paused = lambda self: self.scheduler.paused is not None
