"""Hooks in vLLM's engine core: the page that says what is owed, delivered and under way.

The core's main thread alone publishes. A step is published when it begins (so a hang in the scheduler shows), again when a batch
with prompt tokens is handed to the workers (its size scales the lease), and when it ends. An exception of ours takes the page away
and leaves the engine alone.
"""
import os
import struct
import time
from collections import deque

from .hooks import around, log, missing, ours
from .page import (BEAT, BEAT_PAYLOAD, BEAT_SEQ, DECODE, FAILED, IDLE, LOAD, OK, PREFILL, SLEEP, WARM_UP, Writer,
                   identity_of_this_process, page_dir)

# How long a phase may last as far as anybody can say who does not know the machine (H5.3); readers cap it and learn the rest.
STEP_LEASE_MS = int(os.environ.get("TRUEBEAT_STEP_LEASE_MS") or 120_000)
TOKEN_LEASE_US = int(os.environ.get("TRUEBEAT_TOKEN_LEASE_US") or 10_000)
STARTUP_LEASE_MS = 900_000
LEASE_MS_MAX = 2**32 - 1

_beat = None
_now = time.monotonic_ns
_pack = BEAT.pack_into
_pack_start = struct.Struct("@QQQQ").pack_into
_START = BEAT_PAYLOAD + 64  # step_started, work_done, work_total, published


def _brought(output):
    """How many tokens an output is; one that is a whole answer without any (an embedding, a score) counts as one."""
    return len(output.new_token_ids) or getattr(output, "pooling_output", None) is not None


def lease_ms(tokens):
    """The lease of a step with this many prompt tokens."""
    return min(STEP_LEASE_MS + tokens * TOKEN_LEASE_US // 1000, LEASE_MS_MAX)


def place(vllm_config, executor_class, worker=None):
    """(rank, world size, engines) of a page: the core is 0, worker k is k + 1, and data-parallel engines follow one another.

    Newer versions tell the engines of a dense model that each is the only one, and leave no more than its index: as many as that are known.
    """
    parallel = vllm_config.parallel_config
    alone = executor_class is not None and any("UniProc" in cls.__name__ for cls in executor_class.__mro__)
    workers = 0 if alone else int(parallel.world_size)
    index = max(int(getattr(parallel, name, 0) or 0) for name in ("data_parallel_rank", "data_parallel_index"))
    engines = max(1, int(getattr(parallel, "data_parallel_size", 1) or 1), index + 1)
    rank = index * (1 + workers) + (0 if worker is None else 1 + int(worker))
    return rank, engines * (1 + workers), engines


def _batches(queue):
    """How many batches wait in the engine's queue: a queue.Queue up to 0.10, a deque since."""
    size = getattr(queue, "qsize", None)
    return len(queue) if size is None else size()


def is_here():
    """Does this process hold an engine core, with a page or without?"""
    return _CORE["here"]


def forget():
    """In a forked child: the parent's core and its page are not ours."""
    global _beat
    _beat = None
    _CORE["here"] = False


class CoreBeat(Writer):
    """The core's page: what it says, and the ways in which that changes."""

    __slots__ = ("steps", "tokens", "finished", "admitted", "owed", "owing", "phase", "entered", "flight", "flight_tokens",
                 "counted", "asleep", "started", "queues", "parks", "extra", "live", "decodes")

    def __init__(self, directory, identity):
        super().__init__(directory, identity)
        self.steps = self.tokens = self.finished = self.admitted = self.owed = 0
        self.owing = {}  # request id -> prompt tokens that no step has taken yet
        self.decodes = None  # (running, waiting) where the page says: between two steps of decode, nothing else known since
        self.phase, self.entered = LOAD, _now()
        # batches handed out and not come back: (when, prompt tokens, decode tokens, requests, ids that owe; None: a token each at most)
        self.flight = deque()
        self.flight_tokens = self.started = self.extra = 0
        self.counted = self.asleep = False
        self.queues = None
        self.parks = False
        self.live = True
        self.publish_phase(LOAD, STARTUP_LEASE_MS)

    def says(self, now, running, waiting, phase, tokens, lease, started):
        """`publish`, in place: this is on the way of every step."""
        self.decodes = None
        if phase != self.phase:
            self.phase, self.entered = phase, now
        words, fence = self.words, self.fence
        self.seq = seq = self.seq + 2
        words[BEAT_SEQ] = seq - 1
        if fence is not None:
            fence()
        _pack(self.buffer, BEAT_PAYLOAD, self.steps, self.tokens, self.finished, running, waiting, self.owed, phase, tokens,
              self.entered, lease, 0, started, 0, 0, now)
        if fence is not None:
            fence()
        words[BEAT_SEQ] = seq

    def publish_phase(self, phase, lease=0):
        self.says(_now(), 0, 0, phase, 0, lease, 0)

    def begins(self, engine):
        """A step of the busy loop begins."""
        scheduler = engine.scheduler
        if self.queues is None:
            self.prepare(engine)
        now = self.started = _now()
        # requests come by way of `waiting`; what else waits was counted when the last step ended
        running, waiting = len(scheduler.running), len(scheduler.waiting) + self.extra
        if self.decodes == (running, waiting):
            # all but the step's start stands there already
            words, fence = self.words, self.fence
            self.seq = seq = self.seq + 2
            words[BEAT_SEQ] = seq - 1
            if fence is not None:
                fence()
            _pack_start(self.buffer, _START, now, 0, 0, now)
            if fence is not None:
                fence()
            words[BEAT_SEQ] = seq
            return
        tokens = self.flight_tokens
        self.says(now, running, waiting, PREFILL if tokens else DECODE, tokens and self.prompt(),
                  lease_ms(tokens) if tokens else STEP_LEASE_MS, now)

    def prepare(self, engine):
        """At the first step, or the first rest before it: which queues this version has, and a hand on what goes to the workers."""
        self.queues = tuple(name for name in ("skipped_waiting", "kv_holding_waiting") if hasattr(engine.scheduler, name))
        # sessions that stream their prompts wait in those queues for their clients; no step is owed to them, and none is begun
        self.parks = hasattr(engine.scheduler, "num_waiting_for_streaming_input")
        executor = engine.model_executor
        original = getattr(executor, "execute_model", None)
        if original is None:
            missing("Executor.execute_model", "steps are counted by the loop, without their size")
            return

        def execute_model(scheduler_output, *args, **kwargs):
            try:
                if self.live:
                    self.launches(engine, scheduler_output)
            except Exception as error:  # noqa: BLE001
                self.gives_up(error)
            return original(scheduler_output, *args, **kwargs)

        executor.execute_model = execute_model
        self.counted = True

    def launches(self, engine, output):
        """A batch goes to the workers. Only one with prompt tokens changes what the page says."""
        scheduled = output.num_scheduled_tokens
        total, requests = output.total_num_scheduled_tokens, len(scheduled)
        if total == requests and not self.owing:
            self.flight.append((self.started, 0, total, requests, None))
            return
        spec = output.scheduled_spec_decode_tokens
        drafted = sum(map(len, spec.values())) if spec else 0
        owing = tuple(self.owing.keys() & scheduled.keys())
        tokens = 0
        if owing or total > requests + drafted:
            tokens = max(0, total - (requests - len(owing)) - drafted)
        now = _now()
        self.flight.append((now, tokens, total - tokens, requests, owing))
        if tokens:
            self.flight_tokens += tokens
            scheduler = engine.scheduler
            self.says(now, len(scheduler.running), self.waiting(scheduler), PREFILL, self.prompt(),
                      lease_ms(self.flight_tokens), self.started)

    def prompt(self):
        """Prompt tokens of the step that is the next one of its kind to end: batches come back one after another."""
        for _, tokens, *_ in self.flight:
            if tokens:
                return tokens
        return 0

    def serves(self, engine):
        """A call that is no request begins (an adapter, weights, a profile): no step is begun before it ends, which may take long."""
        if self.started == 0 and not self.asleep:
            if self.queues is None:
                self.prepare(engine)
            now, scheduler = _now(), engine.scheduler
            self.says(now, len(scheduler.running), self.waiting(scheduler), LOAD, 0, STARTUP_LEASE_MS, now)

    def served(self, engine):
        if self.started == 0 and self.queues is not None:
            scheduler, tokens = engine.scheduler, self.flight_tokens
            running, waiting = len(scheduler.running), self.waiting(scheduler)
            if running or waiting or self.flight:
                phase = SLEEP if self.asleep and (not running or self.kept(scheduler)) else PREFILL if tokens else DECODE
                self.says(_now(), running, waiting, phase, self.prompt(), lease_ms(tokens) if tokens else STEP_LEASE_MS, 0)
            else:
                self.says(_now(), 0, 0, SLEEP if self.asleep else IDLE, 0, 0, 0)

    def waiting(self, scheduler):
        waiting = len(scheduler.waiting) + sum(len(getattr(scheduler, name)) for name in self.queues)
        return max(0, waiting - scheduler.num_waiting_for_streaming_input) if self.parks else waiting

    def counts(self, out):
        """What a step function returned: outputs by client, or (vLLM 0.8) one set of outputs."""
        if type(out) is tuple:
            out = out[0]
        if not out:
            return
        flight = self.flight
        # each token of a batch that decodes is an output of its own; more outputs than it had requests are errors of others
        most = flight[0][3] if flight and flight[0][4] is None else 0
        for outputs in out.values() if type(out) is dict else (out,):
            outputs = outputs.outputs
            count = len(outputs)
            self.tokens += count if count <= most else sum(map(_brought, outputs))

    def ends(self, engine, outcome=OK):
        """A step of the busy loop has ended."""
        now = _now()
        flight = self.flight
        if self.counted:
            queue = engine.batch_queue
            left = 0 if queue is None else _batches(queue)
            while len(flight) > left:
                # back from the workers: when it left, prompt tokens, decode tokens, requests, ids that owed
                began, tokens, decoded, requests, owing = flight.popleft()
                self.steps = steps = self.steps + 1
                self.record(steps, began, now, requests, tokens, decoded, outcome)
                if tokens or owing:
                    self.flight_tokens -= tokens
                    self.computed(engine.scheduler.requests, owing)
        else:
            self.steps += 1
        scheduler = engine.scheduler
        extra = 0
        for name in self.queues:
            extra += len(getattr(scheduler, name))
        running, waiting = len(scheduler.running), len(scheduler.waiting) + extra
        finished = self.admitted - running - waiting
        if finished > self.finished:
            self.finished = finished
        if waiting and self.parks:
            parked = scheduler.num_waiting_for_streaming_input
            extra, waiting = max(0, extra - parked), max(0, waiting - parked)
        self.extra = extra
        self.started = 0
        tokens = self.flight_tokens
        if running or waiting or flight:
            if len(self.owing) > running + waiting:
                self.lets_go(scheduler.requests)
            phase = SLEEP if self.asleep and (not running or self.kept(scheduler)) else PREFILL if tokens else DECODE
            self.says(now, running, waiting, phase, tokens and self.prompt(), lease_ms(tokens) if tokens else STEP_LEASE_MS, 0)
            if phase == DECODE:
                self.decodes = (running, waiting)
        else:
            self.owing.clear()
            self.owed = 0
            self.says(now, 0, 0, SLEEP if self.asleep else IDLE, 0, 0, 0)

    def kept(self, scheduler):
        """Is nothing under way, and will none of these requests be given a step before the pause is over?"""
        unfinished = getattr(scheduler, "has_unfinished_requests", None)
        return not self.flight and unfinished is not None and not unfinished()

    def computed(self, requests, owing):
        """These have had a part of their prompts computed."""
        for request_id in owing:
            request = requests.get(request_id)
            self.owe(request_id, 0 if request is None else max(0, request.num_prompt_tokens - request.num_computed_tokens))

    def owe(self, request_id, tokens):
        self.decodes = None
        self.owed += tokens - self.owing.pop(request_id, 0)
        if tokens:
            self.owing[request_id] = tokens

    def lets_go(self, requests):
        """More owe than there are: the scheduler ended some by itself, which no hook tells (a prompt whose blocks could not be fetched)."""
        for request_id in self.owing.keys() - requests.keys():
            self.owe(request_id, 0)

    def adds(self, engine, request):
        self.admitted += 1
        # the core ends some at once (one that was aborted before it came): nothing of them is owed
        if request.request_id not in engine.scheduler.requests:
            self.owe(request.request_id, 0)
            return
        tokens = getattr(request, "num_prompt_tokens", None)
        self.owe(request.request_id, int(tokens if tokens is not None else len(request.prompt_token_ids or ())))

    def aborts(self, request_ids):
        for request_id in (request_ids,) if isinstance(request_ids, str) else request_ids:
            self.owe(request_id, 0)

    def rests(self, engine):
        """After pause, resume, sleep or wake-up."""
        paused = getattr(engine, "is_scheduler_paused", None)
        sleeping = getattr(engine, "is_sleeping", None)
        self.asleep = bool(paused is not None and paused()) or bool(sleeping is not None and sleeping())
        if self.started == 0:
            scheduler = engine.scheduler
            if self.queues is None:
                self.prepare(engine)
            self.says(_now(), len(scheduler.running), self.waiting(scheduler), SLEEP if self.asleep else IDLE, 0, 0, 0)

    def meets(self, engine):
        """The engine itself, whose executor was all that was known when the page began: is it one whose steps we see?"""
        kind = type(engine)
        if not hasattr(kind, "run_busy_loop"):
            # no loop of its own: its client steps it when it likes, and nothing says when it serves
            self.gives_up("the engine core runs in its client's process")
            return
        for cls in kind.__mro__:
            around(cls, "run_busy_loop", _busy_loop)
        others = [name for name in ("_process_engine_step", *_STEPS) if not ours(kind, name)]
        if others:
            self.gives_up("%s has a %s of its own" % (kind.__name__, others[0]))
            return
        self.publish_phase(WARM_UP, STARTUP_LEASE_MS)

    def gives_up(self, error):
        """Our own failure, or an engine that we do not see through: the page goes, the engine stays."""
        if self.live:
            self.live = False
            log.warning("truebeat: the engine core's page is withdrawn: %r", error)
            self.withdraw()


def install_executor(module):
    """The executor is made right after the plugins were loaded, and knows the configuration: there the page begins."""
    if not around(module.Executor, "__init__", _executor_init):
        missing("Executor.__init__", "the engine core has no page")


def install_core(module):
    core = module.EngineCore
    proc = getattr(module, "EngineCoreProc", core)
    essential = {"EngineCoreProc._process_engine_step": around(proc, "_process_engine_step", _engine_step),
                 "EngineCoreProc.run_busy_loop": around(proc, "run_busy_loop", _busy_loop),
                 "EngineCore._initialize_kv_caches": around(core, "_initialize_kv_caches", _kv_caches)}
    for name in _STEPS:
        essential["EngineCore." + name] = around(core, name, _step_outputs)
    lacking = [name for name, there in essential.items() if not there]
    for name in lacking:
        missing(name, "the engine core has no page")
    _CORE["ready"] = not lacking
    for name, make, effect in (("add_request", _add_request, "requests finished and prompts owed stay 0"),
                               ("abort_requests", _abort_requests, "prompts owed are right again when the engine is idle")):
        if not around(core, name, make):
            missing("EngineCore." + name, effect)
    if not around(proc, "_handle_client_request", _client_request):
        missing("EngineCoreProc._handle_client_request", "an adapter that loads for long looks like a loop that stands still")
    resting = ("pause_scheduler", "resume_scheduler", "sleep", "wake_up")
    found = [around(cls, name, _rest) for name in resting for cls in (core, proc)]
    if not any(found):
        missing("EngineCore.sleep", "sleep and pause do not show on the page")


_STEPS = ("step", "step_with_batch_queue")
_CORE = {"ready": False, "here": False}


def _executor_init(original):
    def __init__(self, vllm_config, *args, **kwargs):
        _CORE["here"] = True
        _make_page(vllm_config, type(self))
        return original(self, vllm_config, *args, **kwargs)
    return __init__


def _make_page(vllm_config, executor_class):
    global _beat
    try:
        directory = page_dir()
        if directory is None or not _CORE["ready"]:
            return
        rank, world, engines = place(vllm_config, executor_class)
        _beat = CoreBeat(directory, identity_of_this_process(rank, world, engines=engines))
        log.info("truebeat: the engine core publishes %s", _beat.path)
    except Exception as error:  # noqa: BLE001
        _beat = None
        log.warning("truebeat: the engine core has no page: %r", error)


def _engine_step(original):
    def _process_engine_step(self, *args, **kwargs):
        beat = _beat
        if beat is None or not beat.live:
            return original(self, *args, **kwargs)
        try:
            beat.begins(self)
        except Exception as error:  # noqa: BLE001
            beat.gives_up(error)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            _quietly(beat, beat.ends, self, FAILED)
            raise
        try:
            if beat.live:
                beat.ends(self)
        except Exception as error:  # noqa: BLE001
            beat.gives_up(error)
        return result
    return _process_engine_step


def _step_outputs(original):
    def step(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        beat = _beat
        try:
            if beat is not None:
                beat.counts(out)
        except Exception as error:  # noqa: BLE001
            beat.gives_up(error)
        return out
    return step


def _quietly(beat, action, *args):
    try:
        if beat is not None and beat.live:
            action(*args)
    except Exception as error:  # noqa: BLE001
        beat.gives_up(error)


def _add_request(original):
    def add_request(self, request, *args, **kwargs):
        result = original(self, request, *args, **kwargs)
        if _beat is not None:
            _quietly(_beat, _beat.adds, self, request)
        return result
    return add_request


def _abort_requests(original):
    def abort_requests(self, request_ids, *args, **kwargs):
        if _beat is not None:
            _quietly(_beat, _beat.aborts, request_ids)
        return original(self, request_ids, *args, **kwargs)
    return abort_requests


def _client_request(original):
    def _handle_client_request(self, request_type, *args, **kwargs):
        beat = _beat
        if beat is None or getattr(request_type, "name", None) != "UTILITY":
            return original(self, request_type, *args, **kwargs)
        _quietly(beat, beat.serves, self)
        try:
            return original(self, request_type, *args, **kwargs)
        finally:
            _quietly(beat, beat.served, self)
    return _handle_client_request


def _rest(original):
    def rest(self, *args, **kwargs):
        try:
            return original(self, *args, **kwargs)
        finally:
            # also where it failed: vLLM pauses first, and clears caches then
            if _beat is not None:
                _quietly(_beat, _beat.rests, self)
    return rest


def _before(tell):
    """The page hears of it first."""
    def make(original):
        def told(self, *args, **kwargs):
            if _beat is not None:
                _quietly(_beat, tell, _beat, self)
            return original(self, *args, **kwargs)
        return told
    return make


_kv_caches = _before(CoreBeat.meets)
_busy_loop = _before(lambda beat, engine: beat.publish_phase(IDLE))
