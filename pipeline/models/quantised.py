"""A frozen base in 4 bits (QLoRA, Dettmers et al. 2023): linear layers that hold their weights in NF4, by
bitsandbytes. Imported where it is asked for.

What is quantised are the values of the files in fp32, whatever the run computes in, so that the base is the
same one under every split and precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor, nn

from pipeline.config.model_schema import AdapterConfig, ModelSection
from pipeline.errors import ConfigError, ModelError
from pipeline.models.frozen_base import FrozenBasePlacement, is_transposed
from pipeline.models.sharding import DevicePlacement, Sharding, drop_values

BLOCK = 64  # values that share a scale: bitsandbytes' own number, and transformers'


@torch.no_grad()
def pack_nf4(weight: Tensor) -> Params4bit:
    """Return a weight (outputs, inputs) in NF4, on its device: two values a byte, a byte of scale a block."""
    codes, state = quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return Params4bit(codes, quant_state=state, blocksize=BLOCK, quant_type="nf4", bnb_quantized=True)


@torch.no_grad()
def unpack_nf4(weight: Params4bit) -> Tensor:
    """Return the values of a weight in NF4: (outputs, inputs), fp32.

    Read as rows of one block: bitsandbytes (0.50.2) on a CPU with AVX-512 takes other blocks' scales where
    rows are a multiple of 16 values but not of a block.
    """
    state = copy.copy(weight.quant_state)
    number, blocks = state.shape.numel(), -(-state.shape.numel() // BLOCK)
    codes = nn.functional.pad(weight.data.flatten(), (0, blocks * BLOCK // 2 - weight.numel()))
    state.dtype, state.shape = torch.float32, torch.Size((blocks, BLOCK))
    values: Tensor = dequantize_4bit(codes[:, None], state)
    return values.flatten()[:number].view(weight.quant_state.shape)


class QuantisedBasePlacement(FrozenBasePlacement):
    """In NF4, each weight as soon as it is read.

    It has no values of its own from then on. Where a model is drawn, which takes several looks at a weight,
    they wait in fp32 on the CPU.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig, model: ModelSection):
        """See FrozenBasePlacement.

        Args:
            model: What the recipe says of it.
        """
        super().__init__(others, adapter)
        self._is_read = model.pretrained_from is not None or (model.weights is not None and model.strict)
        self._packed: dict[nn.Parameter, Params4bit] = {}

    def take(self, weight: nn.Parameter) -> Params4bit:
        """Return the weight in NF4, on the device; the parameter loses its values."""
        if weight not in self._packed:
            self._pack(weight)
        return self._packed[weight]

    def _pack(self, weight: nn.Parameter) -> None:
        values = weight.detach().to(self._device)
        self._packed[weight] = pack_nf4(values.T if self._transposed[weight] else values)
        drop_values(weight)

    def _place(self, parameter: nn.Parameter) -> None:
        if parameter not in self._transposed:
            super()._place(parameter)
        elif self._is_read and not parameter.is_meta:
            self._pack(parameter)

    def _reserve(self, parameter: nn.Parameter) -> None:
        if parameter not in self._transposed:
            super()._reserve(parameter)


def quantise_base(
    model: nn.Module, trained: Iterable[nn.Parameter], sharding: Sharding, dtype: torch.dtype
) -> None:
    """Put layers of bitsandbytes' in the place of the model's own.

    Args:
        trained: What is trained whole.
        sharding: A QuantisedBasePlacement, in which the model was made.
        dtype: Of products.

    Raises:
        ConfigError: one of the layers is trained whole, which the recipe's section alone did not say.
        ModelError: the model has no such layers.
    """
    assert isinstance(sharding, QuantisedBasePlacement)
    if not (layers := sharding.layers_of(model)):
        raise ModelError("adapter.quantize: the model has no frozen nn.Linear to hold in 4 bits")
    whole = {id(p) for p in trained}
    for name, layer in layers.items():
        if id(layer.weight) in whole:
            raise ConfigError(
                f"adapter.weights: {name} was trained whole there, so it cannot be held in 4 bits; name it "
                "in adapter.modules_to_save"
            )
        weight = sharding.take(layer.weight)  # type: ignore[arg-type]
        weight.quant_state.dtype = dtype
        outputs, inputs = weight.quant_state.shape
        if weight.device.type == "cpu" and inputs % BLOCK:  # see unpacked
            raise ModelError(
                f"adapter.quantize: {name} is {outputs} x {inputs}, and on a CPU bitsandbytes may read rows "
                f"wrong that are no multiple of {BLOCK}; train on a GPU, or without adapter.quantize"
            )
        with torch.device("meta"):
            new = Linear4bit(inputs, outputs, bias=False, compute_dtype=dtype, quant_type="nf4")
        new.weight, new.bias = weight, layer.bias  # type: ignore[assignment]
        new.quant_state, weight.module = weight.quant_state, new
        # In evaluations it would turn the weight into a form that training cannot read.
        new.support_avx512bf16_for_cpu = False
        new.is_transposed = is_transposed(layer)  # type: ignore[assignment]
        new.train(layer.training)
        model.set_submodule(name, new)


def find_quantised_layers(model: nn.Module) -> Iterator[tuple[str, Linear4bit]]:
    """Yield the quantised layers by the names that the model's own have."""
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            yield name.removesuffix(".base_layer"), module


def count_nf4_bytes(weight: Any) -> int:
    """With all that belongs to it: half a byte a value, and about 0.016 of scales."""
    state = weight.quant_state
    kept = (weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    return sum(each.numel() * each.element_size() for each in kept)
