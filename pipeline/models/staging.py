"""Cuts a decoder language model of transformers into layers, from which pipeline stages are built.

The cut is tested before it is used: a small model of the same class is cut in the same way. Its layers, run
one after another, must give the logits of its own forward.
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
from pipeline.models.attention import build_trial_model
from pipeline.models.document_attention import WholeRowBoundsChooser, build_bounds_arguments
from pipeline.planner.rank import FINAL_NORM_NAMES

LayerValue = Tensor | tuple[Tensor, ...]
"""Value that layers pass on: hidden states (B, T, D), for the first layer token ids (B, T).

If the batch has position ids, the value is a tuple (hidden states, position ids (B, T)). A third element is
the bounds of documents; see document_attention.
"""

ROTARY_NAMES = ("rotary_emb",)
"""Attributes of decoders with their rotary embeddings."""

TEST_TOKENS = 16
"""Number of tokens in the row on which a cut is tested."""


class StageLayer(nn.Module):
    """A layer of the cut model: a module of the whole model, and how its forward is called.

    Args:
        name: Name of the module in the whole model.
        part: The module.
    """

    def __init__(self, name: str, part: nn.Module):
        super().__init__()
        self.name = name
        self.part = part

    def get_weights(self) -> dict[str, Tensor]:
        """Return the weights by their names in the whole model, without those of an adapter's base."""
        weights = self.part.state_dict(keep_vars=True)
        return {f"{self.name}.{key}": value for key, value in weights.items() if not is_base(value)}


class SingleInputLayer(StageLayer):
    """A layer whose module has one input: the token embedding, a dropout, or the final norm."""

    def forward(self, inputs: LayerValue) -> LayerValue:
        """Return the part's output, with positions and bounds unchanged."""
        values, positions, bounds = _unpack(inputs)
        return _pack(self.part(values), positions, bounds)


class PositionLayer(StageLayer):
    """The embedding of learned positions."""

    def forward(self, inputs: LayerValue) -> LayerValue:
        """Return the hidden states plus their positions' embeddings."""
        hidden, positions, bounds = _unpack(inputs)
        return _pack(hidden + self.part(_complete_positions(positions, hidden)), positions, bounds)


class HeadLayer(StageLayer):
    """The output layer."""

    def forward(self, inputs: LayerValue) -> Tensor:
        """Return the logits (B, T, V) of hidden states."""
        logits: Tensor = self.part(_unpack(inputs)[0])
        return logits


class BlockArguments:
    """Computes the arguments of blocks besides hidden states: masks, rotary embeddings, position ids.

    All blocks of a stage share one computation. Without position ids, batches of the same shape share one.

    Args:
        config: The model's config.
        rotary: The decoder's rotary embeddings; `None` if it has none.
    """

    def __init__(self, config: Any, rotary: nn.Module | None):
        self.config = config
        self.rotary = rotary  # no submodule of a layer, so it stays fp32 when the layers are cast
        self._key: tuple[Any, ...] | None = None
        self._positions: Tensor | None = None
        self._arguments: dict[str, Any] = {}
        self._whole_rows = WholeRowBoundsChooser()

    def compute(self, hidden: Tensor, positions: Tensor | None, bounds: Tensor | None) -> dict[str, Any]:
        """Return all arguments that any block takes, by name, from an earlier call if nothing has changed."""
        name = self.config.get_text_config()._attn_implementation
        key = (hidden.shape, hidden.dtype, hidden.device, name)
        if key != self._key or positions is not self._positions:
            self._key = key
            self._positions = positions
            position_ids = _complete_positions(positions, hidden)
            # Without position ids a row is one sequence. With position ids, transformers reads their values
            # to find sequences, which synchronizes the host with a GPU.
            masks = create_masks_for_generate(self.config, hidden, None, None, positions)
            self._arguments = {"attention_mask": masks, "position_ids": position_ids, "use_cache": False}
            whole_rows = self._whole_rows if positions is None else None
            self._arguments |= build_bounds_arguments(name, bounds, whole_rows, hidden)
            if self.rotary is not None:
                self._arguments["position_embeddings"] = self.rotary.to(hidden.device)(hidden, position_ids)
        return self._arguments


class BlockLayer(StageLayer):
    """One decoder block.

    Args:
        name: Name of the block in the whole model.
        part: The block.
        block_arguments: Computes the arguments of all blocks of the model.
        index: Index of the block among all blocks of the model.
    """

    def __init__(self, name: str, part: nn.Module, block_arguments: BlockArguments, index: int):
        super().__init__(name, part)
        self.block_arguments = block_arguments
        self.index = index
        parameters = inspect.signature(part.forward).parameters
        self._takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._argument_names = set(parameters)

    def forward(self, inputs: LayerValue) -> LayerValue:
        """Return the block's hidden states, with positions and bounds unchanged."""
        hidden, positions, bounds = _unpack(inputs)
        arguments = dict(self.block_arguments.compute(hidden, positions, bounds))
        masks = arguments["attention_mask"]
        if isinstance(masks, dict):  # one mask for each type of attention
            arguments["attention_mask"] = masks[self.block_arguments.config.layer_types[self.index]]
        if not self._takes_any_name:
            arguments = {name: value for name, value in arguments.items() if name in self._argument_names}
        output = self.part(hidden, **arguments)
        return _pack(output[0] if isinstance(output, tuple) else output, positions, bounds)


@dataclass(frozen=True)
class LayeredModel:
    """A whole model as a sequence of layers. The blocks follow each other without a layer between them."""

    layers: list[StageLayer]
    """All layers, in the order of the forward: first the token embedding, last the head."""
    first_block: int
    """Index in `layers` of the first block."""
    num_blocks: int
    """Number of blocks."""
    is_tied: bool
    """Whether the last layer, the head, shares the weight of the first, the token embedding."""
    num_parameters: int
    """Number of elements of all parameters; a tied weight counts once."""
    config: Any
    """Config of the model."""
    generation_config: Any
    """Generation config of the model; `None` if it has none."""

    @property
    def head(self) -> nn.Linear:
        """Output layer of the model."""
        head = self.layers[-1].part
        assert isinstance(head, nn.Linear)
        return head

    def get_weight_names(self) -> list[str]:
        """Return the names of the whole model's weights; a tied weight has that of the token embedding."""
        layers = self.layers[:-1] if self.is_tied else self.layers
        return [name for layer in layers for name in layer.get_weights()]


class UncachedGenerator(PreTrainedModel, GenerationMixin):
    """Generates with transformers' `generate` and a function that returns logits, without a key-value cache.

    Each token costs a forward of all tokens before it.

    Args:
        source: An object with the model's `generation_config`.
        device: The device of the ids.
        last_logits: Function of ids (B, T) and mask (B, T) that returns the last position's logits (B, 1, V).
    """

    config_class = PreTrainedConfig

    def __init__(
        self, source: Any, device: torch.device, last_logits: Callable[[Tensor, Tensor | None], Tensor]
    ):
        super().__init__(PreTrainedConfig())
        self.generation_config = source.generation_config or GenerationConfig()
        self._ids_device = device
        self._last_logits = last_logits

    @property
    def device(self) -> torch.device:
        """Device of the ids."""
        return self._ids_device

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> CausalLMOutput:
        """Return the logits of the last position."""
        return CausalLMOutput(logits=self._last_logits(input_ids, attention_mask))


def wrap_logits(logits: Tensor) -> CausalLMOutput:
    """Return the logits in an output of transformers, as objectives expect it from a model."""
    return CausalLMOutput(logits=logits)


def copy_without_values(model: nn.Module, empty_context: AbstractContextManager[None]) -> nn.Module:
    """Return a copy of a transformers model whose buffers have values, but whose parameters have none.

    Args:
        model: The model.
        empty_context: Context in which modules are built without values for their parameters.

    Raises:
        ModelError: The model is not one of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise _build_cut_error(type(model).__name__, "it is not a model of transformers")
    with empty_context, no_init_weights():
        model_copy = type(model)(copy.deepcopy(model.config))
    model_copy.tie_weights()
    return model_copy


def cut_into_layers(model: nn.Module) -> LayeredModel:
    """Return the model as a sequence of layers that share the model's parameters.

    Raises:
        ModelError: The architecture cannot be cut; the message says why.
    """
    if not isinstance(model, PreTrainedModel):
        raise _build_cut_error(type(model).__name__, "it is not a model of transformers")
    layered = _cut_untested(model)
    _test_cut(model)
    return layered


def _cut_untested(model: PreTrainedModel) -> LayeredModel:
    """Return the layers of a model, by the names and types of its decoder's modules; see cut_into_layers."""
    kind = model.config.model_type
    if model.config.get_text_config() is not model.config:
        raise _build_cut_error(kind, "it has parts besides a language model")
    if getattr(model.config, "final_logit_softcapping", None):
        raise _build_cut_error(kind, "it caps its logits")  # the test's logits are too small to notice
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    names = {module: name for name, module in model.named_modules()}
    before_blocks: list[StageLayer] = [SingleInputLayer(names[embedding], embedding)]
    after_blocks: list[StageLayer] = []
    blocks = None
    rotary = None
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
            blocks = child
        elif name in FINAL_NORM_NAMES:
            after_blocks.append(SingleInputLayer(names[child], child))
        elif name in ROTARY_NAMES:
            rotary = child
        elif isinstance(child, nn.Dropout):
            before_blocks.append(SingleInputLayer(names[child], child))
        elif type(child) is nn.Embedding and child is not embedding:
            before_blocks.append(PositionLayer(names[child], child))
        elif child is not embedding:
            raise _build_cut_error(kind, f"its part {name} is unknown")
    has_one_norm = len(after_blocks) == 1
    if blocks is None or not has_one_norm or not isinstance(head, nn.Linear):
        raise _build_cut_error(kind, "it does not consist of token embedding, blocks, norm and head")
    is_tied = head.weight is embedding.weight
    if is_tied and head.bias is not None:
        raise _build_cut_error(kind, "its tied head has a bias")
    block_arguments = BlockArguments(model.config, rotary)
    layers = [
        *before_blocks,
        *(BlockLayer(names[block], block, block_arguments, index) for index, block in enumerate(blocks)),
        *after_blocks,
        HeadLayer(names[head], head),
    ]
    return LayeredModel(
        layers=layers,
        first_block=len(before_blocks),
        num_blocks=len(blocks),
        is_tied=is_tied,
        num_parameters=sum(p.numel() for p in model.parameters()),
        config=model.config,
        generation_config=getattr(model, "generation_config", None),
    )


@torch.no_grad()
def _test_cut(model: PreTrainedModel) -> None:
    """Compare the logits of a small model of the class with those of its layers, on a few random tokens.

    Raises:
        ModelError: The logits differ, or they cannot be computed.
    """
    kind = model.config.model_type
    small_model = build_trial_model(model)
    if small_model is None:
        raise _build_cut_error(kind, "the cut cannot be tested on a small copy")
    small_model.config._attn_implementation = "eager"  # a CPU has no kernels of flash attention
    generator = torch.Generator().manual_seed(0)  # does not change the run's random numbers
    length = min(TEST_TOKENS, getattr(model.config, "max_position_embeddings", TEST_TOKENS))
    ids = torch.randint(small_model.config.vocab_size, (1, length), generator=generator)
    try:
        expected = small_model(input_ids=ids, use_cache=False).logits
        value: Any = ids
        for layer in _cut_untested(small_model).layers:
            value = layer(value)
        agrees = torch.allclose(value, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    except Exception as error:  # a block whose model calls it with other arguments may raise anything
        raise _build_cut_error(kind, f"its blocks do not run one by one: {str(error)[:120]}") from None
    if not agrees:
        raise _build_cut_error(kind, "its layers, run one after another, give other logits")


def _build_cut_error(kind: str, why: str) -> ModelError:
    return ModelError(
        f"model: a {kind} cannot be cut into pipeline stages, since {why}; use zero_optimization.stage 3"
    )


def _unpack(inputs: LayerValue) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the ids or hidden states, the position ids and the bounds; `None` for what `inputs` lacks."""
    if isinstance(inputs, Tensor):
        return inputs, None, None
    hidden, positions, *further = inputs
    return hidden, positions, further[0] if further else None


def _pack(hidden: Tensor, positions: Tensor | None, bounds: Tensor | None) -> LayerValue:
    """Return the value to pass on; there are no bounds without positions."""
    if positions is None:
        return hidden
    if bounds is None:
        return hidden, positions
    return hidden, positions, bounds


def _complete_positions(positions: Tensor | None, hidden: Tensor) -> Tensor:
    """Return the position ids (B, T), or 0, 1, 2, ... (1, T) if there are none."""
    if positions is not None:
        return positions
    return torch.arange(hidden.shape[1], device=hidden.device)[None]
