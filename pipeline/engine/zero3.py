"""ZeRO-3 while a model is made: each parameter is drawn on the CPU in fp32, cast, and sharded at once.

deepspeed.zero.Init as it comes draws on the device and in the run's precision, so a sharded model would
start from other weights than a whole one. Here both start from the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn


class _InitOnCpu(deepspeed.zero.Init):
    """zero.Init without its tensor-constructor patches: what is made stays fp32 on the CPU until sharded."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype):
        super().__init__(config_dict_or_path=config, dtype=dtype)
        self.dtype = dtype  # zero.Init takes fp16 for fp32 where the device has it

    def _add_tensor_creation_wrappers(self) -> None:
        pass

    def _remove_tensor_creation_wrappers(self) -> None:
        pass

    def _zero_init_param(self, param: nn.Parameter) -> None:
        param.data = param.data.to(device=self.local_device, dtype=self.dtype)
        super()._zero_init_param(param)


class Zero3Sharding:
    """See pipeline.models.sharding.Sharding."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype):
        self.zero3_config: dict[str, Any] | None = config
        self._dtype = dtype
        _forget_hpz_groups()

    def construct(self) -> AbstractContextManager[Any]:
        assert self.zero3_config is not None
        _forget_hpz_groups()
        return _InitOnCpu(self.zero3_config, self._dtype)

    @contextmanager
    def whole(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Collective: gathers the parameters, and keeps rank 0's values."""
        unique = list(dict.fromkeys(parameters))  # tied weights appear twice
        with deepspeed.zero.GatheredParameters(unique, modifier_rank=0):
            gathered = [p.data for p in unique]
            for p in unique:
                p.data = p.data.to(device="cpu", dtype=torch.float32, copy=True)
            yield
            for p, full in zip(unique, gathered, strict=True):
                p.data = full.copy_(p.data)


def _forget_hpz_groups() -> None:
    """Of an engine or a zero.Init before this one: zero.Init makes its own, and refuses to twice."""
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
