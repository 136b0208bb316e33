"""What both engines around deepspeed.initialize have in common: how they are wrapped, what a checkpoint keeps
of them, and how they end.
"""

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
from pipeline.distributed.progress import Phase, phase
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
    """The process groups of one engine: made before them, `keep` once it stands, `destroy` at its end.

    Each group is a connection to every other rank in it and two threads. One that another open engine found
    in DeepSpeed's module variables, and took, stays until that one is closed.
    """

    _open: ClassVar[WeakSet[EngineProcessGroups]] = WeakSet()

    def __init__(self) -> None:
        self._before = _living() - _shared()
        self._used: set[Any] = set()

    def keep(self) -> None:
        """Note the groups made since then, and those in DeepSpeed's module variables, as this engine's."""
        self._used = (_living() - self._before) | _shared()
        self._open.add(self)

    def destroy(self) -> None:
        """Destroy the groups that no other open engine uses. Every rank calls it; twice does nothing."""
        self._open.discard(self)
        used, self._used = self._used & _living(), set()
        taken = set[Any]().union(*(other._used for other in self._open))
        mine = used - taken
        if {sequence_groups._SEQUENCE_PARALLEL_GROUP, sequence_groups._SEQUENCE_DATA_PARALLEL_GROUP} & mine:
            sequence_groups._release_sequence_parallel_groups()
        if groups._DATA_PARALLEL_GROUP in mine:  # the tensor group may be the job's own, which stays
            groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
        if p2p._grid is not None and p2p._grid.pp_proc_group in mine:
            p2p._grid = None
        for group in list(distributed_c10d._world.pg_map):  # in the order they were made, as on other ranks
            if group in mine:
                layer._all_to_all_groups.pop(group.group_name, None)  # Ulysses' registry
                deepspeed.comm.destroy_process_group(group)
        if not self._open:
            groups.mpu = None


def _living() -> set[Any]:
    """Return all groups but the job's own, which a mesh over all ranks takes for one of its dimensions."""
    return {group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD}


def _shared() -> set[Any]:
    """Return the groups that DeepSpeed keeps for whichever engine comes next."""
    named = (
        groups._WORLD_GROUP,
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP,
        groups._TENSOR_MODEL_PARALLEL_GROUP,
        groups._DATA_PARALLEL_GROUP,
        sequence_groups._SEQUENCE_PARALLEL_GROUP,
        sequence_groups._SEQUENCE_DATA_PARALLEL_GROUP,
        *groups._ALL_TO_ALL_GROUP.values(),
    )
    return _living() & set(named)


def build_parallel_state(split: Split) -> ModuleType | None:
    """Return the module that DeepSpeed asks for its groups (its `mpu`), with this split's groups. Collective.

    None where every rank is a data-parallel one.
    """
    groups.mpu = None  # an engine before this one may have left its own
    if split.tensor_parallel > 1:
        if not _is_of(groups._TENSOR_MODEL_PARALLEL_GROUP, split.tensor_parallel):
            groups._TENSOR_MODEL_PARALLEL_GROUP = None
        groups._init_tp_mesh_device(tensor_model_parallel_size=split.tensor_parallel)
        return groups
    if split.sequence_parallel > 1:
        if not _is_of(sequence_groups._SEQUENCE_PARALLEL_GROUP, split.sequence_parallel):
            sequence_groups._release_sequence_parallel_groups()
            sequence_groups.initialize_sequence_parallel(split.sequence_parallel)
        return sequence_groups
    return None


def _is_of(group: Any, size: int) -> bool:
    return group is not None and dist.get_world_size(group) == size


def drop_hpz_groups() -> None:
    """Drop the hpZ groups of an engine or a zero.Init before this one. Call it before a model is made.

    DeepSpeed divides parameters by whatever groups there are, also where the configuration has no hpZ; where
    it has, zero.Init makes its own and refuses to do so twice.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


# The search for an fp16 loss scale: in a checkpoint -> DeepSpeed's word. ZeRO 0 keeps no hysteresis.
_SEARCH = {
    "loss_scale": "cur_scale",
    "loss_scale_iteration": "cur_iter",
    "loss_scale_last_overflow": "last_overflow_iter",
    "loss_scale_hysteresis": "cur_hysteresis",
}
_LOWEST = ("min_scale", "min_loss_scale")  # DeepSpeed's words for where it ends


def is_record_shown(record: logging.LogRecord) -> bool:
    """Return whether a line of DeepSpeed's log is shown.

    The event `non_finite` reports skipped steps; DeepSpeed's line for them comes with its other news. So does
    its line for every optimizer but Adam: a user's own was tried out before.
    """
    is_told_elsewhere = any(words in record.getMessage() for words in ("OVERFLOW!", "untested optimizer"))
    return deepspeed.utils.logger.isEnabledFor(logging.INFO) or not is_told_elsewhere


def quiet_deepspeed() -> None:
    """Show DeepSpeed's warnings and errors, or all of its log with `log.console: debug`.

    Where its JSON has a `log_level`, `deepspeed.initialize` sets that one later.
    """
    is_debugged = logging.getLogger("pipeline").isEnabledFor(logging.DEBUG)
    set_log_level_from_string("debug" if is_debugged else "warning")
    deepspeed.utils.logger.addFilter(is_record_shown)


def start_deepspeed(job: Job) -> None:
    """Hand the job's process group to DeepSpeed, and turn off what a CPU run does not need."""
    quiet_deepspeed()
    # ninja, which compiles DeepSpeed's ops, lies beside the venv's python, activated or not.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    # ZeRO-3 on torch 2.13 warns of a deprecated collective dozens of times a step: 5 % of it, and the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if job.device.type == "cpu":
        prepare_for_cpu()
    use_compilable_linear()
    deepspeed.utils.nvtx.enable_nvtx = False  # a range around every hook, for a profiler that is not there
    deepspeed.init_distributed(dist_init_required=False)


def build_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig, config: dict[str, Any], split: Split
) -> torch.optim.Optimizer:
    """Build torch's optimizer, or DeepSpeed's CPU Adam where AdamW's state lies in host memory.

    `native_ops.prepare_native_ops` has built it, or asked for torch's where it cannot be.
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
    """Make the bucket for gradients no larger than all of them, in place."""
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = fit_bucket_size(zero.get("reduce_bucket_size"), num_parameters)


class DeepSpeedBase(ABC):
    """An Engine but for its steps, whatever deepspeed.initialize makes of the optimizer."""

    _optimizer: torch.optim.Optimizer

    def __init__(self, num_parameters: int, optimizer: OptimizerConfig, split: Split, job: Job):
        """Prepare, before any process group of the engine is made. Call `_groups.keep()` once it is built."""
        self.closing = ExitStack()
        self._groups = EngineProcessGroups()
        self.closing.callback(self._groups.destroy)
        self.device = job.device
        self.phases = Phases(time.perf_counter, job.device)
        self.precision = split.precision
        self.num_parameters = num_parameters
        self._job = job
        self._max_grad_norm = optimizer.max_grad_norm
        self._skipped = torch.zeros((), device=self.device)
        self._own_loss_scale = 1.0
        self._search_before: Scalars = {}
        self.replicas: ReplicaDigests | None = None

    def _initialize(self, model: nn.Module, config: dict[str, Any], mpu: Any = None) -> None:
        """Put DeepSpeed around the model and `_optimizer`. Collective."""
        # At stage 0 in half precision DeepSpeed allocates the optimizer's state by a step of zero gradients.
        with phase(Phase.OPTIMIZER), suppress_steps(self._optimizer, self.device):
            self._engine, self._zero_optimizer, _, _ = deepspeed.initialize(
                model=model,
                optimizer=self._optimizer,
                config=config,
                mpu=mpu,
                dist_init_required=False,
            )
        self.closing.callback(drop_model_references, self._engine)
        self.closing.callback(self._engine.destroy)
        continue_at_min_loss_scale(self._zero_optimizer)
        # Stage 3 steps on the device what an offload's `ratio` leaves there.
        other = getattr(self._zero_optimizer, "backup_optimizer", None)
        self._stepped = [self._optimizer, *([] if other is None else [other])]
        self._gate = StepGate(self.module, *self._stepped)
        self._refusal = StepLimitGuard(self._job, self.module)

    def _compare_replicas(self, key: int, is_sharded: bool) -> None:
        """Have replicas compared; see Replicas."""
        self.replicas = ReplicaDigests(
            key,
            self.module.parameters,
            self._optimizer,
            self.device,
            is_sharded=is_sharded,
            rewritten=partial(get_weights_copied_from_masters, self._zero_optimizer),
        )

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """See Engine.set_batch_division. DeepSpeed reads these numbers where it counts to the next update."""
        engine = self._engine
        numbers = engine._config  # DeepSpeed's setters multiply by a number of ranks that Ulysses leaves None
        ranks = numbers.train_batch_size // (
            numbers.train_micro_batch_size_per_gpu * numbers.gradient_accumulation_steps
        )
        numbers.train_micro_batch_size_per_gpu = micro_batch_size
        numbers.gradient_accumulation_steps = gradient_accumulation_steps
        numbers.train_batch_size = micro_batch_size * gradient_accumulation_steps * ranks
        if hasattr(engine, "micro_batches"):  # of pipeline stages
            engine.micro_batches = gradient_accumulation_steps
        self._engine.micro_steps = 0  # of updates that are done: else the next would come early or late
        if hasattr(self._zero_optimizer, "gradient_accumulation_steps"):
            self._zero_optimizer.gradient_accumulation_steps = gradient_accumulation_steps

    def _refuse_steps(self) -> None:
        """Hold steps whose norm is DeepSpeed's to their limits: it has the norm before they begin."""
        for optimizer in self._stepped:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(lambda stepped, *_: self._refusal.after(stepped))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._refusal.has_limits:
            norm = self._zero_optimizer._global_grad_norm
            self._refusal.before(optimizer, norm / self._own_loss_scale)

    def _begin(self, limits: StepLimits | None) -> None:
        """Prepare for a step's first forward."""
        self._refusal.begin(limits)
        self._search_before = self._search() if limits is not None else {}

    def _end(self, skipped: Tensor, has_overflowed: bool) -> tuple[Tensor, bool]:
        """Finish a step, and return whether it was left out and whether the loss scale is why.

        In fp16 a step that is left out leaves the search for a loss scale where it was. If the scale is why,
        it counts: gradients that are not finite, of a normal loss, at a scale that can fall.

        Args:
            skipped: 1 where it was not taken, else 0.
            has_overflowed: DeepSpeed left it out.

        Returns:
            1 where it was left out or refused; and whether the scale is why. Reads the device in fp16 alone,
            where DeepSpeed has read it.
        """
        if not self._search_before:
            return self._refusal.end(skipped), False
        searched = self._searched()
        lowest = next(getattr(searched, word) for word in _LOWEST if hasattr(searched, word))
        can_fall = self._search_before["loss_scale"] > lowest
        is_search = has_overflowed and can_fall and not bool(self._refusal.is_loss_high())
        skipped = self._refusal.end(skipped, counts=is_search)
        if not is_search and bool(skipped):
            self._set_search(self._search_before)
        return skipped, is_search

    @property
    def module(self) -> nn.Module:
        """See Engine.module. A stage has the whole model's `config`."""
        return self._engine.module

    def close(self) -> None:
        """See Engine.close."""
        self.closing.close()
        self.__dict__ = {"closing": self.closing}

    @abstractmethod
    def _state(self) -> RankState:
        """Return what this rank holds."""

    @abstractmethod
    def _names(self) -> list[str]:
        """Return the names of all that a checkpoint keeps of the whole model."""

    def shards(self) -> Iterator[Shard]:
        """See EngineState.shards."""
        return self._state().shards(None)

    def scalars(self) -> Scalars:
        """See EngineState.scalars."""
        return self._state().scalars() | self._search()

    def observe_gradients(self, take: Callable[[Shard], None]) -> AbstractContextManager[None]:
        """See Engine.observe_gradients."""
        return observe_gradients(self._stepped, self._state, take)

    def hold_step(self, wait: Callable[[], None]) -> None:
        """See EngineState.hold_step."""
        self._gate.hold(wait)

    @torch.no_grad()
    def restore(self, source: ShardSource) -> None:
        """See EngineState.restore. Where a run had no loss scale, the search stays at its beginning."""
        restore_state(self._state(), source, self._names())
        self._set_search(source.scalars)

    def _search(self) -> Scalars:
        searched = self._searched()
        return {key: getattr(searched, word) for key, word in _SEARCH.items() if hasattr(searched, word)}

    def _set_search(self, scalars: Mapping[str, Any]) -> None:
        searched = self._searched()
        for key, word in _SEARCH.items():
            if key in scalars and hasattr(searched, word):
                setattr(searched, word, scalars[key])

    def _searched(self) -> Any:
        """Return what keeps the state of the search for a loss scale, or `None` if there is no search."""
        scaler = getattr(self._zero_optimizer, "loss_scaler", None)
        if isinstance(scaler, DynamicLossScaler):
            return scaler
        kept = getattr(self._zero_optimizer, "loss_scale_config", None)
        return kept if kept is not None and kept.dynamic_loss_scale else None
