"""Evaluations that are not finite, and those that part from training: it learns the training data alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.events import Event
from pipeline.watchers import Seen

IN_A_ROW = 3  # evaluations, each worse than the one before and than the best
LEAST_RISE = 0.05  # of the best, and of the first one: digits_cnn.yaml at 350 epochs comes to 0.03


@dataclass
class _History:
    """Of the evaluations so far, and of the training losses since the last one."""

    loss_sum: float = 0.0
    steps: int = 0
    first: float = 0.0
    before: float = 0.0
    best: float | None = None
    best_step: int = 0
    train_at_best: float | None = None
    rises: int = 0
    is_told: bool = False


class NonFiniteEval:
    """Reports metrics of evaluations that are infinite or NaN, once until they are finite again.

    NoTargets reports sets without a target.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        if "eval/loss" not in seen.row:
            return None
        before = self._told
        self._told = {
            name
            for name, value in seen.row.items()
            if not math.isfinite(value) and seen.row.get(f"{name.rpartition('/')[0]}/targets") != 0
        }
        if not self._told - before:
            return None
        return Event(
            "non_finite_eval",
            f"the evaluation after step {step} gave {', '.join(sorted(self._told))}: infinite or NaN",
            "look at the held-out data; where the model has batch normalisation, one NaN batch spoils its "
            "running statistics for good, and watch.on_nonfinite: skip keeps them from it",
        )


class EvalDivergence:
    """Tells that eval/loss rises while train/loss falls; again after a new best. A run that goes on has its
    evaluations: they may be hours apart.
    """

    name = "eval_divergence"

    def __init__(self) -> None:
        self._history = _History()

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        so_far = self._history
        losses = list(filter(math.isfinite, seen.losses))
        so_far.loss_sum += sum(losses)
        so_far.steps += len(losses)
        loss = seen.row.get("eval/loss")
        if loss is None or not math.isfinite(loss):
            return None
        train = so_far.loss_sum / so_far.steps if so_far.steps else None
        so_far.loss_sum, so_far.steps = 0.0, 0
        if so_far.best is None or loss < so_far.best:
            first = so_far.first if so_far.best is not None else loss
            self._history = _History(first=first, before=loss, best=loss, best_step=step, train_at_best=train)
            return None
        so_far.rises = so_far.rises + 1 if loss > so_far.before else 0
        so_far.before = loss
        is_apart = loss - so_far.best > LEAST_RISE * max(so_far.best, so_far.first)
        if so_far.is_told or so_far.rises < IN_A_ROW or not is_apart or train is None:
            return None
        if so_far.train_at_best is not None and train >= so_far.train_at_best:
            return None
        so_far.is_told = True
        return self._event(loss, train, so_far.best)

    def _event(self, loss: float, train: float, best: float) -> Event:
        at = self._history.best_step
        return Event(
            self.name,
            f"eval/loss rose in {self._history.rises} evaluations in a row, to {loss:.4g} from {best:.4g} at "
            f"step {at}, while train/loss fell to {train:.4g}",
            "the model learns its training data by heart: end the run and keep the best checkpoint "
            "(checkpoint.keep_best), train on more data or for fewer epochs, or raise optimizer.weight_decay "
            "or dropout",
            fields={"eval_loss": loss, "best_eval_loss": best, "best_step": at, "train_loss": train},
        )

    def state_dict(self) -> dict[str, Any]:
        """See Remembers."""
        return asdict(self._history)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Remembers."""
        self._history = _History(**state)
