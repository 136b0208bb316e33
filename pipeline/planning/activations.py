"""What the blocks of a language model keep for backward, and need in forward and backward, in bytes.

By coefficients of products of sizes, one row a family and way to compute (activations.json, written by
benchmarks/activations.py from traced allocations). What a loss takes is loss.py's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pipeline.planning.chunks import QUERIES
from pipeline.planning.model import Dimensions
from pipeline.planning.work import Work

FILE = Path(__file__).with_name("activations.json")
# Products without a number of tokens: what of a block are its weights.
OF_WEIGHTS = ("DI", "DQ", "DK", "D", "I", "Q", "K", "EDI", "ED", "DR", "IR", "QR", "KR")
OF_TOKENS = ("ND", "NI", "NQ", "NK", "NH", "NG", "NW", "NE", "NA", "NR", "TW", "TD")
PAIRS = (*OF_TOKENS, "DI", "DQ", "DK", "ED", "DR", "IR", "QR", "KR")
# Families whose blocks compute as another's, as far as memory can tell.
ALIKE = {"mistral": "llama", "smollm3": "llama"}


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch and a block, on one rank."""

    rows: int
    length: int
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    experts: int = 0
    experts_per_token: int = 0
    rank: int = 0
    """Of an adapter."""


class Way(Protocol):
    """How a block is computed."""

    @property
    def family(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def selective(self) -> bool: ...
    @property
    def apart(self) -> bool: ...
    @property
    def compiled(self) -> bool: ...
    @property
    def grouped(self) -> bool: ...
    @property
    def adapted(self) -> bool: ...


def row_name(way: Way) -> str:
    """Of activations.json."""
    family = ALIKE.get(way.family, way.family)
    words = [word for word in ("selective", "apart", "compiled", "grouped", "adapted") if getattr(way, word)]
    return " ".join((family, way.device, way.precision, *words))


def terms(sizes: Sizes, tensor: int = 1, sequence: int = 1) -> dict[str, float]:
    """The products that bytes are sums of: N tokens, T of a row, D hidden, I intermediate, Q and K the width
    of queries and of keys, H heads, G of keys, W the width of one, E experts, A of a token's,
    R an adapter's rank.
    """
    n, t = sizes.rows * sizes.length / sequence, sizes.length
    d, i, h, w = sizes.hidden, sizes.intermediate / tensor, sizes.heads / tensor, sizes.head_dim
    g = sizes.key_value_heads / tensor
    e, a, r = sizes.experts, sizes.experts_per_token, sizes.rank
    of = {
        "N": n,
        "T": t,
        "D": d,
        "I": i,
        "Q": h * w,
        "K": g * w,
        "H": h,
        "G": g,
        "W": w,
        "E": e,
        "A": a,
        "R": r,
    }
    found = {"1": 1.0} | of
    for name in PAIRS:
        found[name] = of[name[0]] * of[name[1]]
    found |= {"NAD": n * a * d, "NAI": n * a * i, "EDI": e * d * i}
    found["NTH"] = n * h * min(t, QUERIES)
    return found


@dataclass(frozen=True)
class Block:
    """Bytes of one block."""

    kept: float
    """From its forward to the end of the model's forward."""
    kept_backward: float
    """From there to its backward: without what autocast's cache held."""
    forward: float
    """The most in its forward, over what there is at its beginning."""
    backward: float
    recomputes: bool = False


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch, of a rank's blocks and what stands before and behind them."""

    blocks: tuple[Block, ...]
    start: float
    """The most before the first block."""
    before: float
    """What is there when the first block begins."""
    end: float
    """The most behind the last block, over what is there at its end; without output layer and loss."""
    of_loss: float
    """What is there more when the loss begins its backward: normed hidden states, their gradient."""
    carried: float
    """What is there beside the blocks' own when a block begins its backward."""
    host: float = 0.0
    """Inputs of blocks that wait in host memory."""
    upper: str = ""
    """Why it is more than will be taken; empty: it is not."""


def activations_of(work: Work, dimensions: Dimensions) -> Activations | None:
    """Of compiled blocks without a row of their own what they take as they are written, which is more.

    Returns:
        None: nobody has traced a model of this family computing so.
    """
    found = _traced(work)
    if found is None:
        return None
    row = rows()[row_name(found)]
    sizes = Sizes(
        work.rows,
        work.length,
        dimensions.hidden,
        dimensions.intermediate,
        dimensions.heads,
        dimensions.key_value_heads,
        dimensions.head_dim,
        dimensions.experts,
        dimensions.experts_per_token,
        0 if work.adapter is None else work.adapter.rank,
    )
    values = terms(sizes, work.tensor, work.sequence)

    def value(form: Mapping[str, float]) -> float:
        return sum(factor * values[name] for name, factor in form.items())

    def most(name: str) -> float:
        return max(0.0, *(value(form) for form in row[name]))

    casts = sum(f * values[n] for n, f in row["kept"].items() if n in OF_WEIGHTS)
    kept, kept_backward = value(row["kept"]), value(row["kept_backward"])
    if work.adapted and not found.adapted:  # a frozen base is in the precision of products: nothing is cast
        kept -= casts
        kept_backward -= sum(f * values[n] for n, f in row["kept_backward"].items() if n in OF_WEIGHTS)
        casts = 0.0
    more, works = _of_adapter(work, dimensions)
    block = Block(kept + more, kept_backward + more, most("forward") + more + works, most("backward") + works)
    taken = values["ND"] * (2 if work.precision == "half" else 4)
    blocks = _blocks(work, block, taken, casts)
    offloading = (b.recomputes or work.selective for b in blocks) if work.recompute.offload else ()
    return Activations(
        blocks,
        most("start"),
        value(row["before"]),
        most("end"),
        value(row["loss"]),
        value(row["left"]) - value(row["kept_backward"]),
        taken * sum(offloading),
        _why_more(work, found),
    )


def _traced(work: Work) -> Work | None:
    """The same, or what it is closest to of what was traced."""
    as_written = replace(work, compiled=False)
    bare = replace(as_written, adapter=None)
    others = [
        replace(each, grouped=g) for each in (as_written, bare) for g in (work.grouped, not work.grouped)
    ]
    return next((each for each in (work, *others) if row_name(each) in rows()), None)


def _why_more(work: Work, found: Work) -> str:
    reasons = []
    if work.compiled and not found.compiled:
        reasons.append("blocks as they are without compilation, which keeps less")
    if work.adapter is not None and not work.adapter.everywhere:
        reasons.append("blocks as if all their linear layers had an adapter")
    return "; ".join(reasons)


def _of_adapter(work: Work, dimensions: Dimensions) -> tuple[float, float]:
    """Bytes that dropout and DoRA keep of a block beside its row of the table, and what these and a base in
    4 bits need while a layer is computed. Under AutoTP those that are cut by outputs have whole inputs, those
    that are cut by inputs give whole outputs.
    """
    adapter, tokens, size = work.adapter, work.tokens, work.computes_in
    if adapter is None:
        return 0.0, 0.0
    kept, works = 0.0, 0.0
    if adapter.drops:
        # Each layer its own mask and input, of which several share one otherwise; autocast copies it anyway.
        kept += tokens * adapter.inputs * (1 if work.device == "cuda" else work.holds_in)
        cut = dimensions.heads * dimensions.head_dim + dimensions.intermediate
        shared = dimensions.hidden + cut / work.tensor
        if work.precision != "autocast":
            kept += tokens * size * max(0.0, adapter.inputs - shared)
    if adapter.is_dora:  # what each layer gave, with the base's weight and with theirs
        kept += 2 * tokens * adapter.outputs * size
        widest = max(dimensions.intermediate / work.tensor, dimensions.hidden)
        works = size * (tokens * widest + adapter.largest)
    elif adapter.in_4_bits:
        works = size * adapter.largest
    return kept, works


def _blocks(work: Work, block: Block, taken: float, casts: float) -> tuple[Block, ...]:
    """Of each block, the first one first.

    Args:
        taken: Bytes of a block's input.
        casts: Of its weights in half precision, in autocast's cache.
    """
    how, layers = work.recompute, work.blocks
    if how.mode != "full":
        return (block,) * layers
    own = block.kept_backward - taken
    kept = 0.0 if how.offload and work.device == "cuda" else taken
    # The forward once more, then its backward with all that it kept.
    again = max(block.forward, own + block.backward) + taken - kept
    full = Block(kept + casts, kept, block.forward, again, recomputes=True)
    keeping = 0
    if how.budget is not None:
        keeping = min(layers, max(0, int((how.budget - layers * taken) / max(own, 1.0))))
        return (full,) * (layers - keeping) + (block,) * keeping
    return tuple(full if (work.first + index) % how.every == 0 else block for index in range(layers))


@cache
def rows() -> Mapping[str, Any]:
    """activations.json."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def families() -> Iterable[str]:
    """Those that are known."""
    return sorted({name.split()[0] for name in rows()} | set(ALIKE))
