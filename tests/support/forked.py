"""Processes that start with their imports done: forks of a server that has torch, DeepSpeed and transformers.

A fresh interpreter spends six seconds of processor time on them, for every rank of a pool.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext, SpawnContext

# None of them may start a thread, which a fork would leave behind: tests/test_support_forked.py looks.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "deepspeed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
]
HAS_GPU = os.path.exists("/dev/nvidiactl")


def context(on_gpu: bool = HAS_GPU) -> ForkServerContext | SpawnContext:
    """Where processes come from. With a GPU about they are fresh: the accelerator is chosen at import."""
    if on_gpu or HAS_GPU:
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOAD)
    return server
