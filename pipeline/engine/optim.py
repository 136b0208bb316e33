"""Parameter groups and optimizers of every engine: built-in kinds, and a user's own by import path.

Built-in kinds use torch's fused kernels, if torch has them, instead of DeepSpeed's FusedAdam. torch's kernels
are as fast and need no compilation. They read a flag on the device (`found_inf`), so a non-finite step is
skipped without synchronizing with the device. With optimizer state in host memory, deepspeed_base.py chooses
the optimizer.
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
from pipeline.distributed.progress import Phase, tag_errors
from pipeline.errors import ConfigError

Groups = list[dict[str, Any]]
"""Parameter groups; see build_groups for the entries of each."""

TRIAL_SHAPE = (64, 80)
"""Shape of the matrix of _OptimizerTrial; large enough for libraries that quantize only large states."""
TRIAL_PIECE_SIZE = 3_000
"""Number of elements of a flat piece of that matrix; not a multiple of a row."""
TRIAL_STEPS = 8
"""Number of steps that the trial makes in each way."""
TRIAL_RATE = 1e-2
"""Learning rate of the trial; the run's own rate may be too low to distinguish two updates."""
USE_PLAIN_PYTORCH = (
    "or use plain PyTorch (--deepspeed ds_configs/torch_ddp.json), which does not divide parameters"
)
"""End of messages about optimizers that DeepSpeed cannot step."""


def build_user_optimizer(groups: Groups, config: OptimizerConfig, split: Split) -> Optimizer:
    """Return the user's own optimizer for the groups, imported by `optimizer.kind`.

    It has the groups' `lr_factor`s, and passed a trial; see _OptimizerTrial.

    Args:
        groups: Parameter groups; see build_groups.
        config: Optimizer section of the recipe.
        split: Split of the run, under which the trial has to succeed.

    Raises:
        ConfigError: the optimizer cannot be constructed, is no torch optimizer, cannot be resumed or skip a
            step, or cannot work under this split.
    """
    kind = config.kind
    make = import_object(kind, ConfigError)
    message = f"optimizer.args: {kind} cannot be called with the parameter groups and these arguments"
    check_signature(make, message, ConfigError, [], **config.args)

    def construct(groups: Groups, rate: float) -> Optimizer:
        passed_groups = [
            {
                "params": list(group["params"]),
                "lr": rate * group["lr_factor"],
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ]
        with errors_in_one_line(f"optimizer.kind: {kind}", ConfigError):
            optimizer = make(passed_groups, **config.args)
        _require_same_groups(optimizer, groups, kind)
        return optimizer

    device = groups[0]["params"][0].device
    optimizer = construct(groups, config.learning_rate or TRIAL_RATE)
    if isinstance(optimizer, torch.optim.Adagrad) and split.cuts_matrices:
        raise ConfigError(
            "optimizer.kind: DeepSpeed replaces torch's Adagrad at ZeRO 1 to 3 and loses its groups; "
            f"use another kind, {USE_PLAIN_PYTORCH}"
        )
    trial = _OptimizerTrial(kind, lambda groups: construct(groups, TRIAL_RATE), device)
    optimizer.state_example = trial.run(split)  # type: ignore[attr-defined]
    for made_group, group in zip(optimizer.param_groups, groups, strict=True):
        made_group["lr_factor"] = group["lr_factor"]
    return optimizer


def get_state_example(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of one parameter after the trial of a user's own optimizer.

    It shows which entries the state will have. Empty for the optimizers of torch and DeepSpeed.
    """
    return getattr(optimizer, "state_example", {})


def _require_same_groups(optimizer: Any, groups: Groups, kind: str) -> None:
    """Raise a ConfigError if the user's object is no optimizer of exactly these groups."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.kind: {kind} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer; "
            "name an optimizer class, or a function that returns an optimizer"
        )
    actual = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    expected = [[id(p) for p in group["params"]] for group in groups]
    if actual != expected:
        raise ConfigError(
            f"optimizer.kind: {kind} has {sum(map(len, actual))} parameters in {len(actual)} groups, and was "
            f"given {sum(map(len, expected))} in {len(expected)}; pass the groups on to "
            "torch.optim.Optimizer as they are"
        )


class _OptimizerTrial:
    """Tries a user's own optimizer on a small matrix before the run.

    The trial makes the same steps in different ways (resumed, in pieces) and compares the results.

    Args:
        kind: Import path of the optimizer, for messages.
        make: Constructs the optimizer for parameter groups.
        device: Device of the matrix.
    """

    def __init__(self, kind: str, make: Callable[[Groups], Optimizer], device: torch.device):
        self._kind = kind
        self._make = make
        self._device = device
        generator = torch.Generator().manual_seed(0)
        self._initial_matrix = 0.1 * torch.randn(TRIAL_SHAPE, generator=generator).to(device)
        self._gradients = torch.randn(TRIAL_STEPS, *TRIAL_SHAPE, generator=generator).to(device)

    def run(self, split: Split) -> dict[str, Any]:
        """Return the optimizer's state of a parameter after the trial's steps.

        Raises:
            ConfigError: the optimizer fails, cannot be resumed, cannot skip a step, or cannot work under this
                split.
        """
        replaces_parameters = split.cuts_matrices or split.precision != "fp32"
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            expected, optimizer, (p,) = self._make_steps("on a matrix", 0, TRIAL_STEPS)
            state = dict(optimizer.state[p])
            self._check_state(state)
            self._check_skip(optimizer, p)
            self._check_resume(expected)
            if split.parallel == "deepspeed" and replaces_parameters:
                self._check_pieces(expected, split)
        return state

    def _make_steps(
        self,
        how: str,
        first: int,
        last: int,
        start: Tensor | None = None,
        piece_size: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Optimizer, list[nn.Parameter]]:
        """Construct an optimizer and make the steps from `first` up to `last`.

        Args:
            how: Description of the trial, for an error message.
            first: First step, inclusive.
            last: Last step, exclusive.
            start: Values of the matrix at step `first`; the initial matrix by default.
            piece_size: Number of elements of the flat pieces that replace the matrix after construction, as
                ZeRO replaces it; `None`: the optimizer steps the matrix itself.
            state: Optimizer state of the matrix at step `first`; `None`: a new optimizer's.

        Returns:
            The matrix afterwards, flattened; the optimizer; and the parameters that it stepped.

        Raises:
            ConfigError: a step raised an error.
        """
        start = self._initial_matrix if start is None else start
        stepped = [nn.Parameter(start.clone())]
        optimizer = self._make([{"params": stepped, "weight_decay": 0.1, "lr_factor": 1.0}])
        if piece_size is not None:
            pieces = start.flatten().split(piece_size) if piece_size < start.numel() else [start]
            stepped = [nn.Parameter(piece.clone()) for piece in pieces]
            optimizer.param_groups[0]["params"] = stepped
        if state is not None:
            optimizer.state[stepped[0]] = state
        with errors_in_one_line(f"optimizer.kind: {self._kind}, tried out {how},", ConfigError):
            for step in range(first, last):
                gradients = self._gradients[step].flatten().split([p.numel() for p in stepped])
                for p, gradient in zip(stepped, gradients, strict=True):
                    p.grad = gradient.view_as(p).clone()
                torch.manual_seed(step)
                optimizer.step()
        return torch.cat([p.detach().flatten() for p in stepped]), optimizer, stepped

    def _check_state(self, state: dict[str, Any]) -> None:
        """Require that a checkpoint can contain the state of a parameter."""
        for key, value in state.items():
            if torch.is_tensor(value):
                is_storable = value.is_floating_point() or value.dim() == 0
                description = f"a tensor of {value.dtype}"
            else:
                is_storable = isinstance(value, (bool, int, float))
                description = f"a {type(value).__name__}"
            if not is_storable:
                raise ConfigError(
                    f"optimizer.kind: {self._kind} stores {description} as {key!r}, which a checkpoint "
                    "cannot contain; store only numbers and floating-point tensors in self.state[p]"
                )

    def _check_skip(self, optimizer: Optimizer, p: nn.Parameter) -> None:
        """Require that a step without a gradient changes nothing. Removes the gradient of `p`."""
        before = p.detach().clone()
        p.grad = None
        with errors_in_one_line(f"optimizer.kind: {self._kind}, tried out without a gradient,", ConfigError):
            optimizer.step()
        if not torch.equal(before, p):
            raise ConfigError(
                f"optimizer.kind: {self._kind} changes a parameter that has no gradient; write `if p.grad is "
                "None: continue` in its step: the trainer skips a step by removing the gradients"
            )

    def _check_resume(self, expected: Tensor) -> None:
        """Require that steps resumed from a copy of the state give the matrix `expected`, bit by bit."""
        half = TRIAL_STEPS // 2
        values, optimizer, (p,) = self._make_steps("on a matrix", 0, half)
        saved = {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state[p].items()}
        resumed, *_ = self._make_steps(
            "after a resume", half, TRIAL_STEPS, values.view(TRIAL_SHAPE), state=saved
        )
        if not torch.equal(expected, resumed):
            raise ConfigError(
                f"optimizer.kind: {self._kind} stores state outside of self.state[p], in an attribute or a "
                "group; checkpoints do not contain it, and a resumed run would differ from an uninterrupted "
                "one; store it in self.state[p]"
            )

    def _check_pieces(self, expected: Tensor, split: Split) -> None:
        """Require that the optimizer gives the matrix `expected` if tensors replace its parameters."""
        piece_size = TRIAL_PIECE_SIZE if split.cuts_matrices else expected.numel()
        how = f"as {split} steps it, on tensors that replace the parameters in its groups after construction"
        try:
            stepped, optimizer, pieces = self._make_steps(how, 0, TRIAL_STEPS, piece_size=piece_size)
        except ConfigError as error:
            raise ConfigError(f"{error}; {USE_PLAIN_PYTORCH}") from None
        if torch.allclose(expected, stepped, rtol=1e-4, atol=1e-6):
            keys_of_other_shape = [
                key
                for p in pieces
                for key, value in optimizer.state[p].items()
                if torch.is_tensor(value) and value.dim() and value.shape != p.shape
            ]
            if not keys_of_other_shape or not split.cuts_matrices:
                return
            why = (
                f"stores {keys_of_other_shape[0]!r} in another shape than the parameter's, which checkpoints "
                "cannot contain"
            )
        elif split.cuts_matrices:
            why = "updates flat pieces of a matrix differently from the whole matrix"
        else:
            why = "does not update the tensors that replace the parameters in its groups"
        raise ConfigError(
            f"optimizer.kind: {self._kind} {why}; under {split} an optimizer has to read its parameters from "
            f"self.param_groups in each step, and to work element by element; {USE_PLAIN_PYTORCH}"
        )


ONE_PROCESS = Split(world_size=1, precision="fp32", parallel="single")
"""Split of a run in one process, for callers that do not divide the model."""
PLACEHOLDER_RATE = 0.0
"""Learning rate before the first step, if optimizer.learning_rate is derived from the model."""


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups of a whole model's trained parameters.

    Raises:
        ConfigError: a pattern of optimizer.groups matches no trained parameter.
        ModelError: no parameter requires a gradient.
    """
    named = list(named)
    return build_groups(named, assign_groups(named, config), config)


def assign_groups(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Return the group of each trained parameter of a whole model, by name.

    Raises:
        ConfigError: see config.patterns.assign_parameter_groups.
        ModelError: see config.patterns.assign_parameter_groups.
    """
    # ZeRO-3 empties a parameter between uses; ds_shape is its whole shape.
    num_dimensions = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in named if p.requires_grad}
    return assign_parameter_groups(num_dimensions, config)


def build_groups(
    named: Iterable[tuple[str, nn.Parameter]], keys: Mapping[str, GroupKey], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model or of a part of it, without empty groups.

    Each is a dict of its `params`, its `weight_decay`, its `kind` of optimizer, and the `lr_factor` by which
    the learning rate is multiplied.

    Args:
        named: Parameters by name; those that are not trained are left out.
        keys: Group of each trained parameter of the whole model, by name.
        config: Optimizer section of the recipe.
    """
    members: dict[GroupKey, list[nn.Parameter]] = {key: [] for key in sorted(set(keys.values()))}
    for name, p in named:
        if p.requires_grad:
            members[keys[name]].append(p)
    groups = []
    for (number, is_undecayed), parameters in members.items():
        section = config.groups[number - 1] if config.groups and number else None  # 0: no group matches
        decay = section.weight_decay if section is not None else None
        if decay is None:
            decay = config.weight_decay
        groups.append(
            {
                "params": parameters,
                "weight_decay": 0.0 if is_undecayed else decay,
                "lr_factor": 1.0 if section is None else section.learning_rate_factor,
                "kind": get_optimizer_kind((number, is_undecayed), config),
            }
        )
    return [group for group in groups if group["params"]]


@tag_errors(Phase.OPTIMIZER)
def build_torch_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, split: Split = ONE_PROCESS
) -> Optimizer:
    """Return the optimizer of the groups, with the recipe's settings.

    Args:
        groups: Parameter groups; see build_groups. A group without a `kind` gets the recipe's. If groups have
            several kinds, the result is a CombinedOptimizer.
        config: Optimizer section of the recipe.
        split: Split of the run, under which a user's own optimizer has to work.

    Raises:
        ConfigError: the user's own optimizer cannot be constructed, or cannot work under this split.
    """
    groups_of_kind: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        groups_of_kind.setdefault(group.get("kind", config.kind), []).append(group)
    optimizers = [
        OPTIMIZERS[kind](members, config)
        if kind in OPTIMIZERS
        else build_user_optimizer(members, config, split)
        for kind, members in groups_of_kind.items()
    ]
    if len(optimizers) == 1:
        return optimizers[0]
    # Torch copies the groups' dicts. The first parameter identifies a group.
    made_groups = {id(group["params"][0]): group for each in optimizers for group in each.param_groups}
    return CombinedOptimizer([made_groups[id(group["params"][0])] for group in groups], optimizers)


class CombinedOptimizer(Optimizer):
    """Steps several optimizers as one. It shares their groups and its state with them.

    Args:
        groups: Group dicts of `optimizers` (not copies), in the order of `param_groups`.
        optimizers: Optimizers of disjoint groups. Their state is replaced by this optimizer's.
    """

    def __init__(self, groups: list[dict[str, Any]], optimizers: list[Optimizer]):
        super().__init__(groups, {})
        self._optimizers = optimizers
        for each in optimizers:
            each.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step each optimizer's own groups."""
        for each in self._optimizers:
            each.step()

    def optimizer_of(self, stepped: Tensor) -> Optimizer:
        """Return the optimizer among the combined ones whose groups contain the tensor."""
        groups = ((each, group["params"]) for each in self._optimizers for group in each.param_groups)
        return next(each for each, parameters in groups if any(p is stepped for p in parameters))


def _build_sgd(groups: Groups, config: OptimizerConfig) -> Optimizer:
    sgd = torch.optim.SGD(groups, lr=_get_initial_rate(config), momentum=config.momentum, fused=True)
    if config.momentum:
        sgd.register_step_pre_hook(_create_momentum)
    return sgd


def _get_initial_rate(config: OptimizerConfig) -> float:
    """Return the initial rate. `set_learning_rate` replaces it before each step."""
    return config.learning_rate or PLACEHOLDER_RATE


def _create_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Create momentum of zeros before a parameter's first step.

    torch 2.13 leaves the momentum undefined if the first step is skipped. Zeros do not change the first
    update: without dampening, 0 + gradient is the gradient.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and "momentum_buffer" not in optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


OPTIMIZERS: dict[str, Callable[[Groups, OptimizerConfig], Optimizer]] = {
    "adamw": lambda groups, config: torch.optim.AdamW(
        groups, lr=_get_initial_rate(config), betas=config.betas, eps=config.eps, fused=True
    ),
    "sgd": _build_sgd,
    "adafactor": lambda groups, config: torch.optim.Adafactor(groups, lr=_get_initial_rate(config)),
    "muon": lambda groups, config: torch.optim.Muon(
        groups, lr=_get_initial_rate(config), adjust_lr_fn="match_rms_adamw"
    ),
}
"""Built-in optimizers, by `optimizer.kind`; any other kind is an import path."""
