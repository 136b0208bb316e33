"""Bytes of a micro-batch: what the blocks of a language model and its loss keep, and need, on one rank.

Blocks go by coefficients of products of sizes, one row a family and way to compute (activations.json, written
by tests/planner/measure_activations.py from traced allocations).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.model_schema import AdapterConfig, CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import ResolvedSettings
from pipeline.planner.model import (
    CPU_GRADIENT_ELEMENTS,
    QUERIES_PER_BLOCK,
    DecoderDimensions,
    ModelSpec,
    choose_block_rows,
    choose_chunk_tokens,
    pad_vocabulary,
)

PREFERENCES = ("dpo", "ipo", "simpo", "orpo", "kto", "cpo")


@dataclass(frozen=True)
class RecomputePolicy:
    """Which blocks recompute in the backward, and what of them."""

    mode: str = "none"
    """`none`, `full` or `selective`."""
    every: int = 1
    """Blocks 0, N, 2N, ... recompute."""
    offload: bool = False
    """Whether the inputs of blocks that recompute wait in host memory."""

    @classmethod
    def from_model(cls, model: CausalLMConfig) -> RecomputePolicy:
        """Read it from a recipe's model."""
        mode = model.activation_checkpointing
        if mode == "none":
            return cls()
        every = mode if isinstance(mode, int) else 1
        return cls("full" if isinstance(mode, int) else mode, every, model.activation_offload)


@dataclass(frozen=True)
class AdapterShape:
    """An adapter's matrices in a block of a rank, as AutoTP has cut them; widths are sums over its layers."""

    rank: int
    inputs: float
    outputs: float
    everywhere: bool
    """Whether all linear layers of a block have some."""
    drops: bool = False
    """Whether values of their inputs are dropped."""
    is_dora: bool = False
    largest: int = 0
    """Elements of the largest matrix beside them."""
    in_4_bits: bool = False
    """Whether that is held in 4 bits, and made whole to be multiplied with."""


def measure_adapter(own: ModelSpec, adapter: AdapterConfig | None) -> AdapterShape | None:
    """Return the adapter of a rank's part; `None` if the run has none."""
    if adapter is None:
        return None
    layers = 1 if own.dimensions is None else own.dimensions.layers
    inner = [p for p in own.parameters if p.name.endswith(".lora_A.default.weight")]
    outer = [p for p in own.parameters if p.name.endswith(".lora_B.default.weight")]
    beside = [p for p in own.parameters if p.layer is not None]
    return AdapterShape(
        rank=inner[0].shape[0] if inner else 0,
        inputs=sum(p.shape[1] for p in inner) / layers,
        outputs=sum(p.shape[0] for p in outer) / layers,
        everywhere=len(inner) >= len(beside),
        drops=adapter.dropout > 0,
        is_dora=adapter.kind == "dora",
        largest=max((p.numel for p in beside), default=0),
        in_4_bits=adapter.quantize is not None,
    )


@dataclass(frozen=True)
class MicroBatchSpec:
    """One rank's micro-batch."""

    family: str
    device: str
    """`cpu` or `cuda`."""
    precision: str
    """`fp32`, `autocast` (fp32 weights, products in bf16) or `half` (weights of 2 bytes)."""
    rows: int
    length: int
    """Tokens of a row, before sequence parallelism cuts it."""
    blocks: int
    """Number that the rank has: of a pipeline those of its stage."""
    first: int = 0
    """Number of the model's blocks before these."""
    micro_batches: int = 1
    """Number in a step."""
    apart: bool = False
    """Whether rows hold documents that do not see each other."""
    recompute: RecomputePolicy = RecomputePolicy()
    compiled: bool = False
    grouped: bool = False
    """Whether several heads share keys and values."""
    loss: str = "linear"
    """`linear`: of the output layer, without logits; `tokens`: so, but a loss a token; `scores`."""
    tensor: int = 1
    sequence: int = 1
    stages: int = 1
    stage: int = 0
    """The rank's pipeline stage, the first one 0."""
    adapter: AdapterShape | None = None
    """`None`: the weights themselves are trained."""

    @property
    def tokens(self) -> int:
        """Tokens of a rank's micro-batch."""
        return self.rows * self.length // self.sequence

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose activations exist together: one for each stage from here on."""
        return min(self.micro_batches, self.stages - self.stage)

    @property
    def is_last(self) -> bool:
        """Whether the rank has the output layer."""
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
    def from_run(
        cls, config: RunConfig, resolved: ResolvedSettings, own: ModelSpec, kind: str, stage: int = 0
    ) -> MicroBatchSpec | None:
        """Return a rank's work; `None` if it is no language model over rows of equal length.

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
        half = "autocast" if resolved.deepspeed is None else "half"
        return cls(
            family=_row_of(dimensions.family, model.extra),
            device=kind,
            precision="fp32" if split.precision == "fp32" else half,
            rows=resolved.batch_plan.micro_batch_size,
            length=length,
            blocks=dimensions.layers,
            first=dimensions.first,
            micro_batches=resolved.batch_plan.gradient_accumulation_steps,
            apart=documents is not None and documents.separate_documents,
            recompute=RecomputePolicy.from_model(model),
            compiled=resolved.compile and not dimensions.experts,
            grouped=dimensions.key_value_heads != dimensions.heads,
            loss=_loss(config.objective.kind),
            tensor=split.tensor_parallel,
            sequence=split.sequence_parallel,
            stages=split.pipeline_stages,
            stage=stage,
            adapter=measure_adapter(own, config.adapter),
        )


def _loss(objective: str) -> str:
    if objective == "reward":
        return "scores"
    return "tokens" if objective in PREFERENCES else "linear"


def _row_of(family: str, extra: dict[str, Any]) -> str:
    """Name GPT-2's row: it keeps masks of dropout, which its configuration has unless the recipe differs."""
    drops = [extra.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return "gpt2_dropout" if family == "gpt2" and any(drops) else family


@dataclass(frozen=True)
class LossBytes:
    """Bytes of output layer and loss, beside the gradient of the hidden states."""

    forward: float
    """The most in its forward."""
    kept: float
    """From its forward to its backward."""
    backward: float
    """The most in its backward, what was kept included."""


def count_loss_bytes(work: MicroBatchSpec, hidden: int, words: int, trained: bool = True) -> LossBytes:
    """Return the bytes of one micro-batch.

    Args:
        words: Rows of this rank's output layer.
        trained: Whether its weight is.
    """
    if work.loss == "scores":
        return LossBytes(0.0, 0.0, 0.0)
    on_cpu, size, tokens = work.device == "cpu", work.computes_in, work.tokens
    full = pad_vocabulary(words, work.device)
    copied = work.precision == "autocast" or full > words
    cast = full * hidden * size if copied else 0
    block = choose_block_rows(full, on_cpu)
    chunk = choose_chunk_tokens(tokens, words, size, on_cpu)
    works = 2 * min(chunk, block) * full * 4
    added = min(full * hidden, max(256 * hidden, CPU_GRADIENT_ELEMENTS)) * 6 if on_cpu and size == 2 else 0
    # Hidden states, their copy in half precision, and a copy of those alone that count.
    copies = tokens * hidden * (2 if work.precision == "half" else 4)
    copies += tokens * hidden * size * ((work.precision == "autocast") + (work.apart and on_cpu))
    gradient = full * hidden * 4 if trained else 0
    most = cast + copies + chunk * full * size + max(works, added) + 64 * tokens
    given = words * hidden * work.holds_in if trained and work.holds_in != 4 else 0
    if work.loss == "tokens":
        return LossBytes(most, 0.0, most + gradient + tokens * hidden * size + given)
    return LossBytes(most + gradient, gradient, gradient + given)


COEFFICIENTS_FILE = Path(__file__).with_name("activations.json")
# Products without a number of tokens: what of a block are its weights.
WEIGHT_TERMS = ("DI", "DQ", "DK", "D", "I", "Q", "K", "EDI", "ED", "DR", "IR", "QR", "KR")
TOKEN_TERMS = ("ND", "NI", "NQ", "NK", "NH", "NG", "NW", "NE", "NA", "NR", "TW", "TD")
PAIRS = (*TOKEN_TERMS, "DI", "DQ", "DK", "ED", "DR", "IR", "QR", "KR")
# Families whose blocks compute as another's, as far as memory can tell.
ALIKE = {"mistral": "llama", "smollm3": "llama"}


def format_row_name(way: Any) -> str:
    """Return the name in activations.json of a way to compute: Work, or whatever has these attributes."""
    family = ALIKE.get(way.family, way.family)
    words = [word for word in ("selective", "apart", "grouped", "adapted") if getattr(way, word)]
    return " ".join((family, way.device, way.precision, *words))


def compute_terms(
    of: Any, rows: int, length: int, rank: int = 0, tensor: int = 1, sequence: int = 1
) -> dict[str, float]:
    """Return the products that bytes are sums of.

    N tokens, T of a row, D hidden, I intermediate, Q and K the width of queries and of keys, H heads, G of
    keys, W the width of one, E experts, A of a token's, R an adapter's rank.

    Args:
        of: Dimensions, or whatever has a block's sizes by these names.
        rank: Of an adapter.
        tensor: Ranks that divide matrices.
        sequence: Ranks that divide rows.
    """
    n, i = rows * length / sequence, of.intermediate / tensor
    h, g = of.heads / tensor, of.key_value_heads / tensor
    found = {
        "1": 1.0,
        "N": n,
        "T": length,
        "D": of.hidden,
        "I": i,
        "Q": h * of.head_dim,
        "K": g * of.head_dim,
    }
    found |= {"H": h, "G": g, "W": of.head_dim, "E": of.experts, "A": of.experts_per_token, "R": rank}
    found |= {name: found[name[0]] * found[name[1]] for name in PAIRS}
    found |= {"NAD": n * found["A"] * of.hidden, "NAI": n * found["A"] * i, "EDI": found["ED"] * i}
    return found | {"NTH": n * h * min(length, QUERIES_PER_BLOCK)}


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one block."""

    kept: float
    """From its forward to the end of the model's forward."""
    kept_backward: float
    """From there to its backward: without what autocast's cache held."""
    forward: float
    """The most in its forward, over what exists at its beginning."""
    backward: float
    recomputes: bool = False


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of one micro-batch, of a rank's blocks and of what comes before and after them."""

    blocks: tuple[BlockBytes, ...]
    start: float
    """The most before the first block."""
    before: float
    """What exists when the first block begins."""
    end: float
    """The most after the last block, over what exists at its end; without output layer and loss."""
    of_loss: float
    """What exists more when the loss begins its backward: normed hidden states, their gradient."""
    carried: float
    """What exists beside the blocks' own when a block begins its backward."""
    host: float = 0.0
    """Inputs of blocks that wait in host memory."""
    overestimate: str = ""
    """Why it is more than will be taken; empty if it is not."""


def estimate_activations(work: MicroBatchSpec, dimensions: DecoderDimensions) -> ActivationBytes | None:
    """Return the activations of a rank; `None` if no model of this family was traced computing so."""
    found = _traced(work)
    if found is None:
        return None
    row = read_coefficients()[format_row_name(found)]
    rank = 0 if work.adapter is None else work.adapter.rank
    values = compute_terms(dimensions, work.rows, work.length, rank, work.tensor, work.sequence)

    def value(form: Mapping[str, float], among: Iterable[str] | None = None) -> float:
        return sum(f * values[name] for name, f in form.items() if among is None or name in among)

    def most(name: str) -> float:
        return max(0.0, *(value(form) for form in row[name]))

    casts = value(row["kept"], WEIGHT_TERMS)
    kept, kept_backward = value(row["kept"]), value(row["kept_backward"])
    if work.adapted and not found.adapted:  # a frozen base is in the precision of products: nothing is cast
        kept -= casts
        kept_backward -= value(row["kept_backward"], WEIGHT_TERMS)
        casts = 0.0
    more, works = _of_adapter(work, dimensions)
    block = BlockBytes(
        kept + more, kept_backward + more, most("forward") + more + works, most("backward") + works
    )
    taken = values["ND"] * work.holds_in
    blocks = _blocks(work, block, taken, casts)
    offloads = [b.recomputes or work.selective for b in blocks] if work.recompute.offload else []
    return ActivationBytes(
        blocks=blocks,
        start=most("start"),
        before=value(row["before"]),
        end=most("end"),
        of_loss=value(row["loss"]),
        carried=value(row["left"]) - value(row["kept_backward"]),
        host=taken * sum(offloads),
        overestimate=_why_more(work),
    )


def _traced(work: MicroBatchSpec) -> MicroBatchSpec | None:
    """Return the same work, or what comes closest to it among what was traced."""
    bare = replace(work, adapter=None)
    others = [replace(each, grouped=g) for each in (work, bare) for g in (work.grouped, not work.grouped)]
    return next((each for each in others if format_row_name(each) in read_coefficients()), None)


def _why_more(work: MicroBatchSpec) -> str:
    reasons = []
    if work.compiled:
        reasons.append("blocks as they are without compilation, which keeps less")
    if work.adapter is not None and not work.adapter.everywhere:
        reasons.append("blocks as if all their linear layers had an adapter")
    return "; ".join(reasons)


def _of_adapter(work: MicroBatchSpec, dimensions: DecoderDimensions) -> tuple[float, float]:
    """Return what dropout and DoRA keep of a block beside its row, and what they need while a layer computes.

    Under AutoTP layers that are cut by outputs have whole inputs, those cut by inputs give whole outputs.
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


def _blocks(work: MicroBatchSpec, block: BlockBytes, taken: float, casts: float) -> tuple[BlockBytes, ...]:
    """Return each block, the first one first.

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
    full = BlockBytes(kept + casts, kept, block.forward, again, recomputes=True)
    return tuple(full if (work.first + index) % how.every == 0 else block for index in range(layers))


@cache
def read_coefficients() -> Mapping[str, Any]:
    """Return activations.json."""
    found: dict[str, Any] = json.loads(COEFFICIENTS_FILE.read_text())
    return found
