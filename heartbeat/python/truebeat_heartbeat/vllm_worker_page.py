"""What the page of a vLLM worker says: one page a rank, with the step that its thread is in.

A step ends when this thread is through with it, whatever it returned. Under asynchronous scheduling that is a promise, and the device may
not have begun yet; but the core collects the promises of one rank alone, and on the others nobody would ever learn when such a step has
ended. One that is left open after its end looks like work that an idle engine holds, or like a silence of that rank: a possible false
eviction, where an idle page costs a coarser class at most. For the device it is the core's page that answers: it waits in its own step.
"""
import time

from .hooks import log
from .page import DECODE, IDLE, LOAD, OK, PREFILL, WARM_UP, Writer
from .vllm_core_page import STARTUP_LEASE_MS, lease_ms

_now = time.monotonic_ns


class WorkerBeat(Writer):
    """A worker's page. The worker's own thread alone publishes."""

    __slots__ = ("steps", "started", "entered", "phase", "tokens", "requests", "decoded", "within", "samples", "serving", "live")

    def __init__(self, directory, identity, samples):
        super().__init__(directory, identity)
        self.steps = self.started = self.tokens = self.requests = self.decoded = 0
        self.phase, self.entered = LOAD, _now()
        self.within = None  # the phase that the call which goes on is; 0: it is none of its own
        self.samples = samples
        self.serving = False
        self.live = True
        self.rests(LOAD)

    def rests(self, phase):
        """Between steps, and in the phases of the start."""
        now = _now()
        if phase != self.phase:
            self.phase, self.entered = phase, now
        lease = STARTUP_LEASE_MS if phase <= WARM_UP else 0
        self.publish(self.steps, 0, 0, 0, 0, 0, phase, 0, self.entered, lease, 0, 0, 0, now)

    def begins(self, output):
        if self.started:
            self.ends(OK)
        scheduled = output.num_scheduled_tokens
        total, requests = output.total_num_scheduled_tokens, len(scheduled)
        spec = output.scheduled_spec_decode_tokens
        drafted = sum(map(len, spec.values())) if spec else 0
        # a worker does not know which request is still in its prompt: more than one token each means that one is
        self.tokens = max(0, total - requests - drafted)
        self.requests, self.decoded = requests, total - self.tokens
        phase = PREFILL if self.tokens else DECODE
        now = self.started = _now()
        if phase != self.phase:
            self.phase, self.entered = phase, now
        self.publish(self.steps, 0, 0, requests, 0, 0, phase, self.tokens, self.entered, lease_ms(self.tokens), now, 0, 0, now)

    def ends(self, outcome):
        started, self.started = self.started, 0
        if started:
            self.steps += 1
            self.record(self.steps, started, _now(), self.requests, self.tokens, self.decoded, outcome)
            self.rests(IDLE)

    def enters(self, phase):
        """A call begins that is a phase of its own (None: of none).

        Within another it speaks where it is another phase, as the capture of graphs within the warm-up; a subclass's method that calls its
        base's is the same one.
        """
        before = self.within
        self.within = before or 0 if phase is None else phase
        if phase is not None and phase != before:
            self.rests(phase)

    def leaves(self, before, phase, then):
        """It has ended. `before` is what was `within` when it began; `then` is the phase after it, None: as it is."""
        self.within = before
        if before is not None:
            if phase is None or phase == before:
                return
            then = before or (IDLE if self.serving else None)
        elif self.serving and (phase is not None or then is None and self.phase <= WARM_UP):
            # a worker that serves captures or loads anew: no step would come to one that stayed in its start
            then = IDLE
        if then is not None:
            self.serving = self.serving or then == IDLE
            self.rests(then)

    def gives_up(self, error):
        """Our own failure: the page goes, the worker stays."""
        if self.live:
            self.live = False
            log.warning("truebeat: a worker's page is withdrawn: %r", error)
            self.withdraw()
