"""Proposes changes of a run for memory or time, and the limits it could go to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from pipeline.config.batch_plan import BatchPlan
from pipeline.config.loading import get_dotted
from pipeline.config.settings import Resolved, Settings
from pipeline.errors import ConfigError, PipelineError
from pipeline.planner.forecast import Change, Forecast, forecast, ranked, word
from pipeline.planner.model import Dimensions, Model
from pipeline.planner.place import History, Place
from pipeline.planner.shapes import families, model_of, read_config, shaping, standard_words

STEP = 128
"""Tokens by which a row grows."""
MOST_TOKENS, MOST_ROWS = 2**26, 2**14
MOST_HEADS, MOST_WIDTH, MOST_LAYERS = 1024, 2**17, 2**10
"""Of a model that is tried: key-value heads, hidden size, blocks."""
NO_MORE = "more is not tried"

Words: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Limit:
    """How far it goes."""

    found: Forecast | None
    """None: not even the smallest fits."""
    words: Words
    """Behind the command; they make the run that was planned."""
    stops: str = ""
    """What ends it in place of memory; empty: memory does."""


def longest_sequence(settings: Settings, model: Model, place: Place, history: History | None = None) -> Limit:
    """With rows as long as fit, a micro-batch of one. Pretrained weights have a number of positions, which is
    not exceeded.

    Raises:
        ConfigError: how memory grows with a row is not known of this model.
    """
    most, stops = MOST_TOKENS, NO_MORE
    section = settings.config.model
    language = section.language_model
    if model.dimensions is None:
        raise ConfigError(
            f"--longest: what a row of {model.name} takes is known of the recipe's length alone"
        )
    if (given := section.pretrained_from) is not None:
        stated = standard_words(model.dimensions.family, read_config(given))
        if (positions := stated.get("max_position_embeddings") or most) < most:
            most, stops = positions, f"{given} has no more positions"
    stated_positions = language.max_sequence_length if language is not None else None

    def at(number: int) -> Words:
        tokens = min(number * STEP, most)
        words = [word("data.sequence_length", tokens)]
        if stated_positions is not None:
            words.append(word("model.max_sequence_length", max(tokens, stated_positions)))
        return (*words, *_batch(settings, 1))

    return _furthest(settings, model, place=place, history=history, at=at, most=-(-most // STEP), stops=stops)


def largest_micro_batch(
    settings: Settings, model: Model, place: Place, history: History | None = None
) -> Limit:
    """With as many rows in a micro-batch as fit, one micro-batch a step, whatever the global batch."""
    return _furthest(
        settings, model, place=place, history=history, at=lambda rows: _batch(settings, rows), most=MOST_ROWS
    )


def largest_model(settings: Settings, model: Model, place: Place, history: History | None = None) -> Limit:
    """Of the same family and proportions: width and depth grow together, a micro-batch is one row."""
    dimensions = model.dimensions
    if dimensions is None:
        return Limit(None, (), f"how {model.name} would grow is not known")
    split = settings.followed_by(_batch(settings, 1)).resolve(place.ranks, place.device).split
    step = split.tensor_parallel * split.sequence_parallel  # ranks that share a row divide its heads
    widest = dimensions.key_value_heads * MOST_WIDTH // dimensions.hidden
    deepest = dimensions.key_value_heads * MOST_LAYERS // dimensions.layers
    anew = _anew(settings, dimensions)
    language = settings.config.model.language_model
    # A config without it has as many as heads; some families have no such word.
    says_key_value_heads = (
        dimensions.key_value_heads != dimensions.heads
        or "num_key_value_heads" in families()[dimensions.family]["defaults"]
        or (language is not None and language.num_key_value_heads is not None)
    )

    def at(number: int) -> Words:
        sizes = _sizes(dimensions, number * step)
        if not says_key_value_heads:
            del sizes["num_key_value_heads"]
        return (*anew, *(word(f"model.{key}", size) for key, size in sizes.items()), *_batch(settings, 1))

    most = max(1, min(MOST_HEADS, widest, deepest) // step)
    return _furthest(settings, model, place=place, history=history, at=at, most=most)


def last_fitting(fits: Callable[[int], bool], most: int) -> int:
    """The largest whole number up to `most` that fits, of those below which all fit; 0: none does."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _furthest(
    settings: Settings,
    model: Model,
    place: Place,
    history: History | None,
    at: Callable[[int], Words],
    most: int,
    stops: str = NO_MORE,
) -> Limit:
    """
    Args:
        at: Words for the command line, by a number that grows.
        model: Where it has to be built to be known, and these words change nothing of it.
        stops: Why no more than `most` is tried.
    """
    found: dict[int, Forecast] = {}
    refused: dict[int, str] = {}

    def fits(number: int) -> bool:
        try:
            changed = settings.followed_by(at(number))
            found[number] = forecast(changed, model_of(changed.config) or model, place, history)
        except PipelineError as error:
            refused[number] = str(error)
            return False
        if not found[number].memory.is_complete:
            raise ConfigError(
                f"--longest, --largest: what activations take is not known of {model.name}, computed so; "
                "without the option the plan says what is known"
            )
        return bool(found[number].fits)

    best = last_fitting(fits, most)
    if best == most:
        return Limit(found[best], at(best), stops)
    return Limit(found.get(best), at(best) if best else (), refused.get(best + 1, ""))


def _batch(settings: Settings, rows: int) -> Words:
    """One micro-batch of so many rows, whatever recipe and JSON say of a batch."""
    words = [word("batch.micro_batch_size", rows), word("batch.gradient_accumulation_steps", 1)]
    if settings.config.batch.global_batch_size is not None:
        words.append(word("batch.global_batch_size", None))
    of_json = [key for key, ours in settings.adopted.items() if ours.startswith("batch.")]
    return (*words, *(word(f"ds.{key}", "auto") for key in of_json))


def _sizes(dimensions: Dimensions, key_value_heads: int) -> dict[str, int]:
    """Of a model with so many, all else in proportion."""
    heads = dimensions.heads // dimensions.key_value_heads * key_value_heads
    hidden = heads * dimensions.hidden // dimensions.heads
    ratio = hidden / dimensions.hidden
    return {
        "hidden_size": hidden,
        "intermediate_size": max(64, round(dimensions.intermediate * ratio / 64) * 64),
        "num_layers": max(1, round(dimensions.layers * ratio)),
        "num_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


def _anew(settings: Settings, dimensions: Dimensions) -> Words:
    """In place of weights that are there, and have one size: a new model with their vocabulary."""
    config, words = settings.config, []
    if config.model.weights is not None:
        words.append(word("model.weights", None))
    if config.adapter is not None and config.adapter.weights is not None:
        words.append(word("adapter.weights", None))
    if (given := config.model.pretrained_from) is None:
        return tuple(words)
    words += [
        word("model.pretrained", None),
        word("model.architecture", dimensions.family),
        word("model.vocab_size", dimensions.vocabulary),
    ]
    if further := shaping(dimensions.family, read_config(given)):
        words.append(word("model.extra", further))
    if (documents := config.data.documents) is not None:
        words.append(word("data.tokenizer.pretrained", documents.tokenizer.pretrained))
    return tuple(words)


DEGREES = (2, 4, 8)
FASTER, LEAST = 0.98, 0.01
"""Of the time of a step, and of the memory: what counts as a change."""


def proposals(settings: Settings, resolved: Resolved) -> Iterator[Change]:
    """Everything that could be changed, not yet whether it can, nor what it is worth."""
    yield from _batches(resolved.plan)
    yield from _recomputation(settings)
    yield from _states(settings, resolved)
    yield from _splits(settings, resolved)
    yield from _other_curves(settings)


def _change(name: str, words: tuple[str, ...], why: str = "") -> Change:
    """Not yet tried.

    Args:
        why: The loss follows another curve; empty: the same one.
    """
    return Change(name=name, overrides=words, gain=None, slower=None, why=why, other_curve=bool(why))


def _batches(plan: BatchPlan) -> Iterator[Change]:
    size, steps = plan.micro_batch_size, plan.gradient_accumulation_steps
    smaller = [size // part for part in (2, 4, 8) if size % part == 0]
    if size > 1 and not smaller:
        smaller = [1]
    for micro in dict.fromkeys([*smaller, 1] if size > 1 else []):
        words = _batch_words(micro, steps * size // micro)
        yield _change(f"micro-batch {size} -> {micro}, accumulated {size // micro} times as often", words)
    for factor in (2, 4):
        if steps % factor == 0:
            words = _batch_words(size * factor, steps // factor)
            yield _change(f"micro-batch {size} -> {size * factor}, accumulated less often", words)


def _batch_words(micro: int, steps: int) -> tuple[str, ...]:
    return (f"batch.micro_batch_size={micro}", f"batch.gradient_accumulation_steps={steps}")


def _recomputation(settings: Settings) -> Iterator[Change]:
    model = settings.config.model.language_model
    if model is None:
        return
    now = model.activation_checkpointing
    if now == "none":
        yield _change(
            "recompute blocks but for their products", ("model.activation_checkpointing=selective",)
        )
    if now != "full":
        yield _change("recompute blocks", ("model.activation_checkpointing=full",))
    elif model.activation_budget_gib is not None:
        yield _change("recompute all blocks", ("model.activation_budget_gib=null",))
    if not model.activation_offload:
        words: tuple[str, ...] = ("model.activation_checkpointing=full", "model.activation_offload=true")
        yield _change("keep the inputs of blocks in host memory", words if now != "full" else words[1:])
    if now != "none":
        words = ("model.activation_checkpointing=none",)
        if model.activation_offload:
            words = (*words, "model.activation_offload=false")
        if model.activation_budget_gib is not None:
            words = (*words, "model.activation_budget_gib=null")
        yield _change("keep activations, recompute nothing", words)


def _states(settings: Settings, resolved: Resolved) -> Iterator[Change]:
    """Where weights, gradients and optimizer states are, and in what precision."""
    if settings.deepspeed is None:
        if settings.config.engine.precision == "fp32":
            yield _change("compute in bf16", _engine(settings, "bf16.enabled=true", "precision=bf16"))
        for stage in (1, 2, 3):
            yield _change(f"ZeRO {stage}", ("--deepspeed", f"zero{stage}"))
        for stage in (2, 3):
            what = "all" if stage == 3 else "optimizer"
            yield _change(f"ZeRO {stage}, {what} on the host", ("--deepspeed", f"zero{stage}_offload"))
        return
    now, json = resolved.split.zero_stage, settings.deepspeed
    if resolved.split.pipeline_stages == 1:
        for stage in range(4):
            if stage != now:
                yield _change(f"ZeRO {now} -> {stage}", (f"ds.zero_optimization.stage={stage}",))
    elif now == 0:
        yield _change("ZeRO 0 -> 1", ("ds.zero_optimization.stage=1",))
    key = "ds.zero_optimization.offload_{}.device={}"
    optimizer, param = (
        get_dotted(json, f"zero_optimization.offload_{which}.device") for which in ("optimizer", "param")
    )
    words: tuple[str, ...]
    at = () if now else ("ds.zero_optimization.stage=2",)
    if optimizer in (None, "none"):
        yield _change("optimizer states on the host", (*at, key.format("optimizer", "cpu")))
    if param in (None, "none"):
        words = ("ds.zero_optimization.stage=3",) if now < 3 else ()
        words += (key.format("optimizer", "cpu"),) if optimizer in (None, "none") else ()
        yield _change("ZeRO 3, weights and states on the host", (*words, key.format("param", "cpu")))
    if optimizer not in (None, "none"):
        words = tuple(
            key.format(which, "none")
            for which, where in (("optimizer", optimizer), ("param", param))
            if where not in (None, "none")
        )
        yield _change("nothing on the host", words)
    if resolved.split.precision == "bf16" and now and not get_dotted(json, "bf16.bf16_optimizer_states"):
        words = ("ds.bf16.bf16_master_weights_and_grads=true", "ds.bf16.bf16_optimizer_states=true")
        yield _change("optimizer states in bf16", words, why="the loss may follow another curve")
    if resolved.split.precision == "fp32":
        yield _change("compute in bf16", ("ds.bf16.enabled=true",), why="the curve of bf16")


def _engine(settings: Settings, in_file: str, in_recipe: str) -> tuple[str, ...]:
    """A file with a torch section says it in DeepSpeed's words."""
    return (f"engine.{in_recipe}",) if settings.split is None else (f"ds.{in_file}",)


def _splits(settings: Settings, resolved: Resolved) -> Iterator[Change]:
    if settings.deepspeed is None or settings.config.model.language_model is None:
        return
    split = resolved.split
    keys = {
        "sequence parallelism": ("ds.sequence_parallel_size", split.sequence_parallel),
        "tensor parallelism": ("ds.tensor_parallel.autotp_size", split.tensor_parallel),
        "pipeline stages": ("ds.pipeline.stages", split.pipeline_stages),
    }
    total = resolved.plan.global_batch_size
    micro = resolved.plan.micro_batch_size
    for name, (key, degree) in keys.items():
        for wanted in (1, *DEGREES):
            ranks = split.dp_world_size * degree
            if wanted == degree or ranks % wanted or total % (ranks // wanted):
                continue
            each = total // (ranks // wanted)
            if each % micro == 0:
                yield _change(
                    f"{name} {degree} -> {wanted}", (f"{key}={wanted}", *_batch_words(micro, each // micro))
                )


def _other_curves(settings: Settings) -> Iterator[Change]:
    config = settings.config
    tokens = config.data.tokens_per_row
    if tokens is not None and tokens >= 512:
        length = tokens // 2
        yield _change("half the sequence length", (f"data.sequence_length={length}",), why="another curve")
    if config.model.language_model is None:
        return
    if config.adapter is None and config.model.pretrained_from is not None:
        yield _change(
            "train an adapter", ("adapter.kind=lora",), why="another curve, and another learning rate"
        )
    elif config.adapter is not None and config.adapter.quantize is None:
        yield _change("hold the base in 4 bits", ("adapter.quantize=nf4",), why="the curve of a rounded base")


def helpful(
    settings: Settings, now: Forecast, forecast: Callable[[Settings], Forecast], most: int = 12
) -> list[Change]:
    """The changes that can be made and help. Where the run does not fit: those first that are enough by
    themselves, the fastest at the front, then by what they gain. Where it fits: those that are faster.

    Args:
        forecast: Of changed settings; a PipelineError: they cannot be run.
    """
    found = list(_tried(settings, now, forecast))
    if now.fits is None:
        return []
    if now.fits:
        faster = [
            change
            for change, after in found
            if after.fits
            and _slower(change) < FASTER
            and not change.other_curve
            and (now.place.device.kind == "cuda" or not _offloads(change))
        ]
        return sorted(faster, key=_slower)[:most]
    enough = {change for change, after in found if after.fits}
    return ranked((change for change, _ in _less(found, now)), enough.__contains__)[:most]


def smaller(settings: Settings, now: Forecast, forecast: Callable[[Settings], Forecast]) -> list[Change]:
    """Those that hold less, whether it was expected to fit or not, and follow the same curve."""
    return [each for each, _ in _less(_tried(settings, now, forecast), now) if not each.other_curve]


def _tried(
    settings: Settings, now: Forecast, forecast: Callable[[Settings], Forecast]
) -> Iterator[tuple[Change, Forecast]]:
    for change in proposals(settings, now.resolved):
        with suppress(PipelineError):
            after = forecast(settings.followed_by(change.overrides))
            slower = after.time.seconds / now.time.seconds if after.time and now.time else None
            yield replace(change, gain=now.peak - after.peak, slower=slower), after


def _offloads(change: Change) -> bool:
    """Whether it moves something to the host, which a CPU is itself."""
    return any("offload" in word and not word.endswith(("=none", "=false")) for word in change.overrides)


def _less(found: Iterable[tuple[Change, Forecast]], now: Forecast) -> list[tuple[Change, Forecast]]:
    return [pair for pair in found if (pair[0].gain or 0) > LEAST * now.peak]


def _slower(change: Change) -> float:
    return 1.0 if change.slower is None else change.slower
