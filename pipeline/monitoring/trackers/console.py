"""Console tracker: a short plain line every few seconds.

The numbers are those of the row, rounded. Only the remaining time is computed here.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from pipeline.distributed.signals import detach_closed_terminal
from pipeline.files import format_duration
from pipeline.monitoring.events import Event

SEPARATOR = "  "
"""Spaces between the fields of a line."""
TASK_PREFIX = "tasks/"
"""Prefix of the names of tasks in the columns `eval/tasks/NAME/METRIC`."""
MAX_SHOWN_TASKS = 8
"""Maximum number of tasks in a line."""


@contextmanager
def ignore_closed_terminal() -> Iterator[None]:
    """Ignore the EIO of a terminal that was just closed, and discard all later output to it.

    The signal SIGHUP, which tells the run that the terminal is closed, arrives a moment later.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        detach_closed_terminal()


class ConsoleTracker:
    """Prints the newest row every few seconds, and every evaluation."""

    def __init__(
        self,
        max_steps: int,
        *,
        file: TextIO | None = None,
        min_interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the tracker, which prints nothing before the first row.

        Args:
            max_steps: Optimizer steps of the whole run.
            file: Output file; `None` prints to the current standard output.
            min_interval: Minimum seconds between two lines. The first row, the last one and evaluations are
                always printed.
            clock: Monotonic clock in seconds.
        """
        self._max_steps = max_steps
        self._file = file
        self._min_interval = min_interval
        self._clock = clock
        self._first: tuple[int, float] | None = None  # step and time of this process's first training row
        self._printed_at = -math.inf
        self._unprinted: str | None = None  # newest line that was not printed

    @ignore_closed_terminal()
    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Print a row: its training metrics, its evaluation, or both."""
        evaluation = {key: value for key, value in row.items() if key.startswith("eval/")}
        if len(evaluation) < len(row):
            self._print_throttled(
                step, train_line(step, self._max_steps, row, self._estimate_seconds_left(step, row))
            )
        if evaluation:
            for line in eval_lines(step, self._max_steps, evaluation):
                self._print(line)

    def tell(self, step: int, event: Event) -> None:
        """Do nothing: the log prints events."""

    @ignore_closed_terminal()
    def close(self, exit_code: int) -> None:
        """Print the newest row if it is not printed yet."""
        if self._unprinted is not None:
            self._print(self._unprinted)

    def _estimate_seconds_left(self, step: int, row: Mapping[str, float]) -> float | None:
        """Return the remaining steps times the mean seconds of a step, evaluations and checkpoints included.

        The first row has only its own step time; without one the result is `None`.
        """
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, first_time = self._first
        if step > first_step:
            seconds_per_step = (now - first_time) / (step - first_step)
        elif "perf/step_time_seconds" in row:
            seconds_per_step = row["perf/step_time_seconds"]
        else:
            return None
        return max(self._max_steps - step, 0) * seconds_per_step

    def _print_throttled(self, step: int, line: str) -> None:
        """Print a line unless another one was printed less than `min_interval` seconds ago."""
        now = self._clock()
        self._unprinted = line
        if now - self._printed_at >= self._min_interval or step >= self._max_steps:
            self._printed_at = now
            self._unprinted = None
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


def train_line(step: int, max_steps: int, row: Mapping[str, float], seconds_left: float | None) -> str:
    """Return the line of a training row.

    Args:
        step: Step of the row.
        max_steps: Optimizer steps of the whole run.
        row: Columns of the row.
        seconds_left: Estimated seconds until the end; `None` if unknown.
    """
    parts = [_format_step("step", step, max_steps)]
    skipped = row.get("train/skipped_steps", 0)
    if skipped > 0:
        parts.append(f"skipped {skipped:.0f}")
    for field in TRAIN_FIELDS:
        value = row.get(field.metric)
        if value is not None:
            number = field.format(value).rjust(field.width)
            parts.append(" ".join(filter(None, (field.label, number, field.unit))))
    if seconds_left is not None and math.isfinite(seconds_left):
        parts.append(f"{format_duration(seconds_left):>6} left")
    return SEPARATOR.join(parts)


def eval_lines(step: int, max_steps: int, row: Mapping[str, float]) -> list[str]:
    """Return the lines of an evaluation: in aligned columns all sets together and each set, then the tasks.

    Args:
        step: Step of the evaluation.
        max_steps: Optimizer steps of the whole run.
        row: Columns that begin with `eval/`.
    """
    by_set: dict[str, dict[str, float]] = {"": {}}
    by_task: dict[str, list[str]] = {}
    for key, value in row.items():
        name, _, metric = key.removeprefix("eval/").rpartition("/")
        if name.startswith(TASK_PREFIX):
            task = name.removeprefix(TASK_PREFIX)
            by_task.setdefault(task, [task]).append(f"{metric} {_format_score(value)}")
        else:
            by_set.setdefault(name, {})[metric] = value
    head = _format_step("eval", step, max_steps)
    width = max([len(head), *map(len, by_set)])
    lines = []
    for name, metrics in by_set.items() if len(by_set) > 1 or by_set[""] else ():
        label = name.rjust(width) if name else head.ljust(width)
        fields = []
        for metric, value in metrics.items():
            number = format_norm(value) if metric == "perplexity" else format_loss(value)
            fields.append(f"{metric} {number:>7}")
        lines.append(SEPARATOR.join([label, *fields]))
    if by_task:
        shown = [" ".join(words) for words in list(by_task.values())[:MAX_SHOWN_TASKS]]
        more = len(by_task) - len(shown)
        ending = [f"and {more} more"] if more else []
        lines.append(SEPARATOR.join([_format_step("tasks", step, max_steps), *shown, *ending]))
    return lines


def _format_score(value: float) -> str:
    """Return a score with three decimals, or a large number such as a perplexity with fewer."""
    return f"{value:.3f}" if abs(value) < 10 else format_norm(value)


def format_loss(value: float) -> str:
    """Return a loss with four decimals, or with four significant digits from 10,000 on."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def format_norm(value: float) -> str:
    """Return a norm or a perplexity with two decimals, or in scientific notation if too small or large."""
    return f"{value:.2f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.1e}"


def format_count(value: float) -> str:
    """Return a count or a rate in the form 12.3k or 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


@dataclass(frozen=True)
class TrainField:
    """Metric in the line of a training row."""

    metric: str
    """Column of the row."""
    format: Callable[[float], str]
    """Function that formats the value."""
    width: int
    """Minimum characters of the value."""
    label: str = ""
    """Word before the value."""
    unit: str = ""
    """Unit after the value."""


TRAIN_FIELDS = (
    TrainField("train/loss", format_loss, 7, label="loss"),
    TrainField("train/learning_rate", "{:.2e}".format, 8, label="lr"),
    TrainField("train/grad_norm", format_norm, 5, label="grad"),
    TrainField("perf/tokens_per_second", format_count, 6, unit="tok/s"),
    TrainField("perf/samples_per_second", format_count, 6, unit="samples/s"),
    TrainField("perf/mfu", "{:.1%}".format, 5, label="mfu"),
    TrainField("memory/peak_allocated_gib", "{:.1f}".format, 5, label="mem", unit="GiB"),
    TrainField("train/loss_scale", "{:g}".format, 5, label="scale"),
)
"""Fields of the line of a training row, in order; a metric that the row lacks is left out."""


def _format_step(word: str, step: int, max_steps: int) -> str:
    """Return "step 12/100", with the numbers as wide as at the last step."""
    width = 2 * len(str(max_steps)) + 1
    return f"{word} {f'{step}/{max_steps}':>{width}}"
