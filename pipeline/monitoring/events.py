"""Events of a run, and the other objects that trackers can show."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from pipeline.redaction import redact, redact_text

if TYPE_CHECKING:  # commands that import no numpy use events
    import numpy as np
    import numpy.typing as npt

    from pipeline.checkpoint.catalog import SavedCheckpoints

RUN_FAILED = "run_failed"
"""A failure ended the run."""
TIME = "time"
"""Wall time of a process by phase: the last line of a process that ended normally."""
PLAN = "plan"
"""Measured memory and throughput of a run, compared with those that the plan expected."""
RUN_KILLED = "run_killed"
"""The previous process of a run ended without a recorded reason. The resumed run reports it."""
ROLLBACK = "rollback"
"""The run rolled back to the event's step: rows of later steps are dropped from the record."""
CORRUPTION = "corruption"
"""Ranks differ where they should be equal. The event stays in the record when later rows are removed."""
NO_TARGETS = "no_targets"
"""A global batch or an evaluation has no target that counts in the loss."""
SAMPLE = "sample"
"""Text that the model generated after an evaluation, in the fields `prompt` and `text`."""
STOPPED_EARLY = "stopped_early"
"""A callback ended the run before its last step."""
RESERVED_EVENT_NAMES = frozenset(
    (RUN_FAILED, TIME, PLAN, RUN_KILLED, ROLLBACK, CORRUPTION, SAMPLE, STOPPED_EARLY)
)
"""Names that readers of metrics.jsonl act on; callbacks may not use them."""
Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: a line of the log and of metrics.jsonl, an alert in other trackers.

    Secrets are removed from the message, the advice and the fields when the event is created.
    """

    name: str
    """Short name in snake_case, such as `loss_spike`."""
    message: str
    """Description of the event, with its numbers."""
    advice: str = ""
    """Suggested action; may be empty."""
    level: Level = "warning"
    """`info` is news and not an alert; an `error` usually ends the run."""
    fields: Mapping[str, str | float] = field(default_factory=dict)
    """Additional columns of the event's line in metrics.jsonl."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redact_text(self.message))
        object.__setattr__(self, "advice", redact_text(self.advice))
        object.__setattr__(self, "fields", redact(dict(self.fields)))

    @property
    def line(self) -> str:
        """Message and advice on one line."""
        return f"{self.message}; {self.advice}" if self.advice else self.message

    def log_line(self, step: int) -> str:
        """Return the line of the log.

        A warning or an error begins with its name, and with its step unless the message names the step. An
        event of level `info` is its message and advice alone.

        Args:
            step: Step of the row. The field `at_step` overrides it if the alert is about an earlier step.
        """
        if self.level == "info":
            return self.line
        event_step = int(self.fields.get("at_step", step))
        names_step = re.search(rf"\bstep {event_step}\b", self.message) is not None
        return f"{self.name}: {self.line}" if names_step else f"{self.name}: step {event_step}: {self.line}"

    @property
    def columns(self) -> dict[str, str | float]:
        """Columns of the event's line in metrics.jsonl, without `step`."""
        columns: dict[str, str | float] = {"event": self.name, "level": self.level, "message": self.message}
        if self.advice:
            columns["advice"] = self.advice
        return columns | dict(self.fields)


@dataclass(frozen=True)
class Histograms:
    """Histograms of each trained parameter and its gradient after a step."""

    step: int
    edges: npt.NDArray[np.float64]
    """Edges of the bins in ascending order, shape (bins + 1,)."""
    weights: Mapping[str, npt.NDArray[np.int64]]
    """Parameter name -> counts of its values, shape (bins,)."""
    gradients: Mapping[str, npt.NDArray[np.int64]]
    """Parameter name -> counts of its gradient after clipping, shape (bins,); no names if the step was
    skipped."""


@dataclass(frozen=True)
class TaskTable:
    """Documents of the evaluation tasks, with the model's answers after a step; see TaskSample."""

    step: int
    rows: Sequence[tuple[str, int, str, str, str, float]]
    """Task, index of the document, prompt, expected answer, answer, and score of the answer."""


TASKS_FOLDER = "tasks"
"""Folder of a run directory with the results of evaluation tasks, a JSON file for each evaluation."""
Showable: TypeAlias = "SavedCheckpoints | Histograms | TaskTable"
"""Objects passed to `show` of a tracker: neither rows nor events, and not in metrics.jsonl."""
