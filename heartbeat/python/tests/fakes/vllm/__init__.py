"""A vLLM with nothing in it but the shapes that the plugin meets, by version: FAKE_VLLM is 0.8.5, 0.10.1, 0.12.0, 0.18.0 or 0.32.0.

Which class has which method, what it returns and who calls whom: as in the wheels of these versions (table in docs/vllm.md).
"""
import os

VERSION = tuple(int(part) for part in os.environ["FAKE_VLLM"].split("."))
