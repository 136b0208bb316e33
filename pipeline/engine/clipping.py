"""Between a backward and the optimizer's step: the norm of the gradients, clipping, and whether to step.

All of it on the device, in a few launches; where the optimizer's kernels are fused the host reads nothing.
DeepSpeed launches several operators a parameter and reads flags; `is_own` says where it still does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import reduce
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config.split import Split
from pipeline.distributed.process_group import Job
from pipeline.engine.interface import StepLimits, mean_loss


class StepLimitGuard:
    """Holds a step's loss and gradient norm to limits. Where a step has none, it costs nothing.

    Args:
        module: This rank's; its buffers are put back.
    """

    def __init__(self, job: Job, module: nn.Module):
        self._job = job
        self._layers = [layer for layer in module.modules() if layer._buffers]
        self._limits: StepLimits | None = None
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._is_refused: Tensor | None = None
        self.loss: Tensor | None = None
        """Mean of the global batch, 0-dim, fp64; None: the step has no limits, or is not so far."""

    @property
    def has_limits(self) -> bool:
        """Return whether this step may be refused."""
        return self._limits is not None

    def begin(self, limits: StepLimits | None) -> None:
        """Keep the buffers before a step's first forward."""
        self._limits, self._is_refused, self.loss = limits, None, None
        self._kept = []
        if limits is not None:
            self._kept = [
                (layer, name, buffer, buffer.clone())
                for layer in self._layers
                for name, buffer in layer._buffers.items()
                if buffer is not None
            ]

    def look(self, loss_sum: Tensor, count: Tensor) -> None:
        """Compute the mean loss after a step's last forward. Collective, if there are limits.

        Args:
            loss_sum: This rank's share.
            count: Of the global batch.
        """
        if self._limits is not None and self.loss is None:
            self.loss = mean_loss(self._job.all_reduce_sum(loss_sum.double()), count)

    def __call__(self, norm: Tensor | float) -> Tensor | None:
        """Return whether the step is refused, bool, 0-dim, or `None` without limits. Call `look` before it.

        Args:
            norm: Of all gradients together, the same on all ranks.
        """
        if self._limits is None:
            return None
        if self._is_refused is None:
            high = self.is_loss_high()
            self._is_refused = high | ~(torch.as_tensor(norm, device=high.device) <= self._limits.grad_norm)
        return self._is_refused

    def is_loss_high(self) -> Tensor:
        """Return whether the loss alone exceeds the limits, bool, 0-dim. Call `look` before it."""
        assert self._limits is not None
        assert self.loss is not None
        return ~(self.loss.isfinite() & (self.loss <= self._limits.loss))

    def before(self, optimizer: Optimizer, norm: Tensor | float) -> None:
        """Have a step whose norm is DeepSpeed's move nothing if it is refused. Call it before the step.

        Waits for the device where the optimizer's kernels read no flag.
        """
        if (refused := self(norm)) is None:
            return
        if reads_found_inf(optimizer):
            optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
        elif bool(refused):  # what has no gradient is passed over
            self._gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
            for p, _ in self._gradients:
                p.grad = None

    def after(self, optimizer: Optimizer) -> None:
        """Take the flag and the missing gradients back after that step.

        Offloaded gradients are buffers of the engine.
        """
        vars(optimizer).pop("found_inf", None)
        for p, gradient in self._gradients:
            p.grad = gradient
        self._gradients = []

    def end(self, skipped: Tensor, counts: bool = False) -> Tensor:
        """Put the buffers back after a step that was not taken.

        Args:
            skipped: 1 where the engine left it out, else 0.
            counts: It was left out and is a step all the same: buffers stay as its forward left them.

        Returns:
            1 where it was left out or refused.
        """
        if self._limits is None:
            return skipped
        if self._is_refused is not None:
            skipped = torch.maximum(skipped, self._is_refused.to(skipped))
        is_skipped = torch.zeros_like(skipped, dtype=torch.bool) if counts else skipped > 0
        with torch.no_grad():
            for layer, name, buffer, before in self._kept:
                after: Any = layer._buffers[name]
                buffer.copy_(torch.where(is_skipped, before, buffer if after is None else after))
                layer._buffers[name] = buffer
        self._kept = []
        return skipped


class StepGate:
    """Calls once, in the first of some optimizers' next steps, what it was given to wait with.

    Args:
        optimizers: All that step the model, each in its own `step`; they are what writes weights and states.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer):
        self._waits: list[Callable[[], None]] = []
        # Such an embedding rescales its rows in its forward.
        self._forward_writes = any(getattr(each, "max_norm", None) is not None for each in model.modules())
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._open)

    def hold(self, wait: Callable[[], None]) -> None:
        """See EngineState.hold_step."""
        self._waits.append(wait)
        if self._forward_writes:
            self._open()

    def _open(self, *_: Any) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()


SumOverRanks = Callable[[Tensor], Tensor]
RefusalCheck = Callable[[Tensor], Tensor | None]
"""Norm of the gradients, 0-dim -> whether a step is not to be taken, bool, 0-dim; None: none is refused."""


def take_over_clipping(config: dict[str, Any], split: Split, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the trainer guards the steps of a DeepSpeed engine. If so, `config` turns DeepSpeed's
    guard off.

    DeepSpeed's own way stays in fp16, which searches a scale; at stage 3; where the optimizer reads no flag
    or its state is offloaded, so that a step needs the host anyhow; and where stage 1 adds gradients of bf16
    up in fp32, in another optimizer of DeepSpeed's. At stage 0 it knows no norm in fp32, and a wrong one of
    matrices that are cut.
    """
    zero, types = config.get("zero_optimization", {}), config.get("data_types", {})
    on_device = split.precision != "fp16" and reads_found_inf(optimizer)
    if split.zero_stage == 0:
        own = split.precision == "fp32" or split.tensor_parallel > 1 or on_device
    else:
        offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        sums_apart = split.precision == "bf16" and types.get("grad_accum_dtype") == "fp32"
        own = on_device and not offloaded and split.zero_stage in ((2,) if sums_apart else (1, 2))
        if own:
            zero["compute_grad_norm"] = False
            if split.precision == "bf16":
                config["bf16"]["check_grad_overflow"] = False
    if own:
        config["gradient_clipping"] = 0.0
    return own


def clip_and_guard(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    counted: Iterable[bool] = repeat(True),
    sums: SumOverRanks | None = None,
    refused: RefusalCheck | None = None,
) -> tuple[Tensor, Tensor]:
    """Have the optimizer's next step clip the gradients, or move nothing where they are not finite.

    Args:
        counted: Of each parameter of the optimizer, whether it is this rank's to count.
        sums: Adds a 0-dim tensor up over the ranks that hold parts of the model; `None` if one holds all.
        refused: Whether a step with such a norm is not to be taken.

    Returns:
        The global gradient norm before clipping, and 1 where the step is skipped, else 0; both 0-dim.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p, own in zip(parameters, counted, strict=False) if own and p.grad is not None]
    square = square_norm(gradients, parameters[0].device)
    norm = (square if sums is None else sums(square)).sqrt().float()
    return norm, clip_or_skip(optimizer, norm, max_norm, refused(norm) if refused is not None else None)


def clip_and_guard_partition(
    zero: Any,
    max_norm: float,
    is_counted: Callable[[Tensor], bool],
    sums: SumOverRanks,
    refused: RefusalCheck,
) -> tuple[Tensor, Tensor]:
    """Do as `clip_and_guard` at ZeRO 1 and 2, after the last backward, over what this rank steps.

    Args:
        zero: DeepSpeed's optimizer.
    """
    gradients = [
        gradient
        for index, parameters in enumerate(zero.params_in_partition)
        for gradient, p in zip(_unpadded(zero.averaged_gradients[index]), parameters, strict=False)
        if is_counted(p)
    ]
    norm = sums(square_norm(gradients, zero.single_partition_of_fp32_groups[0].device)).sqrt().float()
    return norm, clip_or_skip(zero.optimizer, norm, max_norm, refused(norm))


def use_single_norm(zero: Any, sums: SumOverRanks) -> None:
    """Have ZeRO 3 take one norm of all gradients in one collective, not one a parameter and group.

    It clips and guards as before. Not for matrices that are cut, nor where the gradients lie in host memory.
    """

    def norms() -> list[Tensor]:
        gradients = [
            each for index in range(len(zero.fp16_groups)) for each in zero.averaged_gradients[index]
        ]
        return [sums(square_norm(gradients, zero.device)).sqrt().float()]

    if not zero.offload_optimizer:
        zero._get_norm_groups = norms


def _unpadded(gradients: Iterable[Tensor]) -> Iterable[Tensor]:
    return (each for each in gradients if not getattr(each, "_zero_padding", False))


def square_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of all squares, 0-dim, fp64.

    A tensor's own is summed in fp32, or in its precision if that is higher.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = reduce(torch.promote_types, {each.dtype for each in gradients}, torch.float32)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double().square().sum()


def replace_bf16_step(zero_optimizer: Any) -> None:
    """Have DeepSpeed's optimizer of stage 0 in bf16 leave norm, clipping and guard to a hook of its inner
    one.

    By itself it reads a flag a parameter, and launches some twelve operators for each.
    """
    halves = [p for group in zero_optimizer.fp16_groups for p in group]
    masters = [p for group in zero_optimizer.fp32_groups for p in group]

    @torch.no_grad()
    def step(closure: Any = None) -> None:
        for p, master in zip(halves, masters, strict=True):
            master.grad = torch.zeros_like(master) if p.grad is None else torch.empty_like(master)
        pairs = [(m.grad, p.grad) for p, m in zip(halves, masters, strict=True) if p.grad is not None]
        torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
        zero_optimizer.optimizer.step()
        for master in masters:
            master.grad = None
        torch._foreach_copy_(halves, masters)

    zero_optimizer.step = step


def clip_or_skip(
    optimizer: Optimizer, norm: Tensor, max_norm: float, is_refused: Tensor | None = None
) -> Tensor:
    """Have the next step clip the gradients to `max_norm`, or move no parameter and no state.

    It moves nothing where the norm is not finite or the step is refused.

    Fused kernels read `grad_scale` and `found_inf` on the device, the attributes that torch's GradScaler
    sets. What steps on the host is waited for, and has the gradients taken away: torch's optimizers pass over
    what has none.

    Args:
        norm: Of all gradients together, 0-dim.
        max_norm: 0: nothing is clipped.
        is_refused: bool, 0-dim; None: it is not.

    Returns:
        1 where the step is skipped, else 0; 0-dim.
    """
    is_skipped = ~torch.isfinite(norm)
    skipped = (is_skipped if is_refused is None else is_skipped | is_refused).float()
    if reads_found_inf(optimizer):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        if max_norm > 0:  # as clip_grads_with_norm_ has it
            optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)  # type: ignore[attr-defined]
        return skipped
    if bool(skipped):
        optimizer.zero_grad(set_to_none=True)
    elif max_norm > 0:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return skipped


@contextmanager
def suppress_steps(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Have a step inside it move nothing."""
    if reads_found_inf(optimizer):
        optimizer.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        return
    hook = optimizer.register_step_pre_hook(lambda stepped, *_: stepped.zero_grad(set_to_none=True))
    try:
        yield
    finally:
        hook.remove()


def reads_found_inf(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's kernels skip a step by a flag on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # as GradScaler asks
