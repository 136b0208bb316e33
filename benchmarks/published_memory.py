"""What the planner's formulas say of memory that other trainers published, beside what was published.

Rows: published_memory.jsonl, one JSON object a line. Models: published_models.json, family and config.
    set, source   calibration or test; address
    stack         the trainer, for what published_terms.py adds
    train         full or lora; of an adapter: rank, targets, base (bf16, fp32, nf4, nf4-dq or gptq), and
                  upcast: norms, embedding and output layer of its base are in fp32
    precision     of what is trained: a name in PRECISIONS; optimizer: foreach, fused, 8bit or host (states
                  are there); optimizer_in_backward: no gradient waits for a step
    data          ranks of FSDP, its first version or fsdp: 2; gathers: step where it keeps weights and
                  gradients whole until then; copies: ranks of DDP
    tensor        ranks of tensor parallelism; sequence_parallel: rows are cut between its products, and the
                  loss is; gathers_logits: of all words on each rank; sequence: ranks of context parallelism
    stages        ranks of a pipeline, with micro_batches a step; optimizer_data: ranks of ZeRO 1
    rows, length  of a rank's micro-batch; recompute: none or full; keeps: half of products, beside that
    loss          a name in LOGITS; kernels: fused (RMSNorm, SwiGLU) or norms; compiled: blocks are;
                  attention: flash, or sdpa, which copies keys for each head; offload: parameters, activations
    card_gib      that a process can have of the card
    published     {allocated, active, reserved or nvidia_smi: GiB}; or ran: true; or oom: true
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from published_terms import LOGITS, PLAIN, Row, added, model_of, states_of  # noqa: E402

from pipeline.config.model_schema import AdapterConfig  # noqa: E402
from pipeline.files import GIB  # noqa: E402
from pipeline.planner.activations import Recompute, Work, low_rank  # noqa: E402
from pipeline.planner.memory import (  # noqa: E402
    CUT_FRAGMENTS,
    CUT_SHARE,
    FRAGMENTS,
    NCCL,
    PROCESS,
    RESERVED,
    peak_by_phase,
)
from pipeline.planner.model import Dimensions, Model  # noqa: E402
from pipeline.planner.rank import stage_of  # noqa: E402

ROWS = HERE / "published_memory.jsonl"

# Fitted to the calibration rows of fms-acceleration, which have what was allocated and what nvidia-smi said.
CACHED_BY_STREAMS = 0.05
"""Of activations, more than RESERVED beside FSDP1's streams, which keep as much as is gathered, too."""
CACHED_BY_ALL = (0.40, 0.08)
"""FSDP1 that trains all weights: of states, and more of activations."""
FRAGMENTS_BY_STREAMS = 0.075
"""Of activations, more than FRAGMENTS beside them: what nothing fits into even when memory is short."""


def rows(path: Path = ROWS) -> list[Row]:
    """One a line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_terms(row: Row) -> Row:
    """As one would write it who knows the configuration, but nothing of the trainer."""
    kept = {k: v for k, v in row.items() if k not in ("keeps", "gathers", "gathers_logits", "fsdp")}
    return kept | {"stack": "", "loss": PLAIN.get(row["loss"], row["loss"])}


def work_of(row: Row, own: Model, dimensions: Dimensions, stage: int = 0) -> Work:
    """The planner's; of a pipeline that of a stage, which has equally many blocks, a remainder left out."""
    # Adapters in fp32 keep copies of their inputs, LitGPT's norms theirs: as much as where all is trained.
    as_whole = row["train"] == "full" or row["precision"] != "bf16" or row["stack"] == "litgpt"
    cuts_rows = bool(row.get("sequence_parallel"))  # a rank then has its share of everything
    tensor = row.get("tensor", 1)
    autocasts = row["precision"] == "mixed" and row.get("data", 1) == 1
    return Work(
        family={"gemma": "llama"}.get(dimensions.family, dimensions.family),
        device="cuda",
        precision="fp32" if row["precision"] == "fp32" else "autocast" if autocasts else "half",
        rows=row["rows"],
        length=row["length"],
        blocks=dimensions.layers // row.get("stages", 1),
        apart=row["attention"] == "flash",
        recompute=Recompute(row["recompute"], offload="activations" in row.get("offload", "")),
        grouped=dimensions.key_value_heads != dimensions.heads,
        loss="scores",  # nothing: the loss is the trainer's
        tensor=1 if cuts_rows else tensor,
        sequence=row.get("sequence", 1) * (tensor if cuts_rows else 1),
        stages=row.get("stages", 1),
        stage=stage,
        micro_batches=row.get("micro_batches", 1),
        adapter=None if as_whole else low_rank(own, AdapterConfig()),
    )


def predicted(row: Row) -> dict[str, float]:
    """Bytes of tensors by phase, of the first or last stage.

    Raises:
        LookupError: nobody traced the family's blocks computing so, and states alone would fit.
    """
    ends = {0, row.get("stages", 1) - 1}
    return max((_predicted(row, stage) for stage in sorted(ends)), key=lambda phases: max(phases.values()))


def _predicted(row: Row, stage: int) -> dict[str, float]:
    model, dimensions, counts = model_of(row)
    states, buffers = states_of(row, counts)
    if (stages := row.get("stages", 1)) > 1:
        model = stage_of(model, stages, "uniform", stage)
    work = work_of(row, model, dimensions, stage)
    buffers = replace(buffers, keeps_gradients=work.micro_batches > 1)
    phases = dict(peak_by_phase(work, model, states, buffers))
    if "forward" not in phases:
        if row.get("oom") and phases["step"] > row["card_gib"] * GIB:
            return phases
        raise LookupError(f"{row['model']}: activations are not known")
    for phase, more in added(row, work, dimensions).items():
        if phase in phases:
            phases[phase] += more
    if not work.is_last:
        return phases
    kind, words, tokens = LOGITS[row["loss"]], dimensions.vocabulary // work.tensor, work.tokens
    if row.get("gathers_logits"):
        words, tokens = dimensions.vocabulary, row["rows"] * row["length"]
    phases["loss"] += tokens * (words * kind.most + dimensions.hidden * kind.hidden)
    phases["loss"] += words * dimensions.hidden * kind.gradient if row["train"] == "full" else 0.0
    return phases


@dataclass(frozen=True)
class Said:
    """Bytes, by the way that they are counted."""

    allocated: float
    reserved: float
    nvidia_smi: float
    needed: float
    """Of the card, for the run not to run out of it."""

    @property
    def active(self) -> float:
        return self.allocated


def said(row: Row) -> Said:
    """What the formulas say of a row.

    Raises:
        LookupError: see `predicted`.
    """
    phases, (_, dimensions, counts) = predicted(row), model_of(row)
    states, buffers = states_of(row, counts)
    allocated = max(phases.values())
    rest = max((size for phase, size in phases.items() if phase != "step"), default=0.0)
    static = states.device.weights + states.device.masters + states.device.moments
    activations = max(0.0, rest - static)
    ranks = max(row.get(key, 1) for key in ("data", "tensor", "copies", "sequence"))
    streams = row.get("data", 1) > 1 and row.get("fsdp", 1) == 1
    cached = RESERVED * activations + _cached_logits(row, phases, dimensions)
    if streams:
        cached += buffers.forward + CACHED_BY_STREAMS * activations
        if row["train"] == "full":
            cached += CACHED_BY_ALL[0] * static + CACHED_BY_ALL[1] * activations
    context = PROCESS["cuda"] + (NCCL if ranks > 1 else 0.0)
    card = row["card_gib"] * GIB if row.get("card_gib") else float("inf")
    # Short of memory, the allocator gives back what it keeps.
    reserved = max(allocated, min(rest + cached, card - context))
    divided = row.get("tensor", 1) * row.get("stages", 1) > 1
    apart = activations * (CUT_FRAGMENTS if divided else FRAGMENTS + FRAGMENTS_BY_STREAMS * streams)
    needed = (max(allocated, rest + apart) + context) / (CUT_SHARE if divided else 1.0)
    return Said(allocated, reserved, reserved + context, needed)


def _cached_logits(row: Row, phases: dict[str, float], dimensions: Dimensions) -> float:
    blocks_reuse = row.get("data", 1) > 1 and phases.get("loss", 0.0) < 0.9 * max(phases.values())
    if row["train"] == "full" or blocks_reuse:
        return 0.0
    tokens = row["rows"] * row["length"] / row.get("sequence", 1) / row.get("tensor", 1)
    return LOGITS[row["loss"]].cached * tokens * dimensions.vocabulary


@dataclass(frozen=True)
class Compared:
    """A published number beside the formulas' for it."""

    row: Row
    counted: str
    published: float
    """GiB"""
    found: float

    @property
    def error(self) -> float:
        """A share of the published."""
        return self.found / self.published - 1


def compared(given: Iterable[Row]) -> Iterator[Compared]:
    """Rows of models whose blocks are known."""
    for row in given:
        try:
            found = said(row) if row.get("published") else None
        except LookupError:
            continue
        for counted, value in row.get("published", {}).items():
            yield Compared(row, counted, value, getattr(found, counted) / GIB)


def fits(row: Row) -> bool | None:
    """Whether the formulas say so; None: its card is not known, or its blocks are not."""
    try:
        return said(row).needed <= row["card_gib"] * GIB if row.get("card_gib") else None
    except LookupError:
        return None


def table(given: list[Row]) -> str:
    """Errors by trainer and way to count, and with that trainer's own terms left out."""
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in given:
        known, unknown = compared([row]), compared([without_terms(row)])
        for one, other in zip(known, unknown, strict=True):
            groups.setdefault((row["set"], row["stack"], one.counted), []).append((one.error, other.error))
    lines = ["| set | trainer | counted | rows | median | 90 % | worst | median without its terms |"]
    lines.append("|---|---|---|--:|--:|--:|--:|--:|")
    for (kind, stack, counted), errors in sorted(groups.items()):
        sizes, others = (sorted(abs(pair[i]) for pair in errors) for i in (0, 1))
        high = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        numbers = " | ".join(f"{value:.1%}" for value in (median(sizes), high, sizes[-1], median(others)))
        lines.append(f"| {kind} | {stack} | {counted} | {len(sizes)} | {numbers} |")
    return "\n".join(lines)


def figure(pairs: list[Compared], path: Path) -> None:
    """Predicted against published, both in GiB. The same input gives the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "memory", "svg.fonttype": "none", "font.size": 9})
    drawn, axis = plt.subplots(figsize=(5, 4.4))
    stacks = sorted({each.row["stack"] for each in pairs})
    for stack, marker in zip(stacks, "os^vD<>phX"[: len(stacks)], strict=True):
        own = [each for each in pairs if each.row["stack"] == stack]
        axis.plot(
            [each.published for each in own],
            [each.found for each in own],
            marker,
            markersize=3.5,
            markeredgewidth=0,
            alpha=0.7,
            label=f"{stack} ({len(own)})",
        )
    ends = [4, 110]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.fill_between(
        ends, [e * 0.95 for e in ends], [e * 1.05 for e in ends], color="black", alpha=0.12, lw=0
    )
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_locator(plt.FixedLocator([5, 10, 20, 40, 80]))
        each.set_minor_locator(plt.NullLocator())
        each.set_major_formatter("{x:.0f}")
    axis.set(xlabel="published, GiB", ylabel="predicted, GiB")
    axis.legend(frameon=False, loc="upper left")
    drawn.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", action="store_true", help="every number that was published")
    parser.add_argument("--rows", type=Path, default=ROWS, help="others, as the text above describes them")
    parser.add_argument("--figure", type=Path, help="writes the test rows as an SVG")
    given = parser.parse_args()
    everything = rows(given.rows)
    tests = [row for row in everything if row["set"] == "test"]
    pairs = list(compared(tests))
    if given.each:
        for each in compared(everything):
            row: dict[str, Any] = {
                k: v for k, v in each.row.items() if k not in ("source", "published", "targets")
            }
            print(f"{each.error:+7.1%} {each.found:6.1f} {each.published:6.1f} {each.counted} {row}")
    print(table(everything))
    print(f"test rows: median error {median(abs(each.error) for each in pairs):.1%} of {len(pairs)} numbers")
    for kind in ("calibration", "test"):
        own = [row for row in everything if row["set"] == kind and fits(row) is not None]
        out, ran = [fits(r) for r in own if r.get("oom")], [fits(r) for r in own if not r.get("oom")]
        print(f"{kind}: ran out of memory {len(out)}, said to fit {sum(map(bool, out))};", end=" ")
        print(f"ran {len(ran)}, said not to fit {ran.count(False)}")
    if given.figure:
        figure(pairs, given.figure)


if __name__ == "__main__":
    main()
