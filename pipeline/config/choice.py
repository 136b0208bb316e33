"""Everything that was chosen of a run, and what a rule over it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config.loading import Tree, get_dotted
from pipeline.config.schema import RunConfig
from pipeline.config.split import Device, Split


@dataclass(frozen=True)
class Choice:
    """Everything that was chosen, filled in."""

    config: RunConfig
    deepspeed: Tree
    """The dict DeepSpeed gets; empty for plain PyTorch."""
    split: Split
    device: Device
    compile: bool

    def zero(self, dotted: str) -> Any:
        """A key of the zero_optimization section, None where it is not given."""
        return get_dotted(self.deepspeed, f"zero_optimization.{dotted}")

    def offloads(self, what: str) -> bool:
        """Whether `param` or `optimizer` lies elsewhere than on the device."""
        return self.zero(f"offload_{what}.device") in ("cpu", "nvme")

    @property
    def has_several_optimizers(self) -> bool:
        optimizer = self.config.optimizer
        return any(group.kind not in (None, optimizer.kind) for group in optimizer.groups or [])

    @property
    def is_language_model(self) -> bool:
        return self.config.model.language_model is not None

    @property
    def multiplies_in_fp8(self) -> bool:
        return self.model("fp8") not in (None, "none")

    @property
    def quantizes_base(self) -> bool:
        return self.config.adapter is not None and self.config.adapter.quantize is not None

    def model(self, field: str) -> Any:
        """A number of the recipe's model, None where it is not stated."""
        return getattr(self.config.model, field, None)

    def divides(self, degree: int, *fields: str) -> bool:
        """Whether the degree divides every stated one of the model's numbers."""
        return all((self.model(field) or degree) % degree == 0 for field in fields)


@dataclass(frozen=True)
class Rule:
    """One line of the table."""

    what: str
    reason: str
    instead: str
    broken: Callable[[Choice], bool]
