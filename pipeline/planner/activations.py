"""Estimates the bytes of a micro-batch on one rank: activations of a language model's blocks, and its loss.

The bytes of a block are a sum of products of sizes, such as tokens times hidden size. activations.json has
their coefficients, one row for each family and way to compute. tests/planner/measure_activations.py writes
it from traced allocations.
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
    compute_padded_vocabulary,
)

PREFERENCE_OBJECTIVES = ("dpo", "ipo", "simpo", "orpo", "kto", "cpo")
"""Kinds of objectives that need the loss of each token, and not only its sum."""


@dataclass(frozen=True)
class RecomputePolicy:
    """Selects the blocks that recompute activations in the backward, and the activations that they keep."""

    mode: str = "none"
    """`none`; `full`: blocks keep only their inputs; `selective`: they keep results of matrix products."""
    every: int = 1
    """Distance N of the blocks that recompute: blocks 0, N, 2N, ..."""
    offload: bool = False
    """Whether the inputs of the blocks that recompute are offloaded to host memory."""

    @classmethod
    def from_model(cls, model: CausalLMConfig) -> RecomputePolicy:
        """Return the policy of a recipe's model."""
        mode = model.activation_checkpointing
        if mode == "none":
            return cls()
        every = mode if isinstance(mode, int) else 1
        return cls("full" if isinstance(mode, int) else mode, every, model.activation_offload)


@dataclass(frozen=True)
class AdapterShape:
    """Low-rank matrices of an adapter in one block of a rank, after tensor parallelism cut them."""

    rank: int
    """Rank of the low-rank matrices."""
    inputs: float
    """Sum of the input widths of the block's adapted layers."""
    outputs: float
    """Sum of the output widths of the block's adapted layers."""
    everywhere: bool
    """Whether all linear layers of a block are adapted."""
    drops: bool = False
    """Whether dropout is applied to the inputs of the low-rank matrices."""
    is_dora: bool = False
    """Whether the adapter is DoRA, which also scales the outputs of the adapted layers."""
    largest: int = 0
    """Number of elements of the largest matrix in the frozen base."""
    in_4_bits: bool = False
    """Whether the base is stored in 4 bits, and each matrix is dequantized for its product."""


def measure_adapter(own: ModelSpec, adapter: AdapterConfig | None) -> AdapterShape | None:
    """Return the adapter's matrices in a rank's part of the model; `None` if the run has no adapter."""
    if adapter is None:
        return None
    layers = 1 if own.dimensions is None else own.dimensions.layers
    lora_a = [p for p in own.parameters if p.name.endswith(".lora_A.default.weight")]
    lora_b = [p for p in own.parameters if p.name.endswith(".lora_B.default.weight")]
    linear_weights = [p for p in own.parameters if p.layer is not None]
    return AdapterShape(
        rank=lora_a[0].shape[0] if lora_a else 0,
        inputs=sum(p.shape[1] for p in lora_a) / layers,
        outputs=sum(p.shape[0] for p in lora_b) / layers,
        everywhere=len(lora_a) >= len(linear_weights),
        drops=adapter.dropout > 0,
        is_dora=adapter.kind == "dora",
        largest=max((p.numel for p in linear_weights), default=0),
        in_4_bits=adapter.quantize is not None,
    )


@dataclass(frozen=True)
class MicroBatchSpec:
    """Describes how one rank computes a micro-batch: sizes, precision, split and recomputation."""

    family: str
    """Name of the model's family in activations.json."""
    device: str
    """`cpu` or `cuda`."""
    precision: str
    """`fp32`, `autocast` (fp32 weights, products in bf16) or `half` (weights of 2 bytes)."""
    rows: int
    """Number of rows of the micro-batch."""
    length: int
    """Number of tokens in a row, before sequence parallelism cuts it."""
    blocks: int
    """Number of blocks on the rank; in a pipeline, those of its stage."""
    first_block: int = 0
    """Index in the whole model of this rank's first block."""
    micro_batches: int = 1
    """Number of micro-batches in a step."""
    apart: bool = False
    """Whether rows hold several documents, and attention does not cross between them."""
    recompute: RecomputePolicy = RecomputePolicy()
    """Choice of the blocks that recompute their activations."""
    compiled: bool = False
    """Whether blocks are compiled."""
    grouped: bool = False
    """Whether several heads share keys and values (grouped-query attention)."""
    loss: str = "linear"
    """Form of the loss. `linear`: one sum, computed in the output layer chunk by chunk, without whole logits;
    `tokens`: the same with one loss for each token; `scores`: a reward model's."""
    tensor: int = 1
    """Number of tensor-parallel ranks, which divide matrices."""
    sequence: int = 1
    """Number of sequence-parallel ranks, which divide rows."""
    stages: int = 1
    """Number of pipeline stages."""
    stage: int = 0
    """Index of the rank's pipeline stage, from 0."""
    adapter: AdapterShape | None = None
    """Low-rank matrices of a block; `None` if the weights themselves are trained."""

    @property
    def tokens(self) -> int:
        """Number of tokens in a rank's micro-batch."""
        return self.rows * self.length // self.sequence

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose activations exist together: one for each stage from this one on."""
        return min(self.micro_batches, self.stages - self.stage)

    @property
    def is_last(self) -> bool:
        """Return whether the rank has the output layer."""
        return self.stage == self.stages - 1

    @property
    def adapted(self) -> bool:
        """Return whether blocks have low-rank matrices, and only these are trained."""
        return self.adapter is not None

    @property
    def selective(self) -> bool:
        """Return whether blocks keep only the results of matrix products, and recompute the rest."""
        return self.recompute.mode == "selective"

    @property
    def product_element_size(self) -> int:
        """Bytes of an element in the result of a matrix product."""
        return 4 if self.precision == "fp32" else 2

    @property
    def weight_element_size(self) -> int:
        """Bytes of an element of a weight."""
        return 2 if self.precision == "half" else 4

    @classmethod
    def from_run(
        cls, config: RunConfig, resolved: ResolvedSettings, own: ModelSpec, kind: str, stage: int = 0
    ) -> MicroBatchSpec | None:
        """Return the micro-batch of a rank; `None` if it is no language model over rows of equal length.

        Args:
            config: Recipe of the run.
            resolved: Resolved settings.
            own: Part of the model that the rank has.
            kind: Kind of the device, `cpu` or `cuda`.
            stage: Index of the rank's pipeline stage.
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
            family=_name_family(dimensions.family, model.extra),
            device=kind,
            precision="fp32" if split.precision == "fp32" else half,
            rows=resolved.batch_plan.micro_batch_size,
            length=length,
            blocks=dimensions.layers,
            first_block=dimensions.first_layer,
            micro_batches=resolved.batch_plan.gradient_accumulation_steps,
            apart=documents is not None and documents.separate_documents,
            recompute=RecomputePolicy.from_model(model),
            compiled=resolved.compile and not dimensions.experts,
            grouped=dimensions.key_value_heads != dimensions.heads,
            loss=_choose_loss_form(config.objective.kind),
            tensor=split.tensor_parallel,
            sequence=split.sequence_parallel,
            stages=split.pipeline_stages,
            stage=stage,
            adapter=measure_adapter(own, config.adapter),
        )


def _choose_loss_form(objective: str) -> str:
    """Return `loss` of MicroBatchSpec for an objective."""
    if objective == "reward":
        return "scores"
    return "tokens" if objective in PREFERENCE_OBJECTIVES else "linear"


def _name_family(family: str, extra: dict[str, Any]) -> str:
    """Return the family's name in activations.json.

    GPT-2 has a second name for models with dropout, which keeps its masks. Its config has dropout by default.

    Args:
        family: transformers' `model_type`.
        extra: Fields of transformers' config that the recipe sets.
    """
    dropout_rates = [extra.get(name, 0.1) for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")]
    return "gpt2_dropout" if family == "gpt2" and any(dropout_rates) else family


@dataclass(frozen=True)
class LossBytes:
    """Bytes of the output layer and the loss, without the gradient of the hidden states."""

    forward: float
    """Peak in the forward."""
    kept: float
    """Bytes kept between forward and backward."""
    backward: float
    """Peak in the backward, including `kept`."""


def count_loss_bytes(work: MicroBatchSpec, hidden: int, vocabulary: int, trained: bool = True) -> LossBytes:
    """Return the bytes of output layer and loss for one micro-batch.

    Args:
        work: How the rank computes the micro-batch.
        hidden: Hidden size.
        vocabulary: Number of rows of this rank's output layer.
        trained: Whether the output layer's weight is trained.
    """
    if work.loss == "scores":
        return LossBytes(0.0, 0.0, 0.0)
    on_cpu = work.device == "cpu"
    size = work.product_element_size
    tokens = work.tokens
    padded = compute_padded_vocabulary(vocabulary, work.device)
    is_copied = work.precision == "autocast" or padded > vocabulary
    weight_copy = padded * hidden * size if is_copied else 0
    block = choose_block_rows(padded, on_cpu)
    chunk = choose_chunk_tokens(tokens, vocabulary, size, on_cpu)
    softmax = 2 * min(chunk, block) * padded * 4
    # A CPU adds the weight's gradient piece by piece; a piece exists in half precision and in fp32.
    piece = min(padded * hidden, max(256 * hidden, CPU_GRADIENT_ELEMENTS)) * 6 if on_cpu and size == 2 else 0
    # The hidden states, their copy in half precision, and a copy of only those that count in the loss.
    copies = tokens * hidden * (2 if work.precision == "half" else 4)
    copies += tokens * hidden * size * ((work.precision == "autocast") + (work.apart and on_cpu))
    gradient = padded * hidden * 4 if trained else 0
    without_gradient = weight_copy + copies + chunk * padded * size + max(softmax, piece) + 64 * tokens
    # The gradient in the weight's own precision, to which the fp32 gradient is cast.
    has_cast_gradient = trained and work.weight_element_size != 4
    cast_gradient = vocabulary * hidden * work.weight_element_size if has_cast_gradient else 0
    if work.loss == "tokens":  # the backward computes the logits again
        backward = without_gradient + gradient + tokens * hidden * size + cast_gradient
        return LossBytes(forward=without_gradient, kept=0.0, backward=backward)
    return LossBytes(forward=without_gradient + gradient, kept=gradient, backward=gradient + cast_gradient)


COEFFICIENTS_FILE = Path(__file__).with_name("activations.json")
# Names of products of sizes, see `compute_terms`. Those without a number of tokens count bytes of weights.
WEIGHT_TERMS = ("DI", "DQ", "DK", "D", "I", "Q", "K", "EDI", "ED", "DR", "IR", "QR", "KR")
TOKEN_TERMS = ("ND", "NI", "NQ", "NK", "NH", "NG", "NW", "NE", "NA", "NR", "TW", "TD")
PAIRS = (*TOKEN_TERMS, "DI", "DQ", "DK", "ED", "DR", "IR", "QR", "KR")
# Family -> family whose blocks take the same memory, and whose row in activations.json is used.
SAME_MEMORY_AS = {"mistral": "llama", "smollm3": "llama"}


def format_row_name(way: Any) -> str:
    """Return the name of a row in activations.json.

    Args:
        way: A MicroBatchSpec, or any object with its attributes.
    """
    family = SAME_MEMORY_AS.get(way.family, way.family)
    words = [word for word in ("selective", "apart", "grouped", "adapted") if getattr(way, word)]
    return " ".join((family, way.device, way.precision, *words))


def compute_terms(
    dimensions: Any, rows: int, length: int, rank: int = 0, tensor: int = 1, sequence: int = 1
) -> dict[str, float]:
    """Return the products of sizes whose weighted sum is a number of bytes.

    A product is named by its factors: N tokens, T tokens of a row, D hidden size, I intermediate size,
    Q and K widths of all queries and all keys, H heads, G key-value heads, W width of a head, E experts,
    A experts of a token, R rank of the adapter. In NTH, T is at most QUERIES_PER_BLOCK.

    Args:
        dimensions: DecoderDimensions, or any object with these sizes of a block.
        rows: Rows of the micro-batch.
        length: Tokens of a row.
        rank: Rank of the adapter; 0 without one.
        tensor: Number of tensor-parallel ranks, which divide matrices.
        sequence: Number of sequence-parallel ranks, which divide rows.
    """
    n = rows * length / sequence
    i = dimensions.intermediate / tensor
    h = dimensions.heads / tensor
    g = dimensions.key_value_heads / tensor
    found = {
        "1": 1.0,
        "N": n,
        "T": length,
        "D": dimensions.hidden,
        "I": i,
        "Q": h * dimensions.head_dim,
        "K": g * dimensions.head_dim,
    }
    found |= {"H": h, "G": g, "W": dimensions.head_dim, "R": rank}
    found |= {"E": dimensions.experts, "A": dimensions.experts_per_token}
    found |= {name: found[name[0]] * found[name[1]] for name in PAIRS}
    found |= {"NAD": n * found["A"] * dimensions.hidden, "NAI": n * found["A"] * i, "EDI": found["ED"] * i}
    return found | {"NTH": n * h * min(length, QUERIES_PER_BLOCK)}


@dataclass(frozen=True)
class BlockBytes:
    """Bytes that one block of a model adds."""

    kept: float
    """Bytes kept from the block's forward to the end of the model's forward."""
    kept_backward: float
    """Bytes kept from the end of the model's forward to the block's backward. Without the casts of weights in
    autocast's cache, which is empty by then."""
    forward: float
    """Peak in the block's forward, above the bytes at its start."""
    backward: float
    """Peak in the block's backward, above the bytes at its start."""
    recomputes: bool = False
    """Whether the block recomputes its activations in the backward."""


@dataclass(frozen=True)
class ActivationBytes:
    """Activation bytes of one micro-batch on a rank: of its blocks, and before and after them."""

    blocks: tuple[BlockBytes, ...]
    """Bytes of each block of the rank, in order."""
    start: float
    """Peak before the first block."""
    before: float
    """Bytes of activations that exist when the first block's forward begins."""
    end: float
    """Peak after the last block, above the bytes at its end; without output layer and loss."""
    of_loss: float
    """Bytes of the normalised hidden states and their gradient, which exist when the loss begins its
    backward."""
    carried: float
    """Bytes that exist in addition to `kept_backward` of the blocks when a block begins its backward."""
    host: float = 0.0
    """Bytes of blocks' inputs that are kept in host memory."""
    overestimate: str = ""
    """Reason why these bytes are an upper bound; empty if they are exact."""


def estimate_activations(work: MicroBatchSpec, dimensions: DecoderDimensions) -> ActivationBytes | None:
    """Return the activations of a rank; `None` if activations.json has no row for its family and settings."""
    traced = _find_traced(work)
    if traced is None:
        return None
    row = read_coefficients()[format_row_name(traced)]
    rank = 0 if work.adapter is None else work.adapter.rank
    values = compute_terms(
        dimensions, work.rows, work.length, rank, tensor=work.tensor, sequence=work.sequence
    )

    def evaluate(form: Mapping[str, float], terms: Iterable[str] | None = None) -> float:
        return sum(f * values[name] for name, f in form.items() if terms is None or name in terms)

    def compute_peak(name: str) -> float:
        return max(0.0, *(evaluate(form) for form in row[name]))

    casts = evaluate(row["kept"], WEIGHT_TERMS)
    kept = evaluate(row["kept"])
    kept_backward = evaluate(row["kept_backward"])
    if work.adapted and not traced.adapted:  # a frozen base has the precision of products, and needs no casts
        kept -= casts
        kept_backward -= evaluate(row["kept_backward"], WEIGHT_TERMS)
        casts = 0.0
    adapter_kept, adapter_temporaries = _count_adapter_bytes(work, dimensions)
    block = BlockBytes(
        kept=kept + adapter_kept,
        kept_backward=kept_backward + adapter_kept,
        forward=compute_peak("forward") + adapter_kept + adapter_temporaries,
        backward=compute_peak("backward") + adapter_temporaries,
    )
    input_bytes = values["ND"] * work.weight_element_size
    blocks = _apply_recomputation(work, block, input_bytes, casts)
    num_offloaded = 0
    if work.recompute.offload:
        num_offloaded = sum(each.recomputes or work.selective for each in blocks)
    return ActivationBytes(
        blocks=blocks,
        start=compute_peak("start"),
        before=evaluate(row["before"]),
        end=compute_peak("end"),
        of_loss=evaluate(row["loss"]),
        carried=evaluate(row["left"]) - evaluate(row["kept_backward"]),
        host=input_bytes * num_offloaded,
        overestimate=_explain_overestimate(work),
    )


def _find_traced(work: MicroBatchSpec) -> MicroBatchSpec | None:
    """Return the settings closest to `work` that have a row in activations.json; `None` if none have.

    The order is: `work`, the same with `grouped` inverted, then both without the adapter.
    """
    without_adapter = replace(work, adapter=None)
    candidates = [
        replace(spec, grouped=grouped)
        for spec in (work, without_adapter)
        for grouped in (work.grouped, not work.grouped)
    ]
    traced = read_coefficients()
    return next((spec for spec in candidates if format_row_name(spec) in traced), None)


def _explain_overestimate(work: MicroBatchSpec) -> str:
    """Return the reasons why the estimate is an upper bound; empty if it is exact."""
    reasons = []
    if work.compiled:
        reasons.append("activations of blocks are those without compilation, which keeps fewer")
    if work.adapter is not None and not work.adapter.everywhere:
        reasons.append("activations of blocks are those with an adapter in every linear layer")
    return "; ".join(reasons)


def _count_adapter_bytes(work: MicroBatchSpec, dimensions: DecoderDimensions) -> tuple[float, float]:
    """Return the bytes that an adapter adds to the estimate of a block: (kept, temporary).

    Dropout and DoRA keep more; DoRA and a base in 4 bits need temporaries while a layer computes. Under
    AutoTP a layer cut by outputs still has whole inputs, and one cut by inputs returns whole outputs.
    """
    adapter = work.adapter
    tokens = work.tokens
    size = work.product_element_size
    if adapter is None:
        return 0.0, 0.0
    kept = 0.0
    temporaries = 0.0
    if adapter.drops:
        # With dropout each layer has its own mask and input; without it, several layers share one input.
        # Autocast copies the input in either case.
        kept += tokens * adapter.inputs * (1 if work.device == "cuda" else work.weight_element_size)
        divided_width = dimensions.heads * dimensions.head_dim + dimensions.intermediate
        shared_width = dimensions.hidden + divided_width / work.tensor
        if work.precision != "autocast":
            kept += tokens * size * max(0.0, adapter.inputs - shared_width)
    if adapter.is_dora:  # each layer's outputs, of the base's weight and of the low-rank matrices
        kept += 2 * tokens * adapter.outputs * size
        widest = max(dimensions.intermediate / work.tensor, dimensions.hidden)
        temporaries = size * (tokens * widest + adapter.largest)
    elif adapter.in_4_bits:
        temporaries = size * adapter.largest
    return kept, temporaries


def _apply_recomputation(
    work: MicroBatchSpec, block: BlockBytes, input_bytes: float, casts: float
) -> tuple[BlockBytes, ...]:
    """Return the bytes of each block in order, where the policy lets some blocks recompute.

    Args:
        work: How the rank computes the micro-batch.
        block: Bytes of a block that does not recompute.
        input_bytes: Bytes of a block's input.
        casts: Bytes of a block's weights in half precision, in autocast's cache.
    """
    policy = work.recompute
    if policy.mode != "full":
        return (block,) * work.blocks
    recomputed_bytes = block.kept_backward - input_bytes
    kept = 0.0 if policy.offload and work.device == "cuda" else input_bytes
    # The backward first runs the forward again, and then needs all activations that this forward kept.
    backward = max(block.forward, recomputed_bytes + block.backward) + input_bytes - kept
    recomputing = BlockBytes(kept + casts, kept, block.forward, backward, recomputes=True)
    return tuple(
        recomputing if (work.first_block + index) % policy.every == 0 else block
        for index in range(work.blocks)
    )


@cache
def read_coefficients() -> Mapping[str, Any]:
    """Return the coefficients of activations.json: name of a row -> its sums."""
    coefficients: dict[str, Any] = json.loads(COEFFICIENTS_FILE.read_text())
    return coefficients
