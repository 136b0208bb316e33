"""Linear layers of a language model that multiply in fp8, by torchao; imported only if a recipe asks for it.

Parameters, their names and their gradients stay as they are: a layer casts its weight, its input and the
gradient of its output for each product. The head, embeddings, routers and norms compute as before. `evaluate`
and `generate` compute without fp8.

torchao is changed in two ways. Scales are powers of two in every recipe: with any other scale, the rounding
of a number depends on what else is in its tensor, so each split would have a loss curve of its own. And a
layer keeps its weight for backward, not a view of it (see _WeightKeepingLinear).
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

WIDTH_MULTIPLE = 16
"""Number that divides every layer width that the kernels accept."""
ROUTER_NAMES = ("gate", "router")
"""Names that models give to the layer that chooses experts."""


def convert_to_fp8(model: PreTrainedModel, recipe: str, device: torch.device) -> None:
    """Let the linear layers of the model's blocks multiply in fp8, by a recipe of torchao.

    Args:
        model: The model, whole, in ZeRO 3's shards or of one stage; changed in place.
        recipe: `tensorwise`, `rowwise` or `rowwise_with_gw_hp`.
        device: The device that trains. On a CPU numbers are cast to fp8 and back, and multiplied in fp32.

    Raises:
        ModelError: No layer of the model can multiply in fp8.
    """
    layers = set(find_fp8_layers(model))
    if not layers:
        raise ModelError(
            f"model.fp8: a {model.config.model_type} has no nn.Linear of widths divisible by "
            f"{WIDTH_MULTIPLE} in its blocks; set model.fp8=none"
        )
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=device.type == "cpu",
        round_scales_to_power_of_2=True,
        pad_inner_dim=True,  # the number of tokens, in the product that gives the weight's gradient
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, _: layer in layers)
    for layer in model.modules():
        if type(layer) is Float8Linear:
            layer.__class__ = _WeightKeepingLinear
    how = "emulated on a CPU: the same numbers, only slower" if config.emulate else "on the GPU"
    log.info("model.fp8: %d linear layers multiply in fp8 (%s), %s", len(layers), recipe, how)


def find_fp8_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Return the layers that can multiply in fp8: those in blocks, of fitting widths, and no routers.

    Rounding would change a router's choice of experts.
    """
    blocks = [block for each in model.modules() if isinstance(each, MODULE_LISTS) for block in each]
    named = {layer: name for block in blocks for name, layer in block.named_modules()}
    return [
        layer
        for layer, name in named.items()
        if type(layer) is nn.Linear
        and name  # empty for a layer that is itself an element of a list, such as a list of heads
        and layer.in_features % WIDTH_MULTIPLE == layer.out_features % WIDTH_MULTIPLE == 0
        and name.rpartition(".")[2] not in ROUTER_NAMES
    ]


class _WeightKeepingLinear(Float8Linear):
    """Keeps its weight for backward, where torchao's layer keeps a view of the weight.

    A view would keep the parameters that ZeRO 3 gathers for a block in memory until backward, and so in the
    end the whole model.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind):
            inputs = inputs.to(torch.get_autocast_dtype(kind))
        output = _Fp8Product.apply(inputs, self.weight, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@torch._dynamo.allow_in_graph
class _Fp8Product(torch.autograd.Function):
    """Computes torchao's product and its gradients from a weight (outputs, inputs), as nn.Linear has it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, mm_config: Any, config: Any) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.configs = {"linear_mm_config": mm_config, "config": config}
        torchao_ctx = SimpleNamespace(save_for_backward=lambda *_: None)
        return matmul_with_hp_or_float8_args.forward(torchao_ctx, inputs, weight.t(), mm_config, config)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        inputs, weight = ctx.saved_tensors
        torchao_ctx = SimpleNamespace(saved_tensors=(inputs, weight.t()), **ctx.configs)
        input_grad, weight_grad, *_ = matmul_with_hp_or_float8_args.backward(torchao_ctx, gradient)
        return input_grad, weight_grad.t(), None, None
