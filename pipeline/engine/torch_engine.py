"""Engine in plain PyTorch: one process, nn.DataParallel, or DistributedDataParallel.

Tests compare every other split with its results.
"""

from __future__ import annotations

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from pipeline.checkpoint.shards import Scalars, Shard, ShardSource
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.schema import EngineConfig
from pipeline.config.split import Split
from pipeline.distributed.phases import Phases
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.clipping import StepGate, StepLimitGuard, clip_and_guard
from pipeline.engine.interface import (
    StepLimits,
    StepResult,
    add_document_bounds,
    backward_scale,
    count_parameters,
    require_gradient_graph,
    stack_count_and_flags,
    to_device,
)
from pipeline.engine.optim import build_torch_optimizer, parameter_groups
from pipeline.engine.replicas import BufferBroadcast, ReplicaDigests
from pipeline.engine.schedule import set_learning_rate
from pipeline.engine.state import (
    ParameterState,
    get_checkpoint_names,
    get_persistent_buffers,
    names_without_gradient,
    observe_gradients,
    place_whole_parameters,
    restore_state,
    warn_of_unused_parameters,
)
from pipeline.errors import ModelError, format_names
from pipeline.models.batch_norm import count_batch_norms
from pipeline.models.generation import GenerationSettings, TokenCallback, generate
from pipeline.objectives import Batch, GlobalBatch, LossSum, Objective, sum_losses

log = logging.getLogger(__name__)


class TorchEngine:
    """Steps a model in plain PyTorch.

    Parameters are fp32, except those of a frozen base. With precision bf16, forward runs under autocast.
    """

    def __init__(
        self, model: nn.Module, optimizer: OptimizerConfig, config: EngineConfig, split: Split, job: Job
    ):
        """Wrap the model as the split says. Collective.

        Args:
            model: Whole model. It is moved to the device in place.
            optimizer: Optimizer section of the recipe.
            config: Engine section of the recipe, with the settings of DistributedDataParallel.
            split: Split of the run: `single`, `dp` or `ddp`.
            job: Ranks and process group of the run.

        Raises:
            ConfigError: the user's own optimizer cannot be used, or a pattern of optimizer.groups matches no
                trained parameter.
            ModelError: no parameter requires a gradient.
        """
        self.device = job.device
        self.phases = Phases(time.perf_counter, job.device)
        self.precision = split.precision
        self.dp_rank = self.seed_rank = job.ranks.rank
        self.dp_world_size = split.dp_world_size
        self.module = model.to(job.device)
        self.num_parameters = count_parameters(model)
        self._job = job
        self._max_grad_norm = optimizer.max_grad_norm
        groups = parameter_groups(model.named_parameters(), optimizer)
        self._parameters = [p for group in groups for p in group["params"]]
        self._optimizer = build_torch_optimizer(groups, optimizer, split)
        self._step_gate = StepGate(self.module, self._optimizer)
        self._ddp: _CheckedDdp | None = None
        self.replicas: ReplicaDigests | None = None
        self._is_first_step = True
        self._buffer_broadcast = BufferBroadcast(self.module)
        self._limit_guard = StepLimitGuard(job, self.module)
        self._forward_module: nn.Module = self.module
        if split.parallel == "ddp" and job.is_distributed:
            self._ddp = _CheckedDdp(self.module, config, job)
            self.replicas = ReplicaDigests(0, self.module.parameters, self._optimizer, job.device)
        if split.parallel == "dp":
            self._forward_module = _wrap_data_parallel(self.module, self.precision)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings],
        on_token: TokenCallback | None = None,
    ) -> list[list[int]]:
        """See TextGenerator.generate. Uses the bare module: not collective, and without autocast."""
        with self.phases.measure("generation"):
            return generate(self.module, prompts, settings, self.device, on_token)

    def close(self) -> None:
        """See Engine.close."""
        self.__dict__ = {}

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """Do nothing: each step uses the micro-batches that it receives. See Engine.set_batch_division."""

    def _make_autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    @tag_errors(Phase.FORWARD)  # everything except backward and optimizer step
    def train_step(
        self,
        micro_batches: Sequence[Batch],
        objective: Objective,
        learning_rate: float,
        flags: int,
        limits: StepLimits | None = None,
    ) -> StepResult:
        """See Engine.train_step.

        Raises:
            ModelError: the loss has no autograd graph; or, under `ddp` without
                `engine.find_unused_parameters`, a parameter got no gradient.
        """
        ddp = self._ddp
        if not self.module.training:
            self._forward_module.train()
        # The counts are summed over ranks during the first forward. So this rank waits for late ranks only
        # after that forward.
        finish_sum = self._job.start_all_reduce_sum(
            stack_count_and_flags(micro_batches, objective, flags, self.device)
        )
        self._optimizer.zero_grad(set_to_none=True)
        limit_guard = None if limits is None else self._limit_guard
        if limit_guard is not None:
            limit_guard.begin_step(limits)
        # Not measured as `forward`: an objective may wait for other ranks here, and the time in `forward` is
        # compared between ranks.
        with self._make_autocast(), self.phases.measure("routing"):
            move_to_device = partial(self._move_to_device, objective=objective)
            objective.prepare_step(
                GlobalBatch(
                    self._forward_module,
                    micro_batches,
                    move_to_device,
                    self._job.all_reduce_sum,
                    self.device,
                )
            )
        losses: list[LossSum] = []
        for index, cpu_batch in enumerate(micro_batches):
            batch = self._move_to_device(cpu_batch, objective)
            is_last = index == len(micro_batches) - 1  # its backward sums the gradients over the ranks
            with nullcontext() if ddp is None or is_last else ddp.wrapper.no_sync():
                with self._make_autocast(), self.phases.measure("forward"):
                    loss = objective(self._forward_module if ddp is None else ddp.wrapper, batch)
                require_gradient_graph(loss)
                if index == 0:
                    with nullcontext() if ddp is None else self.phases.measure("communication"):
                        totals = finish_sum()
                    scale = backward_scale(totals[0], self.dp_world_size).float()
                with self.phases.measure("backward"):
                    (loss.minimised * scale).backward()
            losses.append(loss.detached())
        if ddp is not None:
            ddp.check_gradients_complete()
            with self.phases.measure("communication"):
                self._buffer_broadcast.broadcast()
        if self._is_first_step:
            self._is_first_step = False
            warn_of_unused_parameters(names_without_gradient(self.module))
        total = sum_losses(losses, objective.means, self.device)
        with self.phases.measure("optimizer"):
            set_learning_rate(self._optimizer, learning_rate)
            if limit_guard is not None:
                limit_guard.compute_loss(total.loss_sum, totals[0])
            grad_norm, skipped = clip_and_guard(self._optimizer, self._max_grad_norm, refused=limit_guard)
            self._optimizer.step()
        if limit_guard is not None:
            skipped = limit_guard.end_step(skipped)
        return StepResult(
            loss_sum=total.loss_sum,
            global_count=totals[0],
            grad_norm=grad_norm,
            skipped=skipped,
            flags=totals[1],
            loss_scale=None,
            extras=total.extras,
            loss=None if limit_guard is None else limit_guard.loss,
        )

    @tag_errors(Phase.EVALUATION)
    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step. Under `ddp` the bare module computes the loss, without any collective."""
        if self.module.training:
            self._forward_module.eval()
        with self._make_autocast():
            return objective(self._forward_module, self._move_to_device(batch, objective))

    def _move_to_device(self, batch: Batch, objective: Objective) -> Batch:
        """Return the batch on the device, with the bounds of its documents."""
        # nn.DataParallel would divide the bounds over GPUs as it divides rows.
        if not isinstance(self._forward_module, nn.DataParallel):
            batch = add_document_bounds(batch)
        inputs = objective.inputs(self._forward_module, batch)
        return to_device(batch, self.device, self._parameters[0].dtype, inputs)

    def _build_state(self) -> ParameterState:
        ranks = self._job.ranks
        buffers = get_persistent_buffers(self.module)
        replica = (ranks.rank, ranks.world_size) if self._ddp is not None else (0, 1)
        return ParameterState(place_whole_parameters(self.module), buffers, self._optimizer, replica, {})

    def shards(self) -> Iterator[Shard]:
        """See EngineState.shards. Under `ddp` each rank writes a part of the replicated tensors."""
        return self._build_state().shards(None)

    def scalars(self) -> Scalars:
        """See EngineState.scalars."""
        return self._build_state().scalars()

    def observe_gradients(self, take: Callable[[Shard], None]) -> AbstractContextManager[None]:
        """See Engine.observe_gradients."""
        return observe_gradients([self._optimizer], self._build_state, take)

    def hold_step(self, wait: Callable[[], None]) -> None:
        """See EngineState.hold_step."""
        self._step_gate.hold(wait)

    @torch.no_grad()
    def restore(self, source: ShardSource) -> None:
        """See EngineState.restore."""
        restore_state(self._build_state(), source, get_checkpoint_names(self.module))


# Name of DDP's argument that sends buffers before each forward. Newer releases of torch renamed it, and warn
# about the older name.
_BROADCAST_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class _CheckedDdp:
    """Wraps a module in DistributedDataParallel and checks that every bucket of gradients was sent.

    If a parameter gets no gradient, DDP does not send its bucket nor any later one. DDP reports that one step
    too late, or hangs. Buckets are sent in order, so the last bucket is sent only if no gradient is missing.

    Args:
        module: Module on this rank's device.
        config: Engine section of the recipe.
        job: Ranks and device of the run.
    """

    def __init__(self, module: nn.Module, config: EngineConfig, job: Job):
        self._module = module
        self._allows_unused_parameters = config.find_unused_parameters
        self.is_last_bucket_sent = False
        # DDP would send all buffers before each forward, also constant ones (Llama's rotary frequencies).
        # Instead BufferBroadcast sends the buffers that change, after the step.
        broadcast: dict[str, Any] = {_BROADCAST_ARGUMENT: False}
        self.wrapper = DistributedDataParallel(
            module,
            device_ids=[job.device] if job.device.type == "cuda" else None,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            gradient_as_bucket_view=True,
            **broadcast,
        )
        # A lambda, since DDP refuses a hook with postponed annotations. A weak reference, since Python
        # cannot collect a cycle through DDP's C++ objects.
        weak_self = weakref.ref(self)
        self.wrapper.register_comm_hook(None, lambda _, bucket: _reduce_bucket(weak_self(), bucket))
        if not config.find_unused_parameters:
            self._build_final_buckets()

    def _build_final_buckets(self) -> None:
        """Make DDP choose its final buckets now, by a backward of zeros, instead of after the first step.

        An element's place in a bucket decides in which order the values of three or more ranks are added.
        With other buckets, a resumed run would round its first step differently from an uninterrupted run.
        """
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        self.wrapper.reducer.prepare_for_forward()
        self.wrapper.reducer.prepare_for_backward([])
        # Backward visits the operations that were created last first. Here these are the last layer's, as in
        # the model's own backward.
        torch.stack([0 * p.flatten()[:1].sum() for p in parameters]).sum().backward()
        for p in parameters:
            p.grad = None
        self.is_last_bucket_sent = False

    def check_gradients_complete(self) -> None:
        """Raise an error if the step's last backward left a bucket unsent. Not collective.

        Call it before anything reads a gradient.

        Raises:
            ModelError: a parameter has no gradient, so the gradients differ between ranks. The message names
                the parameters that have no gradient on this rank, if there are any.
        """
        is_last_bucket_sent = self.is_last_bucket_sent
        self.is_last_bucket_sent = False
        if is_last_bucket_sent or self._allows_unused_parameters:
            return
        names = names_without_gradient(self._module)
        subject = format_names(names) if names else "some of the parameters, in a step's last micro-batch,"
        raise ModelError(
            f"model: {subject} took no part in the loss, and ddp waits for every parameter; freeze or remove "
            "the unused parameters, or set engine.find_unused_parameters: true to search for them in each "
            "step (in a split file torch.find_unused_parameters)"
        )


def _reduce_bucket(ddp: _CheckedDdp | None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Record in `ddp` whether the bucket is the last one, and average it over all ranks."""
    if ddp is not None:
        ddp.is_last_bucket_sent = bucket.is_last()
    return allreduce_hook(None, bucket)  # type: ignore[arg-type] # None: all ranks


class _AutocastModule(nn.Module):
    """Computes under bf16 autocast inside each replica's thread.

    nn.DataParallel enables autocast in its threads if it is enabled outside, but does not set the dtype.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return self.module(*inputs, **named)


def _wrap_data_parallel(module: nn.Module, precision: str) -> nn.Module:
    """Return nn.DataParallel over all visible GPUs, or the module itself with fewer than two."""
    if torch.cuda.device_count() < 2:
        return module
    num_batch_norms = count_batch_norms(module)
    if num_batch_norms:
        log.warning(
            "nn.DataParallel: each of the %d batch normalisation layers normalises over one GPU's share of "
            "the micro-batch, and only GPU 0's running statistics are saved; with parallel: ddp they "
            "normalise over the micro-batches of all GPUs",
            num_batch_norms,
        )
    return nn.DataParallel(_AutocastModule(module) if precision == "bf16" else module)
