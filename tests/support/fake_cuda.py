"""A Hopper that is not there: CUDA tensors with shapes, types and devices, no values, in any build of torch.

Operators run their checks and meta functions, those of the fused kernels too, forward and backward. Where
`may_read` is False, a host read is an error. Use it in a process of its own: torch takes CUDA for available
from then on.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
DEVICE = torch.device("cuda", 0)


class HostWaitsError(AssertionError):
    """The host waits for the device where it must not."""


class FakeCuda(TorchDispatchMode):
    """What lies on CUDA is fake, the host's tensors are real."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode()
        self.may_read = True
        """Whether the host may read a value and wait for the device; otherwise that is an error."""
        self.truth = False
        """Value of every boolean that the host reads; numbers are 1, and copies to the host's memory 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        if name in ("is_pinned", "_pin_memory"):
            return name == "is_pinned" or args[0]
        on_device = any(isinstance(each, FakeTensor) for each in leaves)
        if not on_device and not any(
            isinstance(each, torch.device) and each.type == "cuda" for each in leaves
        ):
            return func(*args, **kwargs)
        if name == "record_stream":
            return None
        if name == "copy_":  # also to the host, and from it
            assert torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape
            if isinstance(args[0], FakeTensor):
                return args[0]
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                self.wait()
            return args[0].zero_()
        if (
            name == "_efficient_attention_backward"
        ):  # of whose meta function torch 2.11 to 2.13 forgot arguments
            with self._fakes:
                return *(torch.empty_like(each) for each in args[1:4]), torch.empty_like(args[1][:0])
        if name == "_to_copy" and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            if not kwargs.get("non_blocking"):
                self.wait()
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "_local_scalar_dense" and self.may_read:
            return self.truth if args[0].dtype == torch.bool else 1.0
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 has it, but a wrong decomposition of it
            assert kwargs["out"].dtype == args[3]
            assert args[1].dtype == args[2].dtype
            func, args, kwargs = torch.ops.aten.add_.Tensor, (kwargs["out"], args[1].float() @ args[2]), {}
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        with self._fakes:
            return func(*fake_args, **fake_kwargs)

    def wait(self, *_: Any) -> None:
        if not self.may_read:
            raise HostWaitsError

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Not by the mode's converter: its weak references would keep a parameter from becoming a fake."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with self._fakes:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )


class _Data(TorchFunctionMode):
    """Let `parameter.data = tensor` make a real parameter fake, or a fake one real, in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            parameter, data = args
            are_fake = [isinstance(each, FakeTensor) for each in args]
            if are_fake[0] != are_fake[1] or (all(are_fake) and parameter.device != data.device):
                own = dict(vars(parameter))
                _swap(parameter, torch.nn.Parameter(data, parameter.requires_grad))
                vars(parameter).update(own)
                return None
        return func(*args, **(kwargs or {}))


_sdpa = F.scaled_dot_product_attention


def _attend_like_hopper(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    enable_gqa: bool = False,
    **how: Any,
) -> torch.Tensor:
    """By the kernel that a Hopper's is, where none is asked for it."""
    if not isinstance(query, FakeTensor) or not how.get("is_causal") or attn_mask is not None:
        return _sdpa(query, key, value, attn_mask, enable_gqa=enable_gqa, **how)
    assert key.shape[1] == query.shape[1] or enable_gqa
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    given = (None, True, how.get("dropout_p", 0.0), True)
    if query.dtype == torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, *given, scale=how.get("scale"))[0]
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, *given, False, scale=how.get("scale"))[0]


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """torch.utils.swap_tensors, without its refusal where somebody holds a weak reference."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


_init_process_group = dist.init_process_group


def _join(backend: str, *, device_id: torch.device | None = None, **how: Any) -> None:
    """Join by gloo a group that is asked for as on a GPU; a CPU build of torch has no NCCL."""
    assert (backend, device_id) == ("cpu:gloo,cuda:nccl", DEVICE)
    _init_process_group("gloo", **how)


class _Stream:
    """Of torch.cuda.Stream and Event what the trainer and DeepSpeed use."""

    def __init__(self, *_: Any, **__: Any):
        self.device = DEVICE

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def elapsed_time(self, _: _Stream) -> float:
        return 1.0


@contextmanager
def hopper() -> Iterator[FakeCuda]:
    """Inside it there is one, `DEVICE`, for DeepSpeed too."""
    _library().pretend()
    fake, accelerator = FakeCuda(), get_accelerator()
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is one on the host first
    with ExitStack() as stack:
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        for owner, name, value in _replaced(fake):
            stack.enter_context(patch.object(owner, name, value))
        set_accelerator(CUDA_Accelerator())
        stack.callback(set_accelerator, accelerator)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Data())
        yield stack.enter_context(fake)


def _replaced(fake: FakeCuda) -> list[tuple[Any, str, Any]]:
    """What torch asks of a driver: (owner, name, answer)."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=80 << 30,
        multi_processor_count=132,
        uuid="0",
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "set_device": None,
        "mem_get_info": (60 << 30, 80 << 30),
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
        "manual_seed": None,
        "memory_stats": Counter(),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "empty_cache": None,
        "is_current_stream_capturing": False,
        "reset_peak_memory_stats": None,
        "_lazy_init": None,
    }
    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, name, lambda *_, _value=value, **__: _value) for name, value in answers.items()
    ]
    replaced += [(torch.cuda, name, _Stream) for name in ("current_stream", "default_stream")]
    replaced += [(torch.cuda, name, _Stream) for name in ("Stream", "Event")]
    replaced += [(torch.cuda, name, nullcontext) for name in ("stream", "device")]
    replaced.append((torch.cuda, "synchronize", fake.wait))
    replaced.append((F, "scaled_dot_product_attention", _attend_like_hopper))
    replaced.append((dist, "init_process_group", _join))
    # torch compiles nothing under a dispatch mode: functions and modules run as they are written.
    replaced.append((torch, "compile", lambda function, **_: function))
    replaced.append((torch.nn.Module, "compile", lambda *_, **__: None))
    # Of one rank, whose lists are what all have.
    replaced.append((partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda _: None))
    # module.to("cuda") keeps its parameters, as it does on a card, though these become fakes.
    replaced.append((torch.__future__, "_swap_module_params_on_conversion", True))
    replaced.append((torch.utils, "swap_tensors", _swap))
    # An operator of a real stream; and what a CUDA build would do to the guard at each entry of a fake mode.
    replaced.append((torch.Tensor, "record_stream", lambda *_: None))
    replaced.append((fake_tensor, "init_gpu_context", lambda _: None))
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        replaced.append((torch._C, "_ensureCUDADeviceGuardSet", lambda: None))
    return replaced


def _library() -> ctypes.CDLL:
    """Compiled once for an environment, in seconds."""
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", sys.prefix)) / f"fake_cuda-{torch.__version__}.so"
    if not built.exists() or built.stat().st_mtime < SOURCE.stat().st_mtime:
        built.parent.mkdir(parents=True, exist_ok=True)
        own = built.with_suffix(f".{os.getpid()}")
        root = Path(torch.__file__).parent
        how = ["-std=c++20", "-shared", "-fPIC", "-O0", f"-I{root / 'include'}"]
        subprocess.run(
            ["g++", *how, str(SOURCE), "-o", str(own), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"],
            check=True,
        )
        own.replace(built)
    return ctypes.CDLL(str(built))
