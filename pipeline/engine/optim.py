"""Parameter groups and the optimizers, also a user's own, the same for every engine.

torch's fused kernels where there are any: as fast as DeepSpeed's, build nothing, and skip a non-finite step
on the device (`found_inf`) without asking the host. Offloaded optimizer state is the engine's own matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config.import_paths import check_signature, errors_in_one_line, import_object
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.patterns import GroupKey, assign_parameter_groups, get_optimizer_kind
from pipeline.config.split import Split
from pipeline.distributed.progress import Phase, phase
from pipeline.errors import ConfigError

Groups = list[dict[str, Any]]

SHAPE = (64, 80)  # libraries keep few bits of parameters from some thousand elements on
PIECE = 3_000  # elements; no multiple of a row
STEPS = 8
RATE = 1e-2  # a run's own may be too low to tell two updates apart
WHOLE = "plain PyTorch (--deepspeed ds_configs/torch_ddp.json) leaves parameters whole"


def build_user_optimizer(groups: Groups, config: OptimizerConfig, split: Split) -> Optimizer:
    """Return the optimizer that `optimizer.kind` names, over the groups.

    Raises:
        ConfigError: it cannot be made, is no optimizer, or cannot do what this split asks of it.
    """
    kind = config.kind
    make = import_object(kind, ConfigError)
    message = f"optimizer.args: {kind} cannot be called with the parameter groups and these"
    check_signature(make, message, ConfigError, [], **config.args)

    def made(groups: Groups, rate: float) -> Optimizer:
        given = [
            {
                "params": list(group["params"]),
                "lr": rate * group["lr_factor"],
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ]
        with errors_in_one_line(f"optimizer.kind: {kind}", ConfigError):
            optimizer = make(given, **config.args)
        _check_groups(optimizer, groups, kind)
        return optimizer

    device = groups[0]["params"][0].device
    optimizer = made(groups, config.learning_rate or RATE)
    if isinstance(optimizer, torch.optim.Adagrad) and split.cuts_matrices:
        raise ConfigError(
            f"optimizer.kind: DeepSpeed replaces torch's Adagrad at ZeRO 1 to 3, without its groups; {WHOLE}"
        )
    example = _Trial(kind, lambda groups: made(groups, RATE), device).run(split)
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own["lr_factor"] = group["lr_factor"]
    optimizer.state_example = example  # type: ignore[attr-defined]
    return optimizer


def get_state_example(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a user's own optimizer keeps of one parameter; empty for torch's and DeepSpeed's."""
    return getattr(optimizer, "state_example", {})


def _check_groups(optimizer: Any, groups: Groups, kind: str) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.kind: {kind} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    taken = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    given = [[id(p) for p in group["params"]] for group in groups]
    if taken != given:
        raise ConfigError(
            f"optimizer.kind: {kind} has {sum(map(len, taken))} parameters in {len(taken)} groups, and was "
            f"given {sum(map(len, given))} in {len(given)}; pass the groups on to the optimizer as they are"
        )


class _Trial:
    """Steps small matrices with the same gradients, and compares where they come to."""

    def __init__(self, kind: str, make: Callable[[Groups], Optimizer], device: torch.device):
        self._kind = kind
        self._make = make
        self._device = device
        numbers = torch.Generator().manual_seed(0)
        self._start = 0.1 * torch.randn(SHAPE, generator=numbers).to(device)
        self._gradients = torch.randn(STEPS, *SHAPE, generator=numbers).to(device)

    def run(self, split: Split) -> dict[str, Any]:
        """Return the state of a parameter after some steps.

        Raises:
            ConfigError: the optimizer cannot be resumed, cannot skip a step, or not work under this split.
        """
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            whole, optimizer, (p,) = self._stepped("on a matrix", 0, STEPS)
            state = dict(optimizer.state[p])
            self._check_state(state, p)
            self._check_skip(optimizer, p)
            self._check_resume(whole)
            if split.parallel == "deepspeed" and (split.cuts_matrices or split.precision != "fp32"):
                self._check_pieces(whole, split)
        return state

    def _stepped(
        self,
        how: str,
        first: int,
        last: int,
        start: Tensor | None = None,
        piece: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Optimizer, list[nn.Parameter]]:
        """Make an optimizer and step it.

        Args:
            how: For the message if it raises.
            piece: Elements of each tensor that stands in the matrix's place once the optimizer is made.
            state: Of the matrix at step `first`.

        Returns:
            The flat matrix afterwards, the optimizer and what it stepped.
        """
        start = self._start if start is None else start
        stepped = [nn.Parameter(start.clone())]
        optimizer = self._make([{"params": stepped, "weight_decay": 0.1, "lr_factor": 1.0}])
        if piece is not None:
            parts = start.flatten().split(piece) if piece < start.numel() else [start]
            stepped = [nn.Parameter(part.clone()) for part in parts]
            optimizer.param_groups[0]["params"] = stepped
        if state is not None:
            optimizer.state[stepped[0]] = state
        with errors_in_one_line(f"optimizer.kind: {self._kind}, tried out {how},", ConfigError):
            for step in range(first, last):
                parts = self._gradients[step].flatten().split([p.numel() for p in stepped])
                for p, part in zip(stepped, parts, strict=True):
                    p.grad = part.view_as(p).clone()
                torch.manual_seed(step)
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in stepped]), optimizer, stepped

    def _check_state(self, state: dict[str, Any], p: Tensor) -> None:
        for key, value in state.items():
            if torch.is_tensor(value):
                if value.is_floating_point() or value.dim() == 0:
                    continue
                what = f"a tensor of {value.dtype}"
            elif isinstance(value, (bool, int, float)):
                continue
            else:
                what = f"a {type(value).__name__}"
            raise ConfigError(
                f"optimizer.kind: {self._kind} keeps {what} as {key!r}, which a checkpoint cannot hold; keep "
                "numbers and floating-point tensors in self.state[p]"
            )

    def _check_skip(self, optimizer: Optimizer, p: nn.Parameter) -> None:
        before = p.detach().clone()
        p.grad = None
        with errors_in_one_line(f"optimizer.kind: {self._kind}, tried out without a gradient,", ConfigError):
            optimizer.step()
        if not torch.equal(before, p):
            raise ConfigError(
                f"optimizer.kind: {self._kind} moves a parameter that has no gradient; write `if p.grad is "
                "None: continue` in its step: a step without finite gradients is skipped in this way"
            )

    def _check_resume(self, whole: Tensor) -> None:
        half = STEPS // 2
        values, optimizer, (p,) = self._stepped("on a matrix", 0, half)
        kept = {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state[p].items()}
        resumed, *_ = self._stepped("after a resume", half, STEPS, values.view(SHAPE), state=kept)
        if not torch.equal(whole, resumed):
            raise ConfigError(
                f"optimizer.kind: {self._kind} keeps something beside self.state[p], in an attribute or in a "
                "group, which no checkpoint has: a resumed run would leave the curve; keep it in "
                "self.state[p]"
            )

    def _check_pieces(self, whole: Tensor, split: Split) -> None:
        piece = PIECE if split.cuts_matrices else whole.numel()
        how = f"as {split} steps it, on tensors that take the parameters' place in its groups once it is made"
        try:
            stepped, optimizer, pieces = self._stepped(how, 0, STEPS, piece=piece)
        except ConfigError as error:
            raise ConfigError(f"{error}; {WHOLE}") from None
        if torch.allclose(whole, stepped, rtol=1e-4, atol=1e-6):
            wrong = [
                key
                for p in pieces
                for key, value in optimizer.state[p].items()
                if torch.is_tensor(value) and value.dim() and value.shape != p.shape
            ]
            if not wrong or not split.cuts_matrices:
                return
            why = f"keeps {wrong[0]!r} in another shape than the parameter's, which no checkpoint of it holds"
        elif split.cuts_matrices:
            why = "steps a matrix in another way than the flat pieces of it"
        else:
            why = "does not step what takes the parameters' place in its groups"
        raise ConfigError(
            f"optimizer.kind: {self._kind} {why}; under {split} an optimizer has to read its parameters from "
            f"self.param_groups in each step, and to work element by element; {WHOLE}"
        )


ONE_PROCESS = Split(1, "fp32", "single")
PLACEHOLDER_RATE = 0.0  # rate of an optimizer whose rate follows from the model


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the trained parameters of a whole model in groups; see `assigned` and `grouped`.

    Raises:
        ConfigError: a pattern of optimizer.groups matches nothing that is trained.
        ModelError: no parameter requires a gradient.
    """
    named = list(named)
    return group_parameters(named, assign_groups(named, config), config)


def assign_groups(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Return name -> group of each trained parameter of a whole model; see `assign_parameter_groups`."""
    # A ZeRO-3 parameter is empty between uses; ds_shape is its whole shape.
    trained = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in named if p.requires_grad}
    return assign_parameter_groups(trained, config)


def group_parameters(
    named: Iterable[tuple[str, nn.Parameter]], keys: Mapping[str, GroupKey], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the groups that a model, or a part of it, has parameters of. `lr_factor` multiplies their rate.

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
                "kind": get_optimizer_kind((number, is_undecayed), config),
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
        OPTIMIZERS[kind](its, config) if kind in OPTIMIZERS else build_user_optimizer(its, config, split)
        for kind, its in members.items()
    ]
    if len(optimizers) == 1:
        return optimizers[0]
    made = {id(group["params"][0]): group for each in optimizers for group in each.param_groups}
    return CombinedOptimizer([made[id(group["params"][0])] for group in groups], optimizers)


class CombinedOptimizer(Optimizer):
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
        """Have each optimizer step its own groups."""
        for each in self._optimizers:
            each.step()

    def optimizer_of(self, stepped: Tensor) -> Optimizer:
        """Return the optimizer that steps a tensor."""
        groups = ((each, group["params"]) for each in self._optimizers for group in each.param_groups)
        return next(each for each, parameters in groups if any(p is stepped for p in parameters))


def _sgd(groups: Groups, config: OptimizerConfig) -> Optimizer:
    sgd = torch.optim.SGD(groups, lr=_rate(config), momentum=config.momentum, fused=True)
    if config.momentum:
        sgd.register_step_pre_hook(_start_at_rest)
    return sgd


def _rate(config: OptimizerConfig) -> float:
    """Return the rate to start from; `set_learning_rate` is called before each step."""
    return config.learning_rate or PLACEHOLDER_RATE


def _start_at_rest(optimizer: Optimizer, *_: Any) -> None:
    """Make zeros of momentum before a parameter's first step. torch (2.13) leaves it undefined if that is
    skipped.

    The first step comes to the same: without dampening 0 + gradient is the gradient.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and "momentum_buffer" not in optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


OPTIMIZERS: dict[str, Callable[[Groups, OptimizerConfig], Optimizer]] = {
    "adamw": lambda groups, config: torch.optim.AdamW(
        groups, lr=_rate(config), betas=config.betas, eps=config.eps, fused=True
    ),
    "sgd": _sgd,
    "adafactor": lambda groups, config: torch.optim.Adafactor(groups, lr=_rate(config)),
    "muon": lambda groups, config: torch.optim.Muon(groups, lr=_rate(config), adjust_lr_fn="match_rms_adamw"),
}
"""Built-in kinds; any other kind is an import path."""
