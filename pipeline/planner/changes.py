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
from pipeline.planner.shapes import read_model_spec, read_pretrained_config, standardize_keys

LEAST = 0.01
"""Smallest gain of a proposed change, as a share of the peak."""
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
    """Bytes that a rank saves; `None` if not known."""
    slower: float | None = None
    """Ratio of the step's time with the change to the time without; `None` if not known."""
    fits: bool | None = None
    """Whether the run fits with the change; `None` if not known."""

    def __str__(self) -> str:
        sign = "-" if (self.gain or 0) >= 0 else "+"
        gain = [] if self.gain is None else [f"{sign}{format_bytes(abs(self.gain))}"]
        times = None if self.slower is None else f"{self.slower:.2g}"
        price = [] if times in (None, "1") else [f"{times} times as long"]
        return f"{' '.join(self.overrides)} ({', '.join([*gain, *price, self.name])})"


def list_candidates(settings: Settings, resolved: ResolvedSettings, device: Device) -> Iterator[ConfigChange]:
    """Yield changes that could save memory, in the order of trying; the settings may still refuse them."""
    on_cpu = device.kind == "cpu"  # a CPU computes in host memory, so that an offload frees nothing
    plan = resolved.batch_plan
    model = settings.config.model.language_model
    size = plan.micro_batch_size
    steps = plan.gradient_accumulation_steps
    if not plan.is_provisional:
        smaller = [size // n for n in (2, 3, 5, 4, 8) if size % n == 0]
        for micro in dict.fromkeys([*smaller, *([1] if size > 1 else [])]):
            parts = size // micro
            yield ConfigChange(
                f"the same step with {parts} times as many micro-batches",
                BATCH,
                _override_batch(micro, steps * parts),
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


def _override_batch(micro: int, steps: int) -> Words:
    return (f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={steps}")


def _list_state_changes(settings: Settings, resolved: ResolvedSettings) -> Iterator[ConfigChange]:
    """Yield changes of where weights, gradients and optimizer states are held."""
    tree = settings.deepspeed
    now = resolved.split.zero_stage
    section = "ds.zero_optimization"
    shares = resolved.split.dp_world_size * resolved.split.sequence_parallel > 1
    if tree is None:
        for stage in (3, 2, 1) if shares else ():
            yield ConfigChange(f"ZeRO {stage}", ZERO, ("--deepspeed", f"zero{stage}"))
        for stage in (2, 3):
            yield ConfigChange(
                f"ZeRO {stage} with offload to host memory", OFFLOAD, ("--deepspeed", f"zero{stage}_offload")
            )
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
        yield ConfigChange("the optimizer in host memory", OFFLOAD, words)
    if at["param"] == "none":
        moved = [f"{key}=cpu" for what, key in keys.items() if at[what] == "none"]
        yield ConfigChange("weights and optimizer in host memory", OFFLOAD, (f"{section}.stage=3", *moved))
    if back := [f"{key}=none" for what, key in keys.items() if at[what] != "none"]:
        yield ConfigChange("no offload", BACK_TO_DEVICE, tuple(back))


def _list_curve_changes(settings: Settings, resolved: ResolvedSettings) -> Iterator[ConfigChange]:
    """Yield changes that save memory and give another loss curve."""
    config = settings.config
    if resolved.split.precision == "fp32":
        key = "engine.precision=bf16" if settings.deepspeed_file is None else "ds.bf16.enabled=true"
        yield ConfigChange("changes the loss curve: bf16", OTHER_CURVE, (key,))
    if (tokens := config.data.tokens_per_row) is not None and tokens > 1:
        name = f"changes the loss curve: rows have {tokens} tokens now"
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
    """Return the changes that the settings accept, with their gain in memory and cost in time.

    Args:
        settings: Settings of the run.
        now: Forecast of the run with these settings.
        forecast: Forecasts a run with changed settings. It raises a PipelineError if they cannot be run.
    """
    found = []
    for change in list_candidates(settings, now.resolved, now.hardware.device):
        with suppress(PipelineError):
            after = forecast(settings.with_arguments(change.overrides))
            slower = after.time.seconds / now.time.seconds if after.time and now.time else None
            found.append(replace(change, gain=now.peak - after.peak, slower=slower, fits=after.fits))
    return found


def sort_by_memory_gain(found: list[ConfigChange], now: Forecast, missing: int = 0) -> list[ConfigChange]:
    """Return the changes that save memory, the most useful first.

    Changes that are enough by themselves come first, sorted by time; then the others, sorted by gain. In both
    groups, changes whose time is not known come later, and those that give another loss curve last.

    Args:
        found: Changes with gain and cost.
        now: Forecast of the run without them.
        missing: Least number of bytes that a change must save to be enough, whatever the formulas say.
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
    """Reason for which the next larger run is not possible."""


def suggest_split(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the first split of LADDER that fits, with the largest micro-batch that divides the global batch.

    The order is fixed and the search stops at the first that fits, so that the suggestion is the simplest
    split and not the fastest.

    Raises:
        ConfigError: No split fits, or the memory of the model is not known.
    """
    refused = ""
    lacking = ""
    is_known = False
    own = tuple(each for each in settings.overrides if not each.startswith("ds."))
    stated = _keep_stated(settings)
    settings = replace(settings, overrides=own)
    for file, cut, recomputation in LADDER:
        words = ("--deepspeed", file, *cut, *stated, *_override_recomputation(settings, recomputation))
        best = None
        for batch in _list_batches(settings, place, int(cut[0].rpartition("=")[2]) if cut else 1):
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
        why = refused or (
            f"the memory of {model.name} on {place} is not known; "
            "plan without --suggest to see the known parts"
        )
        raise ConfigError(f"--suggest: {why}")
    raise ConfigError(
        f"--suggest: no split of {model.name} ({model.numel:,} parameters) fits on {place} (the last one "
        f"lacks {lacking}); take more GPUs, more memory, an adapter (adapter.kind=lora), or a shorter "
        "data.sequence_length"
    )


def _keep_stated(settings: Settings) -> Words:
    """Return overrides for what the user's JSON states in place of the recipe.

    Another JSON replaces it, and these settings would be lost.
    """
    tree = settings.config.model_dump(mode="json")
    keys = dict.fromkeys(key for key in settings.adopted.values() if not key.startswith("batch."))
    return tuple(f"{key}={json.dumps(get_dotted(tree, key))}" for key in keys)


def _override_recomputation(settings: Settings, mode: str) -> Words:
    model = settings.config.model.language_model
    if model is None:
        return ()
    words: Words = (f"model.activation_checkpointing={mode}",)
    if model.activation_offload:
        words += ("model.activation_offload=false",)
    return words


def _list_batches(settings: Settings, place: PlannedHardware, cut: int) -> Iterator[Words]:
    """Yield overrides that divide the recipe's global batch into micro-batches, from small to large.

    `cut` is the number of ranks that share a row.
    """
    batch = settings.config.batch
    rows = batch.micro_batch_size if isinstance(batch.micro_batch_size, int) else 1
    total = batch.global_batch_size or rows * (batch.gradient_accumulation_steps or 1) * place.ranks
    if place.ranks % cut or total % (place.ranks // cut):
        return
    samples = total // (place.ranks // cut)
    for size in range(1, min(samples, MOST_SUGGESTED_ROWS) + 1):
        if samples % size == 0:
            yield _override_batch(size, samples // size)


STEP = 128
"""Number of tokens by which the search lengthens a row."""
MOST_TOKENS = 2**26
MOST_ROWS = 2**14
MOST_LAYERS = 2**10
MOST_SUGGESTED_ROWS = 64
NO_MORE = "more is not tried"


def find_longest_sequence(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the longest rows that fit, with a micro-batch of one.

    Raises:
        ConfigError: It is not known how this model's memory grows with the length of a row.
    """
    most = MOST_TOKENS
    stops = NO_MORE
    section = settings.config.model
    if model.dimensions is None:
        raise ConfigError(
            f"--longest: the memory of a row of {model.name} is known only for the recipe's length; "
            "plan without --longest"
        )
    if (given := section.pretrained_from) is not None:
        stated = standardize_keys(model.dimensions.family, read_pretrained_config(given))
        if (positions := stated.get("max_position_embeddings") or most) < most:
            most = positions
            stops = f"{given} has no more positions"
    stated_positions = section.language_model.max_sequence_length if section.language_model else None

    def at(number: int) -> Words:
        tokens = min(number * STEP, most)
        words = [f"data.sequence_length={tokens}"]
        if stated_positions is not None:
            words.append(f"model.max_sequence_length={max(tokens, stated_positions)}")
        return (*words, *_override_one_batch(settings, 1))

    return _bisect(settings, model, place, at, most=-(-most // STEP), stops=stops)


def find_largest_micro_batch(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the largest micro-batch that fits, with one micro-batch in a step, whatever the global batch."""
    return _bisect(settings, model, place, lambda rows: _override_one_batch(settings, rows), MOST_ROWS)


def find_largest_model(settings: Settings, model: ModelSpec, place: PlannedHardware) -> SearchResult:
    """Find the largest number of blocks of this width that fits, with a micro-batch of one row."""
    if model.dimensions is None:
        return SearchResult(None, (), f"the blocks of {model.name} are not known")
    if settings.config.model.pretrained_from is not None:
        return SearchResult(None, (), "pretrained weights have one size")
    batch = _override_one_batch(settings, 1)
    return _bisect(settings, model, place, lambda layers: (f"model.num_layers={layers}", *batch), MOST_LAYERS)


def _override_one_batch(settings: Settings, rows: int) -> Words:
    """Return overrides for a step of one micro-batch with `rows` rows, whatever recipe and JSON state."""
    words = _override_batch(rows, 1)
    if settings.config.batch.global_batch_size is not None:
        words += ("batch.global_batch_size=null",)
    of_json = [key for key, ours in settings.adopted.items() if ours.startswith("batch.")]
    return (*words, *(f"ds.{key}=auto" for key in of_json))


def _bisect(
    settings: Settings,
    model: ModelSpec,
    place: PlannedHardware,
    at: Callable[[int], Words],
    most: int,
    stops: str = NO_MORE,
) -> SearchResult:
    """Find the largest number whose run fits, by bisection: if a run fits, all smaller ones do.

    Args:
        settings: Settings of the run.
        model: Model to use if it cannot be read from the settings; the overrides do not change it then.
        place: Hardware of the plan.
        at: Returns the overrides for a number.
        most: Largest number to try.
        stops: Reason for which no more than `most` is tried.
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
                f"--longest, --largest: the memory of activations is not known for {model.name} with these "
                "settings; plan without the option to see the known parts"
            )
        return not found[number].fits

    best = bisect_left(range(1, most + 1), True, key=is_too_large)
    if best == most:
        return SearchResult(found[best], at(best), stops)
    return SearchResult(found.get(best), at(best) if best else (), refused.get(best + 1, "memory"))
