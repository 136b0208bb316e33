"""Linear layers of a language model that multiply in fp8, by torchao. Imported where it is asked for.

Parameters, their names and gradients stay what they are: a layer casts its weight, its input and the gradient
of its output for each product. The head, embeddings, routers and norms compute as ever.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.models.blocks import MODULE_LISTS

log = logging.getLogger(__name__)

MULTIPLE = 16
"""Of which the kernels take widths."""
ROUTERS = ("gate", "router")
"""What models call the layer that chooses experts."""


def convert_to_fp8(model: PreTrainedModel, recipe: str, device: torch.device) -> None:
    """Has the linear layers of the model's blocks multiply in fp8, by a recipe of torchao.

    All scales are powers of two, by which a cast rounds a number alike whatever else is in its tensor: so
    what a row comes to does not depend on the rows beside it, nor the curve on the split.

    Args:
        model: Whole, in ZeRO 3's shards or of one stage; changed in place.
        recipe: `tensorwise`, `rowwise` or `rowwise_with_gw_hp`.
        device: On a CPU numbers are cast to fp8 and back, and multiplied in fp32.

    Raises:
        ModelError: no layer of the model can.
    """
    layers = set(find_fp8_layers(model))
    if not layers:
        raise ModelError(
            f"model.fp8: a {model.config.model_type} has no nn.Linear of widths divisible by {MULTIPLE} in "
            "its blocks; set model.fp8=none"
        )
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device.type == "cpu",
        round_scales_to_power_of_2=True,
        pad_inner_dim=True,  # the tokens of a micro-batch, in the product that is the weight's gradient
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, _: layer in layers)
    for layer in model.modules():
        if type(layer) is Float8Linear:
            layer.__class__ = _Float8Linear
    how = "emulated on a CPU: the same numbers, only slower" if config.emulate else "on the GPU"
    log.info("model.fp8: %d linear layers multiply in fp8 (%s), %s", len(layers), recipe, how)


def find_fp8_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Those that can: in blocks, of fitting widths, and no router, whose choice a rounding would change."""
    blocks = [block for each in model.modules() if isinstance(each, MODULE_LISTS) for block in each]
    named = {layer: name for block in blocks for name, layer in block.named_modules()}
    return [
        layer
        for layer, name in named.items()
        if type(layer) is nn.Linear
        and name  # a list of layers, such as heads, is no list of blocks
        and layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
        and name.rpartition(".")[2] not in ROUTERS
    ]


class _Float8Linear(Float8Linear):
    """Keeps its weight for backward, where torchao's keeps a view of it.

    A view would hold on to what ZeRO 3 gathers for a block until backward: in the end to the whole model.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        output = _Product.apply(inputs, self.weight, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """torchao's product and its gradients, of a weight as nn.Linear has it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, mm_config: Any, config: Any) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.configs = {"linear_mm_config": mm_config, "config": config}
        theirs = SimpleNamespace(save_for_backward=lambda *_: None)
        return matmul_with_hp_or_float8_args.forward(theirs, inputs, weight.t(), mm_config, config)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        theirs = SimpleNamespace(saved_tensors=(inputs, weight.t()), **ctx.configs)
        of_inputs, of_weight, *_ = matmul_with_hp_or_float8_args.backward(theirs, gradient)
        return of_inputs, of_weight.t(), None, None
