"""Evaluation and training that part: what is learned holds for the training data alone."""

from __future__ import annotations

from pipeline.events import Event
from pipeline.watchers import Seen

IN_A_ROW = 3  # evaluations, each worse than the one before and than the best
LEAST_RISE = 0.05  # of the best, and of the first one: digits_cnn.yaml at 350 epochs comes to 0.03


class EvalDivergence:
    """Tells that eval/loss rises while train/loss falls; again after a new best."""

    def __init__(self) -> None:
        self._sum, self._steps = 0.0, 0  # of the training losses since the evaluation before
        self._first = self._before = self._train_at_best = 0.0
        self._best: tuple[int, float] | None = None
        self._rises = 0
        self._is_told = False

    def __call__(self, step: int, seen: Seen) -> Event | None:
        """See Watcher."""
        self._sum += sum(seen.losses)
        self._steps += seen.steps
        loss = seen.row.get("eval/loss")
        if loss is None:
            return None
        train = self._sum / self._steps if self._steps else None
        self._sum, self._steps = 0.0, 0
        if self._best is None or loss < self._best[1]:
            self._first = self._first if self._best is not None else loss
            self._best, self._before, self._rises, self._is_told = (step, loss), loss, 0, False
            self._train_at_best = train if train is not None else float("inf")
            return None
        self._rises = self._rises + 1 if loss > self._before else 0
        self._before = loss
        at, best = self._best
        is_apart = loss - best > LEAST_RISE * max(best, self._first)
        if self._is_told or self._rises < IN_A_ROW or not is_apart or train is None:
            return None
        if train >= self._train_at_best:
            return None
        self._is_told = True
        return Event(
            "eval_divergence",
            f"eval/loss rose in {self._rises} evaluations in a row, to {loss:.4g} from {best:.4g} at step "
            f"{at}, while train/loss fell to {train:.4g}",
            "the model learns its training data by heart: end the run and keep the best checkpoint "
            "(checkpoint.keep_best), train on more data or for fewer epochs, or raise optimizer.weight_decay "
            "or dropout",
            fields={"eval_loss": loss, "best_eval_loss": best, "best_step": at, "train_loss": train},
        )
