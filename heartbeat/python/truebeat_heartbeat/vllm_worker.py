"""Hooks in a vLLM worker, by which its page (`vllm_worker_page`) hears of the step under way and how many tokens it has.

A worker hands nothing to clients and has no queue: it counts steps (the same ones as the core) and names what it is doing. In a
process that holds the engine core as well (one GPU, no worker process) the core's page says it all, and nothing is done here, also
where the core has none: ranks are counted without such workers, and one of theirs would be another engine's.
"""
from . import vllm_core
from .hooks import around, log, missing, never_came, ours
from .page import CAPTURE, COMPILE, FAILED, IDLE, LOAD, OK, SLEEP, WARM_UP, identity_of_this_process, page_dir
from .vllm_worker_page import WorkerBeat

BASE = "vllm.v1.worker.worker_base"

_beat = None
# where steps are counted, the one place: the first of the hooks that this version has; and what no kind of worker has to itself
_HOOKS = {"execute": None, "base": ()}


def forget():
    """In a forked child: the parent's page is not ours."""
    global _beat
    _beat = None


def install_base(module):
    """The base class knows the rank; the wrapper, in newer versions, is where every kind of worker's step begins."""
    _HOOKS["base"] = module.WorkerBase.__mro__
    if not around(module.WorkerBase, "__init__", _worker_init):
        missing("WorkerBase.__init__", "workers have no pages")
    _step_hook(getattr(module, "WorkerWrapperBase", None))


def install_worker(module):
    """The GPU worker, from which others derive."""
    never_came(BASE, "workers have no pages")
    _step_hook(module.Worker)


def _install_kind(kind):
    """The phases of the start, sampling and sleep of this very class of worker: a platform of its own brings its own, which may call none
    of vLLM's.
    """
    own = [cls for cls in kind.__mro__ if cls not in _HOOKS["base"]]
    for name, (make, effect) in _METHODS.items():
        found = [around(cls, name, make) for cls in own]
        # a version whose base has no sampling has none; the end of the start is told of by whoever makes the page
        expected = effect and (name != "sample_tokens" or any(name in vars(cls) for cls in _HOOKS["base"]))
        if expected and not any(found):
            missing("%s.%s" % (kind.__name__, name), effect)


def install_runner(module):
    """Graph capture; and steps, where nothing before them can be hooked."""
    runner = module.GPUModelRunner
    if not around(runner, "capture_model", _phase(CAPTURE, then=WARM_UP)):
        missing("GPUModelRunner.capture_model", "the capture of graphs looks like the warm-up")
    _step_hook(runner)


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
        if _HOOKS["execute"] is None:
            missing("execute_model of worker or runner", "workers have no steps on their pages")
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
        _quietly(beat, beat.begins, scheduler_output)
        try:
            result = original(self, scheduler_output, *args, **kwargs)
        except BaseException:
            _quietly(beat, beat.ends, FAILED)
            raise
        # None: the tokens are yet to be sampled, which is a part of the step; or (where nothing samples) another rank answers
        if result is not None or not beat.samples:
            _quietly(beat, beat.ends, OK)
        return result
    return execute_model


def _sample(original):
    def sample_tokens(self, *args, **kwargs):
        beat = _beat
        if beat is None:
            return original(self, *args, **kwargs)
        try:
            result = original(self, *args, **kwargs)
        except BaseException:
            _quietly(beat, beat.ends, FAILED)
            raise
        _quietly(beat, beat.ends, OK)
        return result
    return sample_tokens


def _phase(phase, then=None):
    def make(original):
        def entered(self, *args, **kwargs):
            beat = _beat
            if beat is None or not beat.live:
                return original(self, *args, **kwargs)
            before, after = beat.within, None
            _quietly(beat, beat.enters, phase)
            try:
                result = original(self, *args, **kwargs)
                after = then
                return result
            finally:
                _quietly(beat, beat.leaves, before, phase, after)
        return entered
    return make


# of a worker's class: what is put around it, and what is not seen without it
_METHODS = {"load_model": (_phase(LOAD), "the time until the next phase looks like loading"),
            "determine_available_memory": (_phase(COMPILE), "compilation and profiling look like loading"),
            "compile_or_warm_up_model": (_phase(WARM_UP, then=IDLE), None),
            "sample_tokens": (_sample, "a worker's step ends a little early"),
            "sleep": (_phase(None, then=SLEEP), "sleep does not show on the worker's page"),
            "wake_up": (_phase(None, then=IDLE), "a worker that has slept is asleep on its page until its next step")}


def _quietly(beat, action, *args):
    try:
        if beat.live:
            action(*args)
    except Exception as error:  # noqa: BLE001
        beat.gives_up(error)
