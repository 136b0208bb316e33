"""What is trained and how it is split, as the plain numbers that a step's time follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.planning.model import Dimensions, Model, Parameter


@dataclass(frozen=True)
class Job:
    """One step's work. `dataclasses.replace` a field and ask again."""

    parameters: float
    """Of the whole model, each once."""
    blocks: float
    """Elements of the blocks' matrices that one token is multiplied by: of experts, those chosen."""
    layers: int
    hidden: int
    length: int
    """Tokens of a row."""
    vocabulary: int = 0
    """Words that the output layer tells apart."""
    width: int = 0
    """Heads times their width; 0: the hidden size."""
    window: int = 0
    """Tokens that every layer's attention looks back; 0: the row."""
    rows: float = 1
    """Of a micro-batch of one replica."""
    micro_batches: int = 1
    """Of one optimizer step."""
    data: int = 1
    """Replicas. GPUs: data x tensor x pipeline x sequence."""
    tensor: int = 1
    pipeline: int = 1
    sequence: int = 1
    stage: int = 0
    """ZeRO's; 0 is DDP too."""
    hpz: bool = False
    """Stage 3 gathers weights for the backward inside of the node."""
    overlap: bool = True
    """Whether collectives of weights and gradients run beside the computation."""
    recompute: float = 0.0
    """Part of the blocks' forward that is computed again: 1 is all, 0.5 what selective kinds do."""
    trained: float = 1.0
    """Part of the parameters that are trained, whose gradients are reduced."""
    weight_gradients: float = 1.0
    """Part of the matrices whose gradients are made: 0 under an adapter."""
    quantised: bool = False
    """The frozen base is held in 4 bits."""
    fp8: float = 0.0
    """Part of the blocks' products that is multiplied in fp8."""
    weight_bytes: float = 2
    """Of a parameter, as it is computed with and gathered."""
    reduce_bytes: float = 2
    """Of a gradient on its way to other ranks."""
    optimizer_on: str = ""
    """Where its states are and its step is computed: `cpu`, `nvme`; empty: on the GPU."""
    weights_on: str = ""
    """Where stage 3 keeps them: `cpu`, `nvme`."""
    activations_on: str = ""
    """Where what blocks keep for the backward is: `cpu`."""
    balanced: bool = True
    """Blocks are dealt to stages so that the output layer counts; else equally many to each."""
    dealt: tuple[int, ...] = ()
    """Blocks of each stage, where that is known; empty: as `balanced` says."""

    @classmethod
    def of(cls, model: Model, length: int, **split: Any) -> Job | None:
        """The job of a model; None where its blocks' numbers are not known.

        Args:
            length: Tokens of a row.
            split: Any other field, in place of what the model says.
        """
        of = model.dimensions
        if of is None:
            return None
        matrices = [p for p in model.parameters if _multiplies(p)]
        elements = sum(_active(p, of) for p in matrices)
        trained = sum(_active(p, of) for p in matrices if p.trains)
        numbers: dict[str, Any] = {
            "parameters": model.numel,
            "blocks": elements,
            "layers": of.layers,
            "hidden": of.hidden,
            "length": length,
            "vocabulary": of.vocabulary,
            "width": of.heads * of.head_dim,
            "window": of.window or 0,
            "trained": model.trained / model.numel,
            "weight_gradients": trained / elements if elements else 1.0,
        }
        return cls(**{**numbers, **split})

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.sequence

    @property
    def tokens(self) -> float:
        """Of one optimizer step."""
        return self.rows * self.length * self.micro_batches * self.data

    @property
    def seen(self) -> float:
        """Keys of a token."""
        return mean_keys(self.length, self.window or self.length)

    def flops_per_token(self, causal: bool = False) -> float:
        """Forward and backward as models/sizes.py counts them: 6N + 12 L d T, 4N where no matrix is trained.

        Args:
            causal: Count the keys that a token sees in place of the whole row.
        """
        matrices = self.blocks + self.vocabulary * self.hidden
        keys = self.seen if causal else min(self.length, self.window or self.length)
        attention = 12 * self.layers * (self.width or self.hidden) * keys
        return (6 if self.weight_gradients else 4) * matrices + attention


def mean_keys(length: int, window: int) -> float:
    """Keys a token meets in the mean over a row that fills up, of which it sees a window at most."""
    most = min(window, length)
    return most - most**2 / (2 * length)


def _multiplies(parameter: Parameter) -> bool:
    """Whether it is a matrix of a block (`model.layers.3.`), and not one that an adapter adds."""
    in_block = any(part.isdecimal() for part in parameter.name.split("."))
    return in_block and len(parameter.shape) > 1 and "lora_" not in parameter.name


def _active(parameter: Parameter, of: Dimensions) -> float:
    chosen = of.experts_per_token / of.experts if of.experts and ".experts." in parameter.name else 1.0
    return parameter.numel * chosen
