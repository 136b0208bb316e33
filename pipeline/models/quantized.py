"""A frozen base in 4 bits (QLoRA, Dettmers et al. 2023): linear layers with weights in bitsandbytes' NF4.

The module is imported only if a recipe asks for it.

Weights are quantized from the files' values in fp32, whatever dtype the run computes in. The base is then the
same under every split and precision. A merge quantizes the original weights again and needs no copy of the
base in a checkpoint.

ZeRO 3 does not shard a base in 4 bits. The scales are in no parameter, and would have to be gathered with
each weight. The gain would be small: at four ranks, ZeRO 3's shards of a bf16 base take 4 bits a value too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from torch import Tensor, nn

from pipeline.config.model_schema import AdapterConfig, ModelSection
from pipeline.errors import ConfigError, ModelError
from pipeline.models.frozen_base import FrozenBasePlacement, is_transposed
from pipeline.models.sharding import DevicePlacement, Sharding, free_values

BLOCK_SIZE = 64  # number of values that share a scale; the default of bitsandbytes and transformers


@torch.no_grad()
def pack_nf4(weight: Tensor) -> Params4bit:
    """Return a weight (outputs, inputs) in NF4, on its device.

    Two values take one byte, and the scale of each block takes one more.
    """
    codes, state = quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK_SIZE, compress_statistics=True, quant_type="nf4"
    )
    return Params4bit(codes, quant_state=state, blocksize=BLOCK_SIZE, quant_type="nf4", bnb_quantized=True)


@torch.no_grad()
def unpack_nf4(weight: Params4bit) -> Tensor:
    """Return the values of a weight in NF4: (outputs, inputs), fp32.

    The weight is read as rows of one block. On a CPU with AVX-512, bitsandbytes 0.50.2 applies other blocks'
    scales where a row is a multiple of 16 values but not of a block (20 % off).
    """
    state = copy.copy(weight.quant_state)
    number = state.shape.numel()
    blocks = math.ceil(number / BLOCK_SIZE)
    codes = nn.functional.pad(weight.data.flatten(), (0, blocks * BLOCK_SIZE // 2 - weight.numel()))
    state.dtype = torch.float32
    state.shape = torch.Size((blocks, BLOCK_SIZE))
    values: Tensor = dequantize_4bit(codes[:, None], state)
    return values.flatten()[:number].view(weight.quant_state.shape)


class QuantizedBasePlacement(FrozenBasePlacement):
    """Packs each weight of the frozen base into NF4 as soon as its values have been read.

    The parameter itself then has no values. Weights that are drawn, not read, stay in fp32 on the CPU until
    the adapter is added, since drawing visits a weight several times.

    Args:
        others: The placement of all other parameters.
        adapter: The recipe's adapter section.
        model: The recipe's model section, which tells whether all weights are read.
    """

    def __init__(self, others: DevicePlacement, adapter: AdapterConfig, model: ModelSection):
        super().__init__(others, adapter)
        self._are_weights_read = model.pretrained_from is not None or (
            model.weights is not None and model.strict
        )
        self._packed: dict[nn.Parameter, Params4bit] = {}

    def get_packed(self, weight: nn.Parameter) -> Params4bit:
        """Return a frozen weight in NF4, on the device. The values of the parameter itself are freed."""
        if weight not in self._packed:
            self._pack(weight)
        return self._packed[weight]

    def _pack(self, weight: nn.Parameter) -> None:
        values = weight.detach().to(self._device)
        self._packed[weight] = pack_nf4(values.T if self._frozen_weights[weight] else values)
        free_values(weight)

    def _place_parameter(self, parameter: nn.Parameter) -> None:
        if parameter not in self._frozen_weights:
            super()._place_parameter(parameter)
        elif self._are_weights_read and not parameter.is_meta:
            self._pack(parameter)

    def _reserve_parameter(self, parameter: nn.Parameter) -> None:
        if parameter not in self._frozen_weights:
            super()._reserve_parameter(parameter)


def quantize_base(
    model: nn.Module, trained: Iterable[nn.Parameter], sharding: Sharding, dtype: torch.dtype
) -> None:
    """Replace the model's frozen linear layers with bitsandbytes' 4-bit layers.

    Layers without an adapter are quantized too, as transformers' BitsAndBytesConfig does. Otherwise an
    exported adapter would be opened over another base than it was trained on.

    Args:
        model: The model, changed in place.
        trained: Parameters that are trained whole.
        sharding: The QuantizedBasePlacement in which the model was built.
        dtype: The dtype of matrix products, into which weights are dequantized.

    Raises:
        ConfigError: `adapter.weights` has trained a layer whole, but the recipe does not name it.
        ModelError: The model has no frozen linear layer, or one has rows that bitsandbytes misreads on a CPU.
    """
    assert isinstance(sharding, QuantizedBasePlacement)
    layers = sharding.find_frozen_layers(model)
    if not layers:
        raise ModelError("adapter.quantize: the model has no frozen nn.Linear to quantize; leave it out")
    trained_ids = {id(p) for p in trained}
    for name, layer in layers.items():
        if id(layer.weight) in trained_ids:
            raise ConfigError(
                f"adapter.weights: the adapter has trained {name} whole, so it cannot be stored in 4 bits; "
                "name it in adapter.modules_to_save"
            )
        weight = sharding.get_packed(layer.weight)  # type: ignore[arg-type]
        weight.quant_state.dtype = dtype
        outputs, inputs = weight.quant_state.shape
        if weight.device.type == "cpu" and inputs % BLOCK_SIZE:  # see unpack_nf4
            raise ModelError(
                f"adapter.quantize: {name} is {outputs} x {inputs}, but on a CPU bitsandbytes misreads rows "
                f"whose length is not a multiple of {BLOCK_SIZE}; train on a GPU, or without adapter.quantize"
            )
        with torch.device("meta"):
            new = Linear4bit(inputs, outputs, bias=False, compute_dtype=dtype, quant_type="nf4")
        new.weight = weight
        new.bias = layer.bias  # type: ignore[assignment]
        new.quant_state = weight.quant_state
        weight.module = new
        # In evaluation, bitsandbytes would convert the weight to a layout that training cannot read.
        new.support_avx512bf16_for_cpu = False
        new.is_transposed = is_transposed(layer)  # type: ignore[assignment]
        new.train(layer.training)
        model.set_submodule(name, new)


def find_quantized_layers(model: nn.Module) -> Iterator[tuple[str, Linear4bit]]:
    """Yield (name, layer) for each quantized layer, with the name of the layer that it replaced."""
    for name, module in model.named_modules():
        if isinstance(module, Linear4bit):
            yield name.removesuffix(".base_layer"), module


def count_nf4_bytes(weight: Any) -> int:
    """Return the bytes of a weight in NF4 with its scales: 0.5 a value, and about 0.016 for its scale."""
    state = weight.quant_state
    tensors = (weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    return sum(each.numel() * each.element_size() for each in tensors)
