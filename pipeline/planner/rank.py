"""Selects the part of a model that one rank has under tensor parallelism (AutoTP) or pipeline stages.

Also groups the part's parameters by the optimizer that steps them. ZeRO divides the result further, see
states.py.
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
_OUTPUT_LAYER_NAMES = ("lm_head", "embed_out")
EMBEDDING_NAMES = (*INPUT_EMBEDDING_NAMES, *(f"{name}.weight" for name in _OUTPUT_LAYER_NAMES))
_MLP_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def select_stage(model: ModelSpec, stages: int, how: str, stage: int) -> ModelSpec:
    """Return the part of the model in one pipeline stage, with the dimensions of its own blocks.

    Args:
        model: Whole model.
        stages: Number of stages.
        how: Key `pipeline.partition` of the JSON: `uniform` balances the number of blocks, any other value
            the number of parameters.
        stage: Index of the stage, from 0.

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
    if how == "uniform":
        bounds = split_uniformly(len(sizes), stages)
    else:
        bounds = _split_balanced_once(tuple(sizes), stages)
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
    """Parameters of a model in the order of its layers."""

    before: list[ParameterSpec]
    """Parameters before the first block."""
    blocks: list[list[ParameterSpec]]
    """Parameters of each block."""
    after: list[ParameterSpec]
    """Parameters after the last block: the final norm, then the output layer unless it is tied."""
    tied: list[ParameterSpec]
    """The input embedding if the output layer is tied to it, else empty."""

    @classmethod
    def from_model(cls, model: ModelSpec) -> _Layers:
        """Sort the parameters of a model into its layers.

        Raises:
            ConfigError: The model has no repeated blocks.
        """
        matches = [(p, _BLOCK_NAME.match(p.name)) for p in model.parameters]
        prefix = next((match[1] for _, match in matches if match), None)
        if prefix is None:
            raise ConfigError(f"pipeline.stages: {model.name} has no repeated blocks to divide")
        blocks: dict[int, list[ParameterSpec]] = {}
        before = []
        after = []
        for p, match in matches:
            if match:
                blocks.setdefault(int(match[2]), []).append(p)
            elif p.name.startswith(prefix) and p.name.split(".")[-2] not in FINAL_NORM_NAMES and prefix:
                before.append(p)
            else:
                after.append(p)
        after.sort(key=lambda p: not p.name.startswith(prefix))  # the norm, then the head
        has_output_layer = any(not p.name.startswith(prefix) for p in after)
        embeddings = [p for p in before if p.name.endswith(INPUT_EMBEDDING_NAMES)]
        return cls(
            before=before,
            blocks=[blocks[index] for index in sorted(blocks)],
            after=after,
            tied=[] if has_output_layer else embeddings[:1],
        )


def split_uniformly(items: int, parts: int) -> list[int]:
    """Return the bounds of parts whose numbers of items differ by at most one; the first parts are larger."""
    size, remainder = divmod(items, parts)
    return [0, *accumulate(size + (part < remainder) for part in range(parts))]


def split_balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Return the bounds of parts of a sequence such that the largest and the smallest sum differ least.

    Solves the linear partition problem by dynamic programming. The bounds equal those of DeepSpeed's
    PipelineModule.
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
                new_largest = max(largest, size)
                new_smallest = min(smallest, size)
                if best[i][j][0] >= new_largest - new_smallest:
                    best[i][j] = (new_largest - new_smallest, new_largest, new_smallest, k)
    bounds = [number]
    for j in range(parts, 0, -1):
        bounds.append(best[bounds[-1]][j][3])
    return bounds[::-1]


_split_balanced_once = cache(split_balanced)  # every stage of a model needs the same bounds


def cut_for_tensor_parallel(model: ModelSpec, json: dict[str, Any], size: int, rank: int) -> ModelSpec:
    """Return the part of the model on one tensor-parallel rank, by transformers' tensor-parallel plan.

    Args:
        model: Whole model.
        json: DeepSpeed JSON with the section tensor_parallel.
        size: Number of tensor-parallel ranks.
        rank: Index of the rank among them.

    Raises:
        ConfigError: transformers has no plan for the model, or the JSON states a plan of its own.
    """
    for key in ("partition_config", "preset_model"):
        if json["tensor_parallel"].get(key) is not None:
            raise ConfigError(
                f"tensor_parallel.{key}: the memory of this split is not known before a run; without "
                "the key, transformers' plan is estimated"
            )
    rules = list(_read_rules(model))
    if not rules:
        raise ConfigError(
            f"tensor_parallel: transformers has no tensor-parallel plan for {model.name}, so that the memory "
            "of this split is not known before a run; to train, name the layers to divide in "
            "tensor_parallel.partition_config"
        )
    is_tied = model.dimensions is not None and model.dimensions.tied
    own = []
    for p in model.parameters:
        without_adapter = re.sub(r"\.(base_layer|lora_[AB]\.\w+|lora_magnitude_vector\.\w+)\.", ".", p.name)
        weight_name = without_adapter.rpartition(".")[0] + ".weight"
        rule = next((rule for rule in rules if rule.pattern.match(weight_name)), None)
        if rule is None and is_tied and p.name.endswith(INPUT_EMBEDDING_NAMES):
            rule = _CutRule(re.compile(""), 0, name="lm_head")
        own.append(p if rule is None else replace(p, shape=_cut_shape(p, rule, model, size, rank)))
    return replace(model, parameters=tuple(own))


@dataclass(frozen=True)
class _CutRule:
    """Division of one layer's parameters over tensor-parallel ranks."""

    pattern: re.Pattern[str]
    """Pattern of the weight's name."""
    dim: int
    """Index of the dimension that is divided, in a weight of shape (outputs, inputs)."""
    name: str | None = None
    """Name of the output layer; `None` for another layer."""


def _cut_shape(p: ParameterSpec, rule: _CutRule, model: ModelSpec, size: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a parameter on one of `size` tensor-parallel ranks."""
    dim = rule.dim
    if ".lora_A." in p.name or ".lora_B." in p.name:
        if (".lora_B." in p.name) == (dim == 1):
            return p.shape  # the matrix on the side that is not divided
    elif len(p.shape) == 1 and dim == 1:
        return p.shape
    name = rule.name or re.sub(r"\.(base_layer|lora_.*)?\.?weight$|\.bias$", "", p.name)
    own = _compute_share(p.shape[dim], size, rank, name, model)
    return (*p.shape[:dim], own, *p.shape[dim + 1 :])


def _compute_share(total: int, size: int, rank: int, name: str, model: ModelSpec) -> int:
    """Return a rank's share of a dimension. Heads are not divided, as in DeepSpeed's tp_shard.py."""
    heads = model.dimensions.key_value_heads if model.dimensions is not None else None
    units = total
    is_attention = not any(word in name for word in ("mlp", *_MLP_NAMES))
    if heads and total % heads == 0 and is_attention and name not in _OUTPUT_LAYER_NAMES:
        units = heads
    return total // units * (units // size + (rank < units % size))


def _read_rules(model: ModelSpec) -> Iterator[_CutRule]:
    """Yield the rules of transformers' tensor-parallel plan for a model."""
    family = model.dimensions.family if model.dimensions is not None else ""
    for pattern, style in read_tensor_plan(family).items():
        dim = {"colwise": 0, "rowwise": 1}.get(style.split("_")[0])
        if dim is not None:
            layer_name = pattern.replace(".", r"\.").replace("*", ".*")
            name = pattern if pattern in _OUTPUT_LAYER_NAMES else None
            yield _CutRule(re.compile(rf".*{layer_name}\.weight$"), dim, name=name)


@cache
def read_tensor_plan(family: str) -> dict[str, str]:
    """Return transformers' tensor-parallel plan of a family: pattern of a layer's name -> style.

    Read from the source files, since importing them takes seconds. Empty if there is no plan.
    """
    spec = find_spec("transformers")
    folder = Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else Path()
    plan: dict[str, str] = {}
    for file, name in (("configuration", "base_model_tp_plan"), ("modeling", "_tp_plan")):
        path = folder / "models" / family / f"{file}_{family}.py"
        if family and path.is_file():
            plan |= _read_literal(path.read_text(), name)
    return plan


def _read_literal(source: str, name: str) -> dict[str, str]:
    """Return the dictionary that a class of the source assigns to `name`; empty if there is none."""
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
_VALUES_PER_SCALE = 64
_SCALES_PER_SCALE = 256  # scales are quantized, too
_TABLE_BYTES = 16 * 4 + 256 * 4  # tables of values and of scales


def is_frozen_base(p: ParameterSpec) -> bool:
    """Return whether a parameter is a frozen linear layer's weight.

    With an adapter, it is stored in 16 or 4 bits.
    """
    return p.layer is not None and not p.trains and ".lora_" not in p.name


def count_nf4_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a matrix in NF4 with double quantization.

    These are the codes, a scale for each block, scales of these scales, their mean, and two tables.
    """
    values = prod(shape)
    blocks = ceil(values / _VALUES_PER_SCALE)
    return ceil(values / 2) + blocks + ceil(blocks / _SCALES_PER_SCALE) * 4 + 4 + _TABLE_BYTES


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
    """Trained parameters of this rank by optimizer group."""
    config: RunConfig
    resolved: ResolvedSettings
    model_numel: int
    """Number of elements of all parameters of the whole model."""
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

        Args:
            model: Whole model.
            config: Recipe of the run.
            resolved: Resolved settings.
            rank: Global rank.
            on_cpu: Whether the rank computes on a CPU.

        Raises:
            ConfigError, ModelError: The model cannot be split as the settings say, or nothing of it is
                trained.
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
            model_numel=model.numel,
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
        value = get_dotted(self.json, f"zero_optimization.{dotted}")
        return default if value is None else value

    @property
    def stage(self) -> int:
        """ZeRO stage that the engine requests from DeepSpeed, at least 1 for pipeline stages in bf16."""
        is_pipeline_in_bf16 = self.split.pipeline_stages > 1 and self.split.precision == "bf16"
        return max(self.split.zero_stage, int(is_pipeline_in_bf16))

    @property
    def weight_size(self) -> int:
        """Bytes of an element of the weights that the engine computes with."""
        return 2 if self.resolved.deepspeed is not None and self.split.precision != "fp32" else 4

    @property
    def gradient_size(self) -> int:
        """Bytes of an element of the gradients that are added up over micro-batches."""
        stated = get_dotted(self.json, "data_types.grad_accum_dtype")
        if stated is None and self.split.pipeline_stages > 1 and self.split.precision == "bf16":
            return 4
        return {None: self.weight_size, "fp32": 4}.get(stated, 2)

    @property
    def sharers(self) -> int:
        """Number of ranks among which ZeRO divides the states."""
        return self.split.dp_world_size * self.split.sequence_parallel

    @property
    def partition_index(self) -> int:
        """Index of this rank among the `sharers`, and of its partition."""
        if self.split.pipeline_stages > 1:
            return self.number % self.split.dp_world_size
        return self.number // self.split.tensor_parallel

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Return whether DeepSpeed uses its BF16_Optimizer, which adds gradients up in a flat fp32 copy."""
        if self.split.precision != "bf16" or self.stage != 1 or self.offloads("optimizer"):
            return False
        return self.split.pipeline_stages > 1 or self.gradient_size == 4

    def offloads(self, states: str) -> str | None:
        """Return where `param` or `optimizer` is offloaded to, `cpu` or `nvme`; `None` without an offload."""
        device = self.zero(f"offload_{states}.device")
        return None if device == "none" else device

    def count_bytes(self, p: ParameterSpec) -> int:
        """Return the bytes of a parameter before ZeRO divides it, in the precision of its storage."""
        adapter = self.config.adapter
        if adapter is not None and is_frozen_base(p):
            if adapter.quantize is not None:
                return count_nf4_bytes(p.shape)
            if self.split.precision == "bf16":
                return 2 * p.numel
        return self.weight_size * p.numel
