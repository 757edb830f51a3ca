"""EngineCore and EngineCoreProc with a scheduler that does one chunk of a prompt, or one token, a step.

With a queue of batches up to two are under way, as in the wheels: before 0.12 for pipelines, where a request that decodes is not given its
next token before it has the last one; since then (asynchronous scheduling) it is.
"""
import queue
from collections import deque
from types import SimpleNamespace

from vllm import VERSION
from vllm.v1.executor.abstract import MultiprocExecutor

CHUNK = 512
BATCHES = 2
OVERLAPS = VERSION >= (0, 12)
# how the core calls its executor
NON_BLOCK = {"non_block": True} if VERSION >= (0, 12) else {}


class Request:
    """`stops_at`: the model says so then, which nobody knows before."""

    def __init__(self, request_id, prompt, tokens, stops_at=0):
        self.request_id, self.num_prompt_tokens, self.left = request_id, prompt, tokens
        self.ends_at = tokens - stops_at if stops_at else 0
        self.num_computed_tokens = self.decodes = 0


class Scheduler:
    def __init__(self):
        self.requests, self.waiting, self.running = {}, deque(), []
        self.finished = set()
        self.paused = None  # or "new": nothing is taken in, "all": nothing is given a step
        if (0, 18) <= VERSION < (0, 32):
            self.skipped_waiting = deque()
        if VERSION >= (0, 32):
            self.kv_holding_waiting = deque()
            self.num_waiting_for_streaming_input = 0

    def has_unfinished_requests(self):
        return bool(self.running if self.paused == "new" else self.paused is None and self.requests)

    def has_requests(self):
        return self.has_unfinished_requests() or bool(self.finished)

    def add_request(self, request):
        session = self.requests.get(request.request_id)
        if session is not None:  # the next part of a prompt that is streamed
            session.num_prompt_tokens = session.num_computed_tokens + request.num_prompt_tokens
            return
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self):
        new = list(self.waiting) if self.paused is None else []
        self.running += new
        if new:
            self.waiting.clear()
        counts, brings = {}, set()
        for request in self.running:
            owed = request.num_prompt_tokens - request.num_computed_tokens
            if owed <= 0 and request.decodes >= (request.left if OVERLAPS else 1):
                continue
            count = counts[request.request_id] = min(CHUNK, max(1, owed))
            request.num_computed_tokens += count
            if owed <= count:
                request.decodes += 1
                brings.add(request.request_id)
        finished, self.finished = self.finished, set()
        return SimpleNamespace(num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), brings=brings,
                               scheduled_spec_decode_tokens={}, scheduled_new_reqs=new, finished_req_ids=finished)

    def update_from_output(self, output):
        outputs = []
        for request in list(self.running):
            if request.request_id in output.brings:
                request.decodes -= 1
                request.left -= 1
                outputs.append(SimpleNamespace(new_token_ids=[7]))
            if request.left <= request.ends_at:
                self.finish(request.request_id)
        return outputs

    def finish(self, request_id):
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.finished.add(request_id)
        if request in self.running:
            self.running.remove(request)
        elif request is not None:
            self.waiting.remove(request)


class Batches(queue.Queue if VERSION < (0, 11) else deque):
    """The queue of batches: of that kind, and one of its own for the fake."""

    def add(self, batch):
        self.put_nowait(batch) if VERSION < (0, 11) else self.appendleft(batch)

    def is_full(self):
        return self.count() >= BATCHES

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
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids):
        for request_id in request_ids:
            self.scheduler.finish(request_id)

    def step(self):
        output = self.scheduler.schedule()
        self.model_executor.execute_model(output, **NON_BLOCK)
        outputs = SimpleNamespace(outputs=self.scheduler.update_from_output(output))
        return outputs if VERSION < (0, 10) else ({0: outputs}, True)

    def step_with_batch_queue(self):
        if self.hands_out():
            return None if VERSION < (0, 10) else (None, True)
        output = self.batch_queue.take()
        self.comes_back(output)
        outputs = SimpleNamespace(outputs=self.scheduler.update_from_output(output))
        return outputs if VERSION < (0, 10) else ({0: outputs}, True)

    def hands_out(self):
        """The next batch, before the last one is back. Says whether the step ends with that."""
        if self.batch_queue.is_full() or not (self.scheduler.has_requests() if OVERLAPS else self.scheduler.has_unfinished_requests()):
            return False
        output = self.scheduler.schedule()
        if output.total_num_scheduled_tokens or OVERLAPS:
            self.model_executor.execute_model(output, **NON_BLOCK)
            self.batch_queue.add(output)
        return bool(output.total_num_scheduled_tokens and not (OVERLAPS and self.batch_queue.is_full()))

    def comes_back(self, output):
        """The core waits for this batch."""

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
