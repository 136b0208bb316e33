"""What other trainers hold and add beside what the planner's formulas say of blocks, with the reason.

What was set by looking at published memory was set by the calibration rows of published_memory.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.planner.activations import Work
from pipeline.planner.model import Dimensions, Model, Parameter
from pipeline.planner.shapes import build
from pipeline.planner.states import Buffers, Held, States

Row = Mapping[str, Any]
# Parameters that belong to no block, norms apart.
ENDS = ("model.embed_tokens", "transformer.wte", "lm_head")
MODELS = Path(__file__).with_name("published_models.json")


@dataclass(frozen=True)
class Bytes:
    """Of a trained parameter."""

    weights: float
    gradients: float
    moments: float
    masters: float = 0.0


PRECISIONS = {
    "bf16": Bytes(2, 2, 4),
    "fp32": Bytes(4, 4, 8),
    # fp32 weights; products in half precision, by autocast or by FSDP, which gathers them so.
    "mixed": Bytes(4, 4, 8),
    # Adapters in fp32 over a base in half precision (peft's autocast_adapter_dtype).
    "fp32_adapters": Bytes(4, 4, 8),
    # Megatron's and ZeRO 1's.
    "bf16_masters": Bytes(2, 2, 8, 4),
}
# Bytes a parameter of what is frozen. NF4: a scale of fp32 for 64; where scales are quantised (dq): a byte
# for 64, and fp32 for 256 of these. GPTQ: scales of 2 bytes and zeros of 4 bits for 128.
BASES = {
    "bf16": 2.0,
    "fp32": 4.0,
    "nf4": 0.5 + 4 / 64,
    "nf4-dq": 0.5 + 1 / 64 + 4 / 64 / 256,
    "gptq": 0.5 + 2.5 / 128,
}
MOMENTS_IN_8_BITS = 2 + 8 / 256


@dataclass(frozen=True)
class Logits:
    """How logits become a loss: bytes of a logit at the most, of forward and backward."""

    most: float
    hidden: float = 0.0
    """Bytes of a token and hidden number, where no logits are kept."""
    gradient: float = 0.0
    """Of the output layer's weight, bytes a parameter, where it is there as long."""
    cached: float = 4.0
    """Bytes a logit that the allocator keeps afterwards, where nothing uses them again."""


LOGITS = {
    # Logits, in fp32, those shifted, their log-softmax: transformers from 4.45 on (loss_utils.py). torchtitan
    # until 2025: logits, in fp32, their log-softmax, its gradient.
    "four": Logits(14.0),
    # Of all words on each rank of tensor parallelism, with a gradient in fp32 besides (AA-Scaling).
    "five": Logits(18.0),
    # The 16 bit ones are gone by then: transformers before that, Granite, torchtune without chunks.
    "three": Logits(12.0),
    # A Triton kernel overwrites what it is given (fms-acceleration): logits, in fp32, shifted or not.
    "triton_shifted": Logits(10.0, cached=7.0),
    "triton": Logits(8.0, cached=7.0),
    # Two in fp32 (KempnerForge), or in 16 bits with what a fused kernel keeps (llm-foundry).
    "two": Logits(8.0),
    # 16 bits throughout: logits, their log-softmax, its gradient (LitGPT).
    "half": Logits(6.0),
    # 16 bits, and their gradient, beside the weight's (torchtitan with a compiled loss).
    "compiled": Logits(4.0, gradient=2.0),
    # 16 bits of all tokens; of one of 8 chunks the rest, and the weight's gradient (torchtune, compiled).
    "chunked": Logits(2.0, gradient=4.0, cached=1.0),
    # A kernel in place (Unsloth).
    "in_place": Logits(10.0, cached=0.0),
    # Of the hidden states, in chunks of about tokens x hidden / words (Liger), or of a tile (Apple's).
    "fused_linear": Logits(0.0, 10.0, gradient=2.0, cached=0.0),
    "cut": Logits(0.0, 4.0, cached=0.0),
}
# What a reader who does not know a trainer's source would take.
PLAIN = {"four": "three", "triton_shifted": "three", "triton": "three", "two": "three", "half": "three"}


@cache
def _models() -> Mapping[str, tuple[str, dict[str, Any]]]:
    found: Mapping[str, tuple[str, dict[str, Any]]] = json.loads(MODELS.read_text())
    return found


@dataclass(frozen=True)
class Counts:
    """Parameters of a model."""

    all: int
    trained: int
    matrices: int
    """Frozen ones of blocks' linear layers."""
    ends: int
    """Of embedding and output layer."""
    trained_block: float
    frozen_block: float

    @property
    def rest(self) -> int:
        """Frozen ones of embedding, output layer and norms."""
        return self.all - self.trained - self.matrices


@cache
def _model(name: str, rank: int, targets: tuple[str, ...]) -> tuple[Model, Dimensions, Counts]:
    family, config = _models()[name]
    found = build(family, config)
    if found is None or found.dimensions is None:
        raise LookupError(f"{name}: no such family, or not with this configuration: {family}")
    parameters = list(found.parameters)
    if rank:
        parameters = [replace(each, trains=False) for each in found.parameters]
        for each in found.parameters:
            if len(each.shape) > 1 and each.name.split(".")[-2] in targets:
                outputs, inputs = each.shape
                parameters.append(Parameter(f"{each.name}.lora_A.default.weight", (rank, inputs)))
                parameters.append(Parameter(f"{each.name}.lora_B.default.weight", (outputs, rank)))
        found = replace(found, parameters=tuple(parameters))
    ends = [p for p in parameters if p.name.startswith(ENDS)]
    frozen = [p for p in parameters if not p.trains]
    inside = frozen if rank else []
    counts = Counts(
        found.numel,
        found.trained,
        sum(p.numel for p in inside if len(p.shape) > 1 and not p.name.startswith(ENDS)),
        sum(p.numel for p in ends),
        (found.trained - sum(p.numel for p in ends if p.trains)) / found.dimensions.layers,
        sum(p.numel for p in inside if not p.name.startswith(ENDS)) / found.dimensions.layers,
    )
    return found, found.dimensions, counts


def model_of(row: Row) -> tuple[Model, Dimensions, Counts]:
    """With its adapter.

    Raises:
        LookupError: families.yaml does not have it.
    """
    return _model(row["model"], row.get("rank", 0), tuple(row.get("targets", ())))


def states_of(row: Row, counts: Counts) -> tuple[States, Buffers]:
    """What stays on a rank's device, and what comes and goes beside activations.

    Of the first or last of several stages, which have one of both ends.
    """
    scheme, cut = PRECISIONS[row["precision"]], row.get("data", 1) * row.get("tensor", 1)
    trained = counts.trained / cut
    if (stages := row.get("stages", 1)) > 1:
        trained = (counts.trained - counts.ends) / cut / stages + counts.ends / cut / 2
    masters = trained * scheme.masters / row.get("optimizer_data", 1)
    frozen = counts.matrices * BASES[row.get("base", "bf16")] + counts.rest * _ends_in(row)
    weights, gradients = trained * scheme.weights + frozen / cut, trained * scheme.gradients
    moments, step = trained * scheme.moments / row.get("optimizer_data", 1), 0.0
    if row["optimizer"] == "foreach":
        step = moments / 2  # a list of denominators, as large as the parameters
    elif row["optimizer"] == "8bit":
        moments = trained * MOMENTS_IN_8_BITS
    elif row["optimizer"] == "host":
        moments = 0.0
    if row.get("optimizer_in_backward"):
        gradients = 0.0
    if "parameters" in row.get("offload", ""):
        weights = 0.0
    if row.get("gathers") == "step":
        # Micro-batches are added up without reduction: weights and gradients lie whole until the step.
        whole = counts.all / row.get("tensor", 1) * (scheme.weights + scheme.gradients)
        return States(Held(weights, 0.0, 0.0, moments)), Buffers(always=whole)
    buffers = replace(_gathered(row, counts), step=step)
    if row.get("copies"):
        buffers = replace(buffers, always=gradients)  # DDP's buckets are a copy
    return States(Held(weights, gradients, masters, moments)), buffers


def _ends_in(row: Row) -> float:
    """Bytes of a frozen parameter of embedding, output layer and norms."""
    return 4.0 if row.get("upcast") or row.get("base") == "fp32" else 2.0


def _gathered(row: Row, counts: Counts) -> Buffers:
    """FSDP: two blocks at a time, and what belongs to no block from its first use on."""
    if row.get("data", 1) == 1 and "parameters" not in row.get("offload", ""):
        return Buffers()
    tensor = row.get("tensor", 1)
    trained = counts.trained_block / tensor
    block = counts.frozen_block / tensor * BASES[row.get("base", "bf16")] + trained * 2.0
    ends = counts.ends / tensor * (2.0 if row["train"] == "full" else _ends_in(row))
    # A block's gradients before they are cut, in half precision and in what they are summed in.
    gradients = trained * 6.0 if row["train"] == "full" else 0.0
    return Buffers(forward=ends + 2 * block, backward=ends + 2 * block + gradients)


def added(row: Row, work: Work, dimensions: Dimensions) -> dict[str, float]:
    """Bytes of activations that are there besides, by phase."""
    tokens, layers = work.tokens, dimensions.layers / work.stages * work.in_flight
    hidden, intermediate = dimensions.hidden, dimensions.intermediate / work.tensor
    recomputes = work.recompute.mode == "full"
    # All blocks' at the end of forward; one block's more in backward, of those that recompute.
    kept = block = late = 0.0
    if row.get("upcast"):
        # Norms, embedding and output layer in fp32 (prepare_model_for_kbit_training): so hidden states are.
        kept += 2.0 * hidden if recomputes else 8.0 * hidden
        block += 8.0 * hidden if recomputes else 0.0
    if row.get("kernels") or row.get("compiled"):
        # RMSNorm keeps its input alone, not in fp32 and not its result; SwiGLU's product is made again.
        saved = 8.0 * hidden + (0.0 if row.get("kernels") == "norms" else 2.0 * intermediate)
        kept -= 0.0 if recomputes else saved
        block -= saved if recomputes else 0.0
    if row["stack"] == "litgpt" and row["train"] == "full":
        kept += (
            10.0 * hidden
        )  # RMSNorm's product with its weight is in fp32, too; q and k are put together again
    if row["stack"] == "litgpt" and row.get("base", "").startswith("nf4"):
        kept += 4.0 * hidden + 2.0 * intermediate  # bitsandbytes keeps inputs of frozen layers
    if row.get("keeps") == "half of products":
        # torchtitan's selective recomputation: every second product, and what attention gives.
        width, groups = (n * dimensions.head_dim for n in (dimensions.heads, dimensions.key_value_heads))
        kept += (width + 2 * groups + 2 * hidden + 2 * intermediate) + 2.0 * width
    if row["train"] == "lora" and row.get("data", 1) > 1 and row.get("fsdp", 1) == 1:
        # Hooks that free gathered frozen weights hold blocks' inputs, and the gradients of these, to the end.
        late += 2.0 * hidden
    forward = kept * layers * tokens
    loss = 0.0
    if row.get("sequence_parallel"):
        loss = 4.0 * hidden * tokens * (row["tensor"] - 1)  # hidden states and their gradient, of all rows
    backward = forward + (block + late * layers) * tokens
    return {"forward": forward, "loss": forward + loss, "backward": backward}
