"""Changes to DeepSpeed's internals, each with what is wrong there.

They are made for one version (`optional_packages.DEEPSPEED`). Others stand where they are used: the first
update at stage 0 and the guard on the device in `clipping.py`, weights drawn in fp32 under ZeRO 3 in
`zero3.py`, and matrices that are cut before they have values in `tensor_sharding.py`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor

from pipeline.errors import ConfigError

_DIRECT_ALIGNMENT = 512  # bytes; what O_DIRECT asks of an address


def prepare_for_cpu() -> None:
    """Compile no all-reduce over shared memory, and allow fp16 wherever torch computes in it.

    DeepSpeed compiles that op for a minute, for inference alone. For fp16 it asks for instructions of the
    processor that torch does not need.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def use_compilable_linear() -> None:
    """Have zero.Init put `_linear` in the place of F.linear, where it puts DeepSpeed's own.

    The backward of DeepSpeed's looks for the weight's ds_id. torch makes a guard of it, so that each compiled
    block gets a graph of its own, up to the limit of eight.
    """
    partition_parameters.zero3_linear_wrap = _linear


def restore_torch_linear() -> None:
    """Put torch's F.linear back. DeepSpeed leaves its own there for the rest of the process."""
    patched = partition_parameters.InsertPostInitMethodToModuleSubClasses
    torch.nn.functional.linear = getattr(patched, "linear_bk", torch.nn.functional.linear)


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear, keeping no gathered weight for backward.

    DeepSpeed's keeps the parameter, which is empty once released; torch's a view of the gathered values.
    Compiled code keeps parameters in any case.
    """
    if torch.compiler.is_compiling():
        return torch._C._nn.linear(inputs, weight, bias)
    result: Tensor = zero3_linear_wrap(inputs, weight, bias)
    return result


def get_missing_loss_scale(optimizer: Any, precision: str) -> float:
    """Return what the loss must be multiplied by because DeepSpeed does not, else 1.

    At stage 0 in fp16 its step divides the gradients by the scale, but its backward does not multiply the
    loss by it: the gradients would vanish beside eps.
    """
    return 1.0 if precision != "fp16" or isinstance(optimizer, ZeROOptimizer) else float(optimizer.loss_scale)


def continue_at_min_loss_scale(optimizer: Any) -> None:
    """Skip a step that overflows at the smallest loss scale, where DeepSpeed raises a bare exception.

    The meters warn of such steps, and end a run of nothing else.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        scaler.raise_error_at_min_scale = False


def average_over_all_ranks(engine: Any) -> None:
    """Average gradients over data-parallel times sequence ranks, at every stage.

    DeepSpeed divides by all of them in stage 3's reduce_scatter_coalesced alone, elsewhere by the
    data-parallel ones.
    """
    engine.sequence_parallel_size = 1
    engine.optimizer.sequence_parallel_size = 1


def keep_misaligned_gradients(zero_optimizer: Any) -> None:
    """Keep in memory the gradients that would be read back from NVMe as wrong numbers.

    They are read past the page cache. Where their place in the buffer is no multiple of 512 bytes, the read
    fails without a word: on two ranks any odd number of rows does it.
    """
    swapper = getattr(zero_optimizer, "optimizer_swapper", None)
    if swapper is None:
        return
    swap_out = swapper.swap_out_gradients

    def swap_out_aligned(
        parameter: Tensor, gradient_offsets: list[int], gradient_tensors: list[Tensor]
    ) -> None:
        info = swapper.swap_params_info.get(swapper.parameter_id(parameter))
        aligned = []
        for offset, gradient in zip(gradient_offsets, gradient_tensors, strict=True):
            if info is not None and offset * gradient.element_size() % _DIRECT_ALIGNMENT:
                info.unswapped_gradients[offset] = gradient
            else:
                aligned.append((offset, gradient))
        swap_out(parameter, [offset for offset, _ in aligned], [gradient for _, gradient in aligned])

    swapper.swap_out_gradients = swap_out_aligned


def keep_autocast(engine: Any, dtype: torch.dtype) -> None:
    """Have the engine's forward leave the caller's autocast on, which it ends on a GPU.

    Its forward alone reads these two. Setting them in the configuration would cast the parameters too.
    """
    engine._config.torch_autocast_enabled = True
    engine._config.torch_autocast_dtype = dtype


class TiedPipelineModule(PipelineModule):
    """DeepSpeed's module, whose first broadcast of tied weights autograd does not record."""

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


def allow_norm_without_gradients(optimizer: Any, device: torch.device) -> None:
    """Give a stage in bf16 that counts no gradient the norm 0: DeepSpeed stacks the norms of nothing.

    Such a stage has nothing but frozen weights, or a tied copy alone.
    """
    if not isinstance(optimizer, BF16_Optimizer):
        return
    gradients = optimizer.get_grads_for_norm

    def counted(for_clipping: bool = False) -> Any:
        found = gradients(for_clipping)
        if for_clipping or found[0]:
            return found
        return [torch.zeros(1, device=device)], found[1]

    optimizer.get_grads_for_norm = counted


@contextmanager
def disable_zero3_hooks(offload: Any) -> Iterator[None]:
    """Have forwards neither gather nor release: ZeRO 3's hooks would shard what they find whole."""
    handles = [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]
    tables = {id(table): table for handle in handles if (table := handle.hooks_dict_ref()) is not None}
    before = {key: dict(table) for key, table in tables.items()}
    for handle in handles:
        if (table := handle.hooks_dict_ref()) is not None:
            table.pop(handle.id, None)
    try:
        yield
    finally:
        for key, table in tables.items():
            table.clear()
            table.update(before[key])  # in their order


def drop_model_references(engine: Any) -> None:
    """Drop what still refers to the model after the engine's destroy.

    At ZeRO 3 these are a module variable and a cache around a method, with stages the last outputs.
    """
    own = set(engine.module.modules())
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each not in own]
    if engine.zero_optimization_stage() == 3:
        # Decorated for tracing. Another engine's is computed again.
        released = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(released).nonlocals["func"].cache_clear()
        restore_torch_linear()
    engine.loss = engine.pipe_buffers = None  # autograd's graph leads to the model


def check_with_deepspeed(config: dict[str, Any]) -> None:
    """Have the installed DeepSpeed look at every value: it may refuse what config/ does not know.

    Raises:
        ConfigError: DeepSpeed refuses one.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    config = copy.deepcopy(config)
    config.pop("train_batch_size", None)  # it would be held to the ranks, who may not have met yet
    try:
        DeepSpeedConfig(config)
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:  # pydantic's error is a ValueError
        raise ConfigError(f"DeepSpeed refuses the configuration: {' '.join(str(error).split())}") from None
