"""Parameter groups and the optimizers, the same for every engine.

torch's fused kernels where there are any: as fast as DeepSpeed's, build nothing, and skip a non-finite step
on the device (`found_inf`) without asking the host. Offloaded optimizer state is the engine's own matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.patterns import GroupKey, group_keys, kind_of
from pipeline.config.split import Split
from pipeline.distributed.progress import Phase, phase
from pipeline.engine.own_optimizer import build_own

ONE_PROCESS = Split(1, "fp32", "single")
START = 0.0  # of an optimizer whose rate follows from the model: set_learning_rate is called before each step


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """The trained parameters of a whole model in groups; see `assigned` and `grouped`.

    Raises:
        ConfigError: a pattern of optimizer.groups matches nothing that is trained.
        ModelError: no parameter requires a gradient.
    """
    named = list(named)
    return grouped(named, assigned(named, config), config)


def assigned(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Name -> group of each parameter of a whole model that is trained; see `group_keys`."""
    # A ZeRO-3 parameter is empty between uses; ds_shape is its whole shape.
    trained = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in named if p.requires_grad}
    return group_keys(trained, config)


def grouped(
    named: Iterable[tuple[str, nn.Parameter]], keys: Mapping[str, GroupKey], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """The groups that a model, or a part of it, has any of; `lr_factor` is what their rate is multiplied by.

    Args:
        named: Those that are not trained are left out.
        keys: Of all names of the whole model that are trained.
    """
    members: dict[GroupKey, list[nn.Parameter]] = {key: [] for key in sorted(set(keys.values()))}
    for name, p in named:
        if p.requires_grad:
            members[keys[name]].append(p)
    groups = []
    for (number, is_undecayed), parameters in members.items():
        own = config.groups[number - 1] if config.groups and number else None
        decay = config.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        groups.append(
            {
                "params": parameters,
                "weight_decay": 0.0 if is_undecayed else decay,
                "lr_factor": 1.0 if own is None else own.learning_rate_factor,
                "kind": kind_of((number, is_undecayed), config),
            }
        )
    return [group for group in groups if group["params"]]


@phase(Phase.OPTIMIZER)
def build_torch_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, split: Split = ONE_PROCESS
) -> Optimizer:
    """Return torch's optimizer over the groups, or the user's own, with the recipe's numbers.

    A group without a `kind` has the recipe's.

    Raises:
        ConfigError: the user's own cannot be made, or cannot work under this split.
    """
    members: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        members.setdefault(group.get("kind", config.kind), []).append(group)
    optimizers = [
        OPTIMIZERS[kind](its, config) if kind in OPTIMIZERS else build_own(its, config, split)
        for kind, its in members.items()
    ]
    if len(optimizers) == 1:
        return optimizers[0]
    made = {id(group["params"][0]): group for each in optimizers for group in each.param_groups}
    return SeveralOptimizers([made[id(group["params"][0])] for group in groups], optimizers)


class SeveralOptimizers(Optimizer):
    """Optimizers that share the groups of a model, one to those who read groups and state or have it step."""

    def __init__(self, groups: list[dict[str, Any]], optimizers: list[Optimizer]):
        """
        Args:
            groups: The very ones of `optimizers`, in this order.
        """
        super().__init__(groups, {})
        self._optimizers = optimizers
        for each in optimizers:
            each.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Has each step its own groups."""
        for each in self._optimizers:
            each.step()

    def of(self, stepped: Tensor) -> Optimizer:
        """The one that steps it."""
        groups = ((each, group["params"]) for each in self._optimizers for group in each.param_groups)
        return next(each for each, parameters in groups if any(p is stepped for p in parameters))


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    rate = config.learning_rate or START
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True)


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    sgd = torch.optim.SGD(groups, lr=config.learning_rate or START, momentum=config.momentum, fused=True)
    if config.momentum:
        sgd.register_step_pre_hook(_start_at_rest)
    return sgd


def _adafactor(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    return torch.optim.Adafactor(groups, lr=config.learning_rate or START)


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    return torch.optim.Muon(groups, lr=config.learning_rate or START, adjust_lr_fn="match_rms_adamw")


def _start_at_rest(optimizer: Optimizer, *_: Any) -> None:
    """Momentum of zeros before a parameter's first step; torch (2.13) leaves it undefined if that is skipped.

    The first step comes to the same: without dampening 0 + gradient is the gradient.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and "momentum_buffer" not in optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd, "adafactor": _adafactor, "muon": _muon}
"""Built-in kinds; any other kind is an import path."""


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Each group's rate: the schedule's times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_factor"]


def clip_or_skip(
    optimizer: Optimizer, norm: Tensor, max_norm: float, is_refused: Tensor | None = None
) -> Tensor:
    """Before a step: gradients are clipped to `max_norm`, and where the norm is not finite, or the step is
    refused, no parameter and no state of the optimizer will move.

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
def at_rest(optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Inside it a step moves nothing."""
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
    """Whether its kernels skip a step by a flag on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # as GradScaler asks
