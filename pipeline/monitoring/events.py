"""Events of a run, and what trackers get besides rows and events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from pipeline.redaction import redact, redact_text

if TYPE_CHECKING:  # commands that import no numpy use events
    import numpy as np
    import numpy.typing as npt

    from pipeline.checkpoint.catalog import SavedCheckpoints

RUN_FAILED = "run_failed"
TIME = "time"
"""Where the time of a process went: its last line if it ended as it should."""
PLAN = "plan"
"""Memory and throughput of a run, and what the plan expected."""
RUN_KILLED = "run_killed"
ROLLBACK = "rollback"
"""A run went back to the event's step: rows of later steps are given up."""
CORRUPTION = "corruption"
"""Ranks differ where they should be equal: stays in a record whose later rows are taken back."""
NO_TARGETS = "no_targets"
"""Nothing counts in the loss of a global batch or of an evaluation."""
SAMPLE = "sample"
"""Text of the model after an evaluation: the fields `prompt` and `text`."""
STOPPED_EARLY = "stopped_early"
"""A callback ended the run before its last step."""
RESERVED_EVENT_NAMES = frozenset(
    (RUN_FAILED, TIME, PLAN, RUN_KILLED, ROLLBACK, CORRUPTION, SAMPLE, STOPPED_EARLY)
)
"""Names that readers of a record act on."""
Level = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Event:
    """Something that happened at a step: a line of the log and of metrics.jsonl, an alert elsewhere.

    Its texts have no secrets, whoever makes it and wherever it goes.
    """

    name: str
    """Few words in snake_case, as `loss_spike`."""
    message: str
    """What happened, with its numbers."""
    advice: str = ""
    """What to try; may be empty."""
    level: Level = "warning"
    fields: Mapping[str, str | float] = field(default_factory=dict)
    """Further columns of its line in metrics.jsonl."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", redact_text(self.message))
        object.__setattr__(self, "advice", redact_text(self.advice))
        object.__setattr__(self, "fields", redact(dict(self.fields)))

    @property
    def line(self) -> str:
        """Message and advice."""
        return f"{self.message}; {self.advice}" if self.advice else self.message

    def log_line(self, step: int) -> str:
        """Return the line of the log: an alert begins with its name and its step, news is its own words.

        Args:
            step: Step of the row; the field `at_step` has the step of the alert if it is another one.
        """
        if self.level == "info":
            return self.line
        at = int(self.fields.get("at_step", step))
        names_step = re.search(rf"\bstep {at}\b", self.message) is not None
        return f"{self.name}: {self.line}" if names_step else f"{self.name}: step {at}: {self.line}"

    @property
    def columns(self) -> dict[str, str | float]:
        """Columns of its line in metrics.jsonl, without the step."""
        said: dict[str, str | float] = {"event": self.name, "level": self.level, "message": self.message}
        return said | ({"advice": self.advice} if self.advice else {}) | dict(self.fields)


@dataclass(frozen=True)
class Histograms:
    """Number of values between two edges, of each trained parameter after a step."""

    step: int
    edges: npt.NDArray[np.float64]
    """(bins + 1,), rising."""
    weights: Mapping[str, npt.NDArray[np.int64]]
    """Name -> (bins,)."""
    gradients: Mapping[str, npt.NDArray[np.int64]]
    """Name -> (bins,), as the weights moved by them; empty if the step was not taken."""


Showable: TypeAlias = "SavedCheckpoints | Histograms"
"""Neither rows nor events: metrics.jsonl has none of it."""
