"""A vocabulary that grows: rows for new tokens in the input embedding, the output embedding and its bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import ModelError
from pipeline.models.sharding import Sharding

ROWS_AT_ONCE = 4096


def vocabulary_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Those with a row for each token, tied ones once; none where the model does not name its embeddings."""
    found: dict[nn.Parameter, None] = {}
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, getter, lambda: None)()
        if module is not None and module is getattr(model, "score", None):
            continue
        for name in ("weight", "bias"):
            parameter = getattr(module, name, None)
            if isinstance(parameter, nn.Parameter):
                found[parameter] = None
    return list(found)


def num_words(model: nn.Module) -> int | None:
    """How many words a language model, or its stage, knows by its config; None: it does not say."""
    config = getattr(model, "config", None)
    words: int | None = getattr(config, "vocab_size", None)
    return words


@torch.no_grad()
def fill_rows(target: Tensor, values: Tensor) -> None:
    """The first rows of `target` (R, ...) become `values` (r, ...), every further one their mean.

    A token that is new then changes no distribution more than an average one would
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    rows = len(values)
    target[:rows].copy_(values)
    if len(target) > rows:
        # In fp64 and in fixed blocks: the same value whatever the number of threads.
        total = sum(block.double().sum(0) for block in values.split(ROWS_AT_ONCE))
        target[rows:] = torch.as_tensor(total / rows)


def grow_vocabulary(model: Any, rows: int, sharding: Sharding) -> None:
    """Gives a model of transformers that many rows; what has as many or more stays. Collective at ZeRO-3.

    Raises:
        ModelError: it does not say which parameters they are.
    """
    parameters = vocabulary_parameters(model)
    if not parameters:
        raise ModelError(f"model.grow_vocabulary: a {model.config.model_type} does not name its embeddings")
    for old in parameters:
        with sharding.whole([old]):
            if len(old) >= rows:
                continue
            values = torch.empty(rows, *old.shape[1:], dtype=old.dtype)
            fill_rows(values, old.data)
        with sharding.construct():
            new = _Holder(values, old.requires_grad).values
        new.has_new_rows = True  # type: ignore[attr-defined] # an adapter leaves it trained
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[name] = new
    for getter, size in (
        ("get_input_embeddings", "num_embeddings"),
        ("get_output_embeddings", "out_features"),
    ):
        if hasattr(module := getattr(model, getter)(), size):
            setattr(module, size, max(rows, getattr(module, size)))
    model.config.get_text_config().vocab_size = model.vocab_size = rows


class _Holder(nn.Module):
    """A module that is made only for ZeRO-3 to shard its parameter."""

    def __init__(self, values: Tensor, requires_grad: bool):
        super().__init__()
        self.values = nn.Parameter(values, requires_grad)
