"""Shards parameters for ZeRO-3 while a model is built. Gathers them for each block, or all for generation.

Initial weights depend on the seed alone. deepspeed.zero.Init itself draws them on the device in the run's
precision, so a sharded model would start from other weights than an unsharded one. Here each parameter is
drawn on the CPU in fp32, cast, and sharded before the next module is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pipeline.distributed.machine import available_memory
from pipeline.distributed.phases import Phases
from pipeline.distributed.process_group import Job
from pipeline.engine.deepspeed_base import drop_hpz_groups
from pipeline.engine.deepspeed_patches import disable_zero3_hooks, restore_torch_linear
from pipeline.errors import ModelError
from pipeline.models.blocks import find_leaf_blocks


class _GatherOnUse(TorchFunctionMode):
    """Gathers a sharded parameter when the code that builds the model uses this parameter again.

    A module that draws its children's weights (nn.MultiheadAttention, `self.apply(init)`) would otherwise
    draw into empty tensors, without an error. Gathered parameters are fp32 on the CPU, so the module draws
    the same values as in an unsharded model.

    Args:
        gather: Returns a context in which parameters are gathered; see Sharding.gather.
    """

    # Functions that use no values, so that no parameter is gathered for them.
    FUNCTIONS_WITHOUT_VALUES = frozenset(
        [
            *(
                getattr(Tensor, name).__get__
                for name in ("requires_grad", "grad", "grad_fn", "dtype", "device")
            ),
            vars(torch._C.TensorBase)["requires_grad"].__set__,
            Tensor.requires_grad_,
        ]
    )
    # Maximum number of elements that are gathered at a time: 1 GiB in fp32.
    MAX_ELEMENTS = 2**28

    def __init__(self, gather: Callable[[list[nn.Parameter]], AbstractContextManager[None]]):
        super().__init__()
        self._gather = gather
        self._gathered = ExitStack()  # shards the gathered parameters again
        self._num_gathered = 0  # elements
        self.is_paused = False
        """Whether functions are called without gathering their arguments."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused and func not in self.FUNCTIONS_WITHOUT_VALUES:
            used = [each for each in tree_leaves((args, kwargs)) if hasattr(each, "ds_status")]
            num_needed = sum(each.ds_numel for each in _find_sharded(used))
            if self._num_gathered + num_needed > self.MAX_ELEMENTS:
                self.close()  # this shards parameters of `used` too; all are gathered below
            for each in _find_sharded(used):
                self._num_gathered += each.ds_numel
                self._gathered.enter_context(self._gather([each]))
        return func(*args, **(kwargs or {}))

    def close(self) -> None:
        """Shard the gathered parameters again. Collective."""
        self._gathered.close()
        self._num_gathered = 0


def _find_sharded(parameters: list[Any]) -> list[Any]:
    """Return those parameters that are sharded now, each once."""
    sharded = [p for p in parameters if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    return list({id(p): p for p in sharded}.values())


class _InitOnCpu(deepspeed.zero.Init):
    """Shards modules as zero.Init does, but keeps each in fp32 on the CPU until it is sharded.

    Unlike zero.Init, it does not patch torch's tensor constructors.

    Args:
        config: Content of the DeepSpeed JSON.
        dtype: Dtype of the sharded parameters.
        gather_on_use: Mode that is paused while a module is sharded.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype, gather_on_use: _GatherOnUse):
        super().__init__(config_dict_or_path=config, dtype=dtype)
        self.dtype = dtype  # set again: on devices that support fp16, zero.Init replaces fp32 by fp16
        self._gather_on_use = gather_on_use
        self._deferred: list[nn.Module] = []
        # zero.Init's own patch of `apply` for sharded weights draws in the run's precision.
        deepspeed.zero.Init.override_module_apply = False

    def _post_init_method(self, module: nn.Module) -> None:
        if any(p.is_meta for p in module.parameters(recurse=False)):
            self._deferred.append(module)
            return
        self._gather_on_use.is_paused = True
        super()._post_init_method(module)
        self._gather_on_use.is_paused = False

    def shard_deferred(self) -> None:
        """Shard modules that were built without values and filled later.

        transformers' `from_pretrained` builds them so.
        """
        for module in self._deferred:
            super()._post_init_method(module)

    def _add_tensor_creation_wrappers(self) -> None:
        pass

    def _remove_tensor_creation_wrappers(self) -> None:
        pass

    def _zero_init_param(self, param: nn.Parameter) -> None:
        param.data = param.data.to(device=self.local_device, dtype=self.dtype)
        super()._zero_init_param(param)


class Zero3Sharding:
    """Implements pipeline.models.sharding.Sharding for ZeRO-3.

    Args:
        config: Content of the DeepSpeed JSON.
        dtype: Dtype of floating-point parameters in the engine.
    """

    loads_by_tensor = False

    def __init__(self, config: dict[str, Any], dtype: torch.dtype):
        self.zero3_config: dict[str, Any] | None = config
        self._dtype = dtype

    def construct_empty(self) -> AbstractContextManager[None]:
        """See Sharding.construct_empty. Collective."""
        return self.construct()

    def divide(self, model: nn.Module) -> None:
        """See Sharding.divide."""

    def place(self, model: nn.Module, draws: bool) -> None:
        """See Sharding.place."""

    @contextmanager
    def construct(self) -> Iterator[None]:
        """See Sharding.construct. Collective."""
        assert self.zero3_config is not None
        drop_hpz_groups()
        gather_on_use = _GatherOnUse(self.gather)
        with ExitStack() as on_failure:
            on_failure.callback(restore_torch_linear)
            init = _InitOnCpu(self.zero3_config, self._dtype, gather_on_use)
            with init:
                with gather_on_use:
                    yield
                gather_on_use.close()
                init.shard_deferred()
            on_failure.pop_all()  # a model that was built needs DeepSpeed's F.linear

    @contextmanager
    def gather(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """See Sharding.gather. At the end, all ranks get the values of rank 0. Collective."""
        unique = list(dict.fromkeys(parameters))  # tied weights appear twice
        with deepspeed.zero.GatheredParameters(unique, modifier_rank=0):
            gathered = [p.data for p in unique]
            for p in unique:
                p.data = p.data.to(device="cpu", dtype=torch.float32, copy=True)
            yield
            for p, on_device in zip(unique, gathered, strict=True):
                p.data = on_device.copy_(p.data)


def gather_by_block(model: nn.Module, config: dict[str, Any]) -> None:
    """Make ZeRO 3 gather all parameters of a block together, without hooks inside of the block.

    This halves the host's work. It does nothing if parameters are offloaded to NVMe, since the buffers there
    are too few for a block.

    Args:
        model: Model before deepspeed.initialize.
        config: Content of the DeepSpeed JSON.
    """
    if (config["zero_optimization"].get("offload_param") or {}).get("device") == "nvme":
        return
    for blocks in find_leaf_blocks(model):
        for block in blocks:
            set_z3_leaf_module(block, True)
            if any(p.requires_grad for p in block.parameters()):
                block.register_forward_pre_hook(_require_input_gradient, with_kwargs=True)


def measure_gathers(optimizer: Any, phases: Phases) -> None:
    """Measure the time that a forward waits for its parameters as communication. Do nothing below ZeRO 3.

    Ranks wait there for the slowest one. If this counted as forward, the forwards of all ranks would seem
    equally long. On a GPU the time is measured between two events of the compute stream, which waits for the
    gathering stream. The host does not wait.

    Args:
        optimizer: Optimizer that deepspeed.initialize returned.
        phases: Receiver of the times.
    """
    offload = getattr(optimizer, "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    fetch = coordinator.fetch_sub_module

    def fetch_and_measure(module: nn.Module, forward: bool) -> None:
        if not forward:
            fetch(module, forward)
            return
        with phases.measure("communication"):
            fetch(module, forward)

    coordinator.fetch_sub_module = fetch_and_measure


def _require_input_gradient(
    block: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Make the hidden states a positional input of a block that requires a gradient. A forward pre-hook.

    DeepSpeed removes a block's gradients in a hook on the gradients of its positional inputs. If these need
    no gradient, for example above frozen embeddings, torch calls that hook before the block has gradients,
    and the step fails.

    Args:
        block: Block that is called.
        args: Positional inputs.
        named: Keyword inputs.

    Returns:
        New positional and keyword inputs; `None` if a positional input requires a gradient already, or
        gradients are off.

    Raises:
        ModelError: The block's first input is no floating-point tensor.
    """
    if not torch.is_grad_enabled() or any(_is_float(each) and each.requires_grad for each in args):
        return None
    first = next(iter(inspect.signature(block.forward).parameters))
    hidden, *others = args or (named.get(first),)
    if not _is_float(hidden):
        raise ModelError(
            f"model: the first input of {type(block).__name__} is no floating-point tensor, and ZeRO 3 "
            "needs its gradient; use ZeRO stage 2"
        )
    named = {name: each for name, each in named.items() if args or name != first}
    return (hidden if hidden.requires_grad else hidden.detach().requires_grad_(), *others), named


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@contextmanager
def gather_if_it_fits(optimizer: Any, job: Job, is_requested: bool) -> Iterator[bool]:
    """Gather ZeRO 3's parameters on every rank inside the context if they fit into memory. Collective.

    Yields whether they are gathered. If so, forwards neither gather nor release. If not, forwards gather
    layer by layer, and all ranks have to take part in each.

    Args:
        optimizer: Optimizer that deepspeed.initialize returned.
        job: Ranks of the job.
        is_requested: Whether to gather at all.
    """
    offload = optimizer.parameter_offload
    # Otherwise parameters that the last forward prefetched would be gathered twice.
    offload.get_param_coordinator()._clean_inflight_param_registry()
    sharded = [p for p in offload.module.parameters() if p.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    if not (is_requested and _fit_into_memory(sharded, job)):
        yield False
        return
    with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)), disable_zero3_hooks(offload):
        yield True


def _fit_into_memory(sharded: list[Any], job: Job) -> bool:
    """Return whether all parameters fit into every rank's free memory, and none is on NVMe. Collective.

    As much memory again must be free for activations and the key-value cache.
    """
    on_disk = any(p.ds_tensor.final_location == OffloadDeviceEnum.nvme for p in sharded)
    needed = sum(p.ds_numel * p.dtype.itemsize for p in sharded)
    if job.device.type == "cuda":
        unused = torch.cuda.memory_reserved(job.device) - torch.cuda.memory_allocated(job.device)
        free = torch.cuda.mem_get_info(job.device)[0] + unused
    else:
        free = available_memory() // job.ranks.local_world_size
    too_much = torch.tensor(float(on_disk or 2 * needed > free), device=job.device)
    return bool(job.all_reduce_sum(too_much) == 0)
