"""Loads the fake vLLM of one version with the plugin in it, as vLLM itself would: register() first, or in the midst of the start."""
import importlib
import os
import sys
from types import SimpleNamespace

FAKES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fakes")
VERSIONS = ("0.8.5", "0.10.1", "0.12.0", "0.18.0", "0.32.0")
MODULES = ("vllm.v1.executor.abstract", "vllm.v1.engine.core", "vllm.v1.worker.worker_base", "vllm.v1.worker.gpu_worker")


def forget():
    """Out with every trace of an earlier load."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "truebeat_heartbeat.hooks"]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "npu", "truebeat_heartbeat")]:
        del sys.modules[name]


def load(version, page_dir, before=None, register_first=True):
    """The plugin and the fake's modules; `before(modules)` changes the fake before the plugin sees it."""
    forget()
    os.environ["FAKE_VLLM"] = version
    os.environ["TRUEBEAT_PAGE_DIR"] = page_dir
    if FAKES not in sys.path:
        sys.path.insert(0, FAKES)
    if before is not None:
        before({name: importlib.import_module(name) for name in MODULES})
    plugin = importlib.import_module("truebeat_heartbeat.vllm_plugin")
    if register_first:
        plugin.register()
    modules = [importlib.import_module(name) for name in MODULES]
    plugin.register()
    return plugin, modules


def config(world_size=1, engines=1, engine=0, overlaps=False):
    """As much of a VllmConfig as the plugin and the fakes look at; `overlaps`: scheduling is asynchronous."""
    parallel = SimpleNamespace(world_size=world_size, data_parallel_size=engines, data_parallel_rank=engine)
    return SimpleNamespace(parallel_config=parallel, scheduler_config=SimpleNamespace(async_scheduling=overlaps))
