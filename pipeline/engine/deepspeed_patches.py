"""Changes to DeepSpeed's internals, each with its reason, and a test that fails without it.

The changes are made for one version (`optional_packages.DEEPSPEED`), and a run with another version ends with
an error. Further changes are in the modules that use them:
    - `clipping.py`: the first update at stage 0, and the guard on the device
    - `zero3.py`: weights drawn in fp32 under ZeRO 3
    - `tensor_sharding.py`: matrices cut before they have values
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

_DIRECT_IO_ALIGNMENT = 512  # bytes; direct I/O (O_DIRECT) requires offsets that are a multiple of it


def prepare_for_cpu() -> None:
    """Turn off the all-reduce over shared memory, and allow fp16 on every CPU.

    Compiling the op of that all-reduce takes a minute, and only `inference_all_reduce` uses it. For fp16
    DeepSpeed requires CPU instructions that torch does not need.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def use_compilable_linear() -> None:
    """Make zero.Init replace F.linear by `_compute_linear` instead of DeepSpeed's own function.

    The backward of DeepSpeed's function reads the weight's `ds_id`. torch.compile guards on that value, so
    each block is compiled again, until torch's limit of eight graphs.
    """
    partition_parameters.zero3_linear_wrap = _compute_linear


def restore_torch_linear() -> None:
    """Restore torch's F.linear, which zero.Init replaces for the rest of the process.

    Does nothing if zero.Init has not replaced it.
    """
    base_class = partition_parameters.InsertPostInitMethodToModuleSubClasses
    torch.nn.functional.linear = getattr(base_class, "linear_bk", torch.nn.functional.linear)


def _compute_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear without saving a gathered weight for backward.

    torch's function saves a view of the gathered values. DeepSpeed's function saves the parameter, which is
    empty after its release. Compiled code saves parameters in any case, so it uses torch's function.
    """
    if torch.compiler.is_compiling():
        return torch._C._nn.linear(inputs, weight, bias)
    result: Tensor = zero3_linear_wrap(inputs, weight, bias)
    return result


def get_missing_loss_scale(optimizer: Any, precision: str) -> float:
    """Return the loss scale if DeepSpeed does not multiply the loss by it, else 1.

    At stage 0 in fp16 DeepSpeed 0.19 divides the gradients by the scale in its step. But `engine.backward`
    multiplies the loss by the scale only for ZeRO optimizers. Without the factor the gradients would be
    negligible beside Adam's eps.

    Args:
        optimizer: DeepSpeed's optimizer, which wraps the inner one.
        precision: Precision of the run: fp32, bf16 or fp16.
    """
    if precision != "fp16" or isinstance(optimizer, ZeROOptimizer):
        return 1.0
    return float(optimizer.loss_scale)


def remove_dataloader_check(engine: Any) -> None:
    """Remove DeepSpeed's check that the ranks of a tensor-parallel group get equal batches.

    It pickles the arguments of the first forward and compares them. If that forward generates text, it has a
    key-value cache, and the check fails. The loader of the run gives these ranks equal batches.
    """
    hook = getattr(engine, "first_dataloader_check", None)
    if hook is not None:
        hook.remove()
        engine.first_dataloader_check = None


def continue_at_min_loss_scale(optimizer: Any) -> None:
    """Make DeepSpeed skip a step that overflows at the smallest loss scale, instead of raising an error.

    The trainer itself warns of skipped steps and ends a run after too many in a row.
    """
    scaler = getattr(optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        scaler.raise_error_at_min_scale = False


def average_over_all_ranks(engine: Any) -> None:
    """Make every stage average gradients over all data-parallel and sequence-parallel ranks.

    DeepSpeed divides gradients by the number of all these ranks only in stage 3's reduce_scatter_coalesced.
    Elsewhere it divides by the number of data-parallel ranks.
    """
    engine.sequence_parallel_size = 1
    engine.optimizer.sequence_parallel_size = 1


def keep_misaligned_gradients(zero_optimizer: Any) -> None:
    """Keep in memory the gradients that DeepSpeed would read back from NVMe with wrong values.

    DeepSpeed 0.19.8 reads gradients by direct I/O. If a gradient's offset in the buffer is not a multiple of
    512 bytes, the read fails without an error. On two ranks any odd number of rows causes that. Does nothing
    if the optimizer state is not swapped to NVMe.
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
            if info is not None and offset * gradient.element_size() % _DIRECT_IO_ALIGNMENT:
                info.unswapped_gradients[offset] = gradient
            else:
                aligned.append((offset, gradient))
        swap_out(parameter, [offset for offset, _ in aligned], [gradient for _, gradient in aligned])

    swapper.swap_out_gradients = swap_out_aligned


def keep_autocast(engine: Any, dtype: torch.dtype) -> None:
    """Make the engine's forward keep the caller's autocast. On a GPU DeepSpeed would turn it off.

    Only the engine's forward reads the two attributes set here. The same settings in the JSON would also cast
    the parameters.
    """
    engine._config.torch_autocast_enabled = True
    engine._config.torch_autocast_dtype = dtype


class TiedPipelineModule(PipelineModule):
    """Runs DeepSpeed's first broadcast of tied weights without recording it for autograd."""

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


def allow_norm_without_gradients(optimizer: Any, device: torch.device) -> None:
    """Make a bf16 pipeline stage without counted gradients have the norm 0.

    DeepSpeed would fail by stacking an empty list of norms. Such a stage has only frozen weights, or only the
    copy of a tied weight. Does nothing in other precisions.
    """
    if not isinstance(optimizer, BF16_Optimizer):
        return
    get_grads_for_norm = optimizer.get_grads_for_norm

    def get_gradients(for_clipping: bool = False) -> Any:
        result = get_grads_for_norm(for_clipping)
        if for_clipping or result[0]:
            return result
        return [torch.zeros(1, device=device)], result[1]

    optimizer.get_grads_for_norm = get_gradients


@contextmanager
def disable_zero3_hooks(offload: Any) -> Iterator[None]:
    """Remove ZeRO 3's hooks inside the context, so that forwards neither gather nor release parameters.

    The hooks would shard parameters that the caller has gathered.

    Args:
        offload: DeepSpeed's DeepSpeedZeRoOffload, which has installed the hooks.
    """
    tables: dict[int, Any] = {}
    before: dict[int, dict[int, Any]] = {}
    for handle in [offload.fwd_pre_hook, *offload.forward_hooks, *offload.backward_hooks]:
        table = handle.hooks_dict_ref()  # `None` if the module is gone
        if table is not None:
            if id(table) not in tables:
                tables[id(table)] = table
                before[id(table)] = dict(table)
            table.pop(handle.id, None)
    try:
        yield
    finally:
        for key, table in tables.items():
            table.clear()
            table.update(before[key])  # in the original order


def drop_model_references(engine: Any) -> None:
    """Remove references to the model that remain after DeepSpeed's `engine.destroy()`.

    At ZeRO 3 these are a module variable and the cache of a method; with pipeline stages the last outputs.
    At ZeRO 3 torch's F.linear is restored too.
    """
    modules = set(engine.module.modules())
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each not in modules]
    if engine.zero_optimization_stage() == 3:
        # The cached method is inside a tracing decorator. Other engines compute their cache entries again.
        decorated = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
        inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()
        restore_torch_linear()
    engine.loss = engine.pipe_buffers = None  # their autograd graphs refer to the model


def check_with_deepspeed(config: dict[str, Any]) -> None:
    """Validate the configuration by the installed DeepSpeed, which may refuse values that config/ accepts.

    Sets the level of DeepSpeed's log to WARNING.

    Args:
        config: Resolved DeepSpeed JSON. It is not changed.

    Raises:
        ConfigError: DeepSpeed refuses a value.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    config = copy.deepcopy(config)
    config.pop("train_batch_size", None)  # checked against the number of ranks, which may not be known yet
    try:
        DeepSpeedConfig(config)
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:  # pydantic's error is a ValueError
        raise ConfigError(f"DeepSpeed refuses the configuration: {' '.join(str(error).split())}") from None
