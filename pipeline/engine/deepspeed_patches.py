"""Every change to DeepSpeed's internals: what is wrong there, the version it was seen in, what is done.

`check_patches` compares the sources that a run's split uses with that version's; `python -m
pipeline.engine.deepspeed_patches` prints the digests of the installed one. `check_configuration` is
DeepSpeed's own validation of a configuration, without a process group.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
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
from torch import Tensor

from pipeline.config.loading import get_dotted
from pipeline.engine.clipping import at_rest
from pipeline.errors import ConfigError


def digest(place: str) -> str:
    """Of the source of module:object without comments and blank lines; "absent" where there is none."""
    try:
        lines = inspect.getsource(undecorated(at(place))).splitlines()
    except (ImportError, AttributeError, OSError):
        return "absent"
    code = (line for line in lines if line.strip() and not line.strip().startswith("#"))
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def at(place: str) -> Any:
    """What module:object names."""
    module, _, name = place.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def undecorated(source: Any) -> Any:
    """What DeepSpeed's tracing decorator, which names nothing, was put around."""
    held = inspect.getclosurevars(source).nonlocals if inspect.isfunction(source) else {}
    return held.get("func", source)


SEEN_IN = "0.19.8"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_STAGE_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_INIT = "deepspeed.runtime.zero.partition_parameters"
_MODULE_INIT = f"{_INIT}:InsertPostInitMethodToModuleSubClasses"
_LAYERS = "deepspeed.module_inject.layers"
_FP16 = "deepspeed.runtime.fp16"
_UNFUSED = f"{_FP16}.unfused_optimizer:FP16_UnfusedOptimizer"
_ZERO = "deepspeed.runtime.zero"
_SWAP = "deepspeed.runtime.swap_tensor"
_SWAPPER = f"{_SWAP}.partitioned_optimizer_swapper"
_PIPELINED = f"{_SWAP}.pipelined_optimizer_swapper"
_RELEASED = (
    f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator."
    "_PartitionedParameterCoordinator__params_to_release"
)
_DIRECT_ALIGNMENT = 512  # bytes; what O_DIRECT asks of an address


@dataclass(frozen=True)
class Patch:
    """One change to DeepSpeed, and the sources that it relies on."""

    name: str
    wrong: str
    sources: dict[tuple[str, ...], dict[str, str]]
    """Features of a run that uses the sources, as `features` names them -> module:object -> digest of its
    source in SEEN_IN."""


PATCHES = (
    Patch(
        "no all-reduce over shared memory on a CPU",
        "init_distributed compiles it for a minute, for inference alone; a stale lock of it hangs every run",
        {("CPU",): {"deepspeed.comm.torch:build_shm_op": "5ee7daeb8dd5"}},
    ),
    Patch(
        "fp16 on a CPU",
        "the accelerator asks for instructions that torch does not need",
        {
            ("CPU",): {
                "deepspeed.accelerator.cpu_accelerator:CPU_Accelerator.is_fp16_supported": "a07e48849d21"
            }
        },
    ),
    Patch(
        "first update at stage 0 in half precision",
        "the optimizer's state is allocated by a step with zero gradients that counts: the first real update "
        "of Adam is 0.735 of what it should be, and weights decay once too often",
        {
            ("ZeRO 0", "half precision"): {
                f"{_UNFUSED}.initialize_optimizer_states": "4b974de4ee9d",
                f"{_FP16}.fused_optimizer:FP16_Optimizer.initialize_optimizer_states": "00728394ec1c",
            }
        },
    ),
    Patch(
        "norm, clipping and guard on the device",
        "a step reads flags on the host, one a parameter at stage 0 (engine/clipping.py takes their place)",
        {
            ("ZeRO 0", "half precision"): {f"{_UNFUSED}.step": "c8a7c52aeb92"},
            ("ZeRO 1 or 2",): {f"{_STAGE_2}.step": "ef476af48134"},
            ("ZeRO 3",): {f"{_STAGE_3}._get_norm_groups": "e3d6efe8d05e"},
        },
    ),
    Patch(
        "loss scale at stage 0 in fp16",
        "backward does not multiply the loss by it, step divides the gradients by it: they vanish beside eps",
        {("ZeRO 0", "fp16"): {f"{_ENGINE}.backward": "be188e5b297b"}},
    ),
    Patch(
        "smallest loss scale",
        "an overflow there raises a bare exception in place of a skipped step",
        {("fp16",): {"deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.update_scale": "6341120e8b55"}},
    ),
    Patch(
        "sequence-parallel scale",
        "gradients are divided by the data-parallel ranks alone at stages 0 to 2, and at stage 3 without "
        "reduce_scatter, but by all ranks in stage 3's reduce_scatter_coalesced",
        {
            ("sequence parallelism",): {f"{_ENGINE}._reduce_non_expert_gradients": "4d55928c8bb3"},
            ("sequence parallelism", "ZeRO 1 or 2"): {
                f"{_STAGE_2}.gradient_reduction_w_predivide": "2253b6f33247",
                f"{_STAGE_2}.average_tensor": "fa76f4ed7336",
            },
            ("sequence parallelism", "ZeRO 3"): {
                f"{_STAGE_3}._DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads": "be5541e5d9e9",
                f"{_STAGE_3}.allreduce_bucket": "0ee65733ed74",
            },
        },
    ),
    Patch(
        "gradients swapped to NVMe",
        "they are read back past the page cache into a buffer; where their place there is no multiple of 512 "
        "bytes the read fails without a word: on two ranks any odd number of rows does it",
        {
            ("an optimizer on NVMe",): {
                f"{_SWAPPER}:PartitionedOptimizerSwapper.swap_out_gradients": "a20b87ce7d42",
                f"{_PIPELINED}:PipelinedOptimizerSwapper.swap_out_gradients": "a20b87ce7d42",
                f"{_SWAP}.optimizer_utils:OptimizerStateSwapInfo": "71fdc9201362",
            }
        },
    ),
    Patch(
        "autocast that the engine was not told of",
        "the engine's forward ends it on a GPU; telling it by the configuration would cast parameters too",
        {("half precision",): {f"{_ENGINE}.torch_autocast_enabled": "3f4de9fcc3e8"}},
    ),
    Patch(
        "weights tied over stages",
        "their first broadcast is recorded by autograd, and backward would find it on its way",
        {
            ("pipeline stages",): {
                "deepspeed.runtime.pipe.module:PipelineModule._synchronize_tied_weights": "fdcd7b76e832"
            }
        },
    ),
    Patch(
        "a stage in bf16 that counts no gradient",
        "all of its own are frozen, or it has a tied copy alone: the optimizer stacks the norms of nothing, "
        "which torch refuses",
        {
            ("pipeline stages", "bf16"): {
                "deepspeed.runtime.bf16_optimizer:BF16_Optimizer.get_grads_for_norm": "95f31cf85b62",
                "deepspeed.runtime.utils:get_global_norm_of_tensors": "edfb52ce6dad",
            }
        },
    ),
    Patch(
        "forwards over whole parameters under ZeRO 3",
        "its hooks shard again whatever they find whole, and cannot be switched off to generate",
        {
            ("ZeRO 3",): {
                f"{_ZERO}.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module": "afa5ca111398"
            }
        },
    ),
    Patch(
        "a model after its engine",
        "a module variable and a cache around a method keep it after ZeRO 3, the last outputs after stages",
        {
            ("ZeRO 3",): {
                f"{_ZERO}.parameter_offload:DeepSpeedZeRoOffload.setup_zero_stage3_hooks": "99164d6bdaec",
                _RELEASED: "3bd14567772c",
            },
            ("pipeline stages",): {
                "deepspeed.runtime.pipe.engine:PipelineEngine._exec_forward_pass": "5ef55ee6b8c4"
            },
        },
    ),
    Patch(
        "weights drawn on the CPU in fp32 under ZeRO 3",
        "zero.Init draws on the device in the run's precision, so that a model in shards starts from other "
        "weights (engine/zero3.py, whose class takes these places)",
        {
            ("ZeRO 3",): {
                f"{_INIT}:Init._post_init_method": "d58c68ed7a75",
                f"{_INIT}:Init._zero_init_param": "edd5e8cd81b3",
                f"{_MODULE_INIT}._add_tensor_creation_wrappers": "69736fd61147",
            }
        },
    ),
    Patch(
        "F.linear of compiled blocks under ZeRO 3",
        "its backward looks for the weight's ds_id; torch 2.11 makes a guard of it, so that each block gets "
        "a graph of its own, up to the limit of eight",
        {
            ("ZeRO 3",): {
                f"{_MODULE_INIT}._enable_mem_efficient_linear": "c4e68042b854",
                f"{_ZERO}.linear:zero3_linear_wrap": "c442a889c33a",
            }
        },
    ),
    Patch(
        "matrices cut while they have no values",
        "AutoTP cuts what lies whole on every rank, when the engine is made (engine/tensor_sharding.py, "
        "which calls the cut by itself, before there are values)",
        {
            ("tensor parallelism",): {
                "deepspeed.runtime.engine:DeepSpeedEngine._configure_tensor_parallel": "8c001254e2ae",
                "deepspeed.runtime.engine:DeepSpeedEngine._apply_autotp_partitioning": "1fa67eabb70d",
                f"{_LAYERS}:TensorParallel_Layer.move": "97f65560c4e6",
                "deepspeed.module_inject.auto_tp:AutoTP._slice_embedding": "cb0f0216b891",
            }
        },
    ),
)


def check_patches(config: Mapping[str, Any]) -> None:
    """Compare the sources that this run's patches rely on, before anything is built.

    Args:
        config: The DeepSpeed configuration of the run.

    Raises:
        ConfigError: the installed DeepSpeed differs where the run uses it.
    """
    used = features(config)
    for patch in PATCHES:
        for needed, sources in patch.sources.items():
            changed = [
                place for place, old in sources.items() if used.issuperset(needed) and digest(place) != old
            ]
            if changed:
                raise ConfigError(
                    f"DeepSpeed {deepspeed.__version__}: {changed[0].partition(':')[2]}, which a run with "
                    f"{' and '.join(needed)} uses, is not what it is in {SEEN_IN}, so that "
                    f'"{patch.name}" cannot be corrected; install deepspeed=={SEEN_IN}'
                )


def features(config: Mapping[str, Any]) -> set[str]:
    """Return the features of DeepSpeed that a run uses, by the names that Patch.sources has.

    Args:
        config: The DeepSpeed configuration of the run.
    """
    stage = get_dotted(config, "zero_optimization.stage") or 0
    halves = {name for name in ("bf16", "fp16") if get_dotted(config, f"{name}.enabled") is True}
    degrees = {
        "tensor parallelism": "tensor_parallel.autotp_size",
        "pipeline stages": "pipeline.stages",
        "sequence parallelism": "sequence_parallel_size",
    }
    used = {name for name, key in degrees.items() if (get_dotted(config, key) or 1) > 1}
    used |= halves | {"ZeRO 1 or 2" if stage in (1, 2) else f"ZeRO {stage}"}
    if halves:
        used.add("half precision")
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        used.add("CPU")
    if get_dotted(config, "zero_optimization.offload_optimizer.device") == "nvme":
        used.add("an optimizer on NVMe")
    return used


def prepare_for_cpu() -> None:
    """Nothing to compile before the first collective, and fp16 wherever torch computes in it."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True


def compile_plain_linear() -> None:
    """Have zero.Init put `_linear` in the place of F.linear, where it puts DeepSpeed's own."""
    partition_parameters.zero3_linear_wrap = _linear


def restore_plain_linear() -> None:
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


def first_update_kept(optimizer: torch.optim.Optimizer, device: torch.device) -> AbstractContextManager[None]:
    """Around deepspeed.initialize: the step that only allocates the optimizer's state moves nothing."""
    return at_rest(optimizer, device)


def loss_scale_left_to_us(optimizer: Any, precision: str) -> float:
    """What the loss must be multiplied by because DeepSpeed does not, else 1."""
    return 1.0 if precision != "fp16" or isinstance(optimizer, ZeROOptimizer) else float(optimizer.loss_scale)


def go_on_at_the_minimum(optimizer: Any) -> None:
    """An overflow at the smallest scale is a skipped step; the meters warn, and end a run of nothing else."""
    scaler = getattr(optimizer, "loss_scaler", None)
    if isinstance(scaler, DynamicLossScaler):
        scaler.raise_error_at_min_scale = False


def average_over_all_ranks(engine: Any) -> None:
    """Gradients are averaged over data-parallel times sequence ranks, at every stage."""
    engine.sequence_parallel_size = 1
    engine.optimizer.sequence_parallel_size = 1


def keep_misaligned_gradients(zero_optimizer: Any) -> None:
    """Keeps in memory those gradients that would be read back from the disk to the wrong numbers."""
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
    """The engine's forward leaves the caller's autocast on. It alone reads these two."""
    engine._config.torch_autocast_enabled = True
    engine._config.torch_autocast_dtype = dtype


class TiedPipelineModule(PipelineModule):
    """DeepSpeed's, which shares out tied weights without a trace in autograd."""

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        super()._synchronize_tied_weights()


def have_a_norm_of_nothing(optimizer: Any, device: torch.device) -> None:
    """A stage in bf16 that counts no gradient has the norm 0."""
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
def without_hooks(offload: Any) -> Iterator[None]:
    """A forward neither gathers nor releases: ZeRO 3's hooks would shard what they find whole."""
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


def forget_model(engine: Any) -> None:
    """After the engine's destroy."""
    own = set(engine.module.modules())
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [each for each in stack if each not in own]
    if engine.zero_optimization_stage() == 3:
        undecorated(at(_RELEASED)).cache_clear()  # another engine's is computed again
        restore_plain_linear()
    engine.loss = engine.pipe_buffers = None  # autograd's graph leads to the model


def check_configuration(config: dict[str, Any]) -> None:
    """Have the installed DeepSpeed look at every value: a newer one may refuse what config/ does not know.

    Raises:
        ConfigError: DeepSpeed refuses one, or differs from the version that deepspeed_patches knows where
            this configuration uses it.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    check_patches(config)
    config = copy.deepcopy(config)
    config.pop("train_batch_size", None)  # it would be held to the ranks, who may not have met yet
    try:
        DeepSpeedConfig(config)
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:  # pydantic's error is a ValueError
        raise ConfigError(f"DeepSpeed refuses the configuration: {' '.join(str(error).split())}") from None


if __name__ == "__main__":
    for each in PATCHES:
        for where in chain.from_iterable(each.sources.values()):
            print(f'"{where}": "{digest(where)}",')
