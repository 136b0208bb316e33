"""How often something is due and how long a warm-up is, in the units that people think in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

_WITH_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*(step|epoch)s?")
_EXPECTED = 'expected steps (500), a share of an epoch (0.25) or a text with its unit ("2 epochs")'


@dataclass(frozen=True)
class Interval:
    """A number of optimizer steps, or of passes over the training data."""

    number: float
    in_epochs: bool

    @staticmethod
    def of(written: Any) -> Interval:
        """Return what a recipe's `every` means.

        Raises:
            ValueError: it is no number, negative, or its unit is not clear.
        """
        if isinstance(written, str) and (match := _WITH_UNIT.fullmatch(written.strip().lower())):
            found = Interval(float(match[1]), match[2] == "epoch")
            if found.in_epochs or found.number.is_integer():
                return found
        elif isinstance(written, float) and written >= 1 and math.isfinite(written):
            raise ValueError(
                f"{written:g} may be steps or epochs; write {max(1, round(written))} or "
                f'"{written:g} epoch{"s" * (written != 1)}"'
            )
        elif isinstance(written, int | float) and not isinstance(written, bool) and written >= 0:
            return Interval(float(written), isinstance(written, float))
        raise ValueError(f"{_EXPECTED}, given {written!r}")

    def in_steps(self, steps_per_epoch: float | None) -> int | None:
        """Return the whole number of steps, at least 1 unless it is never due.

        Args:
            steps_per_epoch: `None` before the data is counted; epochs then have no steps either.
        """
        if not self.in_epochs or not self.number:
            return int(self.number)
        return None if steps_per_epoch is None else max(1, round(self.number * steps_per_epoch))


def _every(written: Any) -> Any:
    """Return it as it was written; 0 for never in any unit."""
    return written if Interval.of(written).number else 0


def _warm_up(written: Any) -> Any:
    is_number = isinstance(written, int | float) and not isinstance(written, bool)
    if not is_number or written < 0 or (isinstance(written, float) and written >= 1):
        steps = "" if not is_number or not 1 <= written < 2**62 else f"; for steps write {round(written)}"
        raise ValueError(
            f"expected steps (a whole number) or a share of the run below 1 (0.03), given {written!r}{steps}"
        )
    return written or 0


_ZERO: dict[str, Any] = {"minimum": 0}
Every = Annotated[int | float | str, PlainValidator(_every), WithJsonSchema({"type": "interval", **_ZERO})]
"""Steps as a whole number, epochs as a float below 1, or a text with its unit. Kept as it was written."""
WarmUp = Annotated[int | float, PlainValidator(_warm_up), WithJsonSchema({"type": "steps or share", **_ZERO})]
"""Steps as a whole number, or a share of the run as a float below 1."""
