"""Everything of a run that could be done otherwise for memory or time, and which of it helps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from pipeline.config.batch import BatchPlan
from pipeline.config.loading import get_dotted
from pipeline.config.settings import Resolved, Settings
from pipeline.errors import PipelineError
from pipeline.planning.changes import Change, ranked
from pipeline.planning.forecast import Forecast

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
    return Change(name, words, None, None, why, bool(why))


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
