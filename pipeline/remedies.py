"""What to change of a run that is out of memory: words to put behind its command, with what each gains.

By what was measured when it happened, unless the plan knows better. Only what the settings accept is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config.batch import BatchPlan
from pipeline.config.loading import get_dotted
from pipeline.config.settings import Resolved, Settings
from pipeline.config.split import Device
from pipeline.distributed.progress import LOADING, Phase
from pipeline.errors import PipelineError
from pipeline.planning.account import HeldMemory, Planned
from pipeline.planning.changes import Change, ranked

MOST = 3
ENOUGH, NOTHING = 10, 100
"""Parts of what was held: what gains less is not enough by itself, or not worth a word."""
# Measured of the shipped recipe, docs/how-to.md: what stays of activations where all blocks recompute, and
# how much longer a step takes.
KEPT_BY_RECOMPUTATION, SLOWER_BY_RECOMPUTATION = 1 / 11, 1.45
SLOWER_BY_ZERO3, SLOWER_BY_OFFLOAD = (
    1.1,
    1.5,
)  # where the network, or the processor's memory, is not the limit


class Shortage(NamedTuple):
    """Memory that was out."""

    kind: str
    """`cuda` or `cpu`: whose."""
    phase: Phase | None = None
    """Where in the run."""
    missing: int = 0
    """Bytes that were asked for and not there: the least that has to go."""
    allocated: int | None = None
    """Bytes, where the allocator said so; None: what is so now."""


class Remedies(NamedTuple):
    """What was done, and what takes less memory."""

    doing: str
    """` at micro_batch_size 8`; empty: nothing to say."""
    levers: list[str]
    """Most first."""
    held: str = ""
    """What was held by what."""
    planned: str = ""
    """What the plan had said."""


Remedying = Callable[[Shortage], Remedies]


@dataclass(frozen=True)
class Changing:
    """What the changes of a run depend on."""

    settings: Settings
    resolved: Resolved
    device: Device
    """That the ranks compute on."""
    ranks_here: int
    """On this machine."""
    shortage: Shortage
    held: HeldMemory | None

    def all(self) -> Iterator[Change]:
        """Those that there are, each accepted by the settings."""
        for change in (
            *self._of_batches(),
            *self._of_states(),
            *self._of_the_host(),
            *self._of_rows(),
        ):
            if not change.overrides or self._is_accepted(change.overrides):
                yield change

    def _is_accepted(self, words: tuple[str, ...]) -> bool:
        with suppress(PipelineError, OSError):
            world_size = self.resolved.split.world_size
            self.settings.followed_by(words).resolve(world_size, self.device)
            return True
        return False

    def _share(self, share: float) -> int | None:
        """Of the activations, and of what was refused, which is one where a batch is computed."""
        if self.held is None:
            return None
        is_one = self.shortage.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION)
        return int(share * (self.held.activations + is_one * self.shortage.missing))

    def _of_batches(self) -> Iterator[Change]:
        """What makes activations smaller."""
        if self.shortage.phase in LOADING or self.is_beside_the_device:
            return
        if (smaller := smaller_parts(self.resolved.plan)) is not None:
            words, parts = smaller
            why = f"the same step in {parts} times as many parts"
            yield Change("smaller micro-batch", words, self._share(1 - 1 / parts), None, why)
        model = self.settings.config.model.language_model
        if model is not None and model.activation_checkpointing != "full":
            why, words = "blocks are computed again in the backward", ("model.activation_checkpointing=full",)
            gain = self._share(1 - KEPT_BY_RECOMPUTATION)
            yield Change("recomputation", words, gain, SLOWER_BY_RECOMPUTATION, why)

    def _of_rows(self) -> Iterator[Change]:
        length = self.settings.config.data.tokens_per_row
        if length and length > 1 and self.shortage.phase not in LOADING and not self.is_beside_the_device:
            why = f"now {length}: other rows, another curve"
            yield Change("shorter rows", (f"data.sequence_length={length // 2}",), None, None, why, True)

    def _of_states(self) -> Iterator[Change]:
        """What divides weights, gradients and optimizer, or moves them to the host."""
        split, states = self.resolved.split, None if self.held is None else self.held.states
        ranks, stage = split.dp_world_size * split.sequence_parallel, split.zero_stage
        has_json = self.settings.deepspeed is not None
        if ranks > 1 and stage < 3 and split.pipeline_stages == 1 and not self.is_beside_the_device:
            gain = None
            if states is not None:
                whole = (states.parameters, states.gradients * (stage < 2), states.optimizer * (stage < 1))
                gain = int(sum(whole) * (1 - 1 / ranks))
            words = ("ds.zero_optimization.stage=3",) if has_json else ("--deepspeed", "zero3")
            why = f"weights, gradients and optimizer divided over the {ranks} ranks"
            yield Change("ZeRO 3", words, gain, SLOWER_BY_ZERO3, why)
        offloads = get_dotted(self.settings.deepspeed or {}, "zero_optimization.offload_optimizer.device")
        if self.shortage.kind == "cuda" and offloads in (None, "none"):
            words = ("--deepspeed", "zero3_offload")
            if has_json and stage:
                words = ("ds.zero_optimization.offload_optimizer.device=cpu",)
            gain = None if states is None else states.optimizer
            yield Change("offload", words, gain, SLOWER_BY_OFFLOAD, "the optimizer in the host's memory")

    def _of_the_host(self) -> Iterator[Change]:
        """What makes less of the machine's memory."""
        if self.shortage.kind != "cpu":
            return
        config, json = self.settings.config, self.settings.deepspeed or {}
        if config.loader.num_workers:
            why = f"now {config.loader.num_workers} processes a rank"
            yield Change("fewer workers", ("loader.num_workers=0",), None, None, why)
        for what in ("optimizer", "param"):
            key = f"zero_optimization.offload_{what}.device"
            if self.device.kind == "cuda" and get_dotted(json, key) == "cpu":
                yield Change("no offload", (f"ds.{key}=none",), None, None, "on the GPUs again")
        if self.ranks_here > 1:
            half = self.ranks_here // 2
            name = f"{half} of {self.ranks_here} ranks on this machine"
            yield Change(name, (), None, None, f"--nproc-per-node {half}, of deepspeed --num_gpus {half}")

    @property
    def is_beside_the_device(self) -> bool:
        """Whether it is the host's memory beside a GPU's."""
        return self.device.kind == "cuda" and self.shortage.kind == "cpu"


def smaller_parts(plan: BatchPlan) -> tuple[tuple[str, ...], int] | None:
    """The same step in smaller parts: half, or the next part that divides; and how many parts of one."""
    if plan.is_open:
        return None
    size = plan.micro_batch_size
    parts = next((n for n in range(2, size + 1) if size % n == 0), None)
    if parts is None:
        return None
    steps = plan.gradient_accumulation_steps * parts
    return (f"batch.micro_batch_size={size // parts}", f"batch.gradient_accumulation_steps={steps}"), parts


def changes_of(changing: Changing, planned: Planned | None) -> list[str]:
    """The first three, and what is left where there are none: by what was measured, and what a plan knows
    besides.
    """
    held = 0 if changing.held is None else changing.held.total
    # What was refused is only the first of what the step still needs.
    missing = max(changing.shortage.missing, held // ENOUGH)
    some = [each for each in changing.all() if each.gain is None or each.gain > held // NOTHING]
    if planned is not None and not changing.is_beside_the_device:
        missing = max(missing, planned.peak - planned.there)
        known = {each.overrides for each in some}
        some += [each for each in planned.changes if each.overrides not in known]
    told = [str(change) for change in ranked(some, lambda each: (each.gain or 0) >= missing)[:MOST]]
    return told or [*elsewhere(changing.shortage.kind), "a smaller model"]


def of_evaluation(micro_batch_size: int, sequence_length: int | None, shortage: Shortage) -> Remedies:
    """For a model that is whole in this process, and evaluated."""
    smaller = (
        [f"batch.micro_batch_size={micro_batch_size // 2} (now {micro_batch_size}), which changes no number"]
        if micro_batch_size > 1
        else []
    )
    if sequence_length:
        smaller.append(f"a shorter data.sequence_length (now {sequence_length})")
    return Remedies(f" at micro_batch_size {micro_batch_size}", [*smaller, *elsewhere(shortage.kind)])


def of_generation(max_new_tokens: int, shortage: Shortage) -> Remedies:
    """For a model that writes after a prompt."""
    fewer = f"fewer tokens (max_new_tokens, now {max_new_tokens})"
    return Remedies("", [fewer, "a shorter prompt", *elsewhere(shortage.kind)])


def of_files(shortage: Shortage) -> Remedies:
    """For what reads, converts or writes files and loads no model."""
    return Remedies("", elsewhere(shortage.kind))


def elsewhere(kind: str) -> list[str]:
    """What is not the run's own."""
    if kind == "cuda":
        return [
            "a GPU that nothing else uses (nvidia-smi), or a larger one",
            "CUDA_VISIBLE_DEVICES= (empty), which leaves it to the CPU",
        ]
    look = "ps -eo rss,user,comm --sort=-rss | head"
    return [f"an end to what else takes memory here ({look})", "a higher limit"]
