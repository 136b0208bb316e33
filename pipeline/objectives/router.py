"""The load-balancing loss of a mixture of experts, over the global batch (Fedus et al. 2021, equation 4).

E * sum over experts e of f_e * p_e: f_e is how many of the tokens go to expert e, p_e the mean probability
that the routers give it, both over all counted tokens of all layers, as transformers has it for one batch.
Shapes: B batch, T sequence, N = B * T, K experts a token, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError, ModelError
from pipeline.objectives.model_call import unwrapped


@dataclass(frozen=True)
class Router:
    """What a model's config says of its routers."""

    coefficient: float
    """What the loss is multiplied by before it is added to the cross entropy."""
    experts_per_token: int


def router_of(model: Any) -> Router | None:
    """None: the model is no mixture, or its config does not ask for `output_router_logits`.

    Raises:
        ModelError: it asks for them, and does not say how they are weighed.
    """
    config = getattr(unwrapped(model), "config", None)
    if not getattr(config, "output_router_logits", False):
        return None
    coefficient = getattr(config, "router_aux_loss_coef", None)
    experts = getattr(config, "num_experts_per_tok", None)
    if coefficient is None or experts is None:
        raise ModelError(
            "the model's config has output_router_logits, and no router_aux_loss_coef or num_experts_per_tok "
            "to balance its experts by: set output_router_logits to false"
        )
    return Router(float(coefficient), int(experts))


def refuse_router(model: Any, split: str) -> None:
    """Raises ConfigError where the model's routers are to be balanced, which this split does not do."""
    router = router_of(model)
    if router is not None and router.coefficient:
        raise ConfigError(
            f"model.extra.output_router_logits: the routers' auxiliary loss is not computed with {split}; "
            "split the work by ZeRO or sequence parallelism, or set it to false to train without it"
        )


def tokens_per_expert(logits_NE: Sequence[Tensor], counted_BT: Tensor, router: Router) -> Tensor:
    """(E,), fp64: to how many of the counted tokens each expert is given, all layers together."""
    counted_N = counted_BT.flatten().double()
    total_E = torch.zeros(logits_NE[0].shape[-1], dtype=torch.float64, device=counted_N.device)
    for layer_NE in logits_NE:
        chosen_NK = layer_NE.detach().topk(router.experts_per_token, dim=-1).indices
        total_E.index_add_(0, chosen_NK.flatten(), counted_N.repeat_interleave(router.experts_per_token))
    return total_E


def balance_sum(logits_NE: Sequence[Tensor], counted_BT: Tensor, router: Router, tokens_E: Tensor) -> Tensor:
    """The micro-batch's part of the loss, times the number of counted tokens of the global batch.

    Gradients go through the probabilities.

    Args:
        tokens_E: (E,) tokens_per_expert of the global batch.
    """
    counted_N1 = counted_BT.flatten().float()[:, None]
    probability_E = torch.stack(
        [(layer_NE.float().softmax(-1) * counted_N1).sum(0) for layer_NE in logits_NE]
    )
    share_E = tokens_E * (router.experts_per_token / tokens_E.sum().clamp(min=1))
    experts = logits_NE[0].shape[-1]
    return experts * (share_E.float() * probability_E.mean(0)).sum()


def router_logits_of(output: Any) -> tuple[Tensor, ...]:
    """(N, E) of each layer that has experts; none where the model gives none."""
    found = (
        output.get("router_logits") if isinstance(output, dict) else getattr(output, "router_logits", None)
    )
    layers = found if isinstance(found, (tuple, list)) else ()
    return tuple(layer.flatten(0, -2) for layer in layers if isinstance(layer, Tensor))
