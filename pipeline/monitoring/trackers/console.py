"""The run on a screen: one live line in a terminal, short plain lines in a log file.

What is shown is the row that metrics.jsonl has, rounded; nothing is worked out here but the time left.
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from pipeline.distributed.signals import detach_closed_terminal
from pipeline.files import format_duration
from pipeline.monitoring.events import Event

_BAR_MIN, _BAR_MAX = 8, 24
_GAP = "  "


class Field(NamedTuple):
    """One number as it is shown: a word before or a unit after it."""

    before: str
    value: str
    after: str = ""
    rank: int = 0
    """Where the line is too long, the highest rank goes first."""
    style: str = ""
    width: int = 0
    """Least width of the value in a plain line, so that lines stand under each other."""

    def plain(self) -> str:
        return " ".join(part for part in (self.before, self.value.rjust(self.width), self.after) if part)

    def text(self, is_padded: bool = False) -> Text:
        value = self.value.rjust(self.width) if is_padded else self.value
        parts = [(self.before, "dim"), (value, self.style), (self.after, "dim")]
        return Text(" ").join(Text(word, style) for word, style in parts if word)


@contextmanager
def printing() -> Iterator[None]:
    """Inside it, printing on a terminal that was just closed is no error: its SIGHUP comes a moment later."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        detach_closed_terminal()


class ConsoleTracker:
    """Shows the newest row; every evaluation stays on the screen."""

    def __init__(
        self,
        console: Console,
        *,
        max_steps: int,
        min_interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look whether there is a terminal; nothing is printed before the first row.

        Args:
            console: Where to print.
            max_steps: Optimizer steps of the whole run.
            min_interval: Least seconds between two plain lines (first, last and evaluation rows aside).
            clock: Monotonic seconds.
        """
        self._console = console
        self._max_steps = max_steps
        self._min_interval = min_interval
        self._clock = clock
        self._is_terminal = console.file.isatty() and console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._first: tuple[int, float] | None = None  # step and time of the first training row
        self._printed_at = -math.inf
        self._unprinted: list[Field] | None = None

    @printing()
    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Show one row: as an evaluation, as training, or as both."""
        evaluation = {key: value for key, value in row.items() if key.startswith("eval/")}
        if len(evaluation) < len(row):
            fields = train_fields(step, self._max_steps, row, self._seconds_left(step, row))
            if self._is_terminal:
                self._show_live(step, fields)
            else:
                self._print_throttled(step, fields)
        if evaluation:
            self._print_evaluation(step, evaluation)

    def tell(self, step: int, event: Event) -> None:
        """Nothing: the log has it, which is on the screen."""

    @printing()
    def close(self, exit_code: int) -> None:
        """Leave the newest row on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._unprinted is not None:
            self._print_plain(self._unprinted)

    def _seconds_left(self, step: int, row: Mapping[str, float]) -> float | None:
        """Steps to go times the mean step so far, which counts evaluations and checkpoints too."""
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

    def _show_live(self, step: int, fields: list[Field]) -> None:
        if self._live is None:
            # No refresh thread: the line changes when there is a row, and at no other time.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._console.show_cursor(True)  # Live hides it, and a killed run would never give it back
        width = self._console.width - 1  # a full last column makes some terminals wrap
        line = live_line(fields, step / self._max_steps, width, with_bar=self._console.encoding == "utf-8")
        self._live.update(line, refresh=True)

    def _print_throttled(self, step: int, fields: list[Field]) -> None:
        now = self._clock()
        if now - self._printed_at >= self._min_interval or step >= self._max_steps:
            self._printed_at = now
            self._unprinted = None
            self._print_plain(fields)
        else:
            self._unprinted = fields

    def _print_evaluation(self, step: int, row: Mapping[str, float]) -> None:
        table = eval_table(step, self._max_steps, row)
        for fields in table:
            if self._is_terminal:
                line = Text(_GAP).join(field.text(is_padded=len(table) > 1) for field in fields)
                self._console.print(line, soft_wrap=True, highlight=False)
            else:
                self._print_plain(fields)

    def _print_plain(self, fields: Iterable[Field]) -> None:
        self._console.out(_GAP.join(field.plain() for field in fields), highlight=False)
        self._console.file.flush()


def train_fields(
    step: int, max_steps: int, row: Mapping[str, float], seconds_left: float | None
) -> list[Field]:
    """The fields of a training row, in the order they are shown."""
    fields = [Field("step", _of(step, max_steps), width=2 * len(str(max_steps)) + 1, style="bold")]
    for key, before, show, after, rank, width in TRAIN_FIELDS:
        if (value := row.get(key)) is not None:
            style = "bold red" if not math.isfinite(value) else "bold cyan" if key == "train/loss" else ""
            fields.append(
                Field(before=before, value=show(value), after=after, rank=rank, style=style, width=width)
            )
    skipped = row.get("train/skipped_steps", 0)
    if skipped > 0:
        fields.append(Field("skipped", f"{skipped:.0f}", rank=1, style="bold yellow"))
    if seconds_left is not None and math.isfinite(seconds_left):
        fields.append(Field("", format_duration(seconds_left), "left", rank=1, width=6))
    return fields


def eval_table(step: int, max_steps: int, row: Mapping[str, float]) -> list[list[Field]]:
    """The lines of an evaluation, every metric under its own name: of all sets together, then of each, their
    numbers under each other."""
    by_set: dict[str, dict[str, float]] = {}
    for key, value in row.items():
        of_set, _, metric = key.removeprefix("eval/").rpartition("/")
        by_set.setdefault(of_set, {})[metric] = value
    head = Field("eval", _of(step, max_steps), width=2 * len(str(max_steps)) + 1, style="bold green")
    names = [of_set for of_set in by_set if of_set]
    width = max([len(head.plain()), *map(len, names)])
    table = []
    for of_set, numbers in by_set.items():
        first = head._replace(after=" " * (width - len(head.plain()) - 1)) if names else head
        fields = [Field(of_set.rjust(width), "") if of_set else first]
        for metric, number in numbers.items():
            show = two_digits if metric == "perplexity" else decimals
            fields.append(Field(metric, show(number), style="bold", width=7))
        table.append(fields)
    return table


def live_line(fields: list[Field], share_done: float, width: int, *, with_bar: bool) -> Text:
    """One line of at most `width` columns: what matters least goes first, a bar fills the room left."""
    kept = list(fields)
    while len(kept) > 1 and _width(kept) > width:
        kept.remove(max(reversed(kept), key=lambda field: field.rank))
    line = Text(_GAP, no_wrap=True, overflow="crop").join(field.text() for field in kept)
    room = width - len(_GAP) - line.cell_len
    if with_bar and room >= _BAR_MIN:
        cells = min(room, _BAR_MAX)
        done = min(int(cells * share_done), cells)
        line = Text.assemble(("━" * done, "cyan"), ("─" * (cells - done), "dim"), _GAP, line)
    line.truncate(width)
    return line


def decimals(value: float) -> str:
    """A loss: four decimals, or four digits where it is huge."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def two_digits(value: float) -> str:
    """A norm or a perplexity: two decimals, or a power of ten where those would say nothing."""
    return f"{value:.2f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.1e}"


def count(value: float) -> str:
    """A rate: 12.3k, 1.2M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


TRAIN_FIELDS: tuple[tuple[str, str, Callable[[float], str], str, int, int], ...] = (
    ("train/loss", "loss", decimals, "", 0, 7),
    ("train/learning_rate", "lr", "{:.2e}".format, "", 3, 8),
    ("train/grad_norm", "grad", two_digits, "", 4, 5),
    ("perf/tokens_per_second", "", count, "tok/s", 2, 6),
    ("perf/samples_per_second", "", count, "samples/s", 2, 6),
    ("perf/mfu", "mfu", "{:.1%}".format, "", 5, 5),
    ("memory/peak_allocated_gib", "mem", "{:.1f}".format, "GiB", 6, 5),
    ("train/loss_scale", "scale", "{:g}".format, "", 7, 5),
)
"""Metric, and as a Field: word before, how its value is shown, unit after, rank, least width."""


def _of(step: int, max_steps: int) -> str:
    return f"{step}/{max_steps}"


def _width(fields: list[Field]) -> int:
    return sum(field.text().cell_len for field in fields) + len(_GAP) * (len(fields) - 1)
