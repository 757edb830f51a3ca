"""What the page of vLLM's engine core says, and the ways in which that changes.

The core's main thread alone publishes. A step is published when it begins (so a hang in the scheduler shows), again when a batch
with prompt tokens is handed to the workers (its size scales the lease), and when it ends. What stands on the way of every step of
decode is written for speed: it does in place what `Writer` has functions for.
"""
import time
from collections import deque

from .hooks import log, missing, takes
from .page import (BEAT, BEAT_PAYLOAD, BEAT_SEQ, DECODE, HEADER_LEN, IDLE, LOAD, OK, PREFILL, RECORD, RECORD_LEN, RING_LEN, SLEEP,
                   Writer)
from .settings import whole_number

LEASE_MS_MAX = 2**32 - 1
# How long a phase may last as far as anybody can say who does not know the machine (H5.3); readers cap it and learn the rest.
# A lease of 0 would be none.
STEP_LEASE_MS = whole_number("TRUEBEAT_STEP_LEASE_MS", 120_000, 1, LEASE_MS_MAX)
TOKEN_LEASE_US = whole_number("TRUEBEAT_TOKEN_LEASE_US", 10_000, 0, LEASE_MS_MAX)
STARTUP_LEASE_MS = 900_000

_now = time.monotonic_ns
_pack = BEAT.pack_into
_pack_record = RECORD.pack_into
_RING_AT, _RECORD_WORDS = HEADER_LEN // 8, RECORD_LEN // 8
# where in the page, in words of 8 bytes, stands what alone changes from one step of decode to the next
_STEPS_AT, _TOKENS_AT, _STARTED_AT, _PUBLISHED_AT = (BEAT_PAYLOAD // 8 + word for word in (0, 1, 8, 11))


def lease_ms(tokens):
    """The lease of a step with this many prompt tokens."""
    return min(STEP_LEASE_MS + tokens * TOKEN_LEASE_US // 1000, LEASE_MS_MAX)


class CoreBeat(Writer):
    """The core's page: what it says, and the ways in which that changes."""

    __slots__ = ("steps", "tokens", "finished", "admitted", "owed", "owing", "phase", "entered", "flight", "flight_tokens",
                 "counted", "asleep", "started", "beside", "parks", "extra", "live", "decoding",
                 "queued")

    def __init__(self, directory, identity):
        super().__init__(directory, identity)
        self.steps = self.tokens = self.finished = self.admitted = self.owed = 0
        self.owing = {}  # request id -> prompt tokens that no step has taken yet
        # running and waiting where the page says: between two steps of decode, nothing else known since; -1: it says something else
        self.decoding = self.queued = -1
        self.phase, self.entered = LOAD, _now()
        # batches handed out and not come back, the oldest first: (when, prompt tokens, decode tokens, requests, where in their prompts it
        # begins those that owe; None: a token each at most)
        self.flight = deque()
        self.flight_tokens = self.started = self.extra = 0
        self.counted = self.asleep = False
        self.beside = None
        self.parks = False
        self.live = True
        self.publish_phase(LOAD, STARTUP_LEASE_MS)

    def says(self, now, running, waiting, phase, tokens, lease, started):
        """`publish`, in place: this is on the way of every step."""
        self.decoding = -1
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
        if self.beside is None:
            self.prepare(engine)
        now = self.started = _now()
        # requests come by way of `waiting`; what else waits was counted when the last step ended
        running, waiting = len(scheduler.running), len(scheduler.waiting) + self.extra
        if running == self.decoding and waiting == self.queued:
            # all but the step's start stands there already
            words, fence = self.words, self.fence
            self.seq = seq = self.seq + 2
            words[BEAT_SEQ] = seq - 1
            if fence is not None:
                fence()
            words[_STARTED_AT] = words[_PUBLISHED_AT] = now
            if fence is not None:
                fence()
            words[BEAT_SEQ] = seq
            return
        self.says_step(now, running, waiting, now)

    def prepare(self, engine):
        """At the first step, or the first rest before it: which queues this version has, and a hand on what goes to the workers."""
        self.beside = _beside(engine.scheduler)
        # sessions that stream their prompts wait in those queues for their clients; no step is owed to them, and none is begun
        self.parks = hasattr(engine.scheduler, "num_waiting_for_streaming_input")
        executor = engine.model_executor
        original = getattr(executor, "execute_model", None)
        if original is None:
            missing("Executor.execute_model", "steps are counted by the loop, without their size")
            return

        executor.execute_model = _before_batch(self.launches, engine, original)
        self.counted = True

    def launches(self, engine, output):
        """A batch goes to the workers. Only one with prompt tokens changes what the page says."""
        try:
            requests, total = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
            if not self.live:
                return
            if total == requests and not self.owing:
                self.flight.append((self.started, 0, total, requests, None))
            else:
                self.launches_prompts(engine, output, requests, total)
        except Exception as error:  # noqa: BLE001
            self.gives_up(error)

    def launches_prompts(self, engine, output, requests, total):
        scheduled = output.num_scheduled_tokens
        spec = output.scheduled_spec_decode_tokens
        drafted = sum(map(len, spec.values())) if spec else 0
        owing = self.starts(engine.scheduler.requests, scheduled)
        tokens = 0
        if owing or total > requests + drafted:
            tokens = max(0, total - (requests - len(owing)) - drafted)
        now = _now()
        self.flight.append((now, tokens, total - tokens, requests, owing))
        if tokens:
            self.flight_tokens += tokens
            scheduler = engine.scheduler
            self.says_step(now, len(scheduler.running), self.waiting(scheduler), self.started)

    def starts(self, requests, scheduled):
        """Of those in a batch that owe: where in its prompt it begins each.

        Batches overlap, and a prompt is owed until its last chunk is back: one that is computed up to its end already decodes.
        """
        found = {}
        for request_id in self.owing.keys() & scheduled.keys():
            request, start = requests.get(request_id), 0
            if request is not None:
                start = request.num_computed_tokens - scheduled[request_id]  # vLLM counts them as computed when it hands them out
                if start >= request.num_prompt_tokens:
                    continue
            found[request_id] = max(0, start)
        return found

    def says_step(self, now, running, waiting, started):
        """A step is under way: what is waited for is the oldest batch, for they come back in their order. The lease is of all of them."""
        flight, tokens = self.flight, self.flight_tokens
        ahead = flight[0][1] if flight else 0
        self.says(now, running, waiting, PREFILL if ahead else DECODE, ahead, lease_ms(tokens) if tokens else STEP_LEASE_MS, started)

    def says_between(self, now, scheduler, running, waiting):
        """No step is under way."""
        if not (running or waiting or self.flight):
            self.says(now, 0, 0, SLEEP if self.asleep else IDLE, 0, 0, 0)
        elif self.asleep and (not running or self.kept(scheduler)):
            self.says(now, running, waiting, SLEEP, 0, lease_ms(self.flight_tokens), 0)
        else:
            self.says_step(now, running, waiting, 0)

    def serves(self, engine):
        """A call that is no request begins (an adapter, weights, a profile): no step is begun before it ends, which may take long."""
        if self.started == 0 and not self.asleep:
            if self.beside is None:
                self.prepare(engine)
            now, scheduler = _now(), engine.scheduler
            self.says(now, len(scheduler.running), self.waiting(scheduler), LOAD, 0, STARTUP_LEASE_MS, now)

    def served(self, engine):
        if self.started == 0 and self.beside is not None:
            scheduler = engine.scheduler
            self.says_between(_now(), scheduler, len(scheduler.running), self.waiting(scheduler))

    def waiting(self, scheduler):
        waiting = len(scheduler.waiting) + self.beside(scheduler)
        return max(0, waiting - scheduler.num_waiting_for_streaming_input) if self.parks else waiting

    def counts(self, out):
        """What a step function returned: outputs by client, or (vLLM 0.8) one set of outputs."""
        if type(out) is tuple:
            out = out[0]
        if not out:
            return
        flight, most = self.flight, 0
        # each token of a batch that decodes is an output of its own; more outputs than it had requests are errors of others
        if flight and flight[0][4] is None:
            most = flight[0][3]
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
                # back from the workers: when it left, prompt tokens, decode tokens, requests, those that owed
                began, tokens, decoded, requests, owing = flight.popleft()
                self.steps = steps = self.steps + 1
                # `record`, in place
                slot = _RING_AT + self.records % RING_LEN * _RECORD_WORDS
                self.records = records = self.records + 1
                words, fence = self.words, self.fence
                words[slot] = 2 * records - 1
                if fence is not None:
                    fence()
                _pack_record(self.buffer, 8 * slot + 8, steps, began, now, requests, tokens, decoded, outcome, 0)
                if fence is not None:
                    fence()
                words[slot] = 2 * records
                if tokens or owing:
                    self.flight_tokens -= tokens
                    self.computed(engine.scheduler.requests, owing)
        else:
            self.steps += 1
        scheduler = engine.scheduler
        extra = self.beside(scheduler)
        running, waiting = len(scheduler.running), len(scheduler.waiting) + extra
        finished = self.admitted - running - waiting
        if finished > self.finished:
            self.finished, self.decoding = finished, -1
        if waiting and self.parks:
            parked = scheduler.num_waiting_for_streaming_input
            extra, waiting = max(0, extra - parked), max(0, waiting - parked)
        self.extra = extra
        self.started = 0
        if running and running == self.decoding and waiting == self.queued and not self.asleep:
            # nothing but two counters has changed since the last step of decode: `says`, of these alone
            words, fence = self.words, self.fence
            self.seq = seq = self.seq + 2
            words[BEAT_SEQ] = seq - 1
            if fence is not None:
                fence()
            words[_STEPS_AT] = self.steps
            words[_TOKENS_AT] = self.tokens
            words[_STARTED_AT] = 0
            words[_PUBLISHED_AT] = now
            if fence is not None:
                fence()
            words[BEAT_SEQ] = seq
        elif running or waiting or flight:
            if len(self.owing) > running + waiting:
                self.lets_go(scheduler.requests)
            self.says_between(now, scheduler, running, waiting)
            # not where a prompt comes behind: the next step begins with its size or its lease
            if self.phase == DECODE and not self.flight_tokens:
                self.decoding, self.queued = running, waiting
        else:
            self.owing.clear()
            self.owed = 0
            self.says_between(now, scheduler, 0, 0)

    def kept(self, scheduler):
        """Is nothing under way, and will none of these requests be given a step before the pause is over?"""
        unfinished = getattr(scheduler, "has_unfinished_requests", None)
        return not self.flight and unfinished is not None and not unfinished()

    def computed(self, requests, owing):
        """These have had a part of their prompts computed."""
        for request_id in owing:
            request = requests.get(request_id)
            self.owe(request_id, 0 if request is None else self.left(request))

    def left(self, request):
        """Prompt tokens of it that no batch has brought back."""
        done = request.num_computed_tokens
        for batch in self.flight:
            if batch[4]:
                done = min(done, batch[4].get(request.request_id, done))
        return max(0, request.num_prompt_tokens - done)

    def owe(self, request_id, tokens):
        self.decoding = -1
        self.owed += tokens - self.owing.pop(request_id, 0)
        if tokens:
            self.owing[request_id] = tokens

    def lets_go(self, requests):
        """More owe than there are: the scheduler ended some by itself, which no hook tells (a prompt whose blocks could not be fetched)."""
        for request_id in self.owing.keys() - requests.keys():
            self.owe(request_id, 0)

    def adds(self, engine, request, known):
        """A request has come, or (`known`) the next part of a session that streams its prompt under one id."""
        # the core ends some at once (one that was aborted before it came): nothing of them is owed
        held = engine.scheduler.requests.get(request.request_id)
        if not known:
            self.admitted += 1
        elif held is not None:
            self.owe(request.request_id, self.left(held))
            return
        if held is None:
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
            if self.beside is None:
                self.prepare(engine)
            self.says(_now(), len(scheduler.running), self.waiting(scheduler), SLEEP if self.asleep else IDLE, 0, 0, 0)

    def gives_up(self, error):
        """Our own failure, or an engine that we do not see through: the page goes, the engine stays."""
        if self.live:
            self.live = False
            log.warning("truebeat: the engine core's page is withdrawn: %r", error)
            self.withdraw()


def _brought(output):
    """How many tokens an output is; one that is a whole answer without any (an embedding, a score) counts as one."""
    return len(output.new_token_ids) or getattr(output, "pooling_output", None) is not None


def _beside(scheduler):
    """How many requests wait elsewhere than in `waiting`, by the queues that this version has."""
    ways = [way for name, way in _QUEUES_BESIDE.items() if hasattr(scheduler, name)]
    if len(ways) == 1:
        return ways[0]
    return lambda scheduler: sum(way(scheduler) for way in ways)


# the one of 0.18, and the one that stands in its place since 0.32
_QUEUES_BESIDE = {"skipped_waiting": lambda scheduler: len(scheduler.skipped_waiting),
                  "kv_holding_waiting": lambda scheduler: len(scheduler.kv_holding_waiting)}


def _batches(queue):
    """How many batches wait in the engine's queue: a queue.Queue up to 0.10, a deque since."""
    size = getattr(queue, "qsize", None)
    return len(queue) if size is None else size()


def _before_batch(launches, engine, original):
    """The executor's `execute_model`, told of before it runs; with the very arguments of newer versions, for open ones cost more."""
    defaults = getattr(original, "__defaults__", None)
    if takes(original, "scheduler_output", "non_block") and defaults:
        def execute_model(scheduler_output, non_block=defaults[-1]):
            launches(engine, scheduler_output)
            return original(scheduler_output, non_block)
    else:
        def execute_model(scheduler_output, *args, **kwargs):
            launches(engine, scheduler_output)
            return original(scheduler_output, *args, **kwargs)
    return execute_model
