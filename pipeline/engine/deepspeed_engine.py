"""DeepSpeed behind the Engine interface: ZeRO stages 0 to 3 in fp32, bf16 and fp16.

With zero3.py the only import of deepspeed in the training path.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from torch import Tensor, nn

from pipeline.config.deepspeed_json import precision_of
from pipeline.config.schema import OptimizerConfig
from pipeline.distributed.process_group import Job
from pipeline.engine.deepspeed_files import SafeCheckpointEngine
from pipeline.engine.interface import StepResult, count_and_vote, count_parameters, to_device
from pipeline.engine.normalize import backward_scale
from pipeline.engine.torch_engine import clip_and_guard
from pipeline.errors import CheckpointError, ConfigError, NonFiniteLossError
from pipeline.objectives import Batch, LossSum, Objective
from pipeline.optim import build_adamw, parameter_groups

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def start_deepspeed(job: Job) -> None:
    """Hands the job's process group to DeepSpeed and turns off what a CPU run does not need.

    On a CPU DeepSpeed would compile a shared-memory all-reduce for a minute; only its inference uses it.
    """
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # ninja, which compiles DeepSpeed's ops, lies beside the venv's python, activated or not.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    # ZeRO-3 on torch 2.13 warns of a deprecated collective dozens of times a step: 5 % of it, and the log.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    if job.device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # torch computes in fp16 on every CPU; DeepSpeed asks whether the CPU has instructions for it.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_init_required=False)


def check_configuration(config: dict[str, Any]) -> None:
    """Lets DeepSpeed itself validate every value, before a model is made under them.

    Raises:
        ConfigError: DeepSpeed refuses one.
    """
    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except (ValueError, AssertionError, DeepSpeedConfigError) as error:  # pydantic's error is a ValueError
        raise ConfigError(f"DeepSpeed refuses the configuration: {' '.join(str(error).split())}") from None


class DeepSpeedEngine:
    """Steps a model through deepspeed.initialize; the JSON decides the ZeRO stage and the precision."""

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig, config: dict[str, Any], job: Job):
        """Wraps the model. Collective."""
        config = copy.deepcopy(config)  # what is changed below is not the user's to see
        self.device = job.device
        self.num_parameters = count_parameters(model)
        self.precision = precision_of(config)
        self._float_dtype = DTYPES[self.precision]
        stage = config["zero_optimization"].get("stage", 0)
        # In fp32 at stage 0 DeepSpeed neither guards a step nor reports a norm: the optimizer's hook does.
        self._own_guard = stage == 0 and self.precision == "fp32"
        if self._own_guard:
            config["gradient_clipping"] = 0.0
        groups = parameter_groups(model.parameters(), optimizer.weight_decay)
        self._parameters = [p for group in groups for p in group["params"]]
        self._max_grad_norm = optimizer.max_grad_norm
        self._optimizer = _build_optimizer(groups, optimizer, config)
        self._norm: Tensor | None = None
        if self._own_guard:
            self._optimizer.register_step_pre_hook(self._clip_and_guard)
        # At stage 0 in half precision DeepSpeed allocates Adam's state by a step with zero gradients, which
        # would count as the first and decay the weights: the fused kernels skip it.
        self._optimizer.found_inf = torch.ones((), device=job.device)  # type: ignore[attr-defined]
        self._engine, self._zero_optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=self._optimizer, config=config, dist_init_required=False
        )
        del self._optimizer.found_inf  # type: ignore[attr-defined]
        self._engine.checkpoint_engine = SafeCheckpointEngine()
        self.dp_rank = deepspeed.utils.groups._get_data_parallel_rank()
        self.dp_world_size = deepspeed.utils.groups._get_data_parallel_world_size()
        self.seed_rank = self.dp_rank
        self._job = job

    @property
    def module(self) -> nn.Module:
        """The user's model, without any wrapper."""
        return self._engine.module

    def generator(self) -> nn.Module | None:
        """See Engine.generator."""
        return self.module

    def train_step(
        self, micro_batches: Sequence[Batch], objective: Objective, learning_rate: float, stop_requested: bool
    ) -> StepResult:
        """See Engine.train_step."""
        engine = self._engine
        if not self.module.training:  # engine.training stays True through engine.eval()
            engine.train()
        totals = self._job.all_reduce_sum(
            count_and_vote(micro_batches, objective, stop_requested, self.device)
        )
        scale = backward_scale(totals[0], self.dp_world_size).float()
        own_loss_scale = self._own_loss_scale()
        for group in self._zero_optimizer.param_groups:
            group["lr"] = learning_rate
        skipped_before = engine.skipped_steps
        loss_sum = torch.zeros((), device=self.device)
        for cpu_batch in micro_batches:
            loss = objective(engine, to_device(cpu_batch, self.device, self._float_dtype))
            engine.backward(loss.loss_sum * (scale * own_loss_scale), scale_wrt_gas=False)
            self._step()
            loss_sum += loss.loss_sum.detach()
        grad_norm: Tensor | float | None
        if self._own_guard:
            skipped = self._optimizer.found_inf  # type: ignore[attr-defined]
            grad_norm = self._norm
        else:
            skipped = torch.tensor(float(engine.skipped_steps - skipped_before))
            norm = engine.get_global_grad_norm()
            grad_norm = None if norm is None else norm / own_loss_scale
        scale_now = float(engine.optimizer.loss_scale) if self.precision == "fp16" else None
        return StepResult(loss_sum, totals[0], grad_norm, skipped, totals[1], scale_now)

    def _own_loss_scale(self) -> float:
        """The fp16 loss scale where DeepSpeed leaves it to the caller, else 1.

        At stage 0 engine.backward (0.19.6 to 0.19.8) does not scale the loss, yet step divides the gradients
        by the scale: they would vanish beside AdamW's eps. tests/engine holds both halves of this.
        """
        optimizer = self._engine.optimizer
        scaled_by_deepspeed = isinstance(optimizer, deepspeed.runtime.base_optimizer.ZeROOptimizer)
        return 1.0 if self.precision != "fp16" or scaled_by_deepspeed else float(optimizer.loss_scale)

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:
            # DeepSpeed raises a bare Exception when the fp16 loss scale cannot fall further.
            if "loss scale already at minimum" not in str(error):
                raise
            raise NonFiniteLossError(
                "the fp16 loss scale fell to its minimum and gradients still overflow; use bf16, lower "
                "optimizer.learning_rate, or raise schedule.warmup_steps. The parameters are those of the "
                "last good step"
            ) from None

    def _clip_and_guard(self, *_: Any) -> None:
        self._norm = clip_and_guard(self._optimizer, self._parameters, self._max_grad_norm)

    @torch.no_grad()
    def eval_step(self, batch: Batch, objective: Objective) -> LossSum:
        """See Engine.eval_step."""
        if self.module.training:
            self._engine.eval()
        return objective(self._engine, to_device(batch, self.device, self._float_dtype))

    def save(self, folder: Path) -> None:
        """See Engine.save. Collective."""
        self._engine.save_checkpoint(str(folder), tag="deepspeed", save_latest=False)

    def load(self, folder: Path) -> None:
        """See Engine.load. Collective.

        Raises:
            CheckpointError: saved by another engine or on another number of ranks.
        """
        if not (folder / "deepspeed").is_dir():
            raise CheckpointError(f"{folder} was saved by plain PyTorch; resume it without --deepspeed")
        path, _ = self._engine.load_checkpoint(str(folder), tag="deepspeed")
        if path is None:
            raise CheckpointError(f"DeepSpeed found no checkpoint in {folder}")


def _build_optimizer(
    groups: list[dict[str, Any]], optimizer: OptimizerConfig, config: dict[str, Any]
) -> torch.optim.Optimizer:
    """torch's fused AdamW; DeepSpeed's CPU Adam where the state lives in host memory and it can be built."""
    offload = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    if offload in ("cpu", "nvme"):
        try:
            return deepspeed.ops.adam.DeepSpeedCPUAdam(
                groups, lr=optimizer.learning_rate, betas=optimizer.betas, eps=optimizer.eps, adamw_mode=True
            )
        except (RuntimeError, OSError, deepspeed.ops.op_builder.builder.CUDAMismatchException) as error:
            log.warning(
                "DeepSpeed's CPU Adam cannot be built here (%s); torch's fused AdamW does its work, slower",
                " ".join(str(error).split())[:120],
            )
            config["zero_force_ds_cpu_optimizer"] = False
    return build_adamw(groups, optimizer)
