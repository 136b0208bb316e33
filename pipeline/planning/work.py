"""What a rank computes in a micro-batch, as far as it decides what that takes in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.config.model_schema import CausalLMConfig
from pipeline.config.schema import RunConfig
from pipeline.config.settings import Resolved
from pipeline.files import GIB
from pipeline.planning.adapting import LowRank, low_rank
from pipeline.planning.model import Model

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
            own: What the rank has of the model (cutting.py).
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
