"""The participants, where Unsloth comes first: it changes transformers and peft when it is imported."""

from __future__ import annotations

import unsloth  # noqa: F401  # isort: skip
from participants import take_part

__all__ = ["take_part"]
