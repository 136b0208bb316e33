"""Finds changes that save memory, the simplest split that fits, and the largest run that fits.

A change is a list of words to append to the command that the user typed. A change that the settings would
refuse is never proposed.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from pipeline.config.loading import get_dotted
from pipeline.config.settings import ResolvedSettings, Settings
from pipeline.config.split import Device
from pipeline.errors import ConfigError, PipelineError
from pipeline.files import format_bytes
from pipeline.planner.forecast import Forecast, forecast
from pipeline.planner.hardware import PlannedHardware
from pipeline.planner.model import ModelSpec
from pipeline.planner.shapes import read_model_spec, read_planned_config, standardize_keys

MIN_GAIN_SHARE = 0.01
"""Share of the peak memory that a proposed change saves at least."""
BATCH = "batch"
RECOMPUTATION = "recomputation"
OTHER_CURVE = "other curve"
ZERO = "ZeRO"
OFFLOAD = "offload"
BACK_TO_DEVICE = "back on the GPU"
ACTIVATION_KINDS = (BATCH, RECOMPUTATION, OTHER_CURVE)
"""Kinds of changes that make activations smaller."""

Words = tuple[str, ...]
"""Words of a command line."""


@dataclass(frozen=True)
class ConfigChange:
    """Change of a run's settings that saves memory."""

    name: str
    """Short description, with any cost that is not time, such as another loss curve."""
    kind: str
    """BATCH, RECOMPUTATION, OTHER_CURVE, ZERO, OFFLOAD or, if host memory is short, BACK_TO_DEVICE."""
    overrides: Words
    """Words to append to the command: `model.activation_checkpointing=full`, or `--deepspeed` and `FILE`."""
    gain: int | None = None
    """Bytes that the change saves at the peak of the fullest rank, negative if it costs memory; `None` if not
    known."""
    time_ratio: float | None = None
    """Ratio of the step's time with the change to the time without; `None` if not known."""
    fits: bool | None = None
    """Whether the run fits with the change; `None` if not known."""

    def __str__(self) -> str:
        effects = []
        if self.gain is not None:
            sign = "-" if self.gain >= 0 else "+"
            effects.append(f"{sign}{format_bytes(abs(self.gain))}")
        if self.time_ratio is not None:
            ratio = f"{self.time_ratio:.2g}"
            if ratio != "1":
                effects.append(f"{ratio} times as long")
        effects.append(self.name)
        return f"{' '.join(self.overrides)} ({', '.join(effects)})"


def list_candidates(settings: Settings, resolved: ResolvedSettings, device: Device) -> Iterator[ConfigChange]:
    """Yield changes that could save memory, those without a cost first; the settings may still refuse them.

    Args:
        settings: Settings of the run.
        resolved: The same settings, resolved.
        device: Device that the run computes on.
    """
    on_cpu = device.kind == "cpu"  # a CPU computes in host memory, so that an offload frees nothing
    plan = resolved.batch_plan
    model = settings.config.model.language_model
    size = plan.micro_batch_size
    steps = plan.gradient_accumulation_steps
    if not plan.is_provisional:
        smaller = [size // divisor for divisor in (2, 3, 5, 4, 8) if size % divisor == 0]
        if size > 1:
            smaller.append(1)
        for micro_batch_size in dict.fromkeys(smaller):
            factor = size // micro_batch_size
            yield ConfigChange(
                f"the same step with {factor} times as many micro-batches",
                BATCH,
                _override_batch(micro_batch_size, steps * factor),
            )
    if model is not None and model.activation_checkpointing != "full":
        key = "model.activation_checkpointing"
        yield ConfigChange("recompute blocks in the backward", RECOMPUTATION, (f"{key}=full",))
        if model.activation_checkpointing == "none":
            yield ConfigChange("blocks keep only matrix products", RECOMPUTATION, (f"{key}=selective",))
    for change in _list_state_changes(settings, resolved):
        if change.kind == ZERO or not on_cpu:
            yield change
    if model is not None and not model.activation_offload and not on_cpu:
        words: Words = ("model.activation_offload=true",)
        if model.activation_checkpointing != "full":
            words = ("model.activation_checkpointing=full", *words)
        yield ConfigChange("keep the inputs of blocks in host memory", RECOMPUTATION, words)
    yield from _list_curve_changes(settings, resolved)


def _override_batch(micro_batch_size: int, accumulation_steps: int) -> Words:
    return (
        f"batch.micro_batch_size={micro_batch_size}",
        f"batch.gradient_accumulation_steps={accumulation_steps}",
    )


def _list_state_changes(settings: Settings, resolved: ResolvedSettings) -> Iterator[ConfigChange]:
    """Yield changes that divide weights, gradients and optimizer states, or move them to other memory."""
    tree = settings.deepspeed
    now = resolved.split.zero_stage
    section = "ds.zero_optimization"
    can_divide = resolved.split.dp_world_size * resolved.split.sequence_parallel > 1
    stages = (3, 2, 1) if can_divide else ()
    if tree is None:
        for stage in stages:
            yield ConfigChange(f"ZeRO {stage}", ZERO, ("--deepspeed", f"zero{stage}"))
        for stage in (2, 3):
            yield ConfigChange(
                f"ZeRO {stage} with offload to host memory", OFFLOAD, ("--deepspeed", f"zero{stage}_offload")
            )
        return
    for stage in stages:
        if stage > now:
            yield ConfigChange(f"ZeRO {now} -> {stage}", ZERO, (f"{section}.stage={stage}",))
    devices = {
        states: get_dotted(tree, f"zero_optimization.offload_{states}.device") or "none"
        for states in ("optimizer", "param")
    }
    keys = {states: f"{section}.offload_{states}.device" for states in devices}
    if devices["optimizer"] == "none":
        words: Words = (f"{keys['optimizer']}=cpu",)
        if not now:
            words = (f"{section}.stage=2", *words)
        yield ConfigChange("the optimizer in host memory", OFFLOAD, words)
    if devices["param"] == "none":
        moved = [f"{key}=cpu" for states, key in keys.items() if devices[states] == "none"]
        yield ConfigChange("weights and optimizer in host memory", OFFLOAD, (f"{section}.stage=3", *moved))
    back = tuple(f"{key}=none" for states, key in keys.items() if devices[states] != "none")
    if back:
        yield ConfigChange("no offload", BACK_TO_DEVICE, back)


def _list_curve_changes(settings: Settings, resolved: ResolvedSettings) -> Iterator[ConfigChange]:
    """Yield changes that save memory and give another loss curve."""
    config = settings.config
    if resolved.split.precision == "fp32":
        key = "engine.precision=bf16" if settings.deepspeed_file is None else "ds.bf16.enabled=true"
        yield ConfigChange("changes the loss curve: bf16", OTHER_CURVE, (key,))
    tokens = config.data.tokens_per_row
    if tokens is not None and tokens > 1:
        name = f"changes the loss curve: rows of {tokens // 2} tokens instead of {tokens}"
        yield ConfigChange(name, OTHER_CURVE, (f"data.sequence_length={tokens // 2}",))
    if config.adapter is None and config.model.pretrained_from is not None:
        name = "changes the loss curve: an adapter, which needs another learning rate"
        yield ConfigChange(name, OTHER_CURVE, ("adapter.kind=lora",))
    elif config.adapter is not None and config.adapter.quantize is None:
        yield ConfigChange(
            "changes the loss curve: the base in 4 bits", OTHER_CURVE, ("adapter.quantize=nf4",)
        )


def price_changes(
    settings: Settings, now: Forecast, forecast: Callable[[Settings], Forecast]
) -> list[ConfigChange]:
    """Return the changes that the settings accept, with the memory they save and the time they cost.

    A change with which the run does not fit into host memory is left out.

    Args:
        settings: Settings of the run.
        now: Forecast of the run with these settings.
        forecast: Forecasts a run with changed settings. It raises a PipelineError if they cannot be run.
    """
    changes = []
    for change in list_candidates(settings, now.resolved, now.hardware.device):
        with suppress(PipelineError):
            after = forecast(settings.with_arguments(change.overrides))
            if not after.fits_host:
                continue
            ratio = after.time.seconds / now.time.seconds if after.time and now.time else None
            changes.append(replace(change, gain=now.peak - after.peak, time_ratio=ratio, fits=after.fits))
    return changes


def sort_by_memory_gain(changes: list[ConfigChange], now: Forecast, missing: int = 0) -> list[ConfigChange]:
    """Return those of the changes that save memory, the most useful first.

    Changes that are enough by themselves come first, sorted by time; then the others, sorted by gain. In both
    groups, changes whose time is not known come later, and those that give another loss curve last.

    Args:
        changes: Changes with gain and cost.
        now: Forecast of the run without them.
        missing: Bytes that a change must save at least to be enough, even if it fits by the formulas.
    """

    def key(change: ConfigChange) -> tuple[bool, bool, float]:
        is_enough = bool(change.fits) and (not missing or (change.gain or 0) >= missing)
        order = (change.time_ratio or inf) if is_enough else -float(change.gain or 0)
        return not is_enough, change.kind == OTHER_CURVE, order

    def helps(change: ConfigChange) -> bool:
        saves_memory = (change.gain or 0) > MIN_GAIN_SHARE * now.peak
        return saves_memory or (change.fits is True and now.fits is False)

    return sorted(filter(helps, changes), key=key)


LADDER: tuple[tuple[str, Words, str], ...] = (
    ("zero1", (), "none"),
    ("zero2", (), "none"),
    ("zero3", (), "none"),
    ("zero3", (), "selective"),
    ("zero3", (), "full"),
    ("zero2_offload", (), "full"),
    ("zero3_offload", (), "full"),
    ("zero3_nvme", (), "full"),
    *(("sequence2", (f"ds.sequence_parallel_size={n}",), "full") for n in (2, 4, 8)),
    *(("tensor2", (f"ds.tensor_parallel.autotp_size={n}",), "full") for n in (2, 4, 8)),
)
"""Splits that `--suggest` tries, simplest first: (file in ds_configs/, overrides of it, recomputation)."""


@dataclass(frozen=True)
class SearchResult:
    """Largest or simplest run that a search found."""

    forecast: Forecast | None
    """Forecast of the run; `None` if not even the smallest fits."""
    words: Words
    """Words to append to the command for this run. Those of `suggest_split` replace its `--deepspeed FILE`
    and its `ds.` overrides."""
    stop_reason: str = "memory"
    """`memory`, or the reason why no larger run was tried or possible."""


class NoSplitFitsError(ConfigError):
    """No split of LADDER fits."""


def suggest_split(settings: Settings, model: ModelSpec, hardware: PlannedHardware) -> SearchResult:
    """Return the first split of LADDER that fits, with the largest micro-batch that divides the global batch.

    The suggestion is the simplest split that fits, which may not be the fastest.

    Raises:
        NoSplitFitsError: No split fits.
        ConfigError: The settings are refused, or the memory of the model is not known.
    """
    refusal = ""
    lacking = ""
    is_known = False
    recipe_overrides = tuple(word for word in settings.overrides if not word.startswith("ds."))
    adopted = _override_adopted(settings)
    settings = replace(settings, overrides=recipe_overrides)
    for file, split, recomputation in LADDER:
        words = ("--deepspeed", file, *split, *adopted, *_override_recomputation(settings, recomputation))
        ranks_per_row = int(split[0].rpartition("=")[2]) if split else 1
        best = None
        for batch in _list_batches(settings, hardware, ranks_per_row):
            try:
                planned = forecast(settings.with_arguments((*words, *batch)), model, hardware)
            except ConfigError as error:
                refusal = str(error)
                break
            is_known = is_known or planned.memory.is_complete
            if not planned.fits:
                lacking = planned.lacking
                break
            best = SearchResult(planned, (*words, *batch))
        if best is not None:
            return best
    if not is_known and refusal:
        raise ConfigError(f"--suggest: {refusal}")
    if not is_known:
        raise ConfigError(
            f"--suggest: the memory of {model.name} on {hardware} is not known; "
            "plan without --suggest to see the known parts"
        )
    raise NoSplitFitsError(
        f"--suggest: no split of {model.name} ({model.numel:,} parameters) fits on {hardware} (the last one "
        f"does not fit: {lacking}); take more GPUs, more memory, an adapter (adapter.kind=lora), or a "
        "shorter data.sequence_length"
    )


def _override_adopted(settings: Settings) -> Words:
    """Return overrides for the settings that the recipe took from the user's JSON, without the batch's.

    They would be lost otherwise, because another JSON replaces the user's.
    """
    tree = settings.config.model_dump(mode="json")
    keys = dict.fromkeys(key for key in settings.adopted.values() if not key.startswith("batch."))
    return tuple(f"{key}={json.dumps(get_dotted(tree, key))}" for key in keys)


def _override_recomputation(settings: Settings, mode: str) -> Words:
    """Return overrides for this mode of recomputation, without offload; none if the model has no blocks."""
    model = settings.config.model.language_model
    if model is None:
        return ()
    words: Words = (f"model.activation_checkpointing={mode}",)
    if model.activation_offload:
        words += ("model.activation_offload=false",)
    return words


def _list_batches(settings: Settings, hardware: PlannedHardware, ranks_per_row: int) -> Iterator[Words]:
    """Yield overrides that divide the recipe's global batch into micro-batches, from small to large."""
    batch = settings.config.batch
    rows = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
    total = batch.global_batch_size or rows * (batch.gradient_accumulation_steps or 1) * hardware.ranks
    if hardware.ranks % ranks_per_row:
        return
    replicas = hardware.ranks // ranks_per_row
    if total % replicas:
        return
    samples = total // replicas
    for size in range(1, min(samples, MAX_SUGGESTED_ROWS) + 1):
        if samples % size == 0:
            yield _override_batch(size, samples // size)


TOKENS_STEP = 128
"""Number of tokens by which the search lengthens a row."""
MAX_TOKENS = 2**26
"""Largest number of tokens in a row that `find_longest_sequence` tries."""
MAX_ROWS = 2**14
"""Largest micro-batch that `find_largest_micro_batch` tries."""
MAX_LAYERS = 2**10
"""Largest number of blocks that `find_largest_model` tries."""
MAX_SUGGESTED_ROWS = 64
"""Largest micro-batch that `suggest_split` tries."""
SEARCH_LIMIT = "more is not tried"
"""`SearchResult.stop_reason` of a search that ends at one of these limits."""


def find_longest_sequence(settings: Settings, model: ModelSpec, hardware: PlannedHardware) -> SearchResult:
    """Find the longest rows that fit, with a micro-batch of one.

    Raises:
        ConfigError: It is not known how this model's memory grows with the length of a row.
    """
    max_tokens = MAX_TOKENS
    limit_reason = SEARCH_LIMIT
    section = settings.config.model
    if model.dimensions is None:
        raise ConfigError(
            f"--longest: the memory of a row of {model.name} is known only for the recipe's length; "
            "plan without --longest"
        )
    pretrained = section.pretrained_from
    if pretrained is not None:
        model_config = standardize_keys(model.dimensions.family, read_planned_config(pretrained))
        positions = model_config.get("max_position_embeddings") or max_tokens
        if positions < max_tokens:
            max_tokens = positions
            limit_reason = f"{pretrained} has no more positions"
    stated_positions = section.language_model.max_sequence_length if section.language_model else None

    def override_length(number: int) -> Words:
        tokens = min(number * TOKENS_STEP, max_tokens)
        words = [f"data.sequence_length={tokens}"]
        if stated_positions is not None:
            words.append(f"model.max_sequence_length={max(tokens, stated_positions)}")
        return (*words, *_override_one_batch(settings, 1))

    max_number = -(-max_tokens // TOKENS_STEP)
    return _bisect(settings, model, hardware, override_length, max_number, limit_reason=limit_reason)


def find_largest_micro_batch(settings: Settings, model: ModelSpec, hardware: PlannedHardware) -> SearchResult:
    """Find the largest micro-batch that fits, with one micro-batch in a step and any global batch."""
    return _bisect(settings, model, hardware, lambda rows: _override_one_batch(settings, rows), MAX_ROWS)


def find_largest_model(settings: Settings, model: ModelSpec, hardware: PlannedHardware) -> SearchResult:
    """Find the largest number of blocks of this width that fits, with a micro-batch of one row."""
    if model.dimensions is None:
        return SearchResult(None, (), f"the blocks of {model.name} are not known")
    if settings.config.model.pretrained_from is not None:
        return SearchResult(None, (), "pretrained weights have one size")
    batch = _override_one_batch(settings, 1)
    return _bisect(
        settings, model, hardware, lambda layers: (f"model.num_layers={layers}", *batch), MAX_LAYERS
    )


def _override_one_batch(settings: Settings, rows: int) -> Words:
    """Return overrides for a step of one micro-batch, in place of the batch of recipe and JSON."""
    words = _override_batch(rows, 1)
    if settings.config.batch.global_batch_size is not None:
        words += ("batch.global_batch_size=null",)
    json_keys = [key for key, recipe_key in settings.adopted.items() if recipe_key.startswith("batch.")]
    return (*words, *(f"ds.{key}=auto" for key in json_keys))


def _bisect(
    settings: Settings,
    model: ModelSpec,
    hardware: PlannedHardware,
    override: Callable[[int], Words],
    max_number: int,
    limit_reason: str = SEARCH_LIMIT,
) -> SearchResult:
    """Find the largest number whose run fits, by bisection: if a run fits, all smaller ones do.

    Args:
        settings: Settings of the run.
        model: Model to use if it cannot be read from the settings; the overrides do not change it then.
        hardware: Hardware of the plan.
        override: Returns the overrides for a number.
        max_number: Largest number to try.
        limit_reason: `stop_reason` of the result if `max_number` fits.

    Raises:
        ConfigError: The memory of activations is not known for this model.
    """
    forecasts: dict[int, Forecast] = {}
    refusals: dict[int, str] = {}

    def is_too_large(number: int) -> bool:
        try:
            changed = settings.with_arguments(override(number))
            forecasts[number] = forecast(changed, read_model_spec(changed.config) or model, hardware)
        except PipelineError as error:
            refusals[number] = str(error)
            return True
        if not forecasts[number].memory.is_complete:
            raise ConfigError(
                f"--longest, --largest: the memory of activations is not known for {model.name} with these "
                "settings; plan without the option to see the known parts"
            )
        return not forecasts[number].fits

    best = bisect_left(range(1, max_number + 1), True, key=is_too_large)
    if best == 0:
        return SearchResult(None, (), refusals.get(1, "memory"))
    reason = limit_reason if best == max_number else refusals.get(best + 1, "memory")
    return SearchResult(forecasts[best], override(best), reason)
