"""Fakes a Hopper GPU in any build of torch: its tensors have shapes, dtypes and devices, but no values.

Operators run their checks and meta functions, forward and backward, including those of the fused kernels.
While `may_read` is False, a host read is an error. Use it in a separate process: torch considers CUDA
available from then on.
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
    """The host waited for the device while `may_read` was False."""


class FakeCuda(TorchDispatchMode):
    """Runs operators on CUDA tensors as fakes, and operators on host tensors for real."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = FakeTensorMode()
        self.may_read = True
        """Whether the host may read a value and wait for the device; otherwise that is an error."""
        self.boolean_value = False
        """Value of every boolean that the host reads. Numbers are 1, and copies to host tensors write 0."""

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
        if name == "copy_":  # copies on the device, to the host and from the host
            assert torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape
            if isinstance(args[0], FakeTensor):
                return args[0]
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                self.wait()
            return args[0].zero_()
        if name == "_efficient_attention_backward":
            # Its meta function in torch 2.11 to 2.13 lacks arguments.
            with self._fakes:
                return *(torch.empty_like(each) for each in args[1:4]), torch.empty_like(args[1][:0])
        if name == "_to_copy" and torch.device(kwargs.get("device") or DEVICE).type == "cpu":
            if not kwargs.get("non_blocking"):
                self.wait()
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name == "_local_scalar_dense" and self.may_read:
            return self.boolean_value if args[0].dtype == torch.bool else 1.0
        if func is torch.ops.aten.addmm.dtype_out:  # its decomposition in torch 2.11 is wrong
            assert kwargs["out"].dtype == args[3]
            assert args[1].dtype == args[2].dtype
            func = torch.ops.aten.add_.Tensor
            args = (kwargs["out"], args[1].float() @ args[2])
            kwargs = {}
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        with self._fakes:
            return func(*fake_args, **fake_kwargs)

    def wait(self, *_: Any) -> None:
        """Stand for a wait of the host; raise HostWaitsError where that is an error."""
        if not self.may_read:
            raise HostWaitsError

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake of a tensor.

        The mode's own converter keeps weak references, with which torch refuses to turn a parameter into a
        fake.
        """
        if isinstance(tensor, FakeTensor):
            return tensor
        with self._fakes:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )


class _DataSetter(TorchFunctionMode):
    """Lets `parameter.data = tensor` turn a real parameter into a fake one, or the reverse, in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            parameter, data = args
            are_fake = [isinstance(each, FakeTensor) for each in args]
            if are_fake[0] != are_fake[1] or (all(are_fake) and parameter.device != data.device):
                attributes = dict(vars(parameter))
                _swap(parameter, torch.nn.Parameter(data, parameter.requires_grad))
                vars(parameter).update(attributes)
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
    **options: Any,
) -> torch.Tensor:
    """Run causal attention without a mask by the kernel that torch chooses on a Hopper."""
    if not isinstance(query, FakeTensor) or not options.get("is_causal") or attn_mask is not None:
        return _sdpa(query, key, value, attn_mask, enable_gqa=enable_gqa, **options)
    assert key.shape[1] == query.shape[1] or enable_gqa
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (t.to(torch.get_autocast_dtype("cuda")) for t in (query, key, value))
    arguments = (None, True, options.get("dropout_p", 0.0), True)  # bias, log-sum-exp, dropout, is_causal
    if query.dtype == torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(query, key, value, *arguments, scale=options.get("scale"))[0]
    kernel = torch.ops.aten._scaled_dot_product_cudnn_attention
    return kernel(query, key, value, *arguments, False, scale=options.get("scale"))[0]


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors as torch.utils.swap_tensors does, also if there are weak references to them."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


_init_process_group = dist.init_process_group


def _join(backend: str, *, device_id: torch.device | None = None, **how: Any) -> None:
    """Start a process group of gloo in place of NCCL, which a CPU build of torch does not have."""
    assert (backend, device_id) == ("cpu:gloo,cuda:nccl", DEVICE)
    _init_process_group("gloo", **how)


class _Stream:
    """Has the methods of torch.cuda.Stream and Event that the trainer and DeepSpeed use."""

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
    """Fake one Hopper GPU, `DEVICE`, for torch and DeepSpeed inside of the block."""
    _build_library().pretend()
    fake = FakeCuda()
    accelerator = get_accelerator()
    only_lift_cpu = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a host tensor first
    with ExitStack() as stack:
        stack.callback(torch._C._set_only_lift_cpu_tensors, only_lift_cpu)
        for owner, name, value in _list_replacements(fake):
            stack.enter_context(patch.object(owner, name, value))
        set_accelerator(CUDA_Accelerator())
        stack.callback(set_accelerator, accelerator)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_DataSetter())
        yield stack.enter_context(fake)


def _list_replacements(fake: FakeCuda) -> list[tuple[Any, str, Any]]:
    """Return (owner, attribute, replacement) of every function with which torch would reach a driver."""
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
    # torch does not compile under a dispatch mode, so functions and modules run eagerly.
    replaced.append((torch, "compile", lambda function, **_: function))
    replaced.append((torch.nn.Module, "compile", lambda *_, **__: None))
    # There is one rank, and this comparison between ranks would read values.
    replaced.append((partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda _: None))
    # module.to("cuda") keeps its parameter objects, as on a GPU, although they become fakes.
    replaced.append((torch.__future__, "_swap_module_params_on_conversion", True))
    replaced.append((torch.utils, "swap_tensors", _swap))
    # record_stream needs a real stream. A CUDA build starts a CUDA context at each entry of a fake mode.
    replaced.append((torch.Tensor, "record_stream", lambda *_: None))
    replaced.append((fake_tensor, "init_gpu_context", lambda _: None))
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        replaced.append((torch._C, "_ensureCUDADeviceGuardSet", lambda: None))
    return replaced


def _build_library() -> ctypes.CDLL:
    """Load the library of fake_cuda.cpp; compile it first, in seconds, if this environment has none."""
    library = Path(os.environ.get("TORCH_EXTENSIONS_DIR", sys.prefix)) / f"fake_cuda-{torch.__version__}.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        root = Path(torch.__file__).parent
        options = ["-std=c++20", "-shared", "-fPIC", "-O0", f"-I{root / 'include'}"]
        subprocess.run(
            ["g++", *options, str(SOURCE), "-o", str(partial), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"],
            check=True,
        )
        partial.replace(library)
    return ctypes.CDLL(str(library))
