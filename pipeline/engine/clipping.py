"""Gradient norm, clipping, and the guard that skips bad steps, between backward and the optimizer's step.

A non-finite gradient never reaches the parameters. Everything is computed on the device: one foreach norm and
one all-reduce of a scalar. Fused optimizers get `found_inf` and `grad_scale`, so the host reads nothing.

DeepSpeed 0.19 reads a flag per parameter at stage 0 and six per step at stages 1 and 2, and launches a dozen
operators per parameter. With 21 parameters these are 740 and 766 operators a step, here 365 and 393.
`take_over_clipping` decides where DeepSpeed's own way is used all the same.
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

    A refused step leaves no trace: the optimizer skips it as it skips a non-finite gradient, and the module's
    buffers get their previous values. Steps without limits cost nothing.

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
        """Return whether this step may be refused."""
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

        Args:
            loss_sum: This rank's share of the loss sum.
            count: Number of valid tokens (or samples) of the global batch.
        """
        if self._limits is not None and self.loss is None:
            self.loss = mean_loss(self._job.all_reduce_sum(loss_sum.double()), count)

    def __call__(self, norm: Tensor | float) -> Tensor | None:
        """Return whether the step is refused, bool, 0-dim; `None` without limits.

        Call `compute_loss` first.

        Args:
            norm: Norm of all gradients together, equal on all ranks.
        """
        if self._limits is None:
            return None
        if self._is_refused is None:
            high = self.is_loss_high()
            self._is_refused = high | ~(torch.as_tensor(norm, device=high.device) <= self._limits.grad_norm)
        return self._is_refused

    def is_loss_high(self) -> Tensor:
        """Return whether the loss is not finite or exceeds its limit, bool, 0-dim.

        Call `compute_loss` first.
        """
        assert self._limits is not None
        assert self.loss is not None
        return ~(self.loss.isfinite() & (self.loss <= self._limits.loss))

    def block_update(self, optimizer: Optimizer, norm: Tensor | float) -> None:
        """Have the optimizer's next step change nothing if the step is refused.

        For engines in which DeepSpeed computes the norm. Call it right before the optimizer's step. Waits for
        the device if the optimizer's kernels read no flag.
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

        The gradients are put back because offloaded ones are buffers that the engine uses again.
        """
        vars(optimizer).pop("found_inf", None)
        for p, gradient in self._removed_gradients:
            p.grad = gradient
        self._removed_gradients = []

    def end_step(self, skipped: Tensor, counts: bool = False) -> Tensor:
        """Restore the buffers if the step was skipped or refused.

        Args:
            skipped: 1 if the engine skipped the step, else 0.
            counts: Whether a skipped step counts as a step, so that the buffers keep its forward's values.

        Returns:
            1 if the step was skipped or refused, else 0; 0-dim.
        """
        if self._limits is None:
            return skipped
        if self._is_refused is not None:
            skipped = torch.maximum(skipped, self._is_refused.to(skipped))
        is_skipped = torch.zeros_like(skipped, dtype=torch.bool) if counts else skipped > 0
        with torch.no_grad():
            for layer, name, buffer, before in self._saved_buffers:
                after: Any = layer._buffers[name]
                buffer.copy_(torch.where(is_skipped, before, buffer if after is None else after))
                layer._buffers[name] = buffer
        self._saved_buffers = []
        return skipped


class StepGate:
    """Makes the next optimizer step wait for a checkpoint's copy of the weights.

    A GPU's weights are copied on a stream of their own, beside the next forward and backward. Only an
    optimizer's step writes what is copied. A hook before it makes the device wait for the copy, and the host
    does not wait.

    Args:
        model: Model whose weights are copied.
        optimizers: All optimizers that step the model.
    """

    def __init__(self, model: nn.Module, *optimizers: Optimizer):
        self._waits: list[Callable[[], None]] = []
        # An embedding with max_norm rescales its rows in its forward.
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
"""Adds a 0-dim tensor up over ranks."""
RefusalCheck = Callable[[Tensor], Tensor | None]
"""Maps the gradient norm, 0-dim, to whether the step is refused, bool, 0-dim; `None`: there are no limits."""


def take_over_clipping(config: dict[str, Any], split: Split, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the trainer itself clips and guards the steps of a DeepSpeed engine.

    If so, `config` is changed to turn DeepSpeed's clipping and guard off. DeepSpeed keeps both for:
        - fp16, where it searches for a loss scale
        - stage 3
        - the optimizer reads no flag on the device or is offloaded, so that a step needs the host anyway
        - stage 1 in bf16 with gradients summed in fp32, for which DeepSpeed has another optimizer class

    At stage 0 DeepSpeed computes no norm in fp32. In half precision its norm is wrong for matrices that
    AutoTP has cut (19 % off): it is taken of gradients without their parameters' marks.
    """
    zero = config.get("zero_optimization", {})
    types = config.get("data_types", {})
    on_device = split.precision != "fp16" and reads_found_inf(optimizer)
    if split.zero_stage == 0:
        own = split.precision == "fp32" or split.tensor_parallel > 1 or on_device
    else:
        offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
        sums_in_fp32 = split.precision == "bf16" and types.get("grad_accum_dtype") == "fp32"
        own = on_device and not offloaded and split.zero_stage in ((2,) if sums_in_fp32 else (1, 2))
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
    """Have the optimizer's next step clip the gradients, or change nothing if they are not finite.

    Args:
        optimizer: Optimizer whose parameters have the gradients.
        max_norm: Norm to clip to; 0 clips nothing.
        counted: Whether this rank counts a parameter in the norm, for each parameter of the optimizer.
        sums: Adds a 0-dim tensor up over the ranks that hold parts of the model; `None` if one holds all.
        refused: Returns whether a step with a given norm is refused; `None` if none is.

    Returns:
        The global gradient norm before clipping, and 1 if the step is skipped, else 0; both 0-dim.
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
    """Do what `clip_and_guard` does, for this rank's partition at ZeRO 1 and 2. Call it after backward.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        max_norm: Norm to clip to; 0 clips nothing.
        is_counted: Returns whether this rank counts a parameter in the norm.
        sums: Adds a 0-dim tensor up over all ranks.
        refused: Returns whether a step with a given norm is refused.

    Returns:
        The global gradient norm before clipping, and 1 if the step is skipped, else 0; both 0-dim.
    """
    gradients = [
        gradient
        for index, parameters in enumerate(zero.params_in_partition)
        for gradient, p in zip(_without_padding(zero.averaged_gradients[index]), parameters, strict=False)
        if is_counted(p)
    ]
    norm = sums(square_norm(gradients, zero.single_partition_of_fp32_groups[0].device)).sqrt().float()
    return norm, clip_or_skip(zero.optimizer, norm, max_norm, refused(norm))


def use_single_norm(zero: Any, sums: SumOverRanks) -> None:
    """Have ZeRO 3 compute one norm of all gradients in one collective instead of one per parameter and group.

    DeepSpeed still clips and guards. Nothing changes if the optimizer is offloaded. Do not call it for
    matrices cut by tensor parallelism.
    """

    def norms() -> list[Tensor]:
        gradients = [
            each for index in range(len(zero.fp16_groups)) for each in zero.averaged_gradients[index]
        ]
        return [sums(square_norm(gradients, zero.device)).sqrt().float()]

    if not zero.offload_optimizer:
        zero._get_norm_groups = norms


def _without_padding(gradients: Iterable[Tensor]) -> Iterable[Tensor]:
    return (each for each in gradients if not getattr(each, "_zero_padding", False))


def square_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of all squares, 0-dim, fp64.

    The norm of each tensor is computed in fp32, or in the tensor's precision if that is higher.
    """
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    dtype = reduce(torch.promote_types, {each.dtype for each in gradients}, torch.float32)
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).double().square().sum()


def replace_bf16_step(zero_optimizer: Any) -> None:
    """Replace the step of DeepSpeed's stage-0 optimizer in bf16 by one without norm, clipping and guard.

    A hook of the inner optimizer does these. DeepSpeed's step reads a flag per parameter, and launches about
    twelve operators for each.
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
    """Have the optimizer's next step clip the gradients to `max_norm`, or change nothing.

    It changes neither parameters nor state if the norm is not finite or the step is refused.

    Fused kernels read `grad_scale` and `found_inf` on the device, as torch's GradScaler sets them.
    For other optimizers the host waits for the norm and removes the gradients: torch's optimizers ignore
    parameters without one.

    Args:
        optimizer: Optimizer of the parameters.
        norm: Norm of all gradients together, 0-dim.
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
    """Have the optimizer's steps inside the context change nothing."""
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
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # the attribute GradScaler reads
