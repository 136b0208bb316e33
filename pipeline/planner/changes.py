"""Changes of a run for memory, the simplest split that fits, and how far a run could go.

A change is words to put behind the command that was typed; what the settings refuse is never told.
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
from pipeline.planner.shapes import read_model_spec, read_pretrained_config, standardize_keys

LEAST = 0.01
"""Share of the peak from which on a gain counts as a change."""
BATCH, RECOMPUTATION, OTHER_CURVE = "batch", "recomputation", "other curve"
ZERO, OFFLOAD, BACK_TO_DEVICE = "ZeRO", "offload", "back on the GPU"
ACTIVATION_KINDS = (BATCH, RECOMPUTATION, OTHER_CURVE)
"""Kinds of change that make activations smaller."""

Words = tuple[str, ...]


@dataclass(frozen=True)
class ConfigChange:
    """One thing that takes less memory, everything else staying as it is."""

    name: str
    """What is changed, in a few words, with a price that is no time, such as another curve."""
    kind: str
    """BATCH, RECOMPUTATION, OTHER_CURVE, ZERO, OFFLOAD or, for the host's memory, BACK."""
    overrides: Words
    """Words to put behind the command: `model.activation_checkpointing=full`, `--deepspeed`, `FILE`."""
    gain: int | None = None
    """Bytes a rank; `None`: not known."""
    slower: float | None = None
    """Time of a step with it over the time without; `None`: not known."""
    fits: bool | None = None
    """Whether the run fits with it; `None`: not known."""

    def __str__(self) -> str:
        sign = "-" if (self.gain or 0) >= 0 else "+"
        gain = [] if self.gain is None else [f"{sign}{format_bytes(abs(self.gain))}"]
        times = None if self.slower is None else f"{self.slower:.2g}"
        price = [] if times in (None, "1") else [f"{times} times as long"]
        return f"{' '.join(self.overrides)} ({', '.join([*gain, *price, self.name])})"


def list_candidates(settings: Settings, resolved: ResolvedSettings, device: Device) -> Iterator[ConfigChange]:
    """Yield what could be changed, in the order in which it is tried first; not yet whether it can."""
    on_cpu = device.kind == "cpu"  # whose memory is the host's: an offload frees nothing
    plan, model = resolved.batch_plan, settings.config.model.language_model
    size, steps = plan.micro_batch_size, plan.gradient_accumulation_steps
    if not plan.is_auto:
        smaller = [size // n for n in (2, 3, 5, 4, 8) if size % n == 0]
        for micro in dict.fromkeys([*smaller, *([1] if size > 1 else [])]):
            parts = size // micro
            yield ConfigChange(
                f"the same step in {parts} times as many parts", BATCH, _batch(micro, steps * parts)
            )
    if model is not None and model.activation_checkpointing != "full":
        key = "model.activation_checkpointing"
        yield ConfigChange("blocks are computed again in the backward", RECOMPUTATION, (f"{key}=full",))
        if model.activation_checkpointing == "none":
            yield ConfigChange("blocks keep matrix products alone", RECOMPUTATION, (f"{key}=selective",))
    for change in _of_states(settings, resolved):
        if change.kind == ZERO or not on_cpu:
            yield change
    if model is not None and not model.activation_offload and not on_cpu:
        words: Words = ("model.activation_offload=true",)
        if model.activation_checkpointing != "full":
            words = ("model.activation_checkpointing=full", *words)
        yield ConfigChange("the inputs of blocks wait in host memory", RECOMPUTATION, words)
    yield from _of_other_curves(settings, resolved)


def _batch(micro: int, steps: int) -> Words:
    return (f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={steps}")


def _of_states(settings: Settings, resolved: ResolvedSettings) -> Iterator[ConfigChange]:
    """Yield where weights, gradients and optimizer states could be."""
    tree, now, section = settings.deepspeed, resolved.split.zero_stage, "ds.zero_optimization"
    shares = resolved.split.dp_world_size * resolved.split.sequence_parallel > 1
    if tree is None:
        for stage in (3, 2, 1) if shares else ():
            yield ConfigChange(f"ZeRO {stage}", ZERO, ("--deepspeed", f"zero{stage}"))
        for stage in (2, 3):
            yield ConfigChange(f"ZeRO {stage} on the host", OFFLOAD, ("--deepspeed", f"zero{stage}_offload"))
        return
    for stage in (3, 2, 1) if shares else ():
        if stage > now:
            yield ConfigChange(f"ZeRO {now} -> {stage}", ZERO, (f"{section}.stage={stage}",))
    at = {
        what: get_dotted(tree, f"zero_optimization.offload_{what}.device") or "none"
        for what in ("optimizer", "param")
    }
    keys = {what: f"{section}.offload_{what}.device" for what in at}
    if at["optimizer"] == "none":
        words = (f"{keys['optimizer']}=cpu",) if now else (f"{section}.stage=2", f"{keys['optimizer']}=cpu")
        yield ConfigChange("the optimizer on the host", OFFLOAD, words)
    if at["param"] == "none":
        moved = [f"{key}=cpu" for what, key in keys.items() if at[what] == "none"]
        yield ConfigChange("weights and optimizer on the host", OFFLOAD, (f"{section}.stage=3", *moved))
    if back := [f"{key}=none" for what, key in keys.items() if at[what] != "none"]:
        yield ConfigChange("nothing on the host", BACK_TO_DEVICE, tuple(back))


def _of_other_curves(settings: Settings, resolved: ResolvedSettings) -> Iterator[ConfigChange]:
    config = settings.config
    if resolved.split.precision == "fp32":
        key = "engine.precision=bf16" if settings.deepspeed_file is None else "ds.bf16.enabled=true"
        yield ConfigChange("the curve of bf16", OTHER_CURVE, (key,))
    if (tokens := config.data.tokens_per_row) is not None and tokens > 1:
        name = f"rows are {tokens} tokens now: other rows, another curve"
        yield ConfigChange(name, OTHER_CURVE, (f"data.sequence_length={tokens // 2}",))
    if config.adapter is None and config.model.pretrained_from is not None:
        name = "an adapter: another curve, and another learning rate"
        yield ConfigChange(name, OTHER_CURVE, ("adapter.kind=lora",))
    elif config.adapter is not None and config.adapter.quantize is None:
        yield ConfigChange("the base in 4 bits: another curve", OTHER_CURVE, ("adapter.quantize=nf4",))


def price_changes(
    settings: Settings, now: Forecast, forecast: Callable[[Settings], Forecast]
) -> list[ConfigChange]:
    """Return the changes that the settings accept, with gain and price.

    Args:
        forecast: Forecasts a run with changed settings; a PipelineError: they cannot be run.
    """
    found = []
    for change in list_candidates(settings, now.resolved, now.hardware.device):
        with suppress(PipelineError):
            after = forecast(settings.with_arguments(change.overrides))
            slower = after.time.seconds / now.time.seconds if after.time and now.time else None
            found.append(replace(change, gain=now.peak - after.peak, slower=slower, fits=after.fits))
    return found


def sort_by_memory_gain(found: list[ConfigChange], now: Forecast, missing: int = 0) -> list[ConfigChange]:
    """Return what takes less memory.

    First comes what is enough by itself, the fastest of it at the front; then the others by their gain. Of
    both those whose time is not known come later, and those that give another curve last.

    Args:
        missing: Bytes that have to go at least, whatever the formulas say.
    """

    def key(change: ConfigChange) -> tuple[bool, bool, float]:
        is_enough = bool(change.fits) and (not missing or (change.gain or 0) >= missing)
        price = (change.slower or inf) if is_enough else -float(change.gain or 0)
        return not is_enough, change.kind == OTHER_CURVE, price

    helps = [
        each for each in found if (each.gain or 0) > LEAST * now.peak or (each.fits and now.fits is False)
    ]
    return sorted(helps, key=key)


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
"""What `--suggest` tries, the simplest first: a file of ds_configs/, words on it, which blocks recompute."""


@dataclass(frozen=True)
class SearchResult:
    """The run that a search ended with."""

    forecast: Forecast | None
    """`None`: not even the smallest fits."""
    words: Words
    """Words behind the command that make the run that was planned; of `suggest` in place of its `--deepspeed
    FILE` and its `ds.` words."""
    stop_reason: str = "memory"
    """What ends the search."""


def suggest_split(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the first rung of the ladder that fits, with the largest micro-batch for the global batch.

    Raises:
        ConfigError: Nothing fits, or it is not known what would.
    """
    refused, lacking, is_known = "", "", False
    own = tuple(each for each in settings.overrides if not each.startswith("ds."))
    stated = _stated(settings)
    settings = replace(settings, overrides=own)
    for file, cut, recomputation in LADDER:
        words = ("--deepspeed", file, *cut, *stated, *_recomputing(settings, recomputation))
        best = None
        for batch in _by_rows(settings, place, int(cut[0].rpartition("=")[2]) if cut else 1):
            try:
                found = forecast(settings.with_arguments((*words, *batch)), model, place)
            except ConfigError as error:
                refused = str(error)
                break
            is_known = is_known or found.memory.is_complete
            if not found.fits:
                lacking = found.lacking
                break
            best = SearchResult(found, (*words, *batch))
        if best is not None:
            return best
    if not is_known:
        why = refused or f"what {model.name} takes on {place} is not known; the plan without it says what is"
        raise ConfigError(f"--suggest: {why}")
    raise ConfigError(
        f"--suggest: no split of {model.name} ({model.numel:,} parameters) fits on {place} (the last one "
        f"lacks {lacking}); take more GPUs, more memory, an adapter (adapter.kind=lora), or a shorter "
        "data.sequence_length"
    )


def _stated(settings: Settings) -> Words:
    """Return words for what the JSON, which another one replaces, states in place of the recipe."""
    tree = settings.config.model_dump(mode="json")
    keys = dict.fromkeys(key for key in settings.adopted.values() if not key.startswith("batch."))
    return tuple(f"{key}={json.dumps(get_dotted(tree, key))}" for key in keys)


def _recomputing(settings: Settings, mode: str) -> Words:
    model = settings.config.model.language_model
    if model is None:
        return ()
    words: Words = (f"model.activation_checkpointing={mode}",)
    if model.activation_offload:
        words += ("model.activation_offload=false",)
    return words


def _by_rows(settings: Settings, place: PlannedHardware, cut: int) -> Iterator[Words]:
    """Yield words for the recipe's global batch in micro-batches, ascending.

    Args:
        cut: Ranks that share a row.
    """
    batch = settings.config.batch
    rows = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
    total = batch.global_batch_size or rows * (batch.gradient_accumulation_steps or 1) * place.ranks
    if place.ranks % cut or total % (place.ranks // cut):
        return
    samples = total // (place.ranks // cut)
    for size in range(1, min(samples, MOST_SUGGESTED_ROWS) + 1):
        if samples % size == 0:
            yield _batch(size, samples // size)


STEP = 128
"""Tokens by which a row grows."""
MOST_TOKENS, MOST_ROWS, MOST_LAYERS = 2**26, 2**14, 2**10
MOST_SUGGESTED_ROWS = 64
NO_MORE = "more is not tried"


def find_longest_sequence(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the longest rows that fit, with a micro-batch of one.

    Raises:
        ConfigError: How memory grows with a row is not known of this model.
    """
    most, stops = MOST_TOKENS, NO_MORE
    section = settings.config.model
    if model.dimensions is None:
        raise ConfigError(
            f"--longest: what a row of {model.name} takes is known of the recipe's length alone"
        )
    if (given := section.pretrained_from) is not None:
        stated = standardize_keys(model.dimensions.family, read_pretrained_config(given))
        if (positions := stated.get("max_position_embeddings") or most) < most:
            most, stops = positions, f"{given} has no more positions"
    stated_positions = section.language_model.max_sequence_length if section.language_model else None

    def at(number: int) -> Words:
        tokens = min(number * STEP, most)
        words = [f"data.sequence_length={tokens}"]
        if stated_positions is not None:
            words.append(f"model.max_sequence_length={max(tokens, stated_positions)}")
        return (*words, *_one_micro_batch(settings, 1))

    return _furthest(settings, model, place, at, -(-most // STEP), stops)


def find_largest_micro_batch(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the most rows of a micro-batch that fit, one micro-batch a step, whatever the global batch."""
    return _furthest(settings, model, place, lambda rows: _one_micro_batch(settings, rows), MOST_ROWS)


def find_largest_model(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the most blocks of this width that fit, with a micro-batch of one row."""
    if model.dimensions is None:
        return SearchResult(None, (), f"how {model.name} would grow is not known")
    if settings.config.model.pretrained_from is not None:
        return SearchResult(None, (), "pretrained weights have one size")
    batch = _one_micro_batch(settings, 1)
    return _furthest(
        settings, model, place, lambda layers: (f"model.num_layers={layers}", *batch), MOST_LAYERS
    )


def _one_micro_batch(settings: Settings, rows: int) -> Words:
    """Return words for one micro-batch of so many rows, whatever recipe and JSON say of a batch."""
    words = _batch(rows, 1)
    if settings.config.batch.global_batch_size is not None:
        words += ("batch.global_batch_size=null",)
    of_json = [key for key, ours in settings.adopted.items() if ours.startswith("batch.")]
    return (*words, *(f"ds.{key}=auto" for key in of_json))


def _furthest(
    settings: Settings,
    model: ModelSpec,
    place: PlannedHardware,
    at: Callable[[int], Words],
    most: int,
    stops: str = NO_MORE,
) -> SearchResult:
    """Find the largest number whose words fit, of those below which all fit.

    Args:
        at: Words for the command line, by a number that grows.
        model: Used if it has to be built to be known, and these words change nothing of it.
        stops: Why no more than `most` is tried.
    """
    found: dict[int, Forecast] = {}
    refused: dict[int, str] = {}

    def is_too_large(number: int) -> bool:
        try:
            changed = settings.with_arguments(at(number))
            found[number] = forecast(changed, read_model_spec(changed.config) or model, place)
        except PipelineError as error:
            refused[number] = str(error)
            return True
        if not found[number].memory.is_complete:
            raise ConfigError(
                f"--longest, --largest: what activations take is not known of {model.name}, computed so; "
                "without the option the plan says what is known"
            )
        return not found[number].fits

    best = bisect_left(range(1, most + 1), True, key=is_too_large)
    if best == most:
        return SearchResult(found[best], at(best), stops)
    return SearchResult(found.get(best), at(best) if best else (), refused.get(best + 1, "memory"))
