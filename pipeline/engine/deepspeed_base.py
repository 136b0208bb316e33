"""Base of the two engines that use deepspeed.initialize: construction, process groups, state and closing."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import ModuleType
from typing import Any, ClassVar
from weakref import WeakSet

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as sequence_groups
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.pipe import p2p
from deepspeed.sequence import layer
from deepspeed.utils import groups, set_log_level_from_string
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from pipeline.checkpoint.shards import Scalars, Shard, ShardSource
from pipeline.config.deepspeed_check import has_16bit_optimizer_states
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.split import Split
from pipeline.distributed.op_builds import CPU_ADAM, needed_ops
from pipeline.distributed.phases import Phases
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.clipping import StepGate, StepLimitGuard, suppress_steps
from pipeline.engine.deepspeed_patches import (
    continue_at_min_loss_scale,
    drop_model_references,
    prepare_for_cpu,
    use_compilable_linear,
)
from pipeline.engine.deepspeed_state import get_weights_copied_from_masters
from pipeline.engine.interface import StepLimits
from pipeline.engine.optim import PLACEHOLDER_RATE, build_torch_optimizer
from pipeline.engine.replicas import ReplicaDigests
from pipeline.engine.state import RankState, observe_gradients, restore_state
from pipeline.planner.states import fit_bucket_size


class EngineProcessGroups:
    """Destroys the process groups of an engine when it is closed.

    Construct it before any group of the engine is made, call `record` when the engine is complete, and
    `destroy` when it is closed. A group costs two threads and a connection to each of its other ranks.
    DeepSpeed offers groups in module variables to later engines; such a group stays until the last engine
    that uses it is closed.
    """

    _open: ClassVar[WeakSet[EngineProcessGroups]] = WeakSet()  # instances between `record` and `destroy`

    def __init__(self) -> None:
        self._before = _list_groups() - _list_shared_groups()
        self._used: set[Any] = set()

    def record(self) -> None:
        """Record as used the groups made since construction and those in DeepSpeed's module variables."""
        self._used = (_list_groups() - self._before) | _list_shared_groups()
        self._open.add(self)

    def destroy(self) -> None:
        """Destroy the groups that no other open engine uses. Collective; a second call does nothing."""
        self._open.discard(self)
        used = self._used & _list_groups()
        self._used = set()
        used_by_others = set[Any]().union(*(other._used for other in self._open))
        unused = used - used_by_others
        sequence = {
            sequence_groups._SEQUENCE_PARALLEL_GROUP,
            sequence_groups._SEQUENCE_DATA_PARALLEL_GROUP,
        }
        if sequence & unused:
            sequence_groups._release_sequence_parallel_groups()
        # Not decided by the tensor group itself: it may be the job's own group, which is never destroyed.
        if groups._DATA_PARALLEL_GROUP in unused:
            groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
        if p2p._grid is not None and p2p._grid.pp_proc_group in unused:
            p2p._grid = None
        for group in list(distributed_c10d._world.pg_map):  # in order of creation, equal on all ranks
            if group in unused:
                layer._all_to_all_groups.pop(group.group_name, None)  # registry of DeepSpeed's Ulysses
                deepspeed.comm.destroy_process_group(group)
        if not self._open:
            groups.mpu = None


def _list_groups() -> set[Any]:
    """Return all process groups except the job's own, which spans all ranks and outlives every engine."""
    return {group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD}


def _list_shared_groups() -> set[Any]:
    """Return the groups in DeepSpeed's module variables, which later engines use too."""
    in_modules = (
        groups._WORLD_GROUP,
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP,
        groups._TENSOR_MODEL_PARALLEL_GROUP,
        groups._DATA_PARALLEL_GROUP,
        sequence_groups._SEQUENCE_PARALLEL_GROUP,
        sequence_groups._SEQUENCE_DATA_PARALLEL_GROUP,
        *groups._ALL_TO_ALL_GROUP.values(),
    )
    return _list_groups() & set(in_modules)


def build_parallel_state(split: Split) -> ModuleType | None:
    """Make this split's process groups, and return the module from which DeepSpeed reads them (its `mpu`).

    Groups of an earlier engine are used again if their size is the same. Collective. Returns `None` if the
    split has neither tensor nor sequence parallelism.
    """
    groups.mpu = None  # an earlier engine may have left its module here
    if split.tensor_parallel > 1:
        if not _has_size(groups._TENSOR_MODEL_PARALLEL_GROUP, split.tensor_parallel):
            groups._TENSOR_MODEL_PARALLEL_GROUP = None
        groups._init_tp_mesh_device(tensor_model_parallel_size=split.tensor_parallel)
        return groups
    if split.sequence_parallel > 1:
        if not _has_size(sequence_groups._SEQUENCE_PARALLEL_GROUP, split.sequence_parallel):
            sequence_groups._release_sequence_parallel_groups()
            sequence_groups.initialize_sequence_parallel(split.sequence_parallel)
        return sequence_groups
    return None


def _has_size(group: Any, size: int) -> bool:
    """Return whether the group exists and has this number of ranks."""
    return group is not None and dist.get_world_size(group) == size


def drop_hpz_groups() -> None:
    """Make DeepSpeed forget the hpZ groups of an earlier engine or zero.Init. Call it before making a model.

    hpZ shards a second copy of the weights over few ranks (`zero_hpz_partition_size`). The groups are not
    destroyed. DeepSpeed shards parameters over existing hpZ groups even if the
    configuration has no hpZ. With hpZ, zero.Init makes new groups, and fails if some exist.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


# State of the search for an fp16 loss scale: key in a checkpoint -> DeepSpeed's attribute. At ZeRO 0 there is
# no hysteresis.
_LOSS_SCALE_ATTRIBUTES = {
    "loss_scale": "cur_scale",
    "loss_scale_iteration": "cur_iter",
    "loss_scale_last_overflow": "last_overflow_iter",
    "loss_scale_hysteresis": "cur_hysteresis",
}
_MIN_SCALE_ATTRIBUTES = ("min_scale", "min_loss_scale")  # DeepSpeed's two names for the smallest scale


def is_record_shown(record: logging.LogRecord) -> bool:
    """Return whether a record of DeepSpeed's log is shown; a filter for its logger.

    Two warnings are shown only at level INFO and below. One reports skipped steps, which the event
    `non_finite` reports already. The other warns of optimizers other than Adam, but the trainer has tested
    a user's own optimizer before.
    """
    is_redundant = any(words in record.getMessage() for words in ("OVERFLOW!", "untested optimizer"))
    return deepspeed.utils.logger.isEnabledFor(logging.INFO) or not is_redundant


def quiet_deepspeed() -> None:
    """Limit DeepSpeed's log to warnings and errors, or show all of it with `log.console: debug`.

    If the DeepSpeed JSON has a `log_level`, `deepspeed.initialize` sets that level later.
    """
    is_debugged = logging.getLogger("pipeline").isEnabledFor(logging.DEBUG)
    set_log_level_from_string("debug" if is_debugged else "warning")
    deepspeed.utils.logger.addFilter(is_record_shown)


def start_deepspeed(job: Job) -> None:
    """Initialize DeepSpeed with the job's process group, and turn off features that cost time.

    Changes the process: its PATH, its warning filters, and settings of the deepspeed modules.
    """
    quiet_deepspeed()
    # DeepSpeed compiles its ops with ninja, which is beside python also in a venv that is not activated.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    # ZeRO-3 on torch 2.13 warns of a deprecated collective dozens of times per step. The warnings cost 5 % of
    # the step time and fill the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if job.device.type == "cpu":
        prepare_for_cpu()
    use_compilable_linear()
    deepspeed.utils.nvtx.enable_nvtx = False  # an NVTX range around every hook costs time without a profiler
    deepspeed.init_distributed(dist_init_required=False)


def build_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig, config: dict[str, Any], split: Split
) -> torch.optim.Optimizer:
    """Build torch's optimizer, or DeepSpeed's CPU Adam if AdamW's state is offloaded to host memory.

    Call `native_ops.prepare_native_ops` first: it compiles CPU Adam. If the compilation fails, it returns a
    configuration for which this function builds torch's optimizer.

    Args:
        groups: Parameter groups; see optim.parameter_groups.
        optimizer: Optimizer section of the recipe.
        config: DeepSpeed JSON as returned by prepare_native_ops.
        split: Split of the run.

    Raises:
        ConfigError: the user's own optimizer cannot be constructed, or cannot work under this split.
    """
    if CPU_ADAM in needed_ops(config):
        return deepspeed.ops.adam.DeepSpeedCPUAdam(
            groups,
            lr=optimizer.learning_rate or PLACEHOLDER_RATE,
            betas=optimizer.betas,
            eps=optimizer.eps,
            adamw_mode=True,
            fp32_optimizer_states=not has_16bit_optimizer_states(config),
        )
    return build_torch_optimizer(groups, optimizer, split)


def fit_bucket(config: dict[str, Any], num_parameters: int) -> None:
    """Set `reduce_bucket_size` in the configuration, in place, to at most the number of all gradients.

    Without a stated size the bucket has an eighth of the model, between 50 and 500 million elements.
    DeepSpeed's default of 500 million would be allocated in each step. If all gradients fit into one bucket,
    their reduction does not overlap with the backward.
    """
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = fit_bucket_size(zero.get("reduce_bucket_size"), num_parameters)


class DeepSpeedBase(ABC):
    """Implements an Engine without its steps, for every optimizer that deepspeed.initialize returns.

    Trained parameters have the run's precision on the device, and fp32 master weights in the optimizer. So do
    the parameters of adapters: no bucket mixes two dtypes, and a checkpoint contains fp32. Summing or sending
    gradients in fp32 (`data_types.grad_accum_dtype`, `communication_data_type`) changes the loss curve no
    more than the rounding of the weights does. Therefore the JSON may set it, and the trainer does not.
    """

    _optimizer: torch.optim.Optimizer  # a subclass sets it before it calls _initialize

    def __init__(self, num_parameters: int, optimizer: OptimizerConfig, split: Split, job: Job):
        """Prepare the engine before any of its process groups is made.

        A subclass calls `_process_groups.record()` when the engine is complete.

        Args:
            num_parameters: Number of parameters of the whole model.
            optimizer: Optimizer section of the recipe.
            split: Split of the run.
            job: Ranks and process group of the run.
        """
        self.cleanup = ExitStack()
        """Callbacks that `close` runs, the last one first; others may add to them."""
        self._process_groups = EngineProcessGroups()
        self.cleanup.callback(self._process_groups.destroy)
        self.device = job.device
        self.phases = Phases(time.perf_counter, job.device)
        self.precision = split.precision
        self.num_parameters = num_parameters
        self._job = job
        self._max_grad_norm = optimizer.max_grad_norm
        self._was_skipped = torch.zeros((), device=self.device)  # 1 if the trainer's guard skipped the step
        self._missing_loss_scale = 1.0  # see get_missing_loss_scale
        self._scale_state_before: Scalars = {}
        self.replicas: ReplicaDigests | None = None

    def _initialize(self, model: nn.Module, config: dict[str, Any], mpu: Any = None) -> None:
        """Wrap the model and `_optimizer` by deepspeed.initialize. Collective.

        Args:
            model: This rank's model, or its pipeline stage.
            config: Resolved DeepSpeed JSON.
            mpu: Module with the process groups; see build_parallel_state.
        """
        # At stage 0 in half precision DeepSpeed 0.19 allocates the optimizer's state by a step with zero
        # gradients. Adam would count that step, and the first real update would be 0.735 of its size.
        with tag_errors(Phase.OPTIMIZER), suppress_steps(self._optimizer, self.device):
            self._engine, self._zero_optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=self._optimizer,
                config=config,
                mpu=mpu,
                dist_init_required=False,
            )
        self.cleanup.callback(drop_model_references, self._engine)
        self.cleanup.callback(self._engine.destroy)
        continue_at_min_loss_scale(self._zero_optimizer)
        self._step_optimizers = [self._optimizer]
        # With an offload `ratio` below 1, stage 3 has a second optimizer for the part of the model that it
        # steps on the device.
        device_optimizer = getattr(self._zero_optimizer, "backup_optimizer", None)
        if device_optimizer is not None:
            self._step_optimizers.append(device_optimizer)
        self._step_gate = StepGate(self.module, *self._step_optimizers)
        self._limit_guard = StepLimitGuard(self._job, self.module)

    def _prepare_replica_digests(self, key: int, is_sharded: bool) -> None:
        """Set `replicas`. A subclass calls it if other ranks have copies of this rank's tensors.

        Args:
            key: See ReplicaDigests.
            is_sharded: See ReplicaDigests.
        """
        self.replicas = ReplicaDigests(
            key,
            self.module.parameters,
            self._optimizer,
            self.device,
            is_sharded=is_sharded,
            rewritten=partial(get_weights_copied_from_masters, self._zero_optimizer),
        )

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """See Engine.set_batch_division. DeepSpeed updates after that many micro-batches."""
        engine = self._engine
        # Not by DeepSpeed's setters: they multiply by a number of ranks that is None under Ulysses.
        config = engine._config
        dp_world_size = config.train_batch_size // (
            config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
        )
        config.train_micro_batch_size_per_gpu = micro_batch_size
        config.gradient_accumulation_steps = gradient_accumulation_steps
        config.train_batch_size = micro_batch_size * gradient_accumulation_steps * dp_world_size
        if hasattr(engine, "micro_batches"):  # only DeepSpeed's engine of pipeline stages has it
            engine.micro_batches = gradient_accumulation_steps
        engine.micro_steps = 0  # with the old count the next update would come early or late
        if hasattr(self._zero_optimizer, "gradient_accumulation_steps"):
            self._zero_optimizer.gradient_accumulation_steps = gradient_accumulation_steps

    def _guard_by_deepspeed_norm(self) -> None:
        """Enforce step limits by hooks that read DeepSpeed's gradient norm before the optimizer's step."""
        for optimizer in self._step_optimizers:
            optimizer.register_step_pre_hook(self._block_update)
            optimizer.register_step_post_hook(lambda stepped, *_: self._limit_guard.unblock_updates(stepped))

    def _block_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Have the optimizer's step change nothing if the limits refuse it; a hook before the step."""
        if self._limit_guard.has_limits:
            norm = self._zero_optimizer._global_grad_norm
            self._limit_guard.block_update(optimizer, norm / self._missing_loss_scale)

    def _begin_step(self, limits: StepLimits | None) -> None:
        """Save what a skipped step restores. Call it before the step's first forward."""
        self._limit_guard.begin_step(limits)
        self._scale_state_before = self._get_scale_state() if limits is not None else {}

    def _end_step(self, skipped: Tensor, has_overflowed: bool) -> tuple[Tensor, bool]:
        """Finish a step, and restore the state of the fp16 loss scale if the step was skipped.

        A skipped step leaves no trace, with one exception. If the gradients are not finite, the loss is
        within its limit and the loss scale can fall, then the scale is taken as the cause. After such a step
        DeepSpeed may lower the scale, and the step counts.

        Synchronizes with the device only in fp16 with limits, where DeepSpeed has synchronized already.

        Args:
            skipped: 1 if the engine skipped the step, else 0.
            has_overflowed: Whether DeepSpeed itself skipped the step.

        Returns:
            1 if the step was skipped or refused, else 0; and whether the loss scale is the cause.
        """
        if not self._scale_state_before:  # no limits, or no dynamic loss scale
            return self._limit_guard.end_step(skipped), False
        dynamic_scale = self._find_dynamic_scale()
        minimum = next(
            getattr(dynamic_scale, name) for name in _MIN_SCALE_ATTRIBUTES if hasattr(dynamic_scale, name)
        )
        can_fall = self._scale_state_before["loss_scale"] > minimum
        is_search = has_overflowed and can_fall and not bool(self._limit_guard.is_loss_high())
        skipped = self._limit_guard.end_step(skipped, keeps_buffers=is_search)
        if not is_search and bool(skipped):
            self._set_scale_state(self._scale_state_before)
        return skipped, is_search

    @property
    def module(self) -> nn.Module:
        """See Engine.module. A pipeline stage has the whole model's `config`."""
        return self._engine.module

    def close(self) -> None:
        """See Engine.close."""
        self.cleanup.close()
        self.__dict__ = {"cleanup": self.cleanup}

    @abstractmethod
    def _build_state(self) -> RankState:
        """Return this rank's state of model and optimizer."""

    @abstractmethod
    def _get_checkpoint_names(self) -> list[str]:
        """Return the names of the whole model's parameters and buffers that a checkpoint contains."""

    def shards(self) -> Iterator[Shard]:
        """See EngineState.shards."""
        return self._build_state().shards(None)

    def scalars(self) -> Scalars:
        """See EngineState.scalars."""
        return self._build_state().scalars() | self._get_scale_state()

    def observe_gradients(self, take: Callable[[Shard], None]) -> AbstractContextManager[None]:
        """See Engine.observe_gradients."""
        return observe_gradients(self._step_optimizers, self._build_state, take)

    def hold_step(self, wait: Callable[[], None]) -> None:
        """See EngineState.hold_step."""
        self._step_gate.hold(wait)

    @torch.no_grad()
    def restore(self, source: ShardSource) -> None:
        """See EngineState.restore. If the checkpoint has no loss scale, the engine's stays as it is."""
        restore_state(self._build_state(), source, self._get_checkpoint_names())
        self._set_scale_state(source.scalars)

    def _get_scale_state(self) -> Scalars:
        """Return the state of the loss scale for a checkpoint; empty if the scale is not dynamic."""
        dynamic_scale = self._find_dynamic_scale()
        return {
            key: getattr(dynamic_scale, name)
            for key, name in _LOSS_SCALE_ATTRIBUTES.items()
            if hasattr(dynamic_scale, name)
        }

    def _set_scale_state(self, scalars: Mapping[str, Any]) -> None:
        """Set the state of the loss scale, as far as `scalars` has it. Other keys are ignored."""
        dynamic_scale = self._find_dynamic_scale()
        for key, name in _LOSS_SCALE_ATTRIBUTES.items():
            if key in scalars and hasattr(dynamic_scale, name):
                setattr(dynamic_scale, name, scalars[key])

    def _find_dynamic_scale(self) -> Any:
        """Return the DeepSpeed object that has the state of a dynamic loss scale, or `None` without one."""
        scaler = getattr(self._zero_optimizer, "loss_scaler", None)
        if isinstance(scaler, DynamicLossScaler):
            return scaler
        scale_config = getattr(self._zero_optimizer, "loss_scale_config", None)
        return scale_config if scale_config is not None and scale_config.dynamic_loss_scale else None
