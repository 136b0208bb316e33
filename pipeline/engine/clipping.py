"""Gradient norm, clipping, and the guard that skips bad steps, between backward and the optimizer's step.

A non-finite gradient never reaches the parameters. Everything is computed on the device: one foreach norm and
one all-reduce of a scalar. Fused optimizers read `found_inf` and `grad_scale`, so the host does not wait
for the device.

DeepSpeed 0.19 synchronizes once per parameter at stage 0 and six times per step at stages 1 and 2, and
launches a dozen operators per parameter. With 21 parameters DeepSpeed launches 740 operators per step at
stage 0 and 766 at stages 1 and 2; with this module they are 365 and 393. `take_over_clipping` decides whether
this module or DeepSpeed clips.
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
    """Refuses steps whose loss or gradient norm exceeds their limits.

    A refused step leaves no trace: the optimizer skips it like a step with a non-finite gradient, and the
    module's buffers get their previous values. Steps without limits cost nothing.

    Calling the guard with the gradient norm returns whether the step is refused.

    Args:
        job: Job whose ranks sum the loss.
        module: This rank's module, whose buffers are restored.
    """

    def __init__(self, job: Job, module: nn.Module):
        self._job = job
        self._layers = [layer for layer in module.modules() if layer._buffers]
        self._limits: StepLimits | None = None
        self._saved_buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._removed_gradients: list[tuple[Tensor, Tensor | None]] = []
        self._is_refused: Tensor | None = None
        self.loss: Tensor | None = None
        """Mean loss of the global batch, 0-dim, fp64; `None` before `compute_loss` or without limits."""

    @property
    def has_limits(self) -> bool:
        """Return whether the current step has limits, so that it may be refused."""
        return self._limits is not None

    def begin_step(self, limits: StepLimits | None) -> None:
        """Set the limits of a step and save the buffers before its first forward."""
        self._limits = limits
        self._is_refused = None
        self.loss = None
        self._saved_buffers = []
        if limits is not None:
            self._saved_buffers = [
                (layer, name, buffer, buffer.clone())
                for layer in self._layers
                for name, buffer in layer._buffers.items()
                if buffer is not None
            ]

    def compute_loss(self, loss_sum: Tensor, count: Tensor) -> None:
        """Compute the mean loss after a step's last forward. Collective if there are limits.

        Does nothing without limits, or if the step's loss was computed before.

        Args:
            loss_sum: This rank's share of the loss sum.
            count: Number of valid tokens (or samples) of the global batch.
        """
        if self._limits is not None and self.loss is None:
            self.loss = mean_loss(self._job.all_reduce_sum(loss_sum.double()), count)

    def __call__(self, norm: Tensor | float) -> Tensor | None:
        """Return whether the step is refused, bool, 0-dim; `None` without limits.

        Call `compute_loss` first. Later calls in the same step return the first call's result.

        Args:
            norm: Global gradient norm before clipping, equal on all ranks.
        """
        if self._limits is None:
            return None
        if self._is_refused is None:
            is_loss_high = self.is_loss_high()
            norm = torch.as_tensor(norm, device=is_loss_high.device)
            self._is_refused = is_loss_high | ~(norm <= self._limits.grad_norm)  # also refuses NaN
        return self._is_refused

    def is_loss_high(self) -> Tensor:
        """Return whether the loss is not finite or exceeds its limit, bool, 0-dim.

        Only for a step with limits, after `compute_loss`.
        """
        assert self._limits is not None
        assert self.loss is not None
        return ~(self.loss.isfinite() & (self.loss <= self._limits.loss))

    def block_update(self, optimizer: Optimizer, norm: Tensor | float) -> None:
        """Have the optimizer's next step change nothing if the step is refused.

        For engines in which DeepSpeed computes the norm. Call it right before the optimizer's step. It
        synchronizes with the device if the optimizer's kernels read no flag.

        Args:
            optimizer: Optimizer that makes the step.
            norm: Global gradient norm before clipping, equal on all ranks.
        """
        refused = self(norm)
        if refused is None:
            return
        if reads_found_inf(optimizer):
            optimizer.found_inf = refused.float()  # type: ignore[attr-defined]
        elif bool(refused):  # optimizers ignore parameters without a gradient
            self._removed_gradients = [
                (p, p.grad) for group in optimizer.param_groups for p in group["params"]
            ]
            for p, _ in self._removed_gradients:
                p.grad = None

    def unblock_updates(self, optimizer: Optimizer) -> None:
        """Undo `block_update` after the optimizer's step.

        Removed gradients are restored, since offloaded gradients are buffers that the engine uses again.
        """
        vars(optimizer).pop("found_inf", None)
        for p, gradient in self._removed_gradients:
            p.grad = gradient
        self._removed_gradients = []

    def end_step(self, skipped: Tensor, keeps_buffers: bool = False) -> Tensor:
        """Restore the buffers if the step was skipped or refused.

        Args:
            skipped: 1 if the engine skipped the step, else 0; 0-dim.
            keeps_buffers: Whether the buffers keep the values that the forward wrote, even if the step was
                skipped.

        Returns:
            1 if the step was skipped or refused, else 0; 0-dim.
        """
        if self._limits is None:
            return skipped
        if self._is_refused is not None:
            skipped = torch.maximum(skipped, self._is_refused.to(skipped))
        is_restored = torch.zeros_like(skipped, dtype=torch.bool) if keeps_buffers else skipped > 0
        with torch.no_grad():
            for layer, name, buffer, before in self._saved_buffers:
                after: Any = layer._buffers[name]
                buffer.copy_(torch.where(is_restored, before, buffer if after is None else after))
                layer._buffers[name] = buffer
        self._saved_buffers = []
        return skipped


class StepGate:
    """Makes the next optimizer step wait for a checkpoint's copy of the weights.

    A GPU's weights are copied on a separate stream during the next forward and backward. A hook before the
    optimizer's step makes the device, but not the host, wait for the copy. If the forward itself changes
    weights, the device waits before the next forward.

    Args:
        model: Model whose weights are copied.
        optimizers: All optimizers that step the model.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer):
        self._waits: list[Callable[[], None]] = []
        # An embedding with max_norm rescales rows of its weight in its forward.
        self._forward_writes = any(getattr(each, "max_norm", None) is not None for each in model.modules())
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._wait_for_copies)

    def hold(self, wait: Callable[[], None]) -> None:
        """See EngineState.hold_step."""
        self._waits.append(wait)
        if self._forward_writes:
            self._wait_for_copies()

    def _wait_for_copies(self, *_: Any) -> None:
        """Call the functions of `hold` once; a hook before the optimizer's step."""
        waits = self._waits
        self._waits = []
        for wait in waits:
            wait()


SumOverRanks = Callable[[Tensor], Tensor]
"""Adds a 0-dim tensor up over ranks."""
RefusalCheck = Callable[[Tensor], Tensor | None]
"""Maps the gradient norm, 0-dim, to whether the step is refused, bool, 0-dim; to `None` without limits."""


def take_over_clipping(config: dict[str, Any], split: Split, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the trainer itself clips and guards the steps of a DeepSpeed engine.

    If so, `config` is changed to turn DeepSpeed's clipping and guard off. DeepSpeed clips and guards in these
    cases:
        - fp16, where DeepSpeed searches for a loss scale
        - stage 3
        - an optimizer that reads no flag on the device or is offloaded: its step synchronizes in any case
        - stage 1 in bf16 with gradients summed in fp32, for which DeepSpeed has another optimizer class

    At stage 0 the trainer always clips in fp32, where DeepSpeed computes no norm, and under tensor
    parallelism. There DeepSpeed's norm in half precision is wrong (19 % off): the gradients that it reads do
    not show which parameters AutoTP has cut.

    Args:
        config: Resolved DeepSpeed JSON. It may be changed.
        split: Split of the run.
        optimizer: Optimizer that DeepSpeed's engine will step.
    """
    zero = config.get("zero_optimization", {})
    types = config.get("data_types", {})
    skips_on_device = split.precision != "fp16" and reads_found_inf(optimizer)
    if split.zero_stage == 0:
        takes_over = split.precision == "fp32" or split.tensor_parallel > 1 or skips_on_device
    else:
        is_offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        sums_in_fp32 = split.precision == "bf16" and types.get("grad_accum_dtype") == "fp32"
        possible_stages = (2,) if sums_in_fp32 else (1, 2)
        takes_over = skips_on_device and not is_offloaded and split.zero_stage in possible_stages
        if takes_over:
            zero["compute_grad_norm"] = False
            if split.precision == "bf16":
                config["bf16"]["check_grad_overflow"] = False
    if takes_over:
        config["gradient_clipping"] = 0.0
    return takes_over


def clip_and_guard(
    optimizer: torch.optim.Optimizer,
    max_norm: float,
    in_norm: Iterable[bool] = repeat(True),
    sum_over_ranks: SumOverRanks | None = None,
    refused: RefusalCheck | None = None,
) -> tuple[Tensor, Tensor]:
    """Have the optimizer's next step clip the gradients, or change nothing if they are not finite.

    Args:
        optimizer: Optimizer whose parameters have the gradients.
        max_norm: Norm to clip to; 0 clips nothing.
        in_norm: Whether this rank's norm counts the parameter, for each parameter of the optimizer.
        sum_over_ranks: Adds a 0-dim tensor up over the ranks that have parts of the model; `None` if this
            rank has the whole model.
        refused: Returns whether a step with a given norm is refused; `None` if there are no limits.

    Returns:
        The global gradient norm before clipping, and 1 if the step is skipped, else 0; both 0-dim.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [
        p.grad
        for p, is_counted in zip(parameters, in_norm, strict=False)
        if is_counted and p.grad is not None
    ]
    square = sum_squares(gradients, parameters[0].device)
    if sum_over_ranks is not None:
        square = sum_over_ranks(square)
    norm = square.sqrt().float()
    is_refused = refused(norm) if refused is not None else None
    return norm, clip_or_skip(optimizer, norm, max_norm, is_refused)


def clip_and_guard_partition(
    zero: Any,
    max_norm: float,
    is_counted: Callable[[Tensor], bool],
    sum_over_ranks: SumOverRanks,
    refused: RefusalCheck,
) -> tuple[Tensor, Tensor]:
    """Do what `clip_and_guard` does, for this rank's partition at ZeRO 1 and 2. Collective.

    Call it after the step's last backward.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        max_norm: Norm to clip to; 0 clips nothing.
        is_counted: Returns whether this rank's norm counts the parameter.
        sum_over_ranks: Adds a 0-dim tensor up over all ranks.
        refused: Returns whether a step with a given norm is refused.

    Returns:
        The global gradient norm before clipping, and 1 if the step is skipped, else 0; both 0-dim.
    """
    gradients = [
        gradient
        for index, parameters in enumerate(zero.params_in_partition)
        for gradient, p in zip(_remove_padding(zero.averaged_gradients[index]), parameters, strict=False)
        if is_counted(p)
    ]
    square = sum_squares(gradients, zero.single_partition_of_fp32_groups[0].device)
    norm = sum_over_ranks(square).sqrt().float()
    return norm, clip_or_skip(zero.optimizer, norm, max_norm, refused(norm))


def use_single_norm(zero: Any, sum_over_ranks: SumOverRanks) -> None:
    """Have ZeRO 3 compute one norm of all gradients in one collective, not one per parameter and group.

    DeepSpeed still clips and guards. Nothing changes if the optimizer is offloaded. Do not call it under
    tensor parallelism: parameters that are whole on each rank would count several times.

    Args:
        zero: DeepSpeed's ZeRO 3 optimizer.
        sum_over_ranks: Adds a 0-dim tensor up over all ranks.
    """

    def compute_norms() -> list[Tensor]:
        gradients = [
            each for index in range(len(zero.fp16_groups)) for each in zero.averaged_gradients[index]
        ]
        return [sum_over_ranks(sum_squares(gradients, zero.device)).sqrt().float()]

    if not zero.offload_optimizer:
        zero._get_norm_groups = compute_norms


def _remove_padding(gradients: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the gradients without those that only pad a partition."""
    return (each for each in gradients if not getattr(each, "_zero_padding", False))


def sum_squares(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of all gradients' squares, 0-dim, fp64.

    The norm of each tensor is computed in fp32, or in the gradients' highest precision if that is fp64.

    Args:
        gradients: Gradients on one device; the list may be empty.
        device: Device of the result if there are no gradients.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = reduce(torch.promote_types, {each.dtype for each in gradients}, torch.float32)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double().square().sum()


def replace_bf16_step(zero_optimizer: Any) -> None:
    """Replace the step of DeepSpeed's stage-0 optimizer in bf16 by one without norm, clipping and guard.

    A hook of the inner optimizer computes the norm, clips and guards. DeepSpeed's step synchronizes with the
    device and launches about twelve operators for each parameter.
    """
    weights = [p for group in zero_optimizer.fp16_groups for p in group]
    masters = [p for group in zero_optimizer.fp32_groups for p in group]

    @torch.no_grad()
    def step(closure: Any = None) -> None:
        for p, master in zip(weights, masters, strict=True):
            master.grad = torch.zeros_like(master) if p.grad is None else torch.empty_like(master)
        pairs = [(m.grad, p.grad) for p, m in zip(weights, masters, strict=True) if p.grad is not None]
        torch._foreach_copy_([copy for copy, _ in pairs], [gradient for _, gradient in pairs])
        zero_optimizer.optimizer.step()
        for master in masters:
            master.grad = None
        torch._foreach_copy_(weights, masters)

    zero_optimizer.step = step


def clip_or_skip(
    optimizer: Optimizer, norm: Tensor, max_norm: float, is_refused: Tensor | None = None
) -> Tensor:
    """Have the optimizer's next step clip the gradients to `max_norm`, or change nothing.

    The step changes neither parameters nor state if the norm is not finite or the step is refused.

    Fused kernels read `grad_scale` and `found_inf` on the device, as torch's GradScaler sets them. For other
    optimizers the host synchronizes with the device, and clips or removes the gradients: torch's optimizers
    ignore parameters without a gradient.

    Args:
        optimizer: Optimizer of the parameters.
        norm: Global gradient norm before clipping, 0-dim.
        max_norm: Norm to clip to; 0 clips nothing.
        is_refused: Whether the step is refused, bool, 0-dim; `None` if there are no limits.

    Returns:
        1 if the step is skipped, else 0; 0-dim.
    """
    is_skipped = ~torch.isfinite(norm)
    skipped = (is_skipped if is_refused is None else is_skipped | is_refused).float()
    if reads_found_inf(optimizer):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        if max_norm > 0:  # the same formula as in torch's clip_grads_with_norm_
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
    """Have the optimizer's steps inside the context change nothing. They may remove the gradients."""
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
    """Return whether the optimizer's kernels skip a step if its `found_inf`, a flag on the device, is 1."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # the attribute GradScaler reads
