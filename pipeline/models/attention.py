"""transformers' attention: its table of functions, and whether it keeps packed documents apart.

Imports transformers where a function needs it: see of_transformers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipeline.errors import ModelError
from pipeline.models.of_transformers import is_model
from pipeline.models.sharding import runnable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AttentionFunction = Callable[..., tuple[Any, Any]]
"""(module, query, key, value, mask, **rest) -> (output (B, T, heads, width), weights or None)."""


def attention_function(name: str) -> AttentionFunction:
    """The function behind `attn_implementation: <name>`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS[name]
    return function


def register_attention(name: str, function: AttentionFunction) -> None:
    """Makes `attn_implementation: <name>` known. Models that use it get no mask: the function is causal."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)


def document_mask(config: Any, name: str, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What `attn_implementation: <name>` takes to attend backwards within documents.

    Args:
        positions: (B, T), starting again at every document.
        dtype: Of the queries.

    Returns:
        (B, 1, T, T), boolean for sdpa; None where the function goes by the positions (flash attention).
    """
    from transformers.masking_utils import create_causal_mask

    config = copy.copy(config.get_text_config())
    config._attn_implementation = name
    shape_BTD = torch.empty((*positions.shape, 1), dtype=dtype, device=positions.device)
    mask: Tensor | None = create_causal_mask(config, shape_BTD, None, None, positions)
    return mask


def refuse_leaks(model: nn.Module) -> None:
    """Holds a model to it that `position_ids` which start again keep documents of a row apart.

    Tried on two rows that differ in their first document. Parameters in shards cannot be run here: then what
    transformers says of the model decides.

    Raises:
        ModelError: they do not.
    """
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in parameters):
        raise _leaks(name, "takes no position_ids")
    if not is_model(model):
        return
    mixers = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if model._is_stateful or any("attention" not in mixer or "linear" in mixer for mixer in mixers):
        raise _leaks(name, "passes a state on from token to token")
    if not any(hasattr(p, "ds_numel") for p in model.parameters()) and _leaks_when_tried(model):
        raise _leaks(name, "looks past the position_ids")


@torch.no_grad()
def _leaks_when_tried(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)  # the run's own random numbers stay as they are
    ids_BT = torch.randint(1, config.vocab_size, (1, 8), generator=generator).repeat(2, 1)
    ids_BT[1, :4] = (ids_BT[1, :4] + 1) % config.vocab_size
    positions_BT = torch.arange(4).repeat(2, 2)
    with runnable(model):
        output = model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False)
    one_TV, other_TV = output.logits[:, 4:]
    # Not to the bit: a mixture of experts computes a token in another group.
    return bool((one_TV - other_TV).abs().max() > 1e-4 * one_TV.abs().max())


def _leaks(name: str, why: str) -> ModelError:
    return ModelError(
        f"model: a {name} {why}, so documents in one row would see each other; write "
        "data.separate_documents=false to accept that"
    )
