"""An optimizer of the user's own: built by its import path, and tried out on a small matrix before the run.

What an engine does to an optimizer shows on a small matrix within milliseconds: ZeRO hands it flat pieces in
place of the parameters it was made with, a checkpoint keeps `optimizer.state[p]` alone, and a step without
finite gradients takes the gradients away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeline.config.import_paths import import_object, refuse_misfit, told_in_one_line
from pipeline.config.optimizer_schema import OptimizerConfig
from pipeline.config.split import Split
from pipeline.errors import ConfigError

Groups = list[dict[str, Any]]

SHAPE = (64, 80)  # libraries keep few bits of parameters from some thousand elements on
PIECE = 3_000  # elements; no multiple of a row
STEPS = 8
RATE = 1e-2  # a run's own may be too low to tell two updates apart
WHOLE = "plain PyTorch (--deepspeed ds_configs/torch_ddp.json) leaves parameters whole"


def build_own(groups: Groups, config: OptimizerConfig, split: Split) -> Optimizer:
    """Return the optimizer that `optimizer.kind` names, over the groups.

    Raises:
        ConfigError: it cannot be made, is no optimizer, or cannot do what this split asks of it.
    """
    kind = config.kind
    make = import_object(kind, ConfigError)
    message = f"optimizer.args: {kind} cannot be called with the parameter groups and these"
    refuse_misfit(make, message, ConfigError, [], **config.args)

    def made(groups: Groups, rate: float) -> Optimizer:
        given = [
            {
                "params": list(group["params"]),
                "lr": rate * group["lr_factor"],
                "weight_decay": group["weight_decay"],
            }
            for group in groups
        ]
        with told_in_one_line(f"optimizer.kind: {kind}", ConfigError):
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


def state_example(optimizer: Optimizer) -> dict[str, Any]:
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
        with told_in_one_line(f"optimizer.kind: {self._kind}, tried out {how},", ConfigError):
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
        with told_in_one_line(f"optimizer.kind: {self._kind}, tried out without a gradient,", ConfigError):
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
