"""The logits, or the loss, in whatever a model returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeline.errors import ModelError


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned: a tensor, `.logits`, `["logits"]`, or the first of a tuple.

    Raises:
        ModelError: there are none.
    """
    logits = _found(output, "logits")
    if logits is not None and logits.dim() > 0:
        return logits
    if logits is not None or _found(output, "loss") is not None:
        raise ModelError(
            "the model returned its own loss, and the objective wants logits; to train on that loss write "
            "objective.kind: model_loss"
        )
    raise ModelError(
        f"the model returned {shape_of(output)}; expected logits: a tensor, .logits, ['logits'], or the "
        "first of a tuple"
    )


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned: a tensor, `.loss`, `["loss"]`, or the first of a tuple.

    Raises:
        ModelError: there is none, or it is no mean (it has more than one dimension).
    """
    loss = _found(output, "loss")
    if loss is None or loss.dim() > 1:
        raise ModelError(
            f"objective.kind is model_loss, and the model returned {shape_of(output)}; expected the mean "
            "loss of its samples: a 0-dim tensor, .loss, ['loss'], or the first of a tuple"
        )
    return loss


def _found(output: Any, name: str) -> Tensor | None:
    if isinstance(output, Mapping):
        found = output.get(name)
    elif hasattr(output, name):
        found = getattr(output, name)
    else:
        found = output[0] if isinstance(output, (tuple, list)) and output else output
    return found if isinstance(found, Tensor) else None


def shape_of(output: Any) -> str:
    """What a model or a function returned, for a message."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"
