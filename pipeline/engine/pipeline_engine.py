"""Pipeline parallelism through DeepSpeed's PipelineModule and PipelineEngine, with ZeRO 0 or 1 beside it.

DeepSpeed moves activations and gradients between stages and averages over data-parallel ranks. The loss, the
norm at ZeRO 0 and what stages must agree on are seen to here. stages.py decides where the model is cut.
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
from pipeline.distributed.progress import Phase, phase
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
from pipeline.models.generation import GenerationSettings, generate
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


# Phases of the schedule's instructions that compute; the others send, receive and reduce.
_PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "OptimizerStep": "optimizer",
}


def _measured(execute: Callable[..., Any], phases: Phases, name: str) -> Callable[..., Any]:
    """Return DeepSpeed's method for an instruction, measured as a phase of the step."""

    def measured(engine: Any, **named: Any) -> None:
        with phases.measured(name):
            execute(engine, **named)

    return measured


class PipelineEngine(DeepSpeedBase):
    """Each rank holds one stage; the ranks of one stage share their samples out among themselves."""

    def __init__(
        self,
        model: LayeredModel,
        optimizer: OptimizerConfig,
        config: dict[str, Any],
        split: Split,
        job: Job,
        bounds: list[int],
    ):
        """Take this rank's stage. Collective.

        Args:
            model: On the CPU; only the parameters of this rank's stage need values.
            bounds: See StageSharding.

        Raises:
            ConfigError: a mixture whose routers are to be balanced.
        """
        refuse_router_loss(model, "pipeline stages")
        super().__init__(model.num_parameters, optimizer, split, job)
        self.seed_rank = job.ranks.rank  # stages must not draw the same dropout
        self._stages = split.pipeline_stages
        config, self._own_norm = _for_stages(config, self.precision)
        self._last = _LastStage(HeadOnlyModel(model.head, wrap_logits))
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints its topology and seeds
            module = StageModule(model, bounds, self._last)
        self._whole_names = model.names()
        self._words = model.layers[0].part
        groups = build_stage_groups(model, module, optimizer)
        # A tied weight lies on two stages; DeepSpeed marks the copy that is not to be counted.
        self._is_copy = [bool(p.ds_pipe_replicated) for group in groups for p in group["params"]]
        self._optimizer = build_torch_optimizer(groups, optimizer, split)
        fit_bucket(config, sum(p.numel() for group in groups for p in group["params"]))
        with redirect_stdout(io.StringIO()):  # its bf16 optimizer prints the memory in use
            self._initialize(module, config)
        self._norm = torch.full((), torch.inf, device=self.device)
        if self._own_norm:
            self._optimizer.register_step_pre_hook(self._clip_and_guard)
        else:
            self._refuse_steps()
        allow_norm_without_gradients(self._zero_optimizer, self.device)
        instructions = self._engine._INSTRUCTION_MAP
        self._engine._INSTRUCTION_MAP = {
            kind: _measured(execute, self.phases, _PHASES.get(kind.__name__, "communication"))
            for kind, execute in instructions.items()
        }
        self._shapes: Any = None
        self._look: Callable[[], None] = lambda: None
        self.dp_rank = self._engine.grid.get_data_parallel_rank()
        self.dp_world_size = self._engine.grid.get_data_parallel_world_size()
        if self.dp_world_size > 1:
            stage = self._engine.grid.get_pipe_parallel_rank()
            self._compare_replicas(stage, is_sharded=not self._own_norm)
        self._groups.keep()

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[list[int]]:
        """See Generates.generate: all stages in step, without a cache."""
        with self.phases.measured("generation"):
            return generate(self.module, prompts, settings, self.device)

    def set_batch_division(self, micro_batch_size: int, gradient_accumulation_steps: int) -> None:
        """See Engine.set_batch_division."""
        super().set_batch_division(micro_batch_size, gradient_accumulation_steps)
        self._engine.micro_batch_size = micro_batch_size

    @phase(Phase.FORWARD)  # what is neither backward nor the optimizer's step
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
        counts = stack_count_and_flags(micro_batches, objective, flags, self.device, copies=self._stages)
        with self.phases.measured("communication"):
            totals = self._job.all_reduce_sum(counts)
        # PipelineEngine divides by the accumulation steps and cannot be told not to.
        scale = backward_scale(totals[0], self.dp_world_size).float() * len(micro_batches)
        own_loss_scale = self._own_loss_scale = get_missing_loss_scale(engine.optimizer, self.precision)
        self._begin(limits)
        self._look = lambda: self._refusal.look(self._total(objective).loss_sum, totals[0])
        on_device = partial(to_device, device=self.device, float_dtype=None)
        with self.phases.measured("routing"):
            objective.prepare_step(
                GlobalBatch(self._last.head, micro_batches, on_device, self._job.all_reduce_sum, self.device)
            )
        self._last.begin(objective, scale * own_loss_scale)
        set_learning_rate(self._zero_optimizer, learning_rate)
        skipped_before = engine.skipped_steps
        self._norm = torch.full((), torch.inf, device=self.device)
        self._expect(micro_batches, objective)
        with self.phases.measured("communication"):  # what is no instruction: stages hand the loss around
            engine.train_batch(self._on_device(micro_batches))
        norm = self._norm if self._own_norm else engine.get_global_grad_norm()
        # A copy from the host would wait for the device.
        num_skipped = engine.skipped_steps - skipped_before
        skipped = torch.full((), float(num_skipped), device=self.device)
        if self._own_norm and self.precision == "fp32":
            skipped = self._skipped
        self._look()  # DeepSpeed begins no step whose norm is not finite
        skipped, searched = self._end(skipped, num_skipped > 0)
        scale_now = float(engine.optimizer.loss_scale) if self.precision == "fp16" else None
        total = self._total(objective)
        return StepResult(
            loss_sum=total.loss_sum,
            global_count=totals[0],
            grad_norm=norm,
            skipped=skipped,
            flags=totals[1],
            loss_scale=scale_now,
            extras=total.extras,
            loss=self._refusal.loss,
            is_loss_scale_search=searched,
        )

    def _total(self, objective: Objective) -> LossSum:
        """Return the sum of the step's micro-batches so far; 0 before the last stage."""
        return sum_losses(self._last.losses, objective.means, self.device)

    def _before_step(self, optimizer: torch.optim.Optimizer, *hooked: Any) -> None:
        self._look()
        super()._before_step(optimizer, *hooked)

    def _on_device(self, micro_batches: Sequence[Batch]) -> Iterator[tuple[Any, Batch]]:
        """Yield what PipelineEngine takes: the first stage's inputs, and the last stage's whole batch."""
        for cpu_batch in micro_batches:
            batch = to_device(cpu_batch, self.device, None)
            self._last.coming.append(batch)
            given = tuple(batch[key] for key in INPUT_KEYS if key in batch)
            yield given if len(given) > 1 else given[0], batch

    def _expect(self, micro_batches: Sequence[Batch], objective: Objective) -> None:
        """Have stages tell each other new shapes, and the first one what noise is drawn from."""
        keys = [batch[NOISE_KEYS] for batch in micro_batches if NOISE_KEYS in batch]
        set_noise_keys(self._words, [each.to(self.device, non_blocking=True) for each in keys])
        for batch in micro_batches:
            if unread := sorted(set(batch) - {*INPUT_KEYS, NOISE_KEYS, *objective.targets}):
                raise DataError(
                    f"the batches hold {', '.join(unread)}, which pipeline stages do not pass on; they take "
                    f"{' and '.join(INPUT_KEYS[:2])} (or use zero_optimization.stage 3 in place of stages)"
                )
        shapes = {
            tuple((key, batch[key].shape) for key in INPUT_KEYS if key in batch) for batch in micro_batches
        }
        if shapes != self._shapes:
            self._engine.reset_activation_shape()
        self._shapes = shapes
        self._engine.dynamic_shape = len(shapes) > 1

    def _clip_and_guard(self, *_: Any) -> None:
        """Take the norm over all stages, clip and guard, before the optimizer's step at ZeRO 0.

        DeepSpeed does none of it in fp32, and in fp16 counts tied weights twice.
        """
        self._look()
        self._norm, self._skipped = clip_and_guard(
            self._optimizer,
            self._max_grad_norm,
            (not each for each in self._is_copy),
            self._over_stages,
            self._refusal,
        )

    def _over_stages(self, square: Tensor) -> Tensor:
        dist.all_reduce(square, group=self._engine.grid.get_pipe_parallel_group())
        return square

    @phase(Phase.EVALUATION)
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step. The last stage's share is all of it."""
        self._last.begin(objective, torch.ones((), device=self.device))
        batch = add_document_bounds(batch)
        self._expect([batch], objective)
        self._engine.eval_batch(
            self._on_device([batch]), reduce_output=None, bcast_loss=False, num_micro_batches=1
        )
        return sum_losses(self._last.losses, objective.means, self.device)

    def _state(self) -> RankState:
        places = {
            # A tied weight lies on two stages, in step; DeepSpeed marks the copy.
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

    def _names(self) -> list[str]:
        return self._whole_names


class _LastStage:
    """What the last stage does with hidden states: the scaled loss of the batch that is next; else logits.

    It is part of the stage's forward: DeepSpeed takes the gradient of a forward's output for the first of a
    backward.
    """

    def __init__(self, head: HeadOnlyModel) -> None:
        self.losses: list[LossSum] = []
        self.coming: deque[Batch] = deque()
        """Batches that were loaded: stages take them in that order."""
        self.head = head
        self._objective: Objective | None = None
        self._scale = torch.ones(())

    def begin(self, objective: Objective, scale: Tensor) -> None:
        """Set what the next step minimises, and the factor of its sums."""
        self._objective, self._scale, self.losses = objective, scale, []
        self.coming.clear()

    def __call__(self, hidden: Tensor) -> Tensor:
        with self.head.given(hidden):
            if not self.coming:
                logits: Tensor = self.head().logits
                return logits
            assert self._objective is not None
            loss = self._objective(self.head, self.coming.popleft())
        self.losses.append(loss.detached())
        return loss.minimised * self._scale


def _for_stages(config: dict[str, Any], precision: str) -> tuple[dict[str, Any], bool]:
    """Return the configuration as PipelineEngine takes it, and whether this engine computes the norm."""
    config = copy.deepcopy(config)
    del config["pipeline"]
    zero = config["zero_optimization"]
    zero["overlap_comm"] = False  # PipelineEngine reduces once, after the last micro-batch
    if precision == "bf16":
        # At ZeRO 0 DeepSpeed would add gradients up in bf16, in an optimizer that divides its state over the
        # data-parallel ranks as it does at ZeRO 1.
        zero["stage"] = 1
        config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    own_norm = zero.get("stage", 0) == 0
    if own_norm:
        config["gradient_clipping"] = 0.0
    return config, own_norm
