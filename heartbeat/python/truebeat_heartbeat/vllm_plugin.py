"""The vLLM plugin: an unmodified vLLM writes heartbeat pages, dumps its stacks on a signal, and logs where an agent can read it.

Entry point `vllm.general_plugins`, which vLLM calls in the API server, in the engine core and in each worker. Pages: the engine
core's is rank 0, its workers' are 1 to n; where core and worker are one process there is one page (H1.6). Which hook is there in
which version of vLLM: docs/vllm.md. The core's page needs all of its essential hooks: half a page would look like a hang.
"""
import os

from . import logfile, stacks, vllm_core, vllm_worker
from .hooks import log, on_import
from .page import page_dir

_registered = False


def register():
    """Called by vLLM, possibly several times in one process. Never raises."""
    global _registered
    try:
        logfile.install()
        logfile.follow()
        directory = page_dir()
        if directory is None:
            log.debug("truebeat: no page directory (TRUEBEAT_PAGE_DIR): nothing is published")
            return
        _answer(directory)
        if _registered:
            return
        _registered = True
        os.register_at_fork(after_in_child=_forked)
        on_import(vllm_core.EXECUTOR, vllm_core.install_executor)
        on_import(vllm_core.CORE, vllm_core.install_core)
        on_import(vllm_worker.BASE, vllm_worker.install_base)
        on_import("vllm.v1.worker.gpu_worker", vllm_worker.install_worker)
        on_import("vllm.v1.worker.gpu_model_runner", vllm_worker.install_runner)
        on_import("vllm.v1.worker.gpu.model_runner", vllm_worker.install_runner)
    except Exception as error:  # noqa: BLE001: the engine must not notice
        log.warning("truebeat: not installed: %r", error)


def _answer(directory):
    try:
        stacks.install(directory)
    except (OSError, ValueError, RuntimeError) as error:
        log.warning("truebeat: this process will not dump its stacks: %r", error)


def _forked():
    """A child has its parent's hooks, but neither its page nor its stack file."""
    vllm_core.forget()
    vllm_worker.forget()
    directory = page_dir()
    if directory is not None:
        _answer(directory)
