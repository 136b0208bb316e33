"""Finds the fastest split that fits, and writes its files: every split is tried by the formulas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.command_lines import Word, shell_line, train_command
from pipeline.config.loading import ConfigFile, Tree, get_dotted, parse_override
from pipeline.config.schema import BatchConfig, RunConfig
from pipeline.config.settings import Settings, load_settings
from pipeline.config.shipped import LAUNCH
from pipeline.errors import ConfigError
from pipeline.files import GIB
from pipeline.planner.forecast import Forecast, forecast_of, holdings_of, word
from pipeline.planner.memory import Holding
from pipeline.planner.model import Model
from pipeline.planner.place import History, Place


def text_beside(path: Path, force: bool) -> Path:
    """Where it is said why the JSON is what it is.

    Args:
        force: Whether files that are there are written over.

    Raises:
        ConfigError: it would be the JSON itself, or one of the two is there already.
    """
    if not path.name or path.suffix.lower() == ".txt":
        raise ConfigError(
            f"--suggest {path}: the split is a JSON, beside which a .txt says why; name a .json file"
        )
    why = path.with_suffix(".txt")
    for each in () if force else (path, why):
        if each.exists():
            raise ConfigError(f"--suggest {path}: {each} is there already; name another file, or add --force")
    return why


def write(suggestion: Suggestion, path: Path, recipe: Path, command: str, force: bool = False) -> Path:
    """The JSON, and beside it a text that says why.

    Args:
        recipe: What is trained.
        command: That was typed to find it.
        force: Whether files that are there are written over.

    Returns:
        The path of the text.

    Raises:
        ConfigError: it cannot be written there, or is there already.
    """
    best = suggestion.best
    found, time = best.found, best.found.time
    assert time is not None
    why = text_beside(path, force)
    words: tuple[Word, ...] = ("--config", recipe, "--deepspeed", path, *best.overrides)
    training = train_command(found.place.per_node, *words)
    if found.place.nodes > 1:
        training = shell_line(LAUNCH / "multi_node.sh", "HOSTFILE", *words)
    text = f"""\
{path.name}: the fastest of {suggestion.fitting:,} splits that fit, of {suggestion.tried:,} tried.

{found.resolved.split}; {found.place}
offload: {", ".join(offloaded(best.json)) or "none"}; recomputation: {recomputed(found.config) or "none"}
{found.resolved.plan}
memory of the fullest rank: {found.peak / GIB:.1f} of {found.place.memory / GIB:.1f} GiB
host memory of a machine: {found.host_bytes / GIB:.0f} GiB
a step: {time.seconds:.2f} s, {time.tokens_per_second * time.gpus:,.0f} tokens/s

Found by: {command}
To train with it: {training}
"""
    try:
        path.write_text(json.dumps(best.json, indent=2) + "\n", "utf-8")
        why.write_text(text + _refused(recipe, path, best.overrides), "utf-8")
    except OSError as error:
        raise ConfigError(f"--suggest {path}: {error.strerror or error}") from None
    return why


def offloaded(tree: Tree) -> list[str]:
    """What a JSON has elsewhere than on its GPU, and where."""
    names = {"optimizer": "optimizer", "param": "weights"}
    at = {name: get_dotted(tree, f"zero_optimization.offload_{key}.device") for key, name in names.items()}
    return [f"{name} on {where}" for name, where in at.items() if where]


def recomputed(config: RunConfig) -> str:
    """What blocks compute again in the backward; empty: of a model that has none."""
    model = config.model.language_model
    if model is None:
        return ""
    return f"{model.activation_checkpointing}{', inputs on the host' if model.activation_offload else ''}"


def _refused(recipe: Path, path: Path, words: tuple[str, ...]) -> str:
    """What has to be changed first, such as a section that a JSON takes the place of; empty: nothing."""
    try:
        load_settings(recipe, path, words)
    except ConfigError as error:
        return f"That is refused as it stands: {error}\n"
    return ""


DEGREES = (1, 2, 4, 8)
STAGES = (1, 2, 4, 8, 16)
MOST_ROWS = 64
NEAR = 1.01
"""Steps that differ by less are taken for equally fast: the one that holds less is chosen."""


@dataclass(frozen=True)
class Candidate:
    """A split that fits, and what it takes."""

    json: Tree
    overrides: tuple[str, ...]
    """Of the recipe: those that were typed, then batch and recomputation."""
    found: Forecast
    seconds: float
    """Of a step."""


@dataclass(frozen=True)
class Suggestion:
    """The best of them."""

    best: Candidate
    tried: int
    fitting: int


def suggest(settings: Settings, model: Model, place: Place, history: History | None = None) -> Suggestion:
    """The fastest that fits, with the global batch of the recipe. Nothing that fits is both faster and
    smaller.

    Args:
        history: None: nothing is corrected.

    Raises:
        ConfigError: nothing fits, or it is not known what would.
    """
    fitting, tried = fitting_splits(settings, model, place, history)
    if (found := choose(fitting, tried)) is not None:
        return found
    if not tried:
        how = "name a GPU with --gpu, or " if place.device.kind == "cpu" else ""
        raise ConfigError(
            f"--suggest: what {model.name} takes on {place} is not known, in memory or time; {how}see "
            "without the option what is known"
        )
    raise ConfigError(
        f"--suggest: no split of {model.name} ({model.numel:,} parameters) fits on {place}; take more GPUs, "
        "more memory, an adapter (adapter.kind=lora), or a shorter data.sequence_length"
    )


def choose(fitting: list[Candidate], tried: int) -> Suggestion | None:
    """Of those that are as good as the fastest the one that holds least."""
    if not fitting:
        return None
    limit = NEAR * min(each.seconds for each in fitting)
    best = min((each for each in fitting if each.seconds <= limit), key=lambda each: each.found.peak)
    return Suggestion(best, tried, len(fitting))


def fitting_splits(
    settings: Settings, model: Model, place: Place, history: History | None = None
) -> tuple[list[Candidate], int]:
    """Every split that fits, and how many were tried: of which memory and time are known. Of those that
    differ in rows alone, a smaller one is tried first: more rows hold more.
    """
    total, typed = _global_batch(settings, place), _typed(settings)
    on_cpu = place.device.kind == "cpu"
    fitting: list[Candidate] = []
    tried = 0
    for tree in _splits(place, model):
        known: dict[bool, list[Holding]] = {}  # by whether gradients are added up over several micro-batches
        for recomputation in _recomputations(settings):
            for batch in _batches(tree, total, place):
                try:
                    changed = _with(settings, tree, recomputation, batch)
                    resolved = changed.resolve(place.ranks, place.device)
                    adds = resolved.plan.gradient_accumulation_steps > 1
                    if adds not in known:
                        known[adds] = holdings_of(model, changed.config, resolved, on_cpu)
                    found = forecast_of(
                        changed.config,
                        resolved,
                        model=model,
                        place=place,
                        history=history,
                        holdings=known[adds],
                    )
                except ConfigError:
                    break
                if found.time is None or not found.memory.is_complete:
                    break
                tried += 1
                if not found.fits:
                    break
                words = (*_differing(recomputation, settings), *_as_words(batch, "batch"))
                fitting.append(Candidate(tree, (*typed, *words), found, found.time.seconds))
    return fitting, tried


def _global_batch(settings: Settings, place: Place) -> int:
    batch = settings.config.batch
    if batch.global_batch_size is not None:
        return batch.global_batch_size
    rows = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
    return rows * (batch.gradient_accumulation_steps or 1) * place.ranks


def _splits(place: Place, model: Model) -> Iterator[Tree]:
    """The JSON of every split over the ranks, and of every offload."""
    auto = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    auto["gradient_clipping"] = "auto"
    precision = (
        "bf16" if place.device.bf16 else "fp16" if place.device.fp16 else None
    )  # a CPU may have neither
    half: Tree = {} if precision is None else {precision: {"enabled": True}}
    for cut in _cuts(place, model):
        for zero in _zeros(place, cut):
            yield {**auto, **cut, "zero_optimization": zero, **half}


def _cuts(place: Place, model: Model) -> Iterator[dict[str, Any]]:
    dimensions = model.dimensions
    yield {}
    if dimensions is None:
        return
    for degree in DEGREES[1:]:
        if place.ranks % degree or degree > place.per_node:
            continue
        if dimensions.heads % degree == 0:
            if dimensions.key_value_heads % degree == 0:
                yield {"tensor_parallel": {"autotp_size": degree}}
            yield {"sequence_parallel_size": degree}
    for degree in STAGES[1:]:
        if place.ranks % degree == 0 and degree <= dimensions.layers:
            yield {"pipeline": {"stages": degree}}


def _zeros(place: Place, cut: dict[str, Any]) -> Iterator[dict[str, Any]]:
    common = {"contiguous_gradients": True}
    autos = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    autos["stage3_param_persistence_threshold"] = "auto"
    yield {"stage": 0}
    yield {"stage": 1, **common}
    if "pipeline" in cut:
        return
    yield {"stage": 2, **common}
    yield {"stage": 3, **common, **autos}
    if place.nodes > 1 and not cut:
        yield {"stage": 3, **common, **autos, "zero_hpz_partition_size": place.per_node}
    if place.device.kind == "cpu":  # the host itself
        return
    yield {"stage": 2, **common, "offload_optimizer": {"device": "cpu"}}
    if "tensor_parallel" in cut:
        return
    host, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": "nvme"}
    yield {"stage": 3, **common, **autos, "offload_optimizer": host}
    yield {"stage": 3, **common, **autos, "offload_optimizer": host, "offload_param": host}
    yield {"stage": 3, **common, **autos, "offload_optimizer": disk, "offload_param": host}
    yield {"stage": 3, **common, **autos, "offload_optimizer": disk, "offload_param": disk}


def _recomputations(settings: Settings) -> list[dict[str, Any]]:
    if settings.config.model.language_model is None:
        return [{}]
    plain = {"activation_offload": False, "activation_budget_gib": None}
    return [
        plain | {"activation_checkpointing": "none"},
        plain | {"activation_checkpointing": "selective"},
        plain | {"activation_checkpointing": "full"},
        plain | {"activation_checkpointing": "full", "activation_offload": True},
    ]


def _batches(tree: Tree, total: int, place: Place) -> Iterator[dict[str, int]]:
    """Ascending in rows: the global batch in micro-batches."""
    cut = tree.get("tensor_parallel", {}).get("autotp_size", 1) * tree.get("sequence_parallel_size", 1)
    replicas = place.ranks // (cut * tree.get("pipeline", {}).get("stages", 1))
    if total % replicas:
        return
    plan = BatchPlan(1, total // replicas, replicas)
    for rows in plan.candidates:
        if rows <= MOST_ROWS:
            steps = plan.divided(rows).gradient_accumulation_steps
            yield {"micro_batch_size": rows, "gradient_accumulation_steps": steps}


def _with(settings: Settings, tree: Tree, model: dict[str, Any], batch: dict[str, int]) -> Settings:
    config = settings.config
    fields = config.model_fields_set - {"engine"}
    values = {name: getattr(config, name) for name in fields}
    values["model"] = config.model.model_copy(update=model)
    values["batch"] = BatchConfig.model_validate(batch)
    changed = config.model_construct(_fields_set=fields | {"model", "batch"}, **values)
    return replace(settings, config=changed, split=ConfigFile(Path("suggested.json"), tree))


def _as_words(values: dict[str, Any], section: str) -> tuple[str, ...]:
    return tuple(word(f"{section}.{key}", value) for key, value in values.items())


def _differing(values: dict[str, Any], settings: Settings) -> tuple[str, ...]:
    """As overrides of the model, where the recipe says something else."""
    model = settings.config.model
    return _as_words({key: value for key, value in values.items() if value != getattr(model, key)}, "model")


def _typed(settings: Settings) -> tuple[str, ...]:
    """The command's own overrides, and what a run takes from the JSON that the suggested one stands for."""
    own = [each for each in settings.overrides if parse_override(each)[0][0] not in ("ds", "engine")]
    said = settings.config.model_dump(mode="json")
    of_json = [key for key in settings.adopted.values() if not key.startswith("batch.")]
    own += [word(key, get_dotted(said, key)) for key in dict.fromkeys(of_json)]
    return tuple(own)
