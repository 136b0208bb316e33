"""Bytes of a micro-batch: what the blocks of a language model and its loss keep, and need, on one rank.

Blocks go by coefficients of products of sizes, one row a family and way to compute (activations.json, written
by benchmarks/activations.py from traced allocations).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.files import GIB
from pipeline.planner.model import (
    CPU_PART,
    QUERIES,
    Dimensions,
    Model,
    block_of_rows,
    chunk_of_tokens,
    filled_up,
)
from pipeline.planner.rank import LowRank, low_rank

# Whose logits are not their output layer's results as they are: scaled, or bounded.
CHANGED_LOGITS = ("gemma2", "cohere", "cohere2", "granite", "granitemoe", "falcon_h1")
PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "kto", "cpo")


@dataclass(frozen=True)
class Recompute:
    """Which blocks recompute in backward, and what of them."""

    mode: str = "none"
    """`none`, `full` or `selective`."""
    every: int = 1
    """Blocks 0, N, 2N, ... recompute."""
    budget: float | None = None
    """Bytes that blocks may keep; None: nobody said."""
    offload: bool = False
    """The inputs of blocks that recompute wait in host memory."""


@dataclass(frozen=True)
class Work:
    """Of one rank."""

    family: str
    device: str
    """`cpu` or `cuda`."""
    precision: str
    """`fp32`, `autocast` (fp32 weights, products in bf16) or `half` (weights of 2 bytes)."""
    rows: int
    length: int
    """Tokens of a row, before sequence parallelism cuts it."""
    blocks: int
    """That the rank has: of a pipeline those of its stage."""
    first: int = 0
    """How many of the model stand before these."""
    micro_batches: int = 1
    """Of a step."""
    apart: bool = False
    """Rows hold documents that do not see each other."""
    recompute: Recompute = Recompute()
    compiled: bool = False
    grouped: bool = False
    """Several heads share keys and values."""
    loss: str = "linear"
    """`linear`: of the output layer, without logits; `tokens`: so, but a loss a token; `logits`; `scores`."""
    tensor: int = 1
    sequence: int = 1
    stages: int = 1
    """Of a pipeline,"""
    stage: int = 0
    """and which of them, the first one 0."""
    adapter: LowRank | None = None
    """None: the weights themselves are trained."""

    @property
    def tokens(self) -> int:
        """Of a rank's micro-batch."""
        return self.rows * self.length // self.sequence

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are there at once: a stage begins with as many as follow it."""
        return min(self.micro_batches, self.stages - self.stage)

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
        return self.stage == self.stages - 1

    @property
    def adapted(self) -> bool:
        """Whether blocks have low-rank matrices, which alone are trained."""
        return self.adapter is not None

    @property
    def selective(self) -> bool:
        """Whether blocks keep matrix products alone."""
        return self.recompute.mode == "selective"

    @property
    def computes_in(self) -> int:
        """Bytes of a number that comes out of a product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def holds_in(self) -> int:
        """Bytes of a weight."""
        return 2 if self.precision == "half" else 4

    @classmethod
    def of(cls, config: RunConfig, resolved: Resolved, own: Model, kind: str, stage: int = 0) -> Work | None:
        """None: not a language model over rows of equal length.

        Args:
            own: Part of the model that the rank has.
            kind: Of the device: `cpu` or `cuda`.
            stage: Of a pipeline.
        """
        model = config.model.language_model
        documents = config.data.documents
        dimensions = own.dimensions
        if dimensions is None or model is None:
            return None
        length = model.max_sequence_length if documents is None else documents.sequence_length
        if length is None:
            return None
        split = resolved.split
        half = split.precision != "fp32"
        precision = "fp32" if not half else "autocast" if resolved.deepspeed is None else "half"
        return cls(
            family=_row_of(dimensions.family, model.extra),
            device=kind,
            precision=precision,
            rows=resolved.plan.micro_batch_size,
            length=length,
            blocks=dimensions.layers,
            first=dimensions.first,
            micro_batches=resolved.plan.gradient_accumulation_steps,
            apart=documents is not None and documents.separate_documents,
            recompute=_recompute(model),
            compiled=resolved.compile and not dimensions.experts,
            grouped=dimensions.key_value_heads != dimensions.heads,
            loss=_loss(config.objective.kind, dimensions.family),
            tensor=split.tensor_parallel,
            sequence=split.sequence_parallel,
            stages=split.pipeline_stages,
            stage=stage,
            adapter=low_rank(own, config.adapter),
        )


def _recompute(model: CausalLMConfig) -> Recompute:
    mode = model.activation_checkpointing
    if mode == "none":
        return Recompute()
    budget = None if model.activation_budget_gib is None else model.activation_budget_gib * GIB
    if isinstance(mode, int):
        return Recompute("full", mode, budget, model.activation_offload)
    return Recompute(mode, 1, budget, model.activation_offload)


def _loss(objective: str, family: str) -> str:
    if objective == "reward":
        return "scores"
    if family in CHANGED_LOGITS:
        return "logits"
    return "tokens" if objective in PREFERENCES else "linear"


def _row_of(family: str, extra: dict[str, Any]) -> str:
    """GPT-2 keeps masks of dropout, which its configuration has unless the recipe says otherwise."""
    drops = [extra.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return "gpt2_dropout" if family == "gpt2" and any(drops) else family


@dataclass(frozen=True)
class LossBytes:
    """Beside the gradient of the hidden states."""

    forward: float
    """The most in its forward."""
    kept: float
    """From its forward to its backward."""
    backward: float
    """The most in its backward, what was kept included."""


def loss_bytes(work: Work, hidden: int, words: int, trained: bool = True) -> LossBytes:
    """Of one micro-batch.

    Args:
        words: Rows of this rank's output layer.
        trained: Whether its weight is.
    """
    on_cpu, size, tokens = work.device == "cpu", work.computes_in, work.tokens
    full = filled_up(words, work.device)
    copied = work.precision == "autocast" or full > words
    cast = full * hidden * size if copied else 0
    if work.loss == "scores":
        return LossBytes(0.0, 0.0, 0.0)
    block = block_of_rows(full, on_cpu)
    if work.loss == "logits":
        logits = tokens * words * size
        works = 3 * min(block, tokens) * words * 4
        kept = 2 * logits + cast
        return LossBytes(kept + max(logits, works), kept, kept + logits + works)
    chunk = chunk_of_tokens(tokens, words, size, on_cpu)
    works = 2 * min(chunk, block) * full * 4
    added = min(full * hidden, max(256 * hidden, CPU_PART)) * 6 if on_cpu and size == 2 else 0
    # Hidden states, their copy in half precision, and a copy of those alone that count.
    copies = tokens * hidden * (2 if work.precision == "half" else 4)
    copies += tokens * hidden * size * ((work.precision == "autocast") + (work.apart and on_cpu))
    gradient = full * hidden * 4 if trained else 0
    most = cast + copies + chunk * full * size + max(works, added) + 64 * tokens
    given = words * hidden * work.holds_in if trained and work.holds_in != 4 else 0
    if work.loss == "tokens":
        return LossBytes(most, 0.0, most + gradient + tokens * hidden * size + given)
    return LossBytes(most + gradient, gradient, gradient + given)


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
        rows=work.rows,
        length=work.length,
        hidden=dimensions.hidden,
        intermediate=dimensions.intermediate,
        heads=dimensions.heads,
        key_value_heads=dimensions.key_value_heads,
        head_dim=dimensions.head_dim,
        experts=dimensions.experts,
        experts_per_token=dimensions.experts_per_token,
        rank=0 if work.adapter is None else work.adapter.rank,
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
        blocks=blocks,
        start=most("start"),
        before=value(row["before"]),
        end=most("end"),
        of_loss=value(row["loss"]),
        carried=value(row["left"]) - value(row["kept_backward"]),
        host=taken * sum(offloading),
        upper=_why_more(work, found),
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
