"""The division of a decoder language model of transformers into layers, of which pipeline stages consist.

The division is tested before it is used: a small model of the same class is divided the same way, and its
layers one after another must give its logits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import CausalLMOutput

from pipeline.errors import ModelError
from pipeline.models.adapters import is_base
from pipeline.models.attention import build_small_model
from pipeline.models.document_attention import WholeRowBounds, build_bounds_arguments
from pipeline.planner.rank import FINAL_NORM_NAMES

# The value passed between layers: hidden states (B, T, D), with the position ids (B, T) if the batch has any,
# and the bounds of documents (see document_attention).
Carried = Tensor | tuple[Tensor, ...]

# Attributes of decoders with their rotary embeddings.
ROTARY = ("rotary_emb",)

TRIAL_TOKENS = 16


class StageLayer(nn.Module):
    """One step of the forward pass: a part of the whole model, under its name there."""

    def __init__(self, name: str, part: nn.Module):
        super().__init__()
        self.name = name
        self.part = part

    def weights(self) -> dict[str, Tensor]:
        """Return the weights under their names in the whole model, without those of an adapter's base."""
        weights = self.part.state_dict(keep_vars=True)
        return {f"{self.name}.{key}": value for key, value in weights.items() if not is_base(value)}


class SingleInputLayer(StageLayer):
    """A layer of one input: the token embedding of ids, or a norm or dropout of hidden states."""

    def forward(self, inputs: Carried) -> Carried:
        """Return the part's output, with positions and bounds unchanged."""
        values, positions, bounds = _unpack(inputs)
        return _pack(self.part(values), positions, bounds)


class PositionLayer(StageLayer):
    """Adds learned positions."""

    def forward(self, inputs: Carried) -> Carried:
        """Return the hidden states plus their positions' embeddings."""
        hidden, positions, bounds = _unpack(inputs)
        return _pack(hidden + self.part(_complete_positions(positions, hidden)), positions, bounds)


class HeadLayer(StageLayer):
    """The output layer."""

    def forward(self, inputs: Carried) -> Tensor:
        """Return the logits (B, T, V) of hidden states."""
        logits: Tensor = self.part(_unpack(inputs)[0])
        return logits


class BlockArguments:
    """The arguments of blocks besides hidden states: masks, rotary embeddings, position ids.

    They are computed once for all blocks of a stage, and without position ids once for all batches of a
    shape.
    """

    def __init__(self, config: Any, rotary: nn.Module | None):
        self.config = config
        self.rotary = rotary  # not a part of any layer, so it stays fp32 when the layers are cast
        self._key: tuple[Any, ...] | None = None
        self._positions: Tensor | None = None
        self._arguments: dict[str, Any] = {}
        self._whole_rows = WholeRowBounds()

    def arguments(self, hidden: Tensor, positions: Tensor | None, bounds: Tensor | None) -> dict[str, Any]:
        """Return the arguments by name, all that any block takes."""
        name = self.config.get_text_config()._attn_implementation
        key = (hidden.shape, hidden.dtype, hidden.device, name)
        if key != self._key or positions is not self._positions:
            self._key = key
            self._positions = positions
            position_ids = _complete_positions(positions, hidden)
            # Without position ids a row is one sequence. With them transformers reads the values to find
            # sequences, which is a host sync on a GPU.
            masks = create_masks_for_generate(self.config, hidden, None, None, positions)
            self._arguments = {"attention_mask": masks, "position_ids": position_ids, "use_cache": False}
            whole_rows = self._whole_rows if positions is None else None
            self._arguments |= build_bounds_arguments(name, bounds, whole_rows, hidden)
            if self.rotary is not None:
                self._arguments["position_embeddings"] = self.rotary.to(hidden.device)(hidden, position_ids)
        return self._arguments


class BlockLayer(StageLayer):
    """One decoder block."""

    def __init__(self, name: str, part: nn.Module, around: BlockArguments, index: int):
        super().__init__(name, part)
        self.around = around
        self.index = index
        parameters = inspect.signature(part.forward).parameters
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._takes = set(parameters)

    def forward(self, inputs: Carried) -> Carried:
        """Return the block's hidden states, with positions and bounds unchanged."""
        hidden, positions, bounds = _unpack(inputs)
        given = dict(self.around.arguments(hidden, positions, bounds))
        if isinstance(given["attention_mask"], dict):
            given["attention_mask"] = given["attention_mask"][self.around.config.layer_types[self.index]]
        output = self.part(hidden, **{k: v for k, v in given.items() if self._takes_all or k in self._takes})
        return _pack(output[0] if isinstance(output, tuple) else output, positions, bounds)


@dataclass(frozen=True)
class LayeredModel:
    """A whole model as a sequence of layers, in which the blocks follow each other."""

    layers: list[StageLayer]
    first_block: int
    num_blocks: int
    is_tied: bool
    """Whether the last layer, the head, shares the weight of the first, the token embedding."""
    num_parameters: int
    config: Any
    generation_config: Any

    @property
    def head(self) -> nn.Linear:
        """Output layer of the model."""
        head = self.layers[-1].part
        assert isinstance(head, nn.Linear)
        return head

    def names(self) -> list[str]:
        """Return the names of the whole model's weights, a tied one once."""
        layers = self.layers[: len(self.layers) - self.is_tied]
        return [name for layer in layers for name in layer.weights()]


class UncachedGenerator(PreTrainedModel, GenerationMixin):
    """Lets transformers generate with a function that returns logits and keeps no cache.

    Each token costs a forward of all tokens before it.

    Args:
        given: An object with the model's `generation_config`.
        device: The device of the ids.
        last_logits: Function of ids (B, T) and mask (B, T) that returns the last position's logits (B, 1, V).
    """

    config_class = PreTrainedConfig

    def __init__(
        self, given: Any, device: torch.device, last_logits: Callable[[Tensor, Tensor | None], Tensor]
    ):
        super().__init__(PreTrainedConfig())
        self.generation_config = given.generation_config or GenerationConfig()
        self._place = device
        self._last_logits = last_logits

    @property
    def device(self) -> torch.device:
        """Device of the ids."""
        return self._place

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutput:
        """Return the logits of the last position."""
        return CausalLMOutput(logits=self._last_logits(input_ids, attention_mask))


def wrap_logits(logits: Tensor) -> CausalLMOutput:
    """Return the logits as the whole model's output, for objectives."""
    return CausalLMOutput(logits=logits)


def copy_without_values(model: nn.Module, empty: AbstractContextManager[None]) -> nn.Module:
    """Return a copy of a transformers model without parameter values, built in `empty`; buffers have values.

    Raises:
        ModelError: The model is not one of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise _build_cut_error(type(model).__name__, "it is not a model of transformers")
    with empty, no_init_weights():
        other = type(model)(copy.deepcopy(model.config))
    other.tie_weights()
    return other


def cut_into_layers(model: nn.Module) -> LayeredModel:
    """Return the model as a sequence of layers that share the model's parameters.

    Raises:
        ModelError: The architecture cannot be divided; the message names the part that prevents it.
    """
    if not isinstance(model, PreTrainedModel):
        raise _build_cut_error(type(model).__name__, "it is not a model of transformers")
    layered = _cut(model)
    _test_cut(model)
    return layered


def _cut(model: PreTrainedModel) -> LayeredModel:
    kind = model.config.model_type
    if model.config.get_text_config() is not model.config:
        raise _build_cut_error(kind, "it has parts besides a language model")
    if getattr(model.config, "final_logit_softcapping", None):
        raise _build_cut_error(kind, "it caps its logits")  # unnoticed by the test, whose logits are small
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    names = {module: name for name, module in model.named_modules()}
    before: list[StageLayer] = [SingleInputLayer(names[embedding], embedding)]
    after: list[StageLayer] = []
    blocks = None
    rotary = None
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
            blocks = child
        elif name in FINAL_NORM_NAMES:
            after.append(SingleInputLayer(names[child], child))
        elif name in ROTARY:
            rotary = child
        elif isinstance(child, nn.Dropout):
            before.append(SingleInputLayer(names[child], child))
        elif type(child) is nn.Embedding and child is not embedding:
            before.append(PositionLayer(names[child], child))
        elif child is not embedding:
            raise _build_cut_error(kind, f"its part {name} is unknown")
    if blocks is None or len(after) != 1 or not isinstance(head, nn.Linear):
        raise _build_cut_error(kind, "it does not consist of token embedding, blocks, norm and head")
    is_tied = head.weight is embedding.weight
    if is_tied and head.bias is not None:
        raise _build_cut_error(kind, "its tied head has a bias")
    around = BlockArguments(model.config, rotary)
    layers = [
        *before,
        *(BlockLayer(names[block], block, around, index) for index, block in enumerate(blocks)),
        *after,
        HeadLayer(names[head], head),
    ]
    return LayeredModel(
        layers=layers,
        first_block=len(before),
        num_blocks=len(blocks),
        is_tied=is_tied,
        num_parameters=sum(p.numel() for p in model.parameters()),
        config=model.config,
        generation_config=getattr(model, "generation_config", None),
    )


@torch.no_grad()
def _test_cut(model: PreTrainedModel) -> None:
    """Compare the logits of a small model of the class with those of its layers, on a few random tokens."""
    kind = model.config.model_type
    trial = build_small_model(model)
    if trial is None:
        raise _build_cut_error(kind, "the cut cannot be tested on a small copy")
    trial.config._attn_implementation = "eager"  # a CPU has no kernels of flash attention
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    length = min(TRIAL_TOKENS, getattr(model.config, "max_position_embeddings", TRIAL_TOKENS))
    ids = torch.randint(trial.config.vocab_size, (1, length), generator=generator)
    try:
        expected = trial(input_ids=ids, use_cache=False).logits
        carried: Any = ids
        for layer in _cut(trial).layers:
            carried = layer(carried)
        agrees = torch.allclose(carried, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    except Exception as error:  # a block that its model calls with other arguments may raise anything
        raise _build_cut_error(kind, f"its blocks do not run one by one: {str(error)[:120]}") from None
    if not agrees:
        raise _build_cut_error(kind, "its layers, run one after another, give other logits")


def _build_cut_error(kind: str, why: str) -> ModelError:
    return ModelError(
        f"model: a {kind} cannot be cut into pipeline stages, since {why}; use zero_optimization.stage 3"
    )


def _unpack(inputs: Carried) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the layer's input, the positions and the bounds."""
    if isinstance(inputs, Tensor):
        return inputs, None, None
    return inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None


def _pack(hidden: Tensor, positions: Tensor | None, bounds: Tensor | None) -> Carried:
    if positions is None:
        return hidden
    return (hidden, positions) if bounds is None else (hidden, positions, bounds)


def _complete_positions(positions: Tensor | None, hidden: Tensor) -> Tensor:
    """Return the given positions, or 0, 1, 2, ... (1, T)."""
    if positions is not None:
        return positions
    return torch.arange(hidden.shape[1], device=hidden.device)[None]
