"""vLLM's logger, configured when the module is imported and (in newer versions) again from the options of the server."""
import logging
from logging.config import dictConfig


def _configure_vllm_root_logger(config=None):
    dictConfig({"version": 1, "disable_existing_loggers": False,
                "handlers": {"vllm": {"class": "logging.NullHandler"}},
                "loggers": {"vllm": {"handlers": ["vllm"], "level": config or "INFO", "propagate": False}}})


def configure_logging(config):
    _configure_vllm_root_logger(config)


def init_logger(name):
    return logging.getLogger(name)
