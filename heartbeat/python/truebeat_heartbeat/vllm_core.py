"""Hooks in vLLM's engine core, by which its page (`vllm_core_page`) hears of what is owed, delivered and under way.

An exception of ours takes the page away and leaves the engine alone.
"""
from .hooks import around, log, missing, never_came, of_itself_alone, ours
from .page import FAILED, IDLE, WARM_UP, identity_of_this_process, page_dir
from .vllm_core_page import STARTUP_LEASE_MS, CoreBeat

EXECUTOR, CORE = "vllm.v1.executor.abstract", "vllm.v1.engine.core"

_beat = None


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


def is_here():
    """Does this process hold an engine core, with a page or without?"""
    return _CORE["here"]


def forget():
    """In a forked child: the parent's core and its page are not ours."""
    global _beat
    _beat = None
    _CORE["here"] = False


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
    # the core imports it before all else that it does
    never_came(EXECUTOR, "the engine core has no page")
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
        never_came(CORE, "the engine core has no page")
        if directory is None or not _CORE["ready"]:
            return
        rank, world, engines = place(vllm_config, executor_class)
        _beat = CoreBeat(directory, identity_of_this_process(rank, world, engines=engines))
        log.info("truebeat: the engine core publishes %s", _beat.path)
    except Exception as error:  # noqa: BLE001
        _beat = None
        log.warning("truebeat: the engine core has no page: %r", error)


@of_itself_alone
def _engine_step(original):
    def _process_engine_step(self):
        beat = _beat
        if beat is None or not beat.live:
            return original(self)
        try:
            beat.begins(self)
        except Exception as error:  # noqa: BLE001
            beat.gives_up(error)
        try:
            result = original(self)
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


@of_itself_alone
def _step_outputs(original):
    def step(self):
        out = original(self)
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
        known = _knows(self, request)
        result = original(self, request, *args, **kwargs)
        if _beat is not None:
            _quietly(_beat, _beat.adds, self, request, known)
        return result
    return add_request


def _knows(engine, request):
    """Has this engine a request of that id already? Asked before it takes this one in."""
    try:
        return _beat is not None and request.request_id in engine.scheduler.requests
    except Exception as error:  # noqa: BLE001
        _beat.gives_up(error)
        return False


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


def _meets(beat, engine):
    """The engine itself, whose executor was all that was known when the page began: is it one whose steps we see?"""
    kind = type(engine)
    if not hasattr(kind, "run_busy_loop"):
        # no loop of its own: its client steps it when it likes, and nothing says when it serves
        beat.gives_up("the engine core runs in its client's process")
        return
    for cls in kind.__mro__:
        around(cls, "run_busy_loop", _busy_loop)
    others = [name for name in ("_process_engine_step", *_STEPS) if not ours(kind, name)]
    if others:
        beat.gives_up("%s has a %s of its own" % (kind.__name__, others[0]))
        return
    beat.publish_phase(WARM_UP, STARTUP_LEASE_MS)


def _before(tell):
    """The page hears of it first."""
    def make(original):
        def told(self, *args, **kwargs):
            if _beat is not None:
                _quietly(_beat, tell, _beat, self)
            return original(self, *args, **kwargs)
        return told
    return make


_kv_caches = _before(_meets)
_busy_loop = _before(lambda beat, engine: beat.publish_phase(IDLE))
