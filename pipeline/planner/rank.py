"""Cuts a model to the part that one rank has: by tensor parallelism (AutoTP) or by pipeline stages.

Also groups its parameters by the optimizer that steps them. ZeRO divides the result further (states.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from math import ceil, inf, prod
from pathlib import Path
from typing import Any

from pipeline.config.loading import get_dotted
from pipeline.config.patterns import assign_parameter_groups, get_optimizer_kind
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.config.split import Split
from pipeline.errors import ConfigError
from pipeline.planner.model import ModelSpec, ParameterSpec

# Names of the norm after a decoder's last block.
FINAL_NORM_NAMES = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f")
_BLOCK_NAME = re.compile(r"^((?:.+\.)?)[^.]+\.(\d+)\.")
# Names of the input embedding and of an output layer that is not tied to it, in different families.
INPUT_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight")
_HEADS = ("lm_head", "embed_out")
EMBEDDING_NAMES = (*INPUT_EMBEDDING_NAMES, *(f"{name}.weight" for name in _HEADS))
_MLP = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def select_stage(model: ModelSpec, stages: int, how: str, stage: int) -> ModelSpec:
    """Return the part of the model in one pipeline stage, with the dimensions of its own blocks.

    Raises:
        ConfigError: The model has no repeated blocks, or fewer than stages.
    """
    layers = _Layers.from_model(model)
    sizes = [sum(p.numel for p in block) for block in layers.blocks]
    if len(sizes) < stages:
        raise ConfigError(
            f"pipeline.stages is {stages}, but the model has {len(sizes)} blocks; "
            "choose no more stages than blocks"
        )
    sizes[0] += sum(p.numel for p in layers.before)
    sizes[-1] += sum(p.numel for p in (*layers.after, *layers.tied))
    bounds = split_uniformly(len(sizes), stages) if how == "uniform" else _balanced(tuple(sizes), stages)
    blocks = layers.blocks[bounds[stage] : bounds[stage + 1]]
    own = [p for block in blocks for p in block]
    if stage == 0:
        own = [*layers.before, *own]
    if stage == stages - 1:
        own = [*(layers.tied if stage else ()), *own, *layers.after]
    dimensions = model.dimensions
    if dimensions is not None:
        dimensions = replace(dimensions, layers=len(blocks), first_layer=bounds[stage])
    return replace(model, parameters=tuple(own), dimensions=dimensions)


@dataclass(frozen=True)
class _Layers:
    before: list[ParameterSpec]
    blocks: list[list[ParameterSpec]]
    after: list[ParameterSpec]
    tied: list[ParameterSpec]
    """The input embedding, if the output layer is the same."""

    @classmethod
    def from_model(cls, model: ModelSpec) -> _Layers:
        found = [(p, _BLOCK_NAME.match(p.name)) for p in model.parameters]
        prefix = next((match[1] for _, match in found if match), None)
        if prefix is None:
            raise ConfigError(f"pipeline.stages: {model.name} has no repeated blocks to divide")
        blocks: dict[int, list[ParameterSpec]] = {}
        before = []
        after = []
        for p, match in found:
            if match:
                blocks.setdefault(int(match[2]), []).append(p)
            elif p.name.startswith(prefix) and p.name.split(".")[-2] not in FINAL_NORM_NAMES and prefix:
                before.append(p)
            else:
                after.append(p)
        after.sort(key=lambda p: not p.name.startswith(prefix))  # the norm, then the head
        words = [p for p in before if p.name.endswith(INPUT_EMBEDDING_NAMES)]
        is_tied = not any(not p.name.startswith(prefix) for p in after)
        return cls(before, [blocks[index] for index in sorted(blocks)], after, words[:1] if is_tied else [])


def split_uniformly(items: int, parts: int) -> list[int]:
    """Return the bounds of parts with equal numbers of items; the first parts take one of the rest each."""
    each, left = divmod(items, parts)
    return [0, *accumulate(each + (part < left) for part in range(parts))]


def split_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return the bounds of parts of a sequence such that the largest and the smallest sum differ least.

    Solves the linear partition problem by dynamic programming, with the result of DeepSpeed's PipelineModule.
    """
    number = len(weights)
    if number <= parts:
        return split_uniformly(number, parts)
    sums = [0, *accumulate(weights)]
    # best[i][j], of the first i items in j parts: (largest - smallest, largest, smallest, last part's start).
    best = [[(inf, inf, inf, 0)] * (parts + 1) for _ in range(number + 1)]
    best[0][0] = (0, 0, inf, 0)
    for i in range(1, number + 1):
        for j in range(1, min(i, parts) + 1):
            for k in range(i):
                _, largest, smallest, _ = best[k][j - 1]
                size = sums[i] - sums[k]
                most = max(largest, size)
                least = min(smallest, size)
                if best[i][j][0] >= most - least:
                    best[i][j] = (most - least, most, least, k)
    bounds = [number]
    for j in range(parts, 0, -1):
        bounds.append(best[bounds[-1]][j][3])
    return bounds[::-1]


_balanced = cache(split_balanced)  # every stage of a model asks for the same bounds


def cut_for_tensor_parallel(model: ModelSpec, json: dict[str, Any], size: int, rank: int) -> ModelSpec:
    """Return the part of the model on one of `size` tensor-parallel ranks, cut by transformers' plan.

    Raises:
        ConfigError: transformers has no plan for the model, or the JSON states a plan of its own.
    """
    for key in ("partition_config", "preset_model"):
        if json["tensor_parallel"].get(key) is not None:
            raise ConfigError(f"tensor_parallel.{key}: the memory of its split is not known before a run")
    rules = list(_read_rules(model))
    if not rules:
        raise ConfigError(
            f"tensor_parallel: transformers has no tensor-parallel plan for {model.name}; say what to cut in "
            "tensor_parallel.partition_config"
        )
    is_tied = model.dimensions is not None and model.dimensions.tied
    own = []
    for p in model.parameters:
        plain = re.sub(r"\.(base_layer|lora_[AB]\.\w+|lora_magnitude_vector\.\w+)\.", ".", p.name)
        place = plain.rpartition(".")[0] + ".weight"
        rule = next((rule for rule in rules if rule.pattern.match(place)), None)
        if rule is None and is_tied and p.name.endswith(INPUT_EMBEDDING_NAMES):
            rule = _CutRule(re.compile(""), 0, name="lm_head")
        own.append(p if rule is None else replace(p, shape=_cut_shape(p, rule, model, size, rank)))
    return replace(model, parameters=tuple(own))


@dataclass(frozen=True)
class _CutRule:
    pattern: re.Pattern[str]
    dim: int
    """Index of the dimension that is cut, in a weight of shape (outputs, inputs)."""
    name: str | None = None


def _cut_shape(p: ParameterSpec, rule: _CutRule, model: ModelSpec, size: int, rank: int) -> tuple[int, ...]:
    dim = rule.dim
    if ".lora_A." in p.name or ".lora_B." in p.name:
        if (".lora_B." in p.name) == (dim == 1):
            return p.shape  # the matrix on the side that is not cut
    elif len(p.shape) == 1 and dim == 1:
        return p.shape
    name = rule.name or re.sub(r"\.(base_layer|lora_.*)?\.?weight$|\.bias$", "", p.name)
    own = _rank_share(p.shape[dim], size, rank, name, model)
    return (*p.shape[:dim], own, *p.shape[dim + 1 :])


def _rank_share(total: int, size: int, rank: int, name: str, model: ModelSpec) -> int:
    """Return a rank's share of a dimension. Heads are not divided, as in DeepSpeed's tp_shard.py."""
    heads = model.dimensions.key_value_heads if model.dimensions is not None else None
    units = total
    if heads and total % heads == 0 and "mlp" not in name and name not in _HEADS:
        units = total if any(word in name for word in _MLP) else heads
    return total // units * (units // size + (rank < units % size))


def _read_rules(model: ModelSpec) -> Iterator[_CutRule]:
    family = model.dimensions.family if model.dimensions is not None else ""
    for pattern, style in read_tensor_plan(family).items():
        if (dim := {"colwise": 0, "rowwise": 1}.get(style.split("_")[0])) is not None:
            place = pattern.replace(".", r"\.").replace("*", ".*")
            name = pattern if pattern in _HEADS else None
            yield _CutRule(re.compile(rf".*{place}\.weight$"), dim, name=name)


@cache
def read_tensor_plan(family: str) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of a family: pattern of a layer's name -> style.

    Read from the source files, since importing them takes seconds. Empty if there is no plan.
    """
    found = find_spec("transformers")
    folder = Path(next(iter(found.submodule_search_locations or ()))) if found is not None else Path()
    plan: dict[str, str] = {}
    for file, name in (("configuration", "base_model_tp_plan"), ("modeling", "_tp_plan")):
        path = folder / "models" / family / f"{file}_{family}.py"
        if family and path.is_file():
            plan |= _read_literal(path.read_text(), name)
    return plan


def _read_literal(source: str, name: str) -> dict[str, str]:
    at = re.search(rf"^ +{name} = \{{", source, re.MULTILINE)
    if at is None:
        return {}
    text = source[at.end() - 1 :]
    try:
        value = ast.literal_eval(text[: text.index("}") + 1])
    except (SyntaxError, ValueError):
        return {}
    return {str(key): str(style) for key, style in value.items()}


# Sizes of NF4 in bitsandbytes.
_BLOCK = 64  # values that share a scale
_BLOCKS = 256  # scales that share a scale of their own
_TABLES = 16 * 4 + 256 * 4  # bytes of the tables of values and of scales


def is_frozen_base(p: ParameterSpec) -> bool:
    """Return whether it is the weight of a frozen linear layer, which an adapter holds in 16 or 4 bits."""
    return p.layer is not None and not p.trains and ".lora_" not in p.name


def count_nf4_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a matrix in NF4 with double quantization.

    These are the codes, a scale for each block, scales of these scales, their mean, and two tables.
    """
    values = prod(shape)
    blocks = ceil(values / _BLOCK)
    return ceil(values / 2) + blocks + ceil(blocks / _BLOCKS) * 4 + 4 + _TABLES


# Name of the placeholder parameter of an empty group (engine/stages.py). It never gets a gradient.
STAND_IN = "stand-in"


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters of a rank that one optimizer steps together."""

    kind: str
    """Kind of the optimizer, such as `adamw`."""
    parameters: tuple[ParameterSpec, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(p.numel for p in self.parameters)


@dataclass(frozen=True)
class RankSlice:
    """Part of a run that one rank computes."""

    own: ModelSpec
    """Part of the model on this rank, before ZeRO divides it."""
    groups: tuple[OptimizerGroup, ...]
    config: RunConfig
    resolved: ResolvedSettings
    whole: int
    """Number of parameters of the whole model."""
    number: int = 0
    """Global rank."""
    on_cpu: bool = False
    """Whether the rank computes on a CPU."""

    @classmethod
    def from_run(
        cls,
        model: ModelSpec,
        config: RunConfig,
        resolved: ResolvedSettings,
        rank: int = 0,
        on_cpu: bool = False,
    ) -> RankSlice:
        """Return a rank's part of a run that trains `model`.

        Raises:
            ConfigError, ModelError: The model cannot be split so, or nothing of it is trained.
        """
        split = resolved.split
        json = resolved.deepspeed or {}
        own = model
        if split.tensor_parallel > 1:
            own = cut_for_tensor_parallel(model, json, split.tensor_parallel, rank % split.tensor_parallel)
        elif split.pipeline_stages > 1:
            stage = rank // (split.world_size // split.pipeline_stages)
            how = json["pipeline"].get("partition", "parameters")
            own = select_stage(model, split.pipeline_stages, how, stage)
        names = {p.name: len(p.shape) for p in model.parameters if p.trains}
        keys = assign_parameter_groups(names, config.optimizer)
        groups = []
        for key in sorted(set(keys.values())):
            members = tuple(p for p in own.parameters if keys.get(p.name) == key)
            if not members and split.pipeline_stages > 1:
                # DeepSpeed drops an empty group, and stages would then differ in their number of groups.
                members = (ParameterSpec(STAND_IN, (1,)),)
                own = replace(own, parameters=(*own.parameters, *members))
            if members:
                groups.append(OptimizerGroup(get_optimizer_kind(key, config.optimizer), members))
        return cls(
            own=own,
            groups=tuple(groups),
            config=config,
            resolved=resolved,
            whole=model.numel,
            number=rank,
            on_cpu=on_cpu,
        )

    @property
    def split(self) -> Split:
        """Split of the job over its ranks."""
        return self.resolved.split

    @property
    def json(self) -> dict[str, Any]:
        """DeepSpeed JSON with every `auto` filled in; empty for plain PyTorch."""
        return self.resolved.deepspeed or {}

    def zero(self, dotted: str, default: Any = None) -> Any:
        """Return the value of a key in the section zero_optimization, or the default."""
        found = get_dotted(self.json, f"zero_optimization.{dotted}")
        return default if found is None else found

    @property
    def stage(self) -> int:
        """ZeRO stage that the engine asks DeepSpeed for. It is 1 at least for pipeline stages in bf16."""
        staged_in_bf16 = self.split.pipeline_stages > 1 and self.split.precision == "bf16"
        return max(self.split.zero_stage, int(staged_in_bf16))

    @property
    def size(self) -> int:
        """Bytes of an element of the weights that the engine computes with."""
        return 2 if self.resolved.deepspeed is not None and self.split.precision != "fp32" else 4

    @property
    def summed(self) -> int:
        """Bytes of an element of the gradients that are added up over micro-batches."""
        stated = get_dotted(self.json, "data_types.grad_accum_dtype")
        if stated is None and self.split.pipeline_stages > 1 and self.split.precision == "bf16":
            return 4
        return {None: self.size, "fp32": 4}.get(stated, 2)

    @property
    def sharers(self) -> int:
        """Number of ranks among which ZeRO divides the states."""
        return self.split.dp_world_size * self.split.sequence_parallel

    @property
    def place(self) -> int:
        """Index of this rank among the ranks of `sharers`."""
        if self.split.pipeline_stages > 1:
            return self.number % self.split.dp_world_size
        return self.number // self.split.tensor_parallel

    @property
    def adds_in_fp32(self) -> bool:
        """Return whether DeepSpeed's bf16 optimizer steps it, with a flat fp32 copy of all gradients."""
        if self.split.precision != "bf16" or self.stage != 1 or self.offloads("optimizer"):
            return False
        return self.split.pipeline_stages > 1 or self.summed == 4

    def offloads(self, what: str) -> str | None:
        """Return where `param` or `optimizer` is offloaded to, `cpu` or `nvme`; `None` if nowhere."""
        device = self.zero(f"offload_{what}.device")
        return None if device == "none" else device

    def bytes_of(self, p: ParameterSpec) -> int:
        """Return the bytes of a whole parameter in the precision in which the rank holds it."""
        adapter = self.config.adapter
        if adapter is not None and is_frozen_base(p):
            if adapter.quantize is not None:
                return count_nf4_bytes(p.shape)
            if self.split.precision == "bf16":
                return 2 * p.numel
        return self.size * p.numel
