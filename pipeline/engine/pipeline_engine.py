"""Engine for pipeline parallelism by DeepSpeed's PipelineModule and PipelineEngine, with ZeRO 0 or 1.

DeepSpeed sends activations and gradients between stages and averages gradients over data-parallel ranks. This
module computes the loss, at ZeRO 0 also the norm, and prepares the stages for new shapes of batches.
stages.py decides where the model is cut.
"""

from __future__ import annotations

import copy
import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.split import Split
from pipeline.distributed.phases import Phases
from pipeline.distributed.process_group import Job
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.engine.clipping import clip_and_guard
from pipeline.engine.deepspeed_base import DeepSpeedBase, fit_bucket
from pipeline.engine.deepspeed_patches import allow_norm_without_gradients, get_missing_loss_scale
from pipeline.engine.deepspeed_state import build_rank_state
from pipeline.engine.interface import (
    StepLimits,
    StepResult,
    add_document_bounds,
    backward_scale,
    stack_count_and_flags,
    to_device,
)
from pipeline.engine.optim import build_torch_optimizer
from pipeline.engine.schedule import set_learning_rate
from pipeline.engine.stages import StageModule, build_stage_groups, named_layer_parameters
from pipeline.engine.state import RankState, TensorPlacement, get_persistent_buffers
from pipeline.errors import DataError
from pipeline.models.adapters import is_base
from pipeline.models.document_attention import BOUNDS_KEY
from pipeline.models.embeddings import NOISE_KEYS, set_noise_keys
from pipeline.models.generation import GenerationSettings, TokenCallback, generate
from pipeline.models.staging import LayeredModel, StageLayer, wrap_logits
from pipeline.objectives import (
    Batch,
    GlobalBatch,
    HeadOnlyModel,
    LossSum,
    Objective,
    refuse_router_loss,
    sum_losses,
)

INPUT_KEYS = ("input_ids", "position_ids", BOUNDS_KEY)
"""Entries of a batch that stages pass on, in this order."""

# Phases of the instructions in DeepSpeed's pipeline schedule. All others count as communication.
_INSTRUCTION_PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "OptimizerStep": "optimizer",
}


def _measure_instruction(execute: Callable[..., Any], phases: Phases, instruction: str) -> Callable[..., Any]:
    """Return DeepSpeed's method for an instruction, measured as a phase of the step."""
    phase = _INSTRUCTION_PHASES.get(instruction, "communication")

    def measured(engine: Any, **arguments: Any) -> None:
        with phases.measure(phase):
            execute(engine, **arguments)

    return measured


class PipelineEngine(DeepSpeedBase):
    """Steps a model that is divided into pipeline stages.

    Each rank has one stage, and the ranks with the same stage divide the samples.
    """

    def __init__(
        self,
        model: LayeredModel,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        split: Split,
        job: Job,
        bounds: list[int],
    ):
        """Build this rank's stage. Collective.

        Args:
            model: Model on the CPU; only the parameters of this rank's stage need values.
            optimizer: Optimizer section of the recipe.
            config: Resolved DeepSpeed JSON. It is not changed.
            split: Split of the run.
            job: Ranks and process group of the run.
            bounds: Layers of the stages; see StageSharding.bounds.

        Raises:
            ConfigError: the user's own optimizer cannot be used, a pattern of optimizer.groups matches no
                trained parameter, or the routers of a mixture of experts are to be balanced.
            ModelError: no parameter requires a gradient.
        """
        refuse_router_loss(model, "pipeline stages")
        super().__init__(model.num_parameters, optimizer, split, job)
        self.seed_rank = job.ranks.rank  # stages must not draw the same dropout
        self._num_stages = split.pipeline_stages
        config, self._computes_norm = _adapt_config(config, self.precision)
        self._last_stage = _LastStage(HeadOnlyModel(model.head, wrap_logits))
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints its topology and seeds
            module = StageModule(model, bounds, self._last_stage)
        self._checkpoint_names = model.get_weight_names()
        self._embedding = model.layers[0].part
        groups = build_stage_groups(model, module, optimizer)
        # A tied weight is on two stages. DeepSpeed marks one of them as the copy, which the norm leaves out.
        self._is_copy = [bool(p.ds_pipe_replicated) for group in groups for p in group["params"]]
        self._optimizer = build_torch_optimizer(groups, optimizer, split)
        fit_bucket(config, sum(p.numel() for group in groups for p in group["params"]))
        with redirect_stdout(io.StringIO()):  # DeepSpeed's bf16 optimizer prints the memory in use
            self._initialize(module, config)
        self._norm = torch.full((), torch.inf, device=self.device)
        if self._computes_norm:
            self._optimizer.register_step_pre_hook(self._clip_and_guard)
        else:
            self._guard_by_deepspeed_norm()
        allow_norm_without_gradients(self._zero_optimizer, self.device)
        instructions = self._engine._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {
            kind: _measure_instruction(execute, self.phases, kind.__name__)
            for kind, execute in instructions.items()
        }
        self._shapes: Any = None  # shapes of the previous batches; see _prepare_stages
        # Computes the current step's loss; see StepLimitGuard.compute_loss. train_step sets it.
        self._compute_loss: Callable[[], None] = lambda: None
        self.dp_rank = self._engine.grid.get_data_parallel_rank()
        self.dp_world_size = self._engine.grid.get_data_parallel_world_size()
        if self.dp_world_size > 1:
            stage = self._engine.grid.get_pipe_parallel_rank()
            self._prepare_replica_digests(stage, is_sharded=not self._computes_norm)
        self._process_groups.record()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | Sequence[GenerationSettings],
        on_token: TokenCallback | None = None,
    ) -> list[list[int]]:
        """See TextGenerator.generate. All stages compute each token, without a key-value cache."""
        with self.phases.measure("generation"):
            return generate(self.module, prompts, settings, self.device, on_token)

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """See Engine.set_batch_division."""
        super().set_batch_division(micro_batch_size, gradient_accumulation_steps)
        self._engine.micro_batch_size = micro_batch_size

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
        micro_batches = [add_document_bounds(batch) for batch in micro_batches]
        counts = stack_count_and_flags(micro_batches, objective, flags, self.device, copies=self._num_stages)
        with self.phases.measure("communication"):
            totals = self._job.all_reduce_sum(counts)
        # DeepSpeed always divides by the number of micro-batches; the last factor undoes that.
        scale = backward_scale(totals[0], self.dp_world_size).float() * len(micro_batches)
        missing_loss_scale = get_missing_loss_scale(engine.optimizer, self.precision)
        self._missing_loss_scale = missing_loss_scale
        self._begin_step(limits)
        self._compute_loss = lambda: self._limit_guard.compute_loss(
            self._sum_losses(objective).loss_sum, totals[0]
        )
        move_to_device = partial(to_device, device=self.device, float_dtype=None)
        with self.phases.measure("routing"):
            objective.prepare_step(
                GlobalBatch(
                    self._last_stage.head,
                    micro_batches,
                    move_to_device,
                    self._job.all_reduce_sum,
                    self.device,
                )
            )
        self._last_stage.begin(objective, scale * missing_loss_scale)
        set_learning_rate(self._zero_optimizer, learning_rate)
        skipped_before = engine.skipped_steps
        self._norm = torch.full((), torch.inf, device=self.device)
        self._prepare_stages(micro_batches, objective)
        # Each instruction counts as its own phase; the time between them is communication of the loss.
        with self.phases.measure("communication"):
            engine.train_batch(self._load_batches(micro_batches))
        norm = self._norm if self._computes_norm else engine.get_global_grad_norm()
        num_skipped = engine.skipped_steps - skipped_before
        # torch.full does not synchronize with the device, a copy from the host would.
        skipped = torch.full((), float(num_skipped), device=self.device)
        if self._computes_norm and self.precision == "fp32":
            skipped = self._was_skipped
        # The hook before the optimizer's step has computed the loss, unless DeepSpeed skipped that step.
        self._compute_loss()
        skipped, is_search = self._end_step(skipped, has_overflowed=num_skipped > 0)
        loss_scale = float(engine.optimizer.loss_scale) if self.precision == "fp16" else None
        total = self._sum_losses(objective)
        return StepResult(
            loss_sum=total.loss_sum,
            global_count=totals[0],
            grad_norm=norm,
            skipped=skipped,
            flags=totals[1],
            loss_scale=loss_scale,
            extras=total.extras,
            loss=self._limit_guard.loss,
            is_loss_scale_search=is_search,
        )

    def _sum_losses(self, objective: Objective) -> LossSum:
        """Return the loss sums of the step's micro-batches so far, added up; 0 on all stages but the last."""
        return sum_losses(self._last_stage.losses, objective.means, self.device)

    def _block_update(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Do what DeepSpeedBase._block_update does, after computing the step's loss. Collective."""
        self._compute_loss()
        super()._block_update(optimizer, *arguments)

    def _load_batches(self, micro_batches: Sequence[Batch]) -> Iterator[tuple[Any, Batch]]:
        """Copy micro-batches to the device, and yield what DeepSpeed's engine reads.

        The last stage computes the losses of the copies in the same order; see _LastStage.pending.

        Yields:
            Inputs of the first stage, a tensor or a tuple of tensors; and the batch.
        """
        for cpu_batch in micro_batches:
            batch = to_device(cpu_batch, self.device, None)
            self._last_stage.pending.append(batch)
            inputs = tuple(batch[key] for key in INPUT_KEYS if key in batch)
            yield inputs if len(inputs) > 1 else inputs[0], batch

    def _prepare_stages(self, micro_batches: Sequence[Batch], objective: Objective) -> None:
        """Prepare the stages for the shapes of these batches, and the embedding for its noise.

        Raises:
            DataError: a batch has entries that stages do not pass on.
        """
        noise_keys = [batch[NOISE_KEYS] for batch in micro_batches if NOISE_KEYS in batch]
        set_noise_keys(self._embedding, [keys.to(self.device, non_blocking=True) for keys in noise_keys])
        for batch in micro_batches:
            unread = sorted(set(batch) - {*INPUT_KEYS, NOISE_KEYS, *objective.targets})
            if unread:
                raise DataError(
                    f"the batches contain {', '.join(unread)}, which pipeline stages do not pass on; they "
                    f"take only {' and '.join(INPUT_KEYS[:2])}; remove the other entries, or set "
                    "zero_optimization.stage 3 in place of pipeline.stages"
                )
        shapes = {
            tuple((key, batch[key].shape) for key in INPUT_KEYS if key in batch) for batch in micro_batches
        }
        if shapes != self._shapes:
            self._engine.reset_activation_shape()
        self._shapes = shapes
        self._engine.dynamic_shape = len(shapes) > 1

    def _clip_and_guard(self, *_: Any) -> None:
        """Compute the norm over all stages, clip and guard, before the optimizer's step at ZeRO 0.

        In fp32 DeepSpeed neither clips nor guards. In fp16 its norm counts tied weights twice (14 % off).
        """
        self._compute_loss()
        self._norm, self._was_skipped = clip_and_guard(
            self._optimizer,
            self._max_grad_norm,
            (not each for each in self._is_copy),
            self._sum_over_stages,
            self._limit_guard,
        )

    def _sum_over_stages(self, square: Tensor) -> Tensor:
        dist.all_reduce(square, group=self._engine.grid.get_pipe_parallel_group())
        return square

    @tag_errors(Phase.EVALUATION)
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step. The last stage's share is the whole sum."""
        self._last_stage.begin(objective, torch.ones((), device=self.device))
        batch = add_document_bounds(batch)
        self._prepare_stages([batch], objective)
        self._engine.eval_batch(
            self._load_batches([batch]), reduce_output=None, bcast_loss=False, num_micro_batches=1
        )
        return sum_losses(self._last_stage.losses, objective.means, self.device)

    def _build_state(self) -> RankState:
        places = {
            # A tied weight is on two stages with equal values. DeepSpeed marks the copy.
            p: TensorPlacement.whole(
                name,
                p.shape,
                is_written=not getattr(p, "ds_pipe_replicated", False),
                is_frozen=not p.requires_grad,
            )
            for name, p in named_layer_parameters(self.module.modules())
            if not is_base(p)
        }
        buffers: dict[str, Tensor] = {}
        for layer in self.module.modules():
            if isinstance(layer, StageLayer):
                buffers |= get_persistent_buffers(layer.part, layer.name)
        return build_rank_state(self._zero_optimizer, places, buffers, (self.dp_rank, self.dp_world_size))

    def _get_checkpoint_names(self) -> list[str]:
        return self._checkpoint_names


class _LastStage:
    """Maps the last stage's hidden states to the scaled loss of the next pending batch.

    If no batch is pending, it returns the logits, for generation. This object is part of the stage's forward,
    since DeepSpeed begins backward at the output of that forward.

    Args:
        head: Output layer, which the objective calls as its model.
    """

    def __init__(self, head: HeadOnlyModel) -> None:
        self.losses: list[LossSum] = []
        """Losses of the step's micro-batches so far, detached; empty on other stages."""
        self.pending: deque[Batch] = deque()
        """Batches on the device whose loss is not computed yet, the next one first."""
        self.head = head
        """Model that maps given hidden states to logits."""
        self._objective: Objective | None = None
        self._scale = torch.ones(())

    def begin(self, objective: Objective, scale: Tensor) -> None:
        """Begin a step: set its objective and the factor of its loss sums, and forget the last step."""
        self._objective = objective
        self._scale = scale
        self.losses = []
        self.pending.clear()

    def __call__(self, hidden: Tensor) -> Tensor:
        with self.head.use_hidden_states(hidden):
            if not self.pending:
                logits: Tensor = self.head().logits
                return logits
            assert self._objective is not None
            loss = self._objective(self.head, self.pending.popleft())
        self.losses.append(loss.detached())
        return loss.minimised * self._scale


def _adapt_config(config: dict[str, Any], precision: str) -> tuple[dict[str, Any], bool]:
    """Return the configuration for DeepSpeed's engine, and whether this module computes the norm."""
    config = copy.deepcopy(config)
    del config["pipeline"]
    zero = config["zero_optimization"]
    zero["overlap_comm"] = False  # PipelineEngine reduces once, after the last micro-batch
    if precision == "bf16":
        # With bf16 DeepSpeed's stage 0 also divides the optimizer state over data-parallel ranks, as stage 1
        # does, but it sums gradients in bf16.
        zero["stage"] = 1
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    computes_norm = zero.get("stage", 0) == 0
    if computes_norm:
        config["gradient_clipping"] = 0.0
    return config, computes_norm
