"""Hooks in a vLLM worker: one page a rank, with the step under way and how many tokens it has.

A worker hands nothing to clients and has no queue: it counts steps (the same ones as the core) and names what it is doing. In a
process that holds the engine core as well (one GPU, no worker process) the core's page says it all, and nothing is done here, also
where the core has none: ranks are counted without such workers, and one of theirs would be another engine's.
"""
import time

from . import vllm_core
from .hooks import around, log, missing, ours
from .page import (CAPTURE, COMPILE, DECODE, FAILED, IDLE, LOAD, OK, PREFILL, SLEEP, WARM_UP, Writer, identity_of_this_process,
                   page_dir)
from .vllm_core_page import STARTUP_LEASE_MS, lease_ms

_beat = None
_now = time.monotonic_ns
# where steps are counted, the one place: the first of the hooks that this version has; and what no kind of worker has to itself
_HOOKS = {"execute": None, "base": ()}


def forget():
    """In a forked child: the parent's page is not ours."""
    global _beat
    _beat = None


class WorkerBeat(Writer):
    """A worker's page."""

    __slots__ = ("steps", "started", "entered", "phase", "tokens", "requests", "decoded", "depth", "samples", "serving", "live")

    def __init__(self, directory, identity, samples):
        super().__init__(directory, identity)
        self.steps = self.started = self.tokens = self.requests = self.decoded = self.depth = 0
        self.phase, self.entered = LOAD, _now()
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

    def gives_up(self, error):
        """Our own failure: the page goes, the worker stays."""
        if self.live:
            self.live = False
            log.warning("truebeat: a worker's page is withdrawn: %r", error)
            self.withdraw()


def install_base(module):
    """The base class knows the rank; the wrapper, in newer versions, is where every kind of worker's step begins."""
    _HOOKS["base"] = module.WorkerBase.__mro__
    if not around(module.WorkerBase, "__init__", _worker_init):
        missing("WorkerBase.__init__", "workers have no pages")
    _step_hook(getattr(module, "WorkerWrapperBase", None))


def install_worker(module):
    """The GPU worker, from which others derive."""
    _step_hook(module.Worker)


def _install_kind(kind):
    """The phases of the start, sampling and sleep of this very class of worker: a platform of its own brings its own, which may call none
    of vLLM's.
    """
    for cls in kind.__mro__:
        if cls not in _HOOKS["base"]:
            around(cls, "load_model", _phase(LOAD))
            around(cls, "determine_available_memory", _phase(COMPILE))
            around(cls, "compile_or_warm_up_model", _phase(WARM_UP, then=IDLE))
            around(cls, "sample_tokens", _sample)
            around(cls, "sleep", _phase(None, then=SLEEP))
            around(cls, "wake_up", _phase(None, then=IDLE))


def install_runner(module):
    """Graph capture; and steps, where nothing before them could be hooked."""
    runner = module.GPUModelRunner
    around(runner, "capture_model", _phase(CAPTURE, then=WARM_UP))
    _step_hook(runner)
    if _HOOKS["execute"] is None:
        missing("execute_model of worker or runner", "workers have no steps on their pages")


def _step_hook(cls):
    """Steps are counted once: at the outermost of wrapper, worker and runner."""
    if cls is None or _HOOKS["execute"] not in (None, cls):
        # both model runners share a name, and one process uses one of them
        if cls is None or _HOOKS["execute"].__name__ != cls.__name__:
            return
    if around(cls, "execute_model", _execute):
        _HOOKS["execute"] = cls


def _worker_init(original):
    def __init__(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        _make_page(self)
        return result
    return __init__


def _make_page(worker):
    global _beat
    try:
        directory = page_dir()
        if directory is None or _beat is not None or vllm_core.is_here():
            return
        kind = type(worker)
        _install_kind(kind)
        if not ours(kind, "compile_or_warm_up_model"):
            # it would stand in its start until the first step, which nobody lets through to an engine that starts
            missing(kind.__name__ + ".compile_or_warm_up_model", "the worker has no page")
            return
        rank, world, engines = vllm_core.place(worker.vllm_config, None, worker.rank)
        _beat = WorkerBeat(directory, identity_of_this_process(rank, world, engines=engines), _samples(worker))
        log.info("truebeat: worker %s publishes %s", worker.rank, _beat.path)
    except Exception as error:  # noqa: BLE001
        _beat = None
        log.warning("truebeat: a worker has no page: %r", error)


def _samples(worker):
    """Is a step that returns nothing one whose tokens are sampled by a later call, which is hooked? Pooling samples nothing."""
    model = getattr(worker.vllm_config, "model_config", None)
    return ours(type(worker), "sample_tokens") and getattr(model, "runner_type", None) != "pooling"


def _execute(original):
    def execute_model(self, scheduler_output, *args, **kwargs):
        beat = _beat
        # some versions warm up through this very method; the core does not count those
        if beat is None or not beat.live or not beat.serving:
            return original(self, scheduler_output, *args, **kwargs)
        try:
            beat.begins(scheduler_output)
        except Exception as error:  # noqa: BLE001
            beat.gives_up(error)
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        except BaseException:
            _quietly(beat.ends, FAILED)
            raise
        # None: the tokens are yet to be sampled, which is a part of the step; or (where nothing samples) another rank answers
        if result is not None or not beat.samples:
            _quietly(beat.ends, OK)
        return result
    return execute_model


def _sample(original):
    def sample_tokens(self, *args, **kwargs):
        outcome = FAILED
        try:
            result = original(self, *args, **kwargs)
            outcome = OK
            return result
        finally:
            if _beat is not None:
                _quietly(_beat.ends, outcome)
    return sample_tokens


def _phase(phase, then=None):
    def make(original):
        def entered(self, *args, **kwargs):
            beat = _beat
            if beat is None or not beat.live:
                return original(self, *args, **kwargs)
            # a subclass's method calls its base's: only the outer one speaks
            outer, beat.depth = beat.depth == 0, beat.depth + 1
            ends = None
            try:
                if outer and phase is not None:
                    _quietly(beat.rests, phase)
                result = original(self, *args, **kwargs)
                if outer or then == WARM_UP:
                    ends = then
                return result
            finally:
                beat.depth -= 1
                if outer and phase is not None and beat.serving:
                    # a worker that serves captures or loads anew: no step would come to one that stayed in its start
                    ends = IDLE
                if ends is not None:
                    beat.serving = beat.serving or ends == IDLE
                    _quietly(beat.rests, ends)
        return entered
    return make


def _quietly(action, *args):
    beat = _beat
    try:
        if beat is not None and beat.live:
            action(*args)
    except Exception as error:  # noqa: BLE001
        beat.gives_up(error)
