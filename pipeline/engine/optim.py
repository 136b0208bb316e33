"""Parameter groups and optimizers of every engine: built-in kinds, and a user's own by import path.

Built-in kinds use torch's fused kernels, if there are any, instead of DeepSpeed's FusedAdam. They are as fast
and need no compilation. They read a flag on the device (`found_inf`), so a non-finite step is skipped without
asking the host. Engines that offload optimizer state choose the optimizer for it themselves.
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

# Trial of a user's own optimizer.
TRIAL_SHAPE = (64, 80)  # large enough for libraries that quantise the state of large parameters only
TRIAL_PIECE = 3_000  # elements of a flat piece; not a multiple of a row
TRIAL_STEPS = 8
TRIAL_RATE = 1e-2  # the run's own rate may be too low to distinguish two updates
USE_PLAIN_PYTORCH = "plain PyTorch (--deepspeed ds_configs/torch_ddp.json) leaves parameters whole"


def build_user_optimizer(groups: Groups, config: OptimizerConfig, split: Split) -> Optimizer:
    """Return the user's own optimizer for the groups, imported by `optimizer.kind`.

    Raises:
        ConfigError: it cannot be constructed, is no torch optimizer, or cannot work under this split.
    """
    kind = config.kind
    make = import_object(kind, ConfigError)
    message = f"optimizer.args: {kind} cannot be called with the parameter groups and these"
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
        _check_groups(optimizer, groups, kind)
        return optimizer

    device = groups[0]["params"][0].device
    optimizer = construct(groups, config.learning_rate or TRIAL_RATE)
    if isinstance(optimizer, torch.optim.Adagrad) and split.cuts_matrices:
        raise ConfigError(
            "optimizer.kind: DeepSpeed replaces torch's Adagrad at ZeRO 1 to 3 and loses its groups; "
            f"{USE_PLAIN_PYTORCH}"
        )
    example = _OptimizerTrial(kind, lambda groups: construct(groups, TRIAL_RATE), device).run(split)
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own["lr_factor"] = group["lr_factor"]
    optimizer.state_example = example  # type: ignore[attr-defined]
    return optimizer


def get_state_example(optimizer: Optimizer) -> dict[str, Any]:
    """Return a user's own optimizer's state of one parameter after its trial.

    Empty for the optimizers of torch and DeepSpeed.
    """
    return getattr(optimizer, "state_example", {})


def _check_groups(optimizer: Any, groups: Groups, kind: str) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer.kind: {kind} returned a {type(optimizer).__name__}, not a torch.optim.Optimizer"
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
    """Tries a user's own optimizer on small matrices before the run.

    It makes the same steps in different ways (resumed, in pieces) and compares the results.
    """

    def __init__(self, kind: str, make: Callable[[Groups], Optimizer], device: torch.device):
        self._kind = kind
        self._make = make
        self._device = device
        numbers = torch.Generator().manual_seed(0)
        self._start = 0.1 * torch.randn(TRIAL_SHAPE, generator=numbers).to(device)
        self._gradients = torch.randn(TRIAL_STEPS, *TRIAL_SHAPE, generator=numbers).to(device)

    def run(self, split: Split) -> dict[str, Any]:
        """Return the optimizer's state of a parameter after the trial's steps.

        Raises:
            ConfigError: the optimizer cannot be resumed, cannot skip a step, or cannot work under this split.
        """
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            whole, optimizer, (p,) = self._make_steps("on a matrix", 0, TRIAL_STEPS)
            state = dict(optimizer.state[p])
            self._check_state(state, p)
            self._check_skip(optimizer, p)
            self._check_resume(whole)
            if split.parallel == "deepspeed" and (split.cuts_matrices or split.precision != "fp32"):
                self._check_pieces(whole, split)
        return state

    def _make_steps(
        self,
        how: str,
        first: int,
        last: int,
        start: Tensor | None = None,
        piece: int | None = None,
        state: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Optimizer, list[nn.Parameter]]:
        """Construct an optimizer and make the steps from `first` up to `last`.

        Args:
            how: Description of the steps for an error message.
            first: First step, inclusive.
            last: Last step, exclusive.
            start: Values of the matrix at step `first`; the trial's start by default.
            piece: Number of elements of the pieces that replace the matrix after construction, as ZeRO does.
            state: Optimizer state of the matrix at step `first`.

        Returns:
            The flat matrix afterwards, the optimizer, and the parameters that it stepped.
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
                "only numbers and floating-point tensors in self.state[p]"
            )

    def _check_skip(self, optimizer: Optimizer, p: nn.Parameter) -> None:
        before = p.detach().clone()
        p.grad = None
        with errors_in_one_line(f"optimizer.kind: {self._kind}, tried out without a gradient,", ConfigError):
            optimizer.step()
        if not torch.equal(before, p):
            raise ConfigError(
                f"optimizer.kind: {self._kind} changes a parameter that has no gradient; write `if p.grad is "
                "None: continue` in its step: the trainer skips a step by removing the gradients"
            )

    def _check_resume(self, whole: Tensor) -> None:
        half = TRIAL_STEPS // 2
        values, optimizer, (p,) = self._make_steps("on a matrix", 0, half)
        saved = {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state[p].items()}
        resumed, *_ = self._make_steps(
            "after a resume", half, TRIAL_STEPS, values.view(TRIAL_SHAPE), state=saved
        )
        if not torch.equal(whole, resumed):
            raise ConfigError(
                f"optimizer.kind: {self._kind} keeps state outside of self.state[p], in an attribute or in a "
                "group; checkpoints do not contain it, and a resumed run would differ from an uninterrupted "
                "one; keep it in self.state[p]"
            )

    def _check_pieces(self, whole: Tensor, split: Split) -> None:
        piece = TRIAL_PIECE if split.cuts_matrices else whole.numel()
        how = f"as {split} steps it, on tensors that replace the parameters in its groups after construction"
        try:
            stepped, optimizer, pieces = self._make_steps(how, 0, TRIAL_STEPS, piece=piece)
        except ConfigError as error:
            raise ConfigError(f"{error}; {USE_PLAIN_PYTORCH}") from None
        if torch.allclose(whole, stepped, rtol=1e-4, atol=1e-6):
            wrong = [
                key
                for p in pieces
                for key, value in optimizer.state[p].items()
                if torch.is_tensor(value) and value.dim() and value.shape != p.shape
            ]
            if not wrong or not split.cuts_matrices:
                return
            why = f"keeps {wrong[0]!r} in another shape than the parameter's, which checkpoints cannot hold"
        elif split.cuts_matrices:
            why = "updates flat pieces of a matrix differently from the whole matrix"
        else:
            why = "does not update the tensors that replace the parameters in its groups"
        raise ConfigError(
            f"optimizer.kind: {self._kind} {why}; under {split} an optimizer has to read its parameters from "
            f"self.param_groups in each step, and to work element by element; {USE_PLAIN_PYTORCH}"
        )


ONE_PROCESS = Split(1, "fp32", "single")
PLACEHOLDER_RATE = 0.0  # before the first step, if optimizer.learning_rate is derived from the model


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups of a whole model's trained parameters.

    Raises:
        ConfigError: a pattern of optimizer.groups matches no trained parameter.
        ModelError: no parameter requires a gradient.
    """
    named = list(named)
    return group_parameters(named, assign_groups(named, config), config)


def assign_groups(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> dict[str, GroupKey]:
    """Return the group of each trained parameter of a whole model, by name; see `assign_parameter_groups`."""
    # ZeRO-3 empties a parameter between uses; ds_shape is its whole shape.
    trained = {name: len(getattr(p, "ds_shape", p.shape)) for name, p in named if p.requires_grad}
    return assign_parameter_groups(trained, config)


def group_parameters(
    named: Iterable[tuple[str, nn.Parameter]], keys: Mapping[str, GroupKey], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model or of a part of it, without the empty ones.

    A group has its `weight_decay`, its `kind` of optimizer and the `lr_factor` of its learning rate.

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


@tag_errors(Phase.OPTIMIZER)
def build_torch_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, split: Split = ONE_PROCESS
) -> Optimizer:
    """Return the optimizer of the groups, with the recipe's settings.

    A group without a `kind` gets the recipe's. Groups of several kinds get a CombinedOptimizer.

    Raises:
        ConfigError: the user's own optimizer cannot be constructed, or cannot work under this split.
    """
    members: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        members.setdefault(group.get("kind", config.kind), []).append(group)
    optimizers = [
        OPTIMIZERS[kind](of_kind, config)
        if kind in OPTIMIZERS
        else build_user_optimizer(of_kind, config, split)
        for kind, of_kind in members.items()
    ]
    if len(optimizers) == 1:
        return optimizers[0]
    made = {id(group["params"][0]): group for each in optimizers for group in each.param_groups}
    return CombinedOptimizer([made[id(group["params"][0])] for group in groups], optimizers)


class CombinedOptimizer(Optimizer):
    """Steps several optimizers as one, with their groups and state in common.

    Args:
        groups: The groups of `optimizers` themselves, in the order that callers see.
        optimizers: Each steps its own groups.
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
        """Return the optimizer whose groups contain the tensor."""
        groups = ((each, group["params"]) for each in self._optimizers for group in each.param_groups)
        return next(each for each, parameters in groups if any(p is stepped for p in parameters))


def _sgd(groups: Groups, config: OptimizerConfig) -> Optimizer:
    sgd = torch.optim.SGD(groups, lr=_rate(config), momentum=config.momentum, fused=True)
    if config.momentum:
        sgd.register_step_pre_hook(_create_momentum)
    return sgd


def _rate(config: OptimizerConfig) -> float:
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
        groups, lr=_rate(config), betas=config.betas, eps=config.eps, fused=True
    ),
    "sgd": _sgd,
    "adafactor": lambda groups, config: torch.optim.Adafactor(groups, lr=_rate(config)),
    "muon": lambda groups, config: torch.optim.Muon(groups, lr=_rate(config), adjust_lr_fn="match_rms_adamw"),
}
"""Built-in optimizers, by `optimizer.kind`; any other kind is an import path."""
