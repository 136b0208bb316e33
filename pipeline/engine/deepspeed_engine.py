"""Engine for DeepSpeed: ZeRO stages 0 to 3, tensor and sequence parallelism, in fp32, bf16 and fp16.

For pipeline parallelism see pipeline_engine.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.split import Split
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine import clipping
from pipeline.engine.deepspeed_base import (
    DeepSpeedBase,
    build_optimizer,
    build_parallel_state,
    drop_hpz_groups,
    fit_bucket,
)
from pipeline.engine.deepspeed_patches import (
    average_over_all_ranks,
    get_missing_loss_scale,
    keep_autocast,
    keep_misaligned_gradients,
    remove_dataloader_check,
)
from pipeline.engine.deepspeed_state import build_rank_state
from pipeline.engine.interface import (
    DTYPES,
    StepLimits,
    StepResult,
    add_document_bounds,
    backward_scale,
    count_parameters,
    require_gradient_graph,
    stack_count_and_flags,
    to_device,
)
from pipeline.engine.optim import parameter_groups
from pipeline.engine.replicas import BufferBroadcast
from pipeline.engine.schedule import set_learning_rate
from pipeline.engine.sequence_parallel import SequenceParallel
from pipeline.engine.state import (
    RankState,
    get_checkpoint_names,
    get_persistent_buffers,
    place_whole_parameters,
    warn_of_unused_parameters,
    watch_gradients,
)
from pipeline.engine.tensor_parallel import (
    broadcast_from_first_rank,
    counts_in_norm,
    place_cut_parameters,
    sum_over_tensor_group,
)
from pipeline.engine.tensor_sharding import TensorSharding
from pipeline.engine.zero3 import (
    Zero3Sharding,
    gather_by_block,
    gather_if_it_fits,
    measure_gathers,
)
from pipeline.models.generation import GenerationSettings, TokenCallback, generate, spread_settings
from pipeline.models.sharding import DevicePlacement, Sharding
from pipeline.objectives import Batch, GlobalBatch, LossSum, Objective, sum_losses


def build_sharding(config: dict[str, Any], split: Split, device: torch.device) -> Sharding:
    """Return the sharding in which a model is made for a DeepSpeedEngine.

    DeepSpeed forgets the hpZ groups of an earlier engine; see drop_hpz_groups.

    Args:
        config: Resolved DeepSpeed JSON.
        split: Split of the run.
        device: Device of this rank.
    """
    drop_hpz_groups()
    if split.tensor_parallel > 1:  # also at stage 3, since AutoTP cuts whole matrices
        return TensorSharding(config, split)
    dtype = DTYPES[split.precision]
    return Zero3Sharding(config, dtype) if split.zero_stage == 3 else DevicePlacement(device, dtype)


class DeepSpeedEngine(DeepSpeedBase):
    """Steps a model through deepspeed.initialize; the JSON decides the ZeRO stage and the precision.

    Gradients are reduced after each micro-batch at stages 2 and 3. DeepSpeed could reduce them once a step
    (`engine.coalesce_grad_reduction`), but every rank would then store all gradients until the last
    micro-batch. These stages are chosen to avoid that. Stage 1 reduces once per step in any case.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        split: Split,
        job: Job,
        autocast: bool = False,
        sharding: Sharding | None = None,
    ):
        """Wrap the model, and cut it under tensor parallelism. Collective.

        Args:
            model: Model, made in `sharding`.
            optimizer: Optimizer section of the recipe.
            config: Resolved DeepSpeed JSON. It is not changed.
            split: Split of the run.
            job: Ranks and process group of the run.
            autocast: Whether model and objective compute under torch.autocast in the run's half precision.
            sharding: Sharding in which the model was made; only tensor parallelism needs it.

        Raises:
            ConfigError: the user's own optimizer cannot be used, or a pattern of optimizer.groups matches no
                trained parameter.
            ModelError: no parameter requires a gradient, or tensor or sequence parallelism cannot divide the
                model.
        """
        config = copy.deepcopy(config)  # changed below
        super().__init__(count_parameters(model), optimizer, split, job)
        self.dp_world_size = split.dp_world_size
        self._num_copies = job.ranks.world_size // split.dp_world_size  # ranks with the same samples
        self.dp_rank = job.ranks.rank // self._num_copies
        self.seed_rank = job.ranks.rank if split.sequence_parallel > 1 else self.dp_rank
        self._split = split
        self._float_dtype = DTYPES[self.precision]
        self._uses_autocast = autocast
        mpu = build_parallel_state(split)
        if split.tensor_parallel > 1:
            cast(TensorSharding, sharding).cut(model)
        groups = parameter_groups(model.named_parameters(), optimizer)
        self._parameters = [p for group in groups for p in group["params"]]
        self._optimizer = build_optimizer(groups, optimizer, config, split)
        self._clips_gradients = clipping.take_over_clipping(config, split, self._optimizer)
        self._sequence: SequenceParallel | None = None
        if split.sequence_parallel > 1:
            self._sequence = SequenceParallel(model, split.sequence_parallel, self.device)
            self.cleanup.callback(self._sequence.close)
        fit_bucket(config, self.num_parameters)
        if split.zero_stage == 3:
            gather_by_block(model, config)
        self._initialize(model, config, mpu)
        remove_dataloader_check(self._engine)
        measure_gathers(self._zero_optimizer, self.phases)
        if autocast:
            keep_autocast(self._engine, self._float_dtype)
        for buffer in self.module.buffers():  # zero.Init moves only parameters to the device
            buffer.data = buffer.data.to(self.device)
        keep_misaligned_gradients(self._zero_optimizer)
        place_parameters = place_cut_parameters if split.tensor_parallel > 1 else place_whole_parameters
        self._places = place_parameters(self.module)
        self._is_in_norm = [self._is_counted_in_norm(p) for p in self._parameters]
        self._norm: Tensor | None = None
        self._guard_steps()
        if self._sequence is not None:
            average_over_all_ranks(self._engine)
        self._buffer_broadcast = BufferBroadcast(self.module)
        # DeepSpeed does not report parameters without a gradient.
        self._stop_watching: Callable[[], list[str]] | None = watch_gradients(self.module.named_parameters())
        self._process_groups.record()
        if split.zero_stage < 3 and job.ranks.world_size > split.tensor_parallel:
            self._prepare_replica_digests(
                job.ranks.rank % split.tensor_parallel, is_sharded=split.zero_stage > 0
            )

    def _guard_steps(self) -> None:
        """Replace DeepSpeed's clipping, guard or norm by the trainer's; see clipping.take_over_clipping."""
        stage = self._split.zero_stage
        if self._clips_gradients and stage == 0:
            self._optimizer.register_step_pre_hook(self._clip_and_guard)
            if self._split.precision == "bf16":
                clipping.replace_bf16_step(self._zero_optimizer)
        if not self._clips_gradients:
            self._guard_by_deepspeed_norm()
        if stage == 3 and self._split.tensor_parallel == 1:
            clipping.use_single_norm(self._zero_optimizer, self._job.all_reduce_sum)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings],
        on_token: TokenCallback | None = None,
    ) -> list[list[int]]:
        """See TextGenerator.generate."""
        if self._sequence is not None:
            self._sequence.release()
        gathering: AbstractContextManager[bool] = nullcontext(True)
        if self._split.zero_stage == 3:
            gather = all(s.gather for s in spread_settings(settings, len(prompts)))
            gathering = gather_if_it_fits(self._zero_optimizer, self._job, gather)
        # If the ranks of a tensor group drew different tokens, they would wait for each other forever.
        unify_scores = broadcast_from_first_rank if self._split.tensor_parallel > 1 else None
        with self.phases.measure("generation"), self._make_autocast(), gathering as is_gathered:
            is_forward_collective = not is_gathered and self._job.ranks.world_size > 1
            return generate(
                self.module,
                prompts,
                settings,
                self.device,
                on_token,
                is_forward_collective=is_forward_collective,
                unify_scores=unify_scores,
            )

    @tag_errors(Phase.FORWARD)  # everything except backward and optimizer step
    def train_step(
        self,
        micro_batches: Sequence[Batch],
        objective: Objective,
        learning_rate: float,
        flags: int,
        limits: StepLimits | None = None,
    ) -> StepResult:
        """See Engine.train_step."""
        engine = self._engine
        if not self.module.training:  # engine.training stays True after engine.eval()
            engine.train()
        # The counts are summed over ranks during the first forward. So this rank waits for late ranks only
        # after that forward.
        finish_sum = self._job.start_all_reduce_sum(
            stack_count_and_flags(micro_batches, objective, flags, self.device, self._num_copies)
        )
        averaged_over = self.dp_world_size * self._split.sequence_parallel
        self._begin_step(limits)
        missing_loss_scale = get_missing_loss_scale(engine.optimizer, self.precision)
        self._missing_loss_scale = missing_loss_scale
        set_learning_rate(self._zero_optimizer, learning_rate)
        skipped_before = engine.skipped_steps
        with self._make_autocast(), self.phases.measure("routing"):
            move_part_to_device = partial(self._move_part_to_device, objective=objective)
            objective.prepare_step(
                GlobalBatch(engine, micro_batches, move_part_to_device, self._job.all_reduce_sum, self.device)
            )
        losses: list[LossSum] = []
        degree = self._split.tensor_parallel  # each rank of a tensor group computes the whole loss
        clips_partition = self._clips_gradients and self._split.zero_stage > 0
        for index, cpu_batch in enumerate(micro_batches):
            with self._make_autocast():
                batch = self._move_part_to_device(cpu_batch, objective)
                with self.phases.measure("forward"):
                    loss = objective(engine, batch)
            require_gradient_graph(loss)
            if index == 0:
                with self.phases.measure("communication"):
                    totals = finish_sum()
                scale = backward_scale(totals[0], averaged_over).float()
            losses.append(loss.detached())
            with self.phases.measure("backward"):
                engine.backward(loss.minimised * (scale * missing_loss_scale), scale_wrt_gas=False)
            is_last = index == len(micro_batches) - 1
            with self.phases.measure("optimizer"):
                if is_last:
                    total = sum_losses(losses, objective.means, self.device)
                    loss_sum = total.loss_sum / degree
                    self._limit_guard.compute_loss(loss_sum, totals[0])
                if clips_partition and engine.is_gradient_accumulation_boundary():
                    self._clip_and_guard_partition()
                engine.step()
        with self.phases.measure("communication"):
            self._buffer_broadcast.broadcast()
        if self._stop_watching is not None:
            warn_of_unused_parameters(self._stop_watching())
            self._stop_watching = None
        num_skipped = engine.skipped_steps - skipped_before
        grad_norm, skipped, is_search = self._finish_step(num_skipped)
        loss_scale = float(engine.optimizer.loss_scale) if self.precision == "fp16" else None
        extras = {key: value / degree for key, value in total.extras.items()}
        return StepResult(
            loss_sum=loss_sum,
            global_count=totals[0],
            grad_norm=grad_norm,
            skipped=skipped,
            flags=totals[1],
            loss_scale=loss_scale,
            extras=extras,
            loss=self._limit_guard.loss,
            is_loss_scale_search=is_search,
        )

    def _finish_step(self, num_skipped: int) -> tuple[Tensor | float | None, Tensor, bool]:
        """Finish a step and return its norm and whether it was skipped.

        Args:
            num_skipped: 1 if DeepSpeed skipped the step, else 0.

        Returns:
            The global gradient norm before clipping (`None` if DeepSpeed computed none); 1 if the step was
            skipped, else 0; whether the fp16 loss scale is the cause.
        """
        # torch.full does not synchronize with the device, a copy from the host would.
        skipped = torch.full((), float(num_skipped), device=self.device)
        grad_norm: Tensor | float | None
        if not self._clips_gradients:
            norm = self._engine.get_global_grad_norm()
            grad_norm = None if norm is None else norm / self._missing_loss_scale
        elif num_skipped:  # DeepSpeed skipped before the optimizer's hook computed a norm
            grad_norm = math.inf
        else:
            skipped = self._was_skipped
            grad_norm = self._norm
        skipped, is_search = self._end_step(skipped, has_overflowed=num_skipped > 0)
        return grad_norm, skipped, is_search

    def _make_autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self._float_dtype) if self._uses_autocast else nullcontext()

    def _move_part_to_device(self, batch: Batch, objective: Objective) -> Batch:
        """Return the batch, or this rank's part of its sequences, on the device."""
        if self._sequence is not None:
            self._sequence.activate()
            batch = self._sequence.cut_batch(batch)
        batch = add_document_bounds(batch)
        inputs = objective.inputs(self._engine, batch)
        return to_device(batch, self.device, self._float_dtype, inputs)

    def _is_counted_in_norm(self, parameter: Tensor) -> bool:
        """Return whether this rank's norm contains the parameter; see counts_in_norm."""
        return self._split.tensor_parallel == 1 or counts_in_norm(parameter)

    def _clip_and_guard(self, *_: Any) -> None:
        """Clip and guard at stage 0, with all gradients on each rank; a hook before the optimizer's step."""
        sum_over_ranks = sum_over_tensor_group if self._split.tensor_parallel > 1 else None
        self._norm, self._was_skipped = clipping.clip_and_guard(
            self._optimizer, self._max_grad_norm, self._is_in_norm, sum_over_ranks, self._limit_guard
        )

    def _clip_and_guard_partition(self) -> None:
        """Clip and guard at stages 1 and 2, where each rank has a partition of the gradients."""
        self._norm, self._was_skipped = clipping.clip_and_guard_partition(
            self._zero_optimizer,
            self._max_grad_norm,
            self._is_counted_in_norm,
            self._job.all_reduce_sum,
            self._limit_guard,
        )

    @tag_errors(Phase.EVALUATION)
    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step."""
        if self.module.training:
            self._engine.eval()
        with self._make_autocast():
            loss = objective(self._engine, self._move_part_to_device(batch, objective))
        if self._num_copies == 1:
            return loss
        # Ranks of a sequence group have sums of their parts; those of a tensor group all have the whole sum.
        count = objective.count(batch).to(self.device, torch.float64) / self._num_copies
        degree = self._split.tensor_parallel
        extras = {key: value / degree for key, value in loss.extras.items()}
        return LossSum(loss.loss_sum / degree, count, extras)

    def _build_state(self) -> RankState:
        ranks = self._job.ranks
        degree = self._split.tensor_parallel
        replica = (ranks.rank // degree, ranks.world_size // degree)
        return build_rank_state(
            self._zero_optimizer, self._places, get_persistent_buffers(self.module), replica
        )

    def _get_checkpoint_names(self) -> list[str]:
        return get_checkpoint_names(self.module)
