"""What a block that recomputes keeps for backward, its input, in host memory until backward asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Offloaded:
    host: Tensor
    device: torch.device
    arrived: torch.cuda.Event | None


class InputsOnHost:
    """Wraps what recomputes blocks. From CUDA values go beside the forward, on a stream of their own."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None  # no CUDA context before there is a tensor on it

    def wrap(self, recompute: Callable[..., Any]) -> Callable[..., Any]:
        """`recompute(function, *args)` as before, its args kept on the host.

        torch's non-reentrant checkpoint saves its args as operations do, and all else by hooks of its own.
        """

        def offloading(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._to_host, _to_device):
                return recompute(*args, **kwargs)

        return offloading

    def _to_host(self, tensor: Tensor) -> Tensor | _Offloaded:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        if tensor.device.type != "cuda":
            return _Offloaded(tensor.clone(), tensor.device, None)
        # Pinned memory comes from torch's cache, which waits for the copies that use it.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            arrived = self._stream.record_event()
        tensor.record_stream(self._stream)
        return _Offloaded(host, tensor.device, arrived)


def _to_device(kept: Tensor | _Offloaded) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    if kept.arrived is not None:
        torch.cuda.current_stream(kept.device).wait_event(kept.arrived)
    return kept.host.to(kept.device, non_blocking=True)
