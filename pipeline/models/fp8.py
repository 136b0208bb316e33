"""Linear layers of a language model that multiply in fp8, by torchao; imported only if a recipe asks for it.

Parameters, their names and their gradients stay as they are: a layer casts its weight, its input and the
gradient of its output for each product. The head, embeddings, routers and norms compute as before. `evaluate`
and `generate` compute without fp8.

torchao is changed in two ways. First, scales are powers of two in every recipe. With any other scale, the
rounding of a number depends on the other numbers in its tensor, so the loss would depend on the split.
Second, a layer saves its weight for backward, not a view of the weight (see _WeightKeepingLinear).
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from transformers import PreTrainedModel

from pipeline.errors import ModelError
from pipeline.models.blocks import MODULE_LISTS

log = logging.getLogger(__name__)

WIDTH_MULTIPLE = 16
"""The kernels accept only layers whose widths are multiples of this."""
ROUTER_NAMES = ("gate", "router")
"""Names that models give to the layer that chooses experts."""


def convert_to_fp8(model: PreTrainedModel, recipe: str, device: torch.device) -> None:
    """Let the linear layers of the model's blocks multiply in fp8, by a recipe of torchao.

    Args:
        model: The model, changed in place: whole, sharded by ZeRO 3, or one pipeline stage.
        recipe: `tensorwise`, `rowwise` or `rowwise_with_gw_hp`.
        device: The device that trains. On a CPU fp8 is emulated: numbers are rounded to fp8 and multiplied in
            fp32.

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
    place = "emulated on a CPU: the same numbers, only slower" if config.emulate else "on the GPU"
    log.info("model.fp8: %d linear layers multiply in fp8 (%s), %s", len(layers), recipe, place)


def find_fp8_layers(model: PreTrainedModel) -> list[nn.Linear]:
    """Return the layers that can multiply in fp8: those in blocks, of fitting widths, and no routers.

    Rounding would change a router's choice of experts.
    """
    lists = [module for module in model.modules() if isinstance(module, MODULE_LISTS)]
    blocks = [block for modules in lists for block in modules]
    names = {layer: name for block in blocks for name, layer in block.named_modules()}
    return [layer for layer, name in names.items() if _takes_fp8(layer, name)]


def _takes_fp8(layer: nn.Module, name: str) -> TypeGuard[nn.Linear]:
    """Return whether a layer of this name in its block can multiply in fp8."""
    if not name:  # the layer is itself an element of a list, such as a list of heads
        return False
    if type(layer) is not nn.Linear or name.rpartition(".")[2] in ROUTER_NAMES:
        return False
    return layer.in_features % WIDTH_MULTIPLE == 0 and layer.out_features % WIDTH_MULTIPLE == 0


class _WeightKeepingLinear(Float8Linear):
    """Saves its weight for backward, where torchao's layer saves a view of the weight.

    Such a view would keep the parameters that ZeRO 3 gathers for a block in memory until backward. After the
    forward, the whole model would be in memory.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        device_type = inputs.device.type
        if torch.is_autocast_enabled(device_type):
            inputs = inputs.to(torch.get_autocast_dtype(device_type))
        output = _Fp8Product.apply(inputs, self.weight, self.linear_mm_config, self.config)
        return output if self.bias is None else output + self.bias.to(output.dtype)


@torch._dynamo.allow_in_graph
class _Fp8Product(torch.autograd.Function):
    """Computes torchao's product and its gradients from the weight (outputs, inputs) of an nn.Linear.

    torchao's own function takes the transposed weight, which is a view.
    """

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
