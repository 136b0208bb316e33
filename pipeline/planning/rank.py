"""One rank's part of a run: the parameters that it has, how they are stepped, and what of the configuration
formulas ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.loading import get_dotted
from pipeline.config.parameter_groups import group_keys, kind_of
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.config.split import Split
from pipeline.planning.adapting import bytes_in_4_bits, is_held_apart
from pipeline.planning.cutting import own_part
from pipeline.planning.model import Model, Parameter

STAND_IN = "stand-in"  # see engine/stages.py; it never gets a gradient


@dataclass(frozen=True)
class Group:
    """Parameters of a rank that are stepped together."""

    kind: str
    """Of optimizer."""
    parameters: tuple[Parameter, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True)
class Rank:
    """One rank's part of a run: what formulas look at."""

    own: Model
    """Its part of the model before ZeRO divides it."""
    groups: tuple[Group, ...]
    config: RunConfig
    resolved: Resolved
    whole: int
    """Parameters of the whole model."""
    number: int = 0
    on_cpu: bool = False
    """Computes on a CPU, where what lies in host memory is at hand as it is."""

    @classmethod
    def of(
        cls, model: Model, config: RunConfig, resolved: Resolved, rank: int = 0, on_cpu: bool = False
    ) -> Rank:
        """Of a whole model.

        Raises:
            ConfigError, ModelError: it cannot be cut so, or nothing of it is trained.
        """
        own = own_part(model, resolved.split, resolved.deepspeed or {}, rank)
        return cls._of(own, model, config, resolved, rank, on_cpu)

    @classmethod
    def of_part(cls, own: Model, config: RunConfig, resolved: Resolved, rank: int, on_cpu: bool) -> Rank:
        """Of what a rank has, cut already. Groups of the recipe are left out where it is a stage, which may
        have nothing of them: they change what is padded alone.
        """
        if resolved.split.pipeline_stages > 1:
            bare = config.optimizer.model_copy(update={"groups": None})
            config = config.model_copy(update={"optimizer": bare})
        return cls._of(own, own, config, resolved, rank, on_cpu)

    @classmethod
    def _of(
        cls, own: Model, model: Model, config: RunConfig, resolved: Resolved, rank: int, on_cpu: bool
    ) -> Rank:
        split, names = resolved.split, {p.name: len(p.shape) for p in model.parameters if p.trains}
        keys = group_keys(names, config.optimizer)
        groups = []
        for key in sorted(set(keys.values())):
            members = tuple(p for p in own.parameters if p.trains and keys[p.name] == key)
            if not members and split.pipeline_stages > 1:
                members = (Parameter(STAND_IN, (1,)),)  # DeepSpeed drops an empty group
                own = replace(own, parameters=(*own.parameters, *members))
            if members:
                groups.append(Group(kind_of(key, config.optimizer), members))
        return cls(own, tuple(groups), config, resolved, model.numel, rank, on_cpu)

    @property
    def split(self) -> Split:
        """How the job is split."""
        return self.resolved.split

    @property
    def json(self) -> dict[str, Any]:
        """The DeepSpeed JSON, filled in; empty for plain PyTorch."""
        return self.resolved.deepspeed or {}

    def zero(self, dotted: str, default: Any = None) -> Any:
        """A key of the section zero_optimization."""
        found = get_dotted(self.json, f"zero_optimization.{dotted}")
        return default if found is None else found

    @property
    def stage(self) -> int:
        """Of ZeRO, as the engine asks DeepSpeed for it."""
        staged_in_bf16 = self.split.pipeline_stages > 1 and self.split.precision == "bf16"
        return max(self.split.zero_stage, int(staged_in_bf16))

    @property
    def size(self) -> int:
        """Bytes of a weight that the engine computes with."""
        return 2 if self.resolved.deepspeed is not None and self.split.precision != "fp32" else 4

    @property
    def summed(self) -> int:
        """Bytes of a gradient that is added up over micro-batches."""
        stated = get_dotted(self.json, "data_types.grad_accum_dtype")
        if stated is None and self.split.pipeline_stages > 1 and self.split.precision == "bf16":
            return 4
        return {None: self.size, "fp32": 4}.get(stated, 2)

    @property
    def sharers(self) -> int:
        """Ranks over which ZeRO divides."""
        return self.split.dp_world_size * self.split.sequence_parallel

    @property
    def place(self) -> int:
        """Of this one among them."""
        if self.split.pipeline_stages > 1:
            return self.number % self.split.dp_world_size
        return self.number // self.split.tensor_parallel

    @property
    def adds_in_fp32(self) -> bool:
        """Whether DeepSpeed's bf16 optimizer steps it: all gradients once more, flat, in fp32."""
        if self.split.precision != "bf16" or self.stage != 1 or self.offloads("optimizer"):
            return False
        return self.split.pipeline_stages > 1 or self.summed == 4

    def offloads(self, what: str) -> str | None:
        """Where `param` or `optimizer` lies: `cpu`, `nvme`; None: on the device."""
        device = self.zero(f"offload_{what}.device")
        return None if device == "none" else device

    def bytes_of(self, p: Parameter) -> int:
        """Of a whole parameter as it is computed with."""
        adapter = self.config.adapter
        if adapter is not None and is_held_apart(p):
            if adapter.quantize is not None:
                return bytes_in_4_bits(p.shape)
            if self.split.precision == "bf16":
                return 2 * p.numel
        return self.size * p.numel
